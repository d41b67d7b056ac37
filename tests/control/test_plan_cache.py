"""When a plan is kept, for how many steps and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.control.guards import HOLD, PROBE_SHARE
from outrider.control.history import PlanCache
from outrider.control.reasons import AUTO, NOTHING_FOUND, OFF, PREFILL
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Plan, Reason, TreeShape
from tests.control.build import KINDS, decoding, options_of, outcome, prompt, record, work_of

BELOW, PAYS, ASKED = Reason("below break-even"), Reason("pays", 2), Reason("asked", 2)
TWO = TreeShape(2, 2)
DRAFT = DraftPlan("lm", 2, 2)


def plan_of(work, reason: Reason) -> Plan:
    each = [PREFILL if one.known > 1 else reason for one in work]
    return Plan(
        tuple(DRAFT if why is PAYS else NO_DRAFT_PLAN for why in each),
        tuple(each),
        TWO if reason is PAYS else TreeShape(0, 0),
    )


def steps_held(cache: PlanCache, work, options: Options, reason: Reason = BELOW) -> int:
    """Steps that a new plan is used for after its own."""
    cache.put(work, plan_of(work, reason), options)
    held = 0
    while (found := cache.get(work, options, lambda one: AUTO)) is not None:
        assert found.cached and found.reasons == plan_of(work, reason).reasons
        held += 1
    return held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", [BELOW, OFF])
def test_plans_without_drafts_are_held_longer_the_longer_nothing_pays(kind, reason) -> None:
    cache, work = PlanCache(), work_of(decoding(), decoding())
    options = options_of(kind, work)
    # Beside no device a plan costs little, and is dropped when a sequence begins to copy.
    slower, most = (1, HOLD) if kind == "persistent" else (HOLD, 4 * HOLD)
    held = [steps_held(cache, work, options, reason) for _ in range(slower * (most + 2))]
    assert held == [min(i // slower, most) for i in range(len(held))]
    assert steps_held(cache, work, options, PAYS) == 0
    assert steps_held(cache, work, options, reason) == 0  # it starts again
    cache.clear()
    cache.left = 0
    assert steps_held(cache, work, options, reason) == 0


@pytest.mark.parametrize(("share", "steps"), [(0.0, 0), (0.9, 0), (2.5, 2), (100.0, 4 * HOLD)])
def test_a_host_packed_plan_is_held_the_longer_the_more_of_a_step_it_takes(share: float, steps: int) -> None:
    """`share`: of its step, in the share of the time that planning may take."""
    cache, work = PlanCache(), work_of(decoding())
    step = record()
    step.plan_s, step.total_s = share * PROBE_SHARE * 0.02, 0.02
    cache.observe(step)
    assert steps_held(cache, work, Options()) == steps
    assert steps_held(cache, work, Options(), NOTHING_FOUND) == 0


def test_a_host_packed_plan_is_dropped_when_a_sequence_begins_to_copy() -> None:
    """Not for a single token, which is right by chance every now and then."""
    one, two = work_of(decoding(), decoding())
    for kind, right, kept in (("packed", 1, True), ("packed", 2, False), ("persistent", 2, True)):
        options = options_of(kind, [one, two])
        cache, step = held(options, [one, two]), record(tree=TWO if kind == "persistent" else None)
        step.shadow = [outcome(two.sequence, "lookup", 4, 0), outcome(one.sequence, "lookup", 4, right)]
        cache.observe(step)
        assert (cache.get([one, two], options, lambda _: AUTO) is not None) == kept


def test_host_packed_plans_that_a_slowdown_keeps_from_drafting_are_held_like_others() -> None:
    slowdown, work = Reason("slowdown"), work_of(decoding(), decoding())
    packed, persistent = held(Options(), work, slowdown), options_of("persistent", work)
    assert packed.get(work, Options(), lambda _: AUTO) is not None
    assert held(persistent, work, slowdown).get(work, persistent, lambda _: AUTO) is None
    packed.put(work, replace(plan_of(work, slowdown), draft_plans=(DRAFT, NO_DRAFT_PLAN)), Options())
    assert packed.get(work, Options(), lambda _: AUTO) is None  # it drafts


def test_what_lookup_finds_is_looked_up_in_every_host_packed_step() -> None:
    cache, work = PlanCache(), work_of(decoding())
    assert {steps_held(cache, work, Options(), NOTHING_FOUND) for _ in range(40)} == {0}


def held(options: Options, work, reason: Reason = BELOW) -> PlanCache:
    """A cache that has a plan for a few steps."""
    cache = PlanCache()
    for _ in range(HOLD * HOLD):
        cache.put(work, plan_of(work, reason), options)
    return cache


def test_host_packed_plans_are_for_the_same_sequences() -> None:
    one, two, three = work_of(decoding(), decoding(), decoding())
    for other in ([one], [one, three], [one, two, three], [one, prompt()]):
        cache = held(Options(), [one, two])
        assert cache.get(other, Options(), lambda _: AUTO) is None
        assert cache.get([two, one], Options(), lambda _: AUTO) is not None
    cache.forget(two.sequence)
    assert cache.get([one, two], Options(), lambda _: AUTO) is None


def test_sequences_may_leave_the_persistent_batch_and_join_it_where_nothing_pays() -> None:
    one, two, new, reading = *work_of(decoding(), decoding(), decoding()), prompt()
    options = options_of("persistent", [one, two])

    def get(cache: PlanCache, *work, settled=AUTO, **changes) -> Plan | None:
        now = replace(options_of("persistent", list(work), size=2), **changes)
        return cache.get(list(work), now, lambda _: settled)

    cache = held(options, [one, two])
    assert get(cache, one).draft_plans == (NO_DRAFT_PLAN,)
    joined = get(cache, one, new, reading)
    assert [why.kind for why in joined.reasons] == [BELOW.kind, BELOW.kind, "prefill"]
    assert joined.resident == (True, True, False)
    assert get(cache, one, new, settled=ASKED) is not None  # it has joined before
    assert get(held(options, [one, two]), one, new, settled=ASKED) is None  # its request fixed something
    joined = get(held(options, [one, two]), one, new, settled=OFF)
    assert [why.kind for why in joined.reasons] == [BELOW.kind, "off"]
    assert get(held(options, [one, two]), one, size=4) is None
    assert get(held(options, [one, two]), reading, after_prompts=True) is None
    off = held(options, [one, two], OFF)
    assert get(off, one) is not None and get(off, one, new) is None  # whether it pays for others is not known
    assert get(off, one, new, reading, settled=OFF).reasons == (OFF, OFF, PREFILL)


def test_a_plan_made_beside_prompts_is_dropped_when_they_end() -> None:
    one, reading = *work_of(decoding()), prompt()
    work = [one, reading]
    options = options_of("persistent", work)
    cache = held(options, work)
    assert cache.get(work, options, lambda _: AUTO) is not None
    assert cache.get([one], options_of("persistent", [one]), lambda _: AUTO) is None
    cache = held(Options(), work)
    assert cache.get(work, Options(), lambda _: AUTO) is None  # host-packed rows plan beside every chunk


def test_plans_with_drafts_are_held_where_the_device_waits_for_the_host() -> None:
    cache, work = PlanCache(), work_of(decoding(), decoding())
    options = options_of("persistent", work)
    step = record(*(outcome(one.sequence, "lm", 2, 1) for one in work), tree=TWO, plan_s=0.3, waited_s=0.5)
    cache.observe(step)
    assert not cache.host_bound and steps_held(cache, work, options, PAYS) == 0
    cache.observe(replace(step, waited_s=0.2))
    assert cache.host_bound and steps_held(cache, work, options, PAYS) == HOLD // 2
    cache.observe(replace(step, waited_s=0.5, plan_cached=True, plan_s=0.01))  # a plan would take 0.3 of that
    assert cache.host_bound
    plan = replace(plan_of(work, PAYS), prefills=(0,))
    cache.put(work, plan, options)
    assert cache.get(work, options, lambda _: AUTO) is None  # a drafter prefills once
    probing = replace(plan_of(work, PAYS), reasons=(Reason("probe"), Reason("probe")))
    cache.put(work, probing, options)
    assert cache.get(work, options, lambda _: AUTO) is None
    assert steps_held(cache, work, Options(), PAYS) == 0
    cache.observe(replace(step, waited_s=0.7, plan_cached=True))
    assert not cache.host_bound
    cache.observe(replace(step, waited_s=0.0, captured=None))
    assert not cache.host_bound


def test_a_probe_halves_the_patience_of_a_host_that_holds_up_the_device() -> None:
    held = {}
    for waited in (0.5, 0.2):
        cache, work = PlanCache(), work_of(decoding(), decoding())
        options = options_of("persistent", work)
        outcomes = (outcome(one.sequence, "lm", 2, 1) for one in work)
        cache.observe(record(*outcomes, tree=TWO, plan_s=0.3, waited_s=waited))
        for _ in range(6):
            cache.put(work, plan_of(work, BELOW), options)
        cache.put(work, replace(plan_of(work, PAYS), reasons=(Reason("probe"), Reason("probe"))), options)
        held[cache.host_bound] = cache.without
    assert held == {False: 0, True: 3}


def test_where_the_device_waits_for_the_host_no_plan_is_made_beside_prompts_for_a_while() -> None:
    cache, work = PlanCache(), work_of(decoding(), decoding())
    beside = [*work, prompt()]
    alone, reading = options_of("persistent", work), options_of("persistent", beside, size=2)
    assert steps_held(cache, work, alone) == 0
    assert cache.get(beside, reading, lambda one: AUTO) is None  # the device does not wait
    cache.host_bound = True
    held = 0
    while cache.get(beside, reading, lambda one: AUTO) is not None:
        assert cache.get(work, alone, lambda one: AUTO) is None
        held += 1
    assert held == HOLD
    cache.put(work, plan_of(work, PAYS), alone)
    assert cache.get(beside, reading, lambda one: AUTO) is None  # not with drafts


def test_where_the_device_waits_for_the_host_a_plan_without_drafts_is_soon_held_for_many_steps() -> None:
    cache, work = PlanCache(), work_of(decoding())
    cache.host_bound = True
    options = options_of("persistent", work)
    assert [steps_held(cache, work, options) for _ in range(7)] == [0, 1, 3, 7, 15, 31, 4 * HOLD]
