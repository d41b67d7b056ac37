"""How a step runs. `Runner` is the contract; `EagerRunner` runs at once what the host packed.

Launching drafts, runs the target once and leaves its logits with an `InFlightStep`; finishing verifies. In between, as
many steps as `lag` says may be launched.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.draft.drafters import Drafters
from outrider.engine.kv_cache import KvCache
from outrider.model.decoder import Model
from outrider.types import (
    NO_DRAFT,
    Batch,
    Draft,
    DraftPlan,
    Options,
    Plan,
    Reason,
    Sequence,
    TreeShape,
    Verdict,
    Work,
)
from outrider.verify.batch import VerifyBatch, predicted, score_prompts

# Drafting steps between two in which one sequence's logits are looked at: that takes the time of a few rows' softmax.
SAMPLE_INTERVAL = 16
LONG_READ = 8  # tokens: a drafter that missed fewer drafts hardly later
# Numbers of rows that passes are measured for before anybody asks, up to so many a sequence: kernels take rows in
# blocks, so that a few more may cost nothing or half a step.
LONGEST_MEASURED = 0.1  # seconds: whoever asks meanwhile waits for three such passes
MEASURED_TIMES = 2
MEASURED_ROWS, MEASURED_ROWS_EACH = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 24, 32, 48, 64, 96, 128), 5

# What was drafted for one piece of work, and what the target said, if it emits.
Result = tuple[Draft, Verdict | None]


@dataclass(slots=True)
class StagedPart:
    """Rows packed by the host: whose they are, what was drafted, and once run the logits that were asked for."""

    work: list[Work]
    drafts: list[Draft]
    draft_plans: Seq[DraftPlan] = ()
    logits: Tensor | None = None
    wanted: int = 0  # rows of those
    verifying: VerifyBatch | None = None  # of the sequences that emit, once it has begun
    predicted: list[tuple[str, int, float]] = field(default_factory=list)  # as StepRecord has it

    @property
    def emitting(self) -> list[int]:
        """Places of the work that emits."""
        return [i for i, one in enumerate(self.work) if one.emits]

    @property
    def own_logits(self) -> Tensor:
        """Those that sequences emit by; after them are those of prompt tokens that were asked for."""
        assert self.logits is not None
        return self.logits[: len(self.logits) - sum(one.scored for one in self.work)]


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and whose results the engine does not have yet."""

    work: list[Work]
    draft_plans: list[DraftPlan]  # as run: a runner may have made less of them than was planned
    reasons: tuple[Reason, ...]
    staged: StagedPart
    begun: float = field(default_factory=time.perf_counter)
    rows: int = 0  # of one pass
    passes: int = 1
    captured: tuple[str, TreeShape, int] | None = None
    catch_up: tuple[str, int, float] | None = None
    predicted: list[tuple[str, int, float]] = field(default_factory=list)  # of resident rows
    ready: Any = None  # where a device lags: an event after which its logits can be read
    plan_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    waited_s: float = 0.0

    @property
    def can_draft(self) -> bool:
        """Whether the planner had a choice: nobody drafts in plain passes that were captured as such."""
        return self.captured is None or self.captured[0] != "none" or bool(self.staged.work)


class Runner(Protocol):
    lag: int  # steps that may be in flight while the next one is launched
    on_demand: bool  # whether steps that were never run may be captured and measured while somebody waits

    @property
    def made(self) -> tuple[int, int]:
        """Graphs captured and kernels compiled so far."""
        ...

    def options(self, work: Seq[Work], waiting: int) -> Options:
        """What the planner may choose from for this work, while so many other prompts wait."""
        ...

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        """Draft, and run the target once. Waits for nothing that is in flight."""
        ...

    def finish(self, step: InFlightStep) -> list[Result]:
        """Wait for a step, and verify: a result for each piece of its work."""
        ...

    def measure(self, size: int, drafter: str) -> Iterable[tuple[str, TreeShape, float]]:
        """What resident rows cost: seconds by drafter and draft tree, for so many sequences."""
        ...

    def unprepared(self, sequences: int, drafters: Seq[str]) -> list[tuple[str, int]]:
        """Drafters and sizes whose resident rows were never run, for up to so many sequences."""
        ...

    def measure_rows(self, sequences: int, known: Mapping[int, float]) -> Iterator[tuple[int, float]]:
        """Seconds of eager passes by their rows, as far as so many sequences may have them and they are not known; one
        piece at a time.
        """
        ...

    def measure_prompts(self, size: int) -> Iterable[tuple[int, float]]:
        """Room for prompt rows beside so many decoding sequences, and the seconds of such a step."""
        ...

    def compile(self, sequences: int, drafters: Seq[str] | None = None) -> Iterator[None]:
        """Have the kernels compiled that up to so many sequences need to be answered without drafts, or those of all
        other steps, with these drafters. Nothing is waited for.
        """
        ...

    def prepare_prompts(self) -> Iterator[None]:
        """Run what prompts need that nobody decodes beside, piece by piece."""
        ...

    def prepare_rest(
        self, sequences: int, drafters: Seq[str], plain: Callable[[int], float | None]
    ) -> Iterator[None]:
        """Capture what else up to so many sequences may need, piece by piece; `plain` are seconds of plain steps."""
        ...

    def release(self, drafter: str) -> None:
        """Keep nothing of a drafter that is there no longer. Nothing is in flight."""
        ...

    def warm_up(self, drafter: str) -> tuple[int, float]:
        """Tokens that a drafter can catch up with in some seconds; none if there is nothing to measure."""
        ...


class EagerRunner:
    """All rows are packed by the host, each sequence with a draft tree of its own."""

    lag = 0
    on_demand = False

    def __init__(self, model: Model, cache: KvCache, drafters: Drafters) -> None:
        self.model, self.store, self.table, self.drafters = model, cache.store, cache.table, drafters
        self.sample_interval = SAMPLE_INTERVAL
        self._drafting_steps = 0

    @property
    def made(self) -> tuple[int, int]:
        return 0, 0

    def options(self, work: Seq[Work], waiting: int) -> Options:
        return Options(
            behind=self._unread, model_free=self.drafters.model_free, found=self._found, waiting=waiting
        )

    def _unread(self, name: str, sequence: Sequence) -> int:
        reader = self.drafters.resident(name)
        return reader.tokens_behind(sequence) if reader is not None else 0

    def _found(self, name: str, sequence: Sequence, depth: int) -> int:
        (draft,) = self.drafters.propose(name, [sequence], [DraftPlan(name, depth, depth)])
        return len(draft)

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        begun = time.perf_counter()
        unread = self._reads(work, plan.draft_plans)
        staged = StagedPart(work, self.propose(work, plan.draft_plans), plan.draft_plans)
        step = InFlightStep(work, list(plan.draft_plans), plan.reasons, staged, begun)
        for one in work:
            one.launch(1, wait=True)
        drafted = time.perf_counter()
        batch = pack(work, staged.drafts, self.table)
        staged.logits, step.rows = self.model.forward(batch, self.store), batch.rows
        step.draft_s, step.target_s = drafted - begun, time.perf_counter() - drafted
        if unread is not None and any(
            draft and draft_plan.drafter == unread[0]
            for draft, draft_plan in zip(staged.drafts, plan.draft_plans, strict=True)
        ):  # else it could not draft yet, and has read nothing
            step.catch_up = (*unread, step.draft_s)
        return step

    def finish(self, step: InFlightStep) -> list[Result]:
        begun = time.perf_counter()
        results = self.verify(step.staged)
        step.verify_s = time.perf_counter() - begun
        return results

    def measure(self, size: int, drafter: str) -> Iterable[tuple[str, TreeShape, float]]:
        return ()

    def unprepared(self, sequences: int, drafters: Seq[str]) -> list[tuple[str, int]]:
        return []

    def measure_rows(self, sequences: int, known: Mapping[int, float]) -> Iterator[tuple[int, float]]:
        seconds = 0.0
        for rows in MEASURED_ROWS:
            if rows > MEASURED_ROWS_EACH * sequences or seconds > LONGEST_MEASURED:
                return
            seconds = known[rows] if rows in known else self.measure_pass(rows)
            if rows not in known:
                yield rows, seconds

    def measure_pass(self, rows: int) -> float:
        """Seconds of a pass over so many rows of nobody, the least of a few."""
        batch, seconds = _padding(rows, self.store.slots), inf
        self.model.forward(batch, self.store)  # the first time only warms up
        for _ in range(MEASURED_TIMES):
            begun = time.perf_counter()
            self.model.forward(batch, self.store)
            seconds = min(seconds, time.perf_counter() - begun)
        return seconds

    def measure_prompts(self, size: int) -> Iterable[tuple[int, float]]:
        return ()

    def compile(self, sequences: int, drafters: Seq[str] | None = None) -> Iterator[None]:
        return iter(())

    def prepare_prompts(self) -> Iterator[None]:
        return iter(())

    def prepare_rest(
        self, sequences: int, drafters: Seq[str], plain: Callable[[int], float | None]
    ) -> Iterator[None]:
        return iter(())

    def release(self, drafter: str) -> None:
        return

    def warm_up(self, drafter: str) -> tuple[int, float]:
        return 0, 0.0

    def _reads(self, work: Seq[Work], draft_plans: Seq[DraftPlan]) -> tuple[str, int] | None:
        """A drafter that has much to read before it drafts, and how many tokens."""
        unread = Counter[str]()
        for one, draft_plan in zip(work, draft_plans, strict=True):
            if draft_plan.nodes > 0 and one.emits:
                unread[draft_plan.drafter] += self._unread(draft_plan.drafter, one.sequence)
        ((name, tokens),) = unread.most_common(1) or [("none", 0)]
        return (name, tokens) if tokens >= LONG_READ else None

    def propose(self, work: Seq[Work], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        """Drafts for the sequences that emit, with slots for every node at the end of their row."""
        drafts = [NO_DRAFT] * len(work)
        by_drafter: dict[str, list[int]] = {}
        for i, (one, draft_plan) in enumerate(zip(work, draft_plans, strict=True)):
            if draft_plan.nodes > 0 and one.emits:
                by_drafter.setdefault(draft_plan.drafter, []).append(i)
        for name, asked in by_drafter.items():
            proposed = self.drafters.propose(
                name, [work[i].sequence for i in asked], [draft_plans[i] for i in asked]
            )
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
        """Which of a step's drafting sequences is looked at more closely: none in most steps, else each in its turn.
        Every token is as likely to be among them as any other, whatever was drafted.
        """
        if not drafting:
            return None
        self._drafting_steps += 1
        turn, rest = divmod(self._drafting_steps, self.sample_interval)
        return None if rest else drafting[turn % len(drafting)]

    def verifying(self, staged: StagedPart) -> VerifyBatch:
        """Begin to verify the drafts of staged rows. Nothing that it goes by changes before the step is settled."""
        emitting = staged.emitting
        sequences, drafts = [staged.work[i].sequence for i in emitting], [staged.drafts[i] for i in emitting]
        return VerifyBatch(staged.own_logits, sequences, drafts, self.model.draw, self.model.filter_logits)

    def verify(self, staged: StagedPart) -> list[Result]:
        """Verify the drafts of staged rows, on the host: what the target says of them."""
        assert staged.logits is not None
        own, emitting = staged.own_logits, staged.emitting
        results: list[Result] = [(draft, None) for draft in staged.drafts]
        if emitting:
            drafts = [staged.drafts[i] for i in emitting]
            verdicts = (staged.verifying or self.verifying(staged)).verdicts()
            for i, verdict in zip(emitting, verdicts, strict=True):
                results[i] = staged.drafts[i], verdict
            chosen = self.sample(
                [n for n, i in enumerate(emitting) if exact_draft(staged.work[i], drafts[n])]
            )
            if chosen is not None:
                first = sum(len(draft) + 1 for draft in drafts[:chosen])
                drafter = staged.draft_plans[emitting[chosen]].drafter
                staged.predicted.append((drafter, *predicted(own[first:], verdicts[chosen])))
        if len(own) < len(staged.logits):
            _keep_prompt_scores(staged.logits[len(own) :], staged.work)
        return results


def exact_draft(one: Work, draft: Draft) -> bool:
    """Whether something was drafted for it, and it emits what the target says."""
    return bool(draft) and one.alive and one.sequence.request.params.speculation.mode != "lossy"


def _keep_prompt_scores(logits: Tensor, work: Seq[Work]) -> None:
    """Log-probabilities of prompt tokens read in this pass, where they were asked for."""
    for one, scores in score_prompts(logits, work):
        if one.alive:
            known = one.sequence.prompt_logprobs[: one.start + 1] or [None]
            one.sequence.prompt_logprobs = [*known, *scores]


def _padding(rows: int, slot: int) -> Batch:
    """Rows of nobody, all in the slot that is nobody's."""
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
        logit_rows=torch.tensor(logit_rows + prompt_rows, dtype=torch.int64),
    )
