"""Drafters that guess on the device: chains for all sequences of a round at once, as tensor operations.

They see `State`, what the device knows of every sequence, and leave nothing behind that a later round could
not do without: a rejected guess needs no undoing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.model.decoder import Model
from outrider.types import Batch, Draft, SamplingParams, Sequence
from outrider.verify.filters import BANNED, OFF, wanted
from outrider.verify.process import warmth

# Rows on the device, how many of them belong to one text, how long texts may be, and whether rows branch.
Pass = Callable[[Batch, int, int, bool], Tensor]

# Tokens of all texts, some rows, their lengths, how many to guess, how long texts may be, and what counts as the same.
Find = Callable[[Tensor, Tensor, Tensor, int, int, int, int], tuple[Tensor, Tensor]]

READ_ROWS = 2048  # of texts that a drafter catches up with, at once
REACH = 8  # how many tokens of an ending are compared
SHORTEST = 1  # how many must be the same: a round's rows are paid for whether there is a guess or not
DEEPEST = 8  # guesses in a row that may be worth their passes


class State:
    """What the device knows of every sequence. One row more than there are: padding's own."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width, self.device = rows, width, device
        self.tokens = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # tokens in the cache
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows + 1, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows + 1, dtype=torch.float32, device=device)
        self.floor = torch.full((rows + 1,), BANNED, dtype=torch.float32, device=device)  # log of min_p
        self.filters = np.zeros(rows + 1, bool)  # for the host: whose law has any
        self.filtered = False  # whether the round that is being made heeds them

    def board(self, sequence: Sequence, entries: np.ndarray) -> None:
        """Bring a row up to what the host knows of its sequence."""
        row, known, cached = sequence.row, len(sequence.tokens), sequence.cached
        self.tokens[row, :known] = torch.tensor(sequence.tokens).to(self.device)
        self.table[row, :cached] = torch.from_numpy(entries[:cached].copy()).to(self.device)
        self.lengths[row] = cached
        self.seeds[row] = sequence.seed
        self._board_law(row, sequence.request.params)

    def _board_law(self, row: int, params: SamplingParams) -> None:
        self.temperature[row] = warmth(params.temperature)
        filters = wanted(params)
        if filters != OFF or self.filters[row]:
            self.top_k[row], self.top_p[row], self.floor[row] = filters
        self.filters[row] = filters != OFF


class ChainDrafter(Protocol):
    deepest: int  # guesses in a row that may be worth making

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Guesses [S, n] for some rows of the state, and how many of them are meant [S]. No text of a round is
        longer than `context` when it ends.
        """
        ...

    def unread(self, sequence: Sequence, coming: int = 0) -> int:
        """Tokens it must read before it can guess, once `coming` more are there that rounds of others bring."""
        ...

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        """Read what these texts have gained. Nothing is on its way, and their rows on the device are up to date."""
        ...

    def practise(self) -> int:
        """Read as if catching up, without a trace, to see what it takes; how many tokens, none if that cannot be."""
        ...

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        """A round in which it guessed for this text is over: `accepted` guesses held, of which it had to read `fed`."""
        ...


@runtime_checkable
class TreeDrafter(Protocol):
    def tree(
        self, state: State, rows: Tensor, lengths: Tensor, tree: Branches, context: int
    ) -> tuple[Tensor, Tensor]:
        """As `chain`, a guess for every node."""
        ...


class Branches:
    """A form's nodes as tensors. Row 0 is the last known token, row i + 1 is node i; a node's entry in the table comes
    as far behind the root's.
    """

    def __init__(self, shape: Draft, device: torch.device) -> None:
        n, self.shape, self.device = len(shape), shape, device
        depths = [0, *shape.depths]
        self.branches = max(depths) < n
        self.step = torch.arange(n + 1, device=device)
        self.ahead = torch.arange(1, max(depths) + 2, device=device)
        self.depths = torch.tensor(depths, device=device)
        self.parents = torch.tensor(
            [parent + 1 for parent in shape.parents], dtype=torch.int64, device=device
        )
        self.masks = torch.tensor([0, *shape.ancestors], dtype=torch.int64, device=device)
        self.paths = (self.masks[1:, None] >> self.step[:-1] & 1).bool()  # [n, n]
        self.levels = (
            self.depths[1:] == torch.arange(1, max(depths) + 1, device=device)[:, None]
        )  # [depth, n]
        self.fed = [self._fed(depth) for depth in range(max(depths))]

    def _fed(self, depth: int) -> tuple[Tensor, int, Tensor]:
        """Rows of this depth that have children, the most children one has, and which of so many each child is."""
        shape, depths = self.shape, [0, *self.shape.depths]
        rows = [row for row, d in enumerate(depths) if d == depth and row - 1 in shape.parents]
        kids = [(node, parent + 1) for node, parent in enumerate(shape.parents) if parent + 1 in rows]
        most = max(shape.parents.count(row - 1) for row in rows)
        places = [rows.index(row) * most + shape.rank(node) for node, row in kids]
        return torch.tensor(rows, device=self.device), most, torch.tensor(places, device=self.device)

    def mark(self, batch: Batch, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Make these rows of each text, by default all, see their own paths after its known tokens."""
        masks = self.masks if rows is None else self.masks[rows]
        batch.ancestors = masks.repeat(len(lengths))
        batch.prefix = (lengths.int() + 1).repeat_interleave(len(masks))


class Reads:
    """How many tokens of each text a drafter has read, as the host knows it.

    Whoever gave its row back counts from nothing, even if it has the same row again: its slots are others.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[Sequence, int, int]] = {}

    def of(self, sequence: Sequence) -> int:
        owner, released, read = self._by_row.get(sequence.row, (None, 0, 0))
        return read if owner is sequence and released == sequence.released else 0

    def missing(self, sequence: Sequence, coming: int, window: int) -> int:
        """Tokens to be read by whoever reads the last `window` in a round itself."""
        known, read = len(sequence.tokens) + coming, self.of(sequence)
        return known - 1 - read if read < known - window else 0

    def note(self, sequence: Sequence, read: int) -> None:
        self._by_row[sequence.row] = sequence, sequence.released, read


class NothingToRead:
    """What a chain drafter has that keeps nothing of its own between rounds."""

    deepest = DEEPEST

    def unread(self, sequence: Sequence, coming: int = 0) -> int:
        return 0

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        pass

    def practise(self) -> int:
        return 0

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        pass


def find_copies(
    tokens: Tensor, rows: Tensor, lengths: Tensor, n: int, context: int, reach: int, shortest: int
) -> tuple[Tensor, Tensor]:
    """The longest ending of each text, up to `reach` tokens, that occurs earlier in it, the latest such place, and
    the n tokens [S, n] that followed there; how many of them are meant [S], none where no `shortest` are the same.
    """
    texts = tokens[rows, :context]  # [S, context]
    place = torch.arange(texts.shape[1], device=texts.device)
    size = torch.zeros_like(texts)
    same = place < lengths[:, None]  # places whose next token is known
    for back in range(reach):
        ending = texts.gather(1, (lengths - back).clamp(min=0)[:, None])
        shifted = torch.roll(texts, back, dims=1)
        same = same & (shifted == ending) & (place >= back) & (lengths[:, None] >= back)
        size += same
    best = (size * texts.shape[1] + place).masked_fill(size < shortest, -1).amax(1)
    found = best >= 0
    start = torch.where(found, best % texts.shape[1] + 1, 0)
    at = start[:, None] + torch.arange(n, device=texts.device)
    count = torch.where(found, (lengths + 1 - start).clamp(max=n), 0)
    return texts.gather(1, at.clamp(max=texts.shape[1] - 1)), count


class LookupChain(NothingToRead):
    """What followed the last time the text ended as it ends now."""

    deepest = 15  # they cost nothing

    def __init__(self, find: Find = find_copies) -> None:
        self.find = find

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        return self.find(state.tokens, rows, lengths, n, min(context, state.width), REACH, SHORTEST)


class LmChain:
    """A smaller model whose keys and values lie in slots of the target's own table: a token's slot serves both.

    In a round it reads the last few tokens (after a round in which all its guesses held it lacks two, after one of
    another drafter's some more) and then its own guesses. What it missed beyond that it reads before the next round it
    is asked for.
    """

    window = 4
    deepest = DEEPEST

    def __init__(self, model: Model, store: KeyValueStore, run: Pass, vocab: int, table: Tensor) -> None:
        """`table` is the host's, for what is read while nothing is on its way."""
        self.model, self.store, self.run, self.vocab, self.table = model, store, run, vocab, table
        self.reads = Reads()

    def unread(self, sequence: Sequence, coming: int = 0) -> int:
        return self.reads.missing(sequence, coming, self.window)

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        spans = [(s, self.reads.of(s), len(s.tokens) - 1) for s in sequences]
        owners = np.concatenate([np.full(max(end - start, 0), s.row, np.int32) for s, start, end in spans])
        ids = np.concatenate([np.array(s.tokens[start:end], np.int64) for s, start, end in spans])
        at = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans])
        for first in range(0, len(ids), READ_ROWS):
            some = slice(first, first + READ_ROWS)
            self.model.forward(known_rows(self.table, owners[some], ids[some], at[some]), self.store)
        for sequence, start, end in spans:
            self.reads.note(sequence, max(start, end))

    def practise(self) -> int:
        count = min(READ_ROWS, self.table.shape[1])
        nobody, at = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
        batch = known_rows(self.table, nobody, nobody.astype(np.int64), at)
        batch.slots.fill_(self.store.slots)  # nobody's
        self.model.forward(batch, self.store)
        return count

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        known = len(sequence.tokens) - accepted - 1  # when it guessed
        self.reads.note(sequence, known + fed)

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor]:
        guesses = [self._drawn(state, rows, self._after_known(state, rows, lengths, context), lengths + 1)]
        for ahead in range(1, n):
            at = (lengths + ahead)[:, None]
            logits = logits_after(self.run, state, rows, guesses[-1][:, None], at, context)
            guesses.append(self._drawn(state, rows, logits, at[:, 0] + 1))
        return torch.stack(guesses, dim=1), torch.full_like(lengths, n)

    def tree(
        self, state: State, rows: Tensor, lengths: Tensor, tree: Branches, context: int
    ) -> tuple[Tensor, Tensor]:
        logits = self._after_known(state, rows, lengths, context)
        levels: list[Tensor] = []
        for depth, (fed, most, places) in enumerate(tree.fed):
            if depth:
                here = torch.cat(levels, dim=1)[:, fed - 1]
                at = (lengths + depth)[:, None].expand(-1, len(fed))
                slots = state.table[rows[:, None], lengths[:, None] + fed]
                batch = rows_batch(state, rows, here, at, slots)
                tree.mark(batch, lengths, fed)
                logits = self.run(batch, len(fed), context, True)
            owners = rows.repeat_interleave(len(fed))
            positions = (lengths + depth + 1).repeat_interleave(len(fed))
            drawn = draw_at(self.model, state, owners, logits[:, : self.vocab], positions, most)
            levels.append(drawn.view(len(rows), -1)[:, places])
        return torch.cat(levels, dim=1), torch.full_like(lengths, len(tree.shape))

    def _after_known(self, state: State, rows: Tensor, lengths: Tensor, context: int) -> Tensor:
        back = torch.arange(1 - self.window, 1, device=rows.device)
        at = (lengths[:, None] + back).clamp(min=0)  # a short text's first token is read several times over
        return logits_after(self.run, state, rows, state.tokens[rows[:, None], at], at, context)

    def _drawn(self, state: State, rows: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        return draw_at(self.model, state, rows, logits[:, : self.vocab], positions)


def logits_after(run: Pass, state: State, rows: Tensor, ids: Tensor, at: Tensor, context: int) -> Tensor:
    """Feed tokens [S, k] at positions [S, k]; the logits after the last of each."""
    together = ids.shape[1]
    batch = rows_batch(state, rows, ids, at, state.table[rows[:, None], at])
    batch.logit_rows = torch.arange(together - 1, len(batch.ids), together, device=rows.device)
    return run(batch, together, context, False)


def known_rows(table: Tensor, owners: np.ndarray, ids: np.ndarray, at: np.ndarray) -> Batch:
    """Known tokens of texts at their positions, by the host's table; one row's logits are made, as some must be."""
    positions, rows = torch.from_numpy(at), torch.from_numpy(owners)
    return Batch(
        ids=torch.from_numpy(ids),
        positions=positions,
        slots=table[rows.long(), positions.long()],
        table_rows=rows,
        prefix=positions + 1,
        ancestors=torch.zeros(len(ids), dtype=torch.int64),
        table=table,
        logit_rows=torch.zeros(1, dtype=torch.int64),
    )


def rows_batch(state: State, rows: Tensor, ids: Tensor, at: Tensor, slots: Tensor) -> Batch:
    """Known tokens [S, k] at positions [S, k] as a batch of S k rows, all of whose logits are wanted."""
    owners = rows.repeat_interleave(ids.shape[1])
    positions = at.flatten().int()
    return Batch(
        ids=ids.flatten(),
        positions=positions,
        slots=slots.flatten().int().contiguous(),  # kernels take an address, and it may be a column
        table_rows=owners.int(),
        prefix=positions + 1,
        ancestors=torch.zeros_like(owners),
        table=state.table,
        logit_rows=torch.arange(len(owners), device=owners.device),
    )


def draw_at(
    model: Model, state: State, owners: Tensor, logits: Tensor, positions: Tensor, most: int = 1
) -> Tensor:
    """The law at each row of logits: who it belongs to, and the position it foretells. With `most`, also what it would
    say if its first choice were banned, and so on: [R, most].
    """
    heat = state.temperature[owners]
    sampled = heat > 0
    logits = logits / torch.where(sampled, heat, 1.0)[:, None]
    if state.filtered:
        model.sift(logits, state.top_k[owners], state.top_p[owners], state.floor[owners])
    seeds = state.seeds[owners]
    if most == 1:
        return model.draw(logits, sampled, seeds, positions)
    return model.draw_several(logits, sampled, seeds, positions, most)
