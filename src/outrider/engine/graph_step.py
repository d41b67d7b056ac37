"""What a step of the graph runner holds while it is in flight."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from outrider.device.capture import Launched, StepShape, Timer
from outrider.engine.runner import InFlightStep


class Inputs(NamedTuple):
    """What the sequences of the persistent batch are given."""

    rows: np.ndarray  # of the state
    wanted: Seq[int]  # draft nodes
    commits: np.ndarray  # whether the device commits
    slots: np.ndarray
    drafters: Seq[int]  # which of the step's drafters proposes for each


@dataclass(slots=True)
class GraphStep(InFlightStep):
    resident: list[int] = field(default_factory=list)  # places in the work; the others are host-packed
    shape: StepShape | None = None
    size: int = 0  # that the persistent batch was planned for; a larger shape may serve
    launched: Launched | None = None
    host_verified: frozenset[int] = frozenset()  # places in `resident`
    reported: frozenset[int] = frozenset()  # places in `resident` whose log-probabilities are wanted
    logits: dict[int, Tensor] = field(default_factory=dict)  # that the host needs, by place in `resident`
    prefill: tuple[str, int, Timer] | None = None  # of a drafter
    sampled: int | None = None  # place in `resident` of the sequence whose logits are looked at
    packed_places: list[int] = field(init=False)

    def __post_init__(self) -> None:
        here = set(self.resident)
        self.packed_places = [i for i in range(len(self.work)) if i not in here]


class InFlightDrafts(NamedTuple):
    """Of a step in flight: who drafts for which rows, and the most tokens that rows bring with and without a draft."""

    lead: str
    drafters: dict[int, str]
    drafted: int
    plain: int
