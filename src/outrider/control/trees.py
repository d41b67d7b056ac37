"""Draft trees that steps are captured for: chains, and a few trees fixed beforehand.

As many nodes as levels are a chain. A wider tree has the nodes most likely to be accepted.
"""

from __future__ import annotations

from functools import cache
from heapq import heappop, heappush

from outrider.control.guards import SECOND, TYPICAL
from outrider.types import Draft, TreeShape

# 16 rows, the last known token's among them, cost a pass hardly more than one.
CHAINS = tuple(TreeShape(depth, depth) for depth in (1, 2, 4, 8, 15))
TREES = TreeShape(2, 6), TreeShape(3, 15), TreeShape(4, 15)


def choice_rate(rank: int, first: float) -> float:
    """Acceptance rate of a drafter's choice of this rank, if that of its first choice is `first`."""
    return first if rank == 0 else (1 - first) * SECOND * (1 - SECOND) ** (rank - 1)


RATES = tuple(choice_rate(rank, TYPICAL) for rank in range(6))


@cache
def tree_nodes(shape: TreeShape) -> Draft:
    """The tree's nodes, level by level; siblings are neighbours, the likelier first. Tokens are blank."""
    depth, nodes = shape
    if nodes == depth:
        return Draft.chain([0] * nodes)
    paths = sorted(_likeliest(depth, nodes), key=lambda path: (len(path), path))
    number = {path: i for i, path in enumerate(paths)}
    return Draft((0,) * nodes, tuple(number.get(path[:-1], -1) for path in paths))


@cache
def node_ranks(shape: TreeShape) -> tuple[int, ...]:
    """Which of its parent's choices each node is: 0 is the first."""
    tree = tree_nodes(shape)
    return tuple(map(tree.rank, range(len(tree))))


def _likeliest(depth: int, nodes: int) -> list[tuple[int, ...]]:
    """Nodes as the ranks on their paths: (0, 1) is the second choice after the first choice."""
    frontier: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    taken: list[tuple[int, ...]] = []
    while len(taken) <= nodes:
        survival, path = heappop(frontier)
        taken.append(path)
        if len(path) < depth:
            for rank, rate in enumerate(RATES):
                heappush(frontier, (survival * rate, (*path, rank)))
    return taken[1:]  # without the root
