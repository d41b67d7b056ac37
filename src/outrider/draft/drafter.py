"""A drafter is four verbs. No code outside draft/ knows which kind it talks to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from outrider.types import Draft, Sequence, Verdict


class Drafter(Protocol):
    def start(self, sequence: Sequence) -> None:
        """A sequence was admitted, or came back after it was preempted."""
        ...

    def propose(self, sequences: Seq[Sequence], nodes: Seq[int]) -> list[Draft]:
        """A guess of at most `nodes[i]` nodes for each sequence."""
        ...

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """What became of the guess; `sequence.tokens` already holds what was emitted."""
        ...

    def stop(self, sequence: Sequence) -> None:
        """The sequence ended or was preempted: forget it."""
        ...
