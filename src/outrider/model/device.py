"""A decoder on a CUDA device, and the two ways to run it: over batches packed by the host, and over rows that
lie on the device already, as a round has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import UnsupportedModel
from outrider.load.config import ModelConfig
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.attention import (
    Reading,
    make_reading,
    padded_group,
    read_batch,
    split_count,
    tile_for,
)
from outrider.model.kernels.gpu.graph import ROWS, GraphedDecoder
from outrider.model.kernels.gpu.kernels import GpuKernels, check_device
from outrider.model.rope import rope_tables
from outrider.types import Batch


class DeviceDecoder:
    """A decoder whose batches come from the host: inputs travel there, logits stay (or come back, `to_host`)."""

    def __init__(self, decoder: Decoder, to_host: bool = False) -> None:
        if not isinstance(decoder.kernels, GpuKernels):
            raise UnsupportedModel("this model does not run on a CUDA device")
        self.decoder, self.kernels, self.to_host = decoder, decoder.kernels, to_host
        self.config, self.draw = decoder.config, decoder.draw
        self.device, self.dtype = decoder.kernels.device, decoder.kernels.dtype
        self.norm = decoder.norm.to(self.device)
        self.visible = getattr(
            decoder, "visible", self.config.vocab
        )  # a widened model has ids that do not exist
        self._graphs: dict[int, GraphedDecoder] = {}  # by the table they read

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        here = batch.ids.device == self.device
        logits = self._eager(batch, store) if here else self._from_host(batch, store)
        return logits.float().cpu() if self.to_host else logits

    def _from_host(self, batch: Batch, store: KeyValueStore) -> Tensor:
        graphed = self._graphed(batch.table, store)
        graphed.table.copy_(batch.table, non_blocking=True)
        if batch.rows <= ROWS[-1] and self.device.type == "cuda":
            return graphed.forward(batch)[batch.logit_rows.to(self.device), : self.visible]
        fields = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors", "logit_rows")
        there = {name: getattr(batch, name).to(self.device, non_blocking=True) for name in fields}
        return self._eager(replace(batch, table=graphed.table, **there), store)

    def _graphed(self, table: Tensor, store: KeyValueStore) -> GraphedDecoder:
        key = table.data_ptr()
        if key not in self._graphs:
            self._graphs[key] = GraphedDecoder(
                self.decoder, store, torch.zeros_like(table, device=self.device)
            )
        return self._graphs[key]

    def _eager(self, batch: Batch, store: KeyValueStore) -> Tensor:
        c = self.config
        reading = read_batch(batch, c.heads, c.kv_heads, c.head_dim)
        return run_pass(self, batch, store, reading)


class DevicePass:
    """The pass over rows on the device with nothing for the host to look at: fit to be part of a graph.

    Every `together` neighbouring rows belong to one text, at rising positions.
    """

    def __init__(self, model: DeviceDecoder, store: KeyValueStore) -> None:
        self.model, self.store = model, store
        self._readings: dict[tuple[int, int, int], tuple[Reading, Tensor]] = {}

    def __call__(self, batch: Batch, together: int, context: int) -> Tensor:
        reading, lasts = self._reading(batch.rows, together, context)
        reading.items[:, 2] = batch.prefix[lasts]
        return run_pass(self.model, batch, self.store, reading)

    def _reading(self, rows: int, together: int, context: int) -> tuple[Reading, Tensor]:
        """Its buffers belong to the graphs made with it, so it is kept."""
        key = (rows, together, context)
        if key not in self._readings:
            c = self.model.config
            padded = padded_group(c.heads, c.kv_heads)
            tile = tile_for(together, padded)
            most = tile // padded
            groups = [
                (at, min(most, begin + together - at), 0)
                for begin in range(0, rows, together)
                for at in range(begin, begin + together, most)
            ]
            items = torch.tensor(groups, dtype=torch.int32, device=self.model.device)
            shape = (c.heads, c.kv_heads, c.head_dim)
            reading = make_reading(items, rows, shape, split_count(context), False, tile)
            self._readings[key] = reading, (items[:, 0] + items[:, 1] - 1).long()
        return self._readings[key]


def run_pass(model: DeviceDecoder, batch: Batch, store: KeyValueStore, reading: Reading) -> Tensor:
    decoder, kernels = model.decoder, model.kernels
    x = decoder.embed(batch.ids)
    pending = kernels.run_layers(decoder.layers, x, batch, store, reading)
    return kernels.finish(x, pending, batch.logit_rows, model.norm, decoder.head)[:, : model.visible]


def load_on_device(config: ModelConfig, read: Callable[[str], Tensor], positions: int) -> DeviceDecoder:
    check_device()
    kernels = GpuKernels(config, *rope_tables(config, positions))
    return DeviceDecoder(Decoder(config, read, kernels))
