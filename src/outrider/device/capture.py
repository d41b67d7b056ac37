"""Steps of one shape: inputs that always lie in the same place, and on a GPU the captured graph over them.

A step drafts, runs the target once over resident and staged rows, samples, and commits. On a CPU, and on a GPU until it
is captured, the same operations are launched one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.device.buckets import staged_shape, worth_capturing
from outrider.device.ops import SLOTS, Ahead, StepInputs, StepOps, TreeLayout, chain_levels, run_levels
from outrider.model.staged import StagedRows
from outrider.types import Batch, Draft, TreeShape

# Drafts for rows of such lengths: tokens [S, nodes], and how many of them are proposed [S], None: all.
Propose = Callable[[StepOps, Tensor, Tensor, TreeLayout, int], tuple[Tensor, Tensor | None]]
Record = Callable[[Callable[[], Any]], tuple[Any, Any]]  # what a GPU captures graphs with


# Fields in which a step that serves in place of another equals it, and fields in which it has at least as much.
SAME = ("tree", "drafters", "passes", "branching")
ROOM = ("size", "staged", "wanted", "context", "filtered", "edited")


class TargetPass(Protocol):
    """The target over rows on the device, every `together` of them one sequence's, and staged ones after them."""

    def __call__(
        self, batch: Batch, together: int, context: int, branching: bool, staged: StagedRows | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StepShape:
    size: int  # resident sequences there is room for
    tree: TreeShape  # depth and nodes of their drafts
    drafters: tuple[str, ...]  # that propose: the lead, then model-free ones
    context: int  # that no sequence exceeds
    filtered: bool  # whether top-k, top-p and min-p are heeded
    passes: int = 1  # plain ones, one after the other
    staged: int = 0  # rows
    wanted: int = 0  # logits of those
    branching: int = 0  # staged rows of sequences with draft nodes
    edited: bool = False  # whether penalties and logit_bias are heeded

    @property
    def nodes(self) -> int:
        """Slots of a sequence beside the one of its last known token."""
        return self.tree.nodes + self.passes - 1

    @property
    def rows(self) -> int:
        """Of the target's pass, padding among them."""
        return self.size * (self.tree.nodes + 1) + self.staged

    def has_room_for(self, other: StepShape) -> bool:
        """Whether a step of this shape can do what one of the other does: with padding, and reading no further than
        there is text.
        """
        return all(getattr(self, name) == getattr(other, name) for name in SAME) and all(
            getattr(self, name) >= getattr(other, name) for name in ROOM
        )


class Timer:
    """How long something takes where it runs, however late the host looks."""

    def __init__(self, cuda: bool) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
        if self.events:
            self.events[0].record()
        self.begun, self.ended = time.perf_counter(), 0.0

    def stop(self) -> None:
        if self.events:
            self.events[1].record()
        self.ended = time.perf_counter()

    def wait(self) -> None:
        if self.events:
            self.events[1].synchronize()

    @property
    def done(self) -> bool:
        return not self.events or self.events[1].query()

    def seconds(self) -> float:
        if self.events:
            return self.events[0].elapsed_time(self.events[1]) / 1000
        return self.ended - self.begun


@dataclass(slots=True)
class Launched:
    """A step on its way. `result` is on the host and holds what `StepOps` says once the timer was waited for; logits
    are on the device and hold until the next step begins.
    """

    result: Tensor
    logits: Tensor | None
    timer: Timer
    experts: Tensor  # [1], on the host: those that the target's passes read, added up over layers


class CapturedStep:
    def __init__(
        self,
        ops: StepOps,
        run: TargetPass,
        shape: StepShape,
        nodes: Draft,
        propose: Seq[Propose] = (),
        padding: int = 0,
        buffers: int = 2,
    ) -> None:
        """`nodes` is the draft tree of `shape.tree`, `padding` the slot that padding rows write to. There are as many
        `buffers` on the host as steps may be in flight at once.
        """
        self.ops, self.run, self.shape, self.propose, self.padding = ops, run, shape, propose, padding
        self.tree = TreeLayout(nodes)
        state, size = ops.state, shape.size
        self.cuda = state.device.type == "cuda"
        width = SLOTS + shape.nodes + 1
        self.host = torch.zeros(buffers, size, width, dtype=torch.int32, pin_memory=self.cuda)
        self.inputs = torch.zeros(size, width, dtype=torch.int32, device=state.device)
        self.staged: StagedRows | None = None
        if shape.staged:
            room = staged_shape(shape.staged, shape.wanted, shape.branching, ops.model.config)
            self.staged = StagedRows(room, state.table, padding, state.rows, buffers)
        emitted = shape.passes if not propose else 2 + 2 * shape.tree.depth + 1 + shape.tree.nodes
        self.results = torch.zeros(buffers, size, emitted, dtype=torch.int64, pin_memory=self.cuda)
        self.read = torch.zeros(1, dtype=torch.int32, device=state.device)  # experts, in this step
        self.counts = torch.zeros(buffers, 1, dtype=torch.int32, pin_memory=self.cuda)
        self.mixture = any(spec.experts for spec in ops.model.config.specs)
        if self.mixture:
            self.run = self._counted(run)
        self.graph: Any = None
        self.output: tuple[Tensor, Tensor | None] | None = None
        self.launches = 0

    def fill(
        self,
        rows: Seq[int] | np.ndarray,
        wanted: Seq[int],
        commits: Seq[bool] | np.ndarray,
        fresh: np.ndarray,
        drafters: Seq[int] = (),
    ) -> None:
        """Who takes part: rows of the state, draft nodes wanted, whether the device commits, slots [S, nodes + 1], and
        which of several drafters serves each.
        """
        self.launches += 1
        host, n = self.host[self.launches % len(self.host)].numpy(), len(rows)
        host[:n, 0], host[:n, 1], host[:n, 2], host[:n, SLOTS:] = rows, wanted, commits, fresh
        if len(drafters):
            host[:n, 2] |= np.asarray(drafters, np.int32) << 1
        host[n:, 0], host[n:, 1:SLOTS], host[n:, SLOTS:] = self.ops.state.rows, 0, self.padding
        self.inputs.copy_(self.host[self.launches % len(self.host)], non_blocking=True)

    def launch(self) -> Launched:
        timer, result = Timer(self.cuda), self.results[self.launches % len(self.host)]
        output, logits = self._launch()
        if self.shape.size:
            result.copy_(output, non_blocking=True)
        experts = self.counts[self.launches % len(self.host)]
        if self.mixture:
            experts.copy_(self.read, non_blocking=True)
        timer.stop()
        return Launched(result, logits, timer, experts)

    def _counted(self, run: TargetPass) -> TargetPass:
        """Drafters may run layers of the target, too, so experts are counted around its passes alone."""

        def counted(
            batch: Batch, together: int, context: int, branching: bool, staged: StagedRows | None = None
        ) -> Tensor:
            self.read.sub_(self.ops.touched)
            logits = run(batch, together, context, branching, staged)
            self.read.add_(self.ops.touched)
            return logits

        return counted

    def launch_padding(self) -> Timer:
        """Over padding alone, which changes no sequence's state, nor what is on its way to the host: a step of this
        shape may be in flight.
        """
        self._clear()
        timer = Timer(self.cuda)
        self._launch()
        timer.stop()
        return timer

    def _launch(self) -> tuple[Tensor, Tensor | None]:
        if self.graph is None:
            return self._step()
        self.graph.replay()
        assert self.output is not None
        return self.output

    def capture(self, record: Record) -> None:
        """Capture the CUDA graph, on padding alone, which changes no sequence's state. A step that was never launched
        runs once before, which compiles its kernels.
        """
        given = self.inputs.clone()
        self._clear()
        if not self.launches:
            self._step()
        self.graph, (output, logits) = record(self._step)
        self.output = output, None if logits is None else _not_kept(logits)
        self.inputs.copy_(given)

    def compile(self, ahead: Ahead) -> None:
        """Queues the kernels of its operations to be compiled. None is launched."""
        self._clear()
        with ahead.collecting():
            self._step()

    def _clear(self) -> None:
        """Nothing but padding."""
        if self.staged is not None:
            self.staged.clear()
        self.inputs[:, 0], self.inputs[:, 1:SLOTS] = self.ops.state.rows, 0
        self.inputs[:, SLOTS:] = self.padding

    def _step(self) -> tuple[Tensor, Tensor | None]:
        ops, shape, tree = self.ops, self.shape, self.tree
        ops.filtered, ops.edited = shape.filtered, shape.edited
        if self.mixture:
            self.read.zero_()
        if not shape.size:
            assert self.staged is not None
            return self.inputs, self.run(self.staged.placed(), 1, shape.context, False, self.staged)
        step = ops.begin_step(self.inputs)
        if shape.passes > 1:
            levels = chain_levels(shape.passes)
            emitted = run_levels(self.run, ops, step.rows, step.lengths, levels, shape.passes, shape.context)
            ops.append_tokens(step, emitted)
            return emitted, None
        drafted, counts = self._propose(step) if self.propose else (None, None)
        batch = ops.build_batch(step.rows, step.lengths, tree.layout, drafted)
        whole = batch if self.staged is None else self.staged.join(batch)
        logits = self.run(whole, len(tree) + 1, shape.context, tree.branches, self.staged)
        chosen = ops.state.draft_buffer(shape.size, len(tree) + 1)
        ops.draw(batch, logits[: batch.rows], tree.columns, chosen, drafted=drafted)
        if drafted is None:
            ops.append_tokens(step, chosen)
            return chosen, logits
        emitted = ops.commit(step, tree.shape.parents, tree.depth, drafted, counts, chosen)
        return emitted, logits

    def _propose(self, step: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Drafts of one drafter; of several, each for its own sequences."""
        ops, tree, context = self.ops, self.tree, self.shape.context
        if len(self.propose) == 1:
            return self.propose[0](ops, step.drafting, step.known, tree, context)
        drafted, counts = None, step.wanted.long()
        for number, propose in enumerate(self.propose):
            mine = step.drafter == number
            rows = torch.where(mine, step.drafting, ops.state.rows)
            tokens, proposed = propose(ops, rows, ops.state.lengths[rows], tree, context)
            drafted = tokens if drafted is None else torch.where(mine[:, None], tokens, drafted)
            if proposed is not None:
                counts = torch.where(mine, proposed, counts)
        assert drafted is not None
        return drafted, counts


class _Memory:
    """Where a tensor lies, for a reader that does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(4 * step for step in tensor.stride()),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _not_kept(logits: Tensor) -> Tensor:
    """The same numbers, in memory that other graphs may use for theirs: they must be copied before the next
    step. Logits of every shape, each in memory of its own, would take more than the weights.
    """
    if not logits.is_cuda:
        return logits
    return torch.as_tensor(_Memory(logits), device=logits.device)


class StepGraphs:
    """Steps by shape: which one serves, whether it is captured, and when that may be done.

    Until steps are prepared, a shape is captured when it is first needed. From then on a captured step that has room
    serves. Where none has, the operations are launched one by one, and the next time they are captured instead: both
    take the host as long, since the first launch has compiled and loaded the kernels.
    """

    def __init__(self, make: Callable[[StepShape], CapturedStep], record: Record | None) -> None:
        """`make` makes a step of some shape, not captured; without `record` none ever is."""
        self.make, self.record = make, record
        self.on_demand = True
        self.steps: dict[StepShape, CapturedStep] = {}
        self._serving: dict[StepShape, StepShape] = {}  # the captured shape that has room, by shape
        self.changed = False  # whether shapes were captured or dropped since the last look

    def captured(self, shape: StepShape) -> bool:
        return shape in self.steps and self.steps[shape].graph is not None

    def find(self, shape: StepShape) -> StepShape | None:
        """The smallest captured shape that has room for this one. Without capture, any shape serves itself."""
        if self.record is None or self.captured(shape):
            return shape
        if shape not in self._serving:
            fitting = [one for one in self.steps if self.captured(one) and one.has_room_for(shape)]
            if not fitting:
                return None
            self._serving[shape] = min(fitting, key=lambda one: (one.rows, one.context, one.filtered))
        return self._serving[shape]

    def step(self, shape: StepShape) -> CapturedStep:
        """The step to launch: captured if it may be done now, or was."""
        step = self.made(shape)
        if step.graph is None and self.on_demand and worth_capturing(shape.staged, step.launches):
            return self.capture(shape)
        return step

    def due(self, shape: StepShape, usual: bool) -> bool:
        """Whether a shape that is launched now was launched often enough to be captured instead; `usual`: it is one of
        those that steps are prepared with.
        """
        if self.record is None or self.captured(shape):
            return False
        launches = self.made(shape).launches
        return launches > 0 if usual else worth_capturing(shape.staged, launches)

    def capture(self, shape: StepShape) -> CapturedStep:
        """Now, although requests may wait. On a CPU there is nothing to capture."""
        step = self.made(shape)
        if self.record is not None and step.graph is None:
            step.capture(self.record)
            self._serving.clear()
            self.changed = True
        return step

    def forget(self, drafter: str) -> None:
        """Keep no step that it drafts in. Nothing is in flight."""
        for shape in [one for one in self.steps if drafter in one.drafters]:
            del self.steps[shape]
        self._serving.clear()
        self.changed = True

    def made(self, shape: StepShape) -> CapturedStep:
        """A step of this shape, captured or not."""
        if shape not in self.steps:
            self.steps[shape] = self.make(shape)
        return self.steps[shape]
