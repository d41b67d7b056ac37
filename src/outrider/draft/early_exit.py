"""`early_exit`: the target's own first layers and its head guess. No second model, no second cache.

The first layers' keys and values of the known text are already in the target's slots; a guess borrows slots
behind them and gives them back before the target checks it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.feed import Fed, feed_nodes, text_batch
from outrider.draft.tree import Growth, Place, grow
from outrider.model.decoder import Layered
from outrider.types import NO_DRAFT, Bet, Draft, Sequence, Verdict


class EarlyExitDrafter:
    def __init__(self, model: Layered, store: KeyValueStore, table: SlotTable, layers: int) -> None:
        self.model, self.store, self.table, self.layers = model, store, table, layers

    def start(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        lengths = [len(s.tokens) for s in sequences]
        feds = [Fed(s.row, n) for s, n in zip(sequences, lengths, strict=True)]
        # What is known but not cached yet already has its slots: the engine is about to feed it.
        texts = [s.tokens[s.cached :] for s in sequences]
        batch = text_batch(self.table, [s.row for s in sequences], texts, [s.cached for s in sequences])
        roots = self.model.exit_logits(batch, self.store, self.layers)
        try:
            growths = grow(sequences, bets, roots, lambda g, places: self._expand(feds, g, places))
        except CacheFull:
            return [NO_DRAFT] * len(sequences)
        finally:
            for fed in feds:
                self.table.commit(fed.row, fed.known)
        return [growth.harvest()[0] for growth in growths]

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        pass

    def stop(self, sequence: Sequence) -> None:
        pass

    def _expand(self, feds: list[Fed], growths: list[Growth], places: list[Place]) -> Tensor:
        batch = feed_nodes(self.table, self._extend, feds, growths, places)
        return self.model.exit_logits(batch, self.store, self.layers)

    def _extend(self, row: int) -> None:
        self.table.extend(row, 1)
