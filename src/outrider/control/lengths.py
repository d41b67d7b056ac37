"""How long answers are here. What a drafter must read first is earned back in the steps that are left of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from outrider.control.guards import Guards
from outrider.control.probes import tokens_left
from outrider.types import Sequence

RECENT = 64  # answers: what users ask for changes in the course of a day
ENOUGH = 8  # of them from which on something is known


class AnswerLengths:
    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.recent: deque[int] = deque(maxlen=RECENT)  # tokens

    def observe(self, sequence: Sequence) -> None:
        """An answer ended. One that was given up says nothing of how long it would have been."""
        if sequence.finish_reason in ("stop", "length"):
            self.recent.append(len(sequence.tokens) - sequence.prompt_len)

    def steps_left(self, sequences: Seq[Sequence], pace: float) -> float:
        """Of these, on average, at so many tokens a step: by the answers that became longer than theirs are. Where too
        few did, nobody knows, and it is `payback_steps` at most.
        """
        at_most = tokens_left(sequences) / pace
        if len(self.recent) < ENOUGH:
            return min(self.guards.payback_steps, at_most)
        return min(sum(map(self._expected, sequences)) / len(sequences) / pace, at_most)

    def _expected(self, sequence: Sequence) -> float:
        written = len(sequence.tokens) - sequence.prompt_len
        longer = [length for length in self.recent if length > written]
        further = sum(longer) / len(longer) - written if longer else 0.0
        if len(longer) < ENOUGH:  # longer than most are: it may go on for as long as anybody's guess
            further = max(further, self.guards.payback_steps)
        return min(further, sequence.remaining)
