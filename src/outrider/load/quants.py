"""GGML's number formats: how many bytes a block takes, and how it becomes numbers and scales. No files here.

A format is one row of `FORMATS`. All unpack with torch, where the blocks lie, in chunks that bound the working memory.
The gguf package defines the right answer: the results of `dequantize` are equal bit for bit.

K-quants have 256 values a block, in sub-blocks of 16 or 32 with a scale of their own, some with a least value: small
whole numbers, to be multiplied by one or two of the block's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BLOCKS = 65536  # of 32 values, 8 MB of float32; smaller ones measured slower: the calls cost more

# Raw blocks [n, bytes] uint8 -> numbers into out [n, values] float32; returns scales [n, sub-blocks] and what is added
# after them, None where there is none.
Split = Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    values: int  # in a block
    bytes: int  # of a block
    split: Split


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in the blocks it is stored in."""

    name: str
    form: Format
    raw: Tensor  # uint8 [rows, bytes of a row]
    columns: int  # of the matrix; the last block of a row may hold more, which are 0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.columns

    def float(self) -> Tensor:
        wide = dequantize(self.raw.flatten(), self.form).view(len(self.raw), -1)
        return wide[:, : self.columns].contiguous()

    def split(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Whole numbers [rows, values], their scales and what is added after them, both [rows, sub-blocks]."""
        rows, blocks = len(self.raw), self.raw.view(-1, self.form.bytes)
        numbers = torch.empty(len(blocks), self.form.values)
        scales, least = self.form.split(blocks, numbers)
        assert scales is not None
        return (
            numbers.view(rows, -1),
            scales.reshape(rows, -1),
            None if least is None else least.reshape(rows, -1),
        )


def dequantize(raw: Tensor, form: Format) -> Tensor:
    """`raw` is a flat uint8 tensor of whole blocks; returns a flat float32 tensor beside it that owns its memory."""
    blocks = raw.view(-1, form.bytes)
    out = torch.empty(len(blocks), form.values, device=raw.device)
    step = max(1, CHUNK_BLOCKS * 32 // form.values)
    for start in range(0, len(blocks), step):
        part = out[start : start + step]
        scales, least = form.split(blocks[start : start + step], part)
        if scales is not None:
            by_sub_block = part.view(*scales.shape, -1).mul_(scales[:, :, None])
            if least is not None:
                by_sub_block.add_(least[:, :, None])
    return out.view(-1)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, as float32 [n, 1]."""
    return raw[:, at : at + 2].view(torch.float16).float()


def _nibbles(raw: Tensor, out: Tensor) -> None:
    """16 bytes a block: the low halves are values 0..15, the high halves 16..31."""
    packed = raw.contiguous()
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bits(raw: Tensor, at: int, out: Tensor) -> None:
    """Add 16 to every value whose bit is set in the 32-bit little-endian word at byte `at`."""
    # Copied: as a view the four bytes would not be aligned, and `contiguous` makes no copy of a single row.
    word = raw[:, at : at + 4].clone(memory_format=torch.contiguous_format).view(torch.int32)
    bits = (word >> torch.arange(32, dtype=torch.int32, device=raw.device)) & 1
    out.add_(bits, alpha=16)


def _as(dtype: torch.dtype) -> Split:
    def split(raw: Tensor, out: Tensor) -> tuple[None, None]:
        out.copy_(raw.view(dtype))
        return None, None

    return split


def _q4_0(raw: Tensor, out: Tensor) -> tuple[Tensor, None]:
    _nibbles(raw[:, 2:], out)
    out.sub_(8)
    return _half(raw, 0), None


def _q4_1(raw: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    _nibbles(raw[:, 4:], out)
    return _half(raw, 0), _half(raw, 2)


def _q5_0(raw: Tensor, out: Tensor) -> tuple[Tensor, None]:
    _nibbles(raw[:, 6:], out)
    _fifth_bits(raw, 2, out)
    out.sub_(16)
    return _half(raw, 0), None


def _q5_1(raw: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    _nibbles(raw[:, 8:], out)
    _fifth_bits(raw, 4, out)
    return _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Tensor, out: Tensor) -> tuple[Tensor, None]:
    out.copy_(raw[:, 2:].contiguous().view(torch.int8))
    return _half(raw, 0), None


def _spread(raw: Tensor, width: int, bits: int) -> Tensor:
    """Fields of `bits` bits, `width` bytes at a time: the lowest field of each, then the next: [n, G, width]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)[:, None]
    fields = raw.reshape(len(raw), -1, 1, width) >> shifts
    return (fields & ((1 << bits) - 1)).view(len(raw), -1, width)


def _scales_and_least(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes of Q4_K and Q5_K: eight scales and eight least values of six bits. The first four of either are the
    low bits of a byte each; of the others four bits come together, and two lie above the first four.
    """
    first, second, both = raw.reshape(len(raw), 3, 4).unbind(1)
    scales = torch.cat([first & 63, (both & 15) | (first >> 6 << 4)], 1)
    least = torch.cat([second & 63, (both >> 4) | (second >> 6 << 4)], 1)
    return scales.float(), least.float()


def _q2_k(raw: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    out.copy_(_spread(raw[:, 16:80], 32, 2).flatten(1))
    both = raw[:, :16]
    return _half(raw, 80) * (both & 15).float(), -(_half(raw, 82) * (both >> 4).float())


def _q3_k(raw: Tensor, out: Tensor) -> tuple[Tensor, None]:
    out.copy_(_spread(raw[:, 32:96], 32, 2).flatten(1))
    out.add_(_spread(raw[:, :32], 32, 1).flatten(1), alpha=4).sub_(4)
    scales = _spread(raw[:, 96:104], 8, 4).flatten(1) | (_spread(raw[:, 104:108], 4, 2).flatten(1) << 4)
    return _half(raw, 108) * (scales.float() - 32), None


def _q4_k(raw: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    out.copy_(_spread(raw[:, 16:], 32, 4).flatten(1))
    scales, least = _scales_and_least(raw[:, 4:16])
    return _half(raw, 0) * scales, -(_half(raw, 2) * least)


def _q5_k(raw: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    out.copy_(_spread(raw[:, 48:], 32, 4).flatten(1))
    out.add_(_spread(raw[:, 16:48], 32, 1).flatten(1), alpha=16)
    scales, least = _scales_and_least(raw[:, 4:16])
    return _half(raw, 0) * scales, -(_half(raw, 2) * least)


def _q6_k(raw: Tensor, out: Tensor) -> tuple[Tensor, None]:
    out.copy_(_spread(raw[:, :128], 64, 4).flatten(1))
    out.add_(_spread(raw[:, 128:192], 32, 2).flatten(1), alpha=16).sub_(32)
    return _half(raw, 208) * raw[:, 192:208].contiguous().view(torch.int8).float(), None


TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # numbers of e2m1, times two


def _mxfp4(raw: Tensor, out: Tensor) -> tuple[Tensor, None]:
    """Floats of 4 bits, and the exponent of a power of two: 255 is no number."""
    packed = raw[:, 1:].int()
    values = torch.tensor(TWICE, dtype=out.dtype, device=raw.device)
    out[:, :16], out[:, 16:] = values[packed & 15], values[packed >> 4]
    exponent = raw[:, :1].int()
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 128).float()
    return torch.where(exponent == 255, torch.nan, scale), None


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _as(torch.float32)),
    1: Format("F16", 1, 2, _as(torch.float16)),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    7: Format("Q5_1", 32, 24, _q5_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    10: Format("Q2_K", 256, 84, _q2_k),
    11: Format("Q3_K", 256, 110, _q3_k),
    12: Format("Q4_K", 256, 144, _q4_k),
    13: Format("Q5_K", 256, 176, _q5_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    30: Format("BF16", 1, 2, _as(torch.bfloat16)),
    39: Format("MXFP4", 32, 17, _mxfp4),
}

# Parts of the scale that reaches a block's largest value: with a smaller scale the other values often fit better.
SHRINK = (1.0, 0.95, 0.9, 0.85)


def quantize(weight: Tensor, kind: str, name: str = "") -> Blocks:
    """A matrix rounded to `int8` (as Q8_0) or `int4` (as Q4_0, each block by the scale that fits it best)."""
    form = FORMATS[{"int8": 8, "int4": 2}[kind]]
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % form.values))
    raw = torch.empty(rows, padded.shape[1] // form.values, form.bytes, dtype=torch.uint8)
    step = max(1, CHUNK_BLOCKS * 32 // padded.shape[1])
    for start in range(0, rows, step):
        blocks = padded[start : start + step].reshape(-1, form.values).float()
        scale, numbers = _eighths(blocks) if kind == "int8" else _sixteenths(blocks)
        part = raw[start : start + step].view(-1, form.bytes)
        part[:, :2] = scale.half().view(torch.uint8)
        part[:, 2:] = numbers
    return Blocks(name, form, raw.flatten(1), columns)


def _rounded(blocks: Tensor, scale: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The scales [n, 1] as they are stored, and the numbers that are nearest with them."""
    scale = scale.half().float()
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return scale, (blocks * inverse).round_().clamp_(low, high)


def _eighths(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scale, numbers = _rounded(blocks, blocks.abs().amax(1, keepdim=True) / 127, -127, 127)
    return scale, numbers.to(torch.int8).view(torch.uint8)


def _sixteenths(blocks: Tensor) -> tuple[Tensor, Tensor]:
    extreme = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    tried = [_rounded(blocks, extreme * part, -8, 7) for part in SHRINK]
    errors = torch.cat([(numbers * s - blocks).square_().sum(1, keepdim=True) for s, numbers in tried], 1)
    scale, numbers = tried[0]
    for i, (other, others) in enumerate(tried[1:], 1):
        better = errors[:, i, None] < errors[:, :i].amin(1, keepdim=True)
        scale, numbers = torch.where(better, other, scale), torch.where(better, others, numbers)
    stored = (numbers + 8).to(torch.uint8)
    return scale, stored[:, :16] | stored[:, 16:] << 4


# Formats that exist but that Outrider does not read, so that a refusal can name them.
OTHER_FORMATS: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
