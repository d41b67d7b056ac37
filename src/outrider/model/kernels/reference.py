"""The kernels in plain torch: the reference for native.py, and the fallback without a compiler.

Every function works on one row at a time where torch's own result would depend on how many rows there are
(its matmul picks another kernel for one row than for two), so identity holds here too; slow for prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.formats import keep, widened
from outrider.cache.store import KeyValueStore
from outrider.load.config import CLAMPED, LayerSpec, ModelConfig
from outrider.load.quants import Blocks
from outrider.model.kernels.reference_blocks import BlockMatrix
from outrider.model.kernels.reference_experts import ExpertMlp, route
from outrider.model.parallel import ALONE
from outrider.model.rope import RopeTables
from outrider.model.weights import MATRICES, LayerTensors, Weight, parts_of
from outrider.types import Batch
from outrider.verify.filters import filter_logits
from outrider.verify.noise import draw

Matrix = Tensor | BlockMatrix | tuple[Tensor | BlockMatrix, ...]


@dataclass(slots=True)
class ReferenceLinear:
    weight: Matrix  # [N, K]
    bias: Tensor | None


class ReferenceKernels:
    name, group = "torch", ALONE
    touched = 0  # experts with rows, added up over layers

    def __init__(self, config: ModelConfig, tables: RopeTables) -> None:
        self.config, self.tables = config, tables

    def pack_layer(self, tensors: LayerTensors) -> LayerTensors:
        packed = {
            name: _packed(getattr(tensors, name)) for name in MATRICES if getattr(tensors, name) is not None
        }
        if (e := tensors.experts) is not None:
            of_each: dict[str, Any] = {
                name: [_packed(one) for one in getattr(e, name)] for name in ("gate", "up", "down")
            }
            packed["experts"] = replace(e, **of_each)
        return replace(tensors, **packed)

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(_packed(weight), bias)

    def pack_ends(self, embedding: Weight, head: Weight) -> tuple[ReferenceLinear, ReferenceLinear]:
        """A model's first and last matrix, which may be the same."""
        first = self.pack_linear(embedding)
        return first, first if head is embedding else self.pack_linear(head)

    def embed(self, table: ReferenceLinear, ids: Tensor, scale: float = 1.0) -> Tensor:
        if isinstance(table.weight, tuple):
            raise TypeError("an embedding has one format")
        return table.weight[ids] * scale

    def linear(self, linear: ReferenceLinear, x: Tensor) -> Tensor:
        return rowwise_linear(x, linear.weight, linear.bias)

    def head(self, x: Tensor, rows: Tensor, norm: Tensor, linear: ReferenceLinear) -> Tensor:
        """Logits of the chosen rows of the last hidden states."""
        logits = self.linear(linear, self.norm(x[rows], norm)) / self.config.logit_divisor
        cap = self.config.softcap
        return rowwise(partial(softcapped, cap), logits) if cap else logits

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, weight, self.config.norm_eps if eps is None else eps)

    def layer(self, w: LayerTensors, x: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """x [R, hidden] becomes the layer's output, in place; its keys and values go to their slots."""
        inputs = x if w.attn_norm is None else self.norm(x, w.attn_norm)
        self.layer_from(w, inputs, x, batch, keys, values)

    def layers(
        self,
        layers: Seq[LayerTensors],
        x: Tensor,
        batch: Batch,
        keys: Seq[Tensor],
        values: Seq[Tensor],
        features: KeyValueStore | None = None,
    ) -> None:
        layer_by_layer(self.layer, layers, x, batch, keys, values, features)

    def layer_from(
        self, w: LayerTensors, inputs: Tensor, x: Tensor, batch: Batch, keys: Tensor, values: Tensor
    ) -> None:
        """The same from its normed inputs on, which may be wider than x."""
        s, rows = w.spec, len(x)
        qkv = rowwise_linear(inputs, w.qkv, w.qkv_bias)
        q, k, v = qkv.view(rows, -1, s.head_dim).split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._normed_heads(q, w.q_norm, s), self._normed_heads(k, w.k_norm, s)
        if (table := self.tables.of(s)) is not None:
            at = batch.positions
            cos, sin = table.cos[at][:, None], table.sin[at][:, None]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            q = q if table.gain is None else q * table.gain[at][:, None, None]
        keep(keys, batch.slots, k)
        keep(values, batch.slots, v)
        mixed = self.attention(q, batch, keys, values, s.window, s.scale, s.softcap, w.sinks, s.chunk)
        self._add(x, rowwise_linear(mixed.reshape(rows, -1), w.out, w.out_bias), w.out_norm)
        h = x if w.mlp_norm is None else self.norm(x, w.mlp_norm)
        if s.experts is None:
            added = mlp(w, h)
        else:
            added, touched = experts_mlp(w, h)
            self.touched += touched
        self._add(x, added, w.down_norm)

    def _normed_heads(self, x: Tensor, weight: Tensor, spec: LayerSpec) -> Tensor:
        """x [R, heads, head_dim]"""
        whole = x.flatten(1) if spec.qk_norm == "whole" else x
        return self.norm(whole, weight).view_as(x)

    def _add(self, x: Tensor, more: Tensor, norm: Tensor | None) -> None:
        x += self.config.residual_scale * (more if norm is None else self.norm(more, norm))

    def draw(self, logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return draw(logits, sampled, seeds, positions)

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
        filter_logits(logits, top_k, top_p, log_min_p)

    def attention(
        self,
        q: Tensor,
        batch: Batch,
        keys: Tensor,
        values: Tensor,
        window: int,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """q [R, heads, head_dim] over what each row sees in the slots -> [R, heads, head_dim]."""
        rows, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        out = torch.empty_like(q)
        for r in range(rows):
            slots = visible_slots(batch, r, window, chunk)
            k, v = (
                widened(kept[slots]).transpose(0, 1) for kept in (keys, values)
            )  # [kv_heads, n, head_dim]
            grouped = q[r].view(kv_heads, heads // kv_heads, head_dim)
            scores = grouped @ k.transpose(1, 2) * scale
            scores = softcapped(softcap, scores) if softcap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(*scores.shape[:2], 1)], -1)
            out[r] = (scores.softmax(-1)[..., : len(slots)] @ v).reshape(heads, head_dim)
        return out


def layer_by_layer(
    run: Callable[[Any, Tensor, Batch, Tensor, Tensor], None],
    layers: Seq[Any],
    x: Tensor,
    batch: Batch,
    keys: Seq[Tensor],
    values: Seq[Tensor],
    features: KeyValueStore | None,
) -> None:
    """Runs layers one after the other; `features` keeps the hidden states before each and after the last."""
    for i, (layer, to_keys, to_values) in enumerate(zip(layers, keys, values, strict=True)):
        if features is not None:
            features.keep_feature(i, x, batch.slots)
        run(layer, x, batch, to_keys, to_values)
    if features is not None:
        features.keep_feature(len(layers), x, batch.slots)


def visible_slots(batch: Batch, row: int, window: int, chunk: int = 0) -> Tensor:
    """The slots a row sees, oldest first: a range of its table, then its ancestors in the tree.

    A window narrower than the row's depth in the tree begins inside the tree, and a chunk may.
    """
    table = batch.table[batch.table_rows[row]]
    prefix, mask = int(batch.prefix[row]), int(batch.ancestors[row])
    position = int(batch.positions[row])
    first = max(0, position + 1 - window) if window else position // chunk * chunk if chunk else 0
    nodes = [prefix + i for i in range(64) if mask >> i & 1][max(0, first - prefix) :]
    return torch.cat([table[first:prefix], table[nodes]]) if nodes else table[first:prefix]


def _packed(weight: Weight) -> Any:
    packed = [BlockMatrix(part) if isinstance(part, Blocks) else part.float() for part in parts_of(weight)]
    return packed[0] if len(packed) == 1 else tuple(packed)


def mlp(w: Any, x: Tensor) -> Tensor:
    """The layer's MLP of all rows, or one expert's."""
    gate, up = rowwise_linear(x, w.gate, w.gate_bias), rowwise_linear(x, w.up, w.up_bias)
    return rowwise_linear(gated(gate, up, w.spec.activation, w.spec.clamp), w.down, w.down_bias)


def gated(gate: Tensor, up: Tensor, activation: str, clamp: float = 0.0) -> Tensor:
    if activation == CLAMPED:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp) + 1
    return rowwise(ACTIVATIONS[activation], gate) * up


def experts_mlp(w: LayerTensors, x: Tensor) -> tuple[Tensor, int]:
    """What a row's experts give, in ascending order of their numbers, then the MLP of all rows; and how many experts
    have rows.
    """
    e, t = w.spec.experts, w.experts
    assert e is not None and t is not None
    chosen, weights = route(rowwise_linear(x, t.router, t.router_bias), e, t.correction)
    out, touched = torch.zeros_like(x), chosen.unique().tolist()
    for i in touched:
        rows, at = torch.where(chosen == i)
        weight, inputs = weights[rows, at, None], x[rows]
        if e.weighs_input:
            inputs, weight = inputs * weight, torch.ones(())
        out[rows] += weight * mlp(ExpertMlp(t, i, w.spec), inputs)
    if w.gate is not None:
        shared = mlp(w, x)
        gate = t.shared_gate
        out = out + (shared if gate is None else shared * rowwise_linear(x, gate, None).sigmoid())
    return out, len(touched)


def rowwise_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    if isinstance(weight, tuple):
        out = torch.cat([rowwise_linear(x, part, None) for part in weight], 1)
        return out if bias is None else out + bias
    if isinstance(weight, BlockMatrix):
        out = weight.product(x)
        return out if bias is None else out + bias
    return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """torch rounds the end of a tensor, short of a full vector, differently from its middle."""
    return torch.cat([function(row) for row in x.split(1)]) if len(x) else x


def softcapped(cap: float, x: Tensor) -> Tensor:
    return cap * torch.tanh(x / cap)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    CLAMPED: lambda x: x * torch.sigmoid(1.702 * x),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension: (a, b) -> (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
