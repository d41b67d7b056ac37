"""What is done to each row by itself: embedding, residual and norm, rotary positions and cache write.

The residual stream is float32, what matmuls read is bfloat16 (whatever dtype the caller's buffers have), and
partial results of a matmul are added here, in order, by the kernel that wants them.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.cache.formats import keep
from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start
from outrider.model.kernels.gpu.matmul import Packed, add_parts
from outrider.model.kernels.reference import rms_norm, rotate
from outrider.types import Batch

NORM_WARPS = 16  # fixed: it decides the order of the sum of squares


@triton.jit
def sum_parts(parts, offsets, stride, mask, PARTS: tl.constexpr):
    total = tl.load(parts + offsets, mask=mask, other=0.0).to(tl.float32)
    for p in tl.static_range(1, PARTS):
        total += tl.load(parts + p * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _sum_experts(
    parts, chosen, weights, shared, gates, row, cols, stride, shared_stride, gates_stride, width, mask,
    PARTS: tl.constexpr, EACH: tl.constexpr, SHARED: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's experts in order, each times its weight and rounded once; then the MLP of all rows."""
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(EACH):
        pair = row * EACH + j
        written = tl.where(tl.load(chosen + pair) >= 0, width, 0)  # not where the row is padding
        one = sum_parts(parts, pair * width + cols, stride, cols < written, PARTS)
        total = tl.fma(one, tl.broadcast_to(tl.load(weights + pair), one.shape), total)
    if SHARED > 0:
        more = sum_parts(shared, row * width + cols, shared_stride, mask, SHARED)
        if GATES > 0:
            gate = 1 / (1 + tl.exp(-sum_parts(gates, row + cols * 0, gates_stride, mask, GATES)))
            total = tl.fma(more, gate, total)
        else:
            total += more
    return total


@kernel(do_not_specialize=["parts_stride", "shared_stride", "gates_stride", "tapped_stride"])
def _norm_kernel(
    x, parts, after, weight, out, picked, tapped, slots, chosen, weights, shared, gates, parts_stride, shared_stride,
    gates_stride, tapped_stride, width, eps, gain,
    PARTS: tl.constexpr, EACH: tl.constexpr, SHARED: tl.constexpr, GATES: tl.constexpr, AFTER: tl.constexpr,
    NORM: tl.constexpr, OUT: tl.constexpr, PICKED: tl.constexpr, TAP: tl.constexpr, BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    place = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    if AFTER:
        scale_after = tl.load(after + cols, mask=mask, other=0.0)
    if NORM:
        scale = tl.load(weight + cols, mask=mask, other=0.0)
    await_previous(CHAIN)
    row = place
    if PICKED:
        row = tl.load(picked + place)
    at = row * width + cols
    h = tl.load(x + at, mask=mask, other=0.0)
    if PARTS > 0:
        if EACH > 0:
            more = _sum_experts(
                parts, chosen, weights, shared, gates, row, cols, parts_stride.to(tl.int64),
                shared_stride.to(tl.int64), gates_stride.to(tl.int64), width, mask,
                PARTS, EACH, SHARED, GATES, BLOCK,
            )  # fmt: skip
        else:
            more = sum_parts(parts, at, parts_stride.to(tl.int64), mask, PARTS)
        if AFTER:
            more = more * tl.rsqrt(tl.sum(more * more, 0) / width + eps) * scale_after
        h += gain * more
        if not PICKED:  # a row may be picked twice: what is picked is read, never written
            tl.store(x + at, h, mask=mask)
    if TAP:
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(tapped + slot * tapped_stride + cols, h.to(tapped.dtype.element_ty), mask=mask)
    if NORM:
        mean = tl.sum(h * h, 0) / width
        h = h * tl.rsqrt(mean + eps) * scale
    if OUT:
        tl.store(out + place * width + cols, h.to(out.dtype.element_ty), mask=mask)


@dataclass(slots=True)
class ExpertParts:
    """What a row's experts gave, by pair (routing.py), and the MLP that all rows share; nothing is added yet."""

    parts: Tensor  # [parts, R * each, width]
    chosen: Tensor  # [R, each] int32, negative for rows of padding
    weights: Tensor  # [R, each]
    shared: Tensor | None = None  # [parts, R, width]
    gates: Tensor | None = None  # [parts, R, 1]: the sigmoid of their sum multiplies what the shared MLP gave

    def total(self) -> Tensor:
        rows, each = self.chosen.shape
        given = add_parts(self.parts).view(rows, each, -1)
        given = torch.where((self.chosen >= 0)[..., None], given, 0.0) * self.weights[..., None]
        total = add_parts(given.transpose(0, 1))
        if self.shared is None:
            return total
        more = add_parts(self.shared)
        return total + (more if self.gates is None else more * add_parts(self.gates).sigmoid())


@dataclass(slots=True)
class Normed:
    """What is normed before it is added."""

    parts: Tensor | ExpertParts
    weight: Tensor  # of the norm


Pending = Tensor | ExpertParts | Normed  # what is still to be added to the stream
Tap = tuple[Tensor, Tensor]  # hidden states by slot [slots, width] that a drafter reads, and the rows' slots


def add_and_norm(
    x: Tensor,
    parts: Pending | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor | None,
    picked: Tensor | None = None,
    gain: float = 1.0,
    tap: Tap | None = None,
) -> None:
    """x += gain times the parts, in place; then out = the RMS norm of x. Either half may be left out; without a weight
    out = x.

    `picked`, int64 [L]: norm those rows only, into out [L, width], and leave x as it is. `tap`: where x goes as well.
    """
    rows, width = x.shape
    count = rows if picked is None else len(picked)
    if not count:
        return
    after = chosen = weights = shared = gates = None
    if isinstance(parts, Normed):
        after, parts = parts.weight, parts.parts
    if isinstance(parts, ExpertParts):
        chosen, weights, shared, gates = parts.chosen, parts.weights, parts.shared, parts.gates
        parts = parts.parts
    tapped, slots = tap or (None, None)
    strides = [0 if one is None else one.stride(0) for one in (parts, shared, gates, tapped)]
    counts = [0 if one is None else len(one) for one in (parts, shared, gates)]
    _norm_kernel[(count,)](
        x, parts, after, weight, out, picked, tapped, slots, chosen, weights, shared, gates, *strides, width, eps, gain,
        PARTS=counts[0], EACH=0 if chosen is None else chosen.shape[1], SHARED=counts[1], GATES=counts[2],
        AFTER=after is not None, NORM=weight is not None, OUT=out is not None, PICKED=picked is not None,
        TAP=tap is not None, BLOCK=triton.next_power_of_2(width), num_warps=NORM_WARPS, **chained(),
    )  # fmt: skip


def add_and_norm_twin(
    x: Tensor,
    parts: Pending | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor | None,
    picked: Tensor | None = None,
    gain: float = 1.0,
    tap: Tap | None = None,
) -> None:
    total = x if parts is None else x + gain * _total(parts, eps)
    if picked is None:
        x.copy_(total)
    else:
        total = total[picked]
    if tap is not None:
        tap[0][tap[1].long()] = total.to(tap[0].dtype)
    if out is not None:
        out.copy_(total if weight is None else rms_norm(total, weight, eps))


def _total(parts: Pending, eps: float) -> Tensor:
    if isinstance(parts, Normed):
        return rms_norm(_total(parts.parts, eps), parts.weight, eps)
    return parts.total() if isinstance(parts, ExpertParts) else add_parts(parts)


# ------------------------------------------------------------------------------------------------ embedding


@kernel
def _embed_kernel(
    ids, weight, out, width, padded, scale, BLOCK: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    value = tl.load(weight + token * padded + c, mask=c < width, other=0.0)
    tl.store(out + row * width + c, value.to(tl.float32) * scale, mask=c < width)


def embed(ids: Tensor, weight: Packed, scale: float = 1.0) -> Tensor:
    """Tokens [R] to their rows of a plain weight, times `scale`, float32 [R, inputs].

    Every pass begins with it, and it starts only once all before it have ended: what is launched after it may read
    what an earlier pass left without waiting for more.
    """
    out = torch.empty((len(ids), weight.inputs), dtype=torch.float32, device=ids.device)
    if len(ids):
        _embed_kernel[(len(ids),)](
            ids, weight.data, out, weight.inputs, weight.width, scale,
            BLOCK=triton.next_power_of_2(weight.inputs), num_warps=4, CHAIN=chained()["CHAIN"],
        )  # fmt: skip
    return out


def embed_twin(ids: Tensor, weight: Packed, scale: float = 1.0) -> Tensor:
    return weight.unpacked()[ids].float() * scale


# ------------------------------------------------------------------------------------- rotation, cache write


@triton.jit
def _mean_square(parts, at, stride, COUNT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of all heads of a row together."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COUNT, BLOCK):
        c = start + tl.arange(0, BLOCK)
        one = sum_parts(parts, at + c, stride, c < COUNT, PARTS)
        total = tl.fma(one, one, total)
    return tl.sum(total, 0) / COUNT


@kernel(do_not_specialize=["parts_stride"])
def _rope_kernel(
    parts, cos, sin, gains, positions, slots, q_norm, k_norm, q, keys, values, key_scales, value_scales, parts_stride,
    eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
    WHOLE: tl.constexpr, GAIN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr,
    INT8: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, BLOCK)[None, :]
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    c = tl.load(cos + position * half + d, mask=d < half, other=0.0)
    s = tl.load(sin + position * half + d, mask=d < half, other=0.0)
    mask = (head < HEADS + 2 * KV_HEADS) & (d < half)
    await_previous(CHAIN)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    at = row * width + head * DIM + d
    stride = parts_stride.to(tl.int64)
    a = sum_parts(parts, at, stride, mask, PARTS)
    b = sum_parts(parts, at + half, stride, mask, PARTS)
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    if NORMED:
        at_q, at_k = d, d
        if WHOLE:
            begin = row * width
            of_q = _mean_square(parts, begin, stride, HEADS * DIM, PARTS, TOTAL)
            of_k = _mean_square(parts, begin + HEADS * DIM, stride, KV_HEADS * DIM, PARTS, TOTAL)
            mean = tl.where(is_q, of_q, of_k)
            at_q, at_k = head * DIM + d, (head - HEADS) * DIM + d
        else:
            mean = ((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM)[:, None]
        inverse = tl.rsqrt(mean + eps)
        on_q, on_k = is_q & (d < half), (head >= HEADS) & (head < HEADS + KV_HEADS) & (d < half)
        gain_a = tl.load(q_norm + at_q, mask=on_q, other=0.0) + tl.load(k_norm + at_k, mask=on_k, other=0.0)
        gain_b = tl.load(q_norm + half + at_q, mask=on_q, other=0.0)
        gain_b += tl.load(k_norm + half + at_k, mask=on_k, other=0.0)
        a = tl.where(is_v, a, a * inverse * gain_a)
        b = tl.where(is_v, b, b * inverse * gain_b)
    # Explicit fused sums: attention.py turns fresh keys by itself, to the same bits.
    first = tl.where(is_v, a, tl.fma(a, c, -(b * s)))
    second = tl.where(is_v, b, tl.fma(b, c, a * s))
    if GAIN:
        gain = tl.where(is_q, tl.load(gains + position), 1.0)
        first, second = first * gain, second * gain
    first, second = first.to(q.dtype.element_ty), second.to(q.dtype.element_ty)
    to_q = q + row * (HEADS * DIM) + head * DIM + d
    tl.store(to_q, first, mask=mask & is_q)
    tl.store(to_q + half, second, mask=mask & is_q)
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    size: tl.constexpr = DIM + 4 if INT8 else DIM
    if INT8:  # of numbers rounded as they are without it
        first, second = first.to(tl.float32), second.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
        top = tl.where(top < 1e-30, 0.0, top)  # 127 / top would overflow
        inverse = 127.0 / tl.where(top > 0.0, top, 1.0)
        # Adding 1.5 * 2^23 rounds to the nearest whole number.
        first = ((first * inverse + 12582912.0) - 12582912.0).to(tl.int8)
        second = ((second * inverse + 12582912.0) - 12582912.0).to(tl.int8)
        at_scale = (slot * KV_HEADS + head) * (size // 4) + DIM // 4
        at_scale -= HEADS * (size // 4)
        tl.store(key_scales + at_scale, top / 127.0, mask=is_k)
        of_v = is_v & (head < HEADS + 2 * KV_HEADS)
        tl.store(value_scales + at_scale - KV_HEADS * (size // 4), top / 127.0, mask=of_v)
    kept = slot * (KV_HEADS * size) + d
    to_k = keys + kept + (head - HEADS) * size
    tl.store(to_k, first, mask=mask & is_k)
    tl.store(to_k + half, second, mask=mask & is_k)
    to_v = values + kept + (head - HEADS - KV_HEADS) * size
    tl.store(to_v, first, mask=mask & is_v)
    tl.store(to_v + half, second, mask=mask & is_v)


def scales_of(keys: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values that are kept in 8 bits, as words: the last of each head is its scale (cache/formats.py)."""
    if keys.dtype is not torch.int8:
        return None, None
    return keys.view(torch.float32), values.view(torch.float32)


def rope_and_write(
    parts: Tensor,
    tables: tuple[Tensor, Tensor],
    batch: Batch,
    norms: tuple[Tensor, Tensor, float] | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    gains: Tensor | None = None,
) -> None:
    """parts [P, R, (heads + 2 kv_heads) * dim]: queries, rotated, to q [R, heads, dim]; keys, rotated, and
    values to their slots. `norms`: weights for queries and keys, of one head or of all of them together, and their
    epsilon. `gains`: of rotated queries, by position.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    together, scales = 8, scales_of(keys, values)
    _rope_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, together))](
        parts, *tables, gains, batch.positions, batch.slots, q_norm, k_norm, q, keys, values, *scales,
        parts.stride(0), eps,
        PARTS=len(parts), HEADS=heads, KV_HEADS=kv_heads, DIM=dim, NORMED=norms is not None,
        WHOLE=norms is not None and len(norms[0]) + len(norms[1]) > 2 * dim, GAIN=gains is not None,
        TOGETHER=together, BLOCK=triton.next_power_of_2(dim // 2),
        TOTAL=min(1024, triton.next_power_of_2(heads * dim)), INT8=scales[0] is not None, num_warps=2, **chained(),
    )  # fmt: skip


def rope_and_write_twin(
    parts: Tensor,
    tables: tuple[Tensor, Tensor],
    batch: Batch,
    norms: tuple[Tensor, Tensor, float] | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    gains: Tensor | None = None,
) -> None:
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    split = add_parts(parts).view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    queries, k, v = split
    if norms is not None:
        queries, k = _normed_heads(queries, norms[0], norms[2]), _normed_heads(k, norms[1], norms[2])
    cos, sin = (table[batch.positions.long()][:, None] for table in tables)
    slots = batch.slots.long()
    turned = rotate(queries, cos, sin)
    q.copy_(turned if gains is None else turned * gains[batch.positions.long()][:, None, None])
    keep(keys, slots, rotate(k, cos, sin).to(q.dtype))
    keep(values, slots, v.to(q.dtype))


def _normed_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    whole = x.flatten(1) if len(weight) > x.shape[2] else x
    return rms_norm(whole, weight, eps).view_as(x)
