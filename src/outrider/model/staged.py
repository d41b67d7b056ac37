"""Buffers for host-packed rows that a captured pass reads: prompt chunks, and drafts made by the host.

Attention reads a sequence's past once for a group of its rows. The groups change with every batch, so they are staged
with the rows. Sequences with draft nodes come last, in a part of their own: attention needs scratch memory for each of
their rows, which a long prompt chunk must not need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.load.config import ModelConfig
from outrider.types import Batch

BLOCK = 64  # keys that attention reads together
TALLEST = 64  # query rows times heads of a group in one attention program
TALL, TALL_DIM = 128, 128  # the same for long prompts, on Hopper and in heads of this size
TALL_PROGRAMS = 256  # that keep the device busy: each of its 132 multiprocessors runs one at a time
ROW_FIELDS = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors")

Group = tuple[int, int, int]  # first row, count, and how many entries of their table the rows share
Ints = NDArray[np.integer]


def padded_group(heads: int, kv_heads: int) -> int:
    """Query heads per key head, rounded up to a power of two."""
    return 1 << (heads // kv_heads - 1).bit_length()


def rows_together(config: ModelConfig, rows: int = 1) -> int:
    """Maximum number of rows of one sequence in an attention program, where one sequence may have `rows` of a pass."""
    return tallest(rows, config.heads, config.kv_heads, config.head_dim) // padded_group(
        config.heads, config.kv_heads
    )


def tallest(rows: int, heads: int, kv_heads: int, dim: int) -> int:
    """Query rows times heads of a group in the tallest program for `rows` rows."""
    enough = rows * padded_group(heads, kv_heads) * kv_heads >= TALL * TALL_PROGRAMS
    return TALL if enough and dim == TALL_DIM and is_hopper() else TALLEST


@cache
def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def group_rows(batch: Batch, together: int) -> list[Group]:
    """Groups of at most `together` neighbouring rows of one sequence, of a batch on the host. The last rows of a text,
    which read the most of it, come first.
    """
    owners, known, ancestors = batch.table_rows.numpy(), batch.prefix.numpy(), batch.ancestors.numpy()
    return _groups(owners, known, ancestors, together)


def _groups(owners: Ints, known: Ints, ancestors: Ints, together: int) -> list[Group]:
    limits = np.where(ancestors != 0, known // BLOCK * BLOCK, known)
    edges = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), len(owners)]
    firsts = [at for begin, end in pairwise(edges) for at in range(begin, end, together)]
    if not firsts:
        return []
    counts = np.diff([*firsts, len(owners)]).tolist()
    groups = list(zip(firsts, counts, np.maximum.reduceat(limits, firsts).tolist(), strict=True))
    return groups[::-1]


@dataclass(frozen=True, slots=True)
class StagedShape:
    """Capacity of the buffers, and how attention reads them."""

    rows: int
    wanted: int  # rows whose logits are made
    together: int  # rows of one sequence in a group, at most
    groups: tuple[int, int]  # of sequences without draft nodes, and of those with some
    branching: int = 0  # rows of the latter


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Rows that attention reads with one plan."""

    batch: Batch
    groups: Tensor  # [G, 3] int32, first rows counted from the part's own
    together: int
    branching: bool


class StagedView:
    """The rows as a pass reads them, in one buffer on the device."""

    def __init__(self, shape: StagedShape, there: Tensor, table: Tensor) -> None:
        self.shape, self.there = shape, there
        ids, ancestors, logit_rows, positions, slots, table_rows, prefix, self.entries, *groups = there.split(
            _sizes(shape)
        )
        self.batch = Batch(
            ids=ids.view(torch.int64),
            positions=positions,
            slots=slots,
            table_rows=table_rows,
            prefix=prefix,
            ancestors=ancestors.view(torch.int64),
            table=table,
            logit_rows=logit_rows.view(torch.int64),
        )
        self.parts = [self._part(i, group.view(-1, 3)) for i, group in enumerate(groups) if len(group)]

    def _part(self, branching: int, groups: Tensor) -> StagedPart:
        first = self.shape.rows - self.shape.branching
        rows = slice(first, None) if branching else slice(first)
        batch = replace(self.batch, **{name: getattr(self.batch, name)[rows] for name in ROW_FIELDS})
        return StagedPart(batch, groups, self.shape.together, bool(branching))


class StagedRows(StagedView):
    """Buffers for the rows of a batch. Unused rows are padding, which writes to the padding slot.

    One int32 buffer on the device is filled from a pinned copy in one transfer. There are several pinned copies,
    because some may still be in flight when the next step is packed.
    """

    def __init__(
        self, shape: StagedShape, table: Tensor, padding_slot: int, padding_row: int, buffers: int = 2
    ) -> None:
        """`table` is on the device; padding belongs to its row `padding_row`."""
        size = sum(sizes := _sizes(shape))
        super().__init__(shape, torch.zeros(size, dtype=torch.int32, device=table.device), table)
        self.padding = (0, 0, 0, padding_slot, padding_row, 1, 0)
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=table.is_cuda) for _ in range(buffers)]
        self._here = [_columns(host.split(sizes)) for host in self._host]
        self._turn = 0
        self.clear()

    def clear(self) -> None:
        """Fills all rows with padding."""
        nothing = {name: getattr(self.batch, name)[:0].cpu() for name in (*ROW_FIELDS, "logit_rows")}
        self.fill(Batch(**nothing, table=self.batch.table), nothing["slots"])

    def fill(self, batch: Batch, entries: Tensor) -> None:
        """Writes a batch of the host without waiting; `entries` says where in the table each row's slot goes. Logits
        come in the order that the batch wants.
        """
        self._turn = (self._turn + 1) % len(self._host)
        *columns, plain, branching = self._here[self._turn]
        logit_rows, wanted = columns.pop(2), batch.logit_rows.numpy()
        place = self._places(batch)
        if len(wanted) > len(logit_rows):
            raise ValueError(f"{len(wanted)} rows of logits are more than {self.shape}")
        logit_rows[:] = 0
        logit_rows[: len(wanted)] = place[wanted]
        sources = (
            batch.ids, batch.ancestors, batch.positions, batch.slots, batch.table_rows, batch.prefix, entries,
        )  # fmt: skip
        for column, source, blank in zip(columns, sources, self.padding, strict=True):
            column[:] = blank
            column[place] = source.numpy()
        # Padding has groups, too: its rows must compute finite numbers, because padding of later steps reads its slot.
        _, ancestors, _, _, owners, known, _ = columns
        first = self.shape.rows - self.shape.branching
        for at, groups in ((slice(first), plain), (slice(first, None), branching)):
            made = _groups(owners[at], known[at], ancestors[at], self.shape.together)
            if 3 * len(made) > len(groups):
                raise ValueError(f"{len(made)} groups of rows are more than {self.shape}")
            groups[:] = 0
            groups[: 3 * len(made)] = np.array(made, np.int32).ravel()
        self.there.copy_(self._host[self._turn], non_blocking=True)

    def _places(self, batch: Batch) -> Ints:
        """The place of each row, among the rows of its kind."""
        owners, nodes = batch.table_rows.numpy(), batch.ancestors.numpy() != 0
        first = self.shape.rows - self.shape.branching
        branching = np.isin(owners, owners[nodes]) | (first == 0)
        count = int(branching.sum())
        if count > self.shape.branching or batch.rows - count > first:
            raise ValueError(
                f"{batch.rows} rows, {count} of sequences with draft nodes, are more than {self.shape}"
            )
        return np.where(branching, first + branching.cumsum(), (~branching).cumsum()) - 1

    def placed(self) -> Batch:
        """These rows as a batch, after their slots are written to the table."""
        mine = self.batch
        mine.table[mine.table_rows.long(), self.entries.long()] = mine.slots
        return mine

    def join(self, resident: Batch) -> Batch:
        """A batch of the resident rows followed by these."""
        mine = self.placed()
        rows = {name: torch.cat([getattr(resident, name), getattr(mine, name)]) for name in ROW_FIELDS}
        wanted = torch.cat([resident.logit_rows, mine.logit_rows + resident.rows])
        return Batch(**rows, table=mine.table, logit_rows=wanted)


def _sizes(shape: StagedShape) -> list[int]:
    """Of the columns in 32-bit numbers; the first three hold 64-bit ones."""
    rows = shape.rows
    return [2 * rows, 2 * rows, 2 * shape.wanted, *[rows] * 5, *(3 * count for count in shape.groups)]


def _columns(parts: tuple[Tensor, ...]) -> list[Ints]:
    """Views of a host buffer for numpy; the first three hold 64-bit numbers."""
    return [part.view(torch.int64).numpy() if i < 3 else part.numpy() for i, part in enumerate(parts)]
