"""Host-packed rows: prompt chunks, and drafts that the host makes. Both runners pack, run and verify them this way."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.draft.drafters import Drafters
from outrider.model.decoder import Model
from outrider.types import NO_DRAFT, Batch, Draft, DraftPlan, Verdict, Work
from outrider.verify.batch import VerifyBatch, predicted, score_prompts

# One drafting step of so many measures how probable the target found the tokens of one sequence.
SAMPLE_INTERVAL = 16

# What was drafted for one piece of work, and what the target said, if it emits.
Result = tuple[Draft, Verdict | None]


@dataclass(slots=True)
class PackedRows:
    """Host-packed rows of a step: their work and drafts and, once run, the logits that were asked for."""

    work: list[Work]
    drafts: list[Draft]
    draft_plans: Seq[DraftPlan] = ()
    logits: Tensor | None = None
    wanted: int = 0  # rows of those
    verifying: VerifyBatch | None = None  # of the sequences that emit, once it has begun
    predicted: list[tuple[str, int, float]] = field(default_factory=list)  # as StepRecord has it

    @property
    def emitting(self) -> list[int]:
        return [i for i, one in enumerate(self.work) if one.emits]

    @property
    def own_logits(self) -> Tensor:
        """Logits that sequences emit by. The logits of prompt tokens that were asked for come after them."""
        assert self.logits is not None
        scored = sum([one.scored for one in self.work])
        return self.logits[: len(self.logits) - scored] if scored else self.logits


class Packer:
    def __init__(self, model: Model, table: SlotTable, drafters: Drafters) -> None:
        self.model, self.table, self.drafters = model, table, drafters
        self.sample_interval = SAMPLE_INTERVAL
        self._drafting_steps = 0

    def propose(self, work: Seq[Work], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        """Drafts for the sequences that emit, with slots for every node at the end of their row."""
        drafts = [NO_DRAFT] * len(work)
        by_drafter: dict[str, list[int]] = {}
        for i, (one, plan) in enumerate(zip(work, draft_plans, strict=True)):
            if plan.nodes > 0 and one.emits:
                by_drafter.setdefault(plan.drafter, []).append(i)
        for name, asked in by_drafter.items():
            sequences = [work[i].sequence for i in asked]
            proposed = self.drafters.propose(name, sequences, [draft_plans[i] for i in asked])
            for i, draft in zip(asked, proposed, strict=True):
                if self._take_slots(work[i], len(draft)):
                    drafts[i] = draft
        return drafts

    def _take_slots(self, one: Work, nodes: int) -> bool:
        """Slots for a draft's nodes. A drafter may have left some; a draft is never worth another sequence's place."""
        row, end = one.sequence.row, one.start + one.known
        left = int(self.table.lengths[row]) - end
        try:
            self.table.extend(row, max(nodes - left, 0))
        except CacheFull:
            nodes = 0
        self.table.commit(row, end, range(nodes))
        one.drafted = nodes
        return nodes > 0

    def sample(self, drafting: list[int]) -> int | None:
        """The drafting sequence whose logits this step measures, each in its turn; None in most steps. Every token has
        the same chance to be measured, whatever was drafted.
        """
        if not drafting:
            return None
        self._drafting_steps += 1
        turn, left = divmod(self._drafting_steps, self.sample_interval)
        return None if left else drafting[turn % len(drafting)]

    def begin_verify(self, rows: PackedRows) -> VerifyBatch:
        """Starts to verify the drafts. What verification reads does not change before the step is settled."""
        emitting = rows.emitting
        sequences, drafts = [rows.work[i].sequence for i in emitting], [rows.drafts[i] for i in emitting]
        return VerifyBatch(rows.own_logits, sequences, drafts, self.model.draw, self.model.filter_logits)

    def verify(self, rows: PackedRows) -> list[Result]:
        assert rows.logits is not None
        emitting = rows.emitting
        results: list[Result] = [(draft, None) for draft in rows.drafts]
        if emitting:
            drafts = [rows.drafts[i] for i in emitting]
            verdicts = (rows.verifying or self.begin_verify(rows)).verdicts()
            for i, verdict in zip(emitting, verdicts, strict=True):
                results[i] = rows.drafts[i], verdict
            exact = [n for n, i in enumerate(emitting) if exact_draft(rows.work[i], drafts[n])]
            if (chosen := self.sample(exact)) is not None:
                first = sum(len(draft) + 1 for draft in drafts[:chosen])
                drafter = rows.draft_plans[emitting[chosen]].drafter
                rows.predicted.append((drafter, *predicted(rows.own_logits[first:], verdicts[chosen])))
        if scored := sum([one.scored for one in rows.work]):
            _keep_prompt_scores(rows.logits[len(rows.logits) - scored :], rows.work)
        return results


def exact_draft(one: Work, draft: Draft) -> bool:
    """Whether a draft was made for it and it emits what the target says."""
    return bool(draft) and one.alive and one.sequence.request.params.speculation.mode != "lossy"


def _keep_prompt_scores(logits: Tensor, work: Seq[Work]) -> None:
    """Log-probabilities of prompt tokens, where they were asked for."""
    for one, scores in score_prompts(logits, work):
        if one.alive:
            known = one.sequence.prompt_logprobs[: one.start + 1] or [None]
            one.sequence.prompt_logprobs = [*known, *scores]


def padding(rows: int, slot: int) -> Batch:
    """Rows of no sequence, all in the padding slot."""
    nothing = torch.zeros(rows, dtype=torch.int32)
    return Batch(
        ids=torch.zeros(rows, dtype=torch.int64),
        positions=nothing,
        slots=torch.full((rows,), slot, dtype=torch.int32),
        table_rows=nothing,
        prefix=torch.ones(rows, dtype=torch.int32),
        ancestors=torch.zeros(rows, dtype=torch.int64),
        table=torch.full((1, 1), slot, dtype=torch.int32),
        logit_rows=torch.arange(rows),
    )


def pack(work: Seq[Work], drafts: Seq[Draft], table: SlotTable) -> Batch:
    """Every piece of work's known tokens, then its draft's nodes. The table row already ends with slots for both.

    Logits are wanted of the rows that emit, in order, and after all of those of the prompt rows asked for.
    """
    sizes = [one.known + len(draft) for one, draft in zip(work, drafts, strict=True)]
    total = sum(sizes)
    ids, ancestors = np.empty(total, np.int64), np.zeros(total, np.int64)
    positions, slots = np.empty(total, np.int32), np.empty(total, np.int32)
    owners, prefix = np.empty(total, np.int32), np.empty(total, np.int32)
    logit_rows: list[int] = []
    prompt_rows: list[int] = []
    at = 0
    for one, draft, size in zip(work, drafts, sizes, strict=True):
        sequence, base, known = one.sequence, one.start, one.known
        end, last = base + known, at + known
        if known == 1:  # numbers cost a tenth of what arrays of one do
            ids[at], positions[at], prefix[at] = sequence.tokens[base], base, end
        else:
            ids[at:last] = sequence.tokens[base:end]
            positions[at:last] = np.arange(base, end)
            prefix[at:last] = np.arange(base + 1, end + 1)
        if size > known:
            ids[last : at + size] = draft.tokens
            positions[last : at + size] = np.array(draft.depths) + (end - 1)
            prefix[last : at + size] = end
            ancestors[last : at + size] = draft.ancestors
        slots[at : at + size] = table.entries[sequence.row, base : base + size]
        owners[at : at + size] = sequence.row
        if one.emits:
            logit_rows.extend(range(last - 1, at + size))
        prompt_rows.extend(range(at, at + one.scored))
        at += size
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        table_rows=torch.from_numpy(owners),
        prefix=torch.from_numpy(prefix),
        ancestors=torch.from_numpy(ancestors),
        table=table.tensor,
        logit_rows=torch.from_numpy(np.array(logit_rows + prompt_rows, np.int64)),
    )
