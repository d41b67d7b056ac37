"""An EAGLE-3 head on a CUDA device: a layer of the GPU's own kernels with inputs twice as wide. Twin: `EagleHead`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.draft.eagle_head import EagleHead, HeadPass, joined_qkv
from outrider.model.device import AttentionPlans
from outrider.model.kernels.gpu.attention import AttentionPlan, plan_attention
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.rows import add_and_norm
from outrider.model.weights import LayerTensors
from outrider.types import Batch


class GpuEagleHead(EagleHead):
    def _pack(self, read: Callable[[str], Tensor], tables: tuple[Tensor, Tensor]) -> None:
        c, target = self.config.layer, self.target
        self.kernels = kernels = GpuKernels(c, *tables, target.device, target.dtype)
        self.fuse, self.head = (
            kernels.pack_linear(read("fc.weight")),
            kernels.pack_linear(read("lm_head.weight")),
        )
        self.layer = kernels.pack_layer(
            LayerTensors(
                attn_norm=read("midlayer.hidden_norm.weight"),
                qkv=joined_qkv(read),
                qkv_bias=None,
                q_norm=None,
                k_norm=None,
                out=read("midlayer.self_attn.o_proj.weight"),
                out_bias=None,
                mlp_norm=read("midlayer.post_attention_layernorm.weight"),
                gate=read("midlayer.mlp.gate_proj.weight"),
                up=read("midlayer.mlp.up_proj.weight"),
                gate_bias=None,
                up_bias=None,
                down=read("midlayer.mlp.down_proj.weight"),
                down_bias=None,
                window=0,
            )
        )
        self.embed_norm, self.norm = (
            read(name).to(target.device) for name in ("midlayer.input_layernorm.weight", "norm.weight")
        )

    def forward(self, hidden: Tensor, batch: Batch, store: KeyValueStore) -> Tensor:
        c, there = self.config.layer, batch.to(self.target.device)
        return self.run(hidden, there, store, plan_attention(there, c.heads, c.kv_heads, c.head_dim))

    def run(self, hidden: Tensor, batch: Batch, store: KeyValueStore, attention: AttentionPlan) -> Tensor:
        """`forward` of a batch on the device whose attention is known; the result takes `hidden`'s place."""
        embedded = self._normed(self.target.embed(batch.ids), self.embed_norm)
        both = torch.cat([embedded, self._normed(hidden, self.layer.attn_norm)], dim=1)
        pending = self.kernels.rest_of_layer(
            self.layer, hidden, both, batch, store.keys[0], store.values[0], attention
        )
        add_and_norm(hidden, pending, None, 0.0, None)
        return hidden

    def make_pass(self, store: KeyValueStore) -> HeadPass:
        """Nothing in it is for the host to look at. Rows of one sequence are at rising positions."""
        plans = AttentionPlans(self.config.layer, self.target.device)

        def run(hidden: Tensor, batch: Batch, together: int, context: int) -> Tensor:
            return self.run(hidden, batch, store, plans.of(batch, together, context))

        return run

    def _known(self, hidden: Tensor) -> Tensor:
        return self.kernels.linear(self.head, self._normed(hidden, self.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=self.kernels.dtype)
        add_and_norm(x, None, weight, self.config.layer.norm_eps, out)
        return out
