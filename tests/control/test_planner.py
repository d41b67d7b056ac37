"""Plans of staged rows: when there is a draft, how deep, when drafting stops and when it is probed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.control.acceptance import AcceptanceRate
from outrider.control.costs import CostModel
from outrider.control.guards import Guards
from outrider.control.planner import LATE, USUAL_PROMPT_ROWS, Planner
from outrider.control.rest import EVERY, HELD, MOST, MOST_CAPTURED, Rest
from outrider.control.trees import NO_TREE
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Outcome, Plan, StepRecord, Work
from tests.tiny import sequence

FREE = dict.fromkeys(range(1, 64), 1.0)  # rows cost nothing: every draft pays
GUARDS = Guards()
KNOWN = Guards(start_depth=GUARDS.max_depth)  # as if tokens had been right for every text before
HOT = (0, 0.4, 0.8, 1.2)


def planner(costs: dict[int, float] | None = FREE, guards: Guards = KNOWN, **options) -> Planner:
    made = Planner("lookup", guards=guards, **options)
    made.costs.by_rows = dict(costs or {})
    return made


def step(
    sequences, draft_plans=None, rows=1, total=1.0, draft=0.0, drafted=0, accepted=0, known=None
) -> StepRecord:
    draft_plans = draft_plans or [NO_DRAFT_PLAN] * len(sequences)
    outcomes = [
        Outcome(s, b, drafted, drafted, accepted, accepted)
        for s, b in zip(sequences, draft_plans, strict=True)
    ]
    n = len(sequences)
    return StepRecord(
        rows, n, n if known is None else known, drafted, accepted, n, 0, draft, 0, 0, total, outcomes
    )


def planned(made: Planner, sequences, batch: int | None = None) -> Plan:
    """A plan for sequences that decode, in a batch whose others read their prompts."""
    for s in sequences:
        s.cached = len(s.tokens) - 1
    work = [Work(s, 1) for s in sequences]
    others = [Work(sequence([1, 2, 3]), 1) for _ in range((batch or len(work)) - len(work))]
    plan = made.plan([*work, *others], Options())
    assert plan.draft_plans[len(work) :] == (NO_DRAFT_PLAN,) * len(others) and set(
        kinds(plan)[len(work) :]
    ) <= {"prefill"}
    return Plan(plan.draft_plans[: len(work)], plan.reasons[: len(work)])


def kinds(plan: Plan) -> tuple[str, ...]:
    return tuple(reason.kind for reason in plan.reasons)


def only(made: Planner, s, batch: int = 1) -> tuple[DraftPlan, str]:
    plan = planned(made, [s], batch)
    return plan.draft_plans[0], plan.reasons[0].kind


def test_drafts_by_default():
    draft_plan, reason = only(planner(), sequence([1, 2]))
    assert (
        reason == "pays"
        and draft_plan.drafter == "lookup"
        and draft_plan.depth == GUARDS.max_depth
        and draft_plan.nodes >= draft_plan.depth
    )


def test_off_in_large_batches_where_a_number_is_set():
    s, bounded = sequence([1, 2]), Guards(max_batch=16)
    assert only(planner(guards=bounded), s, 16)[1] == "pays"
    assert only(planner(guards=bounded), s, 17) == (NO_DRAFT_PLAN, "batch")
    assert only(planner(), s, 17)[1] == "pays"  # else what is measured decides
    assert only(planner({n: 1.0 + (n > 16) for n in range(1, 64)}), s, 17)[1] == "pays"
    some = [sequence([1, i]) for i in range(17)]
    assert set(kinds(planned(planner({n: 0.1 * n for n in range(1, 64)}), some))) == {"below break-even"}


def test_off_at_high_temperature():
    edge = GUARDS.max_temperature
    assert only(planner(), sequence([1, 2], temperature=edge, top_k=40))[1] == "pays"
    assert only(planner(), sequence([1, 2], temperature=edge + 0.01, top_k=40)) == (
        NO_DRAFT_PLAN,
        "temperature",
    )


@pytest.mark.parametrize(
    ("sampling", "flat"),
    [
        ({}, True),
        ({"top_k": 1000}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.001}, True),
        ({"top_k": 40}, False),
        ({"top_p": 0.95}, False),
        ({"min_p": 0.05}, False),
    ],
)
def test_off_sooner_where_sampling_is_nearly_flat(sampling, flat):
    edge = GUARDS.flat_temperature
    assert only(planner(), sequence([1, 2], temperature=edge, **sampling))[1] == "pays"
    beyond = only(planner(), sequence([1, 2], temperature=edge + 0.01, **sampling))
    assert beyond == (NO_DRAFT_PLAN, "flat") if flat else beyond[1] == "pays"


def test_depth_falls_with_temperature():
    """As rows of a CPU cost, and as those of a GPU."""

    def depths(row: float, **sampling) -> list[int]:
        made = planner({n: 1 + row * n for n in range(1, 64)})
        return [only(made, sequence([1, i], temperature=t, **sampling))[0].depth for i, t in enumerate(HOT)]

    for row in (0.02, 0.1):
        flat, filtered = depths(row), depths(row, top_k=40)
        assert flat == sorted(flat, reverse=True) and filtered == sorted(filtered, reverse=True)
        assert flat[0] == filtered[0] and flat[0] > flat[-1] > 0
        assert all(a <= b for a, b in zip(flat, filtered, strict=True)) and flat != filtered


def test_trees_only_in_small_batches():
    s = [sequence([1, i]) for i in range(6)]
    few, many = planned(planner(), s[:2]), planned(planner(), s)
    assert all(draft_plan.nodes > draft_plan.depth for draft_plan in few.draft_plans) and all(
        draft_plan.nodes == draft_plan.depth for draft_plan in many.draft_plans
    )


def test_no_draft_where_rows_cost_what_they_bring():
    made = planner({n: float(n) for n in range(1, 64)})
    assert only(made, sequence([1, 2])) == (NO_DRAFT_PLAN, "below break-even")


def idle_steps(made: Planner, s) -> int:
    """Plain steps until a probe."""
    steps = 0
    while only(made, s)[1] != "probe":
        made.observe(step([s]))
        steps += 1
        assert steps < 10_000
    return steps


def test_measured_costs_turn_it_off_and_a_probe_turns_it_on_again():
    made, s = planner({}), sequence([1, 2], max_tokens=10_000)
    assert only(made, s)[0].nodes > 0  # nothing measured: try
    made.observe(step([s], rows=1, total=1.0))
    for _ in range(40):  # drafts that are always rejected, in steps twice as long
        draft_plan, _ = only(made, s)
        if draft_plan is NO_DRAFT_PLAN:
            break
        made.observe(step([s], [draft_plan], rows=1 + draft_plan.nodes, total=2.0, drafted=draft_plan.nodes))
    assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")
    idle_steps(made, s)
    for _ in range(30):  # now they are accepted, and their steps turn out cheap
        draft_plan, _ = only(made, s)
        draft_plan = draft_plan if draft_plan.nodes else DraftPlan("lookup", 2, 2)
        made.observe(
            step(
                [s],
                [draft_plan],
                rows=1 + draft_plan.nodes,
                total=1.1,
                drafted=draft_plan.depth,
                accepted=draft_plan.depth,
            )
        )
    assert only(made, s)[1] == "pays"


@pytest.fixture
def tireless(monkeypatch):
    """Every step is planned anew."""
    monkeypatch.setattr("outrider.control.rest.MOST", 0)


@pytest.mark.parametrize("row, draft, depth", [(0.01, 0.0, 2), (0.1, 0.05, 2), (0.1, 0.2, 1)])
def test_probes_take_a_small_share_of_the_time(row, draft, depth, tireless):
    made, s = planner({n: 1 + row * (n - 1) for n in range(1, 64)}), sequence([1, 2], max_tokens=10_000)
    made.costs.per_level["lookup"] = draft
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.0, 0.0)}
    waited = idle_steps(made, s)
    draft_plan, _ = only(made, s)
    assert draft_plan.nodes == draft_plan.depth == depth  # where two levels cost much, one
    lost = depth * (row + draft)
    assert waited + 1 == pytest.approx(max(GUARDS.probe_interval, lost / GUARDS.probe_share), abs=1)
    made.observe(step([s], [draft_plan], rows=1 + depth, total=1 + lost, drafted=depth))
    assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")  # not again at once


def test_a_sequence_among_many_is_probed_in_its_turn(tireless):
    made, some = planner(dict.fromkeys(range(1, 64), 1.0)), [sequence([1, i]) for i in range(4)]
    for s in some:
        made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.0, 0.0)}
    for _ in range(4 * int(GUARDS.probe_interval) - 2):
        assert set(kinds(planned(made, some))) == {"below break-even"}
        made.observe(step(some))
    made.observe(step(some))
    assert set(kinds(planned(made, some))) == {"probe"}


def counted(plans) -> list[int]:
    """One entry for every plan that is made from now on."""
    looked: list[int] = []
    plans.plan, plan = lambda *given: looked.append(1) or plan(*given), plans.plan
    return looked


def test_plans_without_drafts_hold_for_some_steps():
    made, s, other = planner({n: float(n) for n in range(1, 64)}), sequence([1, 2]), sequence([1, 3])
    looked = counted(made.staged)
    for _ in range(4 * EVERY):
        assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")
    most = len(looked)
    assert 2 * EVERY < most < 3 * EVERY
    for _ in range(10 * (MOST + 1)):
        only(made, s)
    assert len(looked) - most == 10
    planned(made, [s, other])  # one more is planned for, and that holds for both
    planned(made, [other, s])
    assert len(looked) - most == 11
    only(made, s)  # rows of one cost another share than rows of two
    assert len(looked) - most == 12
    made.forget(s)
    assert made.rest.draft_plans == {}
    only(made, s)
    assert len(looked) - most == 13


def test_captured_plans_without_drafts_hold_for_those_that_are_left():
    made, some = Planner("lookup", choices=("lookup",)), [sequence([1, i]) for i in range(8)]
    trees = {"lookup": ((1, 1), (4, 4))}
    made.learn("lookup", 8, [("none", (0, 0), 1.0), ("lookup", (1, 1), 3.0), ("lookup", (4, 4), 9.0)])
    looked = counted(made.resident)

    def plan(sequences, reading=(), size=8):
        for one in sequences:
            one.cached = len(one.tokens) - 1
        work = [Work(one, 1) for one in sequences] + [Work(one, 40) for one in reading]
        options = Options(
            size, (True,) * len(sequences) + (False,) * len(reading), trees, model_free=("lookup",)
        )
        return made.plan(work, options)

    for _ in range(EVERY * (MOST_CAPTURED + 8) * MOST_CAPTURED):
        assert {why.kind for why in plan(some).reasons} == {"below break-even"}
    made.rest.left, before = MOST_CAPTURED, len(looked)
    left = plan(some[:5])
    assert len(left.draft_plans) == len(left.reasons) == 5 and len(looked) == before
    assert plan(some[:4], size=4).draft_plans == (NO_DRAFT_PLAN,) * 4  # other steps, which have another price
    assert len(looked) == before + 1


def test_where_nothing_pays_it_does_not_beside_prompts_nor_for_one_more():
    made, some, prompt = (
        Planner("lookup", choices=("lookup",)),
        [sequence([1, i]) for i in range(5)],
        sequence([1] * 50),
    )
    trees = {"lookup": ((1, 1), (4, 4))}
    made.learn("lookup", 8, [("none", (0, 0), 1.0), ("lookup", (1, 1), 3.0), ("lookup", (4, 4), 9.0)])
    looked = counted(made.resident)

    def kinds_of(sequences, reading=(), rests: bool = False) -> list[str]:
        """Of a plan that is made anew, or not."""
        before, made.rest.left = len(looked), MOST_CAPTURED
        for one in sequences:
            one.cached = len(one.tokens) - 1
        work = [Work(one, 1) for one in sequences] + [Work(one, 40) for one in reading]
        staged = (True,) * len(sequences) + (False,) * len(reading)
        plan = made.plan(work, Options(8, staged, trees, model_free=("lookup",), after_prompts=False))
        assert len(looked) == before + (not rests) and all(
            draft_plan == NO_DRAFT_PLAN for draft_plan in plan.draft_plans
        )
        return [why.kind for why in plan.reasons]

    unpaid = ["below break-even"] * 5
    assert kinds_of(some) == unpaid
    assert kinds_of(some, [prompt], rests=True) == [*unpaid, "prefill"]
    assert kinds_of([*some, prompt], rests=True) == [*unpaid, "below break-even"]  # its prompt is read
    off = sequence([1, 7], speculation=False)
    assert kinds_of([*some, off]) == [*unpaid, "off"]  # whoever asks for something gets that
    assert kinds_of([*some, off, prompt], rests=True) == [*unpaid, "off", "below break-even"]
    assert kinds_of(some, [sequence([2] * 50)], rests=True) == [*unpaid, "prefill"]
    made.rest.size = 0
    assert kinds_of(some, [sequence([2] * 50)]) == [*unpaid, "prefill"]
    assert kinds_of(some) == unpaid  # what did not pay beside a prompt may pay without


def test_drafts_hold_for_some_captured_steps_where_the_device_waits_for_the_host():
    made, one, other = Planner("lookup", choices=("lookup",)), sequence([1, 2]), sequence([1, 3])
    one.cached = other.cached = 1
    trees = {"lookup": ((4, 4),)}
    made.learn("lookup", 2, [("none", (0, 0), 1.0), ("lookup", (4, 4), 1.01)])
    looked, many = counted(made.resident), 4 * (HELD + 1)

    def steps(waited: float, *sequences) -> int:
        """Plans that were made for so many steps."""
        before = len(looked)
        for _ in range(many):
            options = Options(2, (True,) * len(sequences), trees, model_free=("lookup",))
            plan = made.plan([Work(s, 1) for s in sequences], options)
            assert [
                (draft_plan.depth, why.kind)
                for draft_plan, why in zip(plan.draft_plans, plan.reasons, strict=True)
            ] == [(4, "pays")] * len(sequences)
            outcomes = [
                Outcome(s, draft_plan, 4, 4, 4, 4)
                for s, draft_plan in zip(sequences, plan.draft_plans, strict=True)
            ]
            n = len(sequences)
            record = StepRecord(5 * n, n, n, 4 * n, 4 * n, 5 * n, 0, 0, 1.0, 0, 1.01, outcomes)
            record.captured, record.waited_s = ("lookup", (4, 4), 2), waited
            made.observe(record)
        return len(looked) - before

    assert steps(0.5, one) == many
    assert steps(0.05, one) == 4 + 1  # the first was made before anybody knew
    made.rest.left = HELD
    assert steps(0.05, one, other) == 4  # somebody came: anew
    made.rest.left = HELD
    assert steps(0.05, one) == -(-(many - HELD) // (HELD + 1))  # somebody went: what was planned holds
    assert steps(0.5, one, other) == many - HELD  # the first was made in a hurry
    made.rest.left = HELD
    made.release("lookup")
    options = Options(2, (True, True), {}, model_free=())
    assert {
        draft_plan.nodes for draft_plan in made.plan([Work(one, 1), Work(other, 1)], options).draft_plans
    } == {0}


def test_a_plan_with_a_draft_holds_for_its_step_alone():
    made, s = planner(), sequence([1, 2])
    plans = [only(made, s) for _ in range(5 * EVERY)]
    assert all(draft_plan.nodes for draft_plan, _ in plans) and not made.rest.left


def test_drafting_costs_count():
    made, s = planner(), sequence([1, 2])
    made.costs.per_level["lookup"] = 5.0
    assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")


def test_the_likelier_sequence_gets_the_rows():
    made, good, bad = planner({n: 1 + 0.3 * n for n in range(1, 64)}), sequence([1, 2]), sequence([1, 3])
    for _ in range(20):
        made.observe(step([good], [DraftPlan("lookup", 4, 4)], rows=5, total=2.5, drafted=4, accepted=4))
        made.observe(step([bad], [DraftPlan("lookup", 4, 4)], rows=5, total=2.5, drafted=4, accepted=0))
    plan = planned(made, [good, bad])
    assert plan.draft_plans[0].depth > plan.draft_plans[1].depth


def test_rows_that_others_asked_for_count():
    """Eight rows are free; beyond them each doubles the cost, so there is nothing to gain beside ten asked for."""
    made = planner({n: 2.0 ** max(0, n - 8) for n in range(1, 64)})
    asked, left_open = sequence([1, 2], speculation={"depth": 10, "nodes": 10}), sequence([1, 3])
    assert kinds(planned(made, [left_open], 2)) == ("pays",)
    assert kinds(planned(made, [asked, left_open])) == ("asked", "below break-even")


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize(
    "asked, nodes, depth, tree",
    [
        ({"depth": 6}, 6, 6, None),
        ({"depth": 3, "nodes": 9}, 9, 3, None),
        ({"nodes": 2}, 2, 2, None),
        ({"nodes": 2, "depth": 5}, 2, 2, None),
        ({"nodes": 30}, 30, 4, None),
        ({"tree": (3, 2)}, 9, 2, (3, 2)),
        ({"depth": 63, "nodes": 63}, 63, 63, None),
    ],
)
def test_what_a_request_asks_is_done(batch, temperature, asked, nodes, depth, tree):
    costs = {n: float(n) for n in range(1, 64)}
    s = sequence([1, 2], temperature=temperature, speculation={**asked, "drafter": "lm"})
    assert only(planner(costs), s, batch) == (DraftPlan("lm", nodes, depth, tree, "coupled"), "asked")


@pytest.mark.parametrize("asked", [False, {"drafter": "none"}, {"nodes": 0}, {"depth": 0}])
def test_off_is_off(asked):
    assert only(planner(), sequence([1, 2], speculation=asked)) == (NO_DRAFT_PLAN, "off")
    assert only(Planner("none"), sequence([1, 2])) == (NO_DRAFT_PLAN, "off")


def test_depth_for_everyone():
    assert only(planner(depth=2, nodes=5), sequence([1, 2]))[0] == DraftPlan("lookup", 5, 2)
    assert only(planner(depth=2), sequence([1, 2], speculation={"depth": 7}))[0].depth == 7


@pytest.mark.parametrize("asked", [{}, {"nodes": 20}, {"depth": 3, "nodes": 20}, {"depth": 3}])
def test_rejection_never_gets_a_grown_tree(asked):
    for batch in (1, 8):
        s = sequence([1, 2], temperature=0.8, speculation={**asked, "mode": "rejection"})
        draft_plan, _ = only(planner(), s, batch)
        assert draft_plan.mode == "rejection" and draft_plan.nodes == draft_plan.depth > 0
    made, s = planner({n: n**0.5 for n in range(1, 64)}), sequence([1, 2], speculation={"mode": "rejection"})
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.0, 0.0)}
    idle_steps(made, s)
    draft_plan, _ = only(made, s)
    assert draft_plan.nodes == draft_plan.depth


def test_nothing_is_kept_of_sequences_that_ended():
    made, s = planner(), sequence([1, 2])
    draft_plan, _ = only(made, s)
    made.observe(step([s], [draft_plan], rows=5, drafted=4, accepted=4))
    assert s in made.rates.by_sequence
    s.finish_reason = "stop"
    made.forget(s)  # the engine forgets while it commits, and observes after
    made.observe(step([s], [draft_plan], rows=5, drafted=4, accepted=4))
    assert not made.rates.by_sequence


def test_a_prompt_chunk_has_no_bet():
    asked = sequence([1, 2, 3], speculation={"depth": 4})
    plan = planner().plan([Work(asked, 2), Work(asked, 3)], Options())
    assert (
        kinds(plan) == ("prefill", "asked")
        and plan.draft_plans[0] == NO_DRAFT_PLAN
        and plan.draft_plans[1].depth == 4
    )


def test_a_small_gain_is_not_worth_a_draft():
    """A token accepted every other time, for a row that costs as much as it brings but for a few percent."""
    margin = GUARDS.break_even - 1
    for gain, drafted in ((1 + 0.5 * margin, False), (1 + 1.5 * margin, True)):
        made, s = planner({1: 1.0, 2: 1.5 / gain, 3: 9.0, 63: 99.0}), sequence([1, 2])
        made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.5, 0.5)}
        assert (only(made, s)[0].depth == 1) == drafted


def test_a_tree_where_its_rows_cost_little():
    for row, nodes in ((0.01, 8), (0.04, 4)):
        made = planner({n: 1 + row * n for n in range(1, 64)}, guards=replace(KNOWN, max_depth=4))
        draft_plan, _ = only(made, sequence([1, 2]))
        assert (draft_plan.depth, draft_plan.nodes) == (4, nodes)


def test_depth_is_what_expectation_says():
    """Cheap rows and a drafter that is right: as deep as may be. The first level falls with what rows cost."""
    found = []
    for row in (0.001, 0.05, 0.2, 0.5):
        made, s = planner({n: 1 + row * n for n in range(1, 64)}), sequence([1, 2])
        made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.95, 0.95)}
        found.append(only(made, s)[0].depth)
    assert found[0] == GUARDS.max_depth and found == sorted(found, reverse=True) and found[-1] < 8 < found[1]
    ends = sequence([1, 2, 3], prompt=2, max_tokens=4)
    assert only(planner(), ends)[0].depth == 3  # no further than the answer may go


def test_guards_are_settings():
    made = planner(guards=replace(KNOWN, max_batch=2, max_temperature=0.5, max_depth=3, tree_batch=0))
    assert only(made, sequence([1, 2]), 2)[0] == DraftPlan("lookup", 3, 3)
    assert only(made, sequence([1, 2]), 3) == (NO_DRAFT_PLAN, "batch")
    assert only(made, sequence([1, 2], temperature=0.6)) == (NO_DRAFT_PLAN, "temperature")


def test_what_one_sequence_teaches_the_next_starts_from():
    made, old = planner({n: 1 + 0.2 * n for n in range(1, 64)}), sequence([1, 2])
    made.observe(step([old], total=1.2))
    assert only(made, sequence([1, 3]))[1] == "pays"
    for _ in range(60):
        made.observe(step([old], [DraftPlan("lookup", 2, 2)], rows=3, total=1.6, drafted=2))
    assert only(made, sequence([1, 3])) == (NO_DRAFT_PLAN, "below break-even")
    assert only(made, sequence([1, 3], temperature=1.0))[1] == "pays"  # nothing is known of hotter ones


def test_nothing_drafted_teaches_nothing_of_staged_rows():
    """A eager step has no rows for a draft that is not there: it cost nothing, so it is no rejection."""
    made, s = planner(), sequence([1, 2])
    before = made.rates.of(s, "lookup").first
    made.observe(step([s], [DraftPlan("lookup", 4, 4)]))
    assert made.rates.of(s, "lookup").first == before and made.rates.of(s, "lookup").idle > 0


def test_a_grown_tree_is_valued_by_the_depth_it_reached():
    made, s = planner(), sequence([1, 2])
    record = step([s], [DraftPlan("lookup", 8, 4)], rows=9)
    record.outcomes = [Outcome(s, DraftPlan("lookup", 8, 4), 8, 4, accepted=4, top1_accepted=0)]
    before = made.rates.of(s, "lookup").first
    made.observe(record)
    assert made.rates.of(s, "lookup").first > before


def test_what_plain_steps_would_have_cost():
    made, s = planner({1: 2.0}), sequence([1, 2])
    plain = step([s], total=2.0)
    made.observe(plain)
    assert plain.plain_s == 2.0
    drafted = step([s], [DraftPlan("lookup", 4, 4)], rows=5, total=3.0, drafted=4, accepted=3)
    drafted.emitted = 4
    made.observe(drafted)
    assert drafted.plain_s == pytest.approx(4 * 2.0)
    prompt = step([s], rows=50, total=9.0, known=50)
    prompt.prompt_rows = 50
    made.observe(prompt)
    assert prompt.plain_s == 0.0


def test_what_plain_steps_would_have_cost_beside_a_prompt():
    """As much for the prompt, which is read in the one as in the other."""
    made, s = planner({1: 2.0, 5: 3.0}), sequence([1, 2])
    beside = step(
        [s, sequence([3, 4])],
        [DraftPlan("lookup", 4, 4), NO_DRAFT_PLAN],
        55,
        total=9.0,
        drafted=4,
        accepted=3,
        known=51,
    )
    beside.prompt_rows = 50
    made.observe(beside)
    assert beside.decoding == 1 and beside.plain_s == pytest.approx(4 * 2.0 + 9.0 - 3.0)
    nobodys = step([sequence([3, 4])], rows=50, total=7.0, known=50)
    nobodys.prompt_rows, nobodys.waiting = 50, 2  # two have their first token, and are not in it
    made.observe(nobodys)
    assert nobodys.answering == 2 and nobodys.plain_s == 7.0
    undrafted = step([s, sequence([3, 4])], rows=51, total=8.0, known=51)
    undrafted.prompt_rows = 50
    made.observe(undrafted)
    assert undrafted.plain_s == 8.0


def test_a_prompt_that_waits_gets_more_rows_beside_decoding_sequences():
    made = planner(guards=Guards(prefill_stretch=2.0, prefill_wait=1.0, min_prompt_rows=3))
    made.costs.by_rows, made.costs.per_prompt_row = {1: 1.0}, {8: 0.2}
    assert [made.prompt_rows(1, waited) for waited in (0.0, 1.0, 2.0, 4.0)] == [10, 10, 20, 40]
    made.costs.per_prompt_row = {8: 0.01}
    assert (
        made.prompt_rows(1, LATE - 1) == USUAL_PROMPT_ROWS < made.prompt_rows(1, LATE + 1)
    )  # everybody feels those
    made.costs.per_prompt_row = {8: 5.0}
    assert made.prompt_rows(1, 0.0) == 3
    assert planner().prompt_rows(1, 0.0) > 10**6  # no bound unless one is set


def test_prompts_that_come_together_are_read_in_few_long_steps():
    made = planner(guards=Guards(prefill_stretch=0.4, prefill_wait=1.0))
    made.costs.learn("none", 16, [("none", NO_TREE, 4.0)])
    for rows, seconds in ((64, 5.5), (512, 14.0), (1984, 45.0)):
        made.costs.learn_prompt_rows(16, rows, seconds)

    def rows(decoding: int, waiting: int, pending: int) -> int:
        return made.prompt_rows(decoding, 0.0, waiting, pending)

    assert rows(8, waiting=4, pending=3968) == 1984  # two steps read them all
    assert rows(8, waiting=4, pending=992) == 1984  # half of one
    assert rows(8, waiting=4, pending=991) == 512
    assert rows(8, waiting=4, pending=3969) == 64  # more than two
    assert rows(8, waiting=3, pending=3968) == 64  # for fewer the many that decode are not held up
    assert rows(1, waiting=1, pending=1984) == 64  # nor for one
    assert rows(8, waiting=4, pending=20) == 64
    made.guards = replace(made.guards, prefill_at_once=0)
    assert rows(8, waiting=4, pending=1984) == 64


def test_drafting_ends_later_than_it_begins():
    """A gain of 3 % is too little to begin with, and enough to go on."""
    made, s = planner({1: 1.0, 2: 1.5 / 1.03, 3: 9.0, 63: 99.0}), sequence([1, 2])
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.5, 0.5)}
    assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.6, 0.5)}
    assert only(made, s)[1] == "pays"
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.5, 0.5)}
    assert only(made, s)[1] == "pays"
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.4, 0.5)}
    assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.5, 0.5)}
    assert only(made, s) == (NO_DRAFT_PLAN, "below break-even")


def test_the_objective():
    """One of two is always right. For both together a deep draft of it is best; the other's tokens take longer."""
    found = {}
    for objective in ("throughput", "latency"):
        made = planner(
            {n: 1 + 0.15 * (n - 2) for n in range(2, 64)}, guards=replace(KNOWN, objective=objective)
        )
        good, bad = sequence([1, 2]), sequence([1, 3])
        made.rates.by_sequence = {
            good: {"lookup": AcceptanceRate(0.97, 0.97)},
            bad: {"lookup": AcceptanceRate(0.0, 0.0)},
        }
        found[objective] = planned(made, [good, bad]).draft_plans[0].depth
    assert found["throughput"] > found["latency"] >= 0


def test_reasons_have_the_numbers_that_decided():
    made, s = planner({n: 1 + 0.2 * n for n in range(1, 64)}), sequence([1, 2], temperature=0.7)
    plan = planned(made, [s])
    depth, facts = plan.draft_plans[0].depth, dict(plan.reasons[0].facts)
    assert plan.reasons[0].depth == depth > 0 and facts["temperature"] == 0.7
    assert facts["next guess"] <= facts["break-even"] < made.rates.of(s, "lookup").survivals(depth, 0)[-1]
    assert str(plan.reasons[0]).startswith(f"depth {depth}: temperature 0.7, next guess 0.")
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.05, 0.05)}
    off = planned(made, [s]).reasons[0]
    assert (
        off.kind == "below break-even"
        and dict(off.facts)["next guess"] == 0.05 < dict(off.facts)["break-even"]
    )


def test_unseen_rows_cost_what_the_curve_says() -> None:
    """Measured ahead, in proportion to what was taken since; what was taken is never overruled."""
    costs = CostModel()
    costs.curve = {1: 1.0, 4: 1.3, 5: 2.0, 8: 2.4}
    assert costs.step(5) == pytest.approx(2.0)  # nothing was taken yet
    costs.by_rows = {1: 10.0, 4: 15.0}
    assert costs.step(4) == 15.0
    assert costs.step(5) == pytest.approx(15 * 2.0 / 1.3)
    assert costs.step(6) == pytest.approx(15 * (2.0 + 0.4 / 3) / 1.3)
    assert costs.step(2) == pytest.approx(10 * 1.1)
    costs.by_rows[5] = 16.0
    assert costs.step(5) == 16.0


def head_and_lookup(plain: float = 1.0) -> tuple[Planner, dict[str, int]]:
    """A head that pays where lookup finds nothing; how many levels lookup finds and the head must read first."""
    made = Planner("eagle", choices=("eagle", "lookup"))
    made.costs.by_rows = {n: plain * (1 + 0.05 * (n - 1)) for n in range(1, 64)}
    made.costs.per_level["eagle"] = 0.1 * plain
    return made, {"found": 0, "behind": 300}


def drafted(made: Planner, s, state: dict[str, int]) -> str:
    options = Options(
        behind=lambda name, _: state["behind"] if name == "eagle" else 0,
        model_free=("lookup",),
        found=lambda name, _, depth: min(state["found"], depth),
        waiting=state.get("waiting", 0),
    )
    draft_plan = made.plan([Work(s, s.pending)], options).draft_plans[0]
    drafter = draft_plan.drafter if draft_plan.nodes else "none"
    made.rates.note(s, drafter)
    s.steps += 1
    return drafter


def read(tokens: int, seconds: float) -> StepRecord:
    record = step([], rows=2, total=2.0)
    record.catch_up = ("eagle", tokens, seconds)
    return record


def test_a_head_reads_a_prompt_where_it_will_draft_often_enough():
    made, state = head_and_lookup()
    assert drafted(made, sequence([1, 2], max_tokens=200), state) == "eagle"  # nobody knows yet what it takes
    made.observe(read(300, 3.0))
    assert made.costs.eager_reading("eagle", 100) == pytest.approx(1.0)
    assert drafted(made, sequence([1, 2], max_tokens=200), state) == "eagle"
    assert drafted(made, sequence([1, 2], max_tokens=4), state) == "none"  # it would not earn that any more
    state["behind"] = 3000
    assert drafted(made, sequence([1, 2], max_tokens=200), state) == "none"


def test_a_head_does_not_read_while_others_are_about_to_join():
    made, state = head_and_lookup()
    made.observe(read(300, 3.0))
    s, state["waiting"] = sequence([1, 2], max_tokens=200), 3
    assert drafted(made, s, state) == "none"
    state["behind"] = 0
    assert drafted(made, s, state) == "eagle"  # what it has read, it drafts for
    state.update(behind=300, waiting=0)
    assert drafted(made, sequence([1, 2], max_tokens=200), state) == "eagle"


def test_what_a_head_reads_for_a_text_it_has_not_drafted_for_must_be_earned_twice():
    def most(used: int) -> int:
        """Tokens that it would still read."""
        for behind in range(40, 4000, 40):
            made, state = head_and_lookup()
            made.observe(read(300, 3.0))
            s, state["behind"] = sequence([1, 2], max_tokens=200), behind
            made.rates.of(s, "eagle").used = used
            if drafted(made, s, state) != "eagle":
                return behind - 40
        raise AssertionError("it reads whatever there is")

    assert most(used=0) > 0 and most(used=3) == pytest.approx(2 * most(used=0), rel=0.15)


def test_a_head_does_not_read_for_the_gaps_that_lookup_leaves():
    made, state = head_and_lookup()
    made.observe(read(300, 3.0))
    s = sequence([1, 2], max_tokens=200)
    state["found"] = 6
    assert [drafted(made, s, state) for _ in range(8)] == ["lookup"] * 8
    state["found"] = 0
    assert drafted(made, s, state) == "none"
    fast = sequence([1, 2], max_tokens=200)
    fast.tokens, fast.steps = fast.tokens + [3] * 160, 8  # what is left of its answer takes two steps
    assert drafted(made, fast, state) == "none"
    later = [drafted(made, s, state) for _ in range(8)]
    assert "eagle" in later and later == sorted(later, reverse=True)  # it is new text by now
    state.update(behind=7)
    assert drafted(made, s, state) == "eagle"
    state["found"] = 6
    assert drafted(made, s, state) == "lookup"


# ------------------------------------------------------------------------------------------ drafters scored for nothing


def model_free(found: int = 15, asked: list | None = None) -> Options:
    """Lookup, which finds so many tokens whenever it is asked."""

    def look(name, s, depth):
        if asked is not None:
            asked.append(s)
        return min(found, depth)

    return Options(model_free=("lookup",), found=look)


def decoding(*sequences) -> list[Work]:
    for s in sequences:
        s.cached = len(s.tokens) - 1
    return [Work(s, 1) for s in sequences]


@pytest.mark.parametrize("after_prompts", [True, False])
def test_nobody_looks_for_what_a_runner_would_not_draft(after_prompts):
    """Looking through a long prompt takes a host as long as half of a GPU's step."""
    made, asked, s = planner(), [], sequence([1, 2, 3])
    options = Options(
        model_free=("lookup",), found=lambda *one: asked.append(one) or 3, after_prompts=after_prompts
    )
    plan = made.plan([Work(s, 3)], options)
    assert (kinds(plan) == ("prefill",)) != after_prompts and bool(asked) == after_prompts
    s.cached = 2
    made.plan([Work(s, 1)], options)
    assert asked


def test_drafts_for_a_text_begin_shallow():
    """Every token that was right allows one level more, and a draft of which none was takes half of them back."""
    made, s = planner(guards=Guards(max_depth=8)), sequence([1, 2])
    depths = []
    for accepted in (0, 1, 0, 1, 2, 4):
        draft_plan, _ = only(made, s)
        depths.append(draft_plan.depth)
        made.observe(
            step([s], [draft_plan], 1 + draft_plan.depth, drafted=draft_plan.depth, accepted=accepted)
        )
    assert depths == [1, 1, 2, 1, 2, 4] and only(made, s)[0].depth == 8
    assert only(made, sequence([1, 3]))[0].depth == 1
    assert only(planner(guards=Guards(start_depth=4, max_depth=8)), sequence([1, 3]))[0].depth == 4


@pytest.mark.parametrize(("row", "tried"), [(0.03, 3), (0.09, 1), (0.2, 0)])
def test_nobody_tries_deep_what_was_never_right(row, tried):
    """What is scored without being asked shows by itself that it is right; then it may go as deep as it pays."""
    made, s = planner({n: 1 + row * (n - 1) for n in range(1, 64)}), sequence([1, 2])
    plan = made.plan(decoding(s), model_free())
    assert plan.draft_plans[0].depth == tried and kinds(plan) == (("pays",) if tried else ("unproven",))
    made.observe(step([s], drafted=0))
    scored = step([s])
    scored.scored = [Outcome(s, DraftPlan("lookup"), 8, 8, 8, 8)]
    made.observe(scored)
    assert made.plan(decoding(s), model_free()).draft_plans[0].depth > tried


def test_all_that_were_never_right_share_what_a_step_may_take():
    made, some = planner({n: 1 + 0.04 * (n - 1) for n in range(1, 64)}), [sequence([1, i]) for i in range(3)]
    rows = [draft_plan.nodes for draft_plan in made.plan(decoding(*some), model_free()).draft_plans]
    assert max(rows) <= 1 and made.plan(decoding(some[0]), model_free()).draft_plans[0].depth == 2


def test_nothing_is_looked_for_that_could_not_pay():
    asked: list = []
    some = [sequence([1, i]) for i in range(4)]
    made = planner({n: 0.25 * n for n in range(1, 64)})  # a row costs as much as a token brings, at best
    assert (
        set(kinds(made.plan(decoding(*some), model_free(asked=asked)))) == {"below break-even"} and not asked
    )
    made = planner({n: 1 + 0.01 * n for n in range(1, 64)})
    assert made.plan(decoding(*some), model_free(asked=asked)).draft_plans[0].nodes and set(asked) == set(
        some
    )


def test_a_draft_beside_prompt_rows_pays_for_its_own_rows():
    """They are few among those, where a step of one would double with them."""
    costs = {1: 1.0, 2: 2.0, 40: 20.0, 41: 20.2, 44: 20.8, 63: 24.6}
    made, s, reader = planner(costs), sequence([1, 2]), sequence([1] * 99)
    assert made.plan(decoding(s), model_free()).draft_plans[0].nodes == 0
    assert made.plan([*decoding(s), Work(reader, 39)], model_free()).draft_plans[0].depth == 3
    costly = planner(
        {n: 0.5 * n for n in range(1, 64)}
    )  # there is nothing to gain where they cost as much there
    costly.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.2, 0.2, proven=True)}
    assert costly.plan([*decoding(s), Work(reader, 39)], model_free()).draft_plans[0].nodes == 0


def test_whose_prompt_is_read_gets_no_token_and_counts_for_none():
    """One that decodes beside one that reads: a draft that is right in 3 of 10 cases pays for one, not for two."""
    costs = {n: 1 + 0.2 * (n - 1) for n in range(1, 64)}
    made, s, reader = (
        planner(costs, guards=Guards(worth_beside_prompts=1.0)),
        sequence([1, 2]),
        sequence([1] * 9),
    )
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.3, 0.0, proven=True)}
    assert made.plan([*decoding(s), Work(reader, 1)], model_free()).draft_plans[0].depth == 1


def test_drafts_beside_prompts_hold_up_first_tokens_by_so_much():
    """Rows cost little there, and drafts are always right: as many as the bound has room for."""
    guards, s, reader = Guards(hold_up=1.1), sequence([1, 2]), sequence([1] * 99)
    made = planner({n: 1 + 0.02 * n for n in range(1, 128)}, guards=guards)
    made.rates.by_sequence[s] = {"lookup": AcceptanceRate(0.99, 0.99, proven=True)}
    plain = made.costs.step(40)
    depth = made.plan([*decoding(s), Work(reader, 39)], model_free()).draft_plans[0].depth
    assert depth == int((guards.hold_up - 1) * plain / 0.02) < GUARDS.max_depth
    assert made.plan(decoding(s), model_free()).draft_plans[0].depth == GUARDS.max_depth


def test_a_step_that_was_not_planned_says_what_a_plan_would_have_done():
    """It had time to wait for the device because nothing was planned for it."""
    rest = Rest()
    for plan_s, waited, hurried in (
        (0.3, 0.0, True),
        (0.01, 0.25, True),
        (0.01, 0.6, False),
        (0.3, 0.2, False),
    ):
        record = StepRecord(1, 1, 1, 0, 0, 1, plan_s, 0, 1.0, 0, 1.0, captured=("none", (0, 0), 1))
        record.waited_s = waited
        rest.observe(record)
        assert rest.hurried == hurried
