"""Forms of guesses: what they promise to those who make passes of them."""

from __future__ import annotations

import pytest

from outrider.control.forms import CHAINS, RANKS, TREES, chance, ranks_of, shape_of
from outrider.draft.chains import Branches

FORMS = (*CHAINS, *TREES)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_as_deep_and_wide_as_it_says(form) -> None:
    shape, (depth, nodes) = shape_of(form), form
    assert len(shape) == nodes and max(shape.depths) == depth
    assert shape.depths == sorted(shape.depths)  # level by level
    assert list(shape.parents) == sorted(shape.parents) or depth == nodes  # siblings are neighbours


@pytest.mark.parametrize("form", TREES)
def test_a_tree_has_the_likeliest_nodes(form) -> None:
    """No node that is left out is likelier to be reached than one that is there."""
    shape, ranks = shape_of(form), ranks_of(form)

    def reached(node: int) -> float:
        return 1.0 if node < 0 else reached(shape.parents[node]) * RANKS[ranks[node]]

    there = [reached(node) for node in range(len(shape))]
    depths = [*shape.depths, 0]
    left_out = [
        reached(node) * RANKS[shape.parents.count(node)]
        for node in range(-1, len(shape))
        if depths[node] < form[0] and shape.parents.count(node) < len(RANKS)
    ]
    assert max(left_out) <= min(there)


def test_choices_share_what_the_first_leaves() -> None:
    for first in (0.2, 0.73, 1.0):
        shares = [chance(rank, first) for rank in range(40)]
        assert sum(shares) == pytest.approx(1.0) and shares[1:] == sorted(shares[1:], reverse=True)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_as_rows_of_passes(form) -> None:
    shape = shape_of(form)
    tree = Branches(shape)
    assert tree.branches == (form in TREES)
    assert tree.layout.depths == (0, *shape.depths) and tree.layout.picks == (-1, *range(len(shape)))
    assert tree.layout.masks == ((0, *shape.ancestors) if tree.branches else ())
    # What is fed has children; every node is a choice of its parent's, of its rank, once.
    chosen = [
        (node, row - 1, rank)
        for layout, columns in tree.levels
        for row, nodes in zip(layout.entries, columns, strict=True)
        for rank, node in enumerate(nodes)
        if node >= 0
    ]
    assert sorted(chosen) == list(zip(range(len(shape)), shape.parents, ranks_of(form), strict=True))
    for depth, (layout, _) in enumerate(tree.levels):
        assert set(layout.depths) == {depth} and layout.picks == tuple(row - 1 for row in layout.entries)
