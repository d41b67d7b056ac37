"""When nothing was drafted for a while, the planner looks less often: planning takes a CPU more than a hundredth of a
small model's step, and would find what it found before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.control.reasons import NOTHING_FOUND
from outrider.types import Options, Plan, Sequence, Work

EVERY = 4  # plans in a row without a draft, for each step that goes by before the next plan
MOST = 3  # steps that go by: text that begins to repeat itself must not be missed for longer
UNPAID = frozenset(("below break-even", "low gain", NOTHING_FOUND.kind))


class Rest:
    def __init__(self) -> None:
        self.plan: Plan | None = None  # the last one, if it had no draft as none would have paid
        self.sequences: list[Sequence] = []  # whose it was
        self.idle = 0  # plans like it, in a row
        self.left = 0  # steps for which it holds

    def plan_again(self, work: Seq[Work]) -> Plan | None:
        """The last plan, while it holds for the same sequences."""
        if not self.left or not self._same(work):
            return None
        self.left -= 1
        return self.plan

    def _same(self, work: Seq[Work]) -> bool:
        return len(work) == len(self.sequences) and all(
            one.sequence is sequence and one.known == 1
            for one, sequence in zip(work, self.sequences, strict=True)
        )

    def note(self, work: Seq[Work], plan: Plan, options: Options) -> Plan:
        """A plan that was made just now."""
        unpaid = not options.size and all(reason.kind in UNPAID for reason in plan.reasons)
        same = unpaid and self._same(work)
        self.plan, self.sequences = (plan, [one.sequence for one in work]) if unpaid else (None, [])
        self.idle = self.idle + 1 if same else 0
        self.left = min(self.idle // EVERY, MOST)
        return plan

    def forget(self, sequence: Sequence) -> None:
        """It has ended: nothing of it is kept."""
        if sequence in self.sequences:
            self.plan, self.sequences, self.idle, self.left = None, [], 0, 0
