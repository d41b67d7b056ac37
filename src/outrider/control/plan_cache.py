"""Reuses a plan for a few steps, where a new plan would delay the device or say the same.

A plan without drafts is reused the longer, the more plans in a row found nothing that pays. A plan with drafts is
reused only while the device waits for the host. In that case planning also skips steps with prompt rows if one without
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.control.guards import HOLD, PROBE_SHARE
from outrider.control.reasons import AUTO, NOTHING_FOUND, OFF, PREFILL
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Plan, Reason, Sequence, StepRecord, Work

UNPROFITABLE = frozenset(("below break-even", NOTHING_FOUND.kind, OFF.kind))


class PlanCache:
    def __init__(self) -> None:
        self.plan = Plan(())
        self.by_sequence: dict[Sequence, tuple[DraftPlan, Reason]] = {}
        self.size = 0  # of the persistent batch that the plan is for
        self.reading = False  # whether prompts were prefilled in its step
        self.without = 0  # plans in a row without a draft
        self.left = 0  # steps that the plan may still be used for
        self.overdue = 0  # steps with prompt rows that it was used for beyond those
        self.reason: Reason | None = (
            None  # why nothing is drafted, for sequences that join the persistent batch
        )
        self.plan_s = 0.0  # seconds that the last plan took
        self.plan_share = 0.0  # of its step
        self.host_bound = (
            False  # with a plan in every step the host would have less than a plan's time to spare
        )

    def get(self, work: Seq[Work], options: Options, settled: Callable[[Work], Reason]) -> Plan | None:
        """The kept plan, if it holds for this work. Host-packed rows: the same sequences. The persistent batch:
        sequences may have left. Where nothing is drafted, others may have joined if `settled` leaves their drafts to
        measurement or turns them off.
        """
        reading = not all(one.decodes for one in work)
        if self.size != options.size or not (self.left or (reading and self._may_wait)):
            return None
        found = []
        for one in work:
            known = self._of(one, options, settled)
            if known is None:
                return None
            found.append(known)
        if (not options.size and len(work) != len(self.by_sequence)) or (self.reading and not reading):
            return None  # what does not pay beside prefill may pay without
        self.left, self.overdue = max(self.left - 1, 0), self.overdue + (not self.left)
        plans, reasons = zip(*found, strict=True)
        resident = resident_of(plans, options)
        return replace(
            self.plan, draft_plans=plans, reasons=reasons, resident=resident, prefills=(), cached=True
        )

    @property
    def _may_wait(self) -> bool:
        """Whether the next plan may wait for a step without prompt rows."""
        return self.host_bound and self.reason is not None and not self.reading and self.overdue < HOLD

    def _of(
        self, one: Work, options: Options, settled: Callable[[Work], Reason]
    ) -> tuple[DraftPlan, Reason] | None:
        if not one.decodes:
            free = options.size and self.reason is not None and not options.after_prompts
            return (NO_DRAFT_PLAN, PREFILL) if free else None
        found = self.by_sequence.get(one.sequence)
        if found is None and options.size and self.reason is not None:
            why = settled(one)
            if why is OFF or (why is AUTO and self.reason is not OFF):
                found = self.by_sequence[one.sequence] = NO_DRAFT_PLAN, OFF if why is OFF else self.reason
        return found

    def put(self, work: Seq[Work], plan: Plan, options: Options) -> Plan:
        self.plan, self.size, self.left, self.overdue, self.reason = plan, options.size, 0, 0, None
        pairs = list(zip(plan.draft_plans, plan.reasons, strict=True))
        decoding = {one.sequence: pair for one, pair in zip(work, pairs, strict=True) if one.decodes}
        self.reading = len(decoding) < len(work)
        mixed = options.size and any(
            one.decodes and not here for one, here in zip(work, options.resident, strict=True)
        )
        if not decoding or mixed or (self.reading and not options.size):
            return plan
        self.by_sequence = decoding
        kinds = {why.kind: why for _, why in decoding.values()}
        if kinds.keys() <= UNPROFITABLE:
            # Beside no device what lookup finds is known for free, and a plan is kept the longer the more it costs.
            slowly = max(self.without // HOLD, int(self.plan_share / PROBE_SHARE))
            slowly = 0 if NOTHING_FOUND.kind in kinds else slowly
            most = 4 * HOLD if self.host_bound else HOLD
            patience = 2**self.without - 1 if self.host_bound else self.without
            self.left = min(patience if options.size else slowly, most)
            self.reason = next((why for kind, why in kinds.items() if kind != OFF.kind), OFF)
            self.without += 1
        else:
            self.without = 0
            steady = kinds.keys() <= UNPROFITABLE | {"pays", "slowdown"} and not plan.prefills
            self.left = HOLD // 2 if self.host_bound and options.size and steady and not self.reading else 0
        return plan

    def observe(self, record: StepRecord) -> None:
        if not record.plan_cached and record.decodes_only:
            self.plan_s, self.plan_share = record.plan_s, record.plan_s / max(record.total_s, 1e-9)
        spare = record.waited_s - (self.plan_s if record.plan_cached else 0.0)
        self.host_bound = record.captured is not None and spare < self.plan_s

    def forget(self, sequence: Sequence) -> None:
        self.by_sequence.pop(sequence, None)

    def clear(self) -> None:
        self.left = self.without = 0
        self.overdue = HOLD


def resident_of(plans: Seq[DraftPlan], options: Options) -> tuple[bool, ...]:
    """Which work runs in the persistent batch: also what the host could draft for, where it drafts nothing."""
    if not options.decodes:
        return options.resident
    each = zip(plans, options.resident, options.decodes, strict=True)
    return tuple(here or (decodes and not plan.nodes) for plan, here, decodes in each)
