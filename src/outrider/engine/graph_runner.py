"""Steps over device-resident state, captured as CUDA graphs, with the host one step behind.

Tokens, lengths, slots and sampling parameters of decoding sequences live where the model does. A step is a fixed list
of operations over them, so on a GPU it is captured once a shape and replayed. The host says who takes part, gives each
a few fresh slots, and processes step N while the device runs step N + 1.

Resident rows share one drafter and one draft tree, and the device verifies them. Prefill chunks, and sequences whose
drafts only the host can make, are staged: packed by the host as `EagerRunner` packs them, and run in the same pass.
What the host must verify (a grammar, words to avoid) is drafted and run with the resident rows, and its sequence waits
for the host. Whoever waits moves every second step; nobody else's step changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.control.trees import NO_TREE, tree_nodes
from outrider.device.buckets import TREE_SIZE, RunChoice, SizeChoice, sizes_up_to, staged_bucket
from outrider.device.capture import CapturedStep, Launched, StepShape, Timer
from outrider.device.graphs import StepGraphs
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import DrafterFailed, Drafters
from outrider.engine.kv_cache import KvCache
from outrider.engine.residency import Residency
from outrider.engine.runner import EagerRunner, InFlightStep, Result, StagedPart, exact_draft, pack
from outrider.engine.shared_drafts import MAX_RESIDENT_DEPTH, SharedDrafts, first_to_read
from outrider.engine.warm_up import WarmUp
from outrider.model.decoder import Model
from outrider.model.kernels.gpu.recording import Recorded, context_for
from outrider.types import (
    NO_DRAFT,
    NO_DRAFT_PLAN,
    Batch,
    Draft,
    DraftPlan,
    Options,
    Plan,
    Sequence,
    TreeShape,
    Verdict,
    Work,
)
from outrider.verify.batch import emitting_rows, predicted, report, verify_rows

# Of resident sequences: rows of the state, draft nodes wanted, whether the device commits, slots, and whose drafts.
Inputs = tuple[np.ndarray, Seq[int], np.ndarray, np.ndarray, Seq[int]]


@dataclass(slots=True)
class GraphStep(InFlightStep):
    resident: list[int] = field(default_factory=list)  # places in the work; the others are staged
    shape: StepShape | None = None  # of the resident rows
    size: int = 0  # that they were planned for; a larger shape may serve
    launched: Launched | None = None
    host_verified: frozenset[int] = frozenset()  # places in `resident`
    reported: frozenset[int] = frozenset()  # places in `resident` whose log-probabilities are wanted
    logits: dict[int, Tensor] = field(default_factory=dict)  # that the host needs, by place in `resident`
    reading: tuple[str, int, Timer] | None = None  # a drafter that caught up first
    sampled: int | None = None  # place in `resident` of who is looked at more closely
    staged_places: list[int] = field(init=False)

    def __post_init__(self) -> None:
        here = set(self.resident)
        self.staged_places = [i for i in range(len(self.work)) if i not in here]


class GraphRunner(EagerRunner):
    def __init__(
        self,
        model: Model,
        cache: KvCache,
        drafters: Drafters,
        ops: StepOps,
        run: Callable[..., Tensor],
        record: Callable[[Callable[[], Any]], tuple[Any, Any]] | None = None,
        lag: int = 1,
        default: str = "none",  # the drafter of sequences whose requests name none
        tree_size: int = TREE_SIZE,  # sequences of a step that may have trees
    ) -> None:
        """`run` is the target's pass over rows on the device; `record` captures graphs, where there are any."""
        super().__init__(model, cache, drafters)
        self.default, self.finished_at = default, 0.0
        self.ops, self.state, self.run, self.lag = ops, ops.state, run, lag
        self.padding = cache.store.slots
        self.state.table[-1] = self.padding  # its own row, which is also for drafters of who wants no draft
        # Captured steps have every part that a request may need, so that none must be captured when one comes.
        self.captures = record is not None
        if self.captures:
            self.state.edits.make()
        self.shared = SharedDrafts(drafters, self.captures, tree_size)
        self.sizes = SizeChoice()
        self.graphs = StepGraphs(self._make, record)
        self.warm = WarmUp(self.graphs, self.shared, self.sizes, drafters, ops)
        self.runs = RunChoice()
        self.residency = Residency(self.state, self.table)
        # Of steps in flight: the drafter, the rows it drafts for, and the most tokens they bring.
        self.latest: deque[tuple[str, set[int], int]] = deque(maxlen=max(lag, 1))
        self.cuda = self.state.device.type == "cuda"
        # What is verified there is short and awaited, so it goes first: behind the step in flight it would wait for it.
        self.beside = torch.cuda.Stream(priority=-1) if self.cuda else None

    @property
    def made(self) -> tuple[int, int]:
        return Recorded.graphs, Recorded.kernels

    @property
    def on_demand(self) -> bool:
        return self.graphs.on_demand

    @on_demand.setter
    def on_demand(self, now: bool) -> None:
        self.graphs.on_demand = self.sizes.on_demand = now

    # ------------------------------------------------------------------------------------ what can be planned

    def options(self, work: Seq[Work], waiting: int) -> Options:
        resident = tuple(_decodes(one) and self._stays(one.sequence) for one in work)
        sequences = [one.sequence for one, here in zip(work, resident, strict=True) if here]
        size = self.sizes.choose(len(sequences)) if sequences else 0
        beside = any(one.known > 1 for one in work)
        trees = {
            name: self.shared.trees(name, size, beside)
            for name in self.drafters.names
            if self.drafters.resident(name)
        }
        given = size, resident, trees, self._unread, MAX_RESIDENT_DEPTH, self.drafters.model_free, self._found
        return Options(*given, after_prompts=False, waiting=waiting)

    def _stays(self, sequence: Sequence) -> bool:
        """Whether its rows are resident. Whoever has a step in flight must stay; else not if the host drafts for it."""
        return sequence.coming > 0 or not self._host_drafts(sequence)

    def _host_drafts(self, sequence: Sequence) -> bool:
        how = sequence.request.params.speculation
        drafter = how.drafter or self.default
        if how.off or drafter == "none" or self.drafters.left_alone(drafter):
            return False
        if how.mode != "coupled" or how.tree is not None or self.drafters.resident(drafter) is None:
            return True
        depth = how.depth or 0
        return depth > MAX_RESIDENT_DEPTH or (how.nodes is not None and how.nodes != depth)

    def _unread(self, name: str, sequence: Sequence) -> int:
        drafter = self.drafters.resident(name)
        return drafter.tokens_behind(sequence, self._coming(sequence, name)) if drafter is not None else 0

    def _behind(self, sequences: Seq[Sequence], name: str) -> dict[Sequence, int]:
        """Tokens this drafter must read before it can draft, by whose they are."""
        return {s: count for s in sequences if (count := self._unread(name, s))}

    def _coming(self, sequence: Sequence, drafter: str) -> int:
        """Tokens that steps in flight may bring without this drafter reading along."""
        if not sequence.coming:
            return 0
        return sum(most for name, rows, most in self.latest if name != drafter or sequence.row not in rows)

    # ------------------------------------------------------------------------------------ warm-up and measuring

    def unprepared(self, sequences: int, drafters: Seq[str]) -> list[tuple[str, int]]:
        """Drafters, and sizes of steps, that were not captured yet, for up to so many sequences: plain ones first."""
        pairs = [(name, size) for name in ("none", *drafters) for size in sizes_up_to(sequences)]
        return [pair for pair in pairs if pair not in self.warm.prepared]

    def measure(self, size: int, drafter: str) -> Iterator[tuple[str, TreeShape, float]]:
        return self.warm.measure(size, drafter)

    def measure_rows(self, sequences: int, known: Mapping[int, float]) -> Iterator[tuple[int, float]]:
        return iter(())  # steps are measured as they are captured

    def measure_prompts(self, size: int) -> Iterator[tuple[int, float]]:
        return self.warm.measure_prompts(size)

    def compile(self, sequences: int, drafters: Seq[str] | None = None) -> Iterator[None]:
        return self.warm.compile(sequences, drafters)

    def prepare_prompts(self) -> Iterator[None]:
        return self.warm.prompts()

    def prepare_rest(
        self, sequences: int, drafters: Seq[str], plain: Callable[[int], float | None]
    ) -> Iterator[None]:
        return self.warm.rest(sequences, drafters, plain)

    def release(self, drafter: str) -> None:
        self.graphs.forget(drafter)
        self.default = self.drafters.instead_of(self.default)

    def warm_up(self, drafter: str) -> tuple[int, float]:
        return self.warm.read(drafter)

    # ------------------------------------------------------------------------------------ launching

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        resident = [i for i, one in enumerate(work) if self._is_resident(one, plan.draft_plans[i])]
        step = GraphStep(work, list(plan.draft_plans), plan.reasons, StagedPart([], []), resident=resident)
        for i in step.staged_places:
            if not _decodes(work[i]):  # a prompt's last chunk: the device drafts for it from the next step on
                step.draft_plans[i] = NO_DRAFT_PLAN
        step.staged.work = [work[i] for i in step.staged_places]
        step.staged.draft_plans = [step.draft_plans[i] for i in step.staged_places]
        step.staged.drafts = self.propose(step.staged.work, step.staged.draft_plans)
        beside = any(one.known > 1 for one in step.staged.work)
        draft_plans = [plan.draft_plans[i] for i in resident]
        for i, draft_plan in zip(resident, self.shared.fitted(draft_plans, beside), strict=True):
            step.draft_plans[i] = draft_plan
        self._catch_up(step)
        inputs, batch = self._fill(step)
        try:
            step.launched = self._send(step, inputs, batch)
        except DrafterFailed as failed:
            self.drafters.note_fault(failed)
            step.launched = self._send(step, self._without_drafts(step, inputs), batch)
        self._keep_logits(step)
        return self._noted(step)

    def _is_resident(self, one: Work, draft_plan: DraftPlan) -> bool:
        if not _decodes(one):
            return False
        if one.sequence.coming > 0 or not draft_plan.nodes or self.drafters.left_alone(draft_plan.drafter):
            return True
        return self.drafters.resident(draft_plan.drafter) is not None and not self._host_drafts(one.sequence)

    def _catch_up(self, step: GraphStep) -> None:
        """Let the drafter read what the host knows of sequences that it is behind with. Whose tokens in flight it would
        still lack gets no draft this time.
        """
        name = self.shared.serving(step.draft_plans[i] for i in step.resident)[0]
        drafting = {
            step.work[i].sequence: i for i in step.resident if step.draft_plans[i].drafter == name != "none"
        }
        beside = sum(one.known for one in step.staged.work)
        behind, late = first_to_read(self._behind(list(drafting), name), beside)
        for sequence in late:
            step.draft_plans[drafting[sequence]] = NO_DRAFT_PLAN
        if not behind:
            return
        self.residency.sync(behind)
        timer = Timer(self.cuda)
        self.drafters.catch_up(name, self.ops, list(behind))
        timer.stop()
        step.reading = name, sum(behind.values()), timer
        for sequence in behind if self.drafters.left_alone(name) else self._behind(list(behind), name):
            step.draft_plans[drafting[sequence]] = NO_DRAFT_PLAN

    def _fill(self, step: GraphStep) -> tuple[Inputs, Batch | None]:
        """Give everybody slots and choose the shape: what its resident rows are given, and its staged ones."""
        work = [step.work[i] for i in step.resident]
        rows = np.array([one.sequence.row for one in work], np.int32)
        self.residency.sync(one.sequence for one in work)
        special = {i: work[i].sequence for i in np.flatnonzero(self.residency.special[rows]).tolist()}
        step.host_verified = frozenset(i for i, one in special.items() if self._host_verifies(one))
        step.reported = frozenset(i for i, one in special.items() if one.request.params.logprobs is not None)
        shape = step.shape = self._shape(step, rows)
        draft_plans, serving = [step.draft_plans[i] for i in step.resident], shape.drafter.split("+")
        nodes, passes = shape.nodes, shape.passes
        if nodes and work:
            self.table.extend_all(rows, nodes)
        at = self.table.lengths[rows][:, None] - (nodes + 1) + np.arange(nodes + 1)
        for i, one in enumerate(work):
            one.drafted = nodes
            one.launch(passes, wait=i in step.host_verified)
        for i in step.host_verified:
            self.residency.leave(work[i].sequence)
        for one in step.staged.work:
            one.launch(1, wait=True)
        batch = pack(step.staged.work, step.staged.drafts, self.table) if step.staged.work else None
        commits = np.ones(len(work), bool)
        commits[list(step.host_verified)] = False
        wanted, numbers, drafting = [0] * len(work), [0] * len(work), set[int]()
        if shape.tree != NO_TREE:
            wanted = [draft_plan.nodes for draft_plan in draft_plans]
            numbers = [
                serving.index(draft_plan.drafter) if draft_plan.nodes else 0 for draft_plan in draft_plans
            ]
            drafting = {
                int(row)
                for row, draft_plan in zip(rows, draft_plans, strict=True)
                if draft_plan.drafter == serving[0]
            }
        slots = self.table.entries[rows[:, None], at]
        self.latest.append((serving[0], drafting, passes + shape.tree[0]))
        step.rows = len(work) * (shape.tree[1] + 1) + (0 if batch is None else batch.rows)
        step.passes, step.captured = passes, (serving[0], shape.tree, step.size) if work else None
        return (rows, wanted, commits, slots, numbers), batch

    def _shape(self, step: GraphStep, rows: np.ndarray) -> StepShape:
        """The shape that serves: a captured one if there is, without drafts if there is none with them. A draft is
        never worth another sequence's place.
        """
        size = step.size = self.sizes.room_for(len(rows)) if len(rows) else 0
        room = self._room(step.staged) if step.staged.work else (0, 0, 0)
        filtered, edited = bool(self.state.filters[rows].any()), self.captures or self.state.edits_any(rows)
        plain = StepShape(size, NO_TREE, "none", self._context(step, rows), filtered, 1, *room, edited)
        for shape in (*self._drafted(step, plain, len(rows)), plain):
            # What was asked for is done, captured or not; beside prompt rows everybody would wait for it.
            launchable = shape is plain or self.graphs.on_demand or shape.staged == 0 == shape.passes - 1
            found = self.graphs.find(shape) or (shape if launchable else None)
            if found is not None and (not found.nodes or self.table.make_room(len(rows) * found.nodes)):
                break
        assert found is not None
        if found.tree == NO_TREE:
            for i in step.resident:
                step.draft_plans[i] = NO_DRAFT_PLAN
        return found

    def _drafted(self, step: GraphStep, plain: StepShape, count: int) -> Iterator[StepShape]:
        """The same step with the draft tree that was planned, or with several plain passes."""
        draft_plans = [step.draft_plans[i] for i in step.resident]
        tree = max(
            ((draft_plan.depth, draft_plan.nodes) for draft_plan in draft_plans),
            key=lambda one: one[1],
            default=NO_TREE,
        )
        if tree != NO_TREE:
            serving = self.shared.serving(draft_plans)
            tree = self.shared.captured_tree(serving[0], tree, bool(plain.staged))
            serving = self.shared.with_model_free(serving, tree)
            yield replace(plain, tree=tree, drafter="+".join(serving))
        elif count and not (step.staged.work or step.host_verified or step.reported):
            sequences = (step.work[i].sequence for i in step.resident)
            passes = self.runs.choose(plain.size, max(one.remaining - one.coming for one in sequences))
            if passes > 1:
                yield replace(plain, passes=passes)

    def _send(self, step: GraphStep, inputs: Inputs, batch: Batch | None) -> Launched:
        assert step.shape is not None
        self.warm.before(step.shape, len(step.work))
        captured = self.graphs.step(step.shape)
        captured.fill(*inputs)
        if batch is not None:
            self._stage(captured, step.staged, batch)
        return captured.launch()

    def _without_drafts(self, step: GraphStep, inputs: Inputs) -> Inputs:
        """The same step for the same sequences, plain. Slots of draft nodes are given back when it is settled."""
        assert step.shape is not None
        rows, _, commits, slots, _ = inputs
        step.rows -= len(rows) * step.shape.tree[1]
        plain = replace(step.shape, tree=NO_TREE, drafter="none")
        step.shape = self.graphs.find(plain) or plain
        step.captured, self.latest[-1] = ("none", NO_TREE, step.size), ("none", set(), 1)
        for i in step.resident:
            step.draft_plans[i] = NO_DRAFT_PLAN
        return rows, [0] * len(rows), commits, slots[:, :1], [0] * len(rows)

    def _host_verifies(self, sequence: Sequence) -> bool:
        """Whether its sampling is more than the device does."""
        request, params = sequence.request, sequence.request.params
        written = len(sequence.tokens) - sequence.prompt_len
        return bool(
            sequence.grammar is not None
            or request.bad_word_ids
            or written < params.min_tokens
            or params.speculation.mode != "coupled"
            or not self.state.can_edit(sequence)
        )

    def _room(self, staged: StagedPart) -> tuple[int, int, int]:
        pairs = list(zip(staged.work, staged.drafts, strict=True))
        rows = [(one.known + len(draft), len(draft)) for one, draft in pairs]
        logits = sum(one.scored + (1 + len(draft)) * one.emits for one, draft in pairs)
        chunks, drafts = ([count for count, nodes in rows if bool(nodes) is kind] for kind in (False, True))
        return staged_bucket(chunks, drafts, logits)

    def _stage(self, captured: CapturedStep, staged: StagedPart, batch: Batch) -> None:
        assert captured.staged is not None
        entries = []
        for one, draft in zip(staged.work, staged.drafts, strict=True):
            entries.append(np.arange(one.start, one.start + one.known + len(draft), dtype=np.int32))
            self.residency.leave(one.sequence)
            self.residency.upload_slots(one)
        staged.wanted = len(batch.logit_rows)
        captured.staged.fill(batch, torch.from_numpy(np.concatenate(entries)))

    def _context(self, step: GraphStep, rows: np.ndarray) -> int:
        """A length that no sequence of this step exceeds: what is in flight may have grown it."""
        ahead = (self.lag + 1) * (MAX_RESIDENT_DEPTH + 1)
        resident = int(self.table.lengths[rows].max(initial=0)) + ahead  # slots of steps in flight among them
        staged = max((one.start + one.known + one.drafted for one in step.staged.work), default=0)
        return context_for(max(resident, staged + 1), self.state.width)

    def _make(self, shape: StepShape) -> CapturedStep:
        names = [name for name in shape.drafter.split("+") if name != "none"]
        propose = [self.drafters.propose_resident(name) for name in names]
        nodes = tree_nodes(shape.tree)
        return CapturedStep(self.ops, self.run, shape, nodes, propose, self.padding, self.lag + 1)

    def _keep_logits(self, step: GraphStep) -> None:
        """Copies of the logits that the host needs: the next step overwrites them."""
        assert step.launched is not None and step.shape is not None
        logits, each = step.launched.logits, step.shape.tree[1] + 1
        if logits is None:
            return
        drafting = [i for i, place in enumerate(step.resident) if step.draft_plans[place].nodes]
        step.sampled = self.sample(drafting) if step.shape.tree != NO_TREE else None
        for i in {*step.host_verified, *step.reported, *([] if step.sampled is None else [step.sampled])}:
            step.logits[i] = logits[i * each : (i + 1) * each].clone()
        if step.staged.work:
            first = step.shape.size * each
            step.staged.logits = logits[first : first + step.staged.wanted].clone()

    def _noted(self, step: InFlightStep) -> InFlightStep:
        """With an event after which its logits can be read. What staged rows emit is asked for behind it, at once."""
        if self.cuda:
            step.ready = torch.cuda.Event()
            step.ready.record()
        if step.staged.emitting:
            with self._beside(step):
                step.staged.verifying = self.verifying(step.staged)
        return step

    # ------------------------------------------------------------------------------------ finishing

    def finish(self, step: InFlightStep) -> list[Result]:
        begun = time.perf_counter()
        assert isinstance(step, GraphStep) and step.launched is not None
        step.launched.timer.wait()
        step.waited_s, step.target_s = time.perf_counter() - begun, step.launched.timer.seconds()
        results: list[Result] = [(NO_DRAFT, None)] * len(step.work)
        with self._beside(step):
            for i, result in zip(step.resident, self._results(step), strict=True):
                results[i] = result
            if step.staged.work:
                for i, result in zip(step.staged_places, self.verify(step.staged), strict=True):
                    results[i] = result
        if step.reading is not None:
            name, tokens, timer = step.reading
            step.catch_up = name, tokens, timer.seconds()
        now = time.perf_counter()
        if step.captured is not None and step.captured[0] == "none":
            spent = now - max(step.begun, self.finished_at)
            self.runs.observe(step.captured[2], step.passes, step.waited_s, spent, step.target_s)
        step.verify_s, self.finished_at = now - begun - step.waited_s, now
        return results

    def _beside(self, step: InFlightStep) -> AbstractContextManager[Any]:
        """A stream of its own: on the main one, verifying would queue behind the step that runs meanwhile."""
        if self.beside is None:
            return nullcontext()
        self.beside.wait_event(step.ready)
        return torch.cuda.stream(self.beside)

    def _results(self, step: GraphStep) -> list[Result]:
        """What the device said of resident rows, and the host of those that it verifies."""
        results: list[Result] = list(self._read(step))
        work = [step.work[i] for i in step.resident]
        if verified := sorted(step.host_verified):
            sequences, drafts = [work[i].sequence for i in verified], [results[i][0] for i in verified]
            rows = [step.logits[i][: len(draft) + 1] for i, draft in zip(verified, drafts, strict=True)]
            verdicts = verify_rows(
                torch.cat(rows), sequences, drafts, self.model.draw, self.model.filter_logits
            )
            for i, verdict in zip(verified, verdicts, strict=True):
                results[i] = results[i][0], verdict
        for i in step.reported - step.host_verified:
            said, wanted = results[i][1], work[i].sequence.request.params.logprobs
            assert said is not None and wanted is not None
            said.logprobs = report(step.logits[i][emitting_rows(said.accepted)], said.tokens, wanted)
        if step.sampled is not None:
            draft, sampled = results[step.sampled]
            if sampled is not None and exact_draft(work[step.sampled], draft):
                drafter = step.draft_plans[step.resident[step.sampled]].drafter
                step.predicted.append((drafter, *predicted(step.logits[step.sampled], sampled)))
        return results

    def _read(self, step: GraphStep) -> Iterator[tuple[Draft, Verdict]]:
        assert step.launched is not None and step.shape is not None
        said = step.launched.result[: len(step.resident)].tolist()
        if step.shape.drafter == "none":
            yield from ((NO_DRAFT, Verdict(tokens, [])) for tokens in said)
            return
        (depth, n), parents = step.shape.tree, tree_nodes(step.shape.tree).parents
        for accepted, proposed, *rest in said:
            tokens, path, drafted = rest[: accepted + 1], rest[depth + 1 : depth + 1 + accepted], rest[-n:]
            draft = Draft(tuple(drafted[:proposed]), parents[:proposed]) if proposed else NO_DRAFT
            yield draft, Verdict(tokens, path)


def _decodes(one: Work) -> bool:
    """Not the last chunk of a prompt, which may be one token, too, with the chunk before it in flight."""
    return one.emits and one.known == 1 and one.sequence.launched == 0


def make_graph_runner(
    model: Model, cache: KvCache, drafters: Drafters, default: str, tree_size: int = TREE_SIZE
) -> GraphRunner:
    """For a decoder on a CUDA device."""
    from outrider.device.ops_gpu import GpuStepOps  # Triton comes with these
    from outrider.model.device import DeviceDecoder
    from outrider.model.kernels.gpu.recording import count_kernels, record

    assert isinstance(model, DeviceDecoder)
    count_kernels()
    rows, width = cache.table.tensor.shape
    ops = GpuStepOps(SequenceState(rows, width, model.device, model.config.vocab), model)
    pool = torch.cuda.graph_pool_handle()  # one for all graphs: they never run at the same time
    run = model.make_pass(cache.store)
    return GraphRunner(
        model, cache, drafters, ops, run, lambda step: record(step, pool), 1, default, tree_size
    )
