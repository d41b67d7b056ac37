"""Matrix products whose rows do not depend on how many rows there are, to the last bit.

What fixes a result is its order of sums: along the inputs, in steps of the tensor core's 16, one segment after
another; each segment starts from zero, and segments are added in order. The number of segments depends on
the weight's shape alone. Everything else (tile, warps, stages, whether segments are spread over blocks) may
change with the number of rows, because the tensor core adds each output by itself.

A weight takes the tensor core's tall side, so that one row wastes little. A plain weight lies row by row, padded with
zeros, so that cuBLASLt can read it, too (library.py).

A weight in fewer bits (quantise.py, mxfp4.py) lies as the kernels read it: 64 outputs by `depth` inputs at a time, each
such tile contiguous. In registers it becomes the bfloat16 that it stands for, so a product has that matrix's bits.
For many rows the library multiplies it, once it has been written out as such a matrix.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.load.quants import Blocks
from outrider.model.kernels import reference
from outrider.model.kernels.gpu import mxfp4
from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import COMPILED, await_previous, chained, let_next_start
from outrider.model.kernels.gpu.library import Library, gated, padded_rows
from outrider.model.kernels.gpu.mxfp4 import widened_exactly
from outrider.model.kernels.gpu.quantise import KINDS, dequantised, quantised, settled, widened

GRAIN = 256  # a segment is a multiple of it, so that every tile depth fits
HIGH = 64  # outputs of a stored tile: the height of Hopper's tensor core
ENOUGH_BLOCKS = 128  # that keep every multiprocessor reading
SHORTEST_SEGMENT = 512
WIDEST_CUT = 8192  # outputs of a weight that has segments at all
ENOUGH_UNSPREAD = 96  # blocks of a tile of up to 64 rows that do as well alone
FEW_OUTPUTS = 4 * HIGH  # as of a router: so few blocks have a multiprocessor's memory each (log/121)
LARGE = 64  # blocks of a plain weight: few rows lose nothing by fewer segments, and sums of many rows are read sooner
SPREAD_ROWS = 2048  # up to which partial sums are worth their memory
# Of an H200: multiprocessors, bytes of shared memory in each, and those that the driver takes of them for a block.
MULTIPROCESSORS, SHARED, RESERVED = 132, 228 << 10, 1 << 10
AT_ONCE = 64  # blocks of HIGH outputs that are packed together; more would only take more memory


@dataclass(slots=True)
class Packed:
    """A weight [outputs, inputs], or a gate over an up of that shape, padded with zeros. Experts lie one above the
    other.
    """

    # [halves, blocks of all experts, deep blocks, HIGH, depth in stored numbers]; plain weights have one deep block
    data: Tensor
    outputs: int
    inputs: int
    # Or one of quantise.KINDS, or mxfp4.KIND, which is bfloat16 in fewer bytes; that stands for whatever is multiplied.
    kind: str = "bfloat16"
    scales: Tensor | None = None  # [halves, blocks of all experts, deep blocks or 1, HIGH]
    library: Library | None = None  # for passes of many rows
    whole: int = 0  # outputs of all ranks' parts, which decide the order of sums; 0: `outputs`
    experts: int = 1  # `outputs` are one's
    activation: str = "silu"  # of the gate, if there is one: one of config.ACTIVATIONS, or CLAMPED
    clamp: float = 0.0  # as LayerSpec has it

    @property
    def gated(self) -> bool:
        return len(self.data) == 2

    @property
    def depth(self) -> int:
        """Inputs of a tile."""
        stored = self.data.shape[4] * _inputs_in_one(self.kind)
        return _tile_depth(stored) if self.scales is None else stored

    @property
    def step(self) -> int:
        """Inputs that a block reads at a time, for few rows."""
        return self.depth if self.kind in KINDS else min(128, self.width)

    @property
    def width(self) -> int:
        """Inputs with their padding."""
        return self.data.shape[2] * self.data.shape[4] * _inputs_in_one(self.kind)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def blocks(self) -> int:
        """Of HIGH outputs, of one expert."""
        return -(-self.outputs // HIGH)

    @property
    def rows(self) -> Tensor:
        """A plain weight as a matrix, where it lies: with the padding of its halves and inputs."""
        return self.data.flatten(0, 3)

    def of_expert(self, number: int) -> Packed:
        """One expert's weight, where it lies."""
        mine = slice(number * self.blocks, (number + 1) * self.blocks)
        scales = None if self.scales is None else self.scales[:, mine]
        return replace(self, data=self.data[:, mine], scales=scales, experts=1)

    def unpacked(self) -> Tensor:
        """[outputs, inputs], gate over up."""
        rows = self.data.transpose(2, 3).flatten(0, 2)
        if self.scales is None:
            whole = rows.flatten(1)
        else:
            made = mxfp4.dequantised if self.kind == mxfp4.KIND else partial(dequantised, kind=self.kind)
            whole = made(rows, self.scales.transpose(2, 3).flatten(0, 2))
        halves = whole.unflatten(0, (len(self.data), -1))
        return halves[:, : self.outputs, : self.inputs].flatten(0, 1)


def _inputs_in_one(kind: str) -> int:
    return KINDS[kind].inputs if kind in KINDS else mxfp4.IN_WORD if kind == mxfp4.KIND else 1


def _tile_depth(inputs: int) -> int:
    return 128 if inputs % 128 == 0 else 64


def room_for(
    halves: int,
    outputs: int,
    inputs: int,
    kind: str,
    dtype: torch.dtype,
    device: torch.device | str,
    experts: int = 1,
) -> Packed:
    """Memory for a weight of this shape, with nothing in it yet."""
    depth = _tile_depth(inputs)
    blocks, deep = experts * -(-outputs // HIGH), -(-inputs // depth)
    if kind == mxfp4.KIND:
        tiles = (halves, blocks, -(-inputs // mxfp4.DEPTH), HIGH)
        data = torch.empty((*tiles, mxfp4.DEPTH // mxfp4.IN_WORD), dtype=torch.int32, device=device)
        scales = torch.empty(tiles, dtype=torch.int32, device=device)
        return Packed(data, outputs, inputs, kind, scales, experts=experts)
    if kind not in KINDS:
        data = torch.empty((halves, blocks, 1, HIGH, deep * depth), dtype=dtype, device=device)
        return Packed(data, outputs, inputs, kind, experts=experts)
    tiles = (halves, blocks, deep, HIGH)
    scales = torch.empty(
        tiles if KINDS[kind].grouped else (halves, blocks, 1, HIGH), dtype=torch.int32, device=device
    )
    data = torch.empty((*tiles, depth // _inputs_in_one(kind)), dtype=torch.int32, device=device)
    return Packed(data, outputs, inputs, kind, scales, experts=experts)


def pack(
    *halves: Tensor,
    kind: str = "bfloat16",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    whole: int = 0,
) -> Packed:
    """[outputs, inputs], or a gate and an up of that shape, as kernels want it, from wherever it lies to `device`.

    Plain weights become `dtype`. It is done some outputs at a time, so that no whole copy is made on the way.
    """
    like = halves[0]
    outputs, inputs = like.shape
    packed = room_for(len(halves), outputs, inputs, kind, dtype or like.dtype, device or like.device)
    packed.whole = whole
    _put_all(packed, halves)
    return packed


def pack_experts(
    experts: Iterable[Sequence[Any]],
    count: int,
    kind: str = "bfloat16",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    whole: int = 0,
) -> Packed:
    """The same of `count` experts, which are taken one at a time. Of kind mxfp4 they are `Blocks`."""
    packed: Packed | None = None
    for number, halves in enumerate(experts):
        if packed is None:
            outputs, inputs = halves[0].shape
            to, like = device or halves[0].device, dtype or halves[0].dtype
            packed = room_for(len(halves), outputs, inputs, kind, like, to, count)
            packed.whole = whole
        _put_all(packed.of_expert(number), halves)
    assert packed is not None
    return packed


def _put_all(packed: Packed, halves: Sequence[Tensor | Blocks]) -> None:
    for half, weight in enumerate(halves):
        weight = weight.raw if isinstance(weight, Blocks) else weight
        for first in range(0, packed.blocks, AT_ONCE):
            _put(packed, half, first, weight[first * HIGH : (first + AT_ONCE) * HIGH])


def _put(packed: Packed, half: int, first: int, some: Tensor) -> None:
    """Some outputs, from block `first` on, to their places."""
    data, scales = packed.data, packed.scales
    to = slice(first, first + -(-len(some) // HIGH))
    below = -len(some) % HIGH
    if packed.kind == mxfp4.KIND and scales is not None:
        stored, found = mxfp4.repacked(F.pad(some.to(data.device), (0, 0, 0, below)), packed.width)
        scales[half, to] = found.unflatten(0, (-1, HIGH)).transpose(1, 2)
        data[half, to] = stored.unflatten(0, (-1, HIGH)).transpose(1, 2)
        return
    some = some.to(data.device, data.dtype if scales is None else torch.float32)
    rows = F.pad(some, (0, packed.width - packed.inputs, 0, below))
    if scales is None:
        stored = rows[:, None]
    else:
        stored, found = quantised(rows, packed.depth, packed.kind)
        scales[half, to] = found.unflatten(0, (-1, HIGH)).transpose(1, 2)
    data[half, to] = stored.unflatten(0, (-1, HIGH)).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut. `spread`: one block a segment; else a block does all segments in order."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    spread: bool = False
    ahead: int = 0  # inputs whose weights are read before the kernel before this one has ended
    described: bool = False  # a plain weight read through a tensor descriptor, HIGH outputs at a time
    paired: bool = False  # a gated weight: half of a tile is of the gate, half of the up

    @property
    def made(self) -> int:
        """Results of a tile along the outputs."""
        return self.outputs // 2 if self.paired else self.outputs


@triton.jit
def one_segment(
    x_rows, there, w_rows, u_rows, s_rows, t_rows, first, last, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, IN_ONE: tl.constexpr, GROUPED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    PARTIAL: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """One segment's sums, from zero: [OUTPUTS, ROWS], twice when gated. If `DESCRIBED`, s_rows is the weight's tensor
    descriptor, and w_rows and u_rows are the rows in it.
    """
    if KIND == "bfloat16":
        acc, up = _plain_segment(
            x_rows, there, w_rows, u_rows, s_rows, first, last, inputs,
            ROWS, OUTPUTS, INPUTS, GATED, EVEN, PARTIAL, DESCRIBED,
        )  # fmt: skip
    else:
        acc, up = _widened_segment(
            x_rows, there, w_rows, u_rows, s_rows, t_rows, first, last, inputs,
            ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, KIND, IN_ONE, GROUPED, GATED, EVEN,
        )  # fmt: skip
    return acc, up


@triton.jit
def _widened_segment(
    x_rows, there, w_rows, u_rows, s_rows, t_rows, first, last, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, IN_ONE: tl.constexpr, GROUPED: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of a weight in fewer bits: the sums of a plain weight. Rows are zeros where tiles go on after the last input, and
    the last tile stands in for those that a step has after it.
    """
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    c = tl.arange(0, DEPTH)[None, :]
    word = tl.arange(0, DEPTH // IN_ONE)[None, :]
    if not GROUPED:
        scale = tl.load(s_rows)
        up_scale = tl.load(t_rows) if GATED else scale
    for start in range(first, last, INPUTS):
        for tile in tl.static_range(INPUTS // DEPTH):
            at = start + tile * DEPTH
            x = tl.trans(
                tl.load(x_rows + at + c, mask=there if EVEN else there & (at + c < inputs), other=0.0)
            )
            number = (tl.minimum(at, last - DEPTH) if KIND == "mxfp4" else at) // DEPTH * HIGH
            words = number * (DEPTH // IN_ONE) + word
            if GROUPED:
                scale = tl.load(s_rows + number)
            acc = _added(acc, tl.load(w_rows + words), scale, x, KIND)
            if GATED:
                if GROUPED:
                    up_scale = tl.load(t_rows + number)
                up = _added(up, tl.load(u_rows + words), up_scale, x, KIND)
    return settled(acc, KIND), settled(up, KIND)


@triton.jit
def _added(acc, words, scale, x, KIND: tl.constexpr):
    acc = tl.dot(_wide(words, scale, KIND, x.dtype), x, acc)
    if COMPILED:
        # Reads the sums at once, so that a product ends before registers of the next one are written: the assembler
        # would wait after each of its instructions else.
        acc = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1
        )
    return acc


@triton.jit
def _wide(words, scales, KIND: tl.constexpr, TO: tl.constexpr):
    return widened_exactly(words, scales, TO) if KIND == "mxfp4" else widened(words, scales, KIND, TO)


@triton.jit
def _plain_segment(
    x_rows, there, w_rows, u_rows, described, first, last, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    PARTIAL: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """If `PARTIAL`, the last step reads past the end of the segment, and sees zeros there."""
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    c = tl.arange(0, INPUTS)[None, :]
    for start in range(first, last, INPUTS):
        mine = there if EVEN else there & (start + c < inputs)
        if PARTIAL:
            mine = mine & (start + c < last)
        x = tl.load(x_rows + start + c, mask=mine, other=0.0)
        w = _loaded(w_rows, start, c, last, described, PARTIAL, DESCRIBED)
        acc = tl.dot(w, tl.trans(x), acc)
        if GATED:
            u = _loaded(u_rows, start, c, last, described, PARTIAL, DESCRIBED)
            up = tl.dot(u, tl.trans(x), up)
    return acc, up


@triton.jit
def _loaded(w_rows, start, c, last, described, PARTIAL: tl.constexpr, DESCRIBED: tl.constexpr):
    if DESCRIBED:  # what is read past the segment's end is multiplied by zeros
        w = described.load([w_rows, start])
    elif PARTIAL:
        w = tl.load(w_rows + start + c, mask=start + c < last, other=0.0)
    else:
        w = tl.load(w_rows + start + c)
    return w


@triton.jit
def outputs_of(block, OUTPUTS: tl.constexpr, PAIRED: tl.constexpr):
    """Outputs of a tile, and to which half of the weight each belongs."""
    i = tl.arange(0, OUTPUTS)
    made: tl.constexpr = OUTPUTS // 2 if PAIRED else OUTPUTS
    return block * made + i % made, i // made


@triton.jit
def weight_rows(
    weight, n, outputs, width,
    HIGH: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, IN_ONE: tl.constexpr,
):  # fmt: skip
    """Where outputs n begin, and their blocks. Those past the end are read from the last block and are not stored: no
    masks on the way.
    """
    block = tl.minimum(n // HIGH, (outputs - 1) // HIGH)
    each = width if KIND == "bfloat16" else DEPTH // IN_ONE
    at = block.to(tl.int64) * HIGH * (width // IN_ONE) + n % HIGH * each
    return weight + at[:, None], block


@triton.jit
def finished(
    acc, up, bias, part, n, side, x_rows, there, w_rows, u_rows, s_rows, t_rows, outputs, inputs, width,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, IN_ONE: tl.constexpr, GROUPED: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, TO: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """What becomes of a block's first segment: the bias, the segments after it, and the gate."""
    if BIASED:
        biased = tl.where(part == 0, outputs, 0)  # once, by the first part
        acc += tl.load(bias + side * outputs + n, mask=n < biased, other=0.0)[:, None]
        if GATED:
            up += tl.load(bias + outputs + n, mask=n < biased, other=0.0)[:, None]
    if not SPREAD:
        for s in tl.static_range(1, SEGMENTS):
            last = tl.minimum((s + 1) * SEGMENT, width)
            more, more_up = one_segment(
                x_rows, there, w_rows, u_rows, s_rows, t_rows, s * SEGMENT, last, inputs,
                ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, KIND, IN_ONE, GROUPED, GATED, EVEN, PARTIAL, DESCRIBED,
            )  # fmt: skip
            acc += more
            if GATED:
                up += more_up
    if PAIRED:
        acc, up = tl.split(tl.permute(tl.reshape(acc, (2, OUTPUTS // 2, ROWS)), (1, 2, 0)))
    if GATED or PAIRED:
        acc = gated(acc, up, TO, ACTIVATION, CLAMP)
    return acc


@kernel(do_not_specialize=["rows"])
def _matmul_kernel(
    x, weight, scales, bias, out, rows, outputs, inputs, width, half, scales_half,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, IN_ONE: tl.constexpr, GROUPED: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, AHEAD: tl.constexpr, DESCRIBED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row_tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n, side = outputs_of(tile // row_tiles, OUTPUTS, PAIRED)
    m = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    if DESCRIBED:
        w_rows = tile // row_tiles * HIGH
        u_rows = w_rows + half // width
    else:
        w_rows, block = weight_rows(weight, n, outputs, width, HIGH, DEPTH, KIND, IN_ONE)
        u_rows = w_rows + half
        if PAIRED:
            w_rows += (side.to(tl.int64) * half)[:, None]
    s_rows = scales
    t_rows = scales
    if KIND != "bfloat16":
        s_rows = scales + block * (HIGH * (width // DEPTH if GROUPED else 1)) + n % HIGH
        if PAIRED:
            s_rows += side * scales_half
        t_rows = s_rows + scales_half
    x_rows = x + m.to(tl.int64)[:, None] * inputs
    there = (m < rows)[:, None]
    first = part * SEGMENT
    last = tl.minimum(first + SEGMENT, width)
    if AHEAD > 0:
        last -= AHEAD
        ahead = tl.load(w_rows + last + tl.arange(0, AHEAD)[None, :])
    await_previous(CHAIN)
    if AHEAD > 0:
        ahead_x = tl.load(x_rows + last + tl.arange(0, AHEAD)[None, :], mask=there, other=0.0)
    acc, up = one_segment(
        x_rows, there, w_rows, u_rows, s_rows, t_rows, first, last, inputs,
        ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, KIND, IN_ONE, GROUPED, GATED, EVEN, PARTIAL, DESCRIBED,
    )  # fmt: skip
    if AHEAD > 0:
        acc = tl.dot(ahead, tl.trans(ahead_x), acc)
    acc = finished(
        acc, up, bias, part, n, side, x_rows, there, w_rows, u_rows, s_rows, t_rows, outputs, inputs, width,
        SEGMENT, SEGMENTS, SPREAD, ROWS, OUTPUTS, INPUTS, HIGH, DEPTH, KIND, IN_ONE, GROUPED, GATED, PAIRED, BIASED,
        EVEN, PARTIAL, ACTIVATION, CLAMP, out.dtype.element_ty, DESCRIBED,
    )  # fmt: skip
    if PAIRED:
        n = tile // row_tiles * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    at = out + (part * rows + m).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n < outputs)[:, None])


def segments(weight: Packed) -> int:
    """Into how many pieces the sums along the inputs are cut. Part of the arithmetic: neither rows nor ranks play a
    role.
    """
    outputs = weight.whole or weight.outputs
    blocks = -(-outputs // HIGH)
    if weight.gated or outputs > WIDEST_CUT:
        return 1
    if weight.kind in KINDS:
        wanted = _blocks_wanted(weight, outputs)
    elif blocks >= LARGE:
        wanted = ENOUGH_UNSPREAD
    elif outputs > weight.inputs:
        wanted = 3 * ENOUGH_BLOCKS
    else:
        wanted = ENOUGH_BLOCKS if weight.inputs <= 2 * outputs else 2 * ENOUGH_BLOCKS
    pieces = max(1, min(-(-wanted // blocks), weight.inputs // SHORTEST_SEGMENT))
    return -(-weight.width // segment_length(weight.width, pieces))  # none of them empty


def _blocks_wanted(weight: Packed, outputs: int) -> int:
    """Of a weight in fewer bits. A block waits for memory longer than it reads, so more of them read faster; in four
    bits most of all.
    """
    four = weight.kind == "int4"
    if outputs > weight.inputs:
        return 3 * ENOUGH_BLOCKS if four else 3 * ENOUGH_BLOCKS // 2
    many = four and outputs >= HIGH * LARGE and weight.inputs > 2 * outputs
    return 7 * ENOUGH_BLOCKS // 2 if many else 2 * ENOUGH_BLOCKS


def segment_length(width: int, pieces: int) -> int:
    return -(-width // (pieces * GRAIN)) * GRAIN


def choose_tile(weight: Packed, rows: int) -> Tile:
    """The quickest of the tiles that were measured (LOG.md)."""
    if weight.kind in KINDS:
        return _quantised_tile(weight, rows)
    gated, few = weight.gated, segments(weight) > 1
    if rows <= 16:
        return _waiting_tile(weight)
    if rows <= 64:
        return _reading_tile(weight, 32 if rows <= 32 else 64)
    spread = few and rows <= SPREAD_ROWS
    pieces = segments(weight) if spread else 1
    if pieces * -(-weight.outputs // 128) * -(-rows // 128) < ENOUGH_BLOCKS * 3 // 4:
        return Tile(64, 64, weight.step, 4, 4 if gated else 3, spread)
    if few > spread or (gated and not 128 < rows <= 192):
        return Tile(128, 128, 64, 8, 4)  # two sums an output: with fewer warps they do not fit into registers
    if rows > 128:
        return Tile(64, 128, 64, 4, 4, spread)
    return Tile(128, 64 if spread else 128, 64, 4, 4, spread)


def _waiting_tile(weight: Packed) -> Tile:
    """For few rows. Blocks that wait for the kernel before them read their last weights meanwhile: where that kernel
    reads little itself, memory would be idle else. How many inputs' weights fit beside the stages was measured.
    """
    pieces, large = segments(weight), weight.outputs >= HIGH * LARGE
    if weight.gated:
        # Two blocks to a multiprocessor. A paired tile has half as many results, so there are twice as many blocks,
        # which multiprocessors share more evenly (log/121).
        return Tile(16, 64, weight.step, 4, 4, paired=True)
    if weight.outputs > WIDEST_CUT:
        return Tile(16, 64, weight.step, 4, 3, described=True)
    if weight.outputs <= FEW_OUTPUTS:
        stages, ahead = 3, 512
    elif pieces == 1 and large:
        stages, ahead = 5, 512
    elif weight.inputs > 2 * weight.outputs:
        stages, ahead = (5 if large else 3), 256
    elif segment_length(weight.width, pieces) < 1024:
        stages, ahead = 2, 512
    elif weight.outputs > weight.inputs:
        # Three stages leave room beside the blocks of the matmul before, so that these can wait for their turn there.
        stages, ahead = 3, 256
    else:
        stages, ahead = 5, 512
    if not _fits(weight, ahead):
        stages, ahead = 4, 0
    tile = Tile(16, 64, weight.step, 4, stages, pieces > 1, ahead)
    if not all_start(weight, tile):
        tile = replace(tile, stages=3, ahead=256 if _fits(weight, 256) else 0)
    return tile if all_start(weight, tile) else replace(tile, stages=5, ahead=0, described=True)


def all_start(weight: Packed, tile: Tile) -> bool:
    """Whether all blocks of few rows fit the multiprocessors at once. A few that have to wait for others would double
    the time.
    """
    blocks = segments(weight) * -(-weight.outputs // tile.made)
    taken = 2 * (tile.stages * (tile.rows + tile.outputs) * tile.inputs + tile.ahead * tile.outputs)
    return -(-blocks // MULTIPROCESSORS) * (taken + RESERVED) <= SHARED


def _reading_tile(weight: Packed, rows: int) -> Tile:
    """For up to 64 rows, which take little longer than their weights."""
    pieces = segments(weight)
    if not weight.gated and HIGH * LARGE <= weight.outputs <= WIDEST_CUT:
        if pieces == 1:
            return Tile(rows, 64, weight.step, 4, 5, described=True)
        # A block to a multiprocessor has room for more stages than two have.
        if rows == 64 or weight.inputs > 2 * weight.outputs:
            tile = Tile(rows, 64, weight.step, 4, 5, True, described=True)
            return tile if all_start(weight, tile) else replace(tile, stages=3)
    if weight.gated and rows <= 32:
        return Tile(rows, 64, weight.step, 4, 3)
    ahead = 256 if pieces > 1 and weight.inputs <= 2 * weight.outputs and _fits(weight, 256) else 0
    stages = 4 if weight.gated or rows == 32 else 3
    tile = Tile(rows, 64, weight.step, 4, stages, pieces > 1, ahead, described=not ahead)
    return replace(tile, ahead=0, described=True) if ahead and not all_start(weight, tile) else tile


def _fits(weight: Packed, ahead: int) -> bool:
    """Whether blocks can start early, and every segment has at least `ahead` inputs, none of them padding."""
    pieces = segments(weight)
    shortest = (
        weight.width - (pieces - 1) * segment_length(weight.width, pieces) if pieces > 1 else weight.width
    )
    return chained()["CHAIN"] and weight.width == weight.inputs and shortest >= ahead


def _quantised_tile(weight: Packed, rows: int) -> Tile:
    """Two tiles a step for few rows, where every instruction counts; more rows leave no registers for it.

    Numbers are made in registers, so the blocks must be small enough for two to share a multiprocessor: one makes
    numbers while the other waits for the tensor core.
    """
    deep, gated, few, four = weight.depth, weight.gated, segments(weight) > 1, weight.kind == "int4"
    step = deep if weight.width % (2 * deep) else 2 * deep
    if rows <= 16:
        return Tile(16, 64, step, 4, 3 + four if gated else 4, few)
    if rows <= 32:
        return Tile(32, 64, step, 4, 3, few)
    if rows <= 64:
        long = four and few and weight.inputs > 2 * weight.outputs
        if not gated and (long or weight.outputs > WIDEST_CUT):
            return Tile(64, 128, deep, 8, 3, few)
        return Tile(64, 64, deep, 4, 3 if four and few and weight.outputs > weight.inputs else 4, few)
    spread = few and rows <= SPREAD_ROWS
    if gated or few > spread:  # two sums an output in registers
        return Tile(64, 128, deep, 8, 4)
    return Tile(128, 128, deep, 8, 3, spread)


def multiply(x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> None:
    """x [R, inputs] by weight into out [parts, R, outputs]; the sum of the parts is the result.

    Gated: out is [1, R, outputs] = activation(gate) * up.
    """
    launch_multiply(x, weight, bias, out, segments(weight), choose_tile(weight, len(x)))


def launch_multiply(
    x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor, pieces: int, tile: Tile
) -> None:
    rows, inputs = x.shape
    parts = pieces if tile.spread else 1
    if tile.ahead and (weight.gated > tile.paired or parts < pieces or tile.described):
        raise ValueError("weights are read ahead by blocks that have one segment, one sum and no descriptor")
    if tile.described and (weight.kind in KINDS or tile.outputs != HIGH or tile.paired):
        raise ValueError(f"descriptors are of plain weights, {HIGH} outputs at a time")
    if out.shape != (parts, rows, weight.outputs) or inputs != weight.inputs:
        raise ValueError(
            f"{tuple(x.shape)} by {weight.outputs} x {weight.inputs} does not fit {tuple(out.shape)}"
        )
    check_steps(weight, pieces, tile)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(weight.outputs, tile.made), parts)
    given, options = kernel_arguments(x, weight, bias, out, pieces, tile)
    _matmul_kernel[grid](*given, **options)


def check_steps(weight: Packed, pieces: int, tile: Tile) -> None:
    """Whether a tile fits. In fewer bits a step must not go on after a segment, nor (but for MXFP4) after the row."""
    if tile.paired and (not weight.gated or tile.made > HIGH):
        raise ValueError(f"tiles of a gate and its up are of gated weights, up to {HIGH} of each")
    if weight.scales is None:
        return
    ends = [segment_length(weight.width, pieces)] if pieces > 1 else []
    if weight.kind in KINDS:
        ends.append(weight.width)
    if tile.inputs % weight.depth or any(end % tile.inputs for end in ends):
        raise ValueError(
            f"steps of {tile.inputs} do not fit {weight.width} inputs in tiles of {weight.depth}"
        )


def kernel_arguments(
    x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor, pieces: int, tile: Tile
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `_matmul_kernel` is launched, or compiled, with."""
    rows, inputs = x.shape
    data, scales = weight.data, weight.scales
    if tile.described:
        scales = TensorDescriptor.from_tensor(weight.rows, [HIGH, tile.inputs])
    given = (
        x, data, scales, bias, out, rows, weight.outputs, inputs, weight.width,
        data.stride(0), 0 if weight.scales is None else weight.scales.stride(0),
    )  # fmt: skip
    options = kernel_options(weight, bias, pieces, tile)
    return given, {**options, "AHEAD": tile.ahead, "DESCRIBED": tile.described, **chained()}


def kernel_options(weight: Packed, bias: Tensor | None, pieces: int, tile: Tile) -> dict[str, Any]:
    scales = weight.scales
    length = segment_length(weight.width, pieces)
    # Whether a step goes on after the row, or after what a block has of it: in fewer bits only the row's end is rough.
    over = weight.width % tile.inputs > 0
    rough = over or tile.ahead % tile.inputs > 0 or (pieces > 1 and length % tile.inputs > 0)
    plain = weight.data.dtype.is_floating_point
    return dict(
        SEGMENT=length, SEGMENTS=pieces, SPREAD=tile.spread,
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, HIGH=HIGH, DEPTH=weight.depth,
        KIND=weight.kind, IN_ONE=_inputs_in_one(weight.kind), GROUPED=scales is not None and scales.shape[2] > 1,
        GATED=weight.gated and not tile.paired, PAIRED=tile.paired, BIASED=bias is not None,
        EVEN=weight.inputs == weight.width and (plain or not over), PARTIAL=rough and plain,
        ACTIVATION=weight.activation, CLAMP=weight.clamp,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@kernel
def _widen_kernel(
    weight, scales, out, width, HIGH: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, IN_ONE: tl.constexpr,
    GROUPED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """A tile of a weight in fewer bits -> the bfloat16 it stands for, row by row."""
    let_next_start(CHAIN)
    deep = width // DEPTH
    tile = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, HIGH)[:, None]
    each: tl.constexpr = DEPTH // IN_ONE
    words = tl.load(weight + (tile * HIGH + n) * each + tl.arange(0, each)[None, :])
    by = tl.load(scales + (tile if GROUPED else tile // deep) * HIGH + tl.arange(0, HIGH))
    numbers = settled(_wide(words, by, KIND, out.dtype.element_ty), KIND)
    await_previous(CHAIN)
    to = (tile // deep * HIGH + n) * width + tile % deep * DEPTH + tl.arange(0, DEPTH)[None, :]
    tl.store(out + to, numbers.to(out.dtype.element_ty))


def widen(weight: Packed, out: Tensor) -> None:
    """What a weight in fewer bits stands for into `out`, as long as `weight.rows` of a plain weight."""
    data, scales = weight.data, weight.scales
    assert scales is not None
    _widen_kernel[(data[..., 0, 0].numel(),)](
        data, scales, out, weight.width, HIGH=HIGH, DEPTH=weight.depth, KIND=weight.kind,
        IN_ONE=_inputs_in_one(weight.kind), GROUPED=scales.shape[2] > 1, num_warps=4, **chained(),
    )  # fmt: skip


def library_for(weight: Packed, rows: int, room: int) -> Library | None:
    """The library, if it should multiply `rows` rows and x has space for the rows it adds; else None."""
    count, library = padded_rows(rows), weight.library
    return library if library is not None and count <= room and count in library.counts else None


def parts_of(weight: Packed, rows: int) -> int:
    """How many partial results `multiply` leaves to be added."""
    return segments(weight) if choose_tile(weight, rows).spread else 1


def multiply_parts(x: Tensor, weight: Packed, bias: Tensor | None = None, rows: int | None = None) -> Tensor:
    """[parts, R, outputs] float32, not yet added. `rows`: how many of x are meant; whatever lies in those after them
    may be computed with and is not part of the result.
    """
    rows = len(x) if rows is None else rows
    library = library_for(weight, rows, len(x))
    if library is not None:
        count = padded_rows(rows)
        parts = x.new_empty((segments(weight), count, weight.outputs), dtype=torch.float32)
        library.multiply(x[:count], segment_length(weight.width, segments(weight)), bias, parts)
        return parts[:, :rows]
    parts = x.new_empty((parts_of(weight, rows), rows, weight.outputs), dtype=torch.float32)
    if rows:
        multiply(x[:rows], weight, bias, parts)
    return parts


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None, rows: int | None = None) -> Tensor:
    """x [R, inputs] by weight -> [R, outputs] float32; `rows` as in `multiply_parts`."""
    return add_parts(multiply_parts(x, weight, bias, rows))


def add_parts(parts: Tensor) -> Tensor:
    """The parts in order, as every kernel that takes parts adds them."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def gated_linear(x: Tensor, weight: Packed, bias: Tensor | None = None, rows: int | None = None) -> Tensor:
    """activation(gate) * up -> [R, outputs] in x's dtype, as long as x; `rows` as in `multiply_parts`."""
    rows = len(x) if rows is None else rows
    out = x.new_empty((1, len(x), weight.outputs))
    library = library_for(weight, rows, len(x))
    if library is not None:
        count = padded_rows(rows)
        library.multiply_gated(x[:count], bias, out[:, :count], weight.activation, weight.clamp)
    elif rows:
        multiply(x[:rows], weight, bias, out[:, :rows])
    return out[0]


# ---------------------------------------------------------------------------------------------------- twins


def linear_twin(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    result = x.double() @ weight.unpacked().double().T
    return (result if bias is None else result + bias.double()).float()


def gated_twin(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    gate, up = linear_twin(x, weight, bias).chunk(2, dim=-1)
    return reference.gated(gate, up, weight.activation, weight.clamp).to(x.dtype)
