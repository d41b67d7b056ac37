"""When nothing was drafted for a while, the planner looks less often: it would find what it found before. On a CPU that
saves a hundredth of a small model's step; on a GPU planning for many takes as long as half of one. Where the host is
what everybody waits for, a captured step's drafts hold for some steps, too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.control.reasons import NOTHING_FOUND, OFF
from outrider.types import Bet, Options, Plan, Reason, Sequence, StepRecord, Work

EVERY = 4  # plans in a row without a draft, for each step that goes by before the next plan
MOST = 3  # steps that go by: text that begins to repeat itself must not be missed for longer
MOST_CAPTURED = 7  # the same of captured steps, which are much shorter
HELD = 2  # steps for which drafts hold: texts change between copying and not
WAITED = 0.1  # of a step's time: where the host waits less for the device, it is what takes the time
UNPAID = frozenset(("below break-even", "low gain", NOTHING_FOUND.kind, OFF.kind))


class Rest:
    def __init__(self) -> None:
        self.bets: dict[Sequence, tuple[Bet, Reason]] = {}  # of the last plan
        self.size = 0  # of the captured step it was for
        self.idle = 0  # plans in a row of which no draft would have paid
        self.left = 0  # steps for which the last one holds
        self.hurried = False  # whether the device waits for the host

    def plan_again(self, work: Seq[Work], options: Options) -> Plan | None:
        """The last plan, while it holds for these: nobody came since, and of captured steps some may have gone, as that
        changes nothing in what they take.
        """
        if not self.left or self.size != options.size:
            return None
        found = [self.bets.get(one.sequence) if one.known == 1 else None for one in work]
        again = [one for one in found if one is not None]
        if len(again) < len(work) or (not options.size and len(work) != len(self.bets)):
            return None
        self.left -= 1
        return Plan(tuple(bet for bet, _ in again), tuple(reason for _, reason in again))

    def note(self, work: Seq[Work], plan: Plan, options: Options) -> Plan:
        """A plan that was made just now. Beside staged rows, such as prompts', drafts are others: it says nothing."""
        self.size, self.left = options.size, 0
        if any(one.known > 1 or (options.size and not options.is_resident(i)) for i, one in enumerate(work)):
            return plan
        made = zip(work, plan.bets, plan.reasons, strict=True)
        self.bets = {one.sequence: (bet, why) for one, bet, why in made}
        kinds = {why.kind for why in plan.reasons}
        if kinds <= UNPAID:
            self.left = min(self.idle // EVERY, MOST_CAPTURED if options.size else MOST)
        elif self.hurried and options.size and kinds <= UNPAID | {"pays"}:
            self.left = HELD
        self.idle = self.idle + 1 if kinds <= UNPAID else 0
        return plan

    def observe(self, record: StepRecord) -> None:
        self.hurried = record.captured is not None and record.waited_s < WAITED * record.total_s

    def forget(self, sequence: Sequence) -> None:
        """It has ended: nothing of it is kept."""
        self.bets.pop(sequence, None)
