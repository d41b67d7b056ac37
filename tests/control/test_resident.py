"""Plans of resident rows: which drafter, which tree, and when another one is probed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from outrider.control.acceptance import AcceptanceRate
from outrider.control.guards import Guards
from outrider.control.lengths import ENOUGH, AnswerLengths
from outrider.control.planner import Planner
from outrider.control.trees import CHAINS, TREES
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Outcome, Plan, StepRecord, Work
from tests.tiny import sequence

GUARDS = Guards()
TO_EIGHT = tuple(shape for shape in CHAINS if shape[0] <= 8)
CHEAP = {n: 1 + 0.02 * n for n in range(9)}  # cost of a step by its draft
COSTLY = {n: 1.0 + n for n in range(9)}
RISING = {n: 1 + 0.2 * n for n in range(9)}


def kinds(plan: Plan) -> tuple[str, ...]:
    return tuple(reason.kind for reason in plan.reasons)


def size_of(sequences) -> int:
    return 1 << (len(sequences) - 1).bit_length()


def resident(
    made: Planner, sequences, size: int | None = None, behind: int = 0, trees=TO_EIGHT, model_free=()
) -> Plan:
    work, given = [Work(s, s.pending) for s in sequences], dict.fromkeys(("lm", "lookup"), trees)
    here = (True,) * len(work)
    each = behind / len(work)
    return made.plan(work, Options(size or size_of(sequences), here, given, lambda *_: each, 8, model_free))


def unmeasured(made: Planner, sequences, size: int) -> str:
    work, given = [Work(s, s.pending) for s in sequences], dict.fromkeys(("lm", "lookup"), TO_EIGHT)
    return made.unmeasured(work, Options(size, (True,) * len(work), given))


def ran(made: Planner, sequences, draft_plans, costs: dict[int, float], accepted=0, drafted=None) -> None:
    """A captured step as the engine would record it."""
    nodes = max(draft_plan.nodes for draft_plan in draft_plans)
    name = next((draft_plan.drafter for draft_plan in draft_plans if draft_plan.nodes), "none")
    outcomes = []
    for s, draft_plan in zip(sequences, draft_plans, strict=True):
        own = draft_plan.nodes if drafted is None else drafted
        outcomes.append(Outcome(s, draft_plan, own, own, min(accepted, own), min(accepted, own)))
    n, took = len(sequences), costs[nodes]
    emitted = n + sum(o.accepted for o in outcomes)
    key = name, (nodes, nodes), size_of(sequences)
    made.observe(StepRecord(n, n, n, 0, 0, emitted, 0, 0, took, 0, took, outcomes, captured=key))


def measured(costs: dict[int, float]) -> list[tuple[str, tuple[int, int], float]]:
    return [("lm" if depth else "none", (depth, depth), costs[depth]) for depth in (0, 1, 2, 4, 8)]


def chosen(made: Planner, sequences) -> tuple[set[int], set[str]]:
    plan = resident(made, sequences)
    return {draft_plan.nodes for draft_plan in plan.draft_plans}, set(kinds(plan))


def test_a_step_of_a_new_size_is_plain_first():
    made, some = Planner("lookup"), [sequence([1, i]) for i in range(4)]
    assert chosen(made, some) == ({0}, {"unmeasured"})
    ran(made, some, [NO_DRAFT_PLAN] * 4, CHEAP)
    depths, reasons = chosen(made, some)
    assert reasons == {"pays"} and depths <= {1, 2, 4, 8}
    assert chosen(made, some[:2]) == ({0}, {"unmeasured"})  # another size


def test_depth_follows_what_is_accepted():
    made, some = Planner("lookup"), [sequence([1, i]) for i in range(3)]
    ran(made, some, [NO_DRAFT_PLAN] * 3, RISING)
    for held, expected in ((8, {8}), (1, {1}), (8, {8})):
        taken = Counter()
        for _ in range(150):
            draft_plans = resident(made, some).draft_plans
            taken[frozenset(draft_plan.nodes for draft_plan in draft_plans)] += 1
            ran(made, some, draft_plans, RISING, accepted=held)
        assert (
            taken.most_common(1)[0][0] == expected
        )  # now and then a deeper one, as it might be accepted as well


def test_a_step_that_costs_more_than_it_brings_is_plain():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(16)]
    ran(made, some, [NO_DRAFT_PLAN] * 16, COSTLY)
    drafted = 0
    for _ in range(100):
        draft_plans = resident(made, some).draft_plans
        drafted += draft_plans[0].nodes > 0
        ran(made, some, draft_plans, COSTLY, accepted=1)
    assert drafted <= 3  # until it was measured
    assert chosen(made, some) == ({0}, {"below break-even"})


def test_probes_take_a_small_share_of_the_time_and_find_what_changed():
    made, some = Planner("lm"), [sequence([1, 2])]
    half = {n: 1 + 0.5 * (n > 0) for n in range(9)}
    ran(made, some, [NO_DRAFT_PLAN], half)
    while chosen(made, some)[0] != {0}:
        ran(made, some, resident(made, some).draft_plans, half)
    spent = probes = 0.0
    for _ in range(3000):
        draft_plans = resident(made, some).draft_plans
        probes += draft_plans[0].nodes > 0
        spent += half[draft_plans[0].nodes]
        ran(made, some, draft_plans, half)
    assert probes > 5 and (spent - 3000) / spent <= GUARDS.probe_share * 1.1
    for _ in range(600):
        ran(made, some, resident(made, some).draft_plans, half, accepted=8)
    assert chosen(made, some) == ({8}, {"pays"})  # a probe that paid is followed by another


def test_a_probe_is_not_repeated_before_it_is_known():
    """The next step is planned while one is in flight."""
    made, some = Planner("lm"), [sequence([1, 2], max_tokens=10_000)]
    made.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (2, 2), 1.5)])
    made.rates.priors["lm", 0] = AcceptanceRate(0.1, 0.1)
    reasons, probes = [], 0
    for _ in range(1000):
        draft_plans = [resident(made, some, 1, trees=((2, 2),)) for _ in range(2)]
        probes += [kinds(plan) for plan in draft_plans].count(("probe",))
        reasons.append({kinds(plan) for plan in draft_plans})
        for plan in draft_plans:
            ran(made, some, plan.draft_plans, {0: 1.0, 2: 1.5})
    assert ("probe",) in set().union(*reasons) and reasons.count({("probe",)}) == 0
    assert 0.5 * probes <= 2000 * GUARDS.probe_share * 1.1


def test_nothing_is_kept_of_sequences_that_ended():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    ran(made, some, [NO_DRAFT_PLAN] * 3, CHEAP)
    ran(made, some, [DraftPlan("lm", 2, 2)] * 3, CHEAP, accepted=1)
    assert set(made.rates.by_sequence) == set(some)
    for s in some[:2]:  # the engine ends answers before it records the step
        s.finish_reason = "stop"
        made.forget(s)
    ran(made, some, [DraftPlan("lm", 2, 2)] * 3, CHEAP, accepted=1)
    assert set(made.rates.by_sequence) == {some[2]}


def test_no_draft_counts_as_rejected():
    made, some = Planner("lookup"), [sequence([1, 2])]
    ran(made, some, [NO_DRAFT_PLAN], RISING)
    for _ in range(20):
        ran(made, some, resident(made, some).draft_plans, RISING, drafted=0)
    assert chosen(made, some) == ({0}, {"below break-even"})


def test_a_new_sequence_starts_from_what_others_taught():
    made = Planner("lookup")
    old, new = [sequence([1, i]) for i in range(2)], [sequence([2, i]) for i in range(2)]
    ran(made, old, [NO_DRAFT_PLAN] * 2, RISING)
    assert chosen(made, [sequence([3, i]) for i in range(2)])[1] == {"pays"}
    for _ in range(60):
        ran(made, old, [DraftPlan("lookup", 2, 2)] * 2, RISING)
    assert chosen(made, new) == ({0}, {"below break-even"})
    for s in list(made.rates.by_sequence):
        made.forget(s)
    assert not made.rates.by_sequence


def test_a_size_is_measured_before_it_is_planned_for():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    assert unmeasured(made, some, 4) == "lm"
    made.learn("lm", 4, measured(COSTLY))
    assert unmeasured(made, some, 4) == "none"
    assert unmeasured(made, some[:2], 2) == "lm"  # another size
    off = [sequence([1], speculation=False), sequence([1], speculation={"depth": 4, "nodes": 4})]
    assert unmeasured(made, off, 4) == "none"  # nothing is left open
    assert chosen(made, some) == ({0}, {"below break-even"})


def test_catching_up_has_to_be_earned():
    def drafted(sequences, behind: int) -> int:
        return resident(made, sequences, 4, behind).draft_plans[0].nodes

    made, some = Planner("lm"), [sequence([1, i], max_tokens=100) for i in range(4)]
    made.learn("lm", 4, measured(RISING))
    plain = drafted(some, 0)
    assert drafted(some, 200) == plain > 0  # what it takes is not known, but not more than a few steps' time
    assert drafted(some, 1000) == 0  # as it may take sixteen
    made.learn_reading("lm", 1000, 5.0)
    assert drafted(some, 1000) == plain  # five plain steps' time, soon earned
    assert drafted(some, 9000) == 0
    ending = [sequence([1, i] + [3] * 97, prompt=2, max_tokens=100) for i in range(4)]
    assert drafted(ending, 0) == plain and drafted(ending, 1000) == 0  # not in the steps that are left
    made.learn_reading("lm", 1000, 90.0)  # a graph was captured on the way
    assert drafted(some, 1000) == plain


def test_costly_drafts_must_promise_more_to_several():
    """1.6 tokens on average for 1.5 times a plain step's time is enough for one sequence and too little for two."""
    costs = {0: 1.0, 1: 1.5, 2: 4.0, 4: 8.0, 8: 16.0}
    made, two = Planner("lm"), [sequence([1, i], max_tokens=1000) for i in range(2)]
    for size in (1, 2):
        made.learn("lm", size, measured(costs))
    made.rates.priors["lm", 0] = AcceptanceRate(0.6, 0.8)
    made.rates.trials["lm"] = GUARDS.min_trials
    assert resident(made, two[:1], 1).draft_plans[0].nodes == 1
    assert resident(made, two, 2).draft_plans[0].nodes == 0


def test_a_drafter_far_behind_is_probed_now_and_then():
    made, [one] = Planner("lm"), [sequence([1, 2], max_tokens=1 << 20)]
    made.learn("lm", 1, measured(RISING))
    made.learn_reading("lm", 1000, 5.0)
    steps = 0
    while kinds(plan := resident(made, [one], 1, 9000)) != ("probe",):
        ran(made, [one], plan.draft_plans, RISING)
        steps += 1
        assert steps < 50 / GUARDS.probe_share
    lost = 45 + RISING[2] - 1
    assert steps == pytest.approx(lost / GUARDS.probe_share, rel=0.01)


def test_what_a_request_fixed_is_done_and_others_go_along():
    made = Planner("lookup")
    asked = sequence([1, 2], speculation={"depth": 4, "nodes": 4})
    free, off = sequence([1, 3]), sequence([1, 4], speculation=False)
    for n in (3, 1):
        ran(made, [free] * n, [NO_DRAFT_PLAN] * n, COSTLY)
        assert resident(made, [free] * n).draft_plans[0].nodes > 0  # not measured yet
        ran(made, [free] * n, [DraftPlan("lookup", 4, 4)] * n, COSTLY, accepted=1)
    assert resident(made, [free], 1).draft_plans == (NO_DRAFT_PLAN,)
    plan = resident(made, [asked, free, off], 4)
    assert plan.draft_plans[0].nodes == 4 and kinds(plan)[0] == "asked"
    assert plan.draft_plans[1].nodes == 4  # the step is that deep already
    assert plan.draft_plans[2] == NO_DRAFT_PLAN and kinds(plan)[2] == "off"


def test_what_plain_captured_steps_would_have_cost():
    made, s = Planner("lookup"), sequence([1, 2])
    plain = StepRecord(1, 1, 1, 0, 0, 8, 0, 0, 4.0, 0, 4.5, captured=("none", (0, 0), 1), passes=8)
    made.observe(plain)
    assert made.costs.plain(1) == 4.5 / 8 and plain.plain_s == 4.5
    outcome = Outcome(s, DraftPlan("lookup", 4, 4), 4, 4, 3, 3)
    record = StepRecord(5, 1, 1, 4, 3, 4, 0, 0, 0.75, 0, 0.7, [outcome], captured=("lookup", (4, 4), 1))
    made.observe(record)
    assert record.plain_s == 4 * 4.5 / 8 and made.costs.ratio("lookup", (4, 4), 1) == 0.75 / (4.5 / 8)


def test_what_plain_captured_steps_would_have_cost_beside_a_prompt():
    made, s = Planner("lookup"), sequence([1, 2])
    made.learn("lookup", 4, [("none", (0, 0), 1.0), ("lookup", (4, 4), 1.5)])
    outcomes = [Outcome(s, DraftPlan("lookup", 4, 4), 4, 4, 3, 3)]
    # Three sequences decode and get six draft tokens, another reads 20 rows of its prompt and gets its first.
    record = StepRecord(35, 4, 23, 12, 6, 10, 0, 0, 2.0, 0, 2.5, outcomes, captured=("lookup", (4, 4), 4))
    record.prompt_rows = 20
    made.observe(record)
    assert record.decoding == 3 and record.plain_s == pytest.approx((1 + 6 / 3) * 1.0 + 2.5 - 1.5)
    read_on = replace(record, catch_up=("lm", 100, 0.4))  # for the drafter alone
    made.observe(read_on)
    assert read_on.plain_s == pytest.approx(record.plain_s - 0.4)


def test_the_first_plain_step_after_a_prompt_is_no_baseline():
    """The device waited for the host before it, and that time would be held against the next drafts."""
    made, s = Planner("lookup"), sequence([1, 2])

    def steps(*seconds: float, prompt_rows: int = 0, drafted: int = 0) -> float:
        for took in seconds:
            shape = ("lookup", (4, 4), 1) if drafted else ("none", (0, 0), 1)
            outcomes = [Outcome(s, DraftPlan("lookup", 4, 4), drafted, drafted, 1, 1)] if drafted else []
            rows = max(1, prompt_rows)
            record = StepRecord(rows, 1, rows, drafted, 1, 2, 0, 0, took, 0, took, outcomes, captured=shape)
            record.prompt_rows = prompt_rows
            made.observe(record)
        return record.plain_s

    steps(1.0, 1.0)
    steps(1.5, 1.5, drafted=4)
    steps(9.0, prompt_rows=50)
    steps(1.4, 1.0, 1.0)  # the first of them is late
    steps(9.0, prompt_rows=50)
    assert steps(1.5, 1.5, drafted=4) == pytest.approx(2 * 1.0)


def test_sequences_with_low_acceptance_must_gain_as_well():
    """The same on average: alike, they draft; half of them always rejected, they do not; one alone does as it likes."""
    made, some = Planner("lookup"), [sequence([1, i]) for i in range(16)]
    made.learn("lookup", 16, [("none", (0, 0), 1.0), ("lookup", (1, 1), 1.3)])
    made.learn("lookup", 1, [("none", (0, 0), 1.0), ("lookup", (1, 1), 1.2)])

    def asked(rates: list[float], weight: float) -> set[int]:
        for s, rate in zip(some, rates, strict=True):
            made.rates.by_sequence[s] = {"lookup": AcceptanceRate(rate, rate, weight)}
        return {draft_plan.nodes for draft_plan in resident(made, some, 16, trees=((1, 1),)).draft_plans}

    assert asked([0.5] * 16, 0) == {1}  # nobody knows how they differ
    made.rates.priors["lookup", 0] = AcceptanceRate(0.5, 0.5)
    made.rates.trials["lookup"] = GUARDS.min_trials
    assert asked([0.5] * 16, 12) == {1}
    assert asked([0.5] * 16, 0) == {0}  # known of none of them
    assert asked([0.0, 1.0] * 8, 12) == {0}
    made.rates.by_sequence[some[0]] = {"lookup": AcceptanceRate(0.3, 0.3)}
    assert [draft_plan.nodes for draft_plan in resident(made, some[:1], 1, trees=((1, 1),)).draft_plans] == [
        1
    ]


def test_whose_prompts_are_read_or_wait_is_held_up():
    """A draft that pays for two is none where six others wait for the step to end; where none of their prompts is in
    it, they wait for something else.
    """
    trees = {"lookup": ((2, 2),)}

    def drafted(reading: int, waiting: int) -> bool:
        made, some = Planner("lookup"), [sequence([1, i]) for i in range(2)]
        for s in some:
            s.cached = 1
        made.learn("lookup", 2, [("none", (0, 0), 1.0), ("lookup", (2, 2), 1.3)])
        made.rates.priors["lookup", 0] = AcceptanceRate(0.6, 0.6)
        work = [*(Work(s, 1) for s in some), *(Work(sequence([1] * 9), 9) for _ in range(reading))]
        here = (True, True, *(False for _ in range(reading)))
        plan = made.plan(work, Options(2, here, trees, max_depth=8, after_prompts=False, waiting=waiting))
        return plan.draft_plans[0].nodes > 0

    assert drafted(0, 0) and drafted(0, 6) and drafted(1, 0)
    assert not drafted(1, 6) and not drafted(7, 0)


def test_a_costly_probe_waits_for_long_answers():
    """Reading a hundred prompts to see what would be accepted is not for answers of a few words."""
    for left, probed in ((100, False), (4000, True)):
        made, some = Planner("lm"), [sequence([1, i], max_tokens=left) for i in range(3)]
        made.learn("lm", 4, [("none", (0, 0), 1.0), ("lm", (2, 2), 3.0)])
        made.learn_reading("lm", 256, 5.0)
        made.rates.priors["lm", 0] = AcceptanceRate(0.05, 0.05)
        named = set()
        for _ in range(6000):
            draft_plans = resident(made, some, 4, 256, trees=((2, 2),)).draft_plans
            named.add(draft_plans[0].drafter)
            ran(made, some, draft_plans, {0: 1.0, 2: 3.0})
        assert ("lm" in named) == probed


def test_a_tree_is_taken_where_it_brings_more_than_it_costs():
    made, some = Planner("lm"), [sequence([1, 2])]
    chains = [("none", (0, 0), 1.0), *(("lm", shape, 1 + 0.2 * shape[0]) for shape in CHAINS)]
    made.learn("lm", 1, chains)
    made.rates.priors["lm", 0] = AcceptanceRate(0.5, 0.5)
    draft_plan = resident(made, some, 1, trees=CHAINS).draft_plans[0]
    assert draft_plan.nodes == draft_plan.depth > 0
    made.learn("lm", 1, [("lm", shape, 1 + 0.2 * shape[0] + 0.01 * shape[1]) for shape in TREES])
    draft_plan = resident(made, some, 1, trees=CHAINS + TREES).draft_plans[0]
    assert (draft_plan.depth, draft_plan.nodes) in TREES
    asked = sequence([1, 3], speculation={"depth": 3, "nodes": 3})
    both = resident(made, [*some, asked], 1, trees=CHAINS + TREES).draft_plans
    assert [draft_plan.nodes <= draft_plan.depth <= 3 for draft_plan in both] == [
        True,
        True,
    ]  # one tree for all
    made.learn("lm", 1, [("lm", shape, 9.0) for shape in TREES] * 40)
    draft_plan = resident(made, some, 1, trees=CHAINS + TREES).draft_plans[0]
    assert draft_plan.nodes == draft_plan.depth


# ------------------------------------------------------------------------------------------------ two drafters


def two_drafters() -> tuple[Planner, list]:
    """A draft whose steps are costly and a lookup whose steps are cheap, both known."""
    made, some = Planner("lm", choices=("lm", "lookup")), [sequence([1, 2])]
    for name, costs in (("lm", RISING), ("lookup", CHEAP)):
        assert unmeasured(made, some, 1) == name
        made.learn(name, 1, named(name, costs))
    assert unmeasured(made, some, 1) == "none"
    return made, some


def named(name: str, costs: dict[int, float]) -> list[tuple[str, tuple[int, int], float]]:
    return [(name if who == "lm" else who, shape, cost) for who, shape, cost in measured(costs)]


def drafters(made: Planner, some, accepted: dict[str, int], steps: int, model_free=()) -> list[str]:
    """Who drafted in each step, where so many tokens of each drafter are accepted."""
    names = []
    for _ in range(steps):
        draft_plans = resident(made, some, 1, model_free=model_free).draft_plans
        names.append(draft_plans[0].drafter if draft_plans[0].nodes else "none")
        costs = RISING if names[-1] == "lm" else CHEAP
        ran(made, some, draft_plans, costs, accepted=accepted.get(names[-1], 0))
    return names


def test_the_drafter_that_pays_most_is_taken_and_changed_when_the_text_does():
    made, some = two_drafters()
    assert set(drafters(made, some, {"lm": 2, "lookup": 0}, 100)[-20:]) <= {"lm", "lookup"}
    assert drafters(made, some, {"lm": 2, "lookup": 0}, 100).count("lm") > 90
    names = drafters(made, some, {"lm": 2, "lookup": 8}, 200)  # the text begins to copy itself
    assert names[-100:].count("lookup") > 95
    names = drafters(made, some, {"lm": 2, "lookup": 0}, 200)  # and ends to
    assert names[-100:].count("lm") > 90
    names = drafters(made, some, {"lm": 0, "lookup": 0}, 3000)[-2000:]
    lost = names.count("lm") * (RISING[1] - 1) + names.count("lookup") * (CHEAP[2] - 1)
    assert lost / len(names) <= 2 * GUARDS.probe_share * 1.1


def test_a_drafter_not_in_use_is_probed_in_a_small_share_of_the_time():
    made, some = two_drafters()
    drafters(made, some, {"lm": 2}, 200)
    spent, tokens = Counter(), Counter()
    for _ in range(2000):
        draft_plan = resident(made, some, 1).draft_plans[0]
        costs, held = (RISING, min(draft_plan.nodes, 2)) if draft_plan.drafter == "lm" else (CHEAP, 0)
        spent[draft_plan.drafter] += costs[draft_plan.nodes]
        tokens[draft_plan.drafter] += 1 + held
        ran(made, some, [draft_plan], costs, accepted=held)
    lost = spent["lookup"] - tokens["lookup"] * spent["lm"] / tokens["lm"]
    assert tokens["lookup"] > 10 and lost <= GUARDS.spare_probe_share * 1.1 * spent.total()


def test_who_names_a_drafter_gets_no_other():
    made, some = two_drafters()
    asked = [sequence([1, 2], speculation={"drafter": "lm"})]
    drafters(made, some, {"lm": 0, "lookup": 8}, 60)
    assert resident(made, some, 1).draft_plans[0].drafter == "lookup"
    assert {resident(made, asked, 1).draft_plans[0].drafter for _ in range(60)} <= {"lm", "none"}
    both = resident(made, [*some, *asked], 1).draft_plans
    assert len({draft_plan.drafter for draft_plan in both if draft_plan.nodes}) == 1  # one drafter a step


def test_a_size_that_has_no_room_for_drafts_is_never_probed():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    made.learn("lm", 4, [("none", (0, 0), 1.0)])
    for _ in range(200):
        assert resident(made, some, 4, trees=()).draft_plans == (NO_DRAFT_PLAN,) * 3
        ran(made, some, [NO_DRAFT_PLAN] * 3, CHEAP)
    made.learn("lm", 4, [("lm", (1, 1), 1.9)])
    probed = set()
    for _ in range(4000):
        draft_plans = resident(made, some, 4, trees=((1, 1),)).draft_plans
        probed.add((draft_plans[0].depth, draft_plans[0].nodes))
        ran(made, some, draft_plans, {0: 1.0, 1: 1.9})
    assert probed == {(0, 0), (1, 1)}


def test_a_costly_probe_takes_the_smallest_tree():
    for cost, depth in ((GUARDS.costly_probe - 0.1, 2), (GUARDS.costly_probe + 0.1, 1)):
        made, some = Planner("lm"), [sequence([1, 2], max_tokens=10_000)]
        made.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (1, 1), 1.2), ("lm", (2, 2), cost)])
        made.rates.priors["lm", 0] = AcceptanceRate(0.0, 0.0)
        while kinds(plan := resident(made, some, 1, trees=((1, 1), (2, 2)))) != ("probe",):
            ran(made, some, plan.draft_plans, {0: 1.0})
        assert plan.draft_plans[0].depth == depth


def test_drafting_must_repay_catching_up_in_few_steps():
    """Twice the speed of plain decoding earns half of every step's time, over the steps that are looked ahead."""
    for share, drafted in ((0.45, True), (0.55, False)):
        made, some = Planner("lm"), [sequence([1, 2], max_tokens=10_000)]
        made.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (1, 1), 1.0)])
        made.rates.by_sequence[some[0]] = {"lm": AcceptanceRate(1.0, 1.0)}
        made.costs.per_token["lm"] = share * GUARDS.payback_steps / 1000
        assert (resident(made, some, 1, 1000, trees=((1, 1),)).draft_plans[0].nodes > 0) == drafted


def test_what_catching_up_costs_is_earned_in_as_many_steps_as_answers_have_left():
    """Twice the speed of plain decoding earns half of every step's time: of 200 tokens, two a step, 50 plain steps'."""
    for length, costs, drafted in ((200, 45, True), (200, 55, False), (20, 4, True), (20, 6, False)):
        made, some = Planner("lm"), [sequence([1, 2], max_tokens=10_000)]
        made.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (1, 1), 1.0)])
        made.rates.by_sequence[some[0]] = {"lm": AcceptanceRate(1.0, 1.0)}
        for reason in ("stop", "length", "abort"):
            for _ in range(ENOUGH):
                ended = sequence([1, 2])
                ended.tokens += [3] * (1 if reason == "abort" else length)
                ended.finish_reason = reason
                made.forget(ended)
        made.costs.per_token["lm"] = costs / 1000
        assert (resident(made, some, 1, 1000, trees=((1, 1),)).draft_plans[0].nodes > 0) == drafted, (
            length,
            costs,
        )


def test_who_writes_longer_than_anybody_has_is_not_about_to_end():
    lengths, one = AnswerLengths(GUARDS), sequence([1, 2], max_tokens=10_000)
    lengths.recent.extend([100] * ENOUGH)
    assert lengths.steps_left([one], 2.0) == 50
    one.tokens += [3] * 60
    assert lengths.steps_left([one], 2.0) == 20
    one.tokens += [3] * 60
    assert lengths.steps_left([one], 2.0) == GUARDS.payback_steps / 2
    short = sequence([1, 2], max_tokens=10)
    assert lengths.steps_left([short], 2.0) == 5  # no more than it may write


# --------------------------------------------------------------------------------------- staged rows beside them


def test_the_batch_guard_is_for_all_rows():
    some = [sequence([1, i]) for i in range(17)]
    work, trees, here = [Work(s, s.pending) for s in some], {"lm": ((4, 4),)}, (*[True] * 16, False)
    for most, kind in ((16, "batch"), (17, "pays"), (None, "pays")):
        made = Planner("lm", guards=Guards(max_batch=most, start_depth=4))
        made.learn("lm", 32, [("none", (0, 0), 1.0), ("lm", (4, 4), 1.1)])
        plan = made.plan(work, Options(32, here, trees, max_depth=8))
        assert set(kinds(plan)) == {kind}
    assert (
        str(Planner("lm", guards=Guards(max_batch=16)).plan(work, Options()).reasons[0])
        == "off: batch 17 > 16"
    )


def test_resident_and_staged_rows_share_a_step_and_an_estimate():
    made, some = Planner("lm", guards=Guards(start_depth=8)), [sequence([1, i]) for i in range(3)]
    made.learn("lm", 2, [("none", (0, 0), 1.0), ("lm", (2, 2), 1.1)])
    work = [Work(some[0], 2), Work(some[1], 1), Work(some[2], 2)]  # the second reads its prompt
    plan = made.plan(work, Options(2, (True, False, False), {"lm": ((2, 2),)}, max_depth=8))
    assert kinds(plan) == ("pays", "prefill", "pays")
    assert [(draft_plan.depth, draft_plan.nodes) for draft_plan in plan.draft_plans[:2]] == [
        (2, 2),
        (0, 0),
    ] and plan.draft_plans[2].depth > 2
    before = made.rates.of(some[2], "lm").first
    outcomes = [Outcome(s, DraftPlan("lm", 2, 2), 2, 2, 0, 0) for s in (some[0], some[2])]
    record = StepRecord(7, 3, 3, 4, 0, 2, 0, 0, 1.0, 0, 1.0, outcomes, captured=("lm", (2, 2), 2))
    for _ in range(80):
        made.observe(record)
    assert made.rates.of(some[2], "lm").first < 0.2 * before
    fresh = [Work(sequence([2, 1]), 2), Work(sequence([2, 2]), 2)]
    made.costs.by_rows = {n: 1 + 0.2 * n for n in range(1, 64)}
    plan = made.plan(fresh, Options(2, (True, False), {"lm": ((2, 2),)}, max_depth=8))
    assert kinds(plan)[1] == "below break-even"  # what resident rows taught counts for staged ones


@pytest.mark.parametrize("count, held", [(16, True), (64, False)])
def test_among_many_one_may_fall_further_behind(count: int, held: bool) -> None:
    """One copies nothing and the others do: among sixteen it stops their drafts at once, among four times as many not
    yet.
    """
    made, some = Planner("lookup"), [sequence([1, i], max_tokens=1000) for i in range(count)]
    made.learn("lookup", count, [("none", (0, 0), 1.0), ("lookup", (4, 4), 1.8)])
    made.rates.trials["lookup"] = GUARDS.min_trials
    for s in some:
        accepts = 0.02 if s is some[0] else 0.95
        made.rates.by_sequence[s] = {"lookup": AcceptanceRate(accepts, accepts, 10)}
    draft_plan = DraftPlan("lookup", 4, 4)
    for _ in range(4):  # 0.8 of a plain step each
        outcomes = [Outcome(s, draft_plan, 4, 4, *[0 if s is some[0] else 4] * 2) for s in some]
        accepted = 4 * (count - 1)
        shape = ("lookup", (4, 4), count)
        record = StepRecord(
            5 * count, count, count, 4 * count, accepted, count + accepted, 0, 0, 1.8, 0, 1.8, outcomes
        )
        record.captured = shape
        made.observe(record)
    plan = resident(made, some, count, trees=((4, 4),))
    assert kinds(plan)[0] == ("stretch" if held else "pays")
    assert {draft_plan.nodes for draft_plan in plan.draft_plans} == ({0} if held else {4})
    assert (GUARDS.stretch(1), GUARDS.stretch(16)) == (GUARDS.max_stretch, GUARDS.max_stretch)
    assert GUARDS.stretch(64) == pytest.approx(1 + 4 * (GUARDS.max_stretch - 1))


def test_who_is_scored_anyway_is_not_probed_while_another_pays():
    """It takes no pass, and serves beside the other where it has something to say."""
    for model_free in ((), ("lookup",)):
        made, some = two_drafters()
        made.rates.priors["lookup", 0] = AcceptanceRate(0.02, 0.02)
        drafters(made, some, {"lm": 2}, 100, model_free)
        assert ("lookup" in drafters(made, some, {"lm": 2}, 1500, model_free)) == (not model_free)


def test_who_is_scored_anyway_is_not_probed_where_nothing_pays():
    """Once enough of it is known; its scores say when it pays again."""
    for model_free in ((), ("lookup",)):
        made, some = two_drafters()
        drafters(made, some, {}, 400, model_free)  # nothing is ever accepted
        made.rates.trials["lookup"] = GUARDS.min_trials
        assert ("lookup" in drafters(made, some, {}, 1500, model_free)) == (not model_free)
        made.rates.by_sequence[some[0]]["lookup"] = AcceptanceRate(0.95, 0.95, 10)
        assert "lookup" in drafters(made, some, {"lookup": 4}, 20, model_free)
