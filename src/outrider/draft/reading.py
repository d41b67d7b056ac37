"""How a drafter reads known tokens: how far it has come, and its passes, packed by the host or over the device's state.

They work in the target's slot table, where known tokens have their slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.table import SlotTable
from outrider.device.ops import Pass, StepOps, known_batch
from outrider.draft.drafter import ResidentDrafter
from outrider.draft.weights import put_weights
from outrider.model.staged import ROW_FIELDS
from outrider.types import Batch, Draft, Sequence, Verdict

TOGETHER = 16  # neighbouring rows that are one sequence's


class PrefillProgress:
    """By row of the slot table. A sequence that gave its row back counts from nothing, even if it has the same row
    again: its slots are others.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[Sequence, int, int]] = {}

    def of(self, sequence: Sequence) -> int:
        """Its first tokens that have been read."""
        owner, released, read = self._by_row.get(sequence.row, (None, 0, 0))
        return read if owner is sequence and released == sequence.released else 0

    def behind(self, sequence: Sequence, coming: int, window: int) -> int:
        """Tokens to be read by a drafter that reads the last `window` in a captured step itself."""
        known, read = len(sequence.tokens) + coming, self.of(sequence)
        return known - 1 - read if read < known - window else 0

    def note(self, sequence: Sequence, read: int) -> None:
        self._by_row[sequence.row] = sequence, sequence.released, read

    def clear(self) -> None:
        """Nothing counts as read any more: what reads has changed."""
        self._by_row.clear()

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict, fed: bool) -> None:
        """All that was known when the draft was made has been read; if draft nodes were `fed`, so have the accepted
        ones. A node without children was not: its continuation was not needed.
        """
        if draft:
            path = verdict.accepted if fed else []
            leaf = bool(path) and path[-1] not in draft.parents
            self.note(sequence, len(sequence.tokens) - len(verdict.tokens) + len(path) - leaf)


def text_batch(
    table: SlotTable,
    rows: Seq[int],
    texts: Seq[Seq[int]],
    starts: Seq[int],
    last_only: bool = True,
    behind: int = 0,
) -> Batch:
    """Feed texts[i] to table row rows[i] from entry starts[i] on; slots are already there. Logits at each end.

    Where positions count from a later token of the text, they lie `behind`, and so does the table.
    """
    if len(texts) == 1:  # arrays of one sequence need not be joined
        [row], [text], [start] = rows, texts, starts
        entries, ids = np.arange(start, start + len(text), dtype=np.int32), np.array(text, np.int64)
        owners, ends = np.full(len(text), row, np.int32), np.arange(len(text))
        ends = ends[-1:] if last_only else ends
        positions = entries - behind
        none = np.zeros(len(text), np.int64)
        return slot_batch(table, ids, positions, entries, owners, positions + 1, none, ends, behind)
    sizes = [len(text) for text in texts]
    entries = np.concatenate(
        [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, sizes, strict=True)]
    )
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    ends = np.cumsum(sizes) - 1 if last_only else np.arange(len(ids))
    owners, prefix = np.repeat(np.array(rows, np.int32), sizes), entries + 1 - behind
    return slot_batch(table, ids, entries - behind, entries, owners, prefix, np.zeros_like(ids), ends, behind)


def pieces(batch: Batch, rows: int) -> Iterator[Batch]:
    """The same rows in batches of at most `rows`."""
    if batch.rows <= rows:
        yield batch
        return
    for first in range(0, batch.rows, rows):
        fields = {name: getattr(batch, name)[first : first + rows] for name in ROW_FIELDS}
        inside = (batch.logit_rows >= first) & (batch.logit_rows < first + rows)
        yield replace(batch, **fields, logit_rows=batch.logit_rows[inside] - first)


def slot_batch(
    table: SlotTable,
    ids: np.ndarray,
    positions: np.ndarray,
    entries: np.ndarray,
    rows: np.ndarray,
    prefix: np.ndarray,
    ancestors: np.ndarray,
    logit_rows: np.ndarray,
    behind: int,
) -> Batch:
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(table.entries[rows, entries]),
        table_rows=torch.from_numpy(rows),
        prefix=torch.from_numpy(prefix),
        ancestors=torch.from_numpy(ancestors),
        table=table.tensor[:, behind:],
        logit_rows=torch.from_numpy(logit_rows),
    )


class Reader:
    """Reads tokens of resident sequences in passes over the device's state, which the host does not wait for."""

    def __init__(self, run: Pass, progress: PrefillProgress, sizes: Seq[int], behind: int = 0) -> None:
        """A pass has as many rows as one of these `sizes`, each of which has a graph on a GPU. `behind`: the drafter's
        first entry is of a later token than the first, so its positions are this much lower.
        """
        self.run, self.progress, self.sizes, self.behind = run, progress, sizes, behind

    def catch_up(self, ops: StepOps, sequences: list[Sequence]) -> None:
        """Reads all tokens but the last of each sequence, which may not have a slot yet."""
        rows, at = [], []
        for sequence in sequences:
            start, end = max(self.progress.of(sequence), self.behind), len(sequence.tokens) - 1
            if start < end:
                lacking = (start - end) % TOGETHER  # the last token is read several times over
                at.append(np.pad(np.arange(start, end), (0, lacking), mode="edge"))
                rows.append(np.full(len(at[-1]), sequence.row))
            self.progress.note(sequence, max(start, end))
        if not at:
            return
        every, where = np.concatenate(rows), np.concatenate(at)
        for first in range(0, len(where), self.sizes[-1]):
            some = slice(first, first + self.sizes[-1])
            self._read(ops, every[some], where[some])

    def warm_up(self, ops: StepOps, longest: int) -> int:
        for count in self.sizes:
            at = np.arange(count) % TOGETHER + self.behind
            self._read(ops, np.full(count, ops.state.rows), at, longest)
        return sum(self.sizes)

    def _read(self, ops: StepOps, rows: np.ndarray, at: np.ndarray, longest: int = 1) -> None:
        lacking = next(count for count in self.sizes if count >= len(rows)) - len(rows)
        rows = np.pad(rows, (0, lacking), constant_values=ops.state.rows)
        at = np.pad(at, (0, lacking), constant_values=self.behind)
        longest = max(longest, int(at.max()) + 1)
        self.run(known_batch(ops.state, rows, at, self.behind), TOGETHER, longest, False)


class NetworkDrafter(ResidentDrafter):
    """A drafter with a network of its own. It reads known tokens before it drafts, and its weights can be replaced."""

    network: Any  # what holds the weights
    keeps_nodes = False  # whether the entries of its draft nodes are those of known tokens

    def __init__(self) -> None:
        self.progress = PrefillProgress()

    @abstractmethod
    def reader(self, ops: StepOps) -> Reader: ...

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        self.progress.accept(sequence, draft, verdict, self.keeps_nodes)

    def replace_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Drafts with these from now on. Requires that no step is in flight."""
        put_weights(self.network, weights)
        self.progress.clear()

    def catch_up(self, ops: StepOps, sequences: list[Sequence]) -> None:
        self.reader(ops).catch_up(ops, sequences)

    def warm_up(self, ops: StepOps, longest: int = 1) -> int:
        return self.reader(ops).warm_up(ops, longest)
