"""top-k, top-p and min-p as one bound a row: what lies below it is ruled out, ties at it are kept.

    top-k   the largest b with  count(l >= b) >= k
    top-p   the largest b with  mass(l >= b) >= p * mass(what top-k left)
    min-p   max(l) + log(min_p)

A token's mass is exp(l - max(l)) in fixed point, made with integers alone. Sums of integers do not depend on
their order, so a row's bound does not depend on its company, and every form of this function gives the same
bound to the last bit: this one, the C one and the one for a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.types import SamplingParams

BANNED = float("-inf")
OFF = (0, 1.0, BANNED)  # top_k, top_p and the logarithm of min_p that rule nothing out

HALVINGS = 24204406.0  # of a nat, in steps of 2^-24: log2(e) * 2^24 as float32
FARTHEST = 44.0  # nats below the likeliest, where nothing is left of a mass
# 2^-f for f in [0, 1) is c0 - f (c1 - f (c2 - ...)) to 9e-8, the coefficients times 2^31.
POWERS = (2147483648, 1488514807, 515782929, 118750173, 19769301, 2029165)
SPARE = 12  # more bits, so that the masses of a whole tail count: 2^43 is one

_WIDTH = 512  # on the host, first only so many of the likeliest tokens are sorted; a flat row needs them all


def wanted(params: SamplingParams) -> tuple[int, float, float]:
    """top_k, top_p and the logarithm of min_p as a row of logits takes them: off where nothing is sampled."""
    if params.temperature == 0:
        return OFF
    return params.top_k, params.top_p, math.log(params.min_p) if params.min_p else BANNED


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """Rule out what the filters do not keep, in place: [R, vocab], [R] int64, [R] float32, [R] float32.

    Kernels with the same signature may take its place; this is what they must equal.
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
    """The bounds of top-k and top-p [R] among the `width` likeliest tokens, and whether they were enough [R]."""
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
