"""The decoder's kernels on a CUDA device, in bfloat16 with a float32 residual stream. Twin: reference.py.

A layer is nine launches: norm, qkv, rope and cache write (which attention does itself for single rows), attention
(two), output, norm, gate and up, down. The
sums that a matmul leaves in parts are added by the norm that follows, which for `down` is in the next layer:
`run_layers` keeps them pending in between, `layer` settles them at once. Both give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import KernelUnavailable
from outrider.load.config import ModelConfig
from outrider.model.kernels.gpu.ahead import is_collecting
from outrider.model.kernels.gpu.attention import (
    AttentionPlan,
    Fresh,
    JointPlan,
    attend,
    attend_parts,
    plan_attention,
)
from outrider.model.kernels.gpu.draw import draw_rows
from outrider.model.kernels.gpu.filter import filter_rows
from outrider.model.kernels.gpu.library import padded_rows
from outrider.model.kernels.gpu.matmul import Packed, gated_linear, linear, multiply_parts, pack
from outrider.model.kernels.gpu.rows import add_and_norm, embed
from outrider.model.parallel import ALONE, Group
from outrider.model.weights import LayerTensors
from outrider.types import Batch

MAX_DIM, MAX_GROUP = 256, 16
# Errors of the head directly change the logits, and the head is a small part of the weights.
HEAD_KINDS = {"int4": "int8"}


@dataclass(slots=True)
class GpuLinear:
    weight: Packed
    bias: Tensor | None  # float32


@dataclass(slots=True)
class GpuLayer:
    attn_norm: Tensor
    qkv: GpuLinear
    norms: tuple[Tensor, Tensor, float] | None
    out: GpuLinear
    mlp_norm: Tensor
    gate_up: GpuLinear
    down: GpuLinear
    window: int


class GpuKernels:
    name = "triton"

    def __init__(
        self,
        config: ModelConfig,
        cos: Tensor,
        sin: Tensor,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        weights: str = "bfloat16",
        group: Group = ALONE,
    ) -> None:
        """`weights`: what layers and head are stored as, `bfloat16` (as dtype) or a kind of quantise.py. `config` is
        the whole model's; a rank of several has some heads and outputs.
        """
        if config.head_dim > MAX_DIM:
            raise KernelUnavailable(f"head size {config.head_dim} is larger than {MAX_DIM}")
        if config.heads // config.kv_heads > MAX_GROUP:
            raise KernelUnavailable(
                f"{config.heads // config.kv_heads} heads to a key are more than {MAX_GROUP}"
            )
        self.whole, self.config, self.group = config, group.share(config), group
        self.device, self.dtype, self.weights = torch.device(device), dtype, weights
        self.tables = cos.to(self.device).contiguous(), sin.to(self.device).contiguous()
        self.scale = config.head_dim**-0.5
        self._read: tuple[Batch, AttentionPlan] | None = None

    # -------------------------------------------------------------------------------------------- weights

    def pack_layer(self, w: LayerTensors) -> GpuLayer:
        norms, c = None, self.whole
        if w.q_norm is not None and w.k_norm is not None:
            norms = (self._small(w.q_norm), self._small(w.k_norm), self.config.norm_eps)
        bias = None if w.gate_bias is None or w.up_bias is None else torch.cat([w.gate_bias, w.up_bias])
        return GpuLayer(
            attn_norm=self._small(w.attn_norm),
            qkv=self._packed((w.qkv,), w.qkv_bias, self.weights, (c.heads + 2 * c.kv_heads) * c.head_dim),
            norms=norms,
            out=self._packed((w.out,), w.out_bias, self.weights, c.hidden),
            mlp_norm=self._small(w.mlp_norm),
            gate_up=self._packed((w.gate, w.up), bias, self.weights, c.intermediate),
            down=self._packed((w.down,), w.down_bias, self.weights, c.hidden),
            window=w.window,
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, whole: int = 0) -> GpuLinear:
        return self._packed((weight,), bias, "bfloat16", whole)

    def pack_ends(self, embedding: Tensor, head: Tensor) -> tuple[GpuLinear, GpuLinear]:
        """A model's first and last matrix. In fewer bits a tied matrix is stored twice: the head is read whole for
        every token and is rounded; the embedding is read by the row and stays as it is.
        """
        vocab = self.whole.vocab
        first = self.pack_linear(embedding, whole=vocab)
        if head is embedding and self.weights == "bfloat16":
            return first, first
        return first, self._packed((head,), None, HEAD_KINDS.get(self.weights, self.weights), vocab)

    def _packed(self, halves: tuple[Any, ...], bias: Tensor | None, kind: str, whole: int) -> GpuLinear:
        packed = pack(*halves, kind=kind, device=self.device, dtype=self.dtype, whole=whole)
        return GpuLinear(packed, None if bias is None else self._small(bias))

    def _small(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, torch.float32).contiguous()

    # --------------------------------------------------------------------------------------------- pieces

    def embed(self, table: GpuLinear, ids: Tensor) -> Tensor:
        return embed(ids.to(self.device), table.weight)

    def linear(self, linear_: GpuLinear, x: Tensor) -> Tensor:
        return linear(x.to(self.dtype), linear_.weight, linear_.bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        out = torch.empty_like(x)
        small = self.config.norm_eps if eps is None else eps
        add_and_norm(x.float(), None, weight.to(self.device), small, out)
        return out

    def head(self, x: Tensor, rows: Tensor, norm: Tensor, linear_: GpuLinear) -> Tensor:
        return self.finish(x, None, rows, norm, linear_)

    def finish(
        self, x: Tensor, pending: Tensor | None, rows: Tensor, norm: Tensor, linear_: GpuLinear
    ) -> Tensor:
        """Logits of the chosen rows, float32, once what is pending has been added."""
        count = len(rows)
        normed = self._room(count, x.shape[1])
        add_and_norm(x, pending, norm.to(self.device), self.config.norm_eps, normed[:count], rows)
        return linear(normed, linear_.weight, linear_.bias, count)

    def _padded(self, rows: Tensor, count: int) -> Tensor:
        """`count` rows that other ranks have parts of, in space for as many as a matmul reads."""
        room = self._room(count, rows.shape[1])
        room[:count] = rows
        return room

    def _settled(self, x: Tensor, pending: Tensor) -> Tensor | None:
        """What is still to be added to x. Ranks have outputs of their own, so theirs are added and gathered at once."""
        if self.group.size == 1:
            return pending
        own = x[:, self.group.cut(self.whole.hidden)].contiguous()
        add_and_norm(own, pending, None, 0.0, None)
        x.copy_(self.group.gather(own, self.whole.hidden))
        return None

    def draw(self, logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        there = logits.device
        return draw_rows(logits, sampled.to(there), seeds.to(there), positions.to(there))

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
        there = logits.device
        filter_rows(logits, top_k.to(there), top_p.to(there), log_min_p.to(there))

    def attention(
        self, q: Tensor, batch: Batch, keys: Tensor, values: Tensor, window: int, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        attention = plan_attention(batch, q.shape[1], keys.shape[1], q.shape[2])
        attend(q.to(keys.dtype), batch, keys, values, window, scale, attention, out)
        return out

    # ----------------------------------------------------------------------------------------------- layers

    def layer(self, layer: GpuLayer, x: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """x [R, hidden] float32 becomes the layer's output, in place."""
        pending = self._layer(layer, x, None, batch, keys, values, self._reading(batch))
        if pending is not None:
            add_and_norm(x, pending, None, 0.0, None)

    def layers(
        self,
        layers: Sequence[GpuLayer],
        x: Tensor,
        batch: Batch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        for layer, to_keys, to_values in zip(layers, keys, values, strict=True):
            self.layer(layer, x, batch, to_keys, to_values)

    def run_layers(
        self,
        layers: Sequence[GpuLayer],
        x: Tensor,
        batch: Batch,
        store: KeyValueStore,
        attention: AttentionPlan | JointPlan,
        pending: Tensor | None = None,
        first: int = 0,
    ) -> Tensor | None:
        """All layers, which are numbered from `first` on; returns what is still to be added to x."""
        for i, layer in enumerate(layers, first):
            pending = self._keep_feature(i, x, pending, batch, store)
            pending = self._layer(layer, x, pending, batch, store.keys[i], store.values[i], attention)
        return self._keep_feature(first + len(layers), x, pending, batch, store)

    def _keep_feature(
        self, layer: int, x: Tensor, pending: Tensor | None, batch: Batch, store: KeyValueStore
    ) -> Tensor | None:
        if layer not in store.taps:
            return pending
        if pending is not None:
            add_and_norm(x, pending, None, 0.0, None)
        if not is_collecting():
            store.keep_feature(layer, x, batch.slots)
        return None

    def _layer(
        self,
        w: GpuLayer,
        x: Tensor,
        pending: Tensor | None,
        batch: Batch,
        keys: Tensor,
        values: Tensor,
        attention: AttentionPlan | JointPlan,
    ) -> Tensor | None:
        normed = self._room(*x.shape)
        add_and_norm(x, pending, w.attn_norm, self.config.norm_eps, normed[: len(x)])
        return self.rest_of_layer(w, x, normed, batch, keys, values, attention)

    def rest_of_layer(
        self,
        w: GpuLayer,
        x: Tensor,
        inputs: Tensor,
        batch: Batch,
        keys: Tensor,
        values: Tensor,
        attention: AttentionPlan | JointPlan,
    ) -> Tensor | None:
        """A layer from its normed inputs on, which may be wider than the stream, and more rows than x has; returns what
        is to be added to x.
        """
        c, rows = self.config, len(x)
        qkv = multiply_parts(inputs, w.qkv.weight, w.qkv.bias, rows)
        mixed = self._room(rows, c.heads * c.head_dim)
        fresh, heads = Fresh(qkv, self.tables, w.norms), mixed[:rows].view(rows, c.heads, c.head_dim)
        attend_parts(fresh, batch, keys, values, w.window, self.scale, attention, heads)
        if self.group.size > 1:
            width = self.whole.heads * c.head_dim
            mixed = self._padded(self.group.gather(mixed[:rows], width, self.whole.kv_heads), rows)
        pending = self._settled(x, multiply_parts(mixed, w.out.weight, w.out.bias, rows))
        normed = self._room(*x.shape)
        add_and_norm(x, pending, w.mlp_norm, c.norm_eps, normed[:rows])
        act = gated_linear(normed, w.gate_up.weight, w.gate_up.bias, rows)
        if self.group.size > 1:
            act = self._padded(self.group.gather(act[:rows], self.whole.intermediate), rows)
        return self._settled(x, multiply_parts(act, w.down.weight, w.down.bias, rows))

    def _room(self, rows: int, width: int) -> Tensor:
        """For what a matmul reads."""
        return torch.empty((padded_rows(rows), width), dtype=self.dtype, device=self.device)

    def _reading(self, batch: Batch) -> AttentionPlan:
        if self._read is None or self._read[0] is not batch:
            c = self.config
            self._read = batch, plan_attention(batch, c.heads, c.kv_heads, c.head_dim)
        return self._read[1]


def check_device(weights: str) -> None:
    """Says by name why a CUDA device cannot be used, or not with these weights."""
    if not torch.cuda.is_available():
        raise KernelUnavailable("torch sees no CUDA device; use --device cpu")
    if torch.cuda.get_device_capability() < (8, 0):
        raise KernelUnavailable("bfloat16 kernels need compute capability 8.0 or later")
    if triton.__version__ < "3.3":
        raise KernelUnavailable(f"triton {triton.__version__} is too old; 3.3 or later is needed")
    if weights == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        raise KernelUnavailable("fp8 weights need compute capability 8.9 or later; use int8")
