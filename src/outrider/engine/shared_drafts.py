"""Which drafters serve the resident rows of a step, and with which draft tree: a captured step has one shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.control.trees import CHAINS, NO_TREE, TREES
from outrider.device.buckets import MAX_BESIDE, MAX_ROWS, MOST_CAPTURED, TREE_SIZE
from outrider.draft.drafters import Drafters
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Sequence, TreeShape

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
            chains = chains[-1:] if drafter.model_free else chains[1:] or chains
        return tuple(tree for tree in (*chains, *trees) if size * (tree[1] + 1) <= MAX_ROWS)

    def fitted(self, draft_plans: Seq[DraftPlan], beside: bool = False) -> list[DraftPlan]:
        """Draft plans with one drafter, the one most asked for, and draft trees that steps are captured with, `beside`
        prompt rows if there are some. A drafter that takes no pass may ride along, if the tree is a chain; it does
        where its own would not be longer.
        """
        asked = Counter(
            draft_plan.drafter
            for draft_plan in draft_plans
            if draft_plan.nodes and self.drafters.resident(draft_plan.drafter)
        )
        ((chosen, _),) = asked.most_common(1) or [("none", 0)]
        if chosen in self.drafters.model_free:
            longest = max(draft_plan.depth for draft_plan in draft_plans if draft_plan.drafter == chosen)
            chains = {
                draft_plan.drafter
                for draft_plan in draft_plans
                if draft_plan.depth == draft_plan.nodes >= longest and asked[draft_plan.drafter]
            }
            chosen = min(chains.difference(self.drafters.model_free), default=chosen)
        drafter, trees = self.drafters.resident(chosen), self.trees(chosen, 1, beside)
        longest = MAX_BESIDE if beside else MAX_RESIDENT_DEPTH
        fitted = [NO_DRAFT_PLAN] * len(draft_plans)
        for i, draft_plan in enumerate(draft_plans):
            if draft_plan.nodes and draft_plan.drafter == chosen and drafter is not None:
                depth = min(draft_plan.depth, longest, drafter.max_depth)
                kept = (draft_plan.depth, draft_plan.nodes) in trees
                fitted[i] = draft_plan if kept else replace(draft_plan, nodes=depth, depth=depth)
        depth, nodes = max(
            ((draft_plan.depth, draft_plan.nodes) for draft_plan in fitted),
            key=lambda tree: tree[1],
            default=NO_TREE,
        )
        for i, draft_plan in enumerate(draft_plans):
            other = (
                self.drafters.resident(draft_plan.drafter)
                if draft_plan.nodes and draft_plan.drafter != chosen
                else None
            )
            if other is not None and other.model_free and depth == nodes:
                along = min(draft_plan.depth, depth)
                fitted[i] = replace(draft_plan, nodes=along, depth=along)
        return fitted

    def serving(self, draft_plans: Iterable[DraftPlan]) -> list[str]:
        """Drafters of these: the one whose draft tree they share, then those that ride along."""
        names = {draft_plan.drafter for draft_plan in draft_plans if draft_plan.nodes}
        return sorted(names, key=lambda name: (name in self.drafters.model_free, name)) or ["none"]

    def captured_tree(self, name: str, tree: TreeShape, beside: bool = False) -> TreeShape:
        """Where steps are captured, a chain that there is a step for: who wants less of it has its wish."""
        drafter = self.drafters.resident(name)
        if not self.captures or tree[0] != tree[1] or drafter is None:
            return tree
        chains = self.trees(name, 1, beside) if beside else CHAINS
        return next((chain for chain in chains if tree <= chain <= (drafter.max_depth,) * 2), tree)

    def with_model_free(self, serving: list[str], tree: TreeShape) -> list[str]:
        """With every drafter that may ride along, where steps are captured."""
        if not self.captures or tree == NO_TREE or tree[0] != tree[1]:
            return serving
        return [*serving, *(name for name in self.drafters.model_free if name not in serving)]


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
