"""Experts in MXFP4 on a GPU: kept in 4 bits and a scale for 32, and widened in registers to exactly the bfloat16 that
they stand for. So a product has the bits of the dequantised model's, whose order of sums it takes.

A tile is 128 inputs of an output in 16 words of 32 bits, and one more word of four scales. As in quantise.py, a word
holds the same two neighbouring inputs of four pieces, one neighbour in either half; a piece has one scale. Bits of a
half, from the highest (s sign, e exponent, m mantissa, of pieces 0 to 3, in brackets those of the other half's number):

    s0 (e3 e3 e2 e2 m2) s1 e0 e0 m0 s3 m3 s2 e1 e1 m1

A rotation and a mask bring pieces 0 to 2 to where a bfloat16 has its sign, the end of its exponent and the begin of its
mantissa: the number times 2^-126. Piece 3 has what is left and takes two. One product with 2^126 times the scale
makes up for it. Bytes of scales are the exponent of that: 126 more than in files, which therefore are at most 128.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.load.quants import Blocks
from outrider.model.kernels.gpu.launch import COMPILED
from outrider.model.kernels.gpu.quantise import _beside

KIND = "mxfp4"
DEPTH = 128  # inputs of a tile
PIECES, PIECE = 4, 32
IN_WORD = 8
LIFT = 126  # of exponents
NUMBERS = 0x81C081C0  # sign, exponent and mantissa, in either half
WHOLE = (0, 6, 12)  # bits by which pieces 0 to 2 are rotated
APART = ((2, 0x00400040), (10, 0x81808180))  # the same of piece 3, which is two parts
LARGEST = 128  # exponent of a scale in a file, for which there is a bfloat16 that much larger


def fits(weight: object) -> bool:
    """Whether a weight is stored so, and no scale of it is too large."""
    if not isinstance(weight, Blocks) or weight.form.name != "MXFP4":
        return False
    return bool((weight.raw.view(-1, weight.form.bytes)[:, 0] <= LARGEST).all())


def repacked(raw: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Rows of GGML's blocks, uint8 [R, bytes] -> words int32 [R, tiles, 16], and scales int32 [R, tiles]."""
    blocks = raw.unflatten(1, (-1, 17))
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1).flatten(1)
    codes = F.pad(codes, (0, width - codes.shape[1])).int()
    n = codes.unflatten(1, (-1, PIECES, PIECE // 2, 2))  # [R, tiles, pieces, words, neighbours]
    sign, size = n >> 3, n & 7
    halves = (sign << 15 | size << 6).long()
    pieces = halves[..., 0] | halves[..., 1] << 16
    words = torch.zeros_like(pieces[:, :, 0])
    for i, by in enumerate(WHOLE):
        words |= _turned(pieces[:, :, i], 32 - by)
    for by, mask in APART:
        words |= _turned(pieces[:, :, 3] & mask, 32 - by)
    words = (words - (words >> 31 << 32)).int()
    lifted = F.pad(blocks[..., 0].int() + LIFT, (0, width // PIECE - blocks.shape[1]))
    scales = sum(one << 8 * i for i, one in enumerate(lifted.unflatten(1, (-1, PIECES)).unbind(-1)))
    return words, scales


def dequantised(words: Tensor, scales: Tensor) -> Tensor:
    """What `repacked` gave -> float32 [R, inputs]."""
    pieces = [_turned(words, by) & NUMBERS for by in WHOLE]
    one, other = (_turned(words, by) & mask for by, mask in APART)
    pieces.append(one | other)
    both = torch.stack([torch.stack([one & 0xFFFF, one >> 16], -1).flatten(-2) for one in pieces], -2)
    numbers = (both.int() << 16).view(torch.float32)  # times 2^-126, as bfloat16 of these bits are
    exponents = torch.stack([scales >> 8 * i & 255 for i in range(PIECES)], -1)
    ones = torch.ones(exponents.shape, dtype=torch.float64, device=words.device)
    return (numbers.double() * torch.ldexp(ones, exponents - 127)[..., None]).float().flatten(1)


def _turned(words: Tensor, by: int) -> Tensor:
    """To the left, int64."""
    words = words.long() & 0xFFFFFFFF
    return (words << by | words >> 32 - by) & 0xFFFFFFFF


# -------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def widened_exactly(words, scales, TO: tl.constexpr):
    """A tile [outputs, 16] and its scales [outputs] as numbers of type TO [outputs, 128]."""
    four = scales[:, None]
    if COMPILED:
        first = (four & 255) * 0x00800080  # a bfloat16 twice
        second = (four >> 8 & 255) * 0x00800080
        third = (four >> 16 & 255) * 0x00800080
        fourth = (four >> 24 & 255) * 0x00800080
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t, z;
            mov.b32 z, 0x80008000;
            and.b32 a, $8, 0x81c081c0;
            shl.b32 b, $8, 6;
            and.b32 b, b, 0x81c081c0;
            shf.l.wrap.b32 c, $8, $8, 12;
            and.b32 c, c, 0x81c081c0;
            shl.b32 d, $8, 2;
            and.b32 d, d, 0x00400040;
            shf.l.wrap.b32 t, $8, $8, 10;
            lop3.b32 d, t, 0x81808180, d, 0xea;
            fma.rn.bf16x2 a, a, $9, z;
            fma.rn.bf16x2 b, b, $10, z;
            fma.rn.bf16x2 c, c, $11, z;
            fma.rn.bf16x2 d, d, $12, z;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            mov.b32 {$4, $5}, c;
            mov.b32 {$6, $7}, d;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [words, first, second, third, fourth],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True, pack=1,
        )  # fmt: skip
        low = _beside(tl.interleave(a, b), tl.interleave(c, d))
        numbers = _beside(low, _beside(tl.interleave(e, f), tl.interleave(g, h)))
    else:
        tenth = words << 10 | words >> 22 & 0x3FF
        twelfth = words << 12 | words >> 20 & 0xFFF
        first = _numbers(words & -0x7E3F7E40, four)
        second = _numbers(words << 6 & -0x7E3F7E40, four >> 8)
        third = _numbers(twelfth & -0x7E3F7E40, four >> 16)
        fourth = _numbers(words << 2 & 0x00400040 | tenth & -0x7E7F7E80, four >> 24)
        numbers = _beside(_beside(first, second), _beside(third, fourth)).to(TO)
    return numbers


@triton.jit
def _numbers(words, exponent):
    power = ((exponent & 255) << 23).to(tl.float32, bitcast=True)
    low = ((words & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    high = (words & -65536).to(tl.float32, bitcast=True)
    return tl.interleave(low * power, high * power)
