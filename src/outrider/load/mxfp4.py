"""Experts in MXFP4 as safetensors have them: a stack of blocks [experts, outputs, groups, 16], and one of their scales.

A byte holds two neighbouring weights of a group of 32, the first in its lower half. GGML's blocks, which the kernels
know, hold weight k beside weight k + 16, behind the scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.errors import BadCheckpoint
from outrider.load.quants import FORMATS, Blocks

MXFP4 = FORMATS[39]
SCALES = "_scales"
HALF = MXFP4.values // 2  # bytes of a group


def is_mxfp4(config: Any) -> bool:
    """Whether the `quantization_config` of a config.json says no more than that."""
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def stack_shape(stored: tuple[int, ...]) -> tuple[int, ...]:
    """[experts, outputs, inputs], or the shape itself if it is none of such blocks."""
    if len(stored) != 4 or stored[3] != HALF:
        return stored
    return stored[0], stored[1], stored[2] * MXFP4.values


def matrix_of(name: str, blocks: Tensor, scales: Tensor, place: int) -> Blocks:
    """The whole stack as far as it is known by its shape; of its numbers only those of expert `place` are read."""
    if blocks.dtype is not torch.uint8 or blocks.dim() != 4 or blocks.shape[3] != HALF:
        raise BadCheckpoint(
            f"tensor {name!r} is {blocks.dtype} of shape {list(blocks.shape)}, not bytes in blocks of {HALF}"
        )
    if scales.dtype is not torch.uint8 or scales.shape != blocks.shape[:3]:
        raise BadCheckpoint(
            f"tensor {name!r} of shape {list(blocks.shape)} has scales of {scales.dtype} {list(scales.shape)}"
        )
    if not 0 <= place < len(blocks):
        raise BadCheckpoint(
            f"tensor {name!r} has {len(blocks)} matrices; there should be one of number {place}"
        )
    own, exponents = blocks[place], scales[place]
    if bool((exponents == 255).any()):
        raise BadCheckpoint(f"tensor {name!r} is corrupt: some of its scales are no finite numbers")
    numbers = torch.stack((own & 15, own >> 4), -1).flatten(2)  # [outputs, groups, 32]
    raw = torch.cat([exponents[..., None], numbers[..., :HALF] | numbers[..., HALF:] << 4], -1)
    return Blocks(name, MXFP4, raw.flatten(1), blocks.shape[2] * MXFP4.values)
