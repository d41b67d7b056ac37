"""The losses against distributions small enough to write down, and their gradients against torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.distill import losses
from outrider.distill.losses import LOSSES, Targets, divergence, losses_and_gradients

P = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]])
Q = torch.tensor([[0.25, 0.25, 0.5], [0.9, 0.1, 1e-30]])


def by_definition(kind: str, logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    q = logits.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    kl = (torch.xlogy(p, p) - p * q.log()).sum(-1)
    mixed = torch.exp(-3 * overlap).detach()
    return {"kl": kl, "overlap": -overlap.log(), "hybrid": mixed * kl + (1 - mixed) * (1 - overlap)}[kind]


def test_values_that_can_be_counted() -> None:
    made = {kind: divergence(kind, Q.log(), Targets.of(P), torch.ones(2)) for kind in LOSSES}
    kl = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    overlap, share = 0.25 + 0.25 + 0.2, math.exp(-3 * 0.7)
    assert made["kl"].overlap.tolist() == pytest.approx([overlap, 1.0])
    assert made["kl"].loss.tolist() == pytest.approx([kl, 0.0], abs=1e-6)
    assert made["overlap"].loss.tolist() == pytest.approx([-math.log(overlap), 0.0], abs=1e-6)
    assert made["hybrid"].loss.tolist() == pytest.approx([share * kl + (1 - share) * 0.3, 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("known", [1.0, 0.6])
def test_gradients_are_those_of_the_definition(kind: str, known: float) -> None:
    """Also where the draft's words have only a part of the target's mass, and where both hardly overlap."""
    logits = torch.randn(40, 12) * torch.tensor([0.5, 3.0, 8.0, 1.0])[:, None].repeat(10, 1)
    p, weights = known * (2 * torch.randn(40, 12)).softmax(-1), torch.rand(40)
    logits.requires_grad_()
    whole = by_definition(kind, logits, p)
    (whole * weights).sum().backward()
    made = divergence(kind, logits.detach(), Targets.of(p), weights)
    torch.testing.assert_close(made.loss, whole.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.gradient, logits.grad, rtol=1e-3, atol=1e-5)


def test_what_the_draft_has_no_word_for_counts_as_not_overlapped() -> None:
    p = torch.tensor([[0.5, 0.1]])  # the rest is elsewhere
    made = divergence("overlap", torch.tensor([[0.5, 0.5]]).log(), Targets.of(p), torch.ones(1))
    assert made.overlap.item() == pytest.approx(0.6)
    assert made.loss.item() == pytest.approx(-math.log(0.6))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("frozen", "temperature"), [(True, 1.0), (False, 1.0), (True, 0.7), (False, 0.7)])
def test_chunks_give_the_gradients_of_the_whole(
    monkeypatch, kind: str, frozen: bool, temperature: float
) -> None:
    states = [torch.randn(23, 8, requires_grad=True) for _ in range(3)]
    head = torch.randn(12, 8, requires_grad=not frozen)
    weights = torch.rand(3, 23)
    weights[2, :4] = 0
    p = torch.randn(23, 12).softmax(-1)
    sum(
        (by_definition(kind, state @ head.T / temperature, p) * w).sum()
        for state, w in zip(states, weights, strict=True)
    ).backward()
    monkeypatch.setitem(losses.CHUNK_NUMBERS, "cpu", 12 * 5)
    asked: list[slice] = []

    def targets(rows: slice) -> torch.Tensor:
        asked.append(rows)
        return p[rows]

    found, gradients, of_head = losses_and_gradients(
        kind, states, weights, head, targets, torch.float32, temperature=temperature
    )
    assert len(asked) == 5  # once for all steps, five rows at a time
    for state, gradient in zip(states, gradients, strict=True):
        torch.testing.assert_close(gradient, state.grad, rtol=1e-3, atol=1e-5)
    assert (of_head is None) == frozen
    if of_head is not None:
        torch.testing.assert_close(of_head, head.grad, rtol=1e-3, atol=1e-5)
    assert found.rows.tolist() == [23, 23, 19]
    mean = by_definition(kind, (states[2] @ head.T / temperature)[4:], p[4:]).mean().item()
    assert found.means()[0][2] == pytest.approx(mean, rel=1e-4)
