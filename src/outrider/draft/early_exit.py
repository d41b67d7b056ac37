"""`early_exit`: the target's own first layers and its head draft. No second model, no second KV cache.

The first layers' keys and values of known tokens are in the target's slots already. A draft node writes its own to a
slot that the target's pass is about to write in all layers, with the same numbers where the node is verified; where it
is not, no row reads that slot before it is written again. So there is nothing to catch up on, and the target cannot
tell.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.device.layout import TreeLayout
from outrider.device.ops import Pass, StepOps, run_levels
from outrider.draft.drafter import MAX_PASSES, ResidentDrafter
from outrider.draft.feed import grow_drafts, host_draw, text_batch
from outrider.model.decoder import Layered
from outrider.types import Batch, Draft, DraftPlan, Sequence


class EarlyExitDrafter(ResidentDrafter):
    max_depth, trees = MAX_PASSES, False

    def __init__(self, model: Layered, store: KeyValueStore, table: SlotTable, layers: int) -> None:
        self.model, self.store, self.table, self.layers = model, store, table, layers
        self.run: Pass = model.make_pass(store, layers)

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        texts, starts = [s.tokens[s.cached :] for s in sequences], [s.cached for s in sequences]
        roots = self._logits(text_batch(self.table, [s.row for s in sequences], texts, starts))
        run, law = lambda batch, *_: self._logits(batch), host_draw(self.model)
        return grow_drafts(self.table, sequences, draft_plans, roots, run, draw=law)

    def _logits(self, batch: Batch) -> Tensor:
        return self.model.exit_logits(batch, self.store, self.layers)

    def propose_resident(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int
    ) -> tuple[Tensor, None]:
        return run_levels(self.run, ops, rows, lengths, tree.levels, len(tree), context), None
