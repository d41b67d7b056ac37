"""top-k, top-p and min-p over the vocabulary, in place. Twin: verify/filters.py's filter_logits, to the last bit.

A row's bound is the largest b with enough at or above it: k tokens, or a share of the mass. Nothing is sorted.
Programs that each see a piece of a row find its maximum, then twice sum up, roughly, what lies above a few levels;
that leaves a narrow range, whose tokens are gathered. One program a row then bisects among those, with exact sums
of integers. Where the rough sums misled, or the range holds too many, it bisects over the whole row: slower, and
the same bound, so nothing of what is rough ever shows.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start

CHUNK = 4096  # tokens a program looks at
FOUND = 16384  # tokens of a row that can be gathered
BLOCK = 2048  # tokens looked at together when bisecting
LEVELS = 8  # a pass sums above

LOWEST = tl.constexpr(-2139095041)  # the key of -inf
EDGE = tl.constexpr(1e-4)  # a rough sum may be off by this share


@triton.jit
def _mass(logit, top):
    """exp(logit - top), 2^43 for one, as verify/filters.py makes it."""
    steps = (tl.minimum(top - logit, 44.0) * 24204406.0).to(tl.int32)
    fraction = (steps & 0xFFFFFF).to(tl.uint32) << 8
    power = tl.zeros_like(fraction) + 2029165
    power = 19769301 - tl.umulhi(power, fraction)
    power = 118750173 - tl.umulhi(power, fraction)
    power = 515782929 - tl.umulhi(power, fraction)
    power = 1488514807 - tl.umulhi(power, fraction)
    power = 2147483648 - tl.umulhi(power, fraction)
    return (power.to(tl.int64) << 12) >> (steps >> 24).to(tl.int64)


@triton.jit
def _key(logit):
    """A whole number for every float, in their order."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _asked(top_k, top_p, log_min_p, row, vocab):
    """k where tokens are counted, else 0; the share where it is below one, else 0; whether there is any filter."""
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    k = tl.where(k < vocab, k, 0)
    p = tl.where(p < 1.0, p, 0.0)
    any_filter = (
        (k > 0).to(tl.int32) + (p > 0).to(tl.int32) + (tl.load(log_min_p + row) > float("-inf")).to(tl.int32)
    )
    return k, p, any_filter


@triton.jit
def _piece(logits, row, stride, chunk, vocab, CHUNK: tl.constexpr):
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")), at


@triton.jit
def _peak(peaks, row, chunks, CHUNKS: tl.constexpr):
    """A row's largest logit, and the least of its pieces' largest."""
    i = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + row * chunks + i, mask=i < chunks, other=float("-inf"))
    top = tl.max(peak, 0)
    least = tl.min(tl.where(peak > float("-inf"), peak, top), 0)
    return tl.where(top > float("-inf"), top, 0.0), tl.where(top > float("-inf"), least, 0.0)


@triton.jit
def _first_levels(top, least, k, LEVELS: tl.constexpr):
    """Where a first pass looks, from the top down: nats below it for a share, for a count as far as peaks lie apart."""
    j = tl.arange(0, LEVELS)
    reach = tl.where(k > 0, (top - least) / 60.0, 1.0 / 24.0)
    level = top - reach * ((j + 1) * (j + 2) * (j + 3))
    return tl.where(j == LEVELS - 1, float("-inf"), level)  # the last holds everything


@triton.jit
def _next_levels(top, high, low, LEVELS: tl.constexpr):
    """The range in even parts. The last level is its lower end."""
    j = tl.arange(0, LEVELS)
    high = tl.minimum(high, top)
    level = high - (high - low) * ((j + 1) / LEVELS)
    return tl.where(j == LEVELS - 1, low, level)


@triton.jit
def _narrow(sums, row, chunks, k, p, whole, levels, high, low, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """The two neighbouring levels that the bound lies between, by a pass's sums, the upper one not included; and the
    largest of the sums.
    """
    i = tl.arange(0, CHUNKS)[:, None]
    j = tl.arange(0, LEVELS)[None, :]
    parts = tl.load(sums + (row * chunks + i) * LEVELS + j, mask=i < chunks, other=0.0)
    above = tl.sum(parts, 0)
    most = tl.max(above, 0)
    need = tl.where(k > 0, k.to(tl.float32), p * tl.where(whole > 0, whole, most))
    high = tl.min(tl.where(above < need * (1 - EDGE), levels, high), 0)
    low = tl.max(tl.where(above >= need * (1 + EDGE), levels, low), 0)
    return high, low, most


@triton.jit
def _range_after_first(peaks, sums, row, chunks, k, p, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    top, least = _peak(peaks, row, chunks, CHUNKS)
    levels = _first_levels(top, least, k, LEVELS)
    high, low = float("inf"), float("-inf")
    high, low, whole = _narrow(sums, row, chunks, k, p, 0.0, levels, high, low, CHUNKS, LEVELS)
    return top, high, low, whole


@kernel
def _peak_kernel(
    logits, top_k, top_p, log_min_p, peaks, counts, vocab, stride, chunks,
    CHUNK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_previous(CHAIN)
    _, _, asked = _asked(top_k, top_p, log_min_p, row, vocab)
    if asked == 0:
        return
    logit, _ = _piece(logits, row, stride, chunk, vocab, CHUNK)
    tl.store(peaks + row * chunks + chunk, tl.max(logit, 0))
    if chunk == 0:
        tl.store(counts + row, 0)


@kernel
def _level_kernel(
    logits, top_k, top_p, log_min_p, peaks, before, sums, vocab, stride, chunks,
    FIRST: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """What a piece has at or above each level: tokens, or their rough mass."""
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_previous(CHAIN)
    k, p, _ = _asked(top_k, top_p, log_min_p, row, vocab)
    if (k == 0) & (p == 0.0):
        return
    if FIRST:
        top, least = _peak(peaks, row, chunks, CHUNKS)
        levels = _first_levels(top, least, k, LEVELS)
    else:
        top, high, low, _ = _range_after_first(peaks, before, row, chunks, k, p, CHUNKS, LEVELS)
        levels = _next_levels(top, high, low, LEVELS)
    logit, at = _piece(logits, row, stride, chunk, vocab, CHUNK)
    amount = tl.exp2((logit - top) * 1.4426950408889634)
    if k > 0:
        amount = tl.where(at < vocab, 1.0, 0.0)
    j = tl.arange(0, LEVELS)
    for i in tl.static_range(LEVELS):
        level = tl.sum(tl.where(j == i, levels, 0.0), 0)
        above = tl.sum(tl.where(logit >= level, amount, 0.0), 0)
        tl.store(sums + (row * chunks + chunk) * LEVELS + i, above)


@kernel
def _gather_kernel(
    logits, top_k, top_p, log_min_p, peaks, first, second, counts, edges, exact, found, vocab, stride, chunks,
    CHUNKS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, FOUND: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Copies a piece's tokens within the range, in no particular order, and sums masses: above it, down to its lower
    end, and all. Where tokens are counted the range has no upper end: a share may be asked of them next.
    """
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_previous(CHAIN)
    k, p, _ = _asked(top_k, top_p, log_min_p, row, vocab)
    if (k == 0) & (p == 0.0):
        return
    top, high, low, whole = _range_after_first(peaks, first, row, chunks, k, p, CHUNKS, LEVELS)
    levels = _next_levels(top, high, low, LEVELS)
    high, low, _ = _narrow(second, row, chunks, k, p, whole, levels, high, low, CHUNKS, LEVELS)
    high = tl.where(k > 0, float("inf"), high)
    logit, at = _piece(logits, row, stride, chunk, vocab, CHUNK)
    inside = tl.where((logit >= low) & (logit < high) & (at < vocab), 1, 0)
    start = tl.atomic_add(counts + row, tl.sum(inside, 0))
    place = start + tl.cumsum(inside, 0) - 1
    tl.store(found + row * FOUND + place, logit, mask=(inside > 0) & (place < FOUND))
    if chunk == 0:
        tl.store(edges + row * 2, low)
        tl.store(edges + row * 2 + 1, high)
    if k == 0:
        mass = _mass(logit, top)
        sums = exact + (row * chunks + chunk) * 3
        tl.store(sums, tl.sum(tl.where(logit >= high, mass, 0), 0))
        tl.store(sums + 1, tl.sum(tl.where(logit >= low, mass, 0), 0))
        tl.store(sums + 2, tl.sum(mass, 0))


@triton.jit
def _amount(source, size, top, key, weighed, BLOCK: tl.constexpr):
    """How much of `size` logits lies at or above a key: tokens, or their mass."""
    total = key * 0
    bound = _value(key.to(tl.int32))
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(source + at, mask=at < size, other=float("-inf"))
        here = (logit >= bound) & (at < size)
        if weighed:
            total += tl.sum(tl.where(here, _mass(logit, top), 0), 0)
        else:
            total += tl.sum(tl.where(here, 1, 0), 0)
    return total


@triton.jit
def _largest(source, size, top, need, low, high, weighed, BLOCK: tl.constexpr):
    """The largest key from `low` to `high` with `need` at or above it; `low` if there is none."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        enough = _amount(source, size, top, middle, weighed, BLOCK) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _share(total, p):
    return tl.maximum((total.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)


@kernel
def _bound_kernel(
    logits, top_k, top_p, log_min_p, peaks, counts, edges, exact, found, bounds, vocab, stride, chunks,
    CHUNKS: tl.constexpr, FOUND: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """A row's exact bound: bisects among what was gathered, or where that does not hold it, over the whole row."""
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    await_previous(CHAIN)
    k, p, asked = _asked(top_k, top_p, log_min_p, row, vocab)
    if asked == 0:
        return
    top, _ = _peak(peaks, row, chunks, CHUNKS)
    bound = top + tl.load(log_min_p + row)
    if (k > 0) | (p > 0.0):
        size = tl.load(counts + row)
        source = found + row * FOUND
        low = _key(tl.load(edges + row * 2)).to(tl.int64)
        high = _key(tl.minimum(tl.load(edges + row * 2 + 1), top)).to(tl.int64)
        above = tl.zeros_like(low)
        need = k
        if k > 0:
            holds = (size <= FOUND) & (size >= k)
        else:
            i = tl.arange(0, CHUNKS)
            sums = exact + (row * chunks + i) * 3
            above = tl.sum(tl.load(sums, mask=i < chunks, other=0), 0)
            reached = tl.sum(tl.load(sums + 1, mask=i < chunks, other=0), 0)
            need = _share(tl.sum(tl.load(sums + 2, mask=i < chunks, other=0), 0), p)
            holds = (size <= FOUND) & (above < need) & (reached >= need)
        if not holds:
            source = logits + row * stride
            size = vocab
            above = tl.zeros_like(low)
            low = tl.zeros_like(low) + LOWEST
            high = _key(top).to(tl.int64)
        key = _largest(source, size, top, need - above, low, high, k == 0, BLOCK)
        if (k > 0) & (p > 0.0):
            need = _share(_amount(source, size, top, key, True, BLOCK), p)
            key = _largest(source, size, top, need, key, _key(top).to(tl.int64), True, BLOCK)
        bound = tl.maximum(bound, _value(key.to(tl.int32)))
    tl.store(bounds + row, bound)


@kernel
def _cut_kernel(
    logits, top_k, top_p, log_min_p, bounds, vocab, stride, CHUNK: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    await_previous(CHAIN)
    _, _, asked = _asked(top_k, top_p, log_min_p, row, vocab)
    if asked == 0:
        return
    logit, at = _piece(logits, row, stride, tl.program_id(1), vocab, CHUNK)
    low = logit < tl.load(bounds + row)
    tl.store(logits + row * stride + at, float("-inf"), mask=low & (at < vocab))


@dataclass(slots=True)
class Gathered:
    """Where each row's bound is thought to lie, and the tokens there."""

    peaks: Tensor  # [R, chunks]
    edges: Tensor  # [R, 2] the range, its upper end not in it
    counts: Tensor  # [R] int32, tokens in the range
    found: Tensor  # [R, FOUND] those tokens, in any order
    exact: Tensor  # [R, chunks, 3] int64, masses above the range, above and in it, and in all


def filter_rows(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """[R, vocab] float32, in place; [R] int64, [R] float32, [R] float32: verify/filters.py says what they are."""
    rows, vocab = logits.shape
    if not rows:
        return
    chunks = triton.cdiv(vocab, CHUNK)
    asked, stride = (logits, top_k, top_p, log_min_p), logits.stride(0)
    g = gather(*asked)
    bounds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _bound_kernel[(rows,)](
        *asked, g.peaks, g.counts, g.edges, g.exact, g.found, bounds, vocab, stride, chunks,
        CHUNKS=triton.next_power_of_2(chunks), FOUND=FOUND, BLOCK=BLOCK, num_warps=8, **chained(),
    )  # fmt: skip
    _cut_kernel[(rows, chunks)](*asked, bounds, vocab, stride, CHUNK=CHUNK, **chained())


def gather(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Gathered:
    """Look for the rows' bounds roughly, and gather what lies there. Rows that count nothing are left undefined."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)

    def scratch(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, *shape, dtype=kind, device=logits.device)

    peaks, edges, found = scratch(chunks), scratch(2), scratch(FOUND)
    counts, exact = scratch(kind=torch.int32), scratch(chunks, 3, kind=torch.int64)
    first, second = scratch(chunks, LEVELS), scratch(chunks, LEVELS)
    asked, shape, grid = (logits, top_k, top_p, log_min_p), (vocab, logits.stride(0), chunks), (rows, chunks)
    options = dict(CHUNKS=triton.next_power_of_2(chunks), LEVELS=LEVELS, CHUNK=CHUNK, **chained())
    _peak_kernel[grid](*asked, peaks, counts, *shape, CHUNK=CHUNK, **chained())
    for sums in (first, second):
        _level_kernel[grid](*asked, peaks, first, sums, *shape, FIRST=sums is first, **options)
    _gather_kernel[grid](
        *asked, peaks, first, second, counts, edges, exact, found, *shape, FOUND=FOUND, **options
    )
    return Gathered(peaks, edges, counts, found, exact)
