"""Attention of flat rows over slot tables: a shared past, read once for many rows, and each row's own path.

The arithmetic of a row is fixed by positions alone. Its keys, in the order of their positions, are cut into
blocks of 64; a block gives a maximum, a sum and a weighted value, from scratch; blocks fold into splits and
splits into the result, in order. Where a split ends is a function of the position. So it does not matter which
rows share a pass, whether a token is a draft token or already known, or how the work is spread over the device.

What differs between rows of a draft tree is which draft tokens they see. Blocks that hold nothing but known
tokens are shared: one program loads them for up to 64 / group rows and all their heads. The blocks from the one
with the first draft token on (two at most) are gathered for each node by its path, in programs of their own.

If every row is the only one of its text, the program rotates its queries and the row's own key itself. It loads known
keys before the matmul's output is ready, and saves one launch. The result equals rows.py's to the bit.

Programs are 16, 32 or 64 query rows tall; those of long prompts are 128 (on Hopper by attention_tall.py). Its tensor
core gives the same bits whichever of its two kinds of instruction that means (measured), and every sum over keys is
left to it.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.formats import widened
from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.attention_tall import attend_tall_kernel
from outrider.model.kernels.gpu.launch import COMPILED, INTERPRETED, await_previous, chained, let_next_start
from outrider.model.kernels.gpu.rows import rope_and_write, scales_of, sum_parts
from outrider.model.staged import (
    BLOCK,
    TALL,
    TALL_DIM,
    TALLEST,
    StagedPart,
    group_rows,
    is_hopper,
    padded_group,
    tallest,
)
from outrider.types import Batch

TILES = (16, 32, TALLEST)  # query rows times heads of a group in one program
NODES = 64
TAILS = 2  # blocks that a draft of 63 nodes can touch
# Loads of slots, keys and values on their way: of these, keys get two buffers, of four one.
STAGES = {16: 6, 32: 4, 64: 4, TALL: 4}
WIDE_STAGES = {16: 3, 32: 2, 64: 3, TALL: 3}  # for heads of more than 64
SPANS = (1, 8)  # what a program reads: one split, or the splits that begin in this many blocks
# Programs that turn by themselves: what it takes of registers leaves room for no more at a time.
TURNING = 320
MANY = 512  # programs without splitting at which it is many
WARPS = 4
TALL_BUFFERS = 4  # blocks of keys and of values that are there or on their way
CROWDED = 768  # programs, a text's whole past each, of which more run at a time with half the warps
SHORT = 12  # splits: texts of up to 1024 tokens
ENOUGH = 512  # programs that keep the device busy without splitting; half of them, where they are tall or texts short
LOG2E = 1.4426950408889634


# Splits are short where a short context leaves the device idle, long where there would be too many to fold.
@triton.jit
def _split_start(s):
    short = tl.where(s < 8, s * 64, 512 + (s - 8) * 128)
    long = tl.where(s < 44, 2048 + (s - 20) * 256, 8192 + (s - 44) * 512)
    return tl.where(s < 20, short, long)


@triton.jit
def _split_of(p):
    short = tl.where(p < 512, p // 64, 8 + (p - 512) // 128)
    long = tl.where(p < 8192, 20 + (p - 2048) // 256, 44 + (p - 8192) // 512)
    return tl.where(p < 2048, short, long)


LENGTHS = ((0, 64), (512, 128), (2048, 256), (8192, 512))  # from where on splits are how long


def split_count(context: int) -> int:
    """Splits of a text of `context` tokens."""
    return len(split_starts(context))


def split_end(splits: int) -> int:
    """Where the last of `splits` splits ends."""
    return split_starts(LENGTHS[-1][1] * splits + 1)[splits]


def split_starts(context: int) -> list[int]:
    ends = [start for start, _ in LENGTHS[1:]] + [max(context, LENGTHS[-1][0])]
    starts = [at for (start, each), end in zip(LENGTHS, ends, strict=True) for at in range(start, end, each)]
    return [start for start in starts if start < context]


@triton.jit
def _fold(m, w, acc, m_more, l_more, acc_more):
    """Two partial results into one. Written with explicit fused sums: the same bits in every kernel."""
    top = tl.maximum(m, m_more)
    safe = tl.where(top == float("-inf"), 0.0, top)
    a = tl.exp2(m - safe)
    b = tl.exp2(m_more - safe)
    w = tl.fma(w, a, l_more * b)
    a = a[:, None]
    acc = tl.fma(acc, tl.broadcast_to(a, acc.shape), acc_more * b[:, None])
    return top, w, acc


@triton.jit
def _fold_sinks(m, w, acc, sinks, head, valid):
    """Each head's sink, after all keys: a logit without a value."""
    sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
    return _fold(m, w, acc, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(acc))


@triton.jit
def _block(q, k, v, seen, scale):
    """One block of keys from scratch: maximum, sum and weighted values of every query row. Written with explicit fused
    products: the same bits in every kernel.
    """
    scores = tl.where(seen, tl.dot(q, tl.trans(k)), float("-inf"))
    m = tl.max(scores, 1)
    m = tl.fma(m, tl.zeros_like(m) + scale, tl.zeros_like(m))
    less = -tl.where(m == float("-inf"), 0.0, m)[:, None]
    p = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.broadcast_to(less, scores.shape))).to(
        v.dtype
    )
    # The sum, too, by the tensor core: its order does not depend on how a tile lies over warps.
    ones = tl.full((v.shape[0], 16), 1.0, v.dtype)
    return m, tl.max(tl.dot(p, ones), 1), tl.dot(p, v)


@triton.jit
def in_natural_order(x):
    """x, of half precision. Triton permutes the inputs of `mma.sync` where it can trace an operand to an 8-bit load
    (kWidth = 4), but not those of `wgmma`, so a row's sums would depend on the height of its program (log/120). It
    traces no further than an instruction with side effects.
    """
    if COMPILED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _load_head(numbers, scales, at, held, load, d, HALF: tl.constexpr, DIM: tl.constexpr, INT8: tl.constexpr):
    """Keys or values of a head. Of 8 bits and a scale they are the nearest number in half precision."""
    if INT8:
        words: tl.constexpr = DIM // 4 + 1  # of a head, the last of them its scale
        found = tl.load(numbers + at[:, None] * (4 * words) + d, mask=load, other=0).to(tl.float32)
        scale = tl.load(scales + at * words + (words - 1), mask=held, other=0.0)
        head = in_natural_order((found * scale[:, None]).to(HALF))
    else:
        head = tl.load(numbers + at[:, None] * DIM + d, mask=load, other=0.0)
    return head


@triton.jit
def _load_block(
    keys, values, key_scales, value_scales, slots, held, kv, d,
    HALF: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    at = slots.to(tl.int64) * KV_HEADS + kv
    load = held[:, None] & (d < DIM)
    k = _load_head(keys, key_scales, at, held, load, d, HALF, DIM, INT8)
    return k, _load_head(values, value_scales, at, held, load, d, HALF, DIM, INT8)


@triton.jit
def _turned(parts, at, stride, c, s, d, mask, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Heads of a row as the matmul left them, in parts, rotated: what lies at d, and half a head further."""
    half: tl.constexpr = DIM // 2
    other = tl.where(d < half, d + half, d - half)
    mine = sum_parts(parts, at + d, stride, mask, PARTS)
    partner = sum_parts(parts, at + other, stride, mask, PARTS)
    # A sign changes no bit of a product: this is what rows.py makes of either half.
    return tl.fma(mine, tl.broadcast_to(c, mine.shape), tl.where(d < half, -(partner * s), partner * s))


@triton.jit
def _first_split_from(p):
    """The first split that starts at position p or later."""
    s = _split_of(p)
    return tl.where(_split_start(s) < p, s + 1, s)


@triton.jit
def _own_blocks(
    row, kv, q, keys, values, key_scales, value_scales, table, positions, table_rows, prefix, ancestors, paths, sums,
    stats, table_stride, scale, window, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr, WINDOW: tl.constexpr, INT8: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """The blocks of one node that hold draft tokens, gathered along its path; one state for each."""
    if tl.load(ancestors + row) == 0:
        return
    known = tl.load(prefix + row)
    end = tl.load(positions + row) + 1
    lane = tl.arange(0, LOW)
    valid = lane < GROUP
    head = kv * GROUP + lane
    d = tl.arange(0, WIDE)[None, :]
    entries = table + tl.load(table_rows + row).to(tl.int64) * table_stride
    columns = tl.arange(0, BLOCK)
    await_previous(CHAIN)
    heads = row.to(tl.int64) * HEADS + head
    queries = tl.load(q + heads[:, None] * DIM + d, mask=valid[:, None] & (d < DIM), other=0.0)
    to = heads * (splits + 2) + splits
    for at in range(known // BLOCK * BLOCK, end, BLOCK):
        c = at + columns
        held = c < end
        if WINDOW:
            held = held & (c >= end - window)
        slots = tl.load(entries + c, mask=held & (c < known), other=0)
        slots += tl.load(paths + row * NODES + (c - known), mask=held & (c >= known), other=0)
        seen = held[None, :] & valid[:, None]
        k, v = _load_block(
            keys, values, key_scales, value_scales, slots, held, kv, d, queries.dtype, DIM, KV_HEADS, INT8
        )
        m, w, acc = _block(queries, k, v, seen, scale)
        tl.store(sums + to[:, None] * DIM + d, acc, mask=valid[:, None] & (d < DIM))
        tl.store(stats + to * 2, m, mask=valid)
        tl.store(stats + to * 2 + 1, w, mask=valid)
        to += 1


@triton.jit
def _load_state(sums, stats, at, d, there, DIM: tl.constexpr):
    """The partial result of a split, or nothing. `there` is a number, because some releases of Triton's interpreter do
    not broadcast a scalar bool."""
    valid = at * 0 < there
    m = tl.load(stats + at * 2, mask=valid, other=float("-inf"))
    w = tl.load(stats + at * 2 + 1, mask=valid, other=0.0)
    acc = tl.load(sums + at[:, None] * DIM + d, mask=valid[:, None] & (d < DIM), other=0.0)
    return m, w, acc


@triton.jit
def _close_split(
    at, highest, m, w, acc, total_m, total_w, total, sums, stats, to_state, valid, d,
    TILE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """After a block: if a split ends with it, what it came to is folded into the total or left for others."""
    if (at + BLOCK >= highest) | (at + BLOCK == _split_start(_split_of(at) + 1)):
        if WHOLE:
            total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
        else:
            to = to_state + _split_of(at)
            tl.store(sums + to[:, None] * DIM + d, acc, mask=valid[:, None] & (d < DIM))
            tl.store(stats + to * 2, m, mask=valid)
            tl.store(stats + to * 2 + 1, w, mask=valid)
        m = tl.full((TILE,), float("-inf"), tl.float32)
        w = tl.zeros((TILE,), tl.float32)
        acc = tl.zeros((TILE, WIDE), tl.float32)
    return m, w, acc, total_m, total_w, total


@triton.jit
def _take_block(
    queries, k, v, at, c, limit, first, highest, scale, m, w, acc, total_m, total_w, total,
    sums, stats, to_state, valid, d,
    TILE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The block of keys at `at`, columns `c`, into the state of its split."""
    seen = c[None, :] < limit[:, None]
    if WINDOW:
        seen = seen & (c[None, :] >= first[:, None])
    block_m, block_w, block_acc = _block(queries, k, v, seen, scale)
    m, w, acc = _fold(m, w, acc, block_m, block_w, block_acc)
    return _close_split(
        at, highest, m, w, acc, total_m, total_w, total, sums, stats, to_state, valid, d,
        TILE, DIM, WIDE, BLOCK, WHOLE,
    )  # fmt: skip


@kernel(do_not_specialize=["made_stride", "shared", "parts", "window", "splits"])
def _attend_kernel(
    q, keys, values, key_scales, value_scales, table, items, positions, table_rows, prefix, ancestors, paths, sums,
    stats, out, made, cos, sin, slots, sinks, made_stride,
    table_stride, shared, parts, scale, window, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr,
    NODES: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr,
    FRESH: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, INT8: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The first shared * parts programs: one item's rows over one split, over the splits that begin in one range of
    `SPAN` blocks, or over everything. The programs after them: one row's own blocks.
    """
    let_next_start(CHAIN)
    kv = tl.program_id(1)
    if TAIL:  # noqa: SIM102 - decided when compiling
        if tl.program_id(0) >= shared * parts:
            _own_blocks(
                tl.program_id(0) - shared * parts, kv, q, keys, values, key_scales, value_scales, table, positions,
                table_rows, prefix, ancestors, paths, sums, stats, table_stride, scale, window, splits,
                HEADS, KV_HEADS, GROUP, LOW, DIM, WIDE, BLOCK, NODES, WINDOW, INT8, CHAIN,
            )  # fmt: skip
            return
    item = tl.program_id(0) // parts
    start = tl.load(items + 3 * item)
    count = tl.load(items + 3 * item + 1)
    highest = tl.load(items + 3 * item + 2)
    if WHOLE:  # noqa: SIM102 - decided when compiling
        if count == 0:  # capacity for a text that is not there
            return
    begin = 0
    stop = highest
    if not WHOLE:
        part = parts - 1 - tl.program_id(0) % parts  # the longest splits first
        if SPAN == 1:
            begin = _split_start(part)
            stop = _split_start(part + 1)
        else:
            begin = _split_start(_first_split_from(part * (SPAN * BLOCK)))
            stop = _split_start(_first_split_from((part + 1) * (SPAN * BLOCK)))
        stop = tl.minimum(stop, highest)
        if begin >= stop:
            return
    lane = tl.arange(0, TILE)
    valid = (lane // PADDED < count) & (lane % PADDED < GROUP)
    row = tl.where(valid, start + lane // PADDED, start)
    head = kv * GROUP + lane % PADDED
    d = tl.arange(0, WIDE)[None, :]
    limit = tl.load(prefix + row)
    if TAIL:
        limit = tl.where(tl.load(ancestors + row) != 0, limit // BLOCK * BLOCK, limit)
    limit = tl.where(valid, limit, 0)
    position = tl.load(positions + row)
    first = tl.where(valid, tl.maximum(position + 1 - window, 0), 2147483647)
    if WINDOW:
        begin = tl.maximum(begin, tl.min(first, 0) // BLOCK * BLOCK)
    entries = table + tl.load(table_rows + start).to(tl.int64) * table_stride
    columns = tl.arange(0, BLOCK)
    at_q = row.to(tl.int64) * (HEADS * DIM) + head * DIM
    looped = stop
    if FRESH:
        if begin >= stop:
            return
        # What earlier passes wrote is there: each pass begins with a launch that waits for all before it.
        looped = begin + (stop - begin - 1) // BLOCK * BLOCK
        own = tl.load(positions + start)
        c = looped + columns
        held = (c < highest) & (c != own)
        places = tl.load(entries + c, mask=held, other=0)
        last_k, last_v = _load_block(
            keys, values, None, None, places, held, kv, d, keys.dtype.element_ty, DIM, KV_HEADS, INT8
        )
        angle = own.to(tl.int64) * (DIM // 2) + tl.where(d < DIM // 2, d, d - DIM // 2)
        turn_c = tl.load(cos + angle, mask=d < DIM, other=0.0)
        turn_s = tl.load(sin + angle, mask=d < DIM, other=0.0)
        slot = tl.load(slots + start).to(tl.int64)
    await_previous(CHAIN)
    if FRESH:
        width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
        stride = made_stride.to(tl.int64)
        at_row = start.to(tl.int64) * width
        queries = _turned(
            made, at_row + head[:, None] * DIM, stride, turn_c, turn_s, d, valid[:, None] & (d < DIM), DIM, PARTS
        ).to(keys.dtype.element_ty)  # fmt: skip
    else:
        queries = tl.load(q + at_q[:, None] + d, mask=valid[:, None] & (d < DIM), other=0.0)
    to_state = (row.to(tl.int64) * HEADS + head) * (splits + 2)
    m = tl.full((TILE,), float("-inf"), tl.float32)
    w = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, WIDE), tl.float32)
    total_m = tl.full((TILE,), float("-inf"), tl.float32)
    total_w = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, WIDE), tl.float32)
    for at in range(begin, looped, BLOCK):
        c = at + columns
        held = c < highest
        places = tl.load(entries + c, mask=held, other=0)
        k, v = _load_block(
            keys, values, key_scales, value_scales, places, held, kv, d, queries.dtype, DIM, KV_HEADS, INT8
        )
        m, w, acc, total_m, total_w, total = _take_block(
            queries, k, v, at, c, limit, first, highest, scale, m, w, acc, total_m, total_w, total,
            sums, stats, to_state, valid, d, TILE, DIM, WIDE, BLOCK, WINDOW, WHOLE,
        )  # fmt: skip
    if FRESH:
        c = looped + columns
        if (own >= looped) & (own < looped + BLOCK):
            at_k = at_row + (HEADS + kv) * DIM
            new_k = _turned(made, at_k, stride, turn_c, turn_s, d, d < DIM, DIM, PARTS).to(last_k.dtype)
            new_v = sum_parts(made, at_k + KV_HEADS * DIM + d, stride, d < DIM, PARTS).to(last_v.dtype)
            kept = slot * (KV_HEADS * DIM) + kv * DIM + d
            tl.store(keys + kept, new_k, mask=d < DIM)
            tl.store(values + kept, new_v, mask=d < DIM)
            last_k = tl.where((c == own)[:, None], new_k, last_k)
            last_v = tl.where((c == own)[:, None], new_v, last_v)
        m, w, acc, total_m, total_w, total = _take_block(
            queries, last_k, last_v, looped, c, limit, first, highest, scale, m, w, acc, total_m, total_w, total,
            sums, stats, to_state, valid, d, TILE, DIM, WIDE, BLOCK, WINDOW, WHOLE,
        )  # fmt: skip
    if WHOLE:
        if SINKS:
            total_m, total_w, total = _fold_sinks(total_m, total_w, total, sinks, head, valid)
        result = total / tl.where(total_w == 0.0, 1.0, total_w)[:, None]
        tl.store(out + at_q[:, None] + d, result.to(out.dtype.element_ty), mask=valid[:, None] & (d < DIM))


@kernel(do_not_specialize=["window", "splits"])
def _combine_kernel(
    sums, stats, out, prefix, positions, ancestors, sinks, window, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr, SINKS: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """One row and head: its splits folded in order, the node's own blocks each into the split it lies in."""
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    d = tl.arange(0, WIDE)[None, :]
    limit = tl.load(prefix + row)
    end = tl.load(positions + row) + 1
    tree = 0
    if TAIL:
        tree = tl.where(tl.load(ancestors + row) != 0, 1, 0)
        limit = tl.where(tree > 0, limit // BLOCK * BLOCK, limit)
    begin = 0
    if WINDOW:
        begin = _split_of(tl.maximum(end - window, 0))
    await_previous(CHAIN)
    at = (row * HEADS + head) * (splits + 2)
    stop = _split_of(end - 1) + 1
    if TAIL:
        m0, w0, acc0 = _load_state(sums, stats, at + splits, d, tree, DIM)
        second = tl.where(limit + BLOCK < end, tree, 0)
        m1, w1, acc1 = _load_state(sums, stats, at + splits + 1, d, second, DIM)
        stop = tl.where(tree > 0, _split_of(limit), stop)  # from there on a node's own blocks count
    total_m = tl.full((1,), float("-inf"), tl.float32)
    total_w = tl.zeros((1,), tl.float32)
    total = tl.zeros((1, WIDE), tl.float32)
    for chunk in range(begin, stop, DEPTH):
        for i in tl.static_range(
            DEPTH
        ):  # unrolled, so that the loads of all of them are on their way at once
            s = chunk + i
            m, w, acc = _load_state(sums, stats, at + s, d, stop - s, DIM)
            total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
    if TAIL:  # noqa: SIM102 - decided when compiling
        if tree > 0:
            s = _split_of(limit)
            begun = tl.where(s >= begin, limit - _split_start(s), 0)
            m, w, acc = _load_state(sums, stats, at + s, d, begun, DIM)
            m, w, acc = _fold(m, w, acc, m0, w0, acc0)
            if _split_of(limit + BLOCK) == s:
                m, w, acc = _fold(m, w, acc, m1, w1, acc1)
                total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
            else:
                total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
                total_m, total_w, total = _fold(total_m, total_w, total, m1, w1, acc1)
    if SINKS:
        total_m, total_w, total = _fold_sinks(total_m, total_w, total, sinks, head, head >= 0)
    result = total / tl.where(total_w == 0.0, 1.0, total_w)[:, None]  # a row of padding sees nothing
    to = out + (row * HEADS + head)[:, None] * DIM + d
    tl.store(to, result.to(out.dtype.element_ty), mask=d < DIM)


@kernel
def _read_kernel(
    table, table_rows, prefix, ancestors, paths, items, table_stride, shared,
    NODES: tl.constexpr, BLOCK: tl.constexpr, TREE: tl.constexpr, SHARE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """A row's path, and with `SHARE` what the rows of the item of that number share."""
    let_next_start(CHAIN)
    row = tl.program_id(0)
    await_previous(CHAIN)
    if TREE:
        i = tl.arange(0, NODES)
        bit = (tl.load(ancestors + row) >> i) & 1
        rank = tl.cumsum(bit.to(tl.int32), 0) - 1
        entry = tl.load(table_rows + row).to(tl.int64) * table_stride + tl.load(prefix + row) + i
        slots = tl.load(table + entry, mask=bit != 0, other=0)
        tl.store(paths + row * NODES + rank, slots, mask=bit != 0)
    if SHARE:  # noqa: SIM102 - decided when compiling
        if row < shared:
            first = tl.load(items + 3 * row)
            if TREE:
                known = tl.load(prefix + first)
                known = tl.where(tl.load(ancestors + first) != 0, known // BLOCK * BLOCK, known)
            else:
                known = tl.load(prefix + first + tl.load(items + 3 * row + 1) - 1)
            tl.store(items + 3 * row + 2, known)


@dataclass(slots=True)
class AttentionPlan:
    """The attention plan of a batch: made once per pass, used by every layer.

    `items` are first row, count and shared entries; rows of one item belong to one sequence. `tree`: some row is
    a draft token.
    """

    items: Tensor  # [I, 3] int32
    paths: Tensor  # [R, 64] int32, slots of a node's path, root's child first
    splits: int  # of the longest text
    tree: bool
    tile: int  # query rows times heads of a group in one program
    sums: Tensor  # [R, heads, splits + 2, dim] float32
    stats: Tensor  # [R, heads, splits + 2, 2]
    whole: bool  # one program does all splits of its rows
    single: bool  # every row is the only one of its text, and known


@dataclass(frozen=True, slots=True)
class JointPlan:
    """The plans of resident rows and of the staged rows after them; each part is read as if it were alone."""

    parts: tuple[tuple[Batch, AttentionPlan], ...]


def tile_for(longest: int, padded: int) -> int:
    """The smallest program that holds the longest run of rows of one text, or the largest for any rows."""
    return next((t for t in TILES if t >= longest * padded), TILES[-1])


def prompt_tile(longest: int, shape: tuple[int, int, int]) -> int:
    """The same for rows without draft nodes, of which long prompts have taller programs."""
    heads, kv_heads, dim = shape
    most = tallest(longest, heads, kv_heads, dim)
    return most if most > TALLEST else tile_for(longest, padded_group(heads, kv_heads))


PLANNED_BY = ("positions", "table_rows", "prefix", "ancestors")  # of a batch's rows


def longest_run(batch: Batch) -> int:
    """The largest number of rows of one sequence, in a batch on the host."""
    _, counts = torch.unique_consecutive(batch.table_rows, return_counts=True)
    return int(counts.max())


def plan_attention(
    batch: Batch, heads: int, kv_heads: int, dim: int, there: Batch | None = None
) -> AttentionPlan:
    """The plan of a batch. `there` is its copy on the device; without it the host waits for the device."""
    there = there or batch
    host = replace(batch, **{name: getattr(batch, name).cpu() for name in PLANNED_BY})
    padded = padded_group(heads, kv_heads)
    tree, longest = bool((host.ancestors != 0).any()), longest_run(host)
    tile = tile_for(longest, padded) if tree else prompt_tile(longest, (heads, kv_heads, dim))
    groups = group_rows(host, tile // padded)
    items = torch.tensor(groups, dtype=torch.int32).to(there.ids.device, non_blocking=True)
    splits = split_count(int(host.positions.max()) + 1)
    single = len(groups) == batch.rows
    attention = make_attention_plan(items, batch.rows, (heads, kv_heads, dim), splits, tree, tile, single)
    if tree:
        find_paths(there, attention.paths)
    return attention


def make_attention_plan(
    items: Tensor,
    rows: int,
    shape: tuple[int, int, int],
    splits: int,
    tree: bool,
    tile: int,
    single: bool = False,
    busy: int = 0,
) -> AttentionPlan:
    """Buffers for `rows` rows of sequences of up to `splits` splits; shape is heads, kv_heads, dim. `busy` is the usual
    number of non-empty items.
    """
    heads, kv_heads, dim = shape
    enough = ENOUGH // 2 if tile > TILES[0] or splits <= SHORT else ENOUGH
    crowd = splits == 1 or (busy or len(items)) * kv_heads >= enough
    whole = not tree and (crowd or tile == TALL)
    room = 0 if whole else rows * heads * (splits + TAILS)
    return AttentionPlan(
        items=items,
        paths=torch.zeros((rows if tree else 0, NODES), dtype=torch.int32, device=items.device),
        splits=splits,
        tree=tree,
        tile=tile,
        sums=torch.empty(room * dim, dtype=torch.float32, device=items.device),
        stats=torch.empty(room * 2, dtype=torch.float32, device=items.device),
        whole=whole,
        single=single and not tree,
    )


def plan_staged(part: StagedPart, shape: tuple[int, int, int], context: int) -> AttentionPlan:
    """How a part of staged rows is read, in groups that the host staged with them."""
    heads, kv_heads, _ = shape
    rows, tree = part.batch.rows, part.branching
    padded = padded_group(heads, kv_heads)
    tile = max(tile_for(part.together, padded), part.together * padded)
    busy = -(-rows // part.together)
    plan = make_attention_plan(part.groups, rows, shape, split_count(context), tree, tile, busy=busy)
    if tree:
        find_paths(part.batch, plan.paths)
    return plan


def share_entries(batch: Batch, attention: AttentionPlan) -> None:
    """Computes, on the device, what each item's rows share, and the paths of rows that branch. Rows of an item are at
    rising positions, or of one tree with its root first.
    """
    _read(batch, attention.paths, attention.items, attention.tree)


def find_paths(batch: Batch, paths: Tensor) -> None:
    """The slots of every draft row's path, by depth."""
    _read(batch, paths, None, True)


def _read(batch: Batch, paths: Tensor, items: Tensor | None, tree: bool) -> None:
    shared = 0 if items is None else len(items)
    _read_kernel[(batch.rows if tree else shared,)](
        batch.table, batch.table_rows, batch.prefix, batch.ancestors, paths, items, batch.table.stride(0), shared,
        NODES=NODES, BLOCK=BLOCK, TREE=tree, SHARE=items is not None, num_warps=1, **chained(),
    )  # fmt: skip


def share_entries_twin(batch: Batch, attention: AttentionPlan) -> None:
    first, count = attention.items[:, 0].long(), attention.items[:, 1]
    if not attention.tree:
        attention.items[:, 2] = batch.prefix[first + count - 1]
        return
    known = batch.prefix[first]
    attention.items[:, 2] = torch.where(batch.ancestors[first] != 0, known // BLOCK * BLOCK, known)
    for row, (owner, known, mask) in enumerate(
        zip(batch.table_rows.tolist(), batch.prefix.tolist(), batch.ancestors.tolist(), strict=True)
    ):
        seen = [known + i for i in range(NODES) if mask >> i & 1]
        attention.paths[row, : len(seen)] = batch.table[owner, seen]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Queries, keys and values of a pass as the matmul left them."""

    parts: Tensor  # [P, R, (heads + 2 kv_heads) * dim] float32
    tables: tuple[Tensor, Tensor]  # of cosines and sines
    norms: tuple[Tensor, Tensor, float] | None  # of heads
    gains: Tensor | None = None  # of queries, by position


def attend_parts(
    fresh: Fresh,
    batch: Batch,
    keys: Tensor,
    values: Tensor,
    window: int,
    scale: float,
    attention: AttentionPlan | JointPlan,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """As `attend`, for each part of a batch."""
    parts = attention.parts if isinstance(attention, JointPlan) else ((batch, attention),)
    at = 0
    for part, plan in parts:
        rows = slice(at, at + part.rows)
        mine = replace(fresh, parts=fresh.parts[:, rows])
        attend(mine, part, keys, values, window, scale, plan, out[rows], sinks)
        at += part.rows


def attend(
    q: Tensor | Fresh,
    batch: Batch,
    keys: Tensor,
    values: Tensor,
    window: int,
    scale: float,
    attention: AttentionPlan,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """q [R, heads, dim] over what each row sees in the slots -> out [R, heads, dim]. If it is `Fresh`, keys and values
    go to their slots as well. `sinks` are logits [heads], float32.
    """
    rows, heads, dim = out.shape
    kv_heads = keys.shape[1]
    r = attention
    shared = len(r.items)
    span = SPANS[0] if shared * kv_heads < MANY else SPANS[1]
    parts = 1 if r.whole else r.splits if span == 1 else -(-split_end(r.splits) // (span * BLOCK))
    if isinstance(q, Fresh) and (keys.dtype is torch.int8 or not _turns_itself(q, attention, kv_heads)):
        fresh, q = q, torch.empty_like(out)
        rope_and_write(fresh.parts, fresh.tables, batch, fresh.norms, q, keys, values, fresh.gains)
    turning, (key_scales, value_scales) = isinstance(q, Fresh), scales_of(keys, values)
    made, cos, sin = (q.parts, *q.tables) if isinstance(q, Fresh) else (None, None, None)
    if not window and _is_tall(r, keys):
        attend_tall_kernel[(shared * kv_heads,)](
            q, keys, values, batch.table, r.items, batch.table_rows, batch.prefix, out, sinks, batch.table.stride(0),
            scale * LOG2E,
            HEADS=heads, KV_HEADS=kv_heads, PADDED=padded_group(heads, kv_heads), DIM=dim, TILE=TALL, BLOCK=BLOCK,
            BUFFERS=TALL_BUFFERS, SINKS=sinks is not None, num_warps=2 * WARPS, **chained(),
        )  # fmt: skip
        return
    _attend_kernel[(shared * parts + (rows if r.tree else 0), kv_heads)](
        None if turning else q, keys, values, key_scales, value_scales, batch.table, r.items, batch.positions,
        batch.table_rows, batch.prefix, batch.ancestors, r.paths, r.sums, r.stats, out,
        made, cos, sin, batch.slots, sinks, 0 if made is None else made.stride(0),
        batch.table.stride(0), shared, parts, scale * LOG2E, window, r.splits,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, PADDED=padded_group(heads, kv_heads), DIM=dim,
        WIDE=_wide(dim), BLOCK=BLOCK, TILE=r.tile, LOW=TILES[0], NODES=NODES, SPAN=span, WINDOW=window > 0,
        WHOLE=r.whole, TAIL=r.tree, FRESH=turning, PARTS=0 if made is None else len(made), SINKS=sinks is not None,
        INT8=key_scales is not None, num_warps=_warps(r, shared * kv_heads), num_stages=_stages(r.tile, dim),
        **chained(),
    )  # fmt: skip
    if r.whole:
        return
    _combine_kernel[(rows, heads)](
        r.sums, r.stats, out, batch.prefix, batch.positions, batch.ancestors, sinks, window, r.splits,
        HEADS=heads, DIM=dim, WIDE=_wide(dim), BLOCK=BLOCK, WINDOW=window > 0, TAIL=r.tree,
        DEPTH=_at_once(r, dim), SINKS=sinks is not None, num_warps=1, **chained(),
    )  # fmt: skip


def _is_tall(attention: AttentionPlan, keys: Tensor) -> bool:
    fits = keys.shape[2] == TALL_DIM and keys.dtype == torch.bfloat16 and is_hopper() and not INTERPRETED
    return attention.tile == TALL and attention.whole and fits


def _turns_itself(fresh: Fresh, attention: AttentionPlan, kv_heads: int) -> bool:
    programs = len(attention.items) * kv_heads * (1 if attention.whole else attention.splits)
    return attention.single and fresh.norms is None and fresh.gains is None and programs <= TURNING


def _warps(attention: AttentionPlan, programs: int) -> int:
    crowded = attention.whole and attention.tile == TILES[0] and programs >= CROWDED
    return WARPS // 2 if crowded else 2 * WARPS if attention.tile == TALL else WARPS


def _stages(tile: int, dim: int) -> int:
    return (STAGES if dim <= 64 else WIDE_STAGES)[tile]


def _at_once(attention: AttentionPlan, dim: int) -> int:
    """Number of splits whose loads are in flight together during folding."""
    if INTERPRETED:
        return 2
    return 8 if attention.tree else 24 if attention.splits > 16 and dim <= 128 else 16


def _wide(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def attend_twin(
    q: Tensor,
    batch: Batch,
    keys: Tensor,
    values: Tensor,
    window: int,
    scale: float,
    attention: AttentionPlan | None,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """The twin: row by row in float32, with nothing shared."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    for r in range(rows):
        prefix, mask, position = int(batch.prefix[r]), int(batch.ancestors[r]), int(batch.positions[r])
        entries = [*range(prefix), *(prefix + i for i in range(NODES) if mask >> i & 1)]
        first = max(0, position + 1 - window) if window else 0
        slots = batch.table[int(batch.table_rows[r])][entries[first:]].long()
        k, v = (widened(kept[slots]).to(q).float().transpose(0, 1) for kept in (keys, values))
        grouped = q[r].float().view(kv_heads, heads // kv_heads, dim)
        scores = grouped @ k.transpose(1, 2) * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(kv_heads, -1, 1)], -1)
        out[r] = (scores.softmax(-1)[..., : len(slots)] @ v).reshape(heads, dim)
