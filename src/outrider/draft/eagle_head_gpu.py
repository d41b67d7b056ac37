"""An EAGLE head on a CUDA device: layers of the GPU's own kernels, the first with inputs twice as wide. Twin:
`EagleHead`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.draft.eagle_head import EagleHead, HeadPass, Read, layer_of
from outrider.model.device import AttentionPlans, DeviceDecoder
from outrider.model.kernels.gpu.attention import AttentionPlan, plan_attention
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.rows import add_and_norm
from outrider.model.rope import RopeTables
from outrider.types import Batch


class GpuEagleHead(EagleHead):
    def _pack(self, read: Read, tables: RopeTables) -> None:
        assert isinstance(self.target, DeviceDecoder)
        target = self.target
        self.kernels = kernels = GpuKernels(self.config.layer, tables, target.device, target.dtype)
        [spec] = self.config.layer.specs
        self.layers = [kernels.pack_layer(layer_of(read, i, spec)) for i in range(self.config.layers)]
        self._pack_ends(read)

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight  # packing rounds

    def forward(self, hidden: Tensor, batch: Batch, store: KeyValueStore) -> Tensor:
        c, there = self.config.layer, batch.to(self.target.device)
        return self.run(hidden, there, store, plan_attention(there, c.heads, c.kv_heads, c.head_dim))

    def run(self, hidden: Tensor, batch: Batch, store: KeyValueStore, attention: AttentionPlan) -> Tensor:
        """`forward` of a batch on the device whose attention is known; it overwrites `hidden`."""
        c, kernels, first = self.config, self.kernels, self.layers[0]
        embedded = self._normed(self.target.embed(batch.ids), self.embed_norm)
        normed = self._normed(hidden, first.attn_norm)
        if c.normed_residual:
            hidden = self._normed(hidden, first.attn_norm, torch.float32)
        inputs = torch.cat([embedded, normed], dim=1)
        keys, values = store.keys[0], store.values[0]
        pending = kernels.rest_of_layer(first, hidden, inputs, batch, keys, values, attention)
        rest = kernels.run_layers(self.layers[1:], hidden, batch, store, attention, pending, first=1)
        if not c.norm_output:
            add_and_norm(hidden, rest, None, 0.0, None)
            return hidden
        out = torch.empty_like(hidden)
        add_and_norm(hidden, rest, self.norm, c.layer.norm_eps, out)
        return out

    def make_pass(self, store: KeyValueStore) -> HeadPass:
        """Nothing in it is for the host to look at. Rows of one sequence are at rising positions."""
        plans = AttentionPlans(self.config.layer, self.target.device)

        def run(hidden: Tensor, batch: Batch, together: int, context: int, branching: bool = False) -> Tensor:
            return self.run(hidden, batch, store, plans.of(batch, together, context, branching))

        return run

    def _normed(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty_like(x, dtype=dtype or self.kernels.dtype)
        add_and_norm(x, None, weight, self.config.layer.norm_eps, out)
        return out
