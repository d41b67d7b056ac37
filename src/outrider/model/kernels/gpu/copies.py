"""Finds where a text's ending occurs earlier in it, and what followed there. Twin: `draft/lookup.py`."""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, lanes, let_next_start

PLACES = 1024  # looked at by one program
BONUS = 4  # extra matching tokens that a place in a prediction counts for


@triton.jit
def _token(text, prediction, before, wide, at):
    """Of a prediction with the text after it. No mask: both loads are of places that are there."""
    expected = tl.load(prediction + tl.minimum(at, wide - 1))
    own = tl.load(text + tl.maximum(at - before, 0))
    return tl.where(at < before, expected, own)


@kernel(do_not_specialize=["places"])
def _scan_kernel(
    tokens, predictions, predicted, rows, lengths, best, stride, wide, places,
    REACH: tl.constexpr, SHORTEST: tl.constexpr, BONUS: tl.constexpr, PLACES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The best of some places of one text: by how much of the ending is there, then the latest. -1: none."""
    let_next_start(CHAIN)
    one = tl.program_id(0)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    await_previous(CHAIN)
    row, length = tl.load(rows + one), tl.load(lengths + one)
    before = tl.load(predicted + row)
    text, prediction = tokens + row * stride, predictions + row * wide
    last = length + before
    same = (place < last) & (place < places)  # places whose next token is known
    size = tl.zeros((PLACES,), tl.int32)
    for back in tl.static_range(REACH):
        known = (place >= back) & (length >= back)
        ending = _token(text, prediction, before, wide, tl.maximum(last - back, 0))
        there = tl.minimum(tl.maximum(place - back, 0), last)
        same = same & known & (_token(text, prediction, before, wide, there) == ending)
        size += same.to(tl.int32)
    value = (size + tl.where(place < before, BONUS, 0)) * places + place
    found = tl.where(size >= SHORTEST, value, -1)
    tl.store(best + one * tl.num_programs(1) + tl.program_id(1), tl.max(found, 0))


@kernel(do_not_specialize=["places", "many", "furthest", "n"])
def _copy_kernel(
    tokens, predictions, predicted, rows, lengths, best, drafted, counts, stride, wide, places, many, furthest, n,
    WIDE: tl.constexpr, MANY: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    one = tl.program_id(0)
    part = tl.arange(0, MANY)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row = tl.load(rows + one)
    before = tl.load(predicted + row)
    top = tl.max(tl.load(best + one * many + part, mask=part < many, other=-1), 0)
    start = tl.where(top >= 0, top % places + 1, 0)
    at = tl.minimum(start + i, before + furthest)
    token = _token(tokens + row * stride, predictions + row * wide, before, wide, at)
    tl.store(drafted + one * n + i, token, mask=i < n)
    ends = tl.where(start <= before, before, tl.load(lengths + one) + before + 1)
    tl.store(counts + one, tl.where(top >= 0, tl.minimum(ends - start, n), 0))


def find_copies(
    tokens: Tensor,
    predictions: Tensor,
    predicted: Tensor,
    rows: Tensor,
    lengths: Tensor,
    n: int,
    context: int,
    reach: int,
    shortest: int,
) -> tuple[Tensor, Tensor]:
    """As `draft.lookup.find_copies`: n tokens for each of the rows [S], and how many of them are proposed."""
    places = predictions.shape[1] + context
    many = triton.cdiv(places, PLACES)
    best = torch.empty(len(rows) * many, dtype=torch.int32, device=tokens.device)
    drafted = torch.empty((len(rows), n), dtype=torch.int64, device=tokens.device)
    counts = torch.empty_like(lengths)
    texts, strides = (
        (tokens, predictions, predicted, rows, lengths),
        (tokens.stride(0), predictions.stride(0)),
    )
    _scan_kernel[(len(rows), many)](
        *texts, best, *strides, places,
        REACH=reach, SHORTEST=shortest, BONUS=BONUS, PLACES=PLACES, num_warps=4, **chained(),
    )  # fmt: skip
    _copy_kernel[(len(rows),)](
        *texts, best, drafted, counts, *strides, places, many, tokens.shape[1] - 1, n,
        WIDE=lanes(n), MANY=triton.next_power_of_2(many), num_warps=1, **chained(),
    )  # fmt: skip
    return drafted, counts
