"""`early_exit`: the target's own first layers and its head draft. No second model, no second KV cache.

The first layers' keys and values of known tokens are in the target's slots already. A draft node writes its own to a
slot that the target's pass is about to write in all layers, with the same numbers where the node is verified; where it
is not, no row reads that slot before it is written again. So there is nothing to catch up on, and the target cannot
tell.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.device.ops import Pass, StepOps, TreeLayout, run_levels
from outrider.draft.drafter import MAX_PASSES, ResidentDrafter
from outrider.draft.reading import text_batch
from outrider.draft.tree import grow_drafts, host_draw
from outrider.model.decoder import Layered, make_store
from outrider.types import Batch, Draft, DraftPlan, Sequence

DEPTH = 3  # draft tokens in a row that the search assumes
# Sample texts for the search, which runs before the first request.
SAMPLES = (
    "Here is how to make a simple vegetable soup. First, chop two onions, three carrots and a stick of celery, "
    "and fry them slowly in a little oil until they are soft. Add a litre of water, salt and pepper.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "The train was late again, and Maria had read every poster on the platform twice. When it came at last, "
    "she found a seat by the window, put her bag on her knees and watched the fields go by.",
)


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


def find_exit(model: Layered, samples: list[list[int]]) -> int:
    """The exit with the highest expected speed: how often it agrees with the last layer, against what it
    costs.
    """
    agreement = exit_agreement(model, samples)
    c = model.config
    read = list(accumulate((c.hidden * spec.active for spec in c.specs), initial=c.vocab * c.hidden))

    def speed(layers: int) -> float:
        tokens = 1 + sum(agreement[layers] ** k for k in range(1, DEPTH + 1))
        return tokens / (1 + DEPTH * read[layers] / read[-1])

    return max(range(1, c.layers), key=speed)


def exit_agreement(model: Layered, samples: list[list[int]]) -> dict[int, float]:
    """For each number of layers, the share of positions where head and exit name the same token as the
    whole model.
    """
    c = model.config
    same: dict[int, float] = dict.fromkeys(range(1, c.layers), 0.0)
    for text in samples:
        store = make_store(model, len(text))
        store.tap(tuple(range(c.layers)), c.hidden)
        table = SlotTable(len(text), 1, len(text), reuse=False)
        row, _ = table.open([])
        table.extend(row, len(text))
        batch = text_batch(table, [row], [text], [0], last_only=False).to(model.device)
        final = model.forward(batch, store).argmax(-1)
        assert store.features is not None
        for layers in same:
            hidden = store.features[batch.slots, layers].float().contiguous()
            same[layers] += float((model.logits(hidden, batch.logit_rows).argmax(-1) == final).float().sum())
    total = sum(map(len, samples)) or 1
    return {layers: count / total for layers, count in same.items()}
