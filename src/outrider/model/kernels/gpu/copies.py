"""Where a text's ending occurs earlier in it, and what followed there: `draft/chains.py` says it in torch."""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start

PLACES = 1024  # looked at by one program


@triton.jit
def _scan_kernel(
    tokens, rows, lengths, best, stride, context,
    REACH: tl.constexpr, SHORTEST: tl.constexpr, PLACES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The best of some places of one text: by how much of the ending is there, then the latest. -1: none."""
    let_next_start(CHAIN)
    one = tl.program_id(0)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    await_previous(CHAIN)
    length = tl.load(lengths + one)
    text = tokens + tl.load(rows + one) * stride
    same = (place < length) & (place < context)  # places whose next token is known
    size = tl.zeros((PLACES,), tl.int32)
    for back in tl.static_range(REACH):
        known = tl.minimum(place, length) >= back
        ending = tl.load(text + tl.maximum(length - back, 0))
        same = same & known & (tl.load(text + place - back, mask=same & known, other=-1) == ending)
        size += same.to(tl.int32)
    found = tl.where(size >= SHORTEST, size * context + place, -1)
    tl.store(best + one * tl.num_programs(1) + tl.program_id(1), tl.max(found, 0))


@triton.jit
def _copy_kernel(
    tokens, rows, lengths, best, guesses, counts, stride, context, many,
    N: tl.constexpr, WIDE: tl.constexpr, MANY: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    one = tl.program_id(0)
    part = tl.arange(0, MANY)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    top = tl.max(tl.load(best + one * many + part, mask=part < many, other=-1), 0)
    start = tl.where(top >= 0, top % context + 1, 0)
    text = tokens + tl.load(rows + one) * stride
    tl.store(guesses + one * N + i, tl.load(text + tl.minimum(start + i, context - 1)), mask=i < N)
    left = tl.minimum(tl.load(lengths + one) + 1 - start, N)
    tl.store(counts + one, tl.where(top >= 0, left, 0))


def find_copies(
    tokens: Tensor, rows: Tensor, lengths: Tensor, n: int, context: int, reach: int, shortest: int
) -> tuple[Tensor, Tensor]:
    """As `draft.chains.find_copies`: n tokens for each of the rows [S], and how many of them are meant."""
    many = triton.cdiv(context, PLACES)
    best = torch.empty(len(rows) * many, dtype=torch.int32, device=tokens.device)
    guesses = torch.empty((len(rows), n), dtype=torch.int64, device=tokens.device)
    counts = torch.empty_like(lengths)
    _scan_kernel[(len(rows), many)](
        tokens, rows, lengths, best, tokens.stride(0), context,
        REACH=reach, SHORTEST=shortest, PLACES=PLACES, num_warps=4, **chained(),
    )  # fmt: skip
    _copy_kernel[(len(rows),)](
        tokens, rows, lengths, best, guesses, counts, tokens.stride(0), context, many,
        N=n, WIDE=triton.next_power_of_2(n), MANY=triton.next_power_of_2(many), num_warps=1, **chained(),
    )  # fmt: skip
    return guesses, counts
