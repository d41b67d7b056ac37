"""Steps by shape: which one serves, whether it is captured, and when that may be done.

Until steps are prepared, a shape is captured when it is first needed, as somebody who asks once needs few of them. From
then on a captured step that has room serves. Where none has, the operations are launched one by one, and the next time
they are captured instead: both take the host as long, since the first launch has compiled and loaded the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.device.buckets import worth_capturing
from outrider.device.capture import CapturedStep, Record, StepShape


class StepGraphs:
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
