"""A decoder on a CUDA device. `forward` takes batches that the host packed; a `DevicePass` takes rows that lie on the
device, as captured steps do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import UnsupportedModel
from outrider.load.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.ahead import is_collecting
from outrider.model.kernels.gpu.attention import (
    AttentionPlan,
    JointPlan,
    make_attention_plan,
    padded_group,
    plan_attention,
    plan_staged,
    prompt_tile,
    share_entries,
    split_count,
    tile_for,
)
from outrider.model.kernels.gpu.kernels import GpuKernels, GpuLinear, check_device
from outrider.model.kernels.gpu.recording import context_for, record
from outrider.model.kernels.gpu.same_bits import Adopted, adopt_library
from outrider.model.parallel import ALONE, Group, shared
from outrider.model.rope import rope_tables
from outrider.model.staged import ROW_FIELDS, StagedView
from outrider.types import MAX_NODES, Batch


class DeviceDecoder:
    """A decoder that takes batches from the host or the device. Logits stay on the device."""

    def __init__(self, decoder: Decoder) -> None:
        if not isinstance(decoder.kernels, GpuKernels):
            raise UnsupportedModel("this model does not run on a CUDA device")
        self.decoder, self.kernels = decoder, decoder.kernels
        self.config, self.group = decoder.config, decoder.group
        self.draw, self.filter_logits = decoder.draw, decoder.filter_logits
        self.device, self.dtype = decoder.kernels.device, decoder.kernels.dtype
        self.kept = self.dtype
        self.norm = decoder.norm.to(self.device)
        self.library = Adopted(refused="not asked for")
        self.attention_plans = AttentionPlans(self.kernels.config, self.device)

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        if self.decoder.mixtures:
            self.kernels.touched = 0
        return self.run(batch, store, self.config.layers)

    @property
    def experts_read(self) -> float:
        """Waits for the device."""
        return self.decoder.experts_read if self.decoder.mixtures else 0.0

    def exit_logits(self, batch: Batch, store: KeyValueStore, layers: int) -> Tensor:
        return self.run(batch, store, layers).float().cpu()

    def make_pass(self, store: KeyValueStore, layers: int | None = None) -> DevicePass:
        return DevicePass(self, store, layers)

    def embed(self, ids: Tensor) -> Tensor:
        return self.decoder.embed(ids.to(self.device))

    @shared
    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        x, rows = x.to(self.device), rows.to(self.device)
        part = self.kernels.head(x, rows, self.norm, self.decoder.head)
        return self.group.gather(part, self.config.vocab)

    def project(self, x: Tensor) -> Tensor:
        return self.decoder.project(x.to(self.device))

    @shared
    def head_rows(self, ids: Tensor) -> Tensor:
        return self.decoder.own_rows(ids.to(self.device), self._unpacked_head)

    def _unpacked_head(self, ids: Tensor) -> Tensor:
        return self.decoder.head.weight.unpacked()[ids]  # in however few bits it is

    def weight_bytes(self) -> int:
        d = self.decoder
        weights = [
            one.weight for one in (*self._linears(), *([] if d.head is d.embedding else [d.embedding]))
        ]
        experts = [one.weight for w in d.layers if (e := w.experts) for one in (e.router, e.gate_up, e.down)]
        return sum(one.nbytes for one in (*weights, *experts))

    def spread_rows(self, rows: int) -> None:
        """From now on passes read as many experts as so many rows that choose independently, padding among them.
        0: rows choose by themselves, and padding chooses nothing.
        """
        experts = next((spec.experts for spec in self.config.specs if spec.experts), None)
        if experts is not None:
            missed = (1 - experts.per_token / experts.count) ** rows
            least = experts.per_token if rows else 0
            self.kernels.spread.fill_(max(least, round(experts.count * (1 - missed))))

    def use_library(self) -> None:
        """Lets cuBLASLt multiply in passes with many rows, for each weight where it gives the bits of our kernels."""
        self.library = adopt_library([(one.weight, one.bias) for one in self._linears()])
        if self.library.differing:
            warnings.warn(f"matmuls of many rows: {self.library.describe()}", stacklevel=2)

    def _linears(self) -> list[GpuLinear]:
        """Every matrix that a pass multiplies all rows by; the embedding is one if it is the head, too."""
        d = self.decoder
        found = [one for w in d.layers for one in (w.qkv, w.out, w.gate_up, w.down)] + [d.head]
        return [one for one in found if one is not None]

    @shared
    def run(self, batch: Batch, store: KeyValueStore, layers: int) -> Tensor:
        """Logits after the first `layers` layers, on the device."""
        c, there = self.kernels.config, batch.to(self.device)
        attention = plan_attention(batch, c.heads, c.kv_heads, c.head_dim, there)
        return run_pass(self, there, store, attention, layers)

    @shared
    def run_rows(
        self,
        batch: Batch,
        store: KeyValueStore,
        layers: int,
        together: int,
        context: int,
        branching: bool,
        staged: StagedView | None,
    ) -> Tensor:
        """The same for rows on the device; see `DevicePass`."""
        plans = self.attention_plans
        attention: AttentionPlan | JointPlan
        if staged is None:
            attention = plans.of(batch, together, context, branching)
        else:
            attention = plans.joint(batch, together, context, branching, staged)
        return run_pass(self, batch, store, attention, layers)


class DevicePass:
    """A pass over rows on the device. The host reads nothing, so a graph can capture it.

    Every `together` neighbouring rows belong to one sequence. Their positions rise, unless they branch. Staged rows may
    follow them. By default all layers run.
    """

    def __init__(self, model: DeviceDecoder, store: KeyValueStore, layers: int | None = None) -> None:
        self.model, self.store, self.layers = model, store, layers or model.config.layers

    def __call__(
        self,
        batch: Batch,
        together: int,
        context: int,
        branching: bool = False,
        staged: StagedView | None = None,
    ) -> Tensor:
        if self.model.group.size > 1:  # the table travels to the other ranks
            batch = replace(batch, table=batch.table[:, : context + MAX_NODES])
        return self.model.run_rows(batch, self.store, self.layers, together, context, branching, staged)


class GraphedPass:
    """Replays a `DevicePass` from graphs, one for each number of rows and context. A batch is copied into the graph's
    own buffers first.
    """

    def __init__(self, run: Callable[..., Tensor], group: Group = ALONE) -> None:
        """`group`: the ranks that take part in the pass."""
        self.run, self.group = run, group
        self._made: dict[tuple[int, int, int, bool], tuple[Batch, Any, Tensor]] = {}

    def __call__(self, batch: Batch, together: int, context: int, branching: bool = False) -> Tensor:
        context = context_for(context, batch.table.shape[1])
        if is_collecting():
            return self.run(batch, together, context, branching)
        key = batch.rows, together, context, branching
        if key not in self._made:
            names = (*ROW_FIELDS, "logit_rows")
            mine = replace(batch, **{name: getattr(batch, name).clone() for name in names})
            self._made[key] = (
                mine,
                *record(lambda: self.run(mine, together, context, branching), share=self.group.recorded),
            )
        mine, graph, logits = self._made[key]
        for name in (*ROW_FIELDS, "logit_rows"):
            getattr(mine, name).copy_(getattr(batch, name))
        graph.replay()
        return logits


class AttentionPlans:
    """Attention plans of passes over rows on the device, one for each shape. Captured graphs use their buffers, so
    plans are kept.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.shape, self.device = (config.heads, config.kv_heads, config.head_dim), device
        self._made: dict[tuple[int, int, int, bool], AttentionPlan] = {}

    def of(self, batch: Batch, together: int, context: int, branching: bool = False) -> AttentionPlan:
        key = (batch.rows, together, context, branching)
        attention = self._made.get(key) or self._made.setdefault(key, self._make(*key))
        share_entries(batch, attention)
        return attention

    def joint(
        self, batch: Batch, together: int, context: int, branching: bool, staged: StagedView
    ) -> JointPlan:
        """The plan for resident rows followed by staged rows."""
        parts = [(part.batch, plan_staged(part, self.shape, context)) for part in staged.parts]
        count = batch.rows - staged.shape.rows
        if count:
            resident = replace(batch, **{name: getattr(batch, name)[:count] for name in ROW_FIELDS})
            parts.insert(0, (resident, self.of(resident, together, context, branching)))
        return JointPlan(tuple(parts))

    def _make(self, rows: int, together: int, context: int, branching: bool) -> AttentionPlan:
        heads, kv_heads, _ = self.shape
        padded = padded_group(heads, kv_heads)
        tile = tile_for(together, padded) if branching else prompt_tile(together, self.shape)
        most = tile // padded
        groups = [
            (at, min(most, begin + together - at), 0)
            for begin in range(0, rows, together)
            for at in range(begin, begin + together, most)
        ]
        items = torch.tensor(groups[::-1], dtype=torch.int32, device=self.device)
        return make_attention_plan(
            items, rows, self.shape, split_count(context), branching, tile, together == 1
        )


def run_pass(
    model: DeviceDecoder,
    batch: Batch,
    store: KeyValueStore,
    attention: AttentionPlan | JointPlan,
    layers: int,
) -> Tensor:
    decoder, kernels = model.decoder, model.kernels
    x = decoder.own_rows(batch.ids, decoder.embed_own)
    pending = kernels.run_layers(decoder.layers[:layers], x, batch, store, attention)
    part = kernels.finish(x, pending, batch.logit_rows, model.norm, decoder.head)
    return model.group.gather(part, model.config.vocab)


def load_on_device(
    config: ModelConfig,
    read: Callable[[str, torch.device], Any],
    positions: int,
    weights: str,
    group: Group = ALONE,
) -> DeviceDecoder:
    """Copies tensors to the device one at a time as they are stored, unpacks them there, which is many times faster
    than on a CPU, and quantises them as `weights` says. The CPU unpacks a tensor that does not fit beside the others.
    Experts may come as `Blocks`, which stay what they are if they are MXFP4 and `weights` is bfloat16.
    """
    check_device(weights)
    kernels = GpuKernels(config, rope_tables(config, positions), weights=weights, group=group)

    def unpacked(name: str) -> Any:
        try:
            return group.part(name, read(name, kernels.device), config)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return group.part(name, read(name, torch.device("cpu")), config)

    model = DeviceDecoder(Decoder(config, unpacked, kernels))
    torch.cuda.empty_cache()  # the caller measures the free memory next
    return model
