"""Warm-up: captures and times steps before requests need them, the most important first.

Steps run over padding, so no sequence changes. Steps without drafts come first, for every number of sequences, alone
and beside prompt rows: the engine can answer with those. Drafting steps follow, then longer contexts. A shape is left
out if a larger captured one serves it at a few percent more (device/buckets.py).

Threads compile the kernels of these steps ahead, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from itertools import chain, product
from math import log2

import numpy as np
import torch

from outrider.control.costs import CapturedCosts
from outrider.control.planner import Planner
from outrider.control.prefill import MAX_PROMPT_ROWS
from outrider.device.buckets import (
    ALIKE,
    ALONE,
    DRAFTED_CHUNKS,
    FEW_LOGITS,
    LONG_ALONE,
    MAX_LOGITS,
    MOST_CAPTURED,
    RUNS,
    SizeChoice,
    chunk_sizes,
    fitting_sizes,
    longest_run,
    size_beside,
    size_of,
    sizes_beside,
    sizes_up_to,
)
from outrider.device.capture import CapturedStep, StepGraphs, StepShape, Timer
from outrider.device.ops import StepOps
from outrider.draft.drafters import DrafterFailed, Drafters
from outrider.engine.graph_shapes import GraphShapes, usual_shape
from outrider.engine.runner import Preparation
from outrider.model.kernels.gpu.recording import CONTEXTS, Recorded, context_for, contexts_for
from outrider.types import (
    NO_DRAFT,
    NO_TREE,
    CapturedShape,
    Request,
    SamplingParams,
    Sequence,
    TreeShape,
)
from outrider.verify.batch import verify_rows

POLL_SECONDS = 0.005
SPARE = 1 << 30  # bytes that are left alone
LONGEST = CONTEXTS[2]  # tokens of texts whose steps are captured ahead
# Rows of prompts without decoding sequences: launched one by one, and compiled first.
EAGER_ROWS = (576, 1024, 2048)


class GraphPreparation(Preparation):
    def __init__(
        self, graphs: StepGraphs, shapes: GraphShapes, sizes: SizeChoice, drafters: Drafters, ops: StepOps
    ) -> None:
        self.graphs, self.shapes, self.sizes = graphs, shapes, sizes
        self.drafters, self.ops, self.width = drafters, ops, ops.state.width
        self.captures = graphs.record is not None
        # Drafters and sizes; plain steps with their prompt rows. A size of 0 is prompts alone.
        self.prepared: set[tuple[str, int]] = set()
        self._compiled: set[StepShape] = set()  # or on their way there
        self._usual: dict[StepShape, StepShape | None] = {}  # what `usual_shape` says
        self.sequences = 1  # maximum number that steps are prepared for
        self.most = 0  # maximum number that came at once
        self.current = 0  # sequences of the last step
        self._idle = True
        self.costs: CapturedCosts | None = None  # of the planner that steps are prepared for

    @property
    def on_demand(self) -> bool:
        return self.graphs.on_demand

    @on_demand.setter
    def on_demand(self, now: bool) -> None:
        self.graphs.on_demand = self.sizes.on_demand = now

    @property
    def idle(self) -> bool:
        return self._idle

    @idle.setter
    def idle(self, now: bool) -> None:
        """Beside requests kernels are compiled one at a time, seldom."""
        self._idle = now
        if self.ops.ahead is not None:
            (self.ops.ahead.resume if now else self.ops.ahead.pause)()

    @property
    def counts(self) -> tuple[int, int]:
        return Recorded.graphs, Recorded.kernels

    def run(self, planner: Planner, sequences: int) -> Iterator[bool]:
        """Steps without drafts come first; from then on requests can be answered. Kernels are compiled ahead, or beside
        requests those of a few steps at a time.
        """
        self.costs = planner.costs.captured
        names = tuple(dict.fromkeys((*planner.choices, *filter(self.drafters.resident, self.drafters.names))))
        costs, sizes = self.costs, sizes_up_to(sequences)
        for _ in chain(
            self.compile(sequences),
            self.prompts(),
            self._measured(costs, product(("none",), sizes)),
        ):
            yield False
        for _ in chain(
            self.compile(sequences, names),
            self._compiling(),
            self._measured(costs, product(names, sizes)),
            self._prefills(costs, names),
            self.further(sequences, names),
        ):
            yield True

    def _measured(self, costs: CapturedCosts, pairs: Iterable[tuple[str, int]]) -> Iterator[None]:
        """Steps by drafter and size; plain ones also beside prompt rows."""
        left = [pair for pair in pairs if pair not in self.prepared]
        while left:
            drafter, size = pair = left[0] if self.idle else min(left, key=lambda one: self._away(one[1]))
            left.remove(pair)
            yield from self._ready(self._shapes(size, drafter).values())
            found = []
            for one in self.steps(size, drafter):
                found.append(one)
                yield
            costs.learn(drafter, size, found)
            if drafter != "none":
                continue
            yield from self._ready(self._beside(size))
            for shape in self._beside(size) if self.captures and self.sequences > 1 else ():
                costs.with_prompts[size, shape.staged] = self._seconds(shape)
                yield
            self.prepared.add(("none", size))

    def _away(self, size: int) -> float:
        """How far a size is from what requests need now."""
        return abs(log2(size / max(self.current, 1)))

    def _prefills(self, costs: CapturedCosts, drafters: Seq[str]) -> Iterator[None]:
        """How fast drafters prefill. Model-free ones have nothing to prefill."""
        for name in drafters:
            drafter = self.drafters.resident(name)
            if drafter is None or name in costs.per_token:
                continue
            yield from self._ready_to_read(name)
            drafter.warm_up(self.ops)  # the first time compiles
            timer = Timer(self.ops.state.device.type == "cuda")
            tokens = drafter.warm_up(self.ops)
            timer.stop()
            timer.wait()
            if tokens:
                costs.learn_prefill(name, tokens, timer.seconds())
                yield

    def measure(self, planner: Planner, drafter: str, size: int) -> None:
        planner.costs.captured.learn(drafter, size, list(self.steps(size, drafter)))

    def compile(self, sequences: int, drafters: Seq[str] | None = None) -> Iterator[None]:
        """Starts to compile, in threads, the kernels for steps of up to this many sequences: steps without drafts, or
        with `drafters` all others. Does not wait.
        """
        self.sequences = sequences
        shapes = self._plain(sequences) if drafters is None else self._drafted(sequences, drafters)
        ahead = self.ops.ahead
        if ahead is None:
            return
        for shape in shapes:
            if self._crowded() or not self.idle:
                return
            self._compile(shape)
            yield
        for drafter in filter(None, map(self.drafters.resident, drafters or ())):
            with ahead.collecting(), suppress(Exception):  # the later warm-up of the drafter raises the error
                drafter.warm_up(self.ops)
            yield

    def _compiling(self) -> Iterator[None]:
        """Waits for kernels in short pieces: a request that comes does not wait for them."""
        ahead = self.ops.ahead
        while ahead is not None and ahead.jobs:
            if self.idle:
                time.sleep(POLL_SECONDS)
            yield

    def _ready(self, shapes: Iterable[StepShape]) -> Iterator[None]:
        """Beside requests: has the kernels of these steps compiled first, as their launch would wait for them."""
        if self.idle or self.ops.ahead is None:
            return
        for shape in shapes:
            if shape not in self._compiled and not self.graphs.captured(shape):
                self._compile(shape)
                yield
        yield from self._compiling()

    def _ready_to_read(self, name: str, *context: int) -> Iterator[None]:
        """The same for what a drafter prefills with."""
        ahead, drafter = self.ops.ahead, self.drafters.resident(name)
        if self.idle or ahead is None or drafter is None:
            return
        with ahead.collecting(), suppress(Exception):  # the later warm-up of the drafter raises the error
            drafter.warm_up(self.ops, *context)
        yield
        yield from self._compiling()

    def serving(self, shape: StepShape) -> StepShape:
        """The shape that such a step is launched in: a captured one with room, else one that may be captured."""
        found = self.graphs.find(shape)
        if self.on_demand or (found is not None and not self._wastes(found, shape)):
            return found or shape
        return self._usual_for(shape) or shape

    def _wastes(self, found: StepShape, shape: StepShape) -> bool:
        """Whether a captured step is much larger than one that may be captured."""
        smaller = shape.size < found.size and shape.size in self.sizes.made
        return smaller and not shape.staged and found.rows > ALIKE and not self._crowded()

    def _usual_for(self, shape: StepShape) -> StepShape | None:
        if shape not in self._usual:
            self._usual[shape] = usual_shape(shape, self._size_beside(shape.size))
        return self._usual[shape]

    @property
    def max_prompts(self) -> int:
        return MAX_PROMPT_ROWS if self.on_demand or not self.captures else MAX_LOGITS

    def most_prompt_rows(self, decoding: int) -> int:
        """Beside `decoding` sequences. A step with more is not prepared, and has more rows in all than matmuls are
        fastest with.
        """
        if not (self.captures and decoding):
            return MAX_PROMPT_ROWS
        return chunk_sizes(self._size_beside(size_of(decoding)))[-1][0]

    def _size_beside(self, size: int) -> int:
        return size_beside(size, max(self.sequences, self.most, size)) if size else 0

    def before(self, shape: StepShape, sequences: int) -> None:
        """Call it before a step of this shape is launched. Without a warm-up its kernels are compiled together, and at
        the same time those of the steps that will follow. After a warm-up compiling pauses instead, but for a step that
        is missing; if that was launched before, it is captured and measured.
        """
        ahead, self.most, self.current = self.ops.ahead, max(self.most, size_of(sequences)), sequences
        if not self.graphs.on_demand:
            if ahead is not None:
                ahead.pause()
            if ahead is not None and self.graphs.find(shape) is None and shape not in self._compiled:
                ahead.resume()  # until the next step: this one waits for its kernels, and less for all of them at once
                self._compile(shape)
            if self.graphs.due(shape, self._usual_for(shape) == shape) and not self._crowded():
                self._learn(shape, self._launched(self.graphs.capture(shape)))
            return
        if ahead is None:
            return
        follow = self._following(size_of(sequences)) if shape.staged else ()
        for one in (shape, *follow):
            self._compile(one)

    def _following(self, size: int) -> Iterator[StepShape]:
        yield self.shape(size, "none", NO_TREE)
        for name in filter(self.drafters.resident, self.drafters.names):
            for tree in self.shapes.trees(name, size):
                yield self.shape(size, name, tree)

    def _compile(self, shape: StepShape) -> None:
        if self.ops.ahead is None or shape in self._compiled or self.graphs.captured(shape):
            return
        self._compiled.add(shape)
        with suppress(Exception):  # launching it will raise the error
            self.graphs.made(shape).compile(self.ops.ahead)

    def _plain(self, sequences: int) -> Iterator[StepShape]:
        """Steps that answer without drafts."""
        yield from self._prompts()
        for size in sizes_up_to(sequences):
            yield self.shape(size, "none", NO_TREE)
            yield from self._beside(size) if sequences > 1 else ()

    def _drafted(self, sequences: int, drafters: Seq[str]) -> Iterator[StepShape]:
        """What is captured after those."""
        for name in drafters:
            for size in sizes_up_to(sequences):
                yield from (self.shape(size, name, tree) for tree in self.shapes.trees(name, size))
        yield from self._further(sequences, drafters)

    def _prompts(self) -> Iterator[StepShape]:
        """Of prompts alone."""
        for chunk in (*ALONE, *((rows, ALONE[-1][1]) for rows in EAGER_ROWS)):
            yield self.shape(0, "none", NO_TREE, chunk)

    def _beside(self, size: int) -> Iterator[StepShape]:
        """Plain decoding sequences beside prompt rows."""
        size = size_beside(size, self.sequences)
        return (self.shape(size, "none", NO_TREE, chunk) for chunk in chunk_sizes(size))

    def steps(self, size: int, drafter: str) -> Iterator[tuple[str, TreeShape, float]]:
        """What steps of this size take, plain and with each draft tree, in seconds."""
        shapes = self._shapes(size, drafter)
        for shape in shapes.values():
            self._compile(shape)
        try:
            for tree, shape in shapes.items():
                yield "none" if tree == NO_TREE else drafter, tree, self._seconds(shape)
        except DrafterFailed as failed:
            self.drafters.note_fault(failed)
        self.sizes.made.add(size)
        if drafter != "none":
            self.prepared.add((drafter, size))

    def _shapes(self, size: int, drafter: str) -> dict[TreeShape, StepShape]:
        trees = (NO_TREE, *self.shapes.trees(drafter, size))
        return {tree: self.shape(size, "none" if tree == NO_TREE else drafter, tree) for tree in trees}

    def prompts(self) -> Iterator[None]:
        """Steps of prompts alone: few rows are captured, many are launched one by one until they are."""
        if not self.captures or ("none", 0) in self.prepared:
            return
        for shape in self._prompts():
            yield from self._ready([shape])
            if shape.staged <= MOST_CAPTURED:
                self._seconds(shape)
            else:
                self._launched(self.graphs.made(shape))
            yield
        self._verify_nothing()
        self.prepared.add(("none", 0))
        yield

    def _verify_nothing(self) -> None:
        """Start every kernel once that a sequence needs between its prompt and its first resident step."""
        state, model = self.ops.state, self.ops.model
        # The last upload leaves the padding row without filters. With filters, every step would compute them for it.
        for params in (SamplingParams(temperature=0.7, top_p=0.9, top_k=40), SamplingParams(temperature=0)):
            one = Sequence(Request("", (0,), params, 0), 0, 0, [0], row=state.rows)
            state.upload(one, np.zeros(1, np.int32))
            for count in (1, 2, FEW_LOGITS):
                logits = torch.zeros((count, model.config.vocab), device=state.device)
                verify_rows(logits, [one] * count, [NO_DRAFT] * count, model.draw, model.filter_logits)

    def further(self, sequences: int, drafters: Seq[str]) -> Iterator[None]:
        """What else is captured: long prompts alone, several passes where plain steps are short, steps that filter,
        drafts beside prompt rows, and all of it for longer texts.
        """
        for shape in self._further(sequences, drafters) if self.captures else ():
            if self.graphs.captured(shape):
                continue
            if self._crowded():
                return
            yield from self._ready([shape])
            try:
                self._launched(self.graphs.capture(shape))
            except DrafterFailed as failed:
                self.drafters.note_fault(failed)
            yield
        for context in contexts_for(self.width, LONGEST)[1:] if self.captures else ():
            for name in drafters:
                drafter = self.drafters.resident(name)
                if self._crowded():
                    return
                yield from self._ready_to_read(name, context)
                if drafter is not None:
                    drafter.warm_up(self.ops, context)
                    yield

    def _further(self, sequences: int, drafters: Seq[str]) -> Iterator[StepShape]:
        sizes = sizes_up_to(sequences)
        for rows in LONG_ALONE:
            yield self.shape(0, "none", NO_TREE, (rows, MAX_LOGITS), context=rows + 1)
        for size in fitting_sizes(sizes, 1):
            yield self.shape(size, "none", NO_TREE, filtered=True)
            seconds = self.costs.plain(size) if self.costs is not None else None
            for passes in RUNS[1:]:
                if passes <= longest_run(size, seconds or 1.0):
                    yield self.shape(size, "none", NO_TREE, passes=passes, filtered=True)
        shortest, *longer = contexts_for(self.width, LONGEST)
        yield from self._drafts_beside(sequences, drafters, shortest)
        for context in longer:
            for size in fitting_sizes(sizes, 1):
                yield self.shape(size, "none", NO_TREE, context=context, filtered=True)
            for size in (0, *sizes_beside(sequences)):
                for chunk in chunk_sizes(size):
                    yield self.shape(size, "none", NO_TREE, chunk, context=context)
            for name in drafters:
                for tree in self.shapes.trees(name, 1):
                    having = [size for size in sizes if tree in self.shapes.trees(name, size)]
                    for size in fitting_sizes(having, tree.nodes + 1):
                        yield self.shape(size, name, tree, context=context)
            yield from self._drafts_beside(sequences, drafters, context)

    def _drafts_beside(self, sequences: int, drafters: Seq[str], context: int) -> Iterator[StepShape]:
        """Drafts beside prompt rows."""
        for size in sizes_beside(sequences):
            for name in drafters:
                for tree in self.shapes.trees(name, size, prompts=True):
                    for chunk in DRAFTED_CHUNKS:
                        yield self.shape(size, name, tree, chunk, context=context)

    def _crowded(self) -> bool:
        """Whether less memory than SPARE is free: the rest is for steps, not for graphs."""
        device = self.ops.state.device
        return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < SPARE

    def shape(
        self,
        size: int,
        drafter: str,
        tree: TreeShape,
        staged: tuple[int, int] = (0, 0),
        passes: int = 1,
        context: int = 1,
        filtered: bool | None = None,
    ) -> StepShape:
        """Captured steps have every part that a request may need; plain ones, which are the most, also come without
        what few need.
        """
        plain = tree == NO_TREE and not staged[0]
        proposing = self.shapes.proposing(drafter, tree)
        return StepShape(
            size, tree, proposing, context_for(context, self.width),
            self.captures and not plain if filtered is None else filtered,
            passes, *staged, edited=self.captures,
        )  # fmt: skip

    def _learn(self, shape: StepShape, seconds: float) -> None:
        """What a step takes that was captured between others; the planner knew nothing of it, or too much: it was
        launched one by one.
        """
        lead = shape.drafters[0] if shape.drafters else "none"
        if self.costs is None or shape.passes > 1 or shape.branching:
            return
        if not shape.staged:
            self.sizes.made.add(shape.size)
            if CapturedShape(lead, shape.tree, shape.size) not in self.costs.ahead:
                self.costs.learn(lead, shape.size, [(lead, shape.tree, seconds)])
        elif shape.tree == NO_TREE and shape.size:
            for size in self.sizes.made:
                if self._size_beside(size) == shape.size:
                    self.costs.with_prompts.setdefault((size, shape.staged), seconds)

    def _seconds(self, shape: StepShape) -> float:
        step = self.graphs.capture(shape)
        self._launched(step)  # the first one only warms up
        return self._launched(step)

    def _launched(self, step: CapturedStep) -> float:
        self.ops.spread_rows(step.shape.rows)
        timer = step.launch_padding()
        self.ops.spread_rows(0)
        timer.wait()
        return timer.seconds()
