"""A speed-up is what the rounds come to, and known as well as they agree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.bench.answering import Answers, Meter, TimedStep
from outrider.bench.peers import Run
from outrider.bench.show import verdicts
from outrider.bench.tally import NOISY, Tally, acceptance_by_depth, noise, speedup, within
from outrider.types import DraftPlan, Event, Outcome, Reason, StepRecord
from tests.tiny import sequence


def test_a_speed_up_is_the_median_of_rounds_and_the_mean_of_groups() -> None:
    assert speedup({0: [2.0, 2.0, 9.0], 1: [0.5, 0.5, 0.1]}) == pytest.approx(1.0)
    assert speedup({0: [1.5]}) == pytest.approx(1.5)


def test_it_is_known_as_well_as_it_says() -> None:
    """In 19 of 20 cases the truth lies within, whether the noise is small or large."""
    chance = random.Random(4)
    for error, groups, rounds in ((0.02, 1, 5), (0.1, 1, 8), (0.05, 4, 3)):
        inside = 0
        for _ in range(400):
            true = {g: chance.uniform(0.7, 3.0) for g in range(groups)}
            seen = {g: [t * chance.lognormvariate(0, error) for _ in range(rounds)] for g, t in true.items()}
            bound = within(seen)
            assert bound is not None
            inside += abs(speedup(seen) / speedup({g: [t] for g, t in true.items()}) - 1) < bound
        assert 0.92 <= inside / 400 <= 0.995, (error, groups, rounds, inside)


def test_few_rounds_say_nothing() -> None:
    assert within({0: [1.0, 1.1, 1.0, 0.9]}) is None  # four are too few
    assert within({g: [1.0] for g in range(9)}) is None  # groups differ by what is in them, not by chance
    assert within({0: [1.0] * 5}) == 0.0


def test_acceptance_by_depth_counts_what_was_reached() -> None:
    rates = acceptance_by_depth([(3, 3), (3, 1), (3, 0), (1, 1)])
    assert [(one["depth"], one["of"]) for one in rates] == [(1, 4), (2, 2), (3, 1)]
    assert [one["rate"] for one in rates] == pytest.approx([3 / 4, 1 / 2, 1.0])
    assert acceptance_by_depth([]) == []


def record(drafted: int = 0, **times: float) -> StepRecord:
    outcome = Outcome(sequence([1, 2]), DraftPlan("lookup", 4, 4), drafted, drafted, drafted - 1, drafted - 1)
    stages = {"plan_s": 0.0, "draft_s": 0.0, "target_s": 0.0, "verify_s": 0.0, "total_s": 0.0} | times
    return StepRecord(1, 1, 1, drafted, 0, 1, **stages, outcomes=[outcome])


def answers(rate: float, *records: StepRecord, steps: list[float] | None = None) -> Answers:
    run = Run([[1] * 11], 1.0, 1.0 + 10 / rate, 1)
    timed = [TimedStep(0.0, 1, 1, 1, 1, 1, s) for s in steps or [0.01]]
    return Answers(run, 10, 4, 3, timed, 0.2, 0.0, list(records), [0.1], [(10, 10 / rate)], [0.01, 0.03])


def test_what_a_way_comes_to() -> None:
    plain, method = Tally(), Tally()
    base = answers(10.0, steps=[0.01, 0.03])  # two steps of one token
    for group, rate in ((0, 20.0), (1, 30.0)):
        plain.add(group, base, base.run)
        step = record(3, plan_s=0.001, draft_s=0.002, target_s=0.01, verify_s=0.003, total_s=0.02)
        step.plain_s, step.reasons = 0.03, (Reason("pays", 3), Reason("probe", 2))
        method.add(
            group, answers(rate, step, replace(step, known=7, prompt_rows=7, plain_s=0.0)), base.run
        )  # the other one reads a prompt
    found = method.figures(plain)
    assert found["ratio"] == pytest.approx((2.0 * 3.0) ** 0.5) and found["worst"] == pytest.approx(2.0)
    assert (found["tok_s"], found["ratio_within"], found["tokens_per_step"]) == (
        pytest.approx(25.0),
        None,
        1.1,
    )
    # 1 s of prompt each, then 1 s for ten tokens, a half and a third.
    assert found["total_ratio"] == pytest.approx((2.0 / 1.5 * 2.0 / (4 / 3)) ** 0.5)
    assert found["gauge"] == pytest.approx(1.5) and plain.figures(plain)["gauge"] is None
    assert found["reasons"] == {"pays": 4, "probe": 4}
    assert found["tpot_ms"]["max"] == pytest.approx(50.0)
    assert found["held"] == 0.75 and [one["of"] for one in found["acceptance"]] == [4, 4, 4]
    assert found["itl_ms"]["p50"] == pytest.approx(20.0) and found["ttft_ms"]["p99"] == pytest.approx(100.0)
    stages = {"plan": 1.0, "draft": 2.0, "target": 10.0, "verify": 3.0, "other": 4.0, "total": 20.0}
    assert found["stages_ms"] == pytest.approx(stages)
    assert plain.figures(plain)["ratio_within"] == 0.0
    assert found["full_batch_ratio"] == pytest.approx(2.0)  # a step takes half as long while nobody has ended


def test_latencies_have_the_lowest_and_the_highest_of_their_rounds() -> None:
    """A round has all groups: the first has 0.1 and 0.3 s to the first token, the second 0.2 s twice."""
    method, base = Tally(), answers(10.0)
    for number, group, first in ((1, 0, 0.1), (1, 1, 0.3), (2, 0, 0.2), (2, 1, 0.2)):
        method.add(group, replace(base, firsts=[first]), base.run)
        rounds = method.figures(method)["ttft_ms"].get("rounds")
        assert (rounds is None) == (number == 1)
    assert rounds["p50"] == pytest.approx([200.0, 200.0]) and rounds["p99"] == pytest.approx([200.0, 298.0])


def test_the_gauge_counts_a_step_for_everyone_who_waits_for_it() -> None:
    method, base = Tally(), answers(10.0)
    full, alone = record(total_s=1.0), record(total_s=1.0)
    full.sequences, full.known, full.prompt_rows, full.plain_s, alone.plain_s = 5, 24, 20, 3.0, 1.0
    method.add(0, answers(10.0, full, alone), base.run)
    assert method.figures(method)["gauge"] == pytest.approx((4 * 3.0 + 1.0) / 5)


def test_a_disturbed_machine_is_seen_in_steps_that_should_take_the_same() -> None:
    """Also where one way was disturbed and the other was not."""
    base = answers(10.0, steps=[0.01] * 20)

    def found(*methods: list[float]) -> float:
        tallies = []
        for steps in methods:
            tallies.append(Tally())
            tallies[-1].add(0, answers(10.0, steps=steps), base.run)
        return noise(tallies, 1)

    quiet, loud = found([0.01] * 18 + [0.0105] * 2, [0.01] * 20), found([0.01] * 20, [0.024] * 20)
    assert quiet < 1.06 and loud == pytest.approx(2.4) and quiet < NOISY < loud
    assert found([0.01] * 4, [0.03] * 4) == 1.0  # too few to say
    plain, drafting = Tally(), Tally()
    for tally, first, drafted in ((plain, 3.0, 0), (drafting, 1.5, 8)):
        tally.add(0, replace(base, firsts=[first] * 4, drafted=drafted), base.run)
    assert noise([plain, drafting], 1) == pytest.approx(2.0)  # prompts were read in half the time
    plain.firsts = {1: [1.0] * 4}
    assert noise([plain, drafting], 1) == pytest.approx(1.0)  # drafts for others may have held them up
    method = {"ratio": 1.0, "compared": 1, "differing": 0}

    def said(noisy: float) -> str:
        cell = {"methods": {"plain": method, "auto": method}, "noise": noisy}
        return " ".join(verdicts({"chat": {"batches": {"1": cell}}}))

    assert "noisy" in said(loud) and "noisy" not in said(quiet)


def test_where_a_way_loses_is_said() -> None:
    def method(ratio: float) -> dict:
        return {
            "ratio": ratio,
            "compared": 1,
            "differing": 0,
            "itl_ms": {"p99": 10 / ratio},
            "tpot_ms": {"p99": 20 / ratio**0.5},
        }

    cells = {"1": {"noise": 1.0, "methods": {"plain": method(1), "lookup": method(0.7), "auto": method(0.99)}},
             "4": {"noise": 1.0, "methods": {"plain": method(1), "lookup": method(1.4), "auto": method(1.3)}},
             }  # fmt: skip
    said = list(verdicts({"chat": {"batches": cells}}))
    assert "lookup: below 0.98x in 1 of 2; lowest 0.70x (chat, batch 1)" in said
    assert "lookup: p99 between two events at most 1.43x plain's (chat, batch 1)" in said
    assert "lookup: p99 time per token at most 1.20x plain's (chat, batch 1)" in said
    assert "auto: nowhere below 0.98x; lowest 0.99x (chat, batch 1)" in said


def test_time_between_tokens_counts_once_everyone_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a batch waits while the prompt of the second is read: that is not decoding."""
    now = iter(range(100))
    monkeypatch.setattr("outrider.bench.answering.time.perf_counter", lambda: float(next(now)))
    meter = Meter(2)
    for received in (["a"], ["a", "b"], ["b"], ["a", "b"]):
        for name in received:
            meter.received(Event(name, 0, (1,), ""))
        meter.stepped(record())
    assert [(step, at) for step, at, _ in meter.received_at["a"]] == [(0, 0.0), (1, 2.0), (3, 7.0)]
    assert meter.gaps() == [5.0, 2.0, 3.0]  # not from a's first token to its second
    assert meter.own() == [(2, 7.0), (2, 5.0)]


def test_an_answer_counts_from_its_own_first_token() -> None:
    """One that had drafts accepted while another's prompt was read is the faster for it."""
    run = Run([[1] * 11, [1] * 11], 9.0, 19.0, 12)  # the first one had ended before the second began
    done = replace(answers(1.0), run=run, own=[(10, 5.0), (10, 10.0)])
    assert done.rate == pytest.approx(2 * 20 / 15)
    alone = replace(answers(1.0), own=[(10, 4.0)])
    assert alone.rate == pytest.approx(2.5)
    short = replace(answers(4.0), own=[(0, 0.0)])
    assert short.rate == pytest.approx(4.0)  # over everything
