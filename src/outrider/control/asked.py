"""Drafts that requests fix themselves: their plan, and the tree of the persistent batch that holds them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import prod

from outrider.types import MAX_NODES, NO_TREE, DraftPlan, Options, TreeShape, Work

ASKED_DEPTH = 4  # of a draft for which a request fixed the number of nodes alone


def asked_plan(name: str, item: Work, depth: int | None, nodes: int | None) -> DraftPlan:
    """As the request fixed it, or for all requests by `depth` and `nodes`."""
    asked = item.sequence.request.params.speculation
    if asked.tree is not None:
        nodes = sum(prod(asked.tree[: k + 1]) for k in range(len(asked.tree)))
        return DraftPlan(name, nodes, len(asked.tree), asked.tree, asked.mode)
    depth, nodes = asked.depth or depth, asked.nodes or nodes or 0
    depth = min(depth or ASKED_DEPTH, nodes or MAX_NODES)
    free = asked.mode != "rejection"  # the ratio test must not choose nodes by looking at them
    return DraftPlan(name, (nodes or depth) if free else depth, depth, None, asked.mode)


def asked_tree(plans: Seq[DraftPlan], lead: str, options: Options) -> TreeShape:
    """The smallest tree of the persistent batch that holds these drafts, or the largest there is."""
    shapes = [TreeShape(plan.depth, plan.nodes) for plan in plans if plan.drafter == lead]
    widest = max(shapes, key=lambda shape: shape.nodes, default=NO_TREE)
    if not widest.is_chain and widest in options.trees.get(lead, ()):
        return widest
    serving = {lead, *options.model_free}
    depth = max((plan.depth for plan in plans if plan.drafter in serving), default=0)
    chains = options.chains.get(lead, ())
    return next((one for one in chains if one.depth >= depth), chains[-1] if chains else NO_TREE)
