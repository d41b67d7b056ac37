"""Which captured step serves, and when one may be captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.device.buckets import CAPTURE_AFTER
from outrider.device.capture import StepGraphs, StepShape
from outrider.types import TreeShape

SHAPE = StepShape(4, TreeShape(2, 2), ("lm",), 1024, True, 1, 128, 16, 0, True)


class Step:
    """As much of a step as its graph is concerned with."""

    def __init__(self, shape: StepShape) -> None:
        self.shape, self.graph, self.launches = shape, None, 0

    def capture(self, record: Any) -> None:
        self.graph = record(self)


def graphs(captures: bool = True) -> StepGraphs:
    return StepGraphs(Step, (lambda step: "graph") if captures else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"size": 5}, {"tree": TreeShape(4, 4)}, {"drafters": ()}, {"context": 4096}, {"passes": 4}, {"staged": 256},
        {"wanted": 64}, {"branching": 16},
    ],
)  # fmt: skip
def test_a_step_has_room_for_what_is_no_larger(change: dict[str, Any]) -> None:
    assert SHAPE.has_room_for(SHAPE)
    assert not SHAPE.has_room_for(replace(SHAPE, **change))
    small = replace(SHAPE, size=1, context=512, staged=16, wanted=1, filtered=False, edited=False)
    assert SHAPE.has_room_for(small) and not small.has_room_for(SHAPE)
    for name in ("filtered", "edited"):
        assert not replace(SHAPE, **{name: False}).has_room_for(SHAPE)


def test_the_smallest_captured_step_serves() -> None:
    made = graphs()
    for staged in (512, 128, 256):
        made.capture(replace(SHAPE, staged=staged))
    found = made.find(replace(SHAPE, staged=100))
    assert found is not None and found.staged == 128
    assert made.find(replace(SHAPE, size=8)) is None
    made.capture(replace(SHAPE, staged=100))  # what serves changes with what there is
    found = made.find(replace(SHAPE, staged=90))
    assert found is not None and found.staged == 100


def test_without_graphs_every_shape_serves_itself() -> None:
    made = graphs(captures=False)
    assert made.find(SHAPE) == SHAPE and made.step(SHAPE).graph is None and not made.due(SHAPE, True)
    assert made.capture(SHAPE).graph is None


def test_nothing_is_captured_on_demand_once_that_is_over() -> None:
    made, alone = graphs(), replace(SHAPE, staged=0, wanted=0)
    assert made.step(alone).graph is not None
    made.on_demand = False
    assert made.step(replace(alone, size=9)).graph is None


@pytest.mark.parametrize(("usual", "launches"), [(True, 1), (False, CAPTURE_AFTER)])
def test_a_missing_shape_is_captured_once_it_was_launched(usual: bool, launches: int) -> None:
    """Those that steps are prepared with at once; of others there are too many."""
    made = graphs()
    made.on_demand = False
    for _ in range(launches):
        assert not made.due(SHAPE, usual)
        made.step(SHAPE).launches += 1
    assert made.due(SHAPE, usual)
    made.capture(SHAPE)
    assert not made.due(SHAPE, usual) and made.find(SHAPE) == SHAPE
