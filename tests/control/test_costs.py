"""The cost model: what steps take that were measured, and those that were not."""

from __future__ import annotations

import random

import pytest

from outrider.control.costs import CapturedCosts, CostModel, EagerCosts
from outrider.control.guards import BASELINE_INTERVAL, KEEP, KNOWN_AFTER, UNMEASURED_ROW, Guards
from outrider.control.planner import Planner
from outrider.types import NO_TREE, CapturedShape, DrafterPrefill, TreeShape
from tests.control.build import decoding, outcome, packed, persistent, record, work_of
from tests.sweep import sweep

FOUR = TreeShape(4, 4)
TREES = TreeShape(2, 2), FOUR
ONE = decoding()


def drafting(drafted: int = 4, accepted: int = 0, drafter: str = "lm", **more):
    return record(outcome(ONE, drafter, drafted, accepted), **more)


# ------------------------------------------------------------------------------------------ host-packed steps


def test_steps_between_and_beyond_the_known_ones() -> None:
    costs = EagerCosts()
    assert costs.step(9) / costs.step(1) == pytest.approx((1 + 9 * UNMEASURED_ROW) / (1 + UNMEASURED_ROW))
    costs = EagerCosts()
    costs.by_rows = {2: 1.0, 6: 3.0}
    assert [costs.step(n) for n in (2, 3, 5, 6)] == pytest.approx([1.0, 1.5, 2.5, 3.0])
    assert costs.step(1) < 1.0 and 3.0 < costs.step(12) <= 6.0


def test_steps_and_drafting_are_learned_apart() -> None:
    model = CostModel()
    costs = model.eager
    for seconds in (2.0, 1.0):
        model.observe(record(seconds=seconds))
    assert costs.step(1) == costs.plain(1) == pytest.approx(KEEP * 2 + (1 - KEEP))
    model.observe(record(seconds=9.0, rows=50, known=50, prompt_rows=50))  # a prompt
    assert 50 not in costs.by_rows and not costs.per_prompt_row
    model.observe(drafting(seconds=3.0, draft_s=0.8))
    assert costs.step(5) == pytest.approx(2.2) and costs.drafting({"lm": 3, "lookup": 4}) == pytest.approx(
        0.6
    )


def test_of_two_drafters_the_costlier_is_charged_with_what_the_other_does_not_take() -> None:
    model = CostModel()

    def drafted(seconds: float, **levels: int) -> None:
        model.observe(
            record(*(outcome(ONE, name, n) for name, n in levels.items()), draft_s=seconds, seconds=5.0)
        )

    drafted(0.1, lookup=2)
    drafted(0.8, lookup=4, lm=2)
    assert model.eager.per_level == pytest.approx({"lookup": 0.05, "lm": 0.3})
    drafted(0.0, lookup=4, lm=2)
    assert model.eager.drafting({"lm": 2}) == pytest.approx(KEEP * 0.6)
    assert model.eager.drafting({"lookup": 2}) == pytest.approx(0.1)


def test_a_draft_costs_something_whatever_its_depth() -> None:
    """A head reads what it missed before its first level. With the same cost for each level, deep drafts would look too
    dear after shallow ones, and would not be tried.
    """
    model = CostModel()
    for turn in range(6):
        depth = 1 + turn % 3
        seconds = 0.5 + 0.2 * depth
        model.observe(record(outcome(ONE, "lm", depth), draft_s=seconds, seconds=5.0))
    assert model.eager.per_draft["lm"] == pytest.approx(0.5, abs=1e-6)
    assert model.eager.per_level["lm"] == pytest.approx(0.2, abs=1e-6)


def test_a_disturbed_pass_is_not_taken_for_its_rows() -> None:
    costs = EagerCosts()
    for rows, seconds in ((1, 0.06), (2, 0.04), (4, 0.05)):
        costs.learn_pass(rows, seconds)
    assert costs.curve == {1: 0.04, 2: 0.04, 4: 0.05}


def test_one_quiet_step_says_less_than_the_curve() -> None:
    """Sixteen rows were taken often, by a busy machine; seventeen once, when it was not."""
    costs = EagerCosts()
    costs.curve = {16: 0.075, 17: 0.083}

    def take(rows: int, seconds: float, times: int) -> None:
        for _ in range(times):
            costs.observe(record(outcome(ONE, drafted=rows - 16), sequences=16, seconds=seconds), False)

    take(16, 0.2, KNOWN_AFTER)
    take(17, 0.083, 1)
    assert costs.step(17) == pytest.approx(0.2 * 83 / 75)
    take(17, 0.19, 50)
    assert costs.step(17) == pytest.approx(0.19, rel=0.02)


def test_a_drafters_prefill_is_what_drafting_took_longer_than_usual() -> None:
    model = CostModel()
    assert model.eager.prefill("lm", 9) == 0.0
    model.observe(drafting(seconds=3.0, draft_s=0.8))
    model.observe(drafting(seconds=9.0, draft_s=2.8, drafter_prefill=DrafterPrefill("lm", 100, 2.8)))
    assert model.eager.prefill("lm", 50) == pytest.approx(1.0)
    assert model.eager.step(5) == pytest.approx(2.2)  # nothing else is learned from that step


# ------------------------------------------------------------------------------------------ captured steps


def test_a_captured_step_takes_the_devices_time_and_the_hosts_that_it_cannot_hide() -> None:
    model = CostModel()
    costs, shape = model.captured, CapturedShape("lm", FOUR, 1)
    for _ in range(60):
        model.observe(drafting(seconds=5.0, target_s=4.0, tree=FOUR))
    assert costs.seconds(shape) == pytest.approx(5.0, rel=0.01)
    other = CapturedShape("lm", TreeShape(2, 2), 1)
    costs.ahead[other] = 3.0  # every drafting step of this size waits for the host alike
    assert costs.seconds(other) == pytest.approx(4.0, rel=0.01)
    costs.ahead[CapturedShape("none", NO_TREE, 1)] = 2.0
    assert costs.plain(1) == 2.0  # plain ones do not
    model.observe(drafting(seconds=400.0, target_s=4.0, tree=FOUR))  # a stall counts as one step
    assert costs.seconds(shape) < 5.5


def test_a_plain_step_is_never_charged_with_the_hosts_time() -> None:
    """Several passes at a time hide it."""
    model = CostModel()
    for _ in range(40):
        model.observe(record(seconds=7.0, target_s=4.0, tree=NO_TREE))
    assert not model.captured.exposed and model.captured.plain(1) == pytest.approx(4.0)


def test_the_hosts_time_counts_in_drafting_steps_with_prompts_too() -> None:
    model = CostModel()
    for _ in range(60):
        model.observe(drafting(seconds=5.0, target_s=4.0, tree=FOUR, known=9, prompt_rows=8))
    assert model.captured.exposed[1] == pytest.approx(1.0, rel=0.01)


def test_plain_passes_in_one_captured_step_share_its_time() -> None:
    model = CostModel()
    model.observe(record(seconds=4.8, target_s=4.0, tree=NO_TREE, passes=8))
    assert model.captured.plain(1) == 0.5


def test_a_step_costs_what_it_was_planned_for_however_many_are_left() -> None:
    model = CostModel()
    model.observe(record(seconds=4.5, tree=NO_TREE, size=16))
    assert model.captured.plain(16) == 4.5 and model.captured.plain(8) is None
    assert model.captured.sizes("none") == [16]


def test_captured_shapes_that_were_not_measured() -> None:
    costs, unmeasured = CapturedCosts(), 1 + 4 * UNMEASURED_ROW

    def ratio(drafter: str, tree: tuple[int, int], size: int = 16) -> float:
        return costs.ratio(CapturedShape(drafter, TreeShape(*tree), size))

    def known(drafter: str, tree: tuple[int, int], size: int, seconds: float) -> None:
        costs.learn(drafter, size, [(drafter, TreeShape(*tree), seconds)])

    assert ratio("lm", (4, 4)) == unmeasured
    for size in (1, 16):
        known("none", NO_TREE, size, 2.0)
    known("lm", (4, 4), 1, 3.0)
    assert ratio("lm", (4, 4)) == unmeasured  # another size says nothing
    known("lm", (2, 2), 16, 4.0)
    assert ratio("lm", (4, 4)) == 3.0 and ratio("lm", (2, 6)) == 4.0  # by the rows of another tree
    known("lm", (4, 4), 16, 5.0)
    assert (
        ratio("lm", (4, 4)) == 2.5 and ratio("lm", NO_TREE) == 1.0 and ratio("lookup", (4, 4)) == unmeasured
    )
    assert costs.depths("lm", 16) == [2, 4]
    costs.device[CapturedShape("none", NO_TREE, 16)] = 4.0  # contexts have grown since
    assert ratio("lm", (4, 4)) == 2.5 and costs.seconds(CapturedShape("lm", FOUR, 16)) == 10.0


def test_the_fastest_prefill_of_a_drafter_counts() -> None:
    model = CostModel()
    for seconds in (5.0, 90.0):  # a graph was captured in between
        model.observe(drafting(tree=FOUR, drafter_prefill=DrafterPrefill("lm", 1000, seconds)))
    assert (
        model.captured.prefill("lm", 2000) == pytest.approx(10.0)
        and model.captured.prefill("lookup", 9) == 0.0
    )


# ------------------------------------------------------------------------------------------ baselines and the gauge


@pytest.mark.parametrize("tree", [None, FOUR])
def test_a_baseline_is_due_after_drafting_steps_and_soon_where_no_plain_step_is_known(tree) -> None:
    model, size = CostModel(), 1 if tree else 0
    plain = record(tree=NO_TREE if tree else None)
    for expected in (KNOWN_AFTER, BASELINE_INTERVAL):
        taken = 0
        while not model.baseline_due(size, 1):
            model.observe(drafting(tree=tree))
            taken += 1
        assert taken == expected and not model.baseline_due(size and 2, 2)
        model.observe(plain)


@pytest.mark.parametrize("tree", [None, FOUR])
def test_the_first_plain_step_after_a_prompt_is_no_baseline(tree) -> None:
    model, none = CostModel(), NO_TREE if tree else None
    for _ in range(3):
        model.observe(drafting(seconds=3.0, tree=tree))
    model.observe(record(seconds=9.0, tree=none, sequences=2, known=50, prompt_rows=49))
    model.observe(record(seconds=2.0, tree=none))
    baselines = model.captured.baselines if tree else model.eager.baselines
    assert not baselines.shares
    model.observe(drafting(seconds=3.0, tree=tree))
    model.observe(record(seconds=1.5, tree=none))
    (share,) = baselines.shares.values()
    assert list(share) == [pytest.approx(0.5)]


def test_what_plain_steps_would_have_taken() -> None:
    model = CostModel()
    model.captured.learn("lm", 1, [("none", NO_TREE, 2.0), ("lm", FOUR, 3.0)])
    model.eager.by_rows = {1: 2.0}
    assert (
        model.plain_seconds(record(seconds=5.0))
        == model.plain_seconds(record(seconds=5.0, tree=NO_TREE))
        == 5.0
    )
    assert (
        model.plain_seconds(drafting(accepted=2))
        == model.plain_seconds(drafting(accepted=2, tree=FOUR))
        == 6.0
    )
    beside = dict(sequences=2, known=11, prompt_rows=10)
    model.eager.by_rows[5] = 3.0
    assert model.plain_seconds(drafting(accepted=2, seconds=4.0, rows=15, **beside)) == 3 * 2.0 + 1.0
    assert (
        model.plain_seconds(drafting(accepted=2, seconds=4.0, tree=FOUR, size=1, **beside)) == 3 * 2.0 + 1.0
    )
    alone = record(seconds=5.0, known=10, prompt_rows=10, emitted=0)
    assert model.plain_seconds(alone) == 0.0  # no sequence waited for a token
    gone = drafting(0, tree=FOUR, known=16, prompt_rows=16, waiting=1, size=1, seconds=4.0)
    assert gone.decoding == 0 and model.plain_seconds(gone) == 2.0 + 1.0
    assert CostModel().plain_seconds(gone) == 0.0


@pytest.mark.parametrize(
    ("captured", "rate"),
    sweep([(False, 0.9), (False, 0.7), (True, 0.9), (True, 0.7)], quick=[(False, 0.7), (True, 0.9)]),
)
def test_the_gauge_is_right(captured: bool, rate: float) -> None:
    """The measured speed-up is that against the same answers without drafts. On average over some runs: in one, each of
    the few plain steps is off by up to a tenth, as steps are.
    """
    errors = [gauge_error(captured, rate, seed) for seed in range(1, 4)]
    assert abs(sum(errors) / len(errors)) < 0.04 and max(map(abs, errors)) < 0.06


def gauge_error(captured: bool, rate: float, seed: int) -> float:
    planner, one, dice = (
        Planner("lm", guards=Guards(max_depth=8)),
        decoding(max_tokens=10**6),
        random.Random(seed),
    )
    if captured:  # over padding, when the server began
        known = [("lm", TreeShape(n, n), 1 + 0.1 * n) for n in (2, 4)]
        planner.costs.captured.learn("lm", 1, [("none", NO_TREE, 1.0), *known])
    spent = alone = measured = 0.0
    while len(one.tokens) < 6000:
        (work,) = work_of(one)
        options = persistent([work], trees=TREES) if captured else packed()
        plan = planner.plan([work], options).draft_plans[0]
        held = next((k for k in range(plan.depth) if dice.random() >= rate), plan.depth)
        # It grows with the context, so that what was measured at the start is soon wrong.
        took = (1 + 0.0002 * len(one.tokens)) * (1 + 0.1 * plan.depth) * dice.uniform(0.9, 1.1)
        step = record(
            outcome(one, "lm", plan.depth, held),
            seconds=took,
            tree=TreeShape(plan.depth, plan.depth) if captured else None,
        )
        alone += sum(1 + 0.0002 * (len(one.tokens) + k) for k in range(1 + held))
        one.tokens.extend([1] * (1 + held))
        one.cached = len(one.tokens) - 1
        planner.observe(step)
        spent, measured = spent + took, measured + step.plain_s
    return measured / alone - 1
