"""Rotary position tables: cos and sin for every position, [context, head_dim / 2], float32.

Numbers of a head that are not rotated are at the end of each half (load/weight_map.py): cos is 1 and sin 0 there.

A table makes a row's rotation depend on its position alone. `dynamic` therefore scales by position: token p uses the
base for length p + 1, as a model that reads one token at a time. It never depends on how a prompt was chunked.
`longrope` has frequencies for short and for long texts: the context that the model was loaded for decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import BadCheckpoint, OutOfMemory
from outrider.load.config import GAIN_FROM, QUERY_BETA, TRAINED, LayerSpec, ModelConfig, Rope
from outrider.types import MAX_NODES

MAX_TABLE = 4 << 30  # bytes of both tables


@dataclass(frozen=True, slots=True)
class RopeTable:
    cos: Tensor
    sin: Tensor
    gain: Tensor | None = None  # [context]: rotated queries are multiplied by it


class RopeTables:
    """The tables of a model's layers, each made once, for a number of positions."""

    def __init__(self, positions: int, known: Sequence[tuple[Rope, int, RopeTable]] = ()) -> None:
        self.positions, self.known = positions, known

    def of(self, spec: LayerSpec) -> RopeTable | None:
        """None for a layer without rotary positions."""
        wanted = (spec.rope, spec.head_dim)
        return next((table for *one, table in self.known if tuple(one) == wanted), None)

    @property
    def only(self) -> tuple[Tensor, Tensor]:
        """Cos and sin of a model whose layers share one table."""
        [(_, _, table)] = self.known
        return table.cos, table.sin


def rope_tables(config: ModelConfig, positions: int) -> RopeTables:
    kinds: list[tuple[Rope, int]] = []
    for spec in config.specs:
        if spec.rope is not None and (spec.rope, spec.head_dim) not in kinds:
            kinds.append((spec.rope, spec.head_dim))
    size = 4 * positions * sum(head_dim for _, head_dim in kinds)
    if size > MAX_TABLE:
        raise OutOfMemory(
            f"the rotary tables of a context of {positions} tokens take {size / (1 << 30):.1f} GiB: say --context "
            "with fewer"
        )
    return RopeTables(positions, [(*kind, _checked(*kind, config.context, positions)) for kind in kinds])


def _checked(rope: Rope, head_dim: int, trained: int, positions: int) -> RopeTable:
    try:
        cos, sin = _tables(rope, rope.turned(head_dim), trained, positions)
        unturned = (0, (head_dim - rope.turned(head_dim)) // 2)
        cos, sin = F.pad(cos, unturned, value=1.0), F.pad(sin, unturned)
        gain = _query_gain(rope, positions)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as problem:
        raise BadCheckpoint(
            f"the config's rope scaling {rope.kind!r} cannot be read: {problem!s:.200}"
        ) from None
    if not (cos[-1].isfinite().all() and sin[-1].isfinite().all()):
        raise BadCheckpoint(f"the config's rope scaling {rope.kind!r} gives no finite positions")
    return RopeTable(cos, sin, gain)


def _query_gain(rope: Rope, positions: int) -> Tensor | None:
    """1 within the trained length, then rising with the position's logarithm; None if it is 1 throughout."""
    beta, trained, first = (rope.scaling.get(name, 0) for name in (QUERY_BETA, TRAINED, GAIN_FROM))
    if not beta or not trained or positions + first <= trained:
        return None
    return 1 + beta * torch.log1p((torch.arange(first, positions + first) / trained).floor())


def _tables(rope: Rope, dim: int, trained: int, context: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(context, dtype=torch.float32)[:, None]
    scaling, gain = rope.scaling, 1.0
    if rope.kind == "dynamic":
        inverse = _dynamic(rope.theta, dim, scaling, trained, context)
    else:
        inverse = _inverse_frequencies(rope.theta, dim)
        if rope.kind == "none":
            inverse = torch.zeros_like(inverse)
        elif rope.kind == "linear":
            inverse = inverse / scaling["factor"]
        elif rope.kind == "llama3":
            inverse = _llama3(inverse, scaling)
        elif rope.kind == "yarn":
            inverse, gain = _yarn(inverse, rope.theta, dim, scaling, trained)
        elif rope.kind == "longrope":
            inverse, gain = _longrope(inverse, scaling, context)
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


def _longrope(inverse: Tensor, scaling: Mapping[str, Any], positions: int) -> tuple[Tensor, float]:
    trained, factor, gain = scaling[TRAINED], scaling.get("factor") or 1.0, scaling.get("attention_factor")
    name = "long_factor" if positions - MAX_NODES - 1 > trained else "short_factor"
    factors = torch.tensor(scaling[name], dtype=torch.float32)
    if factors.shape != inverse.shape:
        raise ValueError(f"{name} has {len(factors)} numbers, not {len(inverse)}")
    if gain is None:
        gain = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inverse / factors, float(gain)


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
