"""Hand-made batches: texts whose slots lie scattered over one store, fed in any pieces, trees included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.load.config import ModelConfig
from outrider.types import MAX_NODES, NO_DRAFT, Batch, Draft


@dataclass(frozen=True)
class Part:
    """What one text adds to a pass: known tokens, then a draft."""

    text: int
    tokens: list[int]
    draft: Draft = NO_DRAFT


class Reader:
    """Feeds texts to a model and remembers how long each is. Drafts are read and forgotten."""

    def __init__(self, config: ModelConfig, texts: int = 1, longest: int = 128, seed: int = 7) -> None:
        width = longest + MAX_NODES
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randperm(texts * width, generator=generator, dtype=torch.int32).view(texts, width)
        self.store = KeyValueStore(config.kv_shapes, texts * width)
        self.lengths = [0] * texts

    def batch(self, *parts: Part) -> Batch:
        """Logits are asked for in every row."""
        rows = [row for part in parts for row in self._rows(part)]
        owner, ids, entry, positions, prefix, ancestors = (torch.tensor(c) for c in zip(*rows, strict=True))
        return Batch(
            ids=ids,
            positions=positions.int(),
            slots=self.table[owner, entry].contiguous(),
            table_rows=owner.int(),
            prefix=prefix.int(),
            ancestors=ancestors,
            table=self.table,
            logit_rows=torch.arange(len(rows)),
        )

    def _rows(self, part: Part) -> list[tuple[int, ...]]:
        base = self.lengths[part.text]
        end = base + len(part.tokens)
        known = [(part.text, t, base + i, base + i, base + i + 1, 0) for i, t in enumerate(part.tokens)]
        shape = zip(part.draft.tokens, part.draft.depths, part.draft.ancestors, strict=True)
        return known + [
            (part.text, t, end + i, end - 1 + d, end, mask) for i, (t, d, mask) in enumerate(shape)
        ]

    def feed(self, model: Any, *parts: Part) -> Tensor:
        """One pass; the logits of all its rows, in order."""
        logits = model.forward(self.batch(*parts), self.store)
        for part in parts:
            self.lengths[part.text] += len(part.tokens)
        return logits

    def read(self, model: Any, tokens: list[int], chunk: int = 1 << 30, text: int = 0) -> Tensor:
        """A text in pieces of `chunk` tokens; all its logits."""
        pieces = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return torch.cat([self.feed(model, Part(text, piece)) for piece in pieces])


def random_ids(vocab: int, count: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def stir(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random weights so large that any mistake shows in the logits; norms around 1, no zero biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(0.3 * noise + (name.endswith("weight") and "norm" in name.lower()))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())
