"""Which draft trees the persistent batch may have, by lead drafter: a captured step has one shape."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.control.trees import CHAINS, TREES
from outrider.device.buckets import MAX_BESIDE, MAX_ROWS, TREE_SIZE, staged_bucket, staged_room
from outrider.device.capture import StepShape
from outrider.draft.drafters import Drafters
from outrider.types import NO_TREE, Draft, TreeShape, Work

MAX_RESIDENT_DEPTH = CHAINS[-1].depth  # a request that asks for more is host-packed


class GraphShapes:
    def __init__(self, drafters: Drafters, captures: bool, tree_size: int = TREE_SIZE) -> None:
        self.drafters, self.captures, self.tree_size = drafters, captures, tree_size

    def trees(self, name: str, size: int, prompts: bool = False) -> tuple[TreeShape, ...]:
        """Trees that steps of this size are captured with, without or with prompt rows."""
        drafter = self.drafters.resident(name)
        if drafter is None:
            return ()
        wide = TREES if drafter.trees and size <= self.tree_size and not prompts else ()
        deepest = drafter.usual_depth or drafter.max_depth
        chains = [tree for tree in CHAINS if tree.depth <= (min(deepest, MAX_BESIDE) if prompts else deepest)]
        # One level more costs little beside prompt rows, and nothing for a model-free drafter.
        if prompts and self.captures:
            chains = chains[-1:] if drafter.model_free else chains[1:] or chains
        return tuple(tree for tree in (*chains, *wide) if size * (tree.nodes + 1) <= MAX_ROWS)

    def chains(self, name: str, prompts: bool = False) -> tuple[TreeShape, ...]:
        """Chains that a request may ask for."""
        drafter = self.drafters.resident(name)
        if drafter is None:
            return ()
        if prompts and self.captures:
            return self.trees(name, 1, prompts)
        longest = min(drafter.max_depth, MAX_BESIDE) if prompts else drafter.max_depth
        fixed = [tree for tree in CHAINS if tree.depth <= longest]
        return tuple(fixed) if self.captures else tuple(TreeShape(n, n) for n in range(1, longest + 1))

    def proposing(self, lead: str, tree: TreeShape) -> tuple[str, ...]:
        """The drafters of a captured step: in a chain, model-free drafters propose beside the lead."""
        if lead == "none":
            return ()
        others = self.drafters.model_free if tree.is_chain else ()
        return (lead, *(name for name in others if name != lead))


def packed_bucket(work: Seq[Work], drafts: Seq[Draft]) -> tuple[int, int, int]:
    """Room for host-packed rows, for their logits, and for those of them with draft nodes."""
    pairs = list(zip(work, drafts, strict=True))
    rows = [(one.known + len(draft), len(draft)) for one, draft in pairs]
    logits = sum(one.scored + (1 + len(draft)) * one.emits for one, draft in pairs)
    chunks, drafted = ([count for count, nodes in rows if bool(nodes) is kind] for kind in (False, True))
    return staged_bucket(chunks, drafted, logits)


def usual_shape(shape: StepShape, beside: int) -> StepShape | None:
    """The smallest prepared shape that has room for this one; None: there is none. Steps with staged rows have room for
    `beside` resident sequences. The context stays.
    """
    if not shape.staged:
        return shape
    room = staged_room(beside, shape.tree != NO_TREE, shape.staged, shape.wanted)
    if room is None or shape.branching:
        return None
    return replace(shape, size=beside, staged=room[0], wanted=room[1], filtered=True)
