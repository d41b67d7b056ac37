"""Drafters that guess on the device: chains for all sequences of a round at once, as tensor operations.

They see `State`, what the device knows of every sequence, and leave nothing behind that a later round could
not do without: a rejected guess needs no undoing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.draft.lookup import SHORTEST
from outrider.model.decoder import Model
from outrider.types import Batch, Sequence

# Rows on the device, how many of them belong to one text, and how long texts may be.
Pass = Callable[[Batch, int, int], Tensor]

READ_ROWS = 512  # of a text that a drafter catches up with
REACH = 8  # how many tokens of an ending are compared


class State:
    """What the device knows of every sequence. One row more than there are: padding's own."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width, self.device = rows, width, device
        self.tokens = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # tokens in the cache
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows + 1, dtype=torch.float32, device=device)

    def board(self, sequence: Sequence, entries: np.ndarray) -> None:
        """Bring a row up to what the host knows of its sequence."""
        row, known, cached = sequence.row, len(sequence.tokens), sequence.cached
        self.tokens[row, :known] = torch.tensor(sequence.tokens).to(self.device)
        self.table[row, :cached] = torch.from_numpy(entries[:cached].copy()).to(self.device)
        self.lengths[row] = cached
        self.seeds[row] = sequence.seed
        self.temperature[row] = sequence.request.params.temperature


class ChainDrafter(Protocol):
    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Guesses [S, n] for some rows of the state, and how many of them are meant [S]. No text of a round is
        longer than `context` when it ends.
        """
        ...

    def lacks(self, sequence: Sequence) -> bool: ...
    def catch_up(self, state: State, sequences: list[Sequence]) -> None: ...
    def landed(self, sequence: Sequence, guessed: int, accepted: int) -> None: ...


class LookupChain:
    """The longest ending of a text that occurs earlier in it, the latest such place, and what followed there."""

    def lacks(self, sequence: Sequence) -> bool:
        return False

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        pass

    def landed(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        pass

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        tokens = state.tokens[rows, :context]  # [S, context]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        before = place < lengths[:, None]  # places whose next token is known
        size = torch.zeros_like(tokens)
        same = before.clone()
        for back in range(REACH):
            ending = tokens.gather(1, (lengths - back).clamp(min=0)[:, None])
            shifted = torch.roll(tokens, back, dims=1)
            same = same & (shifted == ending) & (place >= back) & (lengths[:, None] >= back)
            size += same
        best = (size * tokens.shape[1] + place).masked_fill(size < SHORTEST, -1).amax(1)
        found = best >= 0
        start = torch.where(found, best % tokens.shape[1] + 1, 0)
        at = start[:, None] + torch.arange(n, device=tokens.device)
        count = torch.where(found, (lengths + 1 - start).clamp(max=n), 0)
        return tokens.gather(1, at.clamp(max=tokens.shape[1] - 1)), count


class LmChain:
    """A smaller model whose keys and values lie in slots of the target's own table: a token's slot serves both.

    In a round it reads the last two tokens (after a round in which all its guesses held it lacks two, else one)
    and then its own guesses. What it missed while it was not asked it reads before the next round it is asked for.
    """

    def __init__(self, model: Model, store: KeyValueStore, run: Pass, vocab: int) -> None:
        self.model, self.store, self.run, self.vocab = model, store, run, vocab
        self.valid: dict[int, tuple[Sequence, int]] = {}  # by row: tokens it has read, as the host knows it

    def lacks(self, sequence: Sequence) -> bool:
        """Whether it must read before it can guess."""
        owner, valid = self.valid.get(sequence.row, (None, 0))
        return owner is not sequence or valid < len(sequence.tokens) - 2

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        """Read everything but the last two tokens of these texts, whose rows are up to date on the device."""
        for sequence in sequences:
            owner, valid = self.valid.get(sequence.row, (None, 0))
            start, end = valid if owner is sequence else 0, len(sequence.tokens) - 1
            for first in range(start, end, READ_ROWS):
                self._read(state, sequence.row, first, min(first + READ_ROWS, end))
            self.valid[sequence.row] = sequence, max(start, end)

    def landed(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        """A round in which it guessed `guessed` tokens for this text is over; `accepted` of them held."""
        emitted = accepted + 1
        if guessed and sequence.row in self.valid:
            self.valid[sequence.row] = sequence, len(sequence.tokens) - emitted + min(accepted, guessed - 1)

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        two = torch.stack([(lengths - 1).clamp(min=0), lengths], dim=1)
        tokens = self._next(state, rows, state.tokens[rows[:, None], two], two, context)
        guesses = [tokens]
        for ahead in range(1, n):
            at = (lengths + ahead)[:, None]
            guesses.append(self._next(state, rows, guesses[-1][:, None], at, context))
        return torch.stack(guesses, dim=1), torch.full_like(lengths, n)

    def _next(self, state: State, rows: Tensor, ids: Tensor, at: Tensor, context: int) -> Tensor:
        """Feed tokens [S, k] at positions [S, k]; the law, by this model, of what follows the last."""
        together = ids.shape[1]
        batch = rows_batch(state, rows, ids, at, state.table[rows[:, None], at])
        batch.logit_rows = torch.arange(together - 1, len(batch.ids), together, device=rows.device)
        logits = self.run(batch, together, context)[:, : self.vocab]
        return draw_at(self.model, state, rows, logits, at[:, -1] + 1)

    def _read(self, state: State, row: int, first: int, last: int) -> None:
        at = torch.arange(first, last, device=state.device)[None]
        rows = torch.tensor([row], device=state.device)
        batch = rows_batch(
            state, rows, state.tokens[row, first:last][None], at, state.table[row, first:last][None]
        )
        batch.logit_rows = batch.logit_rows[:1]
        self.model.forward(batch, self.store)


def rows_batch(state: State, rows: Tensor, ids: Tensor, at: Tensor, slots: Tensor) -> Batch:
    """Known tokens [S, k] at positions [S, k] as a batch of S k rows, all of whose logits are wanted."""
    owners = rows.repeat_interleave(ids.shape[1])
    positions = at.flatten().int()
    return Batch(
        ids=ids.flatten(),
        positions=positions,
        slots=slots.flatten().int(),
        table_rows=owners.int(),
        prefix=positions + 1,
        ancestors=torch.zeros_like(owners),
        table=state.table,
        logit_rows=torch.arange(len(owners), device=owners.device),
    )


def draw_at(model: Model, state: State, owners: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
    """The law at each row of logits: who it belongs to, and the position it foretells."""
    warmth = state.temperature[owners]
    sampled = warmth > 0
    logits = logits / torch.where(sampled, warmth, 1.0)[:, None]
    return model.draw(logits, sampled, state.seeds[owners], positions)
