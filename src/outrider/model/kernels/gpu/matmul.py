"""Matrix products whose rows do not depend on how many rows there are, to the last bit.

What fixes a result is its order of sums: along the inputs, in steps of the tensor core's 16, one segment after
another; each segment starts from zero, and segments are added in order. The number of segments depends on
the weight's shape alone. Everything else (tile, warps, stages, whether segments are spread over blocks) may
change with the number of rows, because the tensor core adds each output by itself.

A weight takes the tensor core's tall side, so that one row wastes little, and lies in memory as the kernels
read it: 64 outputs by `depth` inputs at a time, each such tile one contiguous stretch.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start

GRAIN = 256  # a segment is a multiple of it, so that every tile depth fits
HIGH = 64  # outputs of a stored tile: the height of Hopper's tensor core


@dataclass(slots=True)
class Packed:
    """A weight [outputs, inputs], or a gate over an up of that shape, tile by tile, padded with zeros."""

    data: Tensor  # [halves, blocks, deep blocks, HIGH, depth]
    outputs: int
    inputs: int

    @property
    def gated(self) -> bool:
        return len(self.data) == 2

    @property
    def depth(self) -> int:
        return self.data.shape[4]

    @property
    def width(self) -> int:
        """Inputs with their padding."""
        return self.data.shape[2] * self.data.shape[4]

    def rows(self, ids: Tensor) -> Tensor:
        """Some outputs' weights, as an embedding is looked up."""
        return self.data[0][ids // HIGH, :, ids % HIGH].flatten(1)[:, : self.inputs]

    def unpacked(self) -> Tensor:
        """[outputs, inputs], gate over up."""
        halves = self.data.transpose(2, 3).reshape(len(self.data), -1, self.width)
        return halves[:, : self.outputs, : self.inputs].flatten(0, 1)


def pack(weight: Tensor, gated: bool = False) -> Packed:
    """[outputs, inputs] as kernels want it; gated: gate over up, each with half of the outputs."""
    halves = 2 if gated else 1
    outputs, inputs = len(weight) // halves, weight.shape[1]
    depth = 128 if inputs % 128 == 0 else 64
    deep, blocks = -(-inputs // depth), -(-outputs // HIGH)
    if (outputs, inputs) != (blocks * HIGH, deep * depth):
        whole = weight.new_zeros((halves, blocks * HIGH, deep * depth))
        whole[:, :outputs, :inputs] = weight.view(halves, outputs, inputs)
    else:
        whole = weight
    tiles = whole.reshape(halves, blocks, HIGH, deep, depth).transpose(2, 3)
    return Packed(tiles.contiguous(), outputs, inputs)


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut. `spread`: one block a segment; else a block does all segments in order."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    spread: bool = False


@triton.jit
def _segment(
    x_rows, there, w_rows, u_rows, first, last, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One segment's sums, from zero: [OUTPUTS, ROWS], twice when gated."""
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    c = tl.arange(0, INPUTS)[None, :]
    for start in range(first, last, INPUTS):
        x = tl.load(x_rows + start + c, mask=there if EVEN else there & (start + c < inputs), other=0.0)
        if INPUTS == DEPTH:
            at = start * HIGH + c
        else:
            at = tl.multiple_of(start // DEPTH * (HIGH * DEPTH) + start % DEPTH, INPUTS) + c
        acc = tl.dot(tl.load(w_rows + at), tl.trans(x), acc)
        if GATED:
            up = tl.dot(tl.load(u_rows + at), tl.trans(x), up)
    return acc, up


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x, weight, bias, out, rows, outputs, inputs, width, half,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row_tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = (tile // row_tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    # Blocks past the end read the last one again and are not stored: no masks on the way.
    block = tl.minimum(n // HIGH, (outputs - 1) // HIGH)
    w_rows = weight + (block.to(tl.int64) * HIGH * width + n % HIGH * DEPTH)[:, None]
    u_rows = w_rows + half
    x_rows = x + m.to(tl.int64)[:, None] * inputs
    there = (m < rows)[:, None]
    first = part * SEGMENT
    last = tl.minimum(first + SEGMENT, width)
    await_previous(CHAIN)
    acc, up = _segment(
        x_rows, there, w_rows, u_rows, first, last, inputs, ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, GATED, EVEN
    )
    if BIASED:
        biased = tl.where(part == 0, outputs, 0)  # once, by the first part
        acc += tl.load(bias + n, mask=n < biased, other=0.0)[:, None]
        if GATED:
            up += tl.load(bias + outputs + n, mask=n < biased, other=0.0)[:, None]
    if not SPREAD:
        for s in tl.static_range(1, SEGMENTS):
            last = tl.minimum((s + 1) * SEGMENT, width)
            more, more_up = _segment(
                x_rows, there, w_rows, u_rows, s * SEGMENT, last, inputs,
                ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, GATED, EVEN,
            )  # fmt: skip
            acc += more
            if GATED:
                up += more_up
    if GATED:
        acc = acc / (1 + tl.exp(-acc)) * up
    at = out + (part * rows + m).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n < outputs)[:, None])


def segments(weight: Packed) -> int:
    """Into how many pieces the sums along the inputs are cut. Part of the arithmetic: rows play no role."""
    if weight.gated or weight.outputs * weight.inputs < 1 << 22 or weight.outputs > 8192:
        return 1
    return 4 if weight.inputs > 2 * weight.outputs else 2


def segment_length(width: int, pieces: int) -> int:
    return -(-width // (pieces * GRAIN)) * GRAIN


def choose_tile(weight: Packed, rows: int) -> Tile:
    """The quickest of the tiles that were measured (bench/gpu/NOTES.md)."""
    deep, gated, few = weight.depth, weight.gated, segments(weight) > 1
    # Three stages leave room beside the blocks of the matmul before, so that these can wait for their turn there.
    stages = 3 if few and weight.outputs > weight.inputs else 4
    if rows <= 16:
        return Tile(16, 64, deep, 4, stages, few)
    if rows <= 32:
        return Tile(32, 64, deep, 4, stages, few)
    if rows <= 64:
        return Tile(64, 64, deep, 4, 4 if gated else 3, few)
    if gated:
        return Tile(128, 128, 64, 8, 4)
    return Tile(128, 64 if weight.outputs > 32_768 else 128, 64, 4, 4, few and rows <= 256)


def multiply(x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> None:
    """x [R, inputs] by weight into out [parts, R, outputs]; the sum of the parts is the result.

    Gated: out is [1, R, outputs] = silu(gate) * up.
    """
    launch_multiply(x, weight, bias, out, segments(weight), choose_tile(weight, len(x)))


def launch_multiply(
    x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor, pieces: int, tile: Tile
) -> None:
    rows, inputs = x.shape
    parts = pieces if tile.spread else 1
    if out.shape != (parts, rows, weight.outputs) or inputs != weight.inputs:
        raise ValueError(
            f"{tuple(x.shape)} by {weight.outputs} x {weight.inputs} does not fit {tuple(out.shape)}"
        )
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(weight.outputs, tile.outputs), parts)
    _matmul_kernel[grid](
        x, weight.data, bias, out, rows, weight.outputs, inputs, weight.width, weight.data.stride(0),
        SEGMENT=segment_length(weight.width, pieces), SEGMENTS=pieces, SPREAD=tile.spread,
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, HIGH=HIGH, DEPTH=weight.depth,
        GATED=weight.gated, BIASED=bias is not None, EVEN=inputs == weight.width,
        num_warps=tile.warps, num_stages=tile.stages, **chained(),
    )  # fmt: skip


def parts_of(weight: Packed, rows: int) -> int:
    """How many partial results `multiply` leaves to be added."""
    return segments(weight) if choose_tile(weight, rows).spread else 1


def multiply_parts(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """[parts, R, outputs] float32, not yet added."""
    parts = x.new_empty((parts_of(weight, len(x)), len(x), weight.outputs), dtype=torch.float32)
    if len(x):
        multiply(x, weight, bias, parts)
    return parts


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """x [R, inputs] by weight -> [R, outputs] float32."""
    return add_parts(multiply_parts(x, weight, bias))


def add_parts(parts: Tensor) -> Tensor:
    """The parts in order, as every kernel that takes parts adds them."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def gated_linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up -> [R, outputs] in x's dtype."""
    out = x.new_empty((1, len(x), weight.outputs))
    if len(x):
        multiply(x, weight, bias, out)
    return out[0]


# ---------------------------------------------------------------------------------------------------- twins


def linear_twin(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    result = x.double() @ weight.unpacked().double().T
    return (result if bias is None else result + bias.double()).float()


def gated_twin(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    gate, up = linear_twin(x, weight, bias).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
