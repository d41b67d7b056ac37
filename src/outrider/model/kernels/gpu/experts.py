"""Products of rows with their experts' weights. A row of the result has the bits that matmul.py gives it with that
expert's weight alone: sums along the inputs are cut and added as there.

A tile is up to `Tile.rows` pairs of one expert (routing.py). Rows are read where they lie and results written by pair,
so nothing is moved. Grids have room for as many tiles as there may be; blocks without a tile end at once, so the
launch does not depend on the choice, and a graph can capture it.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu import mxfp4
from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start
from outrider.model.kernels.gpu.matmul import (
    SPREAD_ROWS,
    Packed,
    Tile,
    check_steps,
    finished,
    gated_twin,
    kernel_options,
    linear_twin,
    one_segment,
    outputs_of,
    segments,
    weight_rows,
)
from outrider.model.kernels.gpu.quantise import KINDS
from outrider.model.kernels.gpu.routing import Schedule

LOWEST, TALLEST = 16, 128  # rows of a tile


@kernel(do_not_specialize=["rows"])
def _experts_kernel(
    x, weight, scales, bias, out, pairs, counts, rows, outputs, inputs, width, half, scales_half, expert_size,
    expert_scales, all_pairs,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, SINGLE: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, IN_ONE: tl.constexpr, GROUPED: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    made: tl.constexpr = OUTPUTS // 2 if PAIRED else OUTPUTS
    blocks = tl.cdiv(outputs, made)
    tile = tl.program_id(0) // blocks
    part = tl.program_id(1)
    n, side = outputs_of(tl.program_id(0) % blocks, OUTPUTS, PAIRED)
    at = tl.arange(0, ROWS)
    await_previous(CHAIN)
    if SINGLE:  # a tile is a pair of the only row
        expert = tl.load(counts + tile)
        first_row = 0
        last_row = (expert >= 0).to(tl.int32)
    else:
        lane = tl.arange(0, LANES)
        count = tl.load(counts + lane, mask=lane < EXPERTS, other=0)
        tiles = (count + (ROWS - 1)) // ROWS
        ends = tl.cumsum(tiles, 0)
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        mine = lane == expert
        first_row = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * ROWS
        last_row = tl.sum(tl.where(mine, count, 0), 0)
    if first_row >= last_row:
        return
    at += first_row
    pair = tile + at
    if not SINGLE:
        pair = tl.load(pairs + expert.to(tl.int64) * rows + at, mask=at < last_row, other=0)
    there = (at < last_row)[:, None]
    x_rows = x + (pair // TOP).to(tl.int64)[:, None] * inputs
    own = weight + expert.to(tl.int64) * expert_size
    w_rows, block = weight_rows(own, n, outputs, width, HIGH, DEPTH, KIND, IN_ONE)
    u_rows = w_rows + half
    if PAIRED:
        w_rows += (side.to(tl.int64) * half)[:, None]
    s_rows = scales
    t_rows = scales
    if KIND != "bfloat16":
        s_rows = scales + expert.to(tl.int64) * expert_scales
        s_rows += block * (HIGH * (width // DEPTH if GROUPED else 1)) + n % HIGH
        if PAIRED:
            s_rows += side * scales_half
        t_rows = s_rows + scales_half
    if BIASED:
        bias += expert.to(tl.int64) * (outputs * (2 if GATED or PAIRED else 1))
    first = part * SEGMENT
    acc, up = one_segment(
        x_rows, there, w_rows, u_rows, s_rows, t_rows, first, tl.minimum(first + SEGMENT, width), inputs,
        ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, KIND, IN_ONE, GROUPED, GATED, EVEN, PARTIAL,
    )  # fmt: skip
    acc = finished(
        acc, up, bias, part, n, side, x_rows, there, w_rows, u_rows, s_rows, t_rows, outputs, inputs, width,
        SEGMENT, SEGMENTS, SPREAD, ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, KIND, IN_ONE, GROUPED, GATED, PAIRED, BIASED,
        EVEN, PARTIAL, ACTIVATION, CLAMP, out.dtype.element_ty,
    )  # fmt: skip
    if PAIRED:
        n = tl.program_id(0) % blocks * made + tl.arange(0, made)
    to = out + (part.to(tl.int64) * all_pairs + pair)[None, :] * outputs + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=tl.trans(there) & (n < outputs)[:, None])


def most_tiles(experts: int, rows: int, top: int, tile_rows: int) -> int:
    """Tiles that `rows` rows with `top` experts each may need: an expert has at most one tile that is not full."""
    pairs = rows * top
    touched = min(experts, pairs)
    return min((pairs + touched * (tile_rows - 1)) // tile_rows, touched * -(-rows // tile_rows))


def choose_tile(weight: Packed, rows: int, top: int) -> Tile:
    """Room for twice the mean number of an expert's rows, so that few experts are read twice. Tiles are those of
    matmul.py that were measured with as many rows; those of MXFP4 and of one row were measured with experts (log/121).
    """
    likely = 2 * -(-rows * top // weight.experts)
    tall = max(LOWEST, min(TALLEST, rows, triton.next_power_of_2(likely)))
    tall = triton.next_power_of_2(tall)
    spread = segments(weight) > 1 and rows * top <= SPREAD_ROWS
    # One row has few blocks: gates beside their ups make twice as many, which multiprocessors share more evenly.
    paired = rows == 1 and weight.gated
    if weight.kind == mxfp4.KIND:  # numbers are made in registers
        if tall > 64:
            return Tile(64, 128, mxfp4.DEPTH, 8, 4, spread)
        return Tile(tall, 64, mxfp4.DEPTH * (1 + paired), 4, 4, spread, paired=paired)
    if tall < TALLEST:
        stages = 3 if paired or (tall == 64 and not weight.gated) else 4
        return Tile(tall, 64, weight.step, 4, stages, spread, paired=paired)
    if weight.kind in KINDS:
        return Tile(64, 128, weight.depth, 8, 4 if weight.gated else 3, spread)
    return Tile(TALLEST, 128, 64, 8, 4, spread)


def multiply_experts(
    x: Tensor, weight: Packed, bias: Tensor | None, plan: Schedule, top: int, out: Tensor, tile: Tile
) -> None:
    """Row `pair // top` of x by its expert's weight into row `pair` of out [parts, pairs, outputs], for every pair that
    is scheduled; other rows stay as they are.
    """
    experts, rows = weight.experts if plan.single else len(plan.pairs), plan.rows
    parts = segments(weight) if tile.spread else 1
    if out.shape[::2] != (parts, weight.outputs) or x.shape[1] != weight.inputs or weight.experts != experts:
        raise ValueError(
            f"{tuple(x.shape)} by {experts} x {weight.outputs} x {weight.inputs} does not fit {tuple(out.shape)}"
        )
    check_steps(weight, segments(weight), tile)
    pairs = out.shape[1]
    tiles = most_tiles(experts, rows, max(1, pairs // max(rows, 1)), tile.rows)
    if not tiles:
        return
    data, scales = weight.data, weight.scales
    _experts_kernel[(tiles * triton.cdiv(weight.outputs, tile.made), parts)](
        x, data, scales, bias, out, plan.pairs, plan.counts, rows, weight.outputs, weight.inputs, weight.width,
        data.stride(0), 0 if scales is None else scales.stride(0), weight.blocks * data.stride(1),
        0 if scales is None else weight.blocks * scales.stride(1), pairs,
        EXPERTS=experts, LANES=triton.next_power_of_2(experts), TOP=top, SINGLE=plan.single,
        **kernel_options(weight, bias, segments(weight), tile), **chained(),
    )  # fmt: skip


def gated_experts(
    x: Tensor, weight: Packed, bias: Tensor | None, plan: Schedule, top: int, tile: Tile | None = None
) -> Tensor:
    """activation(gate) * up of each pair -> [R * top, outputs] in x's dtype. x has a row for each row or each pair."""
    rows = plan.rows
    out = x.new_empty((1, rows * top, weight.outputs))
    each = top if len(x) == rows else 1
    multiply_experts(x, weight, bias, plan, each, out, tile or choose_tile(weight, rows, top))
    return out[0]


def expert_parts(
    act: Tensor, weight: Packed, bias: Tensor | None, plan: Schedule, tile: Tile | None = None
) -> Tensor:
    """Each pair's row by its expert's weight -> [parts, R * top, outputs] float32, not yet added."""
    rows = plan.rows
    tile = tile or choose_tile(weight, rows, len(act) // max(rows, 1))
    parts = segments(weight) if tile.spread else 1
    out = act.new_empty((parts, len(act), weight.outputs), dtype=torch.float32)
    multiply_experts(act, weight, bias, plan, 1, out, tile)
    return out


# ---------------------------------------------------------------------------------------------------- twin


def experts_twin(
    x: Tensor, weight: Packed, bias: Tensor | None, plan: Schedule, top: int, out: Tensor
) -> None:
    """As `multiply_experts` into one part."""
    for expert, count in enumerate(plan.counts.tolist()):
        pairs = plan.pairs[expert, :count].long()
        own, added = weight.of_expert(expert), None if bias is None else bias[expert]
        product = gated_twin if weight.gated else linear_twin
        out[0, pairs] = product(x[pairs // top], own, added).to(out.dtype)
