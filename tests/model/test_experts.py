"""Which experts a row chooses: ties, groups, corrections; and that nothing of a row depends on another."""

from __future__ import annotations

import pytest
import torch

from outrider.load.config import Experts
from outrider.model.kernels.reference_experts import route


def chosen(
    logits: list[float], e: Experts, correction: list[float] | None = None
) -> tuple[list[int], list[float]]:
    extra = None if correction is None else torch.tensor(correction)
    ids, weights = route(torch.tensor([logits]), e, extra)
    return ids[0].tolist(), [round(w, 6) for w in weights[0].tolist()]


def test_of_equal_experts_the_first_are_chosen_in_ascending_order() -> None:
    assert chosen([0.0] * 40, Experts(40, 3, 16)) == ([0, 1, 2], [0.333333] * 3)
    assert chosen([1.0, 2.0, 1.0, 2.0], Experts(4, 3, 16, normalise=False))[0] == [0, 1, 3]
    assert chosen([0.0, -0.0, 0.0], Experts(3, 1, 16))[0] == [0]


def test_large_logits_do_not_saturate_the_choice() -> None:
    """Both scores round to 1: the larger logit is chosen all the same."""
    assert chosen([40.0, 50.0, 45.0], Experts(3, 1, 16, score="sigmoid", normalise=False)) == ([1], [1.0])


def test_a_correction_counts_for_the_choice_and_not_for_the_weight() -> None:
    e = Experts(3, 1, 16, score="sigmoid", correction=True, normalise=False, scale=2.0)
    assert chosen([0.0, 0.0, 0.0], e, [0.0, 0.0, 0.5]) == ([2], [1.0])


def test_groups_are_ranked_by_their_two_best() -> None:
    e = Experts(6, 2, 16, score="sigmoid", groups=3, groups_kept=1, normalise=False)
    assert chosen([9.0, -9.0, 1.0, 1.0, 0.0, 0.0], e)[0] == [2, 3]
    assert chosen([0.0] * 6, Experts(6, 2, 16, score="sigmoid", groups=3, groups_kept=2))[0] == [0, 1]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_row_chooses_alone_as_among_others(score: str) -> None:
    e = Experts(64, 6, 16, score=score, groups=8, groups_kept=3, correction=True, scale=1.7, floor=1e-20)
    generator = torch.Generator().manual_seed(1)
    logits, correction = torch.randn(33, 64, generator=generator), torch.randn(64, generator=generator)
    ids, weights = route(logits, e, correction)
    for row in range(33):
        one = route(logits[row : row + 1], e, correction)
        assert torch.equal(one[0][0], ids[row]) and torch.equal(one[1][0], weights[row])
    assert (ids[:, 1:] > ids[:, :-1]).all()
