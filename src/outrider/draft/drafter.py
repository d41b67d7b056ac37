"""A drafter is four verbs. No code outside draft/ knows which kind it talks to.

To write one, derive from `Drafter` and give it `propose`; the other verbs do nothing until you say what.
docs/drafters.md builds one in twenty lines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.types import Bet, Draft, Sequence, Verdict

if TYPE_CHECKING:
    from outrider.load.tokenizer import Tokenizer


class Drafter(Protocol):
    def start(self, sequence: Sequence) -> None:
        """A sequence exists. Nothing need be done before it is first proposed for."""

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        """A guess for each sequence, within its bet. Everything it knows of is in `sequence.tokens`."""
        ...

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """What became of the guess; `sequence.tokens` already holds what was emitted."""

    def stop(self, sequence: Sequence) -> None:
        """The sequence ended: forget it."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a class or function that makes a drafter is given, if it asks: the target as a drafter sees it."""

    tokenizer: Tokenizer  # encode, decode and token_bytes of the target's tokens
    vocab: int  # every guess must be below
    context: int  # longest prompt and answer together, in tokens
    eos_ids: tuple[int, ...]
    max_sequences: int  # that share a step
