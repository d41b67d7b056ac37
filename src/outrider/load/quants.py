"""GGML's number formats: how many bytes a block takes, and how it becomes float32. No files here.

A format is one row of `FORMATS`. The common ones unpack with torch, in chunks that bound the working
memory; the K-quants use the gguf package. It also defines the right answer for all of them: the results are
equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_BLOCKS = 65536  # of 32 values, 8 MB of float32; smaller ones measured slower: the calls cost more

Unpack = Callable[[Tensor, Tensor], None]  # raw blocks [n, bytes] uint8 -> out [n, values] float32


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    values: int  # in a block
    bytes: int  # of a block
    unpack: Unpack


def dequantize(raw: Tensor, form: Format) -> Tensor:
    """`raw` is a flat uint8 tensor of whole blocks; returns a flat float32 tensor that owns its memory."""
    blocks = raw.view(-1, form.bytes)
    out = torch.empty(len(blocks), form.values)
    step = max(1, CHUNK_BLOCKS * 32 // form.values)
    for start in range(0, len(blocks), step):
        form.unpack(blocks[start : start + step], out[start : start + step])
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
    bits = (word >> torch.arange(32, dtype=torch.int32)) & 1
    out.add_(bits, alpha=16)


def _as(dtype: torch.dtype) -> Unpack:
    def unpack(raw: Tensor, out: Tensor) -> None:
        out.copy_(raw.view(dtype))

    return unpack


def _q4_0(raw: Tensor, out: Tensor) -> None:
    _nibbles(raw[:, 2:], out)
    out.sub_(8).mul_(_half(raw, 0))


def _q4_1(raw: Tensor, out: Tensor) -> None:
    _nibbles(raw[:, 4:], out)
    out.mul_(_half(raw, 0)).add_(_half(raw, 2))


def _q5_0(raw: Tensor, out: Tensor) -> None:
    _nibbles(raw[:, 6:], out)
    _fifth_bits(raw, 2, out)
    out.sub_(16).mul_(_half(raw, 0))


def _q5_1(raw: Tensor, out: Tensor) -> None:
    _nibbles(raw[:, 8:], out)
    _fifth_bits(raw, 4, out)
    out.mul_(_half(raw, 0)).add_(_half(raw, 2))


def _q8_0(raw: Tensor, out: Tensor) -> None:
    out.copy_(raw[:, 2:].contiguous().view(torch.int8)).mul_(_half(raw, 0))


def _by_gguf(name: str) -> Unpack:
    def unpack(raw: Tensor, out: Tensor) -> None:
        # Importing gguf takes a third of a second: only files that hold K-quants pay for it.
        import gguf

        with np.errstate(all="ignore"):  # damaged scales may be infinite or no number at all
            values = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name])
        out.copy_(torch.from_numpy(values))

    return unpack


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _as(torch.float32)),
    1: Format("F16", 1, 2, _as(torch.float16)),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    7: Format("Q5_1", 32, 24, _q5_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    10: Format("Q2_K", 256, 84, _by_gguf("Q2_K")),
    11: Format("Q3_K", 256, 110, _by_gguf("Q3_K")),
    12: Format("Q4_K", 256, 144, _by_gguf("Q4_K")),
    13: Format("Q5_K", 256, 176, _by_gguf("Q5_K")),
    14: Format("Q6_K", 256, 210, _by_gguf("Q6_K")),
    30: Format("BF16", 1, 2, _as(torch.bfloat16)),
}

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
    39: "MXFP4",
    40: "NVFP4",
}
