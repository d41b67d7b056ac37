"""Lookup's search for rows of the device's state. `draft/lookup.py` defines it and has it in torch."""

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


@triton.jit
def _token(text, reference, before, wide, at):
    """Of the references with the text after them. No mask: both loads are of places that are there."""
    earlier = tl.load(reference + tl.minimum(at, wide - 1))
    own = tl.load(text + tl.maximum(at - before, 0))
    return tl.where(at < before, earlier, own)


@kernel(do_not_specialize=["places"])
def _scan_kernel(
    tokens, references, spans, rows, lengths, best, stride, wide, places,
    REACH: tl.constexpr, SHORTEST: tl.constexpr, GRAM: tl.constexpr, PLACES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The best of some places of one text: by how many tokens of the ending match there, then the latest. -1: none."""
    let_next_start(CHAIN)
    one = tl.program_id(0)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    await_previous(CHAIN)
    row, length = tl.load(rows + one), tl.load(lengths + one)
    answers, before = tl.load(spans + 3 * row), tl.load(spans + 3 * row + 1)
    text, reference = tokens + row * stride, references + row * wide
    last = length + before
    same = (place < last) & (place < places)  # places whose next token is known, and no separator
    same = same & (_token(text, reference, before, wide, tl.minimum(place + 1, last)) >= 0)
    size = tl.zeros((PLACES,), tl.int32)
    for back in tl.static_range(REACH):
        known = (place >= back) & (length >= back)
        ending = _token(text, reference, before, wide, tl.maximum(last - back, 0))
        there = tl.minimum(tl.maximum(place - back, 0), last)
        same = same & known & (_token(text, reference, before, wide, there) == ending)
        size += same.to(tl.int32)
    predicted = (place >= answers) & (place < before)
    needed = tl.where(place < before, tl.where(predicted, 1, GRAM), SHORTEST)
    value = (size + tl.where(predicted, GRAM, 0)) * places + place
    found = tl.where(size >= needed, value, -1)
    tl.store(best + one * tl.num_programs(1) + tl.program_id(1), tl.max(found, 0))


@kernel(do_not_specialize=["places", "many", "furthest", "n"])
def _copy_kernel(
    tokens, references, spans, rows, lengths, best, drafted, counts, stride, wide, places, many, furthest, n,
    WIDE: tl.constexpr, MANY: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    one = tl.program_id(0)
    part = tl.arange(0, MANY)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row, length = tl.load(rows + one), tl.load(lengths + one)
    answers, before, prompt = (
        tl.load(spans + 3 * row),
        tl.load(spans + 3 * row + 1),
        tl.load(spans + 3 * row + 2),
    )
    top = tl.max(tl.load(best + one * many + part, mask=part < many, other=-1), 0)
    opening = (length < prompt) & (answers < before)  # nothing was written: the prediction's beginning
    start = tl.where(opening, answers, tl.where(top >= 0, top % places + 1, 0))
    at = tl.minimum(start + i, before + furthest)
    token = _token(tokens + row * stride, references + row * wide, before, wide, at)
    tl.store(drafted + one * n + i, tl.maximum(token, 0), mask=i < n)
    ends = (token < 0) | (start + i > length + before) | (i >= n)
    count = tl.min(tl.where(ends, tl.minimum(i, n), n), 0)
    tl.store(counts + one, tl.where(opening | (top >= 0), count, 0))


def find_copies(
    tokens: Tensor,
    references: Tensor,
    spans: Tensor,
    rows: Tensor,
    lengths: Tensor,
    n: int,
    context: int,
    limits: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """As `draft.lookup.find_copies`: n tokens for each of the rows [S], and how many of them are drafted."""
    reach, shortest, gram = limits
    places = references.shape[1] + context
    many = triton.cdiv(places, PLACES)
    best = torch.empty(len(rows) * many, dtype=torch.int32, device=tokens.device)
    drafted = torch.empty((len(rows), n), dtype=torch.int64, device=tokens.device)
    counts = torch.empty_like(lengths)
    texts, strides = (tokens, references, spans, rows, lengths), (tokens.stride(0), references.stride(0))
    _scan_kernel[(len(rows), many)](
        *texts, best, *strides, places,
        REACH=reach, SHORTEST=shortest, GRAM=gram, PLACES=PLACES, num_warps=4, **chained(),
    )  # fmt: skip
    _copy_kernel[(len(rows),)](
        *texts, best, drafted, counts, *strides, places, many, tokens.shape[1] - 1, n,
        WIDE=lanes(n), MANY=triton.next_power_of_2(many), num_warps=1, **chained(),
    )  # fmt: skip
    return drafted, counts
