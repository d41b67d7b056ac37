"""Rotary position tables: cos and sin for every position, [context, head_dim / 2], float32.

A table makes a row's rotation depend on its position alone. `dynamic` therefore scales by position: token p uses the
base for length p + 1, as a model that reads one token at a time. It never depends on how a prompt was chunked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.errors import BadCheckpoint, OutOfMemory
from outrider.load.config import ModelConfig

MAX_TABLE = 4 << 30  # bytes of both tables


def rope_tables(config: ModelConfig, context: int) -> tuple[Tensor, Tensor]:
    size = 4 * context * config.head_dim
    if size > MAX_TABLE:
        raise OutOfMemory(
            f"the rotary tables of a context of {context} tokens take {size / (1 << 30):.1f} GiB: say --context "
            "with fewer"
        )
    try:
        cos, sin = _tables(config, context)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as problem:
        raise BadCheckpoint(
            f"the config's rope scaling {config.rope.kind!r} cannot be read: {problem!s:.200}"
        ) from None
    if not (cos[-1].isfinite().all() and sin[-1].isfinite().all()):
        raise BadCheckpoint(f"the config's rope scaling {config.rope.kind!r} gives no finite positions")
    return cos, sin


def _tables(config: ModelConfig, context: int) -> tuple[Tensor, Tensor]:
    dim, rope = config.head_dim, config.rope
    positions = torch.arange(context, dtype=torch.float32)[:, None]
    scaling, gain = rope.scaling, 1.0
    if rope.kind == "dynamic":
        inverse = _dynamic(rope.theta, dim, scaling, config.context, context)
    else:
        inverse = _inverse_frequencies(rope.theta, dim)
        if rope.kind == "linear":
            inverse = inverse / scaling["factor"]
        elif rope.kind == "llama3":
            inverse = _llama3(inverse, scaling)
        elif rope.kind == "yarn":
            inverse, gain = _yarn(inverse, rope.theta, dim, scaling, config.context)
    angles = positions * inverse
    return (angles.cos() * gain).contiguous(), (angles.sin() * gain).contiguous()


def _inverse_frequencies(theta: float | Tensor, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic(theta: float, dim: int, scaling: Mapping[str, Any], trained: int, context: int) -> Tensor:
    """One row of frequencies per position: the base grows beyond the trained length."""
    trained = scaling.get("original_max_position_embeddings") or trained
    length = torch.arange(1, context + 1, dtype=torch.float32).clamp(min=trained)
    growth = scaling["factor"] * length / trained - (scaling["factor"] - 1)
    base = theta * growth ** (dim / (dim - 2))
    return _inverse_frequencies(base[:, None], dim)


def _llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Scales long wavelengths by the factor, keeps short ones and blends those between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = ((trained / wavelength - low) / (high - low)).clamp(0, 1)
    return inverse / scaling["factor"] * (1 - blend) + inverse * blend


def _yarn(
    inverse: Tensor, theta: float, dim: int, scaling: Mapping[str, Any], context: int
) -> tuple[Tensor, float]:
    """Keeps high frequencies and scales low ones; attention gets a gain."""
    trained = scaling.get("original_max_position_embeddings") or context
    factor = scaling["factor"]

    def gain_of(scale: float, mscale: float) -> float:
        return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0

    gain = scaling.get("attention_factor")
    if gain is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        gain = gain_of(factor, 1.0)
        if mscale and mscale_all:
            gain = gain_of(factor, mscale) / gain_of(factor, mscale_all)

    def dimension(turns: float) -> float:
        """The (fractional) dimension whose wavelength fits `turns` times into the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32.0), dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), float(gain)
