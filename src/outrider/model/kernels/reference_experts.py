"""Which experts a row chooses, and with which weights, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.load.config import Experts, LayerSpec
from outrider.model.weights import ExpertTensors


def route(logits: Tensor, e: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Chosen experts of each row in ascending order, and their weights: both [R, per_token].

    Logits are float32 [R, experts]. Of equal experts and of equal groups the one with the lower number is chosen.
    """
    chosen, weights = (
        zip(*(_route_row(row, e, correction) for row in logits), strict=True) if len(logits) else ((), ())
    )
    if not chosen:
        return torch.empty(0, e.per_token, dtype=torch.int64), torch.empty(0, e.per_token)
    return torch.stack(chosen), torch.stack(weights)


def _route_row(logits: Tensor, e: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if e.score == "softmax" else logits.sigmoid()
    key = logits if e.plain_choice else scores
    if correction is not None:
        key = key + correction
    if e.groups > 1:
        by_group = key.view(e.groups, -1)
        kept = best(by_group.topk(2).values.sum(-1), e.groups_kept)
        every = torch.ones(e.groups, dtype=torch.bool, device=logits.device)
        ruled_out = every.index_fill(0, kept, False)
        key = by_group.masked_fill(ruled_out[:, None], -torch.inf).flatten()
    chosen = best(key, e.per_token)
    weights = scores[chosen]
    if e.normalise:
        weights = weights / (weights.sum() + e.floor)
    return chosen, weights * e.scale


def best(key: Tensor, count: int) -> Tensor:
    """The places of the largest numbers, in ascending order; of equal ones the first."""
    return key.sort(descending=True, stable=True).indices[:count].sort().values


class ExpertMlp:
    """One expert, with the names of a layer's MLP."""

    gate: Any
    up: Any
    down: Any

    def __init__(self, t: ExpertTensors, number: int, spec: LayerSpec) -> None:
        self.spec = spec
        self.gate, self.up, self.down = t.gate[number], t.up[number], t.down[number]
        biases = (t.gate_bias, t.up_bias, t.down_bias)
        self.gate_bias, self.up_bias, self.down_bias = (b[number] if b else None for b in biases)
