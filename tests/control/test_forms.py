"""Forms of guesses: what they promise to those who read them as tensors."""

from __future__ import annotations

import pytest
import torch

from outrider.control.forms import CHAINS, RANKS, TREES, ranks_of, shape_of
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

    def chance(node: int) -> float:
        return 1.0 if node < 0 else chance(shape.parents[node]) * RANKS[ranks[node]]

    there = [chance(node) for node in range(len(shape))]
    depths = [*shape.depths, 0]
    left_out = [
        chance(node) * RANKS[shape.parents.count(node)]
        for node in range(-1, len(shape))
        if depths[node] < form[0] and shape.parents.count(node) < len(RANKS)
    ]
    assert max(left_out) <= min(there)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_as_tensors(form) -> None:
    shape = shape_of(form)
    tree = Branches(shape, torch.device("cpu"))
    assert tree.branches == (form in TREES)
    assert tree.masks.tolist() == [0, *shape.ancestors]
    for node in range(len(shape)):
        assert tree.paths[node].nonzero().flatten().tolist() == shape.path(node)
        assert tree.levels[:, node].nonzero().flatten().tolist() == [shape.depths[node] - 1]
    # What is fed has children, and the children come in the order of the nodes.
    children = [
        (row, place % most)
        for rows, most, places in tree.fed
        for row, place in zip(
            rows[torch.div(places, most, rounding_mode="floor")].tolist(), places.tolist(), strict=True
        )
    ]
    expected = zip([parent + 1 for parent in shape.parents], ranks_of(form), strict=True)
    assert children == list(expected)
