"""Drafters that guess on the device: chains for all sequences of a round at once, as tensor operations.

They see `State`, what the device knows of every sequence, and leave nothing behind that a later round could
not do without: a rejected guess needs no undoing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outrider.draft.state import NOWHERE, Columns, Layout, State
from outrider.model.decoder import Model
from outrider.types import Batch, Draft, Sequence

# Rows on the device, how many of them belong to one text, how long texts may be, and whether rows branch.
Pass = Callable[[Batch, int, int, bool], Tensor]

# Tokens of all texts, some rows, their lengths, how many to guess, how long texts may be, and what counts as the same.
Find = Callable[[Tensor, Tensor, Tensor, int, int, int, int], tuple[Tensor, Tensor]]

Level = tuple[Layout, Columns]  # a pass of a drafter: its rows, and which guesses their logits give

# Rows of texts that a drafter catches up with at once, filled up to one of these: each has a graph. So many of them are
# one text's.
READ_ROWS, TOGETHER = (128, 512, 2048), 16
REACH = 8  # how many tokens of an ending are compared
SHORTEST = 1  # how many must be the same: a round's rows are paid for whether there is a guess or not
DEEPEST = 8  # guesses in a row that may be worth their passes


class ChainDrafter(Protocol):
    deepest: int  # guesses in a row that may be worth making

    def chain(
        self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int
    ) -> tuple[Tensor, Tensor | None]:
        """Guesses [S, n] for some rows of the state, and how many of them are meant [S], None: all. No text of a
        round is longer than `context` when it ends.
        """
        ...

    def unread(self, sequence: Sequence, coming: int = 0) -> int:
        """Tokens it must read before it can guess, once `coming` more are there that rounds of others bring."""
        ...

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        """Read what these texts have gained. Nothing is on its way, and their rows on the device are up to date."""
        ...

    def practise(self, state: State) -> int:
        """Read as if catching up, without a trace, to see what it takes; how many tokens, none if that cannot be."""
        ...

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        """A round in which it guessed for this text is over: `accepted` guesses held, of which it had to read `fed`."""
        ...


@runtime_checkable
class TreeDrafter(Protocol):
    def tree(
        self, state: State, rows: Tensor, lengths: Tensor, tree: Branches, context: int
    ) -> tuple[Tensor, Tensor | None]:
        """As `chain`, a guess for every node."""
        ...


class Branches:
    """A form's nodes as rows of passes. Row 0 is the last known token, row i + 1 is node i; a node's entry in the table
    comes as far behind the root's.
    """

    def __init__(self, shape: Draft) -> None:
        n, self.shape = len(shape), shape
        self.depths = (0, *shape.depths)
        self.depth = max(self.depths)
        self.branches = self.depth < n
        self.masks = (0, *shape.ancestors) if self.branches else ()
        self.layout = self._rows(range(n + 1))
        self.columns: Columns = tuple((row,) for row in range(n + 1))
        self.levels = [self._level(depth) for depth in range(self.depth)]

    def _rows(self, rows: range | list[int]) -> Layout:
        return Layout(
            entries=tuple(rows),
            depths=tuple(self.depths[row] for row in rows),
            picks=tuple(row - 1 for row in rows),
            masks=tuple(self.masks[row] for row in rows) if self.masks else (),
        )

    def _level(self, depth: int) -> Level:
        """Rows of this depth that have children, and which nodes those are."""
        parents = self.shape.parents
        rows = [row for row, d in enumerate(self.depths) if d == depth and row - 1 in parents]
        children = [[node for node, parent in enumerate(parents) if parent == row - 1] for row in rows]
        most = max(map(len, children))
        return self._rows(rows), tuple((*own, *[NOWHERE] * (most - len(own))) for own in children)


def chain_levels(n: int, behind: int = 0) -> Iterator[Level]:
    """The passes of a chain: of the last known token, then of every guess but the last. Where positions count from a
    later token of the text, they lie `behind`.
    """
    for ahead in range(n):
        yield Layout((ahead,), (ahead - behind,), (ahead - 1,)), ((ahead,),)


def known_rows(window: int, behind: int = 0) -> Layout:
    """The last known tokens, of which only the very last's logits are wanted; as many, however short a text is."""
    back = range(1 - window, 1)
    depths = tuple(i - behind for i in back)
    return Layout(tuple(back), depths, (NOWHERE,) * window, last=True, least=behind)


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

    def practise(self, state: State) -> int:
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

    def __init__(self, model: Model, run: Pass, vocab: int, read: Pass | None = None) -> None:
        """`read` is another way to run the same passes: for many rows, and not part of anything."""
        self.model, self.run, self.vocab, self.read = model, run, vocab, read or run
        self.reads = Reads()

    def unread(self, sequence: Sequence, coming: int = 0) -> int:
        return self.reads.missing(sequence, coming, self.window)

    def catch_up(self, state: State, sequences: list[Sequence]) -> None:
        rows, at = [], []
        for sequence in sequences:
            start, end = self.reads.of(sequence), len(sequence.tokens) - 1
            if start < end:
                lacking = (start - end) % TOGETHER  # the last token is read several times over
                at.append(np.pad(np.arange(start, end), (0, lacking), mode="edge"))
                rows.append(np.full(len(at[-1]), sequence.row))
            self.reads.note(sequence, max(start, end))
        if not at:
            return
        every, where = np.concatenate(rows), np.concatenate(at)
        for first in range(0, len(where), READ_ROWS[-1]):
            some = slice(first, first + READ_ROWS[-1])
            self._read(state, every[some], where[some])

    def practise(self, state: State) -> int:
        for count in READ_ROWS:
            self._read(state, np.full(count, state.rows), np.arange(count) % TOGETHER)
        return sum(READ_ROWS)

    def _read(self, state: State, rows: np.ndarray, at: np.ndarray) -> None:
        lacking = next(count for count in READ_ROWS if count >= len(rows)) - len(rows)
        rows, at = np.pad(rows, (0, lacking), constant_values=state.rows), np.pad(at, (0, lacking))
        self.read(known_batch(state, rows, at), TOGETHER, int(at.max()) + 1, False)

    def landed(self, sequence: Sequence, accepted: int, fed: int) -> None:
        known = len(sequence.tokens) - accepted - 1  # when it guessed
        self.reads.note(sequence, known + fed)

    def chain(self, state: State, rows: Tensor, lengths: Tensor, n: int, context: int) -> tuple[Tensor, None]:
        return self._guesses(state, rows, lengths, list(chain_levels(n)), n, context), None

    def tree(
        self, state: State, rows: Tensor, lengths: Tensor, tree: Branches, context: int
    ) -> tuple[Tensor, None]:
        return self._guesses(state, rows, lengths, tree.levels, len(tree.shape), context), None

    def _guesses(
        self, state: State, rows: Tensor, lengths: Tensor, levels: list[Level], n: int, context: int
    ) -> Tensor:
        (_, first), *further = levels
        together = (known_rows(self.window), first), *further
        return guess(self.run, self.model, state, rows, lengths, together, n, context, self.vocab)


def known_batch(state: State, rows: np.ndarray, at: np.ndarray, behind: int = 0) -> Batch:
    """Known tokens of these rows of the state, at positions that may lie `behind`; one row's logits are made, as some
    must be.
    """
    owners, where = torch.from_numpy(rows).to(state.device), torch.from_numpy(at).to(state.device)
    positions = where.int() - behind
    return Batch(
        ids=state.tokens[owners, where],
        positions=positions,
        slots=state.table[owners, where],
        table_rows=owners.int(),
        prefix=positions + 1,
        ancestors=torch.zeros_like(owners),
        table=state.table[:, behind:],
        logit_rows=torch.zeros_like(owners[:1]),
    )


def guess(
    run: Pass,
    model: Model,
    state: State,
    rows: Tensor,
    lengths: Tensor,
    levels: Iterable[Level],
    n: int,
    context: int,
    vocab: int | None = None,
) -> Tensor:
    """Pass after pass of a drafter: guesses [S, n]."""
    guesses, between = state.guesses(len(rows), n), state.between
    for layout, columns in levels:
        batch = between.lay(state, rows, lengths, layout, guesses)
        logits = run(batch, len(layout), context, bool(layout.masks))
        between.draw(model, state, batch, logits[:, :vocab], columns, guesses)
    return guesses
