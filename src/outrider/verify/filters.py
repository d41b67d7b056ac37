"""top-k, top-p and min-p as one bound per row: logits below it are ruled out, ties at it are kept.

    top-k   the largest b with  count(l >= b) >= k
    top-p   the largest b with  mass(l >= b) >= p * mass(what top-k left)
    min-p   max(l) + log(min_p)

A token's mass is exp(l - max(l)) in fixed point, computed with integers alone. Integer sums do not depend on their
order, so a row's bound does not depend on the rows beside it, and the torch, C and Triton forms of this function give
the same bound to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.types import SamplingParams

BANNED = float("-inf")
OFF = (0, 1.0, BANNED)  # top_k, top_p and the logarithm of min_p that rule nothing out

HALVINGS = 24204406.0  # log2(e) * 2^24 as float32: a nat in steps of 2^-24
FARTHEST = 44.0  # nats below the maximum at which the mass is zero
# 2^-f for f in [0, 1) is c0 - f (c1 - f (c2 - ...)) to 9e-8, the coefficients times 2^31.
POWERS = (2147483648, 1488514807, 515782929, 118750173, 19769301, 2029165)
SPARE = 12  # extra bits, so that the masses of a long tail count: 2^43 is 1

_WIDTH = 512  # likeliest tokens that the host sorts first; a flat row needs all of them


def wanted(params: SamplingParams) -> tuple[int, float, float]:
    """top_k, top_p and log(min_p) of a request; `OFF` at temperature 0."""
    if params.temperature == 0:
        return OFF
    return params.top_k, params.top_p, math.log(params.min_p) if params.min_p else BANNED


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """Sets logits that the filters do not keep to -inf, in place: [R, vocab], [R] int64, [R] float32, [R] float32.

    Kernels with the same signature may replace it and must equal it.
    """
    logits.masked_fill_(logits < bounds(logits, top_k, top_p, log_min_p)[:, None], BANNED)


def bounds(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """[R] the smallest logit that each row keeps."""
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top == BANNED, 0)
    mass = masses(logits, top)
    vocab = logits.shape[1]
    width = min(_WIDTH, vocab) if logits.device.type == "cpu" else vocab
    bound, found = _search(logits, mass, top_k, top_p, width)
    if width < vocab and not bool(found.all()):
        bound, found = _search(logits, mass, top_k, top_p, vocab)
    return torch.maximum(bound, top[:, 0] + log_min_p)


def masses(logits: Tensor, top: Tensor) -> Tensor:
    """exp(logits - top) as integers, 2^43 for one."""
    steps = ((top - logits).clamp(max=FARTHEST) * HALVINGS).int().long()
    fraction = (steps & 0xFFFFFF) << 8
    power = torch.full_like(steps, POWERS[-1])
    for coefficient in reversed(POWERS[:-1]):
        power = coefficient - (power * fraction >> 32)
    return power << SPARE >> (steps >> 24)


def _search(logits: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The bounds of top-k and top-p [R] among the `width` likeliest tokens, and whether that width was enough [R]."""
    vocab = logits.shape[1]
    values, ids = logits.topk(width)
    running = mass.gather(1, ids).cumsum(-1)
    counted, shared = (top_k > 0) & (top_k < vocab), top_p < 1
    kth = values.gather(1, top_k.where(counted, 1).clamp(max=width)[:, None] - 1)
    left = (values >= kth).sum(-1)  # ties and all
    total = torch.where(counted, running.gather(1, left[:, None] - 1)[:, 0], mass.sum(-1))
    need = (total.double() * top_p.double()).long().clamp(min=1)
    short = (running < need[:, None]).sum(-1)  # tokens that are not enough
    pth = values.gather(1, short.clamp(max=width - 1)[:, None])
    bound = torch.where(shared, pth[:, 0], torch.where(counted, kth[:, 0], BANNED))
    return bound, ~(counted & (left == width)) & ~(shared & (short == width))
