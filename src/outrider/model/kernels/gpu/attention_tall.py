"""Attention of long prompts on Hopper: 128 query rows in a program, two groups of four warps.

The arithmetic is that of attention.py, and so are the bits. What differs is when things happen: while the tensor core
adds up the values of one block of keys, the weights of the next are computed, and keys and values of those after it
are on their way. Triton's own pipeline waits for each product; so this is written in Gluon, which says where to wait.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider.model.kernels.gpu.ahead import Kernel

# Its name changed between releases of Triton.
_load_later = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)


# As in attention.py, whose functions a kernel in Gluon cannot call.
@gluon.jit
def _split_start(s):
    short = gl.where(s < 8, s * 64, 512 + (s - 8) * 128)
    long = gl.where(s < 44, 2048 + (s - 20) * 256, 8192 + (s - 44) * 512)
    return gl.where(s < 20, short, long)


@gluon.jit
def _split_of(p):
    short = gl.where(p < 512, p // 64, 8 + (p - 512) // 128)
    long = gl.where(p < 8192, 20 + (p - 2048) // 256, 44 + (p - 8192) // 512)
    return gl.where(p < 2048, short, long)


@gluon.jit
def _fold(m, w, acc, m_more, w_more, acc_more):
    top = gl.maximum(m, m_more)
    safe = gl.where(top == float("-inf"), 0.0, top)
    a = gl.exp2(m - safe)
    b = gl.exp2(m_more - safe)
    w = gl.fma(w, a, w_more * b)
    acc = gl.fma(acc, gl.expand_dims(a, 1).broadcast_to(acc.shape), acc_more * gl.expand_dims(b, 1))
    return top, w, acc


@gluon.jit
def _weigh(scores, at, free, limit, columns, scale):
    """The highest scaled score of each row, and what keys weigh relative to it."""
    if at >= free:  # some row does not see all of this block
        seen = gl.expand_dims(at + columns, 0) < gl.expand_dims(limit, 1)
        scores = gl.where(seen, scores, float("-inf"))
    m = gl.max(scores, 1)
    m = gl.fma(m, gl.zeros_like(m) + scale, gl.zeros_like(m))
    less = -gl.expand_dims(gl.where(m == float("-inf"), 0.0, m), 1)
    return m, gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, less.broadcast_to(scores.shape)))


@gluon.jit
def _copy(k_smem, v_smem, keys, values, slots, offsets, STRIDE: gl.constexpr):
    """Sets a block of keys and values on its way."""
    at = gl.expand_dims(slots.to(gl.int64), 1) * STRIDE + gl.expand_dims(offsets, 0)
    _load_later(k_smem, keys + at)
    _load_later(v_smem, values + at)
    async_copy.commit_group()


@gluon.jit
def _attend_tall_kernel(
    q, keys, values, table, items, table_rows, prefix, out, sinks, table_stride, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PADDED: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    BLOCK: gl.constexpr, BUFFERS: gl.constexpr, SINKS: gl.constexpr, CHAIN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One item's rows over everything they see, for the query heads of one key head."""
    if CHAIN:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    WIDTH: gl.constexpr = KV_HEADS * DIM
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 8, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    left_of_sum: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, product)
    scored_row: gl.constexpr = gl.SliceLayout(1, scored)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [num_warps, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    place = gl.program_id(0)
    kv = place % KV_HEADS
    item = place // KV_HEADS
    start = gl.load(items + 3 * item)
    count = gl.load(items + 3 * item + 1)
    highest = gl.load(items + 3 * item + 2)
    if count == 0:  # capacity for a text that is not there
        return
    lane = gl.arange(0, TILE, by_row)
    valid = (lane // PADDED < count) & (lane % PADDED < GROUP)
    row = gl.where(valid, start + lane // PADDED, start)
    head = kv * GROUP + lane % PADDED
    limit = gl.load(prefix + row)
    free = gl.min(limit, 0)
    limit = gl.convert_layout(limit, scored_row)
    free = free // BLOCK * BLOCK
    entries = table + gl.load(table_rows + start).to(gl.int64) * table_stride
    keys += kv * DIM
    values += kv * DIM
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK, DIM], swizzled)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK, DIM], swizzled)
    # Thirty-two bytes change places by row, so that no two lanes that store together meet in a bank.
    total_smem = gl.allocate_shared_memory(gl.float32, [TILE, DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    in_block = gl.arange(0, BLOCK, gl.SliceLayout(1, loads))
    offsets = gl.arange(0, DIM, gl.SliceLayout(0, loads))
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, scored))
    q_lane = gl.arange(0, TILE, gl.SliceLayout(1, loads))
    inside = (q_lane // PADDED < count) & (q_lane % PADDED < GROUP)
    at_q = (start + q_lane // PADDED).to(gl.int64) * (HEADS * DIM) + (kv * GROUP + q_lane % PADDED) * DIM
    blocks = (highest + BLOCK - 1) // BLOCK
    if CHAIN:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    for j in gl.static_range(BUFFERS - 1):
        c = gl.minimum(j * BLOCK + in_block, highest - 1)
        _copy(k_smem.index(j), v_smem.index(j), keys, values, gl.load(entries + c), offsets, WIDTH)
    queries = gl.load(
        q + gl.expand_dims(at_q, 1) + gl.expand_dims(offsets, 0), mask=gl.expand_dims(inside, 1), other=0.0
    )
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [TILE, DIM], swizzled, queries)
    ones = gl.full([8, BLOCK], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0]))
    ones_smem = gl.allocate_shared_memory(gl.bfloat16, [8, BLOCK], swizzled, ones)
    total_smem.store(gl.full([TILE, DIM], 0.0, gl.float32, product))
    total_m = gl.full([TILE], float("-inf"), gl.float32, by_row)
    total_w = gl.full([TILE], 0.0, gl.float32, by_row)
    m = gl.full([TILE], float("-inf"), gl.float32, by_row)
    w = gl.full([TILE], 0.0, gl.float32, by_row)
    acc = gl.full([TILE, DIM], 0.0, gl.float32, product)
    no_scores = gl.full([TILE, BLOCK], 0.0, gl.float32, scored)
    no_values = gl.full([TILE, DIM], 0.0, gl.float32, product)
    no_sums = gl.full([TILE, 8], 0.0, gl.float32, summed)
    async_copy.wait_group(BUFFERS - 2)
    fence_async_shared()
    scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), no_scores, use_acc=False)
    block_m, p = _weigh(scores, 0, free, limit, columns, scale)
    weights = p.to(gl.bfloat16)
    slots = gl.load(entries + gl.minimum((BUFFERS - 1) * BLOCK + in_block, highest - 1))
    for j in range(blocks):
        async_copy.wait_group(BUFFERS - 3)  # block j + 1 is there
        fence_async_shared()
        coming = warpgroup_mma(
            q_smem, k_smem.index((j + 1) % BUFFERS).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        adding = warpgroup_mma(
            gl.convert_layout(weights, left),
            v_smem.index(j % BUFFERS),
            no_values,
            use_acc=False,
            is_async=True,
        )
        summing = warpgroup_mma(
            gl.convert_layout(weights, left_of_sum),
            ones_smem.permute((1, 0)),
            no_sums,
            use_acc=False,
            is_async=True,
        )
        # What lay there was block j - 1: all its products ended before the barrier above.
        ahead = (j + BUFFERS - 1) % BUFFERS
        _copy(k_smem.index(ahead), v_smem.index(ahead), keys, values, slots, offsets, WIDTH)
        slots = gl.load(entries + gl.minimum((j + BUFFERS) * BLOCK + in_block, highest - 1))
        scores = warpgroup_mma_wait(2, deps=[coming])
        next_m, p = _weigh(scores, (j + 1) * BLOCK, free, limit, columns, scale)
        more, sums = warpgroup_mma_wait(0, deps=[adding, summing])
        block_m = gl.convert_layout(block_m, by_row)
        m, w, acc = _fold(m, w, acc, block_m, gl.convert_layout(gl.max(sums, 1), by_row), more)
        end = (j + 1) * BLOCK
        if (end >= highest) | (end == _split_start(_split_of(end - BLOCK) + 1)):
            total = total_smem.load(product)
            total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
            total_smem.store(total)
            m = gl.full([TILE], float("-inf"), gl.float32, by_row)
            w = gl.full([TILE], 0.0, gl.float32, by_row)
            acc = gl.full([TILE, DIM], 0.0, gl.float32, product)
        block_m = next_m
        weights = p.to(gl.bfloat16)
    async_copy.wait_group(0)
    total = total_smem.load(product)
    if SINKS:
        sink = gl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
        one = gl.full([TILE], 1.0, gl.float32, by_row)
        total_m, total_w, total = _fold(total_m, total_w, total, sink, one, no_values)
    result = total / gl.expand_dims(gl.where(total_w == 0.0, 1.0, total_w), 1)
    to = row.to(gl.int64) * (HEADS * DIM) + head * DIM
    to = gl.expand_dims(to, 1) + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, product)), 0)
    gl.store(out + to, result.to(out.dtype.element_ty), mask=gl.expand_dims(valid, 1))


attend_tall_kernel = Kernel(_attend_tall_kernel)
