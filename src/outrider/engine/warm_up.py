"""Which steps are captured before anybody waits for them, most needed first, and what they take.

Everything runs over padding, which changes nobody's state. Steps without drafts come first, for every number of
sequences, alone and beside prompt rows: whoever asks can be answered with those. Then come drafts, then longer texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.control.trees import NO_TREE
from outrider.device.buckets import (
    BITES,
    DRAFTED_BITES,
    FEW_LOGITS,
    MAX_BESIDE,
    RUNS,
    SizeChoice,
    longest_run,
    sizes_up_to,
)
from outrider.device.capture import CapturedStep, StepShape
from outrider.device.graphs import StepGraphs
from outrider.device.ops import StepOps
from outrider.draft.drafters import DrafterFailed, Drafters
from outrider.engine.shared_drafts import SharedDrafts
from outrider.model.kernels.gpu.recording import CONTEXTS, context_for
from outrider.types import NO_DRAFT, Request, SamplingParams, Sequence, TreeShape
from outrider.verify.judge import judge

Plain = Callable[[int], float | None]  # seconds of plain steps, by size
SPARE = 1 << 30  # bytes that are left alone
LONGEST = CONTEXTS[2]  # tokens of texts whose steps are captured ahead
EAGER_ROWS = (
    576,
    1024,
    2048,
)  # of prompts that nobody decodes beside: launched one by one, and compiled first


class WarmUp:
    def __init__(
        self, graphs: StepGraphs, shared: SharedDrafts, sizes: SizeChoice, drafters: Drafters, ops: StepOps
    ) -> None:
        self.graphs, self.shared, self.sizes = graphs, shared, sizes
        self.drafters, self.ops, self.width = drafters, ops, ops.state.width
        self.captures = graphs.record is not None
        self.prepared: set[tuple[str, int]] = set()  # drafters and sizes; plain steps with their prompt rows

    def measure(self, size: int, drafter: str) -> Iterator[tuple[str, TreeShape, float]]:
        """What steps of this size take, plain and with each draft tree, in seconds."""
        try:
            for tree in (NO_TREE, *self.shared.trees(drafter, size)):
                name = "none" if tree == NO_TREE else drafter
                yield name, tree, self._seconds(self.shape(size, name, tree))
        except DrafterFailed as failed:
            self.drafters.note_fault(failed)
        self.sizes.made.add(size)
        if drafter != "none":
            self.prepared.add((drafter, size))

    def measure_prompts(self, size: int) -> Iterator[tuple[int, float]]:
        """Room for prompt rows beside plain decoding sequences, and the seconds of such a step."""
        for bite in BITES if self.captures else ():
            yield bite[0], self._seconds(self.shape(size, "none", NO_TREE, bite))
        self.prepared.add(("none", size))

    def prompts(self) -> Iterator[None]:
        """Steps of prompts alone: few rows are captured, many are launched one by one."""
        for bite in BITES if self.captures else ():
            self._seconds(self.shape(0, "none", NO_TREE, bite))
            yield
        for rows in EAGER_ROWS if self.captures else ():
            self._launched(self.graphs.make(self.shape(0, "none", NO_TREE, (rows, BITES[-1][1]))))
            yield
        if self.captures:
            self._verify_nothing()
            yield

    def _verify_nothing(self) -> None:
        """Start every kernel once that a sequence needs between its prompt and its first resident step."""
        state, model = self.ops.state, self.ops.model
        # Padding's row has no filters in the end: it would pay for them in every step.
        for params in (SamplingParams(temperature=0.7, top_p=0.9, top_k=40), SamplingParams(temperature=0)):
            one = Sequence(Request("", (0,), params, 0), 0, 0, [0], row=state.rows)
            state.upload(one, np.zeros(1, np.int32))
            for count in (1, 2, FEW_LOGITS):
                logits = torch.zeros((count, model.config.vocab), device=state.device)
                judge(logits, [one] * count, [NO_DRAFT] * count, model.draw, model.filter_logits)

    def rest(self, sequences: int, drafters: Seq[str], plain: Plain) -> Iterator[None]:
        """What else is captured: several passes where they are short (by the seconds of `plain` steps), steps that
        filter, drafts beside prompt rows, and all of it for longer texts.
        """
        for shape in self._rest(sequences, drafters, plain) if self.captures else ():
            if self._crowded():
                return
            try:
                self._launched(self.graphs.capture(shape))
            except DrafterFailed as failed:
                self.drafters.note_fault(failed)
            yield

    def _rest(self, sequences: int, drafters: Seq[str], plain: Plain) -> Iterator[StepShape]:
        yield from self.graphs.often_missed()
        sizes = sizes_up_to(sequences)
        for size in sizes:
            yield self.shape(size, "none", NO_TREE, filtered=True)
            for passes in RUNS[1:]:
                if passes <= longest_run(size, plain(size) or 1.0):
                    yield self.shape(size, "none", NO_TREE, passes=passes, filtered=True)
        for context in self._contexts():
            for size in sizes:
                if context > self._contexts()[0]:
                    yield self.shape(size, "none", NO_TREE, context=context, filtered=True)
                    for bite in BITES:
                        yield self.shape(size, "none", NO_TREE, bite, context=context)
                for name in drafters:
                    for tree in self.shared.trees(name, size):
                        if context > self._contexts()[0]:
                            yield self.shape(size, name, tree, context=context)
                        if tree[0] == tree[1] <= MAX_BESIDE:
                            for bite in DRAFTED_BITES:
                                yield self.shape(size, name, tree, bite, context=context)
            if context > self._contexts()[0]:
                for bite in BITES:
                    yield self.shape(0, "none", NO_TREE, bite, context=context)

    def _crowded(self) -> bool:
        """Whether steps need what memory is left more than graphs do."""
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
        serving = "+".join(self.shared.with_riding([drafter], tree))
        return StepShape(
            size, tree, serving, context_for(context, self.width),
            self.captures and not plain if filtered is None else filtered,
            passes, *staged, edited=self.captures,
        )  # fmt: skip

    def _contexts(self) -> list[int]:
        """Lengths that steps are captured for."""
        return sorted({context_for(one, self.width) for one in CONTEXTS if one <= LONGEST})

    def _seconds(self, shape: StepShape) -> float:
        step = self.graphs.capture(shape)
        self._launched(step)  # the first one only warms up
        return self._launched(step)

    def _launched(self, step: CapturedStep) -> float:
        step.fill([], [], [], np.zeros((0, step.shape.nodes + 1), np.int32))
        if step.staged is not None:
            step.staged.clear()
        timer = step.launch().timer
        timer.wait()
        return timer.seconds()
