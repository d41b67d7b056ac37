"""`losses.divergence` in one kernel: a row of logits is read from memory once, and its gradient written once.

A program has a row to itself and goes over it three times: for the log of its sum, for the overlap, for the gradient.
After the first time the row lies in the cache. As a dozen torch operations the same takes most of a training step.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.distill.losses import LEAST, LOSSES, Divergence, Targets

HYBRID, OVERLAP = LOSSES.index("hybrid"), LOSSES.index("overlap")
BLOCK, WARPS = 4096, 8  # words at once: enough of them in flight to wait for memory only once
LOW = tl.constexpr(-1e30)  # below every logit, and a number: infinities make no numbers of others


@triton.jit
def _divergence_kernel(
    logits, targets, mass, information, weights, loss, overlap, gradient, words, least,
    KIND: tl.constexpr, HYBRID: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x, p, out = logits + row * words, targets + row * words, gradient + row * words
    lanes = tl.arange(0, BLOCK)

    high = tl.full([BLOCK], LOW, tl.float32)
    total, dot = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, words, BLOCK):
        at = begin + lanes
        a = tl.load(x + at, mask=at < words, other=LOW).to(tl.float32)
        b = tl.load(p + at, mask=at < words, other=0.0)
        above = tl.maximum(high, a)
        total = total * tl.exp(high - above) + tl.where(at < words, tl.exp(a - above), 0.0)
        high = above
        dot += a * b
    highest = tl.max(high, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(high - highest), 0))

    shared, below = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, words, BLOCK):
        at = begin + lanes
        a = tl.load(x + at, mask=at < words, other=LOW).to(tl.float32)
        b = tl.load(p + at, mask=at < words, other=0.0)
        q = tl.exp(a - log_sum)
        shared += tl.minimum(q, b)
        below += tl.where(q < b, q, 0.0)
    both, c = tl.sum(shared, 0), tl.sum(below, 0)

    known = tl.load(mass + row)
    kl = tl.load(information + row) - tl.sum(dot, 0) + known * log_sum
    if KIND == OVERLAP:
        some = tl.maximum(both, least)
        of_kl, of_overlap, value = 0.0 * some, -1 / some, -tl.log(some)
    elif KIND == HYBRID:
        of_kl = tl.exp(-3 * both)
        of_overlap, value = of_kl - 1, of_kl * kl + (1 - of_kl) * (1 - both)
    else:
        of_kl, of_overlap, value = 0.0 * kl + 1, 0.0 * kl, kl
    tl.store(loss + row, value)
    tl.store(overlap + row, both)

    scale = tl.load(weights + row)
    of_kl, of_overlap = of_kl * scale, of_overlap * scale
    for begin in range(0, words, BLOCK):
        at = begin + lanes
        a = tl.load(x + at, mask=at < words, other=LOW).to(tl.float32)
        b = tl.load(p + at, mask=at < words, other=0.0)
        q = tl.exp(a - log_sum)
        slope = (tl.where(q < b, 1.0, 0.0) - c) * of_overlap + of_kl * known
        tl.store(out + at, (q * slope - b * of_kl).to(out.dtype.element_ty), mask=at < words)


def fused_divergence(kind: str, logits: Tensor, targets: Targets, weights: Tensor) -> Divergence:
    """As `losses.divergence` says it, with the gradient in the logits' dtype."""
    rows, words = logits.shape
    loss, overlap = (torch.empty(rows, device=logits.device) for _ in range(2))
    gradient = torch.empty_like(logits)
    _divergence_kernel[(rows,)](
        logits.contiguous(), targets.p.contiguous(), targets.mass, targets.information, weights.contiguous(),
        loss, overlap, gradient, words, LEAST,
        KIND=LOSSES.index(kind), HYBRID=HYBRID, OVERLAP=OVERLAP, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return Divergence(loss, overlap, gradient)
