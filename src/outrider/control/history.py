"""What earlier steps and answers say about the next ones: slowdown per request, answer lengths, return on drafting."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate

from outrider.control.guards import DRAFTER_MEMORY, GRACE, PROBE_SHARE
from outrider.types import Reason, Sequence, StepRecord

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
