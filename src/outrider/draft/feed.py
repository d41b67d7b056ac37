"""A drafter's passes for the host: over known tokens, and over the nodes of draft trees in the making.

They work in the target's slot table. Known tokens have their slots; a node that is fed borrows one behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.draft.tree import Growth, Place, grow
from outrider.model.decoder import Model
from outrider.model.staged import ROW_FIELDS
from outrider.types import NO_DRAFT, Batch, Draft, DraftPlan, Sequence
from outrider.verify.law import Draw

Run = Callable[[Batch, list[Growth], list[Place]], Tensor]  # logits after each of these nodes


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
    sizes = [len(text) for text in texts]
    entries = np.concatenate(
        [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, sizes, strict=True)]
    )
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    ends = np.cumsum(sizes) - 1 if last_only else np.arange(len(ids))
    owners, prefix = np.repeat(np.array(rows, np.int32), sizes), entries + 1 - behind
    return _batch(table, ids, entries - behind, entries, owners, prefix, np.zeros_like(ids), ends, behind)


def pieces(batch: Batch, rows: int) -> Iterator[Batch]:
    """The same rows in batches of so many."""
    if batch.rows <= rows:
        yield batch
        return
    for first in range(0, batch.rows, rows):
        fields = {name: getattr(batch, name)[first : first + rows] for name in ROW_FIELDS}
        inside = (batch.logit_rows >= first) & (batch.logit_rows < first + rows)
        yield replace(batch, **fields, logit_rows=batch.logit_rows[inside] - first)


def grow_drafts(
    table: SlotTable,
    sequences: Seq[Sequence],
    draft_plans: Seq[DraftPlan],
    roots: Tensor,
    run: Run,
    behind: int = 0,
    keep: bool = False,
    draw: Draw | None = None,
) -> list[Draft]:
    """Drafts from the logits [S, vocab] after the known tokens; none if there are too few slots to borrow.

    The slots are given back, unless the drafter wants to `keep` what it wrote there: then they stay with their nodes.
    """
    known = [len(sequence.tokens) for sequence in sequences]
    # By node, the borrowed entries of its path as bits.
    paths: list[dict[int, int]] = [{-1: 0} for _ in sequences]

    def expand(growths: list[Growth], places: list[Place]) -> Tensor:
        for i, node in places:
            table.extend(sequences[i].row, 1)
            paths[i][node] = paths[i][growths[i].parents[node]] | 1 << len(paths[i]) - 1
        masks = np.array([paths[i][node] for i, node in places], np.int64)
        base = np.array([known[i] for i, _ in places], np.int32)
        batch = _batch(
            table,
            np.array([growths[i].tokens[node] for i, node in places], np.int64),
            base + np.array([growths[i].depths[node] - 1 - behind for i, node in places], np.int32),
            base + np.array([_entry(paths[i][node]) for i, node in places], np.int32),
            np.array([sequences[i].row for i, _ in places], np.int32),
            base - behind,
            masks,
            np.arange(len(places)),
            behind,
        )
        return run(batch, growths, places)

    kept, drafts = False, [NO_DRAFT] * len(sequences)
    try:
        grown = [growth.harvest() for growth in grow(sequences, draft_plans, roots, expand, draw)]
        for i, (_, nodes) in enumerate(grown if keep else ()):
            fed = max((n + 1 for n, node in enumerate(nodes) if node in paths[i]), default=0)
            order = [_entry(paths[i][node]) if node in paths[i] else -1 for node in nodes[:fed]]
            table.attach(sequences[i].row, table.detach(sequences[i].row, known[i]), order)
        drafts, kept = [draft for draft, _ in grown], keep
    except CacheFull:  # a draft is never worth another sequence's place
        pass
    finally:
        if not kept:
            for sequence, length in zip(sequences, known, strict=True):
                table.commit(sequence.row, length)
    return drafts


def host_draw(model: Model) -> Draw | None:
    """The kernel of the law, where it runs over what is on the host."""
    return model.draw if model.device.type == "cpu" else None


def _entry(path: int) -> int:
    """A node comes after its ancestors, so its own bit is the highest."""
    return path.bit_length() - 1


def _batch(
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
