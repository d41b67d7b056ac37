"""A drafter is four verbs. No code outside draft/ knows which kind it talks to.

To write one, derive from `Drafter` and give it `propose`; the other verbs do nothing until you say what.
docs/drafters.md builds one in twenty lines. Outrider's own drafters also propose inside captured steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outrider.types import Draft, DraftPlan, Sequence, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.device.ops import StepOps, TreeLayout
    from outrider.load.tokenizer import Tokenizer

MAX_PASSES = 8  # draft tokens in a row that may be worth a pass each


class Drafter(Protocol):
    def start(self, sequence: Sequence) -> None:
        """A sequence exists. Nothing need be done before it is first proposed for."""
        return

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        """A draft for each sequence, within its draft plan. Everything it knows of is in `sequence.tokens`.

        A drafter that works in the target's slot table may leave slots for its first draft nodes behind the known
        tokens, in node order: the target then writes to those.
        """
        ...

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """What became of the draft; `sequence.tokens` already holds what was emitted."""
        return

    def stop(self, sequence: Sequence) -> None:
        """The sequence ended: forget it."""
        return


@runtime_checkable
class ResidentDrafter(Drafter, Protocol):
    """A drafter that also proposes for sequences whose state is on the device, as tensor operations that can be part
    of a captured step. `accept` serves both ways of proposing.
    """

    max_depth: int  # of its draft trees in such steps; 0: it takes no part in them
    trees: bool  # whether they may branch
    usual_depth: int = 0  # of chains, if less than the deepest: beyond, its passes rarely pay
    # Whether it takes no pass: it may serve a step beside another drafter, and is scored when it is not asked.
    model_free: bool = False

    @abstractmethod
    def propose_resident(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft tokens [S, nodes] for rows [S] of the state, and how many of them are proposed [S], None: all. No
        sequence is longer than `context` when the step ends. A rejected draft needs no undoing.
        """
        ...

    window: int = 1  # last known tokens that it reads itself in a captured step

    def tokens_behind(self, sequence: Sequence, coming: int = 0) -> int:
        """Tokens it must read before it can draft, once `coming` more are there that other drafters' steps bring."""
        return 0

    def catch_up(self, ops: StepOps, sequences: list[Sequence]) -> None:
        """Read what it lacks of these. Nothing is in flight, and their rows of the state are up to date."""
        return

    def shadow_propose(self, sequence: Sequence, end: int, n: int) -> Seq[int]:
        """If it is model-free: up to n tokens that it would propose after the first `end` tokens."""
        return ()

    def warm_up(self, ops: StepOps, longest: int = 1) -> int:
        """Reads padding as it reads texts of up to `longest` tokens, so that this can be timed. Returns the number of
        tokens read; 0: it reads none.
        """
        return 0


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a class or function that makes a drafter is given, if it asks: the target as a drafter sees it."""

    tokenizer: Tokenizer  # encode, decode and token_bytes of the target's tokens
    vocab: int  # every draft token must be below
    context: int  # longest prompt and answer together, in tokens
    eos_ids: tuple[int, ...]
    max_sequences: int  # that share a step
