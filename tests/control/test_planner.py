"""The planner's decisions, for the persistent batch and for host-packed sequences alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.control.candidates import ASKED_DEPTH
from outrider.control.guards import FIRST, MARGIN, PROBE_INTERVAL, PROBE_SHARE, Guards
from outrider.control.planner import Planner
from outrider.types import (
    NO_DRAFT_PLAN,
    NO_TREE,
    DraftPlan,
    Options,
    Outcome,
    Plan,
    Sequence,
    TreeShape,
    Work,
)
from tests.control.build import (
    CHAINS,
    EVERY_DEPTH,
    KINDS,
    achieves,
    decoding,
    depths,
    kinds,
    options_of,
    outcome,
    packed,
    persistent,
    planner_of,
    prompt,
    record,
    work_of,
)

BOTH = pytest.mark.parametrize("kind", KINDS)


def planned(planner: Planner, kind: str, *sequences: Sequence, beside: tuple[Work, ...] = (), **more) -> Plan:
    work = [*work_of(*sequences), *beside]
    return planner.plan(work, options_of(kind, work, **more))


# ------------------------------------------------------------------------------------------ guards


@BOTH
@pytest.mark.parametrize(
    ("params", "guards", "reason", "plan"),
    [
        ({"speculation": False}, {}, "off", None),
        ({"temperature": 1.5}, {}, "pays", ...),
        ({"temperature": 1.51}, {}, "temperature", None),
        ({}, {"max_batch": 2}, "pays", ...),
        ({}, {"max_batch": 1}, "batch", None),
        ({"temperature": 1.6, "speculation": {"depth": 2}}, {"max_batch": 1}, "asked", DraftPlan("lm", 2, 2)),
    ],
)
def test_guards_settle_what_they_are_asked_for(kind, params, guards, reason, plan) -> None:
    planner = planner_of(row=0.001, guards=Guards(**guards))
    found = planned(planner, kind, decoding(**params), decoding(speculation=False))
    assert kinds(found) == [reason, "off"]
    assert found.draft_plans[0] == (NO_DRAFT_PLAN if plan is None else plan) or plan is ...
    assert bool(found.draft_plans[0].nodes) == (reason in ("pays", "asked"))


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        ({"depth": 3}, DraftPlan("lm", 3, 3)),
        ({"nodes": 9}, DraftPlan("lm", 9, ASKED_DEPTH)),
        ({"nodes": 2}, DraftPlan("lm", 2, 2)),
        ({"depth": 3, "nodes": 7}, DraftPlan("lm", 7, 3)),
        ({"depth": 3, "nodes": 7, "mode": "rejection"}, DraftPlan("lm", 3, 3)),
        ({"tree": (3, 2), "drafter": "lookup"}, DraftPlan("lookup", 9, 2, (3, 2))),
        ({}, DraftPlan("lm", 5, 5)),  # the planner's own, for all requests
    ],
)
def test_what_a_request_asks_for_is_planned(asked, plan) -> None:
    planner = planner_of(depth=5) if not asked else planner_of()
    assert planned(planner, "packed", decoding(speculation=asked)).draft_plans == (plan,)


def test_prompt_chunks_have_no_draft_and_the_last_may_have_one() -> None:
    last = prompt(64, 64)
    achieves(planner := planner_of(row=0.001), last.sequence, "lm", 0.9)
    for options, chunk, reason in (
        (packed(), prompt(), "prefill"),
        (packed(), last, "pays"),
        (packed(after_prompts=False), last, "prefill"),
    ):
        assert kinds(planner.plan([chunk], options)) == [reason]


def test_a_last_chunk_of_one_token_is_prefill_while_the_chunk_before_it_is_in_flight() -> None:
    last = prompt(1, 64)
    last.sequence.cached = 40
    last.sequence.launched = 23
    last = Work(last.sequence, 1)
    achieves(planner := planner_of(row=0.001), last.sequence, "lm", 0.9)
    assert last.emits and kinds(planner.plan([last], packed(after_prompts=False))) == ["prefill"]
    last.sequence.cached, last.sequence.launched = 63, 0
    assert kinds(planner.plan([Work(last.sequence, 1)], packed(after_prompts=False))) == ["pays"]


def test_a_request_that_names_a_drafter_gets_no_other() -> None:
    planner, one = planner_of(names=("lm", "lookup")), decoding(speculation={"drafter": "lm"})
    achieves(planner, one, "lm", 0.3)
    achieves(planner, one, "lookup", 0.9)
    more = {"model_free": ("lookup",)}
    assert planned(planner, "persistent", one, leads=("lm", "lookup"), **more).draft_plans[0].drafter == "lm"
    assert planned(planner, "packed", one, available={"lookup": [9]}, **more).draft_plans[0].drafter == "lm"


# ------------------------------------------------------------------------------------------ value and choice


@BOTH
def test_no_draft_where_rows_cost_what_they_bring(kind) -> None:
    for row, reason in ((0.02, "pays"), (0.3, "below break-even")):
        planner, some = planner_of(row, level=0.05), [decoding() for _ in range(8)]
        for one in some:
            achieves(planner, one, "lm", 0.6)
        plan = planned(planner, kind, *some)
        assert set(kinds(plan)) == {reason} and any(depths(plan)) == (reason == "pays")
        facts = dict(plan.reasons[0].facts)
        assert (facts["expected"] > facts["needed"]) == (reason == "pays") and facts["drafter"] in (
            "lm",
            "none",
        )


def test_the_likelier_sequence_gets_the_rows() -> None:
    planner, likely, unlikely = planner_of(row=0.15), decoding(), decoding()
    achieves(planner, likely, "lm", 0.9)
    achieves(planner, unlikely, "lm", 0.2)
    plan = planned(planner, "packed", unlikely, likely)
    assert depths(plan)[0] == 0 < depths(plan)[1] and kinds(plan) == ["below break-even", "pays"]


def test_rows_that_others_asked_for_count() -> None:
    """A block of rows is full: each further one costs half a step."""
    planner, one, other = planner_of(), decoding(), decoding(speculation={"depth": 6})
    planner.costs.eager.by_rows = {n: 1.0 + 0.5 * max(n - 8, 0) for n in range(1, 99)}
    achieves(planner, one, "lm", 0.7)
    assert depths(planned(planner, "packed", one, decoding(speculation=False)))[0] >= 3
    assert depths(planned(planner, "packed", one, other)) == [0, 6]


def test_second_choices_are_drafted_where_rows_are_cheap() -> None:
    for row, mode, wide in ((0.001, "coupled", True), (0.3, "coupled", False), (0.001, "rejection", False)):
        planner, one = planner_of(row, guards=Guards(max_depth=4)), decoding(speculation={"mode": mode})
        achieves(planner, one, "lm", 0.6)
        plan = planned(planner, "packed", one, branching=frozenset(("lm",))).draft_plans[0]
        assert (plan.nodes > plan.depth > 0) == wide


@pytest.mark.parametrize("first", [0.3, 0.55, 0.8, 0.95])
@pytest.mark.parametrize("row", [0.005, 0.05])
def test_the_shared_tree_brings_the_most_tokens_per_second(first: float, row: float) -> None:
    planner, one = planner_of(row, level=0.04), decoding()
    achieves(planner, one, "lm", first)
    trees, rate = (*CHAINS, TreeShape(2, 6), TreeShape(3, 15)), planner.rates.of(one, "lm")
    speed = {tree: (1 + rate.accepted(tree)) / (1 + row * tree.nodes + 0.04 * tree.depth) for tree in trees}
    best = max(speed, key=speed.__getitem__)
    plan = planned(planner, "persistent", one, trees=trees)
    assert plan.tree == best and plan.draft_plans == (DraftPlan("lm", best.nodes, best.depth),)
    assert plan.drafters == ("lm",) and plan.resident == (True,)


@BOTH
def test_model_free_drafters_draft_beside_the_lead(kind) -> None:
    planner, copies, new = planner_of(names=("lm", "lookup")), decoding(), decoding()
    for one, lm, lookup in ((copies, 0.5, 0.9), (new, 0.8, 0.05)):
        achieves(planner, one, "lm", lm)
        achieves(planner, one, "lookup", lookup)
    more = {"model_free": ("lookup",), **({} if kind == "persistent" else {"available": {"lookup": [8, 8]}})}
    plan = planned(planner, kind, copies, new, **more)
    assert [one.drafter for one in plan.draft_plans] == ["lookup", "lm"]
    assert plan.drafters == (("lm", "lookup") if kind == "persistent" else ())


@BOTH
def test_depth_follows_temperature(kind) -> None:
    """By what is expected at a temperature alone."""
    chosen = []
    for temperature in (0.0, 0.7, 1.5):
        planner, some = planner_of(level=0.06), [decoding(temperature=temperature) for _ in range(4)]
        for one in some:
            planner.rates.of(one, "lm").earned = 60
        plan = planned(planner, kind, *some, **({"trees": EVERY_DEPTH} if kind == "persistent" else {}))
        chosen.append(max(depths(plan)))
    assert 8 > chosen[0] >= chosen[1] >= chosen[2] > 0 and chosen[0] > chosen[2], chosen
    planner, some = planner_of(level=0.06), [decoding(temperature=0.7) for _ in range(4)]
    planner.rates.expect("lm", 0.7, 0.05, 0.05)  # a draft that was scored at this temperature
    assert not any(depths(planned(planner, kind, *some)))


@BOTH
def test_drafting_begins_for_a_clear_gain_and_ends_where_none_is_left(kind) -> None:
    planner, one = planner_of(row=0.2, guards=Guards(max_depth=1)), decoding()
    found = []
    for speedup in (1 + MARGIN / 2, 1 + 2 * MARGIN, 1 + MARGIN / 2, 0.99, 1 + MARGIN / 2):
        achieves(planner, one, "lm", 1.2 * speedup - 1)
        found += depths(planned(planner, kind, one))
    assert found == [0, 1, 1, 0, 0]


@BOTH
def test_a_drafter_is_left_for_a_clear_gain(kind) -> None:
    planner, one = planner_of(row=0.2, names=("lm", "eagle"), guards=Guards(max_depth=1)), decoding()
    found = []
    more = {"leads": ("lm", "eagle")} if kind == "persistent" else {}
    for eagle in (0.5, 0.65, 0.75, 0.65, 0.5):
        achieves(planner, one, "lm", 0.6)
        achieves(planner, one, "eagle", eagle)
        found.append(planned(planner, kind, one, **more).draft_plans[0].drafter)
    assert found == ["lm", "lm", "eagle", "eagle", "lm"]


@BOTH
@pytest.mark.parametrize("asked", [True, False])
def test_requests_that_are_slowed_down_beyond_their_bound_are_not_slowed_further(kind, asked) -> None:
    """Also those that may not draft."""
    planner, gains, waits = planner_of(row=0.05), decoding(), decoding(speculation=asked)
    achieves(planner, gains, "lm", 0.97)
    achieves(planner, waits, "lm", 0.0)
    first = planned(planner, kind, gains, waits)
    assert depths(first)[0] > 0 and kinds(first)[0] == "pays"
    tree = TreeShape(4, 4) if kind == "persistent" else None
    step = record(
        outcome(gains, "lm", 4, 4),
        outcome(waits, "lm", 0, 0, 4 if tree and asked else 0),
        seconds=2.0,
        tree=tree,
    )
    for _ in range(6):
        planner.observe(step)
    achieves(planner, gains, "lm", 0.97)
    plan = planned(planner, kind, gains, waits)
    assert (
        kinds(plan) == ["slowdown", "slowdown" if asked else "off"] and max(depths(plan)) < depths(first)[0]
    )
    assert plan.reasons[0].facts[0][0] == "slowdown"
    waits.tokens += [1] * 200  # it has caught up
    waits.cached = len(waits.tokens) - 1
    assert kinds(planned(planner, kind, gains, waits))[0] == "pays"


def test_a_request_beyond_its_bound_drafts_as_far_as_its_own_tokens_pay() -> None:
    """A level of a chain takes 0.095 of a plain step, and 0.1 tokens are expected of the first."""
    planner, gains, waits = planner_of(row=0.05), decoding(), decoding()
    achieves(planner, gains, "lm", 0.97)
    achieves(planner, waits, "lm", 0.1)
    assert depths(planned(planner, "persistent", gains, waits))[0] > 2
    for late in (False, True):
        if late:
            planner.fairness.lag[waits] = 100.0
            planner.fairness.late.add(waits)
        plan = planned(planner, "persistent", gains, waits)
        assert (plan.tree.depth == 1) == late and (kinds(plan)[0] == "slowdown") == late


@BOTH
def test_the_latency_objective_counts_each_sequence(kind) -> None:
    found = {}
    for objective in ("throughput", "latency"):
        planner, gains, waits = (
            planner_of(row=0.06, guards=Guards(objective=objective)),
            decoding(),
            decoding(),
        )
        achieves(planner, gains, "lm", 0.97)
        achieves(planner, waits, "lm", 0.0)
        found[objective] = depths(planned(planner, kind, gains, waits))[0]
    assert found["latency"] < found["throughput"], found


@BOTH
def test_sequences_that_may_not_draft_wait_for_those_that_do(kind) -> None:
    for others, reason in ((0, "pays"), (12, "below break-even")):
        planner, one = planner_of(row=0.1, guards=Guards(max_depth=1)), decoding()
        achieves(planner, one, "lm", 0.8)
        settled = [decoding(speculation=False) for _ in range(others)]
        assert kinds(planned(planner, kind, one, *settled))[0] == reason


# ------------------------------------------------------------------------------------------ prefill of drafters


@BOTH
def test_a_drafters_prefill_is_earned_by_the_sequences_own_tokens(kind) -> None:
    """A newcomer with a long prompt and a short answer is left out while the others draft."""
    for lag, tokens, drafts in ((5000, 12, False), (5000, 4000, True), (20, 4000, True), (0, 12, True)):
        planner, some = planner_of(), [decoding(), decoding(), decoding(max_tokens=tokens)]
        planner.costs.eager.per_token["lm"] = planner.costs.captured.per_token["lm"] = 0.01
        for one in some:
            achieves(planner, one, "lm", 0.7)
        plan = planned(planner, kind, *some, lag={"lm": [0, 0, lag]})
        assert [depth > 0 for depth in depths(plan)] == [True, True, drafts], (lag, tokens)
        assert plan.prefills == ((2,) if drafts and lag and kind == "persistent" else ())


def test_a_step_prefills_only_what_it_has_rows_for_and_one_at_least() -> None:
    planner, some = planner_of(row=0.001), [decoding() for _ in range(4)]
    for one in some:
        achieves(planner, one, "lm", 0.8)

    def of(lag: list[int], blocked=(False,) * 4) -> tuple[tuple[int, ...], list[bool]]:
        plan = planned(planner, "persistent", *some, lag={"lm": lag}, blocked={"lm": blocked}, max_prefill=50)
        assert (plan.tree == NO_TREE) == (not any(depths(plan)))
        return plan.prefills, [depth > 0 for depth in depths(plan)]

    assert of([30, 0, 30, 20]) == ((0, 3), [True, True, False, True])
    assert of([900, 0, 30, 0]) == ((0,), [True, True, False, True])
    # Prefilled now, and drafting once the steps in flight are settled.
    assert of([10, 0, 10, 0], (True, False, False, False)) == ((0, 2), [False, True, True, True])
    assert of([10] * 4, (True,) * 4) == ((0, 1, 2, 3), [False] * 4)


@BOTH
def test_prompts_that_wait_for_the_step_count_as_delayed(kind) -> None:
    def reason(**more) -> str:
        planner, some = planner_of(row=0.04), [decoding() for _ in range(2)]
        for one in some:
            achieves(planner, one, "lm", 0.6)
        return kinds(planned(planner, kind, *some, **more))[0]

    chunk = (prompt(1, 2),)  # it costs the step nothing that drafts would be compared with
    assert reason(beside=chunk) == "pays" and reason(beside=chunk, waiting=60) == "below break-even"
    # With a persistent batch, prompts that no step reads wait for slots and not for this step.
    assert reason(waiting=60) == ("pays" if kind == "persistent" else "below break-even")


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_must_pay_beside_the_prompt_rows_of_its_step(kind) -> None:
    """An accepted token saves a later step without them."""
    planner, one = planner_of(row=0.2, guards=Guards(max_depth=1)), decoding()
    planner.costs.captured.with_prompts = {(1, 64): 3.0}
    found = {}
    for rows in (8, 0):
        achieves(planner, one, "lm", 0.5)
        beside = (prompt(rows),) if rows else ()
        plan = planned(planner, kind, one, beside=beside, **({"size": 1} if kind == "persistent" else {}))
        found[rows] = dict(plan.reasons[0].facts)["needed"]
    assert found[0] == pytest.approx(0.2) and found[8] == pytest.approx(0.4)  # two wait for it, one gains


def test_where_most_steps_read_prompts_an_accepted_token_saves_more() -> None:
    needed = []
    for prompts in (0, 60):
        planner, one = planner_of(row=0.2, guards=Guards(max_depth=1)), decoding()
        for _ in range(prompts):  # 15 rows of 0.2: each step takes four times a plain one
            planner.costs.observe(replace(record(seconds=4.0), rows=16, known=16, prompt_rows=15))
        achieves(planner, one, "lm", 0.5)
        plan = planned(planner, "packed", one, beside=(prompt(8),))
        needed.append(dict(plan.reasons[0].facts)["needed"])
    assert needed == [pytest.approx(0.4), pytest.approx(0.1, rel=0.02)]


# ------------------------------------------------------------------------------------------ probes and baselines


def steps(
    planner: Planner,
    kind: str,
    some: list[Sequence],
    right: Callable[[], float],
    count: int,
    row: float,
    level: float,
) -> Iterator[tuple[Plan, float]]:
    """Plans of steps in a row, and their seconds. `right`: whether drafts are accepted."""
    for _ in range(count):
        work = work_of(*some)
        options = options_of(kind, work)
        plan = planner.kept(work, options) or planner.plan(work, options)
        nodes = sum(one.nodes for one in plan.draft_plans)
        rows = len(some) * (1 + plan.tree.nodes) if kind == "persistent" else len(some) + nodes
        seconds = 1 + row * (rows - 1) + level * max(depths(plan))
        each = [
            outcome(s, p.drafter, p.depth, p.depth if right() else 0)
            for s, p in zip(some, plan.draft_plans, strict=True)
        ]
        tree = plan.tree if kind == "persistent" else None
        for one in each:
            one.sequence.tokens += [1] * (1 + one.accepted)
            one.sequence.cached = len(one.sequence.tokens) - 1
        planner.observe(
            record(
                *each,
                seconds=seconds,
                tree=tree,
                rows=rows,
                draft_s=level * max(depths(plan)) if tree is None else 0.0,
            )
        )
        yield plan, seconds


@BOTH
def test_probes_take_a_small_share_of_the_time_and_find_what_changed(kind) -> None:
    planner, some = planner_of(row=0.05, level=0.2), [decoding(max_tokens=20_000) for _ in range(2)]
    for one in some:
        achieves(planner, one, "lm", 0.0)
    taken = list(steps(planner, kind, some, lambda: False, 2500, 0.05, 0.2))
    probes = [i for i, (plan, _) in enumerate(taken) if "probe" in kinds(plan)]
    plain = planner.costs.captured.plain(2) if kind == "persistent" else planner.costs.eager.plain(2)
    lost = sum(seconds - 1.05 for _, seconds in taken)
    assert (
        probes
        and lost <= 1.1 * PROBE_SHARE * sum(seconds for _, seconds in taken)
        and plain == pytest.approx(1.05, rel=0.1)
    )
    assert min(b - a for a, b in pairwise(probes)) >= PROBE_INTERVAL
    found = [kinds(plan)[0] for plan, _ in steps(planner, kind, some, lambda: True, 400, 0.05, 0.2)]
    first = next(i for i, kind_ in enumerate(found) if "pays" in kind_)
    last = [i for i, kind_ in enumerate(found[:first]) if kind_ == "probe"]
    assert last and set(found[last[0] : first]) <= {"probe", "below break-even"}
    assert first - last[0] <= 12 and found[-5:].count("pays") >= 4  # one that paid is followed by another


@BOTH
def test_a_probe_is_not_made_again_while_one_is_in_flight(kind) -> None:
    planner, one = planner_of(row=0.5), decoding()
    achieves(planner, one, "lm", 0.0)
    current = planner.persistent if kind == "persistent" else planner.packed
    assert kinds(planned(planner, kind, one)) == ["below break-even"]
    current.idle["lm"] = PROBE_INTERVAL - 1e-6
    assert kinds(planned(planner, kind, one)) == ["below break-even"]
    current.idle["lm"] = 1e6
    probe = planned(planner, kind, one)
    assert kinds(probe) == ["probe"] and probe.draft_plans[0] == DraftPlan("lm", 2, 2)
    assert kinds(planned(planner, kind, one)) == ["below break-even"]


@BOTH
def test_a_probe_by_a_drafter_that_lags_costs_its_prefill(kind) -> None:
    """Sequences without lag are tried; if all lag, the one that lags least."""
    current, found = "persistent" if kind == "persistent" else "packed", []
    for lag, idle in (([900, 0, 500], 1e3), ([900, 800, 500], 1e3), ([900, 800, 500], 1e7)):
        planner, some = planner_of(row=0.5), [decoding() for _ in range(3)]
        planner.costs.eager.per_token["lm"] = planner.costs.captured.per_token["lm"] = 0.1
        for one in some:
            achieves(planner, one, "lm", 0.0)
        getattr(planner, current).idle["lm"] = idle
        found.append([depth > 0 for depth in depths(planned(planner, kind, *some, lag={"lm": lag}))])
    assert found == [[False, True, False], [False] * 3, [False, False, True]]


def test_model_free_drafters_are_probed_only_before_their_first_score() -> None:
    planner, one = planner_of(row=0.5, names=("lookup",)), decoding()
    planner.rates.of(one, "lookup").first = 0.0
    planner.persistent.idle["lookup"] = 1e6
    options = {"leads": ("lookup",), "model_free": ("lookup",)}
    assert kinds(planned(planner, "persistent", one, **options)) == ["probe"]
    planner.persistent.idle["lookup"] = 1e6
    planner.scored(outcome(one, "lookup", 2, 0))
    assert kinds(planned(planner, "persistent", one, **options)) == ["below break-even"]


@BOTH
def test_a_plain_step_is_taken_when_a_baseline_is_due(kind) -> None:
    planner, one, asks = planner_of(row=0.001), decoding(), decoding(speculation={"depth": 2})
    achieves(planner, one, "lm", 0.9)
    costs = planner.costs.captured if kind == "persistent" else planner.costs.eager
    costs.baselines.since = {1: 1000, 2: 1000}
    plan = planned(planner, kind, one)
    assert kinds(plan) == ["baseline"] and depths(plan) == [0] and plan.tree == NO_TREE
    assert "asked" in kinds(planned(planner, kind, one, asks))  # what is asked for is done
    costs.baselines.since.clear()
    assert kinds(planned(planner, kind, one)) == ["pays"]


def test_plain_steps_are_measured_before_drafts_are_planned() -> None:
    planner, one, off = Planner("lm", choices=("lm",)), decoding(), decoding(speculation=False)
    work = work_of(one)
    assert planner.unmeasured(work, persistent(work)) == "lm"
    assert planner.unmeasured(work_of(off), persistent(work_of(off))) == "none"
    assert planner.unmeasured(work, packed()) == "none"
    plan = planned(planner, "persistent", one)
    assert kinds(plan) == ["unmeasured"] and depths(plan) == [0]
    planner.costs.captured.learn("lm", 1, [("none", NO_TREE, 1.0), ("lm", TreeShape(2, 2), 1.1)])
    assert planner.unmeasured(work, persistent(work)) == "none" and kinds(
        planned(planner, "persistent", one)
    ) == ["pays"]
    assert planner.unmeasured(work, persistent(work, size=2)) == "lm"


# ------------------------------------------------------------------------------------------ asked plans share a tree


def test_drafts_that_were_asked_for_share_one_tree() -> None:
    def of(*asked, trees=EVERY_DEPTH, **more) -> Plan:
        planner = planner_of(names=("lm", "lookup"), row=9.0)  # no draft would be chosen
        some = [decoding(speculation=one) for one in asked]
        return planned(planner, "persistent", *some, trees=trees, model_free=("lookup",), **more)

    lookup = {"drafter": "lookup", "depth": 9}
    plan = of({"depth": 3}, lookup, False, {"depth": 20}, {})
    assert plan.tree == (8, 8) and plan.drafters == ("lm", "lookup")
    assert [(p.drafter, p.depth) for p in plan.draft_plans] == [
        ("lm", 3),
        ("lookup", 8),
        ("none", 0),
        ("lm", 8),
        ("lm", 8),
    ]
    assert kinds(plan) == ["asked", "asked", "off", "asked", "pays"]  # its rows are there anyway
    assert of(lookup, {"drafter": "lookup", "depth": 2}).drafters == ("lookup",)
    assert of({"depth": 3}).tree == (3, 3)  # the smallest that holds it
    wide = of({"depth": 3, "nodes": 15}, lookup, trees=(*EVERY_DEPTH, TreeShape(3, 15)))
    assert wide.tree == (3, 15) and depths(wide) == [3, 0] and wide.drafters == ("lm",)
    lagging = of({"depth": 3}, {}, lag={"lm": [40, 40]})
    assert lagging.prefills == (0,) and depths(lagging) == [3, 0]  # no prefill for a draft made for others
    assert of({"depth": 3}, trees=()).tree == NO_TREE


def test_what_the_host_drafts_nothing_for_runs_in_the_persistent_batch() -> None:
    planner, asks, waits = planner_of(row=9.0), decoding(speculation={"tree": (2,)}), decoding()
    work = work_of(asks, waits)
    options = Options(0, (False, False), (True, True))
    assert planner.plan(work, options).resident == (False, True)
    assert planner.plan(work, replace(options, decodes=())).resident == (False, False)


# ------------------------------------------------------------------------------------------ learning


def test_a_captured_tree_is_valued_by_first_choices_and_a_grown_one_by_its_depth() -> None:
    for tree, right in ((TreeShape(2, 6), False), (None, True)):
        planner, one = planner_of(), decoding()
        planner.observe(record(Outcome(one, DraftPlan("lm", 6, 2), 6, 2, 2, 0), tree=tree))
        assert planner.rates.of(one, "lm").right is right


def test_a_captured_drafter_that_found_nothing_was_wrong_and_a_host_packed_one_was_not_asked() -> None:
    for tree, first in ((TreeShape(2, 2), FIRST * 2 / 3), (None, FIRST)):
        planner, one = planner_of(names=("lookup",)), decoding()
        assert planner.rates.of(one, "lookup").first == FIRST
        planner.observe(record(outcome(one, "lookup", 0, 0, planned=2), tree=tree, lead="lookup"))
        assert planner.rates.of(one, "lookup").first == pytest.approx(first)


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    planner, one, two = planner_of(), decoding(), decoding()
    planned(planner, "packed", one, two)
    one.finish_reason = "stop"
    planner.forget(one)
    planner.observe(record(outcome(one, "lm", 2, 0), outcome(two, "lm", 2, 0), seconds=2.0))  # settled later
    for known in (planner.rates.by_sequence, planner.fairness.lag, planner.cache.by_sequence):
        assert one not in known
    assert list(planner.lengths.recent) == [1]


@BOTH
def test_a_drafter_with_other_weights_is_tried_again(kind) -> None:
    planner, one = planner_of(row=0.4), decoding()
    planner.returns.watch("lm", 5)
    planner.returns.unprofitable["lm"] = 5
    achieves(planner, one, "lm", 0.0)
    list(steps(planner, kind, [one], lambda: False, 30, 0.4, 0.0))
    planner.forget_drafters(["lm"])
    assert (
        planner.rates.of(one, "lm").first == FIRST
        and not planner.returns.unprofitable
        and planner.returns.held
    )
    assert planner.kept(work_of(one), options_of(kind, work_of(one))) is None
    planner.rates.of(one, "lm").first = 0.0
    assert kinds(planned(planner, kind, one)) == ["probe"]


def test_a_released_drafter_is_replaced_by_what_is_left() -> None:
    planner = planner_of(names=("lm", "lookup"))
    planner.returns.watch("lm", 5)
    planner.release(["lm"])
    assert (planner.default, planner.choices, planner.returns.held) == ("lookup", ("lookup",), {})
    planner.release(["lookup"])
    assert (planner.default, planner.choices) == ("none", ()) and kinds(
        planned(planner, "packed", decoding())
    ) == ["off"]
