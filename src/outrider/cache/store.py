"""Where keys and values lie: one pair of tensors a layer, indexed by slot. Storage only, no policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeyValueStore:
    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """One slot more than asked for: nobody's, where rows of padding write."""
        self.slots = slots
        shape = (slots + 1, kv_heads, head_dim)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        # One tensor a layer, made once: indexing a stacked tensor in every pass would cost a view each time.
        self.keys: list[Tensor] = [torch.empty(shape, **where) for _ in range(layers)]
        self.values: list[Tensor] = [torch.empty(shape, **where) for _ in range(layers)]
        self.taps: tuple[int, ...] = ()
        self.features: Tensor | None = None

    def tap(self, layers: tuple[int, ...], hidden: int) -> None:
        """From now on keep, slot by slot, the hidden states that enter these layers: [slots, len(layers),
        hidden].
        """
        self.taps = layers
        self.features = torch.empty(len(self.keys[0]), len(layers), hidden)

    def keep_feature(self, layer: int, x: Tensor, slots: Tensor) -> None:
        if self.features is None:
            return
        for place, tapped in enumerate(self.taps):  # a shallow model may have one layer tapped twice
            if tapped == layer:
                self.features[slots, place] = x
