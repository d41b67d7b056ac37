"""Whether a draft that holds memory ever pays: what its steps gained, and a report where that is nothing."""

from __future__ import annotations

import logging
from collections import defaultdict

from outrider.types import StepRecord

log = logging.getLogger(__name__)

STEPS = (
    2000  # that only decoded: after so many a drafter had its probes, and most of what users write was seen
)
LEAST_GAIN = 0.005  # of the time of those steps


class Payoff:
    def __init__(self) -> None:
        self.held: dict[str, int] = {}  # tokens of KV cache that a drafter's memory would hold
        self.gained: defaultdict[str, float] = defaultdict(
            float
        )  # seconds, by drafter, since the last report
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
        """A step that only decoded. Where nobody wanted drafts, none is missed."""
        if record.reasons and all(reason.kind == "off" for reason in record.reasons):
            return
        self.steps += record.passes
        self.seconds += record.total_s
        if record.drafted:
            captured = record.captured[0] if record.captured else "none"
            for name in self.held:
                if name == captured or any(o.drafted and o.bet.drafter == name for o in record.outcomes):
                    self.gained[name] += record.plain_s - record.total_s
        if self.steps >= STEPS:
            self._report()

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
