"""Steps by shape: which one serves, whether it is captured, and when that may be done.

Until steps are prepared, a shape is captured when it is first needed, as somebody who asks once needs few of them. From
then on nothing is captured while anybody waits: a captured step that has room serves, or the operations are launched
one by one, and what was often missed is captured when no request runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from outrider.device.buckets import CAPTURE_AFTER, worth_capturing
from outrider.device.capture import CapturedStep, Record, StepShape


class StepGraphs:
    def __init__(self, make: Callable[[StepShape], CapturedStep], record: Record | None) -> None:
        """`make` makes a step of some shape, not captured; without `record` none ever is."""
        self.make, self.record = make, record
        self.on_demand = True
        self.steps: dict[StepShape, CapturedStep] = {}
        self.missed: Counter[StepShape] = Counter()  # launches, of shapes that nothing captured had room for
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
        if step.graph is None and self.record is not None:
            if self.on_demand and worth_capturing(shape.staged, step.launches):
                return self.capture(shape)
            self.missed[shape] += 1
        return step

    def capture(self, shape: StepShape) -> CapturedStep:
        """Now, although requests may wait. On a CPU there is nothing to capture."""
        step = self.made(shape)
        if self.record is not None and step.graph is None:
            step.capture(self.record)
            self._serving.clear()
            self.missed.pop(shape, None)
            self.changed = True
        return step

    def often_missed(self) -> list[StepShape]:
        """Shapes worth capturing while no request runs."""
        return [shape for shape, count in self.missed.items() if count >= CAPTURE_AFTER]

    def forget(self, drafter: str) -> None:
        """Keep no step that it drafts in. Nothing is in flight."""
        for known in (self.steps, self.missed):
            for shape in [one for one in known if drafter in one.drafters]:
                del known[shape]
        self._serving.clear()
        self.changed = True

    def made(self, shape: StepShape) -> CapturedStep:
        """A step of this shape, captured or not."""
        if shape not in self.steps:
            self.steps[shape] = self.make(shape)
        return self.steps[shape]
