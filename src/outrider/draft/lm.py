"""`lm`: a smaller model of the target's family drafts.

Its keys and values lie in slots of the target's own table: a token's slot serves both models. How much of a sequence
it has read is its own affair: while it is not asked, that stands still; when it is asked again it first reads what it
missed, so its drafts after a pause are those it would have made without one. Accepted draft nodes that it ran count
as read.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.table import SlotTable
from outrider.device.ops import Pass, StepOps, TreeLayout, known_rows, run_levels
from outrider.draft.drafter import MAX_PASSES
from outrider.draft.reading import NetworkDrafter, Reader, pieces, text_batch
from outrider.draft.tree import grow_drafts, host_draw
from outrider.model.decoder import Layered, Model, make_store
from outrider.types import NO_DRAFT, Batch, Draft, DraftPlan, Sequence

READ_ROWS = (128, 512, 2048)  # of known tokens read at once on a device, filled up to one of these
# Tokens read again in a resident step: two are lacking after one in which all of its draft was accepted, some more
# after one of another drafter's.
WINDOW = 4


class LmDrafter(NetworkDrafter):
    trees, usual_depth, keeps_nodes = True, 4, True

    def __init__(
        self,
        model: Model,
        table: SlotTable,
        vocab: int,
        context: int,
        graphed: Callable[[Pass], Pass] | None = None,
        step_rows: int = 256,
    ) -> None:
        """`vocab` and `context` are the target's; `graphed` replays passes from graphs, for reading on a GPU."""
        super().__init__()
        self.model = self.network = model
        self.table, self.vocab, self.step_rows = table, vocab, step_rows
        self.context = min(context, model.config.context)
        self.store = make_store(model, table.pool.total)
        self.max_depth = 0
        if isinstance(model, Layered):
            run: Pass = model.make_pass(self.store)
            self.max_depth, self.run = MAX_PASSES, self._bounded(run, context)
            read = self._bounded(graphed(run), context) if graphed else self.run
            self._reader = Reader(read, self.progress, READ_ROWS)

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        able = [i for i, s in enumerate(sequences) if self._can_read(s, draft_plans[i])]
        if able:
            some, asked = [sequences[i] for i in able], [draft_plans[i] for i in able]
            roots = self._read_known(some)
            run, law = lambda batch, *_: self._logits(batch), host_draw(self.model)
            grown = grow_drafts(self.table, some, asked, roots, run, keep=True, draw=law)
            for i, draft in zip(able, grown, strict=True):
                drafts[i] = draft
        return drafts

    def _can_read(self, sequence: Sequence, draft_plan: DraftPlan) -> bool:
        """Short enough, and free of tokens beyond this model's vocabulary."""
        fits = len(sequence.tokens) + draft_plan.depth < self.context
        unread = sequence.tokens[self.progress.of(sequence) :]
        return fits and max(unread, default=0) < self.model.config.vocab

    def _read_known(self, sequences: Seq[Sequence]) -> Tensor:
        """Read what each sequence has gained since last time; the logits after its last token, which is always read."""
        starts = [min(self.progress.of(s), len(s.tokens) - 1) for s in sequences]
        texts = [s.tokens[start:] for s, start in zip(sequences, starts, strict=True)]
        batch = text_batch(self.table, [s.row for s in sequences], texts, starts)
        logits = torch.cat([self._logits(piece) for piece in pieces(batch, self.step_rows)])
        for sequence in sequences:
            self.progress.note(sequence, len(sequence.tokens))
        return logits

    def _logits(self, batch: Batch) -> Tensor:
        """The model's logits over the target's vocabulary, on the host, where trees are grown."""
        logits = self.model.forward(batch, self.store)[:, : self.vocab].float().cpu()
        missing = self.vocab - logits.shape[1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits.contiguous()

    # ------------------------------------------------------------------------------------------ resident steps

    def propose_resident(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int
    ) -> tuple[Tensor, None]:
        (_, first), *further = tree.levels
        levels = (known_rows(WINDOW), first), *further
        return run_levels(self.run, ops, rows, lengths, levels, len(tree), context, self.vocab), None

    def tokens_behind(self, sequence: Sequence, coming: int = 0) -> int:
        return self.progress.behind(sequence, coming, WINDOW)

    def reader(self, ops: StepOps) -> Reader:
        return self._reader

    def _bounded(self, run: Pass, context: int) -> Pass:
        """Keeps a pass inside this model's vocabulary and context, where the target's are larger: a draft beyond them
        is worth nothing, and the host does not see in time that it would be made.
        """
        c = self.model.config
        if c.vocab >= self.vocab and c.context >= context:
            return run

        def inside(batch: Batch, together: int, context: int, branching: bool) -> Tensor:
            ids, positions = batch.ids.clamp(max=c.vocab - 1), batch.positions.clamp(max=c.context - 1)
            return run(replace(batch, ids=ids, positions=positions), together, context, branching)

        return inside
