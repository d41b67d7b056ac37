"""Forms of guesses that rounds on a device are made for: chains, and a few trees fixed beforehand.

A form is a depth and a number of nodes; as many nodes as levels are a chain. A tree's nodes are those likeliest to be
reached if guesses hold as they mostly do: the first choice of a draft often, its second sometimes.
"""

from __future__ import annotations

from functools import cache
from heapq import heappop, heappush

from outrider.types import Draft

Form = tuple[int, int]  # depth, nodes

NO_FORM: Form = (0, 0)
# 16 rows, the last known token's among them, cost a pass hardly more than one.
CHAINS: tuple[Form, ...] = ((1, 1), (2, 2), (4, 4), (8, 8), (15, 15))
TREES: tuple[Form, ...] = ((2, 6), (3, 15), (4, 15))
# Where a draft's first choice is not the target's, how often its second is; and each further one, where none before is.
SECOND, LATER = 0.55, 0.4


def chance(rank: int, first: float) -> float:
    """That a draft's choice of this rank is the target's, if its first is with chance `first`."""
    if rank == 0:
        return first
    missed = 1 - first
    return missed * SECOND if rank == 1 else missed * (1 - SECOND) * LATER * (1 - LATER) ** (rank - 2)


RANKS = tuple(chance(rank, 0.73) for rank in range(6))


@cache
def shape_of(form: Form) -> Draft:
    """The form's nodes, level by level; children of one node are neighbours, the likelier first. Tokens are blank."""
    depth, nodes = form
    if nodes == depth:
        return Draft.chain([0] * nodes)
    paths = sorted(_likeliest(depth, nodes), key=lambda path: (len(path), path))
    number = {path: i for i, path in enumerate(paths)}
    return Draft((0,) * nodes, tuple(number.get(path[:-1], -1) for path in paths))


def _likeliest(depth: int, nodes: int) -> list[tuple[int, ...]]:
    """Nodes as the ranks on their paths: (0, 1) is the second choice after the first choice."""
    open_: list[tuple[float, tuple[int, ...]]] = []
    taken: list[tuple[int, ...]] = []

    def offer(chance: float, path: tuple[int, ...]) -> None:
        if len(path) < depth:
            for rank, share in enumerate(RANKS):
                heappush(open_, (-chance * share, (*path, rank)))

    offer(1.0, ())
    while len(taken) < nodes and open_:
        chance, path = heappop(open_)
        taken.append(path)
        offer(-chance, path)
    return taken


@cache
def ranks_of(form: Form) -> tuple[int, ...]:
    """Which choice each node is of its parent's: 0 is the first."""
    shape = shape_of(form)
    return tuple(map(shape.rank, range(len(shape))))
