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
        """One slot more than asked for: nobody's, where rows of padding write.

        On a GPU zeros, not whatever memory holds: a slot that a kernel loads and gives no weight must hold a number.
        On a CPU rows read only what they see, and memory that nobody has touched costs nothing.
        """
        self.slots = slots
        shape = (slots + 1, kv_heads, head_dim)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        # One tensor a layer, made once: indexing a stacked tensor in every pass would cost a view each time.
        make = torch.zeros if device is not None and device.type == "cuda" else torch.empty
        self.keys: list[Tensor] = [make(shape, **where) for _ in range(layers)]
        self.values: list[Tensor] = [make(shape, **where) for _ in range(layers)]
        self.taps: tuple[int, ...] = ()
        self.features: Tensor | None = None

    def tap(self, layers: tuple[int, ...], hidden: int) -> None:
        """From now on keep, slot by slot, the hidden states that enter these layers: [slots, len(layers),
        hidden].
        """
        self.taps = layers
        like = self.keys[0]
        make = torch.zeros if like.is_cuda else torch.empty
        self.features = make(len(like), len(layers), hidden, dtype=like.dtype, device=like.device)

    def keep_feature(self, layer: int, x: Tensor, slots: Tensor) -> None:
        if self.features is None:
            return
        for place, tapped in enumerate(self.taps):  # a shallow model may have one layer tapped twice
            if tapped == layer:
                self.features[slots, place] = x.to(self.features.dtype)
