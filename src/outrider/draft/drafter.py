"""A drafter is four verbs. No code outside draft/ knows which kind it talks to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from outrider.types import Bet, Draft, Sequence, Verdict


class Drafter(Protocol):
    def start(self, sequence: Sequence) -> None:
        """A sequence exists. Nothing need be done before it is first proposed for."""
        ...

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        """A guess for each sequence, within its bet. Everything it knows of is in `sequence.tokens`."""
        ...

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """What became of the guess; `sequence.tokens` already holds what was emitted."""
        ...

    def stop(self, sequence: Sequence) -> None:
        """The sequence ended: forget it."""
        ...
