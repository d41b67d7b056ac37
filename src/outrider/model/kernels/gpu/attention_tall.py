"""Attention of long prompts on Hopper: 128 query rows in a program, two groups of four warps.

The arithmetic is that of attention.py, and so are the bits. What differs is when things happen: while the tensor core
adds the values of one step of keys, the weights of the next are computed, and keys and values of those after it are on
their way. Triton's own pipeline waits for each product; so this is written in Gluon, which says where to wait.
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


@gluon.jit
def _split_start(s):
    short = gl.where(s < 16, s * 128, 2048 + (s - 16) * 256)
    return gl.where(s < 40, short, 8192 + (s - 40) * 512)


@gluon.jit
def _split_of(p):
    short = gl.where(p < 2048, p // 128, 16 + (p - 2048) // 256)
    return gl.where(p < 8192, short, 40 + (p - 8192) // 512)


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
def _weights(scores, top, scale):
    less = -gl.expand_dims(gl.where(top == float("-inf"), 0.0, top), 1)
    return gl.exp2(gl.fma(scores, gl.zeros_like(scores) + scale, less.broadcast_to(scores.shape)))


@gluon.jit
def _sum_64(p):
    rows: gl.constexpr = p.shape[0]
    p = gl.sum(p.reshape([rows, 2, 32]), 1)
    p = gl.sum(p.reshape([rows, 2, 16]), 1)
    p = gl.sum(p.reshape([rows, 2, 8]), 1)
    p = gl.sum(p.reshape([rows, 4, 2]), 2)
    p = gl.sum(p.reshape([rows, 2, 2]), 1)
    return gl.sum(p, 1)


@gluon.jit
def _sum_128(p, layout: gl.constexpr):
    return gl.convert_layout(_sum_64(gl.sum(p.reshape([p.shape[0], 2, 64]), 1)), layout)


@gluon.jit
def _top(scores, scale):
    top = gl.max(scores, 1)
    return gl.fma(top, gl.zeros_like(top) + scale, gl.zeros_like(top))


@gluon.jit
def _copy(smem, base, slots, offsets, STRIDE: gl.constexpr):
    async_copy.async_copy_global_to_shared(
        smem, base + (gl.expand_dims(slots.to(gl.int64), 1) * STRIDE + gl.expand_dims(offsets, 0))
    )
    async_copy.commit_group()


@gluon.jit
def _attend_tall_kernel(
    q, keys, values, table, items, positions, table_rows, prefix, out, sinks, table_stride, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PADDED: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STEP: gl.constexpr, NODES: gl.constexpr, SINKS: gl.constexpr, CHAIN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if CHAIN:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    GROUP: gl.constexpr = HEADS // KV_HEADS
    HALF: gl.constexpr = STEP // 2
    WIDTH: gl.constexpr = KV_HEADS * DIM
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 128, 16])
    mma_half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    half_row: gl.constexpr = gl.SliceLayout(1, mma_half)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [num_warps, 1], [1, 0])
    shared_q: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pid = gl.program_id(0)
    kv = pid % KV_HEADS
    item = pid // KV_HEADS
    start = gl.load(items + 3 * item)
    count = gl.load(items + 3 * item + 1)
    highest = gl.load(items + 3 * item + 2)
    if count == 0:
        return

    # rows of the tile, as accumulators hold them
    lane = gl.arange(0, TILE, by_row)
    valid = (lane // PADDED < count) & (lane % PADDED < GROUP)
    row = gl.where(valid, start + lane // PADDED, start)
    head = kv * GROUP + lane % PADDED
    limit = gl.where(valid, gl.load(prefix + row), 0)
    position = gl.load(positions + row)
    bound = gl.maximum(position - (NODES - 1), 0) // STEP * STEP
    low = gl.min(bound, 0)
    high = gl.max(bound, 0)
    entries = table + gl.load(table_rows + start).to(gl.int64) * table_stride
    keys += kv * DIM
    values += kv * DIM

    k_smem = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, DIM], shared_q)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [2, STEP, DIM], shared_q)
    total_smem = gl.allocate_shared_memory(gl.float32, [TILE, DIM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    at_step = gl.arange(0, STEP, gl.SliceLayout(1, loads))
    offsets = gl.arange(0, DIM, gl.SliceLayout(0, loads))

    # known keys of earlier passes may be on their way before the queries are there; this pass's own may not
    if CHAIN:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    q_lane = gl.arange(0, TILE, gl.SliceLayout(1, loads))
    q_row = gl.where(q_lane // PADDED < count, start + q_lane // PADDED, start)
    at_q = q_row.to(gl.int64) * (HEADS * DIM) + (kv * GROUP + q_lane % PADDED) * DIM
    inside = (q_lane // PADDED < count) & (q_lane % PADDED < GROUP)
    queries = gl.load(
        q + gl.expand_dims(at_q, 1) + gl.expand_dims(offsets, 0), mask=gl.expand_dims(inside, 1), other=0.0
    )
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [TILE, DIM], shared_q, queries)
    fence_async_shared()

    total_m = gl.full([TILE], float("-inf"), gl.float32, by_row)
    total_w = gl.full([TILE], 0.0, gl.float32, by_row)
    total_smem.store(gl.full([TILE, DIM], 0.0, gl.float32, mma))
    m = gl.full([TILE], float("-inf"), gl.float32, by_row)
    w = gl.full([TILE], 0.0, gl.float32, by_row)
    acc = gl.full([TILE, DIM], 0.0, gl.float32, mma)
    zeros = gl.full([TILE, STEP], 0.0, gl.float32, mma)

    count_steps = low // STEP
    if count_steps > 0:
        slots = gl.load(entries + at_step)
        next_slots = gl.load(entries + gl.minimum(1, count_steps - 1) * STEP + at_step)
        _copy(k_smem.index(0), keys, slots, offsets, WIDTH)
        _copy(k_smem.index(1), keys, next_slots, offsets, WIDTH)
        _copy(v_smem.index(0), values, slots, offsets, WIDTH)
        async_copy.wait_group(2)
        fence_async_shared()
        scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), zeros, use_acc=False)
        m = _top(scores, scale)
        p = _weights(scores, m, scale)
        w = _sum_128(p, by_row)
        weights = gl.convert_layout(p.to(gl.bfloat16), left)
        for j in range(count_steps - 1):
            # On their way: keys of step j + 1, then values of step j.
            slots = next_slots
            next_slots = gl.load(entries + gl.minimum(j + 2, count_steps - 1) * STEP + at_step)
            async_copy.wait_group(1)
            fence_async_shared()
            coming = warpgroup_mma(
                q_smem, k_smem.index((j + 1) % 2).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            async_copy.wait_group(0)
            fence_async_shared()
            adding = warpgroup_mma(weights, v_smem.index(j % 2), acc, is_async=True)
            # Everyone is done with what lay there: products of step j - 1 ended before the barriers above.
            _copy(k_smem.index(j % 2), keys, next_slots, offsets, WIDTH)
            _copy(v_smem.index((j + 1) % 2), values, slots, offsets, WIDTH)
            scores = warpgroup_mma_wait(1, deps=[coming])
            ends = (j + 1) * STEP == _split_start(_split_of(j * STEP) + 1)
            m_before = gl.where(ends, float("-inf"), m)
            w_before = gl.where(ends, 0.0, w)
            top = gl.maximum(m_before, _top(scores, scale))
            a = gl.exp2(m_before - top)
            p = _weights(scores, top, scale)
            w_next = gl.fma(w_before, a, _sum_128(p, by_row))
            acc = warpgroup_mma_wait(0, deps=[adding])
            if ends:
                total = total_smem.load(mma)
                total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
                total_smem.store(total)
                acc = gl.full([TILE, DIM], 0.0, gl.float32, mma)
            acc = acc * gl.expand_dims(a, 1)
            m = top
            w = w_next
            weights = gl.convert_layout(p.to(gl.bfloat16), left)
        async_copy.wait_group(0)
        fence_async_shared()
        acc = warpgroup_mma(weights, v_smem.index((count_steps - 1) % 2), acc)
        if low == _split_start(_split_of(low - STEP) + 1):
            total = total_smem.load(mma)
            total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
            total_smem.store(total)
            m = gl.full([TILE], float("-inf"), gl.float32, by_row)
            w = gl.full([TILE], 0.0, gl.float32, by_row)
            acc = gl.full([TILE, DIM], 0.0, gl.float32, mma)

    limit_half = gl.convert_layout(limit, half_row)
    bound_half = gl.convert_layout(bound, half_row)
    columns = gl.arange(0, STEP, gl.SliceLayout(0, mma))
    half_columns = gl.arange(0, HALF, gl.SliceLayout(0, mma_half))
    zeros_half = gl.full([TILE, HALF], 0.0, gl.float32, mma_half)
    for at in range(low, highest, STEP):
        gl.thread_barrier()
        slots = gl.load(entries + at + at_step, mask=at + at_step < highest, other=0)
        _copy(k_smem.index(0), keys, slots, offsets, WIDTH)
        _copy(v_smem.index(0), values, slots, offsets, WIDTH)
        async_copy.wait_group(0)
        fence_async_shared()
        if at < high:
            scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), zeros, use_acc=False)
            seen = gl.expand_dims(at + columns, 0) < gl.expand_dims(bound, 1)
            scores = gl.where(seen, scores, float("-inf"))
            top = gl.maximum(m, _top(scores, scale))
            a = gl.exp2(m - gl.where(top == float("-inf"), 0.0, top))
            p = _weights(scores, top, scale)
            w = gl.fma(w, a, _sum_128(p, by_row))
            m = top
            acc = warpgroup_mma(
                gl.convert_layout(p.to(gl.bfloat16), left), v_smem.index(0), acc * gl.expand_dims(a, 1)
            )
        for half in gl.static_range(2):
            c = at + half * HALF + half_columns
            if at + half * HALF < highest:
                scores = warpgroup_mma(
                    q_smem, k_smem.index(0).slice(half * HALF, HALF).permute((1, 0)), zeros_half, use_acc=False
                )
                seen = (gl.expand_dims(c, 0) < gl.expand_dims(limit_half, 1)) & (
                    gl.expand_dims(c, 0) >= gl.expand_dims(bound_half, 1)
                )
                scores = gl.where(seen, scores, float("-inf"))
                m_more = _top(scores, scale)
                p = _weights(scores, m_more, scale)
                w_more = gl.convert_layout(_sum_64(p), by_row)
                m_more = gl.convert_layout(m_more, by_row)
                more = warpgroup_mma(
                    gl.convert_layout(p.to(gl.bfloat16), left),
                    v_smem.index(0).slice(half * HALF, HALF),
                    gl.full([TILE, DIM], 0.0, gl.float32, mma),
                    use_acc=False,
                )
                m, w, acc = _fold(m, w, acc, m_more, w_more, more)
        if (at + STEP >= highest) | (at + STEP == _split_start(_split_of(at) + 1)):
            total = total_smem.load(mma)
            total_m, total_w, total = _fold(total_m, total_w, total, m, w, acc)
            total_smem.store(total)
            m = gl.full([TILE], float("-inf"), gl.float32, by_row)
            w = gl.full([TILE], 0.0, gl.float32, by_row)
            acc = gl.full([TILE, DIM], 0.0, gl.float32, mma)
    total = total_smem.load(mma)
    if SINKS:
        sink = gl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
        none = gl.full([TILE, DIM], 0.0, gl.float32, mma)
        total_m, total_w, total = _fold(total_m, total_w, total, sink, gl.full([TILE], 1.0, gl.float32, by_row), none)
    result = total / gl.expand_dims(gl.where(total_w == 0.0, 1.0, total_w), 1)
    to = row.to(gl.int64) * (HEADS * DIM) + head * DIM
    d = gl.arange(0, DIM, gl.SliceLayout(0, mma))
    gl.store(
        out + gl.expand_dims(to, 1) + gl.expand_dims(d, 0), result.to(out.dtype.element_ty), mask=gl.expand_dims(valid, 1)
    )


attend_tall_kernel = Kernel(_attend_tall_kernel)
