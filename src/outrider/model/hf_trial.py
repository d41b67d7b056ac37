"""A short trial of a transformers model: two texts, a draft tree, and the logits that transformers gives for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import UnsupportedModel
from outrider.load.config import ModelConfig
from outrider.types import MAX_NODES, Batch, Draft

TREE = Draft((0,) * 5, (-1, 0, 0, -1, 2))  # shape only
FIRST, SECOND = 5, 7  # the first text's length after each pass
OTHER = 4  # the second text's, one more after the second pass


class Trial:
    """Two short random texts in two passes, the second with a tree on one of them; and what is expected."""

    def __init__(self, config: ModelConfig) -> None:
        if config.context < SECOND + len(TREE) + 1:
            raise UnsupportedModel(f"a context of {config.context} tokens is too short")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab, (SECOND + OTHER + 1 + len(TREE),), generator=generator).tolist()
        self.config = config
        self.text, self.other, self.nodes = ids[:SECOND], ids[SECOND:-5], ids[-5:]
        width = SECOND + MAX_NODES
        self.slots = 2 * width
        self.table = torch.randperm(self.slots, generator=generator, dtype=torch.int32).view(2, width)

    def expected(self, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows of both passes, in their order, from whole linear texts."""
        one, two = logits_of(torch.tensor([self.text])), logits_of(torch.tensor([self.other]))
        paths = [[self.nodes[i] for i in TREE.path(node)] for node in range(len(TREE))]
        nodes = [logits_of(torch.tensor([self.text + path]))[-1:] for path in paths]
        return torch.cat([one[:FIRST], two[:OTHER], one[FIRST:], *nodes, two[OTHER:]]).float()

    def run(self, forward: Callable[[Batch, KeyValueStore], Tensor]) -> Tensor:
        c = self.config
        store = KeyValueStore(c.kv_shapes, self.slots)
        return torch.cat([forward(batch, store) for batch in self.batches()])

    def batches(self) -> list[Batch]:
        """Rows are (table row, token, entry, position, prefix, ancestors)."""

        def known(owner: int, ids: list[int], begin: int) -> list[tuple[int, ...]]:
            return [(owner, ids[i], i, i, i + 1, 0) for i in range(begin, len(ids))]

        tree = [
            (0, token, SECOND + node, SECOND - 1 + depth, SECOND, mask)
            for node, (token, depth, mask) in enumerate(
                zip(self.nodes, TREE.depths, TREE.ancestors, strict=True)
            )
        ]
        first = known(0, self.text[:FIRST], 0) + known(1, self.other[:OTHER], 0)
        second = known(0, self.text, FIRST) + tree + known(1, self.other, OTHER)
        return [self._batch(rows) for rows in (first, second)]

    def _batch(self, rows: list[tuple[int, ...]]) -> Batch:
        owner, ids, entry, positions, prefix, ancestors = (
            torch.tensor(column) for column in zip(*rows, strict=True)
        )
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
