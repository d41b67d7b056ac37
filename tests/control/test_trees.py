"""Draft trees of captured steps: their nodes, and what they promise to those who lay them out as rows."""

from __future__ import annotations

import pytest

from outrider.control.trees import CHAINS, RATES, TREES, choice_rate, node_ranks, tree_nodes
from outrider.device.ops import TreeLayout

SHAPES = (*CHAINS, *TREES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_is_as_deep_and_wide_as_it_says(shape) -> None:
    tree, (depth, nodes) = tree_nodes(shape), shape
    assert len(tree) == nodes and max(tree.depths) == depth
    assert tree.depths == sorted(tree.depths)  # level by level
    assert list(tree.parents) == sorted(tree.parents) or depth == nodes  # siblings are neighbours


@pytest.mark.parametrize("shape", TREES)
def test_a_tree_has_the_likeliest_nodes(shape) -> None:
    """No node that is left out is likelier to be reached than one that is there."""
    tree, ranks = tree_nodes(shape), node_ranks(shape)

    def reached(node: int) -> float:
        return 1.0 if node < 0 else reached(tree.parents[node]) * RATES[ranks[node]]

    there = [reached(node) for node in range(len(tree))]
    depths = [*tree.depths, 0]
    left_out = [
        reached(node) * RATES[tree.parents.count(node)]
        for node in range(-1, len(tree))
        if depths[node] < shape[0] and tree.parents.count(node) < len(RATES)
    ]
    assert max(left_out) <= min(there)


def test_choices_share_what_the_first_leaves() -> None:
    for first in (0.2, 0.73, 1.0):
        shares = [choice_rate(rank, first) for rank in range(40)]
        assert sum(shares) == pytest.approx(1.0) and shares[1:] == sorted(shares[1:], reverse=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_as_rows_of_passes(shape) -> None:
    nodes = tree_nodes(shape)
    tree = TreeLayout(nodes)
    assert tree.branches == (shape in TREES)
    assert tree.layout.depths == (0, *nodes.depths) and tree.layout.nodes == (-1, *range(len(nodes)))
    assert tree.layout.masks == ((0, *nodes.ancestors) if tree.branches else ())
    # What is fed has children; every node is a choice of its parent's, of its rank, once.
    choices = [
        (node, row - 1, rank)
        for layout, columns in tree.levels
        for row, chosen in zip(layout.entries, columns, strict=True)
        for rank, node in enumerate(chosen)
        if node >= 0
    ]
    assert sorted(choices) == list(zip(range(len(nodes)), nodes.parents, node_ranks(shape), strict=True))
    for depth, (layout, _) in enumerate(tree.levels):
        assert set(layout.depths) == {depth} and layout.nodes == tuple(row - 1 for row in layout.entries)
