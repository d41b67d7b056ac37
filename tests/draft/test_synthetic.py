"""`synthetic`: right as often as it is told to be, and never before the answer is known."""

from __future__ import annotations

from math import sqrt

import pytest

from outrider.control.planner import Planner
from outrider.draft.names import check_parts, parse_draft
from outrider.draft.synthetic import SyntheticDrafter
from outrider.errors import InvalidRequest
from outrider.settings import cache_folder
from outrider.types import NO_DRAFT, DraftPlan, Speculation
from tests.tiny import VOCAB, finish, request, sequence, tiny_engine, tiny_model, tokens_of

RATES = (0.8, 0.6, 0.3)
SIGMAS = 4.0  # of a binomial's mean; the seeds are fixed, so this holds always or never


def asked(how: Speculation, temperature: float):
    return [
        request(f"r{i}", [3 + i, 7, 11], temperature=temperature, max_tokens=120, speculation=how, seed=i)
        for i in range(8)
    ]


def run(engine, requests) -> dict:
    for one in requests:
        engine.add(one)
    return {key: tokens_of(events) for key, events in finish(engine).items()}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_acceptance_is_what_was_asked_for(temperature: float) -> None:
    drafter = SyntheticDrafter(RATES, VOCAB)
    engine = tiny_engine(tiny_model(), Planner("test"), drafter)
    plain = run(engine, asked(Speculation(drafter="none"), temperature))
    outcomes = []
    observe = engine.planner.observe
    engine.planner.observe = lambda record: (outcomes.extend(record.outcomes), observe(record))[1]  # type: ignore[method-assign]
    deep = Speculation(drafter="test", depth=4, nodes=4)
    assert run(engine, asked(deep, temperature)) == plain
    assert len(outcomes) > 250
    for depth in range(4):  # the last rate is that of deeper tokens, too
        reached = [o for o in outcomes if o.deepest > depth and o.accepted >= depth]
        right, rate = sum(o.accepted > depth for o in reached), RATES[min(depth, 2)]
        assert len(reached) > 20
        assert abs(right / len(reached) - rate) < SIGMAS * sqrt(rate * (1 - rate) / len(reached))


def test_a_question_that_was_never_answered_gets_no_draft() -> None:
    drafter, draft_plan = SyntheticDrafter((1.0,), VOCAB), DraftPlan("synthetic", 4, 4)

    def draft(tokens, **options):
        one = sequence(tokens, prompt=2, **options)
        drafter.start(one)
        (made,) = drafter.propose([one], [draft_plan])
        drafter.stop(one)
        return made

    assert draft([1, 2], seed=1) == NO_DRAFT
    draft([1, 2, 5, 6, 7], seed=1)
    assert draft([1, 2, 5], seed=1).tokens == (6, 7)
    assert draft([1, 2, 5], seed=2) == NO_DRAFT
    assert draft([1, 2, 5], seed=1, temperature=0.5) == NO_DRAFT
    assert draft([1, 2, 5], seed=1, max_tokens=9).tokens == (6, 7)  # a shorter answer does not replace it
    assert not drafter.asked


def test_answers_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.draft.synthetic.MAX_ANSWERS", 5)
    drafter = SyntheticDrafter((1.0,), VOCAB)
    for seed in range(8):
        one = sequence([1, 2, 3], prompt=1, seed=seed)
        drafter.start(one)
        drafter.stop(one)
    assert len(drafter.answers) == 5


@pytest.mark.parametrize(
    ("text", "said"), [("", "''"), ("0.8,x", "acceptance 2 is 'x'"), ("1.5", "1.5"), ("0.5,nan", "nan")]
)
def test_rates_that_are_none_are_refused_before_a_model_loads(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_parts(parse_draft(f"lookup+synthetic:{text}"), cache_folder())
