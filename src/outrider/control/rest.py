"""When nothing was drafted for a while, the planner looks less often: it would find what it found before. On a CPU that
saves a hundredth of a small model's step; on a GPU planning for many takes as long as half of one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.control.reasons import NOTHING_FOUND, OFF, PREFILL
from outrider.types import NO_BET, Options, Plan, Reason, Sequence, Work

EVERY = 4  # plans in a row without a draft, for each step that goes by before the next plan
MOST = 3  # steps that go by: text that begins to repeat itself must not be missed for longer
MOST_CAPTURED = 7  # the same of captured steps, which are much shorter
UNPAID = frozenset(("below break-even", "low gain", NOTHING_FOUND.kind, OFF.kind))


class Rest:
    def __init__(self) -> None:
        self.reasons: dict[Sequence, Reason] = {}  # of the last plan, if no draft of it would have paid
        self.size = 0  # of the captured step it was for
        self.idle = 0  # plans like it, in a row
        self.left = 0  # steps for which it holds

    def plan_again(self, work: Seq[Work], options: Options) -> Plan | None:
        """The last plan, while it holds for these: nobody came since, and of captured steps some may have gone, as that
        changes nothing in what they take.
        """
        if not self.left or self.size != options.size:
            return None
        reasons = [self.reasons.get(one.sequence) if one.known == 1 else None for one in work]
        if None in reasons or (not options.size and len(work) != len(self.reasons)):
            return None
        self.left -= 1
        return Plan((NO_BET,) * len(work), tuple(one for one in reasons if one is not None))

    def note(self, work: Seq[Work], plan: Plan, options: Options) -> Plan:
        """A plan that was made just now. Prompts that are read say nothing about drafts."""
        pairs = zip(work, plan.reasons, strict=True)
        self.reasons = {one.sequence: why for one, why in pairs if why is not PREFILL}
        unpaid = all(why.kind in UNPAID for why in self.reasons.values())
        most = MOST_CAPTURED if options.size else MOST
        self.size, self.left = options.size, min(self.idle // EVERY, most) if unpaid else 0
        self.idle = self.idle + 1 if unpaid else 0
        return plan

    def forget(self, sequence: Sequence) -> None:
        """It has ended: nothing of it is kept."""
        self.reasons.pop(sequence, None)
