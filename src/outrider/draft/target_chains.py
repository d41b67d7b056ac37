"""Drafters that guess on the device from the target itself: its first layers, or an EAGLE-3 head on its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.draft.chains import (
    DEEPEST,
    READ_ROWS,
    NothingToRead,
    Pass,
    Reads,
    State,
    draw_at,
    logits_after,
    rows_batch,
)
from outrider.draft.eagle import EagleHead
from outrider.model.decoder import Model
from outrider.types import Batch, Sequence

# Hidden states and rows on the device, how many of them belong to one text, and how long texts may be.
HeadRun = Callable[[Tensor, Batch, int, int], Tensor]


class EarlyExitChain(NothingToRead):
    """The target's first layers and its head. Their keys and values are the target's own, in the target's slots.

    Of known text they are there already. A guess writes its own to the slot that the target's pass is about to write
    in all layers, with the same numbers where the guess is judged; where it is not, nobody reads that slot before it
    is written again. So there is nothing to catch up with, and the target cannot tell.
    """

    def __init__(self, model: Model, run: Pass) -> None:
        """`run` is the pass of the first layers over the target's own store."""
        self.model, self.run = model, run

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        guesses = [state.tokens[rows, lengths]]
        for ahead in range(n):
            at = (lengths + ahead)[:, None]
            logits = logits_after(self.run, state, rows, guesses[-1][:, None], at, context)
            guesses.append(draw_at(self.model, state, rows, logits, at[:, 0] + 1))
        return torch.stack(guesses[1:], dim=1), torch.full_like(lengths, n)


class EagleChain:
    """An EAGLE-3 head whose entries lie by the target's slots.

    An entry joins a token with the target's hidden states before it, so it depends on the text up to that token and
    lies in that token's slot: texts that share the slot share the entry. The first token has none, so the head sees
    the table from its second column on.

    A round may bring up to `window` tokens whose hidden states are known only when it is over. The next one begins by
    making the entries of so many last tokens, those that are there already with the same numbers as before.
    """

    deepest = DEEPEST

    def __init__(
        self,
        head: EagleHead,
        target: Model,
        target_store: KeyValueStore,
        store: KeyValueStore,
        run: HeadRun,
        window: int,
    ) -> None:
        """`run` is the head's pass over `store`, whose slots are numbered as the target's are."""
        self.head, self.target, self.target_store, self.store = head, target, target_store, store
        self.run, self.window = run, window
        self.reads = Reads()

    def unread(self, sequence: Sequence, coming: int = 0) -> int:
        return self.reads.missing(sequence, coming, self.window)

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            start, end = max(self.reads.of(sequence), 1), len(sequence.tokens) - 1
            for first in range(start, end, READ_ROWS):
                at = torch.arange(first, min(first + READ_ROWS, end), device=state.device)[None]
                rows = torch.tensor([sequence.row], device=state.device)
                self.head.forward(*self._known(state, rows, at), self.store)
            self.reads.note(sequence, max(start, end))

    def practise(self) -> int:
        return 0  # its texts' features are the target's

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        known = len(sequence.tokens) - accepted - 1  # when it guessed
        # Not the guesses that held: their entries came of the head's own hidden states, not the target's.
        self.reads.note(sequence, known)

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        back = torch.arange(1 - self.window, 1, device=rows.device)
        at = (lengths[:, None] + back).clamp(min=1)  # a short text's first entry is made several times over
        hidden = self.run(*self._known(state, rows, at), self.window, context)
        hidden = hidden[self.window - 1 :: self.window].contiguous()  # of the last known token
        guesses = [self._draw(state, rows, hidden, lengths + 1)]
        for ahead in range(1, n):
            batch = self._batch(state, rows, guesses[-1][:, None], (lengths + ahead)[:, None])
            hidden = self.run(hidden, batch, 1, context)
            guesses.append(self._draw(state, rows, hidden, lengths + ahead + 1))
        return torch.stack(guesses, dim=1), torch.full_like(lengths, n)

    def _known(self, state: State, rows: Tensor, at: Tensor) -> tuple[Tensor, Batch]:
        """Known tokens at positions [S, k]: the target's hidden states before each, fused, and the batch."""
        features = self.target_store.features
        assert features is not None
        before = state.table[rows[:, None], at - 1].flatten()
        return self.head.fused(features[before]), self._batch(
            state, rows, state.tokens[rows[:, None], at], at
        )

    def _batch(self, state: State, rows: Tensor, ids: Tensor, at: Tensor) -> Batch:
        """Tokens [S, k] at positions [S, k] of the text, one place further back for the head."""
        batch = rows_batch(state, rows, ids, at - 1, state.table[rows[:, None], at])
        return replace(batch, table=state.table[:, 1:])

    def _draw(self, state: State, rows: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return draw_at(self.target, state, rows, self.head.logits(hidden), positions)
