"""The decoder's kernels on a CUDA device, in bfloat16 with a float32 residual stream. Twin: reference.py.

A layer is nine launches: norm, qkv, rope and cache write (which attention does itself for single rows), attention
(two), output, norm, gate and up, down. Experts add three: router, choice and schedule (of several rows). The
sums that a matmul leaves in parts are added by the norm that follows, after a norm of their own where a layer has one.
For `down` that is in the next layer: `run_layers` keeps them pending in between, `layer` settles them at once. Both
give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import triton
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import KernelUnavailable
from outrider.load.config import Experts, LayerSpec, ModelConfig
from outrider.load.quants import Blocks
from outrider.model.gpu_limits import gpu_obstacle
from outrider.model.kernels.gpu import mxfp4
from outrider.model.kernels.gpu.attention import (
    AttentionPlan,
    Fresh,
    JointPlan,
    attend,
    attend_parts,
    plan_attention,
)
from outrider.model.kernels.gpu.draw import draw_rows
from outrider.model.kernels.gpu.experts import expert_parts, gated_experts
from outrider.model.kernels.gpu.filter import filter_rows
from outrider.model.kernels.gpu.library import padded_rows
from outrider.model.kernels.gpu.matmul import (
    Packed,
    gated_linear,
    linear,
    multiply_parts,
    pack,
    pack_experts,
)
from outrider.model.kernels.gpu.routing import choose, schedule, schedule_one
from outrider.model.kernels.gpu.rows import ExpertParts, Normed, Pending, Tap, add_and_norm, embed
from outrider.model.kernels.reference import layer_by_layer
from outrider.model.parallel import ALONE, Group
from outrider.model.rope import RopeTable, RopeTables
from outrider.model.weights import ExpertTensors, LayerTensors
from outrider.types import Batch

# Errors of the head directly change the logits, and the head is a small part of the weights.
HEAD_KINDS = {"int4": "int8"}


@dataclass(slots=True)
class GpuLinear:
    weight: Packed
    bias: Tensor | None  # float32


@dataclass(slots=True)
class GpuExperts:
    """A layer's experts. `how` is of all ranks together."""

    how: Experts
    router: GpuLinear
    correction: Tensor | None  # float32
    shared_gate: GpuLinear | None
    gate_up: GpuLinear  # biases are [experts, outputs]
    down: GpuLinear


@dataclass(slots=True)
class GpuLayer:
    attn_norm: Tensor | None
    qkv: GpuLinear
    norms: tuple[Tensor, Tensor, float] | None
    out: GpuLinear
    out_norm: Tensor | None  # of what attention adds
    mlp_norm: Tensor | None
    gate_up: GpuLinear | None  # the MLP of all rows; layers of experts may have none
    down: GpuLinear | None
    down_norm: Tensor | None  # of what the MLP adds
    experts: GpuExperts | None
    tables: tuple[Tensor, Tensor]
    gains: Tensor | None  # of queries, by position
    sinks: Tensor | None  # [heads]
    spec: LayerSpec  # of this rank
    whole: LayerSpec  # of all ranks together


class GpuKernels:
    name = "triton"

    def __init__(
        self,
        config: ModelConfig,
        tables: RopeTables,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        weights: str = "bfloat16",
        group: Group = ALONE,
    ) -> None:
        """`weights`: what layers and head are stored as, `bfloat16` (as dtype) or a kind of quantise.py. `config` is
        the whole model's; a rank of several has some heads and outputs.
        """
        check_layers(config, group)
        self.config, self.group = group.share(config), group
        self.device, self.dtype, self.weights = torch.device(device), dtype, weights
        self.tables = tables
        self._rotary: list[
            tuple[RopeTable | None, tuple[Tensor, Tensor]]
        ] = []  # of each table, on the device
        self._read: tuple[Batch, AttentionPlan] | None = None
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)  # experts with rows, over layers
        self.spread = torch.zeros_like(self.counter)  # as `choose` has it

    @property
    def touched(self) -> int:
        return int(self.counter)

    @touched.setter
    def touched(self, count: int) -> None:
        self.counter.fill_(count)

    # -------------------------------------------------------------------------------------------- weights

    def pack_layer(self, w: LayerTensors) -> GpuLayer:
        norms, s, hidden = None, w.spec, self.config.hidden
        if w.q_norm is not None and w.k_norm is not None:
            norms = (self._small(w.q_norm), self._small(w.k_norm), self.config.norm_eps)
        table = self.tables.of(s)
        bias = None if w.gate_bias is None or w.up_bias is None else torch.cat([w.gate_bias, w.up_bias])
        return GpuLayer(
            attn_norm=self._small(w.attn_norm),
            qkv=self._packed((w.qkv,), w.qkv_bias, self.weights, (s.heads + 2 * s.kv_heads) * s.head_dim),
            norms=norms,
            out=self._packed((w.out,), w.out_bias, self.weights, hidden),
            out_norm=self._small(w.out_norm),
            mlp_norm=self._small(w.mlp_norm),
            gate_up=None
            if w.gate is None
            else _activated(self._packed((w.gate, w.up), bias, self.weights, s.intermediate), s),
            down=None if w.down is None else self._packed((w.down,), w.down_bias, self.weights, hidden),
            down_norm=self._small(w.down_norm),
            experts=None
            if w.experts is None or s.experts is None
            else self._experts(w.experts, s, s.experts),
            tables=self._tables(s),
            gains=None if table is None else self._small(table.gain),
            sinks=self._small(w.sinks),
            spec=self.group.share_layer(s),
            whole=s,
        )

    def _experts(self, t: ExpertTensors, spec: LayerSpec, how: Experts) -> GpuExperts:
        def packed(biases: Sequence[Any], whole: int, *halves: Sequence[Any]) -> GpuLinear:
            kind = self.weights
            experts: Iterable[Sequence[Any]] = zip(*halves, strict=True)
            if kind == "bfloat16" and all(mxfp4.fits(weight) for half in halves for weight in half):
                kind = mxfp4.KIND
            else:
                experts = ([_plain(weight) for weight in expert] for expert in experts)
            weight = pack_experts(experts, how.count, kind, self.device, self.dtype, whole)
            own = [torch.stack(bias) for bias in biases if bias is not None]
            return GpuLinear(weight, self._small(torch.cat(own, 1)) if own else None)

        return GpuExperts(
            how,
            router=self.pack_linear(t.router, t.router_bias),
            correction=self._small(t.correction),
            shared_gate=None if t.shared_gate is None else self.pack_linear(t.shared_gate),
            gate_up=_activated(packed((t.gate_bias, t.up_bias), how.width, t.gate, t.up), spec),
            down=packed((t.down_bias,), self.config.hidden, t.down),
        )

    def _tables(self, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """Cos and sin on the device. Layers without rotary positions have a table that turns nothing."""
        table = self.tables.of(spec)
        for known, there in self._rotary:
            if known is table:
                return there
        if table is None:
            shape = (self.tables.positions, spec.head_dim // 2)
            made = torch.ones(shape, device=self.device), torch.zeros(shape, device=self.device)
        else:
            made = self._small(table.cos), self._small(table.sin)
        self._rotary.append((table, made))
        return made

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, whole: int = 0) -> GpuLinear:
        return self._packed((weight,), bias, "bfloat16", whole)

    def pack_ends(self, embedding: Tensor, head: Tensor) -> tuple[GpuLinear, GpuLinear]:
        """A model's first and last matrix. In fewer bits a tied matrix is stored twice: the head is read whole for
        every token and is rounded; the embedding is read by the row and stays as it is.
        """
        vocab = self.config.vocab
        first = self.pack_linear(embedding, whole=vocab)
        if head is embedding and self.weights == "bfloat16":
            return first, first
        return first, self._packed((head,), None, HEAD_KINDS.get(self.weights, self.weights), vocab)

    def _packed(self, halves: tuple[Any, ...], bias: Tensor | None, kind: str, whole: int) -> GpuLinear:
        packed = pack(*halves, kind=kind, device=self.device, dtype=self.dtype, whole=whole)
        return GpuLinear(packed, self._small(bias))

    @overload
    def _small(self, tensor: Tensor) -> Tensor: ...
    @overload
    def _small(self, tensor: None) -> None: ...
    def _small(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.device, torch.float32).contiguous()

    # --------------------------------------------------------------------------------------------- pieces

    def embed(self, table: GpuLinear, ids: Tensor, scale: float = 1.0) -> Tensor:
        return embed(ids.to(self.device), table.weight, scale)

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
        self, x: Tensor, pending: Pending | None, rows: Tensor, norm: Tensor, linear_: GpuLinear
    ) -> Tensor:
        """Logits of the chosen rows, float32, once what is pending has been added."""
        count, c = len(rows), self.config
        normed = self._room(count, x.shape[1])
        add_and_norm(x, pending, norm.to(self.device), c.norm_eps, normed[:count], rows, c.residual_scale)
        logits = linear(normed, linear_.weight, linear_.bias, count)
        logits = logits if c.logit_divisor == 1 else logits.div_(c.logit_divisor)
        return logits.div_(c.softcap).tanh_().mul_(c.softcap) if c.softcap else logits

    def _padded(self, rows: Tensor, count: int) -> Tensor:
        """`count` rows that other ranks have parts of, in space for as many as a matmul reads."""
        room = self._room(count, rows.shape[1])
        room[:count] = rows
        return room

    def _settled(self, x: Tensor, pending: Pending) -> Pending | None:
        """What is still to be added to x. Ranks have outputs of their own, so theirs are added and gathered at once."""
        if self.group.size == 1:
            return pending
        mine = self.group.cut(self.config.hidden)
        if isinstance(pending, Normed):
            own = x.new_zeros(len(x), mine.stop - mine.start)
            add_and_norm(own, pending.parts, None, 0.0, None)
            return Normed(self.group.gather(own, self.config.hidden)[None], pending.weight)
        own = x[:, mine].contiguous()
        self._add(own, pending)
        x.copy_(self.group.gather(own, self.config.hidden))
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
        attend(q.to(self.dtype), batch, keys, values, window, scale, attention, out)
        return out

    # ----------------------------------------------------------------------------------------------- layers

    def layer(self, layer: GpuLayer, x: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """x [R, hidden] float32 becomes the layer's output, in place."""
        pending = self._layer(layer, x, None, batch, keys, values, self._reading(batch))
        if pending is not None:
            self._add(x, pending)

    def layers(
        self,
        layers: Sequence[GpuLayer],
        x: Tensor,
        batch: Batch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        features: KeyValueStore | None = None,
    ) -> None:
        layer_by_layer(self.layer, layers, x, batch, keys, values, features)

    def run_layers(
        self,
        layers: Sequence[GpuLayer],
        x: Tensor,
        batch: Batch,
        store: KeyValueStore,
        attention: AttentionPlan | JointPlan,
        pending: Pending | None = None,
        first: int = 0,
    ) -> Pending | None:
        """All layers, which are numbered from `first` on; returns what is still to be added to x."""
        for i, layer in enumerate(layers, first):
            taps = [(one, batch.slots) for one in store.tapped(i)]
            pending = self._layer(layer, x, pending, batch, store.keys[i], store.values[i], attention, taps)
        if last := [(one, batch.slots) for one in store.tapped(first + len(layers))]:
            self._add(x, pending, taps=last)
            return None
        return pending

    def _layer(
        self,
        w: GpuLayer,
        x: Tensor,
        pending: Pending | None,
        batch: Batch,
        keys: Tensor,
        values: Tensor,
        attention: AttentionPlan | JointPlan,
        taps: Sequence[Tap] = (),
    ) -> Pending | None:
        normed = self._room(*x.shape)
        self._add(x, pending, w.attn_norm, normed[: len(x)], taps)
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
    ) -> Pending | None:
        """A layer from its normed inputs on, which may be wider than the stream, and more rows than x has; returns what
        is to be added to x.
        """
        s, rows = w.spec, len(x)
        qkv = multiply_parts(inputs, w.qkv.weight, w.qkv.bias, rows)
        mixed = self._room(rows, s.heads * s.head_dim)
        fresh, heads = Fresh(qkv, w.tables, w.norms, w.gains), mixed[:rows].view(rows, s.heads, s.head_dim)
        attend_parts(fresh, batch, keys, values, s.window, s.scale, attention, heads, w.sinks)
        if self.group.size > 1:
            width, units = w.whole.heads * s.head_dim, w.whole.kv_heads
            mixed = self._padded(self.group.gather(mixed[:rows], width, units), rows)
        pending = self._settled(x, _normed(multiply_parts(mixed, w.out.weight, w.out.bias, rows), w.out_norm))
        normed = self._room(*x.shape)
        self._add(x, pending, w.mlp_norm, normed[:rows])
        shared = self._mlp(w, normed, rows)
        if w.experts is None:
            assert shared is not None
            return self._settled(x, _normed(shared, w.down_norm))
        slots, padding = batch.slots, len(keys) - 1
        given = self._give_to_experts(w.experts, normed, shared, slots, padding)
        return self._settled(x, _normed(given, w.down_norm))

    def _mlp(self, w: GpuLayer, normed: Tensor, rows: int) -> Tensor | None:
        """The parts that the MLP of all rows gives."""
        if w.gate_up is None or w.down is None:
            return None
        act = gated_linear(normed, w.gate_up.weight, w.gate_up.bias, rows)
        if self.group.size > 1:
            act = self._padded(self.group.gather(act[:rows], w.whole.intermediate), rows)
        return multiply_parts(act, w.down.weight, w.down.bias, rows)

    def _give_to_experts(
        self, w: GpuExperts, normed: Tensor, shared: Tensor | None, slots: Tensor, padding: int
    ) -> ExpertParts:
        """What is to be added to the stream for rows at these slots. Rows at `padding` go to no expert."""
        how, rows = w.how, len(slots)
        logits = multiply_parts(normed, w.router.weight, w.router.bias, rows)
        counter = self.counter if rows == 1 else None
        choice = choose(logits, w.correction, how, slots, padding, self.spread, counter)
        plan = schedule_one(choice) if rows == 1 else schedule(choice, how.count, self.counter)
        inputs, weights = normed[:rows], choice.weights
        if how.weighs_input:
            inputs = (inputs.float()[:, None] * weights[..., None]).to(self.dtype).flatten(0, 1)
            weights = torch.ones_like(weights)
        act = gated_experts(inputs, w.gate_up.weight, w.gate_up.bias, plan, how.per_token)
        if self.group.size > 1:
            act = self.group.gather(act, how.width)
        gate = w.shared_gate
        return ExpertParts(
            expert_parts(act, w.down.weight, w.down.bias, plan),
            choice.experts,
            weights,
            shared,
            None if gate is None else multiply_parts(normed, gate.weight, gate.bias, rows),
        )

    def _add(
        self,
        x: Tensor,
        pending: Pending | None,
        norm: Tensor | None = None,
        out: Tensor | None = None,
        taps: Sequence[Tap] = (),
    ) -> None:
        c, tap = self.config, taps[0] if taps else None
        add_and_norm(x, pending, norm, c.norm_eps, out, gain=c.residual_scale, tap=tap)
        for other in taps[1:]:
            add_and_norm(x, None, None, 0.0, None, tap=other)

    def _room(self, rows: int, width: int) -> Tensor:
        """For what a matmul reads."""
        return torch.empty((padded_rows(rows), width), dtype=self.dtype, device=self.device)

    def _reading(self, batch: Batch) -> AttentionPlan:
        if self._read is None or self._read[0] is not batch:
            c = self.config
            self._read = batch, plan_attention(batch, c.heads, c.kv_heads, c.head_dim)
        return self._read[1]


def _plain(weight: Any) -> Tensor:
    return weight.float() if isinstance(weight, Blocks) else weight


def _activated(linear_: GpuLinear, spec: LayerSpec) -> GpuLinear:
    linear_.weight.activation, linear_.weight.clamp = spec.activation, spec.clamp
    return linear_


def _normed(parts: Tensor | ExpertParts, weight: Tensor | None) -> Pending:
    return parts if weight is None else Normed(parts, weight)


def check_layers(config: ModelConfig, group: Group = ALONE) -> None:
    if missing := gpu_obstacle(config, group.size):
        raise KernelUnavailable(
            f"this {config.family} model does not run on a GPU: the kernels do not have {missing}; use --device cpu"
        )


def check_device(weights: str) -> None:
    """Says by name why a CUDA device cannot be used, or not with these weights."""
    if not torch.cuda.is_available():
        raise KernelUnavailable("torch sees no CUDA device; use --device cpu")
    if torch.cuda.get_device_capability() < (8, 0):
        raise KernelUnavailable("bfloat16 kernels need compute capability 8.0 or later")
    if triton.__version__ < "3.6":
        raise KernelUnavailable(f"triton {triton.__version__} is too old; 3.6 or later is needed")
    if weights == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        raise KernelUnavailable("fp8 weights need compute capability 8.9 or later; use int8")
