"""The decoder's pass over batches of the host as CUDA graphs: one for each shape, over staged rows.

A shape is how many rows, how many groups of rows of one sequence, whether some are draft nodes, and how long sequences
are. A pass is padded up to the next shape; rows of padding write to the padding slot, the store's last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.attention import (
    group_rows,
    longest_run,
    padded_group,
    plan_staged,
    tile_for,
)
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.recording import context_for, record
from outrider.model.staged import StagedRows, StagedShape
from outrider.types import Batch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Passes of a shape before it is captured, which takes the time of many: prompts come in many shapes.
WORTH = 16


@dataclass(frozen=True, slots=True)
class Shape:
    staged: StagedShape
    context: int  # of the longest sequence
    single: bool  # every row is the only one of its sequence


@dataclass(slots=True)
class Captured:
    inputs: StagedRows
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
        self.passes: Counter[Shape] = Counter()
        self.pool = torch.cuda.graph_pool_handle()
        self.norm = model.norm.to(table.device)

    def worth(self, batch: Batch) -> bool:
        """Counts a pass over this shape; returns whether it came up often enough to be captured."""
        shape = self._shape(batch)
        self.passes[shape] += 1
        return shape in self.captured or self.passes[shape] > WORTH

    def forward(self, batch: Batch) -> Tensor:
        """Logits [rows, vocab] of a batch on the host whose table entries are on the device already."""
        shape = self._shape(batch)
        captured = self.captured.get(shape) or self.capture(shape)
        every = replace(batch, logit_rows=torch.arange(batch.rows))
        captured.inputs.fill(every, torch.zeros_like(batch.slots))
        captured.graph.replay()
        return captured.logits[: batch.rows]

    def _shape(self, batch: Batch) -> Shape:
        together = tile_for(longest_run(batch), self.padded) // self.padded
        rows = _up(batch.rows)
        groups, single = len(group_rows(batch, together)), longest_run(batch) == 1
        if single:
            together = 1  # padding too: a program writes the key of its only row
        branching = rows if bool((batch.ancestors != 0).any()) else 0
        room = _up(groups - (batch.rows - rows) // together)
        context = context_for(int(batch.positions.max()) + 1, self.table.shape[1])
        by_kind = (0, room) if branching else (room, 0)
        return Shape(StagedShape(rows, rows, together, by_kind, branching), context, single)

    def capture(self, shape: Shape) -> Captured:
        inputs = StagedRows(shape.staged, self.table, len(self.store.keys[0]) - 1, padding_row=0)
        graph, logits = record(lambda: self._pass(inputs, shape), self.pool)
        self.captured[shape] = Captured(inputs, graph, logits)
        return self.captured[shape]

    def _pass(self, inputs: StagedRows, shape: Shape) -> Tensor:
        model, batch, c = self.model, inputs.batch, self.config
        (part,) = inputs.parts
        attention = plan_staged(part, (c.heads, c.kv_heads, c.head_dim), shape.context, shape.single)
        x = model.embed(batch.ids)
        pending = self.kernels.run_layers(self.layers, x, batch, self.store, attention)
        return self.kernels.finish(x, pending, batch.logit_rows, self.norm, model.head)


def _up(count: int) -> int:
    return next((size for size in ROWS if size >= count), count)
