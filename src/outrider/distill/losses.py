"""What a draft is trained to make small, with its gradient in closed form, over a whole vocabulary at a time.

q is the draft's distribution, p the target's. A draft's token is accepted with a chance of about their overlap
a = sum min(p, q) = 1 - TV.

    kl       sum p log(p / q)
    overlap  -log a
    hybrid   l KL + (1 - l) TV with l = exp(-3 a), a constant to the gradient: KL while they are far apart, then TV

A draft with a part of the vocabulary gets p for its own words only. What p has elsewhere is never overlapped.

Logits of a batch would fill the memory, and a frozen head passes gradients on without keeping any. So rows come in
chunks, and a chunk's loss and the gradient of its hidden states are made at once; the logits are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("hybrid", "overlap", "kl")
CHUNK_NUMBERS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits at once
CHUNK_BYTES = 192  # of a device's memory to each of them, where it has more
LEAST = 1e-9  # overlap below which there is none to speak of


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of some rows: the loss and the overlap, [R], and the gradient of the weighted loss by the logits, [R, V]."""

    loss: Tensor
    overlap: Tensor
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """What the target says of some rows: probabilities [R, V] of the draft's words, float32, and of each row their sum
    and the sum of p log p.
    """

    p: Tensor
    mass: Tensor
    information: Tensor

    @classmethod
    def of(cls, p: Tensor) -> Targets:
        return cls(p, p.sum(-1), torch.xlogy(p, p).sum(-1))

    def first(self, rows: int) -> Targets:
        return Targets(self.p[:rows], self.mass[:rows], self.information[:rows])


def divergence(kind: str, logits: Tensor, targets: Targets, weights: Tensor) -> Divergence:
    """Of logits [R, V]; `weights` [R] scale the gradient only."""
    p, mass, logits = targets.p, targets.mass, logits.float()
    q = logits.softmax(-1)
    below = q < p
    overlap = torch.minimum(p, q).sum(-1)
    a, c = overlap.clamp(min=LEAST), (q * below).sum(-1)
    # d KL = mass q - p, and d a = q (below - c): both of the logits.
    if kind == "overlap":
        of_kl, of_overlap, loss = torch.zeros_like(a), -1 / a, -a.log()
    else:
        kl = targets.information - (p * logits).sum(-1) + mass * logits.logsumexp(-1)
        if kind == "kl":
            of_kl, of_overlap, loss = torch.ones_like(a), torch.zeros_like(a), kl
        else:
            of_kl = torch.exp(-3 * overlap)
            of_overlap, loss = of_kl - 1, of_kl * kl + (1 - of_kl) * (1 - overlap)
    of_kl, of_overlap = (of_kl * weights)[:, None], (of_overlap * weights)[:, None]
    slope = below.to(q.dtype).sub_(c[:, None]).mul_(of_overlap).add_(of_kl * mass[:, None])
    return Divergence(loss, overlap, q.mul_(slope).sub_(p * of_kl))


Diverge = Callable[[str, Tensor, Targets, Tensor], Divergence]


@dataclass(frozen=True, slots=True)
class Losses:
    """Of a batch, by unrolled step: sums over rows that count, and how many they are, [steps]."""

    loss: Tensor
    overlap: Tensor
    rows: Tensor

    def means(self) -> Tensor:
        """[2, steps] where they were made: of the loss and of the overlap."""
        return torch.stack([self.loss, self.overlap]) / self.rows.clamp(min=1)


@torch.no_grad()
def losses_and_gradients(
    kind: str,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    head: Tensor,
    targets: Callable[[slice], Tensor],
    dtype: torch.dtype,
    diverge: Diverge = divergence,
    temperature: float = 1.0,
) -> tuple[Losses, list[Tensor], Tensor | None]:
    """Of normed hidden states [N, hidden], one tensor a step. Their rows have the same targets in every step, and later
    steps may have only the first of them.

    `weights` [N], one a step, say how much each row's loss counts; `targets` gives p of a slice of rows; `dtype` is
    what matmuls run in; `diverge` is `divergence` or a twin of it; `temperature` is what the draft's logits are
    divided by, as `targets` has done with the target's. The gradients are of the weighted sum: of the states, and of
    the head if it learns.
    """
    matrix = head.to(dtype)
    learns = torch.zeros_like(head) if head.requires_grad else None
    loss, overlap = ([torch.zeros_like(one) for one in weights] for _ in range(2))
    gradients = [torch.empty_like(state) for state in states]
    chunk = max(1, chunk_numbers(head.device) // len(head))
    for begin in range(0, len(states[0]), chunk):
        said = Targets.of(targets(slice(begin, min(begin + chunk, len(states[0])))))
        for step, state in enumerate(states):
            some = (state[begin : begin + chunk] / temperature).to(dtype)
            if not len(some):
                continue
            rows = slice(begin, begin + len(some))
            made = diverge(kind, some @ matrix.T, said.first(len(some)), weights[step][rows])
            slope = made.gradient.to(dtype)
            gradients[step][rows] = slope @ matrix / temperature
            if learns is not None:
                learns += slope.T @ some
            loss[step][rows], overlap[step][rows] = made.loss, made.overlap
    counted = [one > 0 for one in weights]  # masks, as picking rows would have the host wait for a device
    sums = [
        torch.stack([(v * c).sum(dtype=torch.float64) for v, c in zip(values, counted, strict=True)])
        for values in (loss, overlap)
    ]
    return Losses(sums[0], sums[1], torch.stack([c.sum() for c in counted])), gradients, learns


def chunk_numbers(device: torch.device) -> int:
    """Logits to be made at once there: a function of the device alone, as sums depend on it."""
    least = CHUNK_NUMBERS[device.type]
    if device.type != "cuda":
        return least
    room = torch.cuda.get_device_properties(device).total_memory // CHUNK_BYTES
    return max(least, 1 << room.bit_length() - 1)
