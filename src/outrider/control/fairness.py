"""What drafts for others have cost each sequence: how far its tokens lag behind plain decoding's."""

from __future__ import annotations

from outrider.control.guards import Guards
from outrider.types import Sequence, StepRecord


class Fairness:
    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.lag: dict[Sequence, float] = {}  # plain steps' time that it is behind, below 0: ahead
        self.late: set[Sequence] = set()  # those that were beyond the bound when last looked at

    def observe(self, record: StepRecord, ratio: float) -> None:
        """A step that took so many plain steps' time, and brought each sequence some tokens."""
        lag, share, grace = self.lag, self.guards.stretch(record.sequences) - 1, self.guards.grace
        for o in record.outcomes:
            sequence = o.sequence
            if sequence.finish_reason is None:
                lag[sequence] = behind = lag.get(sequence, 0.0) + ratio - 1 - o.accepted
                if behind > share * grace:
                    self.late.add(sequence)

    def stretched(self, sequences: set[Sequence]) -> set[Sequence]:
        """Those of them whose tokens have taken longer than they may: no step may stretch further for others."""
        if not self.late:
            return self.late
        share, grace = self.guards.stretch(len(sequences)) - 1, self.guards.grace
        written = {s: len(s.tokens) - s.prompt_len for s in self.late}
        self.late = {s for s in self.late if self.lag[s] > share * (written[s] + grace)}
        return self.late & sequences

    def forget(self, sequence: Sequence) -> None:
        self.lag.pop(sequence, None)
        self.late.discard(sequence)
