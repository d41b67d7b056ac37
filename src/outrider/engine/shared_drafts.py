"""Which drafters serve the resident rows of a step, and with which draft tree: a captured step has one shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.control.trees import CHAINS, NO_TREE, TREES
from outrider.device.buckets import MAX_BESIDE, MAX_ROWS, MOST_CAPTURED, TREE_SIZE
from outrider.draft.drafters import Drafters
from outrider.types import NO_BET, Bet, Sequence, TreeShape

MAX_RESIDENT_DEPTH = CHAINS[-1][0]  # of resident drafts; longer chains are staged


class SharedDrafts:
    def __init__(self, drafters: Drafters, captures: bool, tree_size: int = TREE_SIZE) -> None:
        self.drafters, self.captures, self.tree_size = drafters, captures, tree_size

    def trees(self, name: str, size: int, beside: bool = False) -> tuple[TreeShape, ...]:
        """Draft trees that a drafter's resident rows may have in steps of this size, or `beside` prompt rows."""
        drafter = self.drafters.resident(name)
        if drafter is None:
            return ()
        trees = TREES if drafter.trees and size <= self.tree_size and not beside else ()
        deepest = drafter.usual_depth or drafter.max_depth
        if beside:
            deepest = min(deepest, MAX_BESIDE)
        chains = [tree for tree in CHAINS if tree[0] <= deepest]
        if beside and self.captures:  # one level more is little there, and nothing for who takes no pass
            chains = chains[-1:] if drafter.rides_along else chains[1:] or chains
        return tuple(tree for tree in (*chains, *trees) if size * (tree[1] + 1) <= MAX_ROWS)

    def fitted(self, bets: Seq[Bet], beside: bool = False) -> list[Bet]:
        """The bets with one drafter, the one most asked for, and draft trees that steps are captured with, `beside`
        prompt rows if there are some. A drafter that takes no pass may ride along, if the tree is a chain; it does
        where its own would not be longer.
        """
        asked = Counter(bet.drafter for bet in bets if bet.nodes and self.drafters.resident(bet.drafter))
        ((chosen, _),) = asked.most_common(1) or [("none", 0)]
        if chosen in self.drafters.riding:
            longest = max(bet.depth for bet in bets if bet.drafter == chosen)
            chains = {bet.drafter for bet in bets if bet.depth == bet.nodes >= longest and asked[bet.drafter]}
            chosen = min(chains.difference(self.drafters.riding), default=chosen)
        drafter, trees = self.drafters.resident(chosen), self.trees(chosen, 1, beside)
        longest = MAX_BESIDE if beside else MAX_RESIDENT_DEPTH
        fitted = [NO_BET] * len(bets)
        for i, bet in enumerate(bets):
            if bet.nodes and bet.drafter == chosen and drafter is not None:
                depth = min(bet.depth, longest, drafter.max_depth)
                kept = (bet.depth, bet.nodes) in trees
                fitted[i] = bet if kept else replace(bet, nodes=depth, depth=depth)
        depth, nodes = max(
            ((bet.depth, bet.nodes) for bet in fitted), key=lambda tree: tree[1], default=NO_TREE
        )
        for i, bet in enumerate(bets):
            other = self.drafters.resident(bet.drafter) if bet.nodes and bet.drafter != chosen else None
            if other is not None and other.rides_along and depth == nodes:
                along = min(bet.depth, depth)
                fitted[i] = replace(bet, nodes=along, depth=along)
        return fitted

    def serving(self, bets: Iterable[Bet]) -> list[str]:
        """Drafters of these: the one whose draft tree they share, then those that ride along."""
        names = {bet.drafter for bet in bets if bet.nodes}
        return sorted(names, key=lambda name: (name in self.drafters.riding, name)) or ["none"]

    def captured_tree(self, name: str, tree: TreeShape, beside: bool = False) -> TreeShape:
        """Where steps are captured, a chain that there is a step for: who wants less of it has its wish."""
        drafter = self.drafters.resident(name)
        if not self.captures or tree[0] != tree[1] or drafter is None:
            return tree
        chains = self.trees(name, 1, beside) if beside else CHAINS
        return next((chain for chain in chains if tree <= chain <= (drafter.max_depth,) * 2), tree)

    def with_riding(self, serving: list[str], tree: TreeShape) -> list[str]:
        """With every drafter that may ride along, where steps are captured."""
        if not self.captures or tree == NO_TREE or tree[0] != tree[1]:
            return serving
        return [*serving, *(name for name in self.drafters.riding if name not in serving)]


def first_to_read(behind: Mapping[Sequence, int], beside: int) -> tuple[dict[Sequence, int], list[Sequence]]:
    """Of sequences that a drafter is so many tokens behind with: those it reads in this step, and those that wait. What
    it reads are prompt rows, too, `beside` others, and everybody waits for them; one sequence is read whatever it has.
    """
    taken, late, room = dict[Sequence, int](), list[Sequence](), MOST_CAPTURED - beside
    for sequence, tokens in behind.items():
        if taken and tokens > room:
            late.append(sequence)
        else:
            taken[sequence] = tokens
            room -= tokens
    return taken, late
