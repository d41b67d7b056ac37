"""Where keys and values lie: one pair of tensors a layer, indexed by slot. Storage only, no policy."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueStore:
    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int) -> None:
        shape = (slots, kv_heads, head_dim)
        # One tensor a layer, made once: indexing a stacked tensor in every pass would cost a view each time.
        self.keys: list[Tensor] = [torch.empty(shape) for _ in range(layers)]
        self.values: list[Tensor] = [torch.empty(shape) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))
