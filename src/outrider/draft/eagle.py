"""`eagle`: an EAGLE-3 head drafts from the target's hidden states.

An entry of the head joins a token with the target's hidden states before it and predicts the token after it. Past the
known tokens the head feeds on its own hidden state instead, so a draft of depth d takes d passes of one layer.

An entry depends on the text up to its token, so it lies in that token's slot of the target's table: sequences that
share the slot share the entry. The first token has none, so the head sees the table from its second column on. The
target keeps its hidden states slot by slot beside keys and values, so they survive prefix reuse, preemption and
pauses; what the head missed it reads when it is asked again. Entries of draft nodes came of the head's own hidden
states, so accepted ones are made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.device.ops import Layout, Pass, StepOps, TreeLayout, known_rows
from outrider.draft.drafter import MAX_PASSES
from outrider.draft.eagle_head import EagleHead
from outrider.draft.reading import NetworkDrafter, Reader, pieces, text_batch
from outrider.draft.tree import BRANCH, SLIM, Growth, Place, grow_drafts, host_draw, slim_tree
from outrider.model.kernels.native_eagle import Drafted
from outrider.types import NO_DRAFT, Batch, Draft, DraftPlan, Sequence
from outrider.verify.batch import mode_of
from outrider.verify.filters import wanted
from outrider.verify.rows import clamp_temperature

# Known tokens that the head catches up on in one pass, on a device filled up to one of these.
READ_ROWS = (128, 512)


class EagleDrafter(NetworkDrafter):
    max_depth, trees = MAX_PASSES, True

    def __init__(
        self,
        head: EagleHead,
        target_store: KeyValueStore,
        table: SlotTable,
        window: int = MAX_PASSES + 1,
        graphed: Callable[[Pass], Pass] | None = None,
    ) -> None:
        """A resident step may bring up to `window` tokens whose hidden states are known only when it is over. The
        next one begins with the entries of so many last tokens, those that are there already with the same numbers.
        `graphed` replays passes from graphs, for reading on a GPU.
        """
        super().__init__()
        self.head = self.network = head
        self.target_store, self.table, self.window = target_store, table, window
        target_store.tap(head.config.taps, head.config.layer.hidden)
        self.store = head.make_store(table.pool.total)
        self.run = head.make_pass(self.store)
        self.graphed = graphed
        self._reader: Reader | None = None  # once there is a state to read

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        able = [i for i, s in enumerate(sequences) if len(s.tokens) > 1 and s.pending == 1]
        if not able:
            return drafts
        some, asked = [sequences[i] for i in able], [draft_plans[i] for i in able]
        if self.head.draft is not None and all(map(is_slim, some, asked)):
            for i, draft in zip(able, self._draft_slim(some, asked), strict=True):
                drafts[i] = draft
            return drafts
        hidden = self._read(some, [len(s.tokens) for s in some])
        made: dict[Place, Tensor] = {(i, -1): row for i, row in enumerate(hidden)}

        def run(batch: Batch, growths: list[Growth], places: list[Place]) -> Tensor:
            parents = torch.stack([made[i, growths[i].parents[node]] for i, node in places])
            after = self.head.forward(parents, batch, self.store)
            made.update(zip(places, after, strict=True))
            return self.head.logits(after).cpu()

        roots = self.head.logits(hidden).cpu()
        grown = grow_drafts(self.table, some, asked, roots, run, behind=1, draw=host_draw(self.head.target))
        for i, draft in zip(able, grown, strict=True):
            drafts[i] = draft
        return drafts

    def _read(self, sequences: Seq[Sequence], ends: Seq[int]) -> Tensor:
        """Make the entries that these lack of their first so many tokens; the head's hidden state at the last of each,
        which is always made.
        """
        starts = [min(max(self.progress.of(s), 1), end - 1) for s, end in zip(sequences, ends, strict=True)]
        texts = [s.tokens[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)]
        batch = text_batch(self.table, [s.row for s in sequences], texts, starts, behind=1)
        made, features = [], self.target_store.features
        assert features is not None
        for piece in pieces(batch, READ_ROWS[-1]):
            slots = self.table.entries[piece.table_rows.numpy(), piece.positions.numpy()]
            made.append(self.head.read(features, slots, piece, self.store))
        for sequence, end in zip(sequences, ends, strict=True):
            self.progress.note(sequence, end)
        return torch.cat(made)[batch.logit_rows]

    def _draft_slim(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        """Reads and drafts in one call; no drafts if there are too few slots to borrow."""
        assert self.head.draft is not None
        known = [len(sequence.tokens) for sequence in sequences]
        behind = [s for s in sequences if self.tokens_behind(s)]
        if sum([self.tokens_behind(s) for s in behind]) > READ_ROWS[-1]:
            self._read(behind, [len(s.tokens) - 1 for s in behind])
        asked = [self._drafted(s, plan) for s, plan in zip(sequences, draft_plans, strict=True)]
        try:
            slots = [
                self.table.extend(s.row, one.depths - 1) for s, one in zip(sequences, asked, strict=True)
            ]
            words, features = self.head.words_for(sequences), self.target_store.features
            found = self.head.draft(asked, slots, self.table.tensor, features, self.store, words)
        except CacheFull:  # a draft is never worth another sequence's place
            return [NO_DRAFT] * len(sequences)
        finally:
            for sequence, length in zip(sequences, known, strict=True):
                self.table.commit(sequence.row, length)
        for sequence, length in zip(sequences, known, strict=True):
            self.progress.note(sequence, length)
        return [slim_tree(plan, *one) for plan, one in zip(draft_plans, found, strict=True)]

    def _drafted(self, sequence: Sequence, plan: DraftPlan) -> Drafted:
        params, tokens = sequence.request.params, sequence.tokens
        start, known = min(max(self.progress.of(sequence), 1), len(tokens) - 1), len(tokens)
        depth, children = min(plan.nodes, plan.depth), BRANCH if plan.nodes > plan.depth else 1
        divisor, sampled = clamp_temperature(params.temperature) or 1.0, params.temperature > 0
        law = divisor, sampled, sequence.seed, *wanted(params)
        return Drafted(tokens, start, sequence.row, known - 1, known, depth, children, *law)

    def _before(self, table: Tensor, batch: Batch) -> Tensor:
        """The target's hidden states before each of these known tokens, fused."""
        features = self.target_store.features
        assert features is not None
        slots = table[batch.table_rows.long(), batch.positions.long()].long()
        return self.head.fused(features[slots.to(features.device)])

    # ------------------------------------------------------------------------------------------ resident steps

    def propose_resident(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int
    ) -> tuple[Tensor, None]:
        sampled = ops.state.draft_buffer(len(rows), len(tree))
        batch = self._batch(ops, rows, lengths, known_rows(self.window, behind=1))
        hidden = self.run(self._before(ops.state.table, batch), batch, self.window, context, False)
        hidden = hidden[batch.logit_rows]  # of the last known token
        for depth, (layout, columns) in enumerate(tree.levels):
            if depth:
                hidden = _of_parents(ops, hidden, tree, depth)
                batch = self._batch(ops, rows, lengths, layout.put_behind(1), sampled)
                hidden = self.run(hidden, batch, len(layout), context, bool(layout.masks))
            ops.draw(batch, self.head.logits(hidden), columns, sampled, ahead=2)
        return sampled, None

    def tokens_behind(self, sequence: Sequence, coming: int = 0) -> int:
        return self.progress.behind(sequence, coming, self.window)

    def reader(self, ops: StepOps) -> Reader:
        if self._reader is None:
            table = ops.state.table  # as long as there are graphs that read it

            def run(batch: Batch, together: int, context: int, branching: bool) -> Tensor:
                return self.run(self._before(table, batch), batch, together, context, branching)

            read = self.graphed(run) if self.graphed else run
            self._reader = Reader(read, self.progress, READ_ROWS, behind=1)
        return self._reader

    def _batch(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, layout: Layout, sampled: Tensor | None = None
    ) -> Batch:
        """A layout whose positions lie one behind: the head's entries begin with the second token."""
        return replace(ops.build_batch(rows, lengths, layout, sampled), table=ops.state.table[:, 1:])


def is_slim(sequence: Sequence, plan: DraftPlan) -> bool:
    """Whether its draft is a chain, or one with some further nodes beside it, of tokens that the law of sampling
    chooses from logits that its request does not edit.
    """
    return (
        plan.tree is None
        and 0 < plan.nodes <= SLIM * plan.depth
        and mode_of(sequence) != "rejection"
        and not sequence.request.edits_logits
    )


def _of_parents(ops: StepOps, hidden: Tensor, tree: TreeLayout, depth: int) -> Tensor:
    """Hidden states [R, hidden] of the pass before, for the rows of this depth: each its parent's."""
    (above, _), parents = tree.levels[depth - 1], tree.parent_rows(depth)
    if parents == tuple(range(len(above))):
        return hidden
    at = ops.state.constant(parents, torch.int64)
    return hidden.view(-1, len(above), hidden.shape[1])[:, at].flatten(0, 1)
