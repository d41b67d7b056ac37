"""Weights in fewer bits: how they are rounded and stored, and how a kernel makes bfloat16 of them again.

    fp8     e4m3                            a scale an output
    int8    whole numbers, -127 to 127      a scale an output
    int4    whole numbers, -8 to 7          a scale an output and tile of 128 inputs (or 64)

A weight is its number times its scale, a bfloat16, rounded to a bfloat16. So a weight in fewer bits is a matrix in
bfloat16 that takes less room, and products have the bits of that matrix (`dequantised`).

A register of the tensor core holds two neighbouring inputs of a weight. So that no kernel has to move numbers
between registers, a tile's inputs are cut into pieces (two for bytes, four for nibbles), and a word of 32 bits holds
the same two neighbours of every piece, one in either half. In a half are

    int8    the number of piece 1 in the upper byte, of piece 0 in the lower one, plus 128 each
    int4    those of pieces 3, 2, 1 and 0 from the highest bits on, plus 8 each
    fp8     s0 e1 e1 e1 e1 e0 e0 e0 e0 m0 m0 m0 s1 m1 m1 m1 (sign, exponent, mantissa; s1 is that of the other half)

A bfloat16 whose bits are a whole number n < 256 is n * 2^-133, and one with e4m3's at the end of its exponent and
the begin of its mantissa is e4m3's times 2^-120. Either way a product with the scale makes up for it, and one
instruction multiplies, adds and rounds two numbers. The factor of that product is what is stored as a scale, twice in
a word. For whole numbers it would be too large, so they come out 2^-16 as large (`LIFT`), and sums make up for that.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.launch import COMPILED


@dataclass(frozen=True, slots=True)
class Kind:
    """What a weight is stored as."""

    inputs: int  # in a word
    pieces: int
    grouped: bool  # a scale a tile, not a scale an output
    most: int  # the number furthest from zero
    factor: int  # exponent of the factor that is stored for a scale of 1


KINDS = {
    "fp8": Kind(4, 2, False, 448, 120),
    "int8": Kind(4, 2, False, 127, 117),
    "int4": Kind(8, 4, True, 8, 117),
}
LIFT = tl.constexpr(16)
NOTHING = 1e-30  # weights smaller than this are zero: no scale would be left of them


def quantised(rows: Tensor, depth: int, kind: str) -> tuple[Tensor, Tensor]:
    """Rows [R, width] float32 -> words int32 [R, width / depth, words], and factors int32 [R, width / depth or 1]."""
    how, tiles = KINDS[kind], rows.unflatten(1, (-1, depth))
    reach = (_furthest(tiles) if how.grouped else _reach(tiles.flatten(1))) / how.most
    scale = reach.bfloat16()
    numbers = tiles / scale.float()[..., None]
    words = {"fp8": _fp8_words, "int8": _int8_words, "int4": _int4_words}[kind](numbers)
    factor = (scale.float() * 2.0**how.factor).bfloat16()
    return words, (factor.view(torch.int16).int() & 0xFFFF) * 0x10001


def dequantised(words: Tensor, factors: Tensor, kind: str) -> Tensor:
    """What `quantised` gave -> [R, width] float32, numbers of bfloat16."""
    how = KINDS[kind]
    factor = (factors << 16).view(torch.float32)
    scale = (factor.double() * 2.0**-how.factor)[..., None, None]
    halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1).flatten(-2)
    if kind == "fp8":
        other = halves.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        second = (halves >> 4 & 0x0780) | (halves << 4 & 0x0070) | (other & 8) << 12
        bits = torch.stack([halves & 0x87F0, second], -2)
        pieces = (bits << 16).view(torch.float32).double() * 2.0**120
    elif kind == "int8":
        pieces = torch.stack([halves & 255, halves >> 8], -2) - 128
    else:
        pieces = torch.stack([halves >> 4 * piece & 15 for piece in range(4)], -2) - 8
    return (pieces * scale).flatten(1).bfloat16().float()


def _fp8_words(numbers: Tensor) -> Tensor:
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).int()
    first, second = codes.unflatten(-1, (2, -1)).unbind(-2)
    other = second.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    halves = (first & 128) << 8 | (first & 127) << 4 | (second & 0x78) << 8 | (other & 128) >> 4 | second & 7
    return _words(halves)


def _int8_words(numbers: Tensor) -> Tensor:
    first, second = (numbers.round().clamp(-127, 127).int() + 128).unflatten(-1, (2, -1)).unbind(-2)
    return _words(first | second << 8)


def _int4_words(numbers: Tensor) -> Tensor:
    pieces = (numbers.round().clamp(-8, 7).int() + 8).unflatten(-1, (4, -1)).unbind(-2)
    return _words(pieces[0] | pieces[1] << 4 | pieces[2] << 8 | pieces[3] << 12)


def _words(halves: Tensor) -> Tensor:
    return halves[..., ::2] | halves[..., 1::2] << 16


def _furthest(tiles: Tensor) -> Tensor:
    """What gets -8 is the number furthest from zero, whatever its sign: the side that reaches less far has a number
    fewer. [R, tiles]
    """
    low, high = tiles.amin(-1), tiles.amax(-1)
    furthest = torch.where(-low > high, low, high)
    return torch.where(furthest.abs() < NOTHING, 1.0, -furthest)


def _reach(rows: Tensor) -> Tensor:
    """The largest of each row, 1 for a row of zeros: [R, 1]."""
    most = rows.abs().amax(-1, keepdim=True)
    return torch.where(most < NOTHING, 1.0, most)


# -------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def widened(words, factors, KIND: tl.constexpr, TO: tl.constexpr):
    """A tile of words [outputs, words] and its factors [outputs] as numbers of type TO [outputs, depth]; whole numbers
    2^-LIFT as large.
    """
    by = factors[:, None]
    if COMPILED:
        if KIND == "fp8":
            a, b, c, d = _fp8_numbers(words, by)
            numbers = _beside(tl.interleave(a, b), tl.interleave(c, d))
        elif KIND == "int8":
            plus = _times(by, -0x7F7F7F80)
            a, b, c, d = _int8_numbers(words, by, plus)
            numbers = _beside(tl.interleave(a, b), tl.interleave(c, d))
        else:
            plus, by_16th = _times(by, -0x7FF77FF8), _times(by, 0x3D803D80)
            a, b, c, d, e, f, g, h = _int4_numbers(words, by, by_16th, plus)
            low = _beside(tl.interleave(a, b), tl.interleave(c, d))
            numbers = _beside(low, _beside(tl.interleave(e, f), tl.interleave(g, h)))
    else:
        numbers = _interpreted(words, by, KIND).to(TO)
    return numbers


@triton.jit
def _times(two, BY: tl.constexpr):
    """Two bfloat16 in a word by the two of a constant."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 z;
        mov.b32 z, 0x80008000;
        fma.rn.bf16x2 $0, $1, $2, z;
        }""",
        "=r,r,r", [two, tl.full(two.shape, BY, tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _fp8_numbers(words, by):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, z;
        mov.b32 z, 0x80008000;
        and.b32 a, $4, 0x87f087f0;
        shf.r.wrap.b32 b, $4, $4, 4;
        and.b32 b, b, 0x87808780;
        shl.b32 c, $4, 4;
        lop3.b32 b, c, 0x00700070, b, 0xea;
        fma.rn.bf16x2 a, a, $5, z;
        fma.rn.bf16x2 b, b, $5, z;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }""",
        "=h,=h,=h,=h,r,r", [words, by], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _int8_numbers(words, by, plus):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        and.b32 a, $4, 0x00ff00ff;
        prmt.b32 b, $4, 0, 0x4341;
        fma.rn.bf16x2 a, a, $5, $6;
        fma.rn.bf16x2 b, b, $5, $6;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }""",
        "=h,=h,=h,=h,r,r,r", [words, by, plus], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _int4_numbers(words, by, by_16th, plus):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, s;
        and.b32 a, $8, 0x000f000f;
        and.b32 b, $8, 0x00f000f0;
        shr.u32 s, $8, 8;
        and.b32 c, s, 0x000f000f;
        and.b32 d, s, 0x00f000f0;
        fma.rn.bf16x2 a, a, $9, $11;
        fma.rn.bf16x2 b, b, $10, $11;
        fma.rn.bf16x2 c, c, $9, $11;
        fma.rn.bf16x2 d, d, $10, $11;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [words, by, by_16th, plus],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _interpreted(words, by, KIND: tl.constexpr):
    factor = (by << 16).to(tl.float32, bitcast=True)
    if KIND == "fp8":
        second = ((words >> 4) & 0x07800780) | (words << 4) & 0x00700070
        second |= ((words << 28) & -0x80000000) | (words >> 4) & 0x8000
        numbers = _beside(_halves(words & -0x780F7810, factor), _halves(second, factor))
    elif KIND == "int8":
        numbers = _beside(_whole(words, 0, 255, factor), _whole(words, 8, 255, factor))
    else:
        first = _beside(_whole(words, 0, 15, factor), _whole(words, 4, 15, factor))
        numbers = _beside(first, _beside(_whole(words, 8, 15, factor), _whole(words, 12, 15, factor)))
    return numbers


@triton.jit
def _halves(words, factor):
    low = ((words & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    high = (words & -65536).to(tl.float32, bitcast=True)
    return tl.interleave(_rounded(low * factor), _rounded(high * factor))


@triton.jit
def _whole(words, AT: tl.constexpr, MASK: tl.constexpr, factor):
    unit = factor * 2.0**-117
    low = ((words >> AT) & MASK) - (MASK + 1) // 2
    high = ((words >> (AT + 16)) & MASK) - (MASK + 1) // 2
    return tl.interleave(_rounded(low.to(tl.float32) * unit), _rounded(high.to(tl.float32) * unit))


@triton.jit
def _rounded(number):
    """To what a bfloat16 holds, ties to even."""
    bits = number.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def settled(sums, KIND: tl.constexpr):
    """Sums of what `widened` gave, as large as they are."""
    if COMPILED and (KIND == "int8" or KIND == "int4"):
        sums *= 2.0**LIFT
    return sums


@triton.jit
def _beside(a, b):
    """[outputs, n] twice -> [outputs, 2 n], one after the other."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))
