"""Slowdown per request, answer lengths, and the return on a draft that holds memory."""

from __future__ import annotations

import pytest

from outrider.control import history
from outrider.control.guards import GRACE, PROBE_SHARE
from outrider.control.history import AnswerLengths, DraftReturn, Fairness
from outrider.control.reasons import OFF
from outrider.types import Reason, TreeShape
from tests.control.build import decoding, outcome, record

TWO = TreeShape(2, 2)


def test_a_sequence_is_late_beyond_its_bound_and_until_it_has_caught_up() -> None:
    fairness, one, other = Fairness(1.25), decoding(0), decoding(0)
    step = record(outcome(one, drafted=2, accepted=2), outcome(other))
    bound = int(0.25 * GRACE / 0.5)  # steps of 1.5 plain ones
    for taken in range(1, bound + 2):
        fairness.observe(step, 0.5)
        other.tokens.append(1)
        assert fairness.late == ({other} if taken > bound else set())
    assert fairness.late_ones([one, other]) == (set() if 0.25 * len(other.output) else {other})
    fairness.observe(step, 1.5 + 0.25 * 8)
    assert fairness.late_ones([one, other]) == {other} and fairness.late_ones([one]) == set()
    other.tokens += [1] * 40  # a plain step each
    assert fairness.late_ones([one, other]) == set() == fairness.late
    fairness.forget(one)
    assert list(fairness.lag) == [other]


def test_a_sequence_that_ended_is_not_counted() -> None:
    fairness, one = Fairness(1.0), decoding()
    one.finish_reason = "stop"
    fairness.observe(record(outcome(one)), 9.0)
    assert not fairness.lag and not fairness.late


def test_how_long_answers_are() -> None:
    lengths = AnswerLengths()
    new, longest = decoding(0, max_tokens=100), decoding(60, max_tokens=100)
    assert list(lengths.tokens_left([new, longest])) == [50, 20]  # half of what is allowed
    for written, reason in ((10, "stop"), (30, "length"), (90, "abort")):
        ended = decoding(written)
        ended.finish_reason = reason
        lengths.observe(ended)
    left = lengths.tokens_left([new, decoding(10, max_tokens=100), longest, decoding(5, max_tokens=8)])
    assert list(left) == [20, 20, 20, 3]
    assert list(lengths.tokens_left([decoding(29), decoding(100, max_tokens=100)])) == [1, 1]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> DraftReturn:
    monkeypatch.setattr(history, "REPORT_STEPS", 10)
    made = DraftReturn()
    made.watch("lm", 1234)
    return made


def observe(
    returns: DraftReturn, plain: float, drafter: str = "lm", tree=None, kind="pays", steps: int = 10
) -> None:
    for _ in range(steps):
        step = record(outcome(decoding(), drafter, 2, 1), tree=tree, plain_s=plain, reasons=(Reason(kind),))
        returns.observe(step)


@pytest.mark.parametrize("tree", [None, TWO])
def test_a_draft_that_does_not_pay_is_reported_once_and_taken_back_when_it_does(
    watched, tree, caplog
) -> None:
    for _ in range(2):
        observe(watched, 1 + PROBE_SHARE / 2, tree=tree)
    assert watched.unprofitable == {"lm": 1234}
    (line,) = caplog.messages
    assert "lm does not pay" in line and "1234 tokens" in line and "--release-draft" in line
    observe(watched, 1 + 2 * PROBE_SHARE, tree=tree)
    assert watched.unprofitable == {} and len(caplog.messages) == 1


def test_steps_in_which_it_could_not_draft_do_not_count(watched) -> None:
    observe(watched, 0.5, kind=OFF.kind, steps=50)
    observe(watched, 0.5, kind="asked", steps=50)
    observe(watched, 0.5, steps=9)
    assert not watched.unprofitable
    watched.forget("lm")  # other weights
    observe(watched, 0.5, steps=9)
    assert not watched.unprofitable
    observe(watched, 0.5, steps=1)
    assert watched.unprofitable


def test_drafters_of_a_step_share_what_it_took_longer_by_their_draft_tokens(watched) -> None:
    """A plain step takes 1, this one 1.2. Each of two accepted tokens saves half a plain step of the two."""
    watched.watch("lookup", 1)
    step = record(
        outcome(decoding(), "lm", 3, 0), outcome(decoding(), "lookup", 1, 2), seconds=1.2, plain_s=2.0
    )
    watched.observe(step)
    assert watched.gained == pytest.approx({"lm": -0.15, "lookup": 1.0 - 0.05})
