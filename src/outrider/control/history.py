"""What earlier steps and answers say about the next ones: slowdown per request, answer lengths, return on drafting, and
the last plan, which holds for a few steps.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

from outrider.control.guards import DRAFTER_MEMORY, GRACE, HOLD, PROBE_SHARE
from outrider.control.reasons import AUTO, NOTHING_FOUND, OFF, PREFILL
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Plan, Reason, Sequence, StepRecord, Work

log = logging.getLogger(__name__)

REPORT_STEPS = 2000  # decode steps between two reports on a draft that holds memory


class Fairness:
    """How far each sequence lags behind plain decoding because other sequences draft."""

    def __init__(self, max_slowdown: float) -> None:
        self.share = max_slowdown - 1
        self.lag: dict[Sequence, float] = {}  # in plain steps; below 0: ahead of plain decoding
        self.late: set[Sequence] = set()

    def observe(self, record: StepRecord, longer: float) -> None:
        """A step took `longer` than without drafts, in plain steps, and brought each sequence some tokens."""
        for o in record.outcomes:
            if o.sequence.finish_reason is None:
                self.lag[o.sequence] = lag = self.lag.get(o.sequence, 0.0) + longer - o.accepted
                if lag > self.share * GRACE:
                    self.late.add(o.sequence)

    def late_ones(self, sequences: Iterable[Sequence]) -> set[Sequence]:
        """Sequences whose time per token exceeds the bound. No step may slow them down further for other requests."""
        if not self.late:
            return self.late
        written = {s: len(s.tokens) - s.prompt_len for s in self.late}
        self.late = {s for s in self.late if self.lag[s] > self.share * (written[s] + GRACE)}
        return self.late.intersection(sequences)

    def forget(self, sequence: Sequence) -> None:
        self.lag.pop(sequence, None)
        self.late.discard(sequence)


class AnswerLengths:
    """Predicts how many tokens an answer still has, from recent answers that became longer than it is."""

    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=DRAFTER_MEMORY)
        # Lengths in order, and for each the sum of it and all longer ones.
        self._order, self._sums, self._sorted = list[int](), [0], True

    def observe(self, sequence: Sequence) -> None:
        """An answer ended. An aborted one says nothing about lengths."""
        if sequence.finish_reason in ("stop", "length"):
            self.recent.append(len(sequence.tokens) - sequence.prompt_len)
            self._sorted = False

    def tokens_left(self, sequences: Seq[Sequence]) -> list[float]:
        """Expected tokens left of each. Longer than every recent answer: half of what the request allows."""
        if not self._sorted:
            self._order, self._sorted = sorted(self.recent), True
            self._sums = list(accumulate(reversed(self._order), initial=0))[::-1]
        return [self._left(sequence) for sequence in sequences]

    def _left(self, sequence: Sequence) -> float:
        most, written = sequence.remaining, len(sequence.tokens) - sequence.prompt_len
        first = bisect_right(self._order, written)
        longer = len(self._order) - first
        expected = self._sums[first] / longer - written if longer else most / 2
        return min(max(expected, 1.0), max(most, 1.0))


class DraftReturn:
    """Whether a draft that holds memory pays for itself."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}  # by drafter: tokens of KV cache that its memory would hold
        self.gained: defaultdict[str, float] = defaultdict(float)  # seconds by drafter since the last report
        self.steps, self.seconds = 0, 0.0
        self.unprofitable: dict[str, int] = {}  # the drafters of `held` that do not pay

    def watch(self, drafter: str, tokens: int) -> None:
        self.held[drafter] = tokens

    def forget(self, drafter: str) -> None:
        """The drafter has other weights now, or was released."""
        self.unprofitable.pop(drafter, None)
        self._reset()

    def observe(self, record: StepRecord) -> None:
        """A decode step. It counts if one of the held drafters could have drafted in it."""
        if record.reasons and not any(self._could_draft(reason) for reason in record.reasons):
            return
        self.steps += record.passes
        self.seconds += record.total_s
        for name in self.held if record.drafted else ():
            self.gained[name] += _gain(record, name)
        if self.steps >= REPORT_STEPS:
            self._report()

    def _could_draft(self, reason: Reason) -> bool:
        if reason.kind == "asked":
            return any(("drafter", name) in reason.facts for name in self.held)
        return reason.kind != "off"

    def _report(self) -> None:
        for name, tokens in self.held.items():
            gain = self.gained[name] / self.seconds if self.seconds else 0.0
            if gain >= PROBE_SHARE:
                self.unprofitable.pop(name, None)
            elif name not in self.unprofitable:
                self.unprofitable[name] = tokens
                log.warning(
                    "the draft %s does not pay: in %d steps it gained %.1f %% of the time, and its memory would hold "
                    "%d tokens of KV cache; --release-draft frees it, --draft lookup does without",
                    *(name, self.steps, 100 * gain, tokens),
                )
        self._reset()

    def _reset(self) -> None:
        self.gained.clear()
        self.steps, self.seconds = 0, 0.0


def _gain(record: StepRecord, drafter: str) -> float:
    """Seconds that a drafter's part of a step saved. Its accepted tokens would have taken plain steps; the drafters
    of a step share what it took longer than a plain one, by their draft tokens.
    """
    if record.captured is not None and record.captured.drafter == drafter:
        return record.plain_s - record.total_s
    mine = [o for o in record.outcomes if o.drafted and o.draft_plan.drafter == drafter]
    if not mine or not record.emitted:
        return 0.0
    token = record.plain_s / record.emitted
    longer = record.total_s - token * record.sequences
    drafted = sum(o.drafted for o in mine)
    return token * sum(o.accepted for o in mine) - longer * drafted / record.drafted


UNPROFITABLE = frozenset(("below break-even", NOTHING_FOUND.kind, OFF.kind))


class PlanCache:
    """Reuses a plan for a few steps, where a new plan would delay the device or say the same.

    A plan without drafts is reused the longer, the more plans in a row found nothing that pays. For host-packed
    sequences it is dropped when one begins to copy: little else changes what a plan would say. A plan with drafts is
    reused only while the device waits for the host. In that case planning also skips steps with prompt rows if one
    without follows.
    """

    def __init__(self) -> None:
        self.plan = Plan(())
        self.by_sequence: dict[Sequence, tuple[DraftPlan, Reason]] = {}
        self.size = 0  # of the persistent batch that the plan is for
        self.reading = False  # whether prompts were prefilled in its step
        # The last reuse in a step without prompt rows: its sequences, which of them were resident, and the plan.
        self.latest: tuple[list[Sequence], tuple[bool, ...], Plan] | None = None
        self.without = 0  # plans in a row without a draft
        self.left = 0  # steps that the plan may still be used for
        self.overdue = 0  # steps with prompt rows that it was used for beyond those
        # Why nothing is drafted, for sequences that join the persistent batch.
        self.reason: Reason | None = None
        self.plan_s = 0.0  # seconds that the last plan took
        self.plan_share = 0.0  # of its step
        # With a plan in every step the host would have less than a plan's time to spare.
        self.host_bound = False

    def get(self, work: Seq[Work], options: Options, settled: Callable[[Work], Reason]) -> Plan | None:
        """The kept plan, if it holds for this work. Host-packed rows: the same sequences. The persistent batch:
        sequences may have left. Where nothing is drafted, others may have joined if `settled` leaves their drafts to
        measurement or turns them off.
        """
        reading = not all(options.decodes or [one.decodes for one in work])
        if self.size != options.size or not (self.left or (reading and self._may_wait)):
            return None
        sequences = [one.sequence for one in work]
        if self.latest and not reading and self.latest[:2] == (sequences, options.resident):
            self.left -= 1
            return self.latest[2]
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
        same = replace(self.plan, draft_plans=plans, reasons=reasons, prefills=(), cached=True)
        same = replace(same, resident=resident_of(plans, options))
        self.latest = None if reading else (sequences, options.resident, same)
        return same

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
        self.latest = None
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
        idle = not options.size and not any(drafts.nodes for drafts, _ in decoding.values())
        if kinds.keys() <= (UNPROFITABLE | {"slowdown"} if idle else UNPROFITABLE):
            # Beside no device what lookup finds is known for free, and a plan is kept the longer the more it costs.
            slowly = max(self.without // HOLD, int(self.plan_share / PROBE_SHARE))
            slowly = 0 if NOTHING_FOUND.kind in kinds else slowly
            most = 4 * HOLD if self.host_bound or not options.size else HOLD
            patience = 2**self.without - 1 if self.host_bound else self.without
            self.left = min(patience if options.size else slowly, most)
            self.reason = next((why for kind, why in kinds.items() if kind != OFF.kind), OFF)
            self.without += 1
        else:
            # Where planning holds up the device, plans after a probe are kept, too, unless they find that drafts pay.
            self.without = self.without // 2 if self.host_bound and "probe" in kinds else 0
            steady = kinds.keys() <= UNPROFITABLE | {"pays", "slowdown"} and not plan.prefills
            self.left = HOLD // 2 if self.host_bound and options.size and steady and not self.reading else 0
        return plan

    def observe(self, record: StepRecord) -> None:
        if record.captured is None and any(o.accepted > 1 for o in record.shadow):
            self.left = 0  # a sequence began to copy
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
