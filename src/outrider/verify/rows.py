"""Where each row of logits belongs: which sequence, which node of its draft, at which position.

A sequence's rows are its root (the last known token) and then its draft's nodes in order. Everything is a
flat numpy array over the rows of all sequences, so that what follows has no loop over positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.types import Draft, Sequence

Ints = NDArray[np.int64]


@dataclass(slots=True)
class LogitRows:
    """Any rows of any sequences, in any order."""

    sequences: Seq[Sequence]
    drafts: Seq[Draft]
    owner: Ints  # [R] index of the sequence
    node: Ints  # [R] index in its draft; -1 at the root
    depth: Ints  # [R] 0 at the root

    @property
    def position(self) -> Ints:
        """[R] absolute position of the token a row predicts."""
        known = np.array([len(s.tokens) for s in self.sequences], np.int64)
        return known[self.owner] + self.depth

    def spread(self, values: Seq[float] | Seq[int], dtype: type) -> NDArray:
        """One value a sequence -> one value a row."""
        return np.array(values, dtype)[self.owner]

    def path(self, row: int) -> list[int]:
        """The guessed tokens that lead to a row's node."""
        draft = self.drafts[self.owner[row]]
        return [draft.tokens[i] for i in draft.path(int(self.node[row]))]


@dataclass(slots=True)
class TreeRows(LogitRows):
    """All rows of all sequences in order, with what a walk needs."""

    starts: Ints  # [S] the root row of each sequence
    token: Ints  # [R] the token at this row's node; -1 at a root
    parent: Ints  # [R] the row of the parent; a root is its own


def lay_out(sequences: Seq[Sequence], drafts: Seq[Draft]) -> TreeRows:
    sizes = np.array([1 + len(d) for d in drafts], np.int64)
    starts = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    owner = np.repeat(np.arange(len(drafts)), sizes)
    node = np.arange(total) - starts[owner] - 1
    token = np.full(total, -1, np.int64)
    parent, depth = np.arange(total), np.zeros(total, np.int64)
    for start, draft in zip(starts, drafts, strict=True):
        if draft.tokens:
            rows = slice(start + 1, start + 1 + len(draft))
            token[rows] = draft.tokens
            parent[rows] = np.array(draft.parents) + start + 1
            depth[rows] = draft.depths
    return TreeRows(sequences, drafts, owner, node, depth, starts, token, parent)
