"""How a step runs: the contract between the engine and its runners.

Launching drafts, runs the target once and leaves its logits with an `InFlightStep`; finishing verifies. In between, up
to `lag` further steps may be launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.control.planner import Planner
from outrider.engine.rows import PackedRows, Result
from outrider.types import CapturedShape, DrafterPrefill, DraftPlan, Options, Plan, Reason, Work


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and is not settled."""

    work: list[Work]
    draft_plans: list[DraftPlan]
    reasons: tuple[Reason, ...]
    packed: PackedRows
    begun: float = 0.0
    rows: int = 0  # of one pass
    passes: int = 1
    captured: CapturedShape | None = None
    drafter_prefill: DrafterPrefill | None = None
    predicted: list[tuple[str, int, float]] = field(default_factory=list)  # of the persistent batch
    ready: Any = None  # where a device lags: an event after which its logits can be read
    plan_s: float = 0.0
    plan_cached: bool = False
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    waited_s: float = 0.0
    experts: float = 0.0  # as StepRecord has it
    uncaptured: bool = False  # the same

    @property
    def can_draft(self) -> bool:
        """Whether the planner had a choice. In captured plain passes it had none."""
        return self.captured is None or self.captured.drafter != "none" or bool(self.packed.work)


class Preparation(Protocol):
    """Captures and measures steps ahead of requests."""

    on_demand: bool  # whether steps may be captured and measured while a request waits
    idle: bool  # whether no request runs while the next piece of `run` is done
    sequences: int  # at once, at most, of those that steps are prepared for
    most: int  # the same of those that came

    @property
    def counts(self) -> tuple[int, int]:
        """Graphs captured and kernels compiled so far."""
        ...

    def run(self, planner: Planner, sequences: int) -> Iterator[bool]:
        """Prepares steps of up to this many sequences, piece by piece, and teaches the planner their costs. Yields
        whether requests can be answered without drafts from what is prepared.
        """
        ...

    def most_prompt_rows(self, decoding: int) -> int:
        """Maximum number of prompt rows that a prepared step with so many decoding sequences has room for."""
        ...

    def measure(self, planner: Planner, drafter: str, size: int) -> None:
        """Measures the steps of one size now, plain and with this drafter."""
        ...


class Runner(Protocol):
    lag: int  # steps that may be in flight while the next one is launched

    @property
    def preparation(self) -> Preparation: ...

    def members(self, work: Seq[Work]) -> Options:
        """Which work is in the persistent batch: all that a plan of an earlier step is checked against."""
        ...

    def options(self, work: Seq[Work], members: Options, waiting: int) -> Options:
        """What the planner may choose from for this work, while this many other prompts wait."""
        ...

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        """Executes the plan: drafts, and runs the target once. Waits for nothing that is in flight."""
        ...

    def finish(self, step: InFlightStep) -> list[Result]:
        """Waits for a step, and verifies: a result for each piece of its work."""
        ...

    def release(self, drafters: Seq[str]) -> None:
        """Drops everything kept for drafters that are gone. Nothing is in flight."""
        ...
