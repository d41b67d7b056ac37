"""Whether a draft that holds memory ever pays: what its steps gained, and a report where that is nothing."""

from __future__ import annotations

import logging
from collections import defaultdict

from outrider.types import Reason, StepRecord

log = logging.getLogger(__name__)

# Steps that only decoded: after so many a drafter had its probes, and most of what users write was seen.
STEPS = 2000
LEAST_GAIN = 0.005  # of the time of those steps


class Payoff:
    def __init__(self) -> None:
        self.held: dict[str, int] = {}  # tokens of KV cache that a drafter's memory would hold
        # Seconds, by drafter, since the last report.
        self.gained: defaultdict[str, float] = defaultdict(float)
        self.steps, self.seconds = 0, 0.0
        self.unpaid: dict[str, int] = {}  # those of `held` that do not pay

    def watch(self, drafter: str, tokens: int) -> None:
        self.held[drafter] = tokens

    def forget(self, drafter: str) -> None:
        """It drafts with other weights now, or not at all."""
        self.unpaid.pop(drafter, None)
        self.gained.clear()
        self.steps, self.seconds = 0, 0.0

    def observe(self, record: StepRecord) -> None:
        """A step that only decoded. Where nobody wanted drafts, or they asked for another's, none is missed."""
        if record.reasons and not any(self._missed(reason) for reason in record.reasons):
            return
        self.steps += record.passes
        self.seconds += record.total_s
        for name in self.held if record.drafted else ():
            self.gained[name] += _gain(record, name)
        if self.steps >= STEPS:
            self._report()

    def _missed(self, reason: Reason) -> bool:
        """Whether whoever got this draft plan might have got one of `held`."""
        if reason.kind == "asked":
            return any(("drafter", name) in reason.facts for name in self.held)
        return reason.kind != "off"

    def _report(self) -> None:
        for name, tokens in self.held.items():
            gain = self.gained[name] / self.seconds if self.seconds else 0.0
            if gain >= LEAST_GAIN:
                self.unpaid.pop(name, None)
            elif name not in self.unpaid:
                self.unpaid[name] = tokens
                log.warning(
                    "the draft %s does not pay: in %d steps it gained %.1f %% of the time, and its memory would hold "
                    "%d tokens of KV cache; --release-draft frees it, --draft lookup does without",
                    *(name, self.steps, 100 * gain, tokens),
                )
        self.gained.clear()
        self.steps, self.seconds = 0, 0.0


def _gain(record: StepRecord, drafter: str) -> float:
    """Seconds that a drafter's part of a step saved: its accepted tokens would have taken plain steps, and what the
    step took longer than one is shared among drafters by their tokens.
    """
    if record.captured is not None and record.captured[0] == drafter:
        return record.plain_s - record.total_s
    mine = [o for o in record.outcomes if o.drafted and o.draft_plan.drafter == drafter]
    if not mine or not record.emitted:
        return 0.0
    token = record.plain_s / record.emitted
    longer = record.total_s - token * record.sequences
    drafted = sum(o.drafted for o in mine)
    return token * sum(o.accepted for o in mine) - longer * drafted / record.drafted
