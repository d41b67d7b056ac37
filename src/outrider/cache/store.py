"""The KV cache's storage: keys and values, one pair of tensors a layer, indexed by slot. No policy here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from typing import Any

import torch
from torch import Tensor

from outrider.cache.formats import stored_size

ALIGNED = 64  # numbers: GPU kernels are compiled for addresses that 16 divides


class KeyValueStore:
    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        slots: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        kept: torch.dtype | None = None,
    ) -> None:
        """`shapes` are the key heads and head size of each layer; `dtype` is that of hidden states, `kept` that of keys
        and values where it is another (formats.py). Allocates one slot more than `slots`: rows of padding write to the
        last one.

        A GPU's memory starts as zeros: its kernels load masked slots with weight 0, so these must hold finite numbers.
        CPU kernels read only visible slots, and untouched memory costs nothing.
        """
        self.slots, self.dtype, kept = slots, dtype, kept or dtype
        where: dict[str, Any] = {"device": device, "dtype": kept}
        self._make = torch.empty if dtype == torch.float32 else torch.zeros
        shapes = [(heads, stored_size(size, kept)) for heads, size in shapes]
        # One allocation: many large ones take a tenth of a second. Views per layer are made once, not in every pass.
        sizes = [-(-(slots + 1) * heads * size // ALIGNED) * ALIGNED for heads, size in shapes]
        parts = self._make(2 * sum(sizes), **where).split(2 * sizes)
        both = [
            part[: (slots + 1) * math.prod(shape)].view(slots + 1, *shape)
            for part, shape in zip(parts, 2 * shapes, strict=True)
        ]
        self.keys: list[Tensor] = both[: len(shapes)]
        self.values: list[Tensor] = both[len(shapes) :]
        self.taps: tuple[int, ...] = ()
        self.features: Tensor | None = None
        self.addresses: tuple[Any, c_void_p | None] = None, None  # of taps and features, for kernels of a CPU

    def tap(self, layers: tuple[int, ...], hidden: int) -> None:
        """Starts to store, by slot, the hidden states that enter these layers; the number of layers stands for the
        states that leave the last one. `features` is [slots, len(layers), hidden].
        """
        self.taps = layers
        like = self.keys[0]
        self.features = self._make(len(like), len(layers), hidden, dtype=self.dtype, device=like.device)
        self.addresses = (c_int32 * len(layers))(*layers), c_void_p(self.features.data_ptr())

    def tapped(self, layer: int) -> list[Tensor]:
        """By slot, where hidden states that enter this layer are stored: a shallow model may have one tapped twice."""
        if self.features is None:
            return []
        return [self.features[:, place] for place, tapped in enumerate(self.taps) if tapped == layer]

    def keep_feature(self, layer: int, x: Tensor, slots: Tensor) -> None:
        """Stores the hidden states that enter this layer if it is tapped: kernels without a call of their own."""
        for features in self.tapped(layer):
            features[slots] = x.to(features.dtype)
