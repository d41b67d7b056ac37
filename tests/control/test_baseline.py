"""The speed-up that is measured is the one there is, against the same answers without speculation (2 % on average)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.types import Options, Outcome, StepRecord, Work
from tests.tiny import sequence

TOKENS = 6000  # of a run: some fifteen plain steps among drafting ones


def plain_seconds(length: int) -> float:
    """It grows with the context, so that what was measured at the start is soon wrong."""
    return 1.0 + 0.0002 * length


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("rate", [0.9, 0.7, 0.3])
def test_the_gauge_is_right(captured: bool, rate: float) -> None:
    """On average over some runs: in one, each of the few plain steps is off by up to a tenth, as steps are."""
    errors = [gauge_error(captured, rate, seed) for seed in range(1, 9)]
    assert abs(sum(errors) / len(errors)) < 0.02 and max(map(abs, errors)) < 0.06


def gauge_error(captured: bool, rate: float, seed: int) -> float:
    planner, one, dice = Planner("lm"), sequence([1, 2], max_tokens=10**6), random.Random(seed)
    size = 1 if captured else 0
    options = Options(size, (captured,), {"lm": ((2, 2), (4, 4))}, max_depth=8)
    if captured:  # over padding, when the server began
        planner.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (2, 2), 1.2), ("lm", (4, 4), 1.4)])
    spent = alone = measured = counted = 0.0
    drafting = 0
    while len(one.tokens) < TOKENS:
        draft_plan = planner.plan([Work(one, 1)], options).draft_plans[0]
        depth, drafting = draft_plan.depth, drafting + (draft_plan.nodes > 0)
        held = next((k for k in range(depth) if dice.random() >= rate), depth)
        emitted, took = 1 + held, plain_seconds(len(one.tokens)) * (1 + 0.1 * depth)
        took *= dice.uniform(0.9, 1.1)
        outcomes = [Outcome(one, draft_plan, depth, depth, held, held)] if depth else []
        record = StepRecord(1 + depth, 1, 1, depth, held, emitted, 0, 0, took, 0, took, outcomes)
        record.captured = ("lm" if depth else "none", (depth, depth), 1) if captured else None
        record.waited_s = took / 2
        alone += sum(plain_seconds(len(one.tokens) + k) for k in range(emitted))
        one.tokens.extend([1] * emitted)
        one.cached = len(one.tokens) - 1
        planner.observe(record)
        spent, measured, counted = spent + took, measured + record.plain_s, counted + record.total_s
    assert drafting > 100
    return measured / counted / (alone / spent) - 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_plain_step_is_due_now_and_then_although_drafts_always_pay(captured: bool) -> None:
    planner = Planner("lm", guards=Guards(baseline_interval=50))
    one, size = sequence([1, 2], max_tokens=10**6), int(captured)
    options = Options(size, (captured,), {"lm": ((4, 4),)}, max_depth=8)
    planner.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (4, 4), 1.04)])
    if not captured:
        planner.costs.by_rows = {n: 1 + 0.01 * n for n in range(1, 64)}
    kinds = []
    for _ in range(500):
        plan = planner.plan([Work(one, one.pending)], options)
        kinds.append(plan.reasons[0].kind)
        depth = plan.draft_plans[0].depth
        outcomes = [Outcome(one, plan.draft_plans[0], depth, depth, depth, depth)] if depth else []
        took = 1 + 0.01 * depth
        record = StepRecord(1 + depth, 1, 1, depth, depth, 1 + depth, 0, 0, took, 0, took, outcomes)
        record.captured = ("lm" if depth else "none", (depth, depth), 1) if captured else None
        planner.observe(record)
    due = [i for i, kind in enumerate(kinds) if kind == "baseline"]
    assert {b - a for a, b in pairwise(due)} == {51} and set(kinds) == {"baseline", "pays"}
    assert due[0] == 50 if captured else due[0] <= 10  # nobody has measured a eager one before
    asked = sequence([1, 3], speculation={"depth": 2})
    planner.costs.since_plain[size or -1] = 10**6
    assert planner.plan([Work(asked, 2)], options).reasons[0].kind == "asked"  # what is asked for is done
