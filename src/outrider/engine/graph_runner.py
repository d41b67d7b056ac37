"""Steps over device-resident state, captured as CUDA graphs, with the host one step behind.

Tokens, lengths, slots and sampling parameters of decoding sequences live where the model does. A step is a fixed list
of operations over them, so on a GPU it is captured once per shape and replayed. The host says which sequences take
part, gives each a few fresh slots, and processes step N while the device runs step N + 1.

Sequences of the persistent batch share one draft tree, and the device verifies them. Prefill chunks, and sequences
whose drafts only the host can make, are host-packed (rows.py) and run in the same pass. Where the host must verify (a
grammar, words to avoid), the sequence runs in the persistent batch and waits for the host: it moves every second step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.control.trees import tree_nodes
from outrider.device.buckets import MOST_CAPTURED, TREE_SIZE, RunChoice, SizeChoice
from outrider.device.capture import CapturedStep, Launched, StepGraphs, StepShape, Timer
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import DrafterFailed, Drafters
from outrider.engine.eager_runner import packed_options
from outrider.engine.graph_shapes import MAX_RESIDENT_DEPTH, GraphShapes, packed_bucket
from outrider.engine.kv_cache import KvCache
from outrider.engine.residency import GraphStep, InFlightDrafts, Inputs, Residency
from outrider.engine.rows import PackedRows, Packer, Result, exact_draft, pack
from outrider.engine.runner import InFlightStep, Runner
from outrider.engine.warm_up import GraphPreparation
from outrider.model.decoder import Model
from outrider.model.kernels.gpu.recording import context_for
from outrider.types import (
    NO_DRAFT,
    NO_DRAFT_PLAN,
    NO_TREE,
    Batch,
    CapturedShape,
    Draft,
    DrafterPrefill,
    Options,
    Plan,
    Sequence,
    StepRecord,
    TreeShape,
    Verdict,
    Work,
)
from outrider.verify.batch import emitting_rows, predicted, report, verify_rows


class GraphRunner(Runner):
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
        self.model, self.table, self.drafters = model, cache.table, drafters
        self.packer = Packer(model, cache.table, drafters)
        self.default, self.finished_at = default, 0.0
        self.mixtures = sum(spec.experts is not None for spec in model.config.specs)  # layers
        self.ops, self.state, self.run, self.lag = ops, ops.state, run, lag
        self.padding = cache.store.slots
        self.state.table[-1] = self.padding
        # Captured steps have every part that a request may need, so that none must be captured when one comes.
        self.captures = record is not None
        if self.captures:
            self.state.edits.make()
        self.shapes = GraphShapes(drafters, self.captures, tree_size)
        self.sizes, self.runs = SizeChoice(), RunChoice()
        self.graphs = StepGraphs(self._make, record)
        self.preparation = GraphPreparation(self.graphs, self.shapes, self.sizes, drafters, ops)
        self.residency = Residency(self.state, self.table)
        self.latest: deque[InFlightDrafts] = deque(maxlen=max(lag, 1))
        # Trees by lead drafter that are captured, by the shape of the step without them.
        self.ready: dict[StepShape, dict[str, tuple[TreeShape, ...]]] = {}
        self.cuda = self.state.device.type == "cuda"
        # Verifying is short and awaited, so it has priority over the step in flight.
        self.side_stream = torch.cuda.Stream(priority=-1) if self.cuda else None

    # ------------------------------------------------------------------------------------ what can be planned

    def members(self, work: Seq[Work]) -> Options:
        """A sequence with a step in flight stays in the persistent batch, others unless the host drafts for them."""
        # `Work.decodes` is written out: this runs for every sequence in every step.
        decodes = tuple([one.emits and one.known == 1 and one.sequence.launched == 0 for one in work])
        resident = tuple(
            [
                d and (one.sequence.coming > 0 or not self._host_drafts(one.sequence))
                for d, one in zip(decodes, work, strict=True)
            ]
        )
        count = sum(resident)
        size = self.sizes.choose(count) if count else 0
        return Options(size, resident, decodes, after_prompts=False)

    def options(self, work: Seq[Work], members: Options, waiting: int) -> Options:
        size, resident, decodes = members.size, members.resident, members.decodes
        sequences = [one.sequence for one, here in zip(work, resident, strict=True) if here]
        drafting = [d and not here for d, here in zip(decodes, resident, strict=True)]
        packed = packed_options(self.drafters, work, drafting) if any(drafting) else {}
        if not sequences:
            return replace(members, waiting=waiting, **{"model_free": self.drafters.model_free, **packed})
        prompts = [one for one in work if one.known > 1]
        packed_work = [one for one, here in zip(work, resident, strict=True) if not here]
        trees = self._trees(size, sequences, packed_work)
        lag, blocked = self._lag(work, resident, list(trees))
        return replace(
            members,
            trees=trees,
            chains=self._chains(trees, bool(packed_work), bool(prompts)),
            model_free=self.drafters.model_free,
            branching=packed.get("branching", frozenset()),
            lag=lag,
            blocked=blocked,
            max_prefill=MOST_CAPTURED - sum(one.known for one in prompts),
            available=packed.get("available", {}),
            waiting=waiting,
        )

    def _host_drafts(self, sequence: Sequence) -> bool:
        how = sequence.request.params.speculation
        drafter = how.drafter or self.default
        if how.off or drafter == "none" or self.drafters.left_alone(drafter):
            return False
        if how.mode != "coupled" or how.tree is not None or self.drafters.resident(drafter) is None:
            return True
        depth = how.depth or 0
        return depth > MAX_RESIDENT_DEPTH or (how.nodes is not None and how.nodes != depth)

    def _trees(
        self, size: int, sequences: Seq[Sequence], packed: Seq[Work]
    ) -> dict[str, tuple[TreeShape, ...]]:
        """Trees by lead drafter that are captured for this step, or may be captured now, and have slots."""
        rows = np.array([one.row for one in sequences], np.int32)
        nothing = [NO_DRAFT] * len(packed)
        plain = self._plain_shape(size, rows, packed, nothing)
        if self.graphs.changed:
            self.ready.clear()
            self.graphs.changed = False
        if plain not in self.ready:
            prompts = any(one.known > 1 for one in packed)
            self.ready[plain] = {
                name: tuple(
                    tree
                    for tree in self.shapes.trees(name, size, prompts)
                    if self._is_ready(self._drafting_shape(plain, name, tree))
                )
                for name in self.drafters.names
                if self.drafters.resident(name)
            }
        ready = self.ready[plain]
        largest = max((tree.nodes for trees in ready.values() for tree in trees), default=0)
        if self.table.make_room(len(rows) * largest):
            return ready
        each = self.table.pool.free // len(rows)
        return {name: tuple(tree for tree in trees if tree.nodes <= each) for name, trees in ready.items()}

    def _chains(
        self, trees: dict[str, tuple[TreeShape, ...]], packed: bool, prompts: bool
    ) -> dict[str, tuple[TreeShape, ...]]:
        """Chains that requests may ask for. A chain that is not captured is launched operation by operation, but not
        with host-packed rows: other sequences would wait for it.
        """
        if packed and self.captures:
            return {name: tuple(tree for tree in some if tree.is_chain) for name, some in trees.items()}
        return {name: self.shapes.chains(name, prompts) for name in trees}

    def _is_ready(self, shape: StepShape) -> bool:
        return self.graphs.on_demand or self.graphs.find(shape) is not None

    def _drafting_shape(self, plain: StepShape, lead: str, tree: TreeShape) -> StepShape:
        return replace(plain, tree=tree, drafters=self.shapes.proposing(lead, tree))

    def _lag(
        self, work: Seq[Work], resident: Seq[bool], names: Seq[str]
    ) -> tuple[dict[str, list[int]], dict[str, list[bool]]]:
        """By drafter with passes: tokens that it must prefill, and whether tokens in flight keep it from drafting."""
        lag, blocked = {}, {}
        for name in names:
            drafter = self.drafters.resident(name)
            if drafter is None or drafter.model_free:
                continue
            coming = [self._coming(one.sequence, name) for one in work]
            lag[name] = [
                drafter.tokens_behind(one.sequence, tokens) if here else 0
                for one, here, tokens in zip(work, resident, coming, strict=True)
            ]
            blocked[name] = [
                bool(n) and tokens >= drafter.window for n, tokens in zip(lag[name], coming, strict=True)
            ]
        return lag, blocked

    def _coming(self, sequence: Sequence, drafter: str) -> int:
        """Tokens that steps in flight may bring without this drafter reading them."""
        if not sequence.coming:
            return 0
        total = 0
        for one in self.latest:
            mine = one.drafters.get(sequence.row)
            if mine is None:
                total += one.plain
            elif mine != drafter or drafter != one.lead:
                total += one.drafted
        return total

    def release(self, drafters: Seq[str]) -> None:
        for name in drafters:
            self.graphs.forget(name)
        self.default = self.drafters.instead_of(self.default)

    # ------------------------------------------------------------------------------------ launching

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        resident = [i for i, here in enumerate(plan.resident) if here]
        begun = time.perf_counter()
        packed, record = PackedRows([], []), StepRecord(reasons=plan.reasons, plan_cached=plan.cached)
        step = GraphStep(work, list(plan.draft_plans), packed, begun, record, resident=resident)
        packed.work = [work[i] for i in step.packed_places]
        packed.draft_plans = [plan.draft_plans[i] for i in step.packed_places]
        packed.drafts = self.packer.propose(packed.work, packed.draft_plans)
        if plan.prefills:
            self._prefill(step, plan)
        inputs, batch = self._fill(step, plan)
        try:
            step.launched = self._send(step, inputs, batch)
        except DrafterFailed as failed:
            self.drafters.note_fault(failed)
            step.launched = self._send(step, self._without_drafts(step, inputs), batch)
        self._keep_logits(step)
        return self._noted(step)

    def _prefill(self, step: GraphStep, plan: Plan) -> None:
        """Lets the lead drafter read what the host knows of the sequences that it lags behind with."""
        lead, sequences = plan.drafters[0], [step.work[i].sequence for i in plan.prefills]
        drafter = self.drafters.resident(lead)
        tokens = sum(drafter.tokens_behind(one) for one in sequences) if drafter else 0
        self.residency.sync(sequences)
        timer = Timer(self.cuda)
        self.drafters.catch_up(lead, self.ops, sequences)
        timer.stop()
        if tokens:
            step.prefill = lead, tokens, timer
        if self.drafters.left_alone(lead):  # it failed
            for i in plan.prefills:
                step.draft_plans[i] = NO_DRAFT_PLAN

    def _fill(self, step: GraphStep, plan: Plan) -> tuple[Inputs, Batch | None]:
        """Gives every sequence slots, and chooses the graph."""
        work = [step.work[i] for i in step.resident]
        rows = np.array([one.sequence.row for one in work], np.int32)
        self.residency.sync(one.sequence for one in work)
        special = {i: work[i].sequence for i in np.flatnonzero(self.residency.special[rows]).tolist()}
        step.host_verified = frozenset(i for i, one in special.items() if self._host_verifies(one))
        step.reported = frozenset(i for i, one in special.items() if one.request.params.logprobs is not None)
        shape = step.shape = self._shape(step, plan, rows)
        nodes, passes = shape.nodes, shape.passes
        if nodes and work:
            self.table.extend_all(rows, nodes)
        at = self.table.lengths[rows][:, None] - (nodes + 1) + np.arange(nodes + 1)
        for i, one in enumerate(work):
            one.drafted = nodes
            one.launch(passes, wait=i in step.host_verified)
        for i in step.host_verified:
            self.residency.leave(work[i].sequence)
        for one in step.packed.work:
            one.launch(1, wait=True)
        batch = pack(step.packed.work, step.packed.drafts, self.table) if step.packed.work else None
        commits = np.ones(len(work), bool)
        commits[list(step.host_verified)] = False
        wanted, numbers, drafting = [0] * len(work), [0] * len(work), dict[int, str]()
        lead = shape.drafters[0] if shape.tree != NO_TREE else "none"
        if shape.tree != NO_TREE:
            self.state.upload_references()
            plans = [step.draft_plans[i] for i in step.resident]
            wanted = [one.nodes for one in plans]
            numbers = [shape.drafters.index(one.drafter) if one.nodes else 0 for one in plans]
            drafting = {int(row): one.drafter for row, one in zip(rows, plans, strict=True) if one.nodes}
        slots = self.table.entries[rows[:, None], at]
        self.latest.append(InFlightDrafts(lead, drafting, 1 + shape.tree.depth, passes))
        step.record.rows = len(work) * (shape.tree.nodes + 1) + (0 if batch is None else batch.rows)
        step.record.passes = passes
        step.record.captured = CapturedShape(lead, shape.tree, step.size) if work else None
        return Inputs(rows, wanted, commits, slots, numbers), batch

    def _plain_shape(self, size: int, rows: np.ndarray, packed: Seq[Work], drafts: Seq[Draft]) -> StepShape:
        filtered, edited = bool(self.state.filters[rows].any()), self.captures or self.state.edits_any(rows)
        room = packed_bucket(packed, drafts) if packed else (0, 0, 0)
        return StepShape(size, NO_TREE, (), self._context(rows, packed), filtered, 1, *room, edited)

    def _shape(self, step: GraphStep, plan: Plan, rows: np.ndarray) -> StepShape:
        """The captured shape that serves the plan; where none has room for it, the operations are launched one by
        one.
        """
        size = step.size = self.sizes.room_for(len(rows)) if len(rows) else 0
        plain = self._plain_shape(size, rows, step.packed.work, step.packed.drafts)
        if plan.tree != NO_TREE and len(rows):
            if self.table.make_room(len(rows) * plan.tree.nodes):
                shape = replace(plain, tree=plan.tree, drafters=plan.drafters)
                return self.preparation.serving(shape)
            # Host-packed drafts took the slots, and no draft is worth another sequence's place.
            for i in step.resident:
                step.draft_plans[i] = NO_DRAFT_PLAN
        if len(rows) and not (step.packed.work or step.host_verified or step.reported):
            sequences = (step.work[i].sequence for i in step.resident)
            passes = self.runs.choose(plain.size, max(one.remaining - one.coming for one in sequences))
            shape = replace(plain, passes=passes)
            found = self.graphs.find(shape) or (shape if self.graphs.on_demand else None)
            if passes > 1 and found is not None and self.table.make_room(len(rows) * found.nodes):
                return found
        return self.preparation.serving(plain)

    def _send(self, step: GraphStep, inputs: Inputs, batch: Batch | None) -> Launched:
        assert step.shape is not None
        self.preparation.before(step.shape, len(step.work))
        captured = self.graphs.step(step.shape)
        step.record.uncaptured = self.captures and captured.graph is None and not self.graphs.on_demand
        captured.fill(*inputs)
        if batch is not None:
            self._stage(captured, step.packed, batch)
        return captured.launch()

    def _without_drafts(self, step: GraphStep, inputs: Inputs) -> Inputs:
        """The same step, plain, after a drafter failed. Slots of draft nodes are given back when it is settled."""
        assert step.shape is not None
        count = len(inputs.rows)
        step.record.rows -= count * step.shape.tree.nodes
        plain = replace(step.shape, tree=NO_TREE, drafters=())
        step.shape = self.preparation.serving(plain)
        step.record.captured = CapturedShape("none", NO_TREE, step.size)
        self.latest[-1] = InFlightDrafts("none", {}, 1, 1)
        for i in step.resident:
            step.draft_plans[i] = NO_DRAFT_PLAN
        return inputs._replace(wanted=[0] * count, slots=inputs.slots[:, :1], drafters=[0] * count)

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

    def _stage(self, captured: CapturedStep, packed: PackedRows, batch: Batch) -> None:
        assert captured.staged is not None
        entries = []
        for one, draft in zip(packed.work, packed.drafts, strict=True):
            entries.append(np.arange(one.start, one.start + one.known + len(draft), dtype=np.int32))
            self.residency.leave(one.sequence)
            self.residency.upload_slots(one)
        packed.wanted = len(batch.logit_rows)
        captured.staged.fill(batch, torch.from_numpy(np.concatenate(entries)))

    def _context(self, rows: np.ndarray, packed: Seq[Work]) -> int:
        """A length that no sequence of this step exceeds: steps in flight may have made them longer."""
        ahead = (self.lag + 1) * (MAX_RESIDENT_DEPTH + 1)
        resident = int(self.table.lengths[rows].max(initial=0)) + ahead  # slots of steps in flight among them
        longest = max((one.start + one.known + one.drafted for one in packed), default=0)
        return context_for(max(resident, longest + 1), self.state.width)

    def _make(self, shape: StepShape) -> CapturedStep:
        propose = [self.drafters.propose_resident(name) for name in shape.drafters]
        nodes = tree_nodes(shape.tree)
        return CapturedStep(self.ops, self.run, shape, nodes, propose, self.padding, self.lag + 1)

    def _keep_logits(self, step: GraphStep) -> None:
        """Copies the logits that the host needs: the next step overwrites them."""
        assert step.launched is not None and step.shape is not None
        logits, each = step.launched.logits, step.shape.tree.nodes + 1
        if logits is None:
            return
        drafting = [i for i, place in enumerate(step.resident) if step.draft_plans[place].nodes]
        step.sampled = self.packer.sample(drafting) if step.shape.tree != NO_TREE else None
        for i in {*step.host_verified, *step.reported, *([] if step.sampled is None else [step.sampled])}:
            step.logits[i] = logits[i * each : (i + 1) * each].clone()
        if step.packed.work:
            first = step.shape.size * each
            step.packed.logits = logits[first : first + step.packed.wanted].clone()

    def _noted(self, step: InFlightStep) -> InFlightStep:
        """Records an event after which the logits can be read, and queues the verification of host-packed rows."""
        if self.cuda:
            step.ready = torch.cuda.Event()
            step.ready.record()
        if step.packed.emitting:
            with self._on_side_stream(step):
                step.packed.verifying = self.packer.begin_verify(step.packed)
        return step

    # ------------------------------------------------------------------------------------ finishing

    def finish(self, step: InFlightStep) -> list[Result]:
        begun = time.perf_counter()
        assert isinstance(step, GraphStep) and step.launched is not None
        step.launched.timer.wait()
        record = step.record
        record.waited_s, record.target_s = time.perf_counter() - begun, step.launched.timer.seconds()
        results: list[Result] = [(NO_DRAFT, None)] * len(step.work)
        with self._on_side_stream(step):
            for i, result in zip(step.resident, self._results(step), strict=True):
                results[i] = result
            if step.packed.work:
                for i, result in zip(step.packed_places, self.packer.verify(step.packed), strict=True):
                    results[i] = result
        record.experts = int(step.launched.experts) / record.passes / max(self.mixtures, 1)
        if step.prefill is not None:
            name, tokens, timer = step.prefill
            record.drafter_prefill = DrafterPrefill(name, tokens, timer.seconds())
        now = time.perf_counter()
        if record.captured is not None and record.captured.drafter == "none" and not step.packed.work:
            spent = now - max(step.begun, self.finished_at)
            self.runs.observe(record.captured.size, record.passes, spent, record.target_s)
        record.verify_s, self.finished_at = now - begun - record.waited_s, now
        return results

    def _on_side_stream(self, step: InFlightStep) -> AbstractContextManager[Any]:
        """On the main stream, verifying would queue behind the step in flight."""
        if self.side_stream is None:
            return nullcontext()
        self.side_stream.wait_event(step.ready)
        return torch.cuda.stream(self.side_stream)

    def _results(self, step: GraphStep) -> list[Result]:
        """What the device said of the persistent batch, and the host of the sequences that it verifies."""
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
                step.record.predicted.append((drafter, *predicted(step.logits[step.sampled], sampled)))
        return results

    def _read(self, step: GraphStep) -> Iterator[tuple[Draft, Verdict]]:
        assert step.launched is not None and step.shape is not None
        said = step.launched.result[: len(step.resident)].tolist()
        if not step.shape.drafters:
            yield from ((NO_DRAFT, Verdict(tokens, [])) for tokens in said)
            return
        (depth, n), parents = step.shape.tree, tree_nodes(step.shape.tree).parents
        for accepted, proposed, *said_of in said:
            tokens, path = said_of[: accepted + 1], said_of[depth + 1 : depth + 1 + accepted]
            draft = Draft(tuple(said_of[-n:][:proposed]), parents[:proposed]) if proposed else NO_DRAFT
            yield draft, Verdict(tokens, path)


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

    def recorded(step: Callable[[], Any]) -> tuple[Any, Any]:
        return record(step, pool, model.group.recorded, ran=True)

    return GraphRunner(model, cache, drafters, ops, run, recorded, 1, default, tree_size)
