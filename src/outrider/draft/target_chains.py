"""Drafters that guess on the device from the target itself: its first layers, or an EAGLE-3 head on its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.draft.chains import (
    DEEPEST,
    READ_ROWS,
    NothingToRead,
    Pass,
    Reads,
    chain_levels,
    guess,
    known_batch,
    known_rows,
)
from outrider.draft.eagle import EagleHead
from outrider.draft.state import Layout, State
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

    def chain(self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int) -> tuple[Tensor, None]:
        return guess(self.run, self.model, state, rows, lengths, chain_levels(n), n, context), None


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
            for first in range(start, end, READ_ROWS[-1]):
                at = np.arange(first, min(first + READ_ROWS[-1], end))
                batch = known_batch(state, np.full(len(at), sequence.row), at, behind=1)
                self.head.forward(self._before(state, batch), batch, self.store)
            self.reads.note(sequence, max(start, end))

    def practise(self, state: State) -> int:
        return 0  # its texts' features are the target's

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        known = len(sequence.tokens) - accepted - 1  # when it guessed
        # Not the guesses that held: their entries came of the head's own hidden states, not the target's.
        self.reads.note(sequence, known)

    def chain(self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int) -> tuple[Tensor, None]:
        guesses = state.guesses(len(rows), n)
        batch = self._batch(state, rows, lengths, known_rows(self.window, behind=1))
        hidden = self.run(self._before(state, batch), batch, self.window, context)
        hidden = hidden[batch.logit_rows]  # of the last known token
        for ahead, (layout, columns) in enumerate(chain_levels(n, behind=1)):
            if ahead:
                batch = self._batch(state, rows, lengths, layout, guesses)
                hidden = self.run(hidden, batch, 1, context)
            logits = self.head.logits(hidden)
            state.between.draw(self.target, state, batch, logits, columns, guesses, ahead=2)
        return guesses, None

    def _before(self, state: State, batch: Batch) -> Tensor:
        """The target's hidden states before each of these known tokens, fused."""
        features = self.target_store.features
        assert features is not None
        slots = state.table[batch.table_rows.long(), batch.positions.long()]
        return self.head.fused(features[slots.long()])

    def _batch(
        self, state: State, rows: Tensor, lengths: Tensor, layout: Layout, guesses: Tensor | None = None
    ) -> Batch:
        """A layout whose positions lie one behind: the head's entries begin with the second token."""
        return replace(state.between.lay(state, rows, lengths, layout, guesses), table=state.table[:, 1:])
