"""Batches for a drafter's own passes: catching up with the known text, and feeding nodes of a growing tree."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.cache.table import SlotTable
from outrider.draft.tree import Growth, Place
from outrider.types import Batch


@dataclass(slots=True)
class Fed:
    """Which nodes of a sequence's tree a drafter has run, in which order, behind `known` entries of its
    row.
    """

    row: int
    known: int
    order: list[int] = field(default_factory=list)  # nodes
    masks: dict[int, int] = field(default_factory=dict)  # node -> the entries of its path, as bits

    def add(self, node: int, parent: int) -> None:
        self.masks[node] = self.masks.get(parent, 0) | 1 << len(self.order)
        self.order.append(node)

    def kept(self, path: Seq[int]) -> list[int]:
        """The entries of a path's nodes, as far as they were fed."""
        entries = []
        for node in path:
            if node not in self.masks:
                break
            entries.append(self.order.index(node))
        return entries


def text_batch(
    table: SlotTable, rows: Seq[int], texts: Seq[Seq[int]], starts: Seq[int], last_only: bool = True
) -> Batch:
    """Feed texts[i] to table row rows[i] from entry starts[i] on; slots are already there. Logits at each
    end.
    """
    owner = np.repeat(np.array(rows, np.int32), [len(t) for t in texts])
    positions = np.concatenate(
        [np.arange(s, s + len(t), dtype=np.int32) for s, t in zip(starts, texts, strict=True)]
    )
    ends = np.cumsum([len(t) for t in texts]) - 1
    return _batch(
        table,
        np.concatenate([np.asarray(t, np.int64) for t in texts]),
        positions,
        positions,
        owner,
        positions + 1,
        np.zeros(len(owner), np.int64),
        ends if last_only else np.arange(len(owner)),
    )


def node_batch(
    table: SlotTable, feds: Seq[Fed], tokens: Seq[int], nodes: Seq[int], depths: Seq[int]
) -> Batch:
    """Feed one node each; the slot of fed[i]'s newest entry is already there."""
    rows = np.array([fed.row for fed in feds], np.int32)
    known = np.array([fed.known for fed in feds], np.int32)
    entries = known + np.array([fed.order.index(n) for fed, n in zip(feds, nodes, strict=True)], np.int32)
    return _batch(
        table,
        np.asarray(tokens, np.int64),
        known + np.asarray(depths, np.int32) - 1,
        entries,
        rows,
        known,
        np.array([fed.masks[n] for fed, n in zip(feds, nodes, strict=True)], np.int64),
        np.arange(len(rows)),
    )


def feed_nodes(
    table: SlotTable,
    extend: Callable[[int], None],
    feds: Seq[Fed],
    growths: Seq[Growth],
    places: Seq[Place],
) -> Batch:
    """Give each place a slot, through `extend`, note it as fed, and make the batch that feeds them all."""
    for i, node in places:
        extend(feds[i].row)
        feds[i].add(node, growths[i].parents[node])
    return node_batch(
        table,
        [feds[i] for i, _ in places],
        [growths[i].tokens[node] for i, node in places],
        [node for _, node in places],
        [growths[i].depths[node] for i, node in places],
    )


def _batch(
    table: SlotTable,
    ids: np.ndarray,
    positions: np.ndarray,
    entries: np.ndarray,
    rows: np.ndarray,
    prefix: np.ndarray,
    ancestors: np.ndarray,
    logit_rows: np.ndarray,
) -> Batch:
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(table.entries[rows, entries]),
        table_rows=torch.from_numpy(rows),
        prefix=torch.from_numpy(np.ascontiguousarray(prefix)),
        ancestors=torch.from_numpy(ancestors),
        table=table.tensor,
        logit_rows=torch.from_numpy(np.ascontiguousarray(logit_rows, dtype=np.int64)),
    )
