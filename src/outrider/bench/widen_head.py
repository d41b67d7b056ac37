"""An EAGLE head in the shape of a big one's, for a target that widen.py widened: the big one's cost, the small one's
drafts.

The target's hidden states are those of the small one, then its constant, then zeros. The fusion reads only what is
real and writes only what is real, so the head's own stream has zeros behind it as well. Its layers are as wide as the
target's; its words stay those of the small head, so that no padded id is ever drafted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.bench.widen import Read, Wide, Widened
from outrider.load.heads import HeadConfig

CPU = torch.device("cpu")
WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class WidenedHead(Widened):
    def __init__(
        self,
        config: HeadConfig,
        read: Read,
        wide: Wide,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layer = replace(config.layer.reshaped(1), tied=wide.tied)
        super().__init__(layer, read, wide.dense, device, dtype, kept=None)
        self.head = replace(config, layer=self.config.reshaped(1))

    def read(self, name: str) -> Tensor:
        part = name.split(".", 2 if name.startswith("layers.") else 1)[-1]
        if name == "d2t":
            return self._map()
        if name == "lm_head.weight":
            made = self._random(name, (self.head.draft_vocab, self.config.hidden))
            made[:, : self.small.hidden] = self.small_read(name).to(made)
            return made
        if name == "fc.weight":
            return self._fusion()
        if name in ("tap_norms.weight", "input_norm.weight"):
            return self._tap_norms(name)
        if name.endswith("norm.weight"):
            return self._norm(name, name)
        if part in WRITERS:
            return self._writer(part, name)
        first = name.startswith("midlayer.self_attn.")
        return self._reader(name, part, name, streams=2 if first else 1)

    def _map(self) -> Tensor:
        """Where all words of the small model were known, they are some of the wide one's."""
        if self.small.vocab == self.head.draft_vocab:
            return torch.zeros(self.head.draft_vocab, dtype=torch.int64)
        return self.small_read("d2t").long()

    def _fusion(self) -> Tensor:
        taps, small, hidden = len(self.head.taps), self.small.hidden, self.config.hidden
        made = self._zeros((hidden, taps * hidden))
        real = self.small_read("fc.weight").to(made).unflatten(1, (taps, small))
        made.view(hidden, taps, hidden)[:small, :, :small] = real
        return made

    def _tap_norms(self, name: str) -> Tensor:
        """One after the other, or one over all of them: the mean widens alike."""
        small = self.small_read(name)
        rows = [
            self._widened_norm(f"{name}.{j}", row) for j, row in enumerate(small.view(-1, self.small.hidden))
        ]
        return torch.stack(rows) if small.dim() == 2 else torch.cat(rows)
