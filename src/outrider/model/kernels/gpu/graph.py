"""The decoder's pass as CUDA graphs: one for each shape, over inputs that always lie in the same place.

A shape is how many rows, how many groups of rows that share a text, whether some are guesses, and how long the
texts are. A pass is padded up to the next shape; rows of padding write to a slot that belongs to nobody, the
store's last.
Inputs travel to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.attention import (
    Reading,
    find_paths,
    group_rows,
    longest_run,
    make_reading,
    padded_group,
    split_count,
    tile_for,
)
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.recording import context_for, record
from outrider.types import Batch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    groups: int
    tree: bool
    tile: int  # of attention, by the longest run of rows of one text
    context: int  # of the longest text
    single: bool  # every row is the only one of its text


class Slate:
    """The inputs of one shape: views of one int32 buffer on the device, filled from a pinned twin."""

    def __init__(self, shape: Shape, table: Tensor, dummy: int) -> None:
        rows, groups = shape.rows, shape.groups
        sizes = [2 * rows, 2 * rows, rows, rows, rows, rows, 3 * groups]
        self.shape, self.table = shape, table
        self.device = torch.zeros(sum(sizes), dtype=torch.int32, device=table.device)
        self.host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=table.is_cuda)
        self.there, self.here = self.device.split(sizes), self.host.split(sizes)
        self.here[3].fill_(dummy)
        self.dummy = dummy
        ids, ancestors, positions, slots, table_rows, prefix, items = self.there
        self.items = items.view(groups, 3)
        self.batch = Batch(
            ids=ids.view(torch.int64),
            positions=positions,
            slots=slots,
            table_rows=table_rows,
            prefix=prefix,
            ancestors=ancestors.view(torch.int64),
            table=table,
            logit_rows=torch.arange(rows, device=table.device),
        )

    def fill(self, batch: Batch, groups: list[tuple[int, int, int]]) -> None:
        """Write a batch that lies on the host, and padding after it; the copy is queued, not awaited."""
        rows = batch.rows
        sources = (
            batch.ids.view(torch.int32), batch.ancestors.view(torch.int32),
            batch.positions, batch.slots, batch.table_rows, batch.prefix,
        )  # fmt: skip
        for place, source in zip(self.here, sources, strict=False):
            place[: len(source)] = source
            place[len(source) :] = 0
        self.here[3][rows:] = self.dummy
        self.here[6].zero_()
        self.here[6][: 3 * len(groups)] = torch.tensor(groups, dtype=torch.int32).flatten()
        self.device.copy_(self.host, non_blocking=True)


@dataclass(slots=True)
class Captured:
    slate: Slate
    reading: Reading  # its buffers are the graph's: they must outlive it
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, vocab], overwritten by the next replay


class GraphedDecoder:
    """Runs a decoder, or its first layers, through graphs captured on first use. `table` and `store` are the
    device's own.
    """

    def __init__(
        self, model: Decoder, store: KeyValueStore, table: Tensor, layers: int | None = None
    ) -> None:
        if not isinstance(model.kernels, GpuKernels):
            raise ValueError("only a decoder on a CUDA device can be captured")
        self.model, self.kernels = model, model.kernels
        self.store, self.table, self.layers = store, table, model.layers[:layers]
        config = model.config
        self.config = config
        self.padded = padded_group(config.heads, config.kv_heads)
        self.captured: dict[Shape, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.norm = model.norm.to(table.device)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [rows, vocab] of a batch on the host whose table entries are on the device already."""
        tile = tile_for(longest_run(batch), self.padded)
        groups = group_rows(batch, tile // self.padded)
        tree = bool((batch.ancestors != 0).any())
        longest = int(batch.positions.max()) + 1
        context = context_for(longest, self.table.shape[1])
        shape = Shape(_up(batch.rows), _up(len(groups)), tree, tile, context, len(groups) == batch.rows)
        captured = self.captured.get(shape) or self.capture(shape)
        captured.slate.fill(batch, groups)
        captured.graph.replay()
        return captured.logits[: batch.rows]

    def capture(self, shape: Shape) -> Captured:
        slate = Slate(shape, self.table, len(self.store.keys[0]) - 1)
        slate.device.copy_(slate.host)
        reading = self._reading(slate)
        graph, logits = record(lambda: self._pass(slate, reading), self.pool)
        self.captured[shape] = Captured(slate, reading, graph, logits)
        return self.captured[shape]

    def _pass(self, slate: Slate, reading: Reading) -> Tensor:
        model, batch = self.model, slate.batch
        if reading.tree:
            find_paths(batch, reading.paths)
        x = model.embed(batch.ids)
        pending = self.kernels.run_layers(self.layers, x, batch, self.store, reading)
        return self.kernels.finish(x, pending, batch.logit_rows, self.norm, model.head)

    def _reading(self, slate: Slate) -> Reading:
        c, shape = self.config, slate.shape
        sizes = (c.heads, c.kv_heads, c.head_dim)
        splits = split_count(shape.context)
        return make_reading(slate.items, shape.rows, sizes, splits, shape.tree, shape.tile, shape.single)


def _up(count: int) -> int:
    return next((size for size in ROWS if size >= count), count)
