"""Weights in fewer bits: how they are rounded and stored, and how a kernel makes numbers of them again.

    fp8     e4m3                            a float32 scale an output
    int8    whole numbers, -127 to 127      a float32 scale an output
    int4    whole numbers, -8 to 7          a bfloat16 scale an output and tile of 128 inputs (or 64)

Every stored number is exact in bfloat16, so a kernel multiplies exactly what `dequantised` says, scales aside.

A register of the tensor core holds two neighbouring inputs of a weight. So that no kernel has to move numbers
between registers, a tile's inputs are cut into pieces (two for bytes, four for nibbles), and the four bytes that are
read as one word hold the same two neighbours of every piece.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kind:
    """What a weight is stored as."""

    dtype: torch.dtype
    inputs: int  # in one stored number
    pieces: int
    grouped: bool  # a scale a tile, not a scale an output
    scale: torch.dtype


KINDS = {
    "fp8": Kind(torch.uint8, 1, 2, False, torch.float32),
    "int8": Kind(torch.int32, 4, 2, False, torch.float32),
    "int4": Kind(torch.int32, 8, 4, True, torch.bfloat16),
}
MOST_FP8, MOST_INT8, MOST_INT4 = 448, 127, 8
UNIT = 2.0**-6  # what kernels make of the whole number 1; scales make up for it
NOTHING = 1e-30  # weights smaller than this are zero: no scale would be left of them


def quantised(rows: Tensor, depth: int, kind: str) -> tuple[Tensor, Tensor]:
    """Rows [R, width] float32 -> what is stored [R, width / depth, numbers], and scales [R, width / depth or 1]."""
    tiles = rows.unflatten(1, (-1, depth))
    return {"fp8": _to_fp8, "int8": _to_int8, "int4": _to_int4}[kind](tiles)


def dequantised(stored: Tensor, scales: Tensor, kind: str) -> Tensor:
    """What `quantised` gave -> [R, width] float32."""
    plain = scales.float()[..., None]
    if kind == "fp8":
        woven = stored.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, KINDS[kind].pieces, 2))
        return (woven.transpose(-3, -2).flatten(-3) * plain).flatten(1)
    numbers = stored.view(torch.uint8)
    if kind == "int4":
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-2)
    woven = numbers.unflatten(-1, (-1, 2, KINDS[kind].pieces)).movedim(-1, -3).flatten(-3)
    return ((woven.float() - (MOST_INT4 if kind == "int4" else 128)) * (plain * UNIT)).flatten(1)


def _to_fp8(tiles: Tensor) -> tuple[Tensor, Tensor]:
    scale = _reach(tiles.flatten(1)) / MOST_FP8
    numbers = (tiles / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return numbers.unflatten(-1, (2, -1, 2)).transpose(-3, -2).flatten(-3), scale


def _to_int8(tiles: Tensor) -> tuple[Tensor, Tensor]:
    scale = _reach(tiles.flatten(1)) / MOST_INT8
    numbers = (tiles / scale[..., None]).round() + 128
    return _woven(numbers.to(torch.uint8), 2).view(torch.int32), scale / UNIT


def _to_int4(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The number furthest from zero gets -8, whatever its sign: the side that reaches less far has a number fewer."""
    low, high = tiles.amin(-1), tiles.amax(-1)
    furthest = torch.where(-low > high, low, high)
    furthest = torch.where(furthest.abs() < NOTHING, 1.0, furthest)
    scale = (furthest / -MOST_INT4).bfloat16()
    whole = (tiles / scale.float()[..., None]).round().clamp(-MOST_INT4, MOST_INT4 - 1)
    nibbles = _woven((whole + MOST_INT4).to(torch.uint8), 4)
    stored = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(torch.int32)
    return stored, scale / UNIT


def _reach(rows: Tensor) -> Tensor:
    """The largest of each row, 1 for a row of zeros: [R, 1]."""
    most = rows.abs().amax(-1, keepdim=True)
    return torch.where(most < NOTHING, 1.0, most)


def _woven(numbers: Tensor, pieces: int) -> Tensor:
    """Inputs of tiles in the order of storage: neighbours two by two, of every piece in turn."""
    return numbers.unflatten(-1, (pieces, -1, 2)).movedim(-3, -1).flatten(-3)


# -------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def widened(stored, KIND: tl.constexpr, TO: tl.constexpr):
    """A stored tile [outputs, numbers] as numbers of type TO [outputs, depth], in order and still to be scaled."""
    if KIND == "fp8":
        # Through float16 and float32: converting float16 to bfloat16 directly is slow.
        woven = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(TO)
        pairs = tl.reshape(woven, (stored.shape[0], stored.shape[1] // 4, 2, 2))
        numbers = tl.reshape(tl.permute(pairs, (0, 2, 1, 3)), (stored.shape[0], stored.shape[1]))
    elif KIND == "int8":
        low = _whole(stored & 0x00FF00FF, 127, -2.0, TO)
        numbers = _beside(low, _whole((stored >> 8) & 0x00FF00FF, 127, -2.0, TO))
    else:
        numbers = _beside(_nibbles(stored, TO), _nibbles(stored >> 8, TO))
    return numbers


@triton.jit
def _nibbles(words, TO: tl.constexpr):
    low = _whole(words & 0x000F000F, 127, -0.125, TO)
    return _beside(low, _whole(words & 0x00F000F0, 123, -0.125, TO))


@triton.jit
def _whole(words, POWER: tl.constexpr, PLUS: tl.constexpr, TO: tl.constexpr):
    """Both halves of each word, n < 256: n * 2^(POWER - 133) + PLUS.

    A bfloat16 whose bits are n is n * 2^-133, so bits become a number by one instruction for two of them.
    """
    low = (words & 0xFFFF).to(tl.int16)
    bits = tl.interleave(low, (words >> 16).to(tl.int16))
    if tl.bfloat16 == TO:
        number = bits.to(TO, bitcast=True)
        made = tl.fma(number, tl.full(bits.shape, 2.0**POWER, TO), tl.full(bits.shape, PLUS, TO))
    else:  # as the interpreter runs it, which has no sums in bfloat16
        made = (bits.to(tl.float32) * 2.0 ** (POWER - 133) + PLUS).to(TO)
    return made


@triton.jit
def _beside(a, b):
    """[outputs, n] twice -> [outputs, 2 n], one after the other."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))
