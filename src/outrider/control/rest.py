"""When nothing was drafted for a while, the planner looks less often: it would find what it found before. On a CPU that
saves a hundredth of a small model's step; on a GPU planning for many takes as long as half of one. Where the host is
what everybody waits for, a captured step's drafts hold for some steps, too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.control.reasons import NOTHING_FOUND, OFF, PREFILL
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Plan, Reason, Sequence, StepRecord, Work

EVERY = 4  # plans in a row without a draft, for each step that goes by before the next plan
MOST = 3  # steps that go by: text that begins to repeat itself must not be missed for longer
MOST_CAPTURED = 7  # the same of captured steps, which are much shorter
HELD_BESIDE = 3  # the same at least beside prompts: there the host has most to do, and a draft holds up most
HELD = 4  # steps for which drafts hold: texts change between copying and not
WAITED = 0.1  # of a step's time: where the host waits less for the device, it is what takes the time
FORGOTTEN = 0.99  # of how long a plan took, that is left a step later
READING = NO_DRAFT_PLAN, PREFILL
UNPAID = frozenset(("below break-even", "low gain", NOTHING_FOUND.kind, OFF.kind))
HELD_KINDS = UNPAID | {"pays", "stretch"}  # of plans that hold where the host is late


class Rest:
    def __init__(self) -> None:
        self.draft_plans: dict[Sequence, tuple[DraftPlan, Reason]] = {}  # of the last plan
        self.size = 0  # of the captured step it was for
        self.beside = False  # whether prompts were read in it
        self.idle = 0  # plans in a row of which no draft would have paid
        self.left = 0  # steps for which the last one holds
        self.planning = 0.0  # seconds that a plan takes: the longest lately
        self.hurried = False  # whether the device would wait for the host if it made one
        self.unpaid: Reason | None = None  # why nobody drafts, for whoever joins those of a captured step

    def plan_again(self, work: Seq[Work], options: Options, is_free: Callable[[Work], bool]) -> Plan | None:
        """The last plan, while it holds for these. Eager steps: nobody came or went. Captured ones: some may have
        gone, as that changes nothing in what they take; and where nothing pays, it does not for one more who `is_free`
        to draft, nor beside prompts, where others wait for it as well.
        """
        if not self.left or self.size != options.size:
            return None
        found = [self._draft_plan(one, options, is_free) for one in work]
        again = [one for one in found if one is not None]
        if len(again) < len(work) or (not options.size and len(work) != len(self.draft_plans)):
            return None
        if self.beside and all(why is not PREFILL for _, why in again):
            return None  # what did not pay beside prompts may pay without
        self.left -= 1
        return Plan(tuple(draft_plan for draft_plan, _ in again), tuple(reason for _, reason in again))

    def _draft_plan(
        self, one: Work, options: Options, is_free: Callable[[Work], bool]
    ) -> tuple[DraftPlan, Reason] | None:
        if _reads(one):
            return READING if options.size and self.unpaid and not options.after_prompts else None
        found = self.draft_plans.get(one.sequence)
        if found is None and options.size and self.unpaid and is_free(one):
            found = self.draft_plans[one.sequence] = NO_DRAFT_PLAN, self.unpaid
        return found

    def note(self, work: Seq[Work], plan: Plan, options: Options) -> Plan:
        """A plan that was made just now. Beside staged rows that decode drafts are others: it says nothing."""
        self.size, self.left, self.unpaid = options.size, 0, None
        made = list(zip(work, plan.draft_plans, plan.reasons, strict=True))
        decoding = [one for one in made if not _reads(one[0])]
        self.beside = len(decoding) < len(made)
        if not decoding or (self.beside and not options.size):
            return plan
        if options.size and any(not _reads(one) and not options.is_resident(i) for i, one in enumerate(work)):
            return plan
        self.draft_plans = {one.sequence: (draft_plan, why) for one, draft_plan, why in decoding}
        kinds = {why.kind: why for _, _, why in decoding}
        if kinds.keys() <= UNPAID:
            self.left = min(self.idle // EVERY, MOST_CAPTURED if options.size else MOST)
            self.left = max(self.left, HELD_BESIDE) if self.beside else self.left
            self.unpaid = next((why for kind, why in kinds.items() if kind != OFF.kind), None)
        elif self.hurried and options.size and not self.beside and kinds.keys() <= HELD_KINDS:
            self.left = HELD
        self.idle = self.idle + 1 if kinds.keys() <= UNPAID else 0
        return plan

    def observe(self, record: StepRecord) -> None:
        if record.decodes_only:
            self.planning = max(FORGOTTEN * self.planning, record.plan_s)
        waited = record.waited_s - (self.planning - record.plan_s)  # had it been planned
        self.hurried = record.captured is not None and waited < WAITED * record.total_s

    def forget(self, sequence: Sequence) -> None:
        """It has ended: nothing of it is kept."""
        self.draft_plans.pop(sequence, None)


def _reads(one: Work) -> bool:
    """Its prompt."""
    return one.known > 1 or not one.emits
