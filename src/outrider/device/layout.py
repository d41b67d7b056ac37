"""Which rows every sequence has in a pass: its last known tokens, the nodes of its draft tree, or one level of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from outrider.types import Draft

# Where sampled tokens go: by row whose logits are wanted, the draft node of its first choice, of its second...
Columns = tuple[tuple[int, ...], ...]
NOWHERE = -1  # a choice that is no draft node


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows relative to the last known token, whose entry is the sequence's cached length."""

    entries: tuple[int, ...]  # of the table, whose slot each has
    depths: tuple[int, ...]  # positions
    nodes: tuple[int, ...]  # which draft node each is; -1: a known token
    masks: tuple[int, ...] = ()  # draft nodes each sees, where they branch
    last: bool = False  # only the last row's logits are wanted
    # Entries that positions lie behind, where a drafter's first is of a later token. What would lie before repeats it.
    behind: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def put_behind(self, behind: int) -> Layout:
        return replace(self, depths=tuple(depth - behind for depth in self.depths), behind=behind)

    def logit_rows(self, sequences: int) -> range:
        """Rows of a batch of so many sequences whose logits are wanted."""
        total = sequences * len(self)
        return range(len(self) - 1, total, len(self)) if self.last else range(total)


Level = tuple[Layout, Columns]  # a pass of a drafter: its rows, and which draft nodes their logits give


class TreeLayout:
    """A draft tree's nodes as rows of passes. Row 0 is the last known token, row i + 1 is node i; a node's entry in
    the table comes as far behind the root's.
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

    def __len__(self) -> int:
        return len(self.shape)

    def _rows(self, rows: range | list[int]) -> Layout:
        return Layout(
            entries=tuple(rows),
            depths=tuple(self.depths[row] for row in rows),
            nodes=tuple(row - 1 for row in rows),
            masks=tuple(self.masks[row] for row in rows) if self.masks else (),
        )

    def _level(self, depth: int) -> Level:
        """Rows of this depth that have children, and which nodes those are."""
        parents = self.shape.parents
        rows = [row for row, d in enumerate(self.depths) if d == depth and row - 1 in parents]
        children = [[node for node, parent in enumerate(parents) if parent == row - 1] for row in rows]
        most = max(map(len, children))
        return self._rows(rows), tuple((*own, *[NOWHERE] * (most - len(own))) for own in children)

    def parent_rows(self, depth: int) -> tuple[int, ...]:
        """By row of the pass of this depth: the one of the pass before that is its parent."""
        (above, _), (here, _) = self.levels[depth - 1], self.levels[depth]
        return tuple(above.nodes.index(self.shape.parents[node]) for node in here.nodes)


def chain_levels(n: int) -> Iterator[Level]:
    """The passes of a chain: of the last known token, then of every node but the last."""
    for ahead in range(n):
        yield Layout((ahead,), (ahead,), (ahead - 1,)), ((ahead,),)


def known_rows(window: int, behind: int = 0) -> Layout:
    """The last known tokens, of which only the very last's logits are wanted; as many, however short a text is."""
    back = tuple(range(1 - window, 1))
    return Layout(back, back, (NOWHERE,) * window, last=True).put_behind(behind)
