"""How a step runs: the contract between the engine and its runners.

Launching drafts, runs the target once and leaves its logits with an `InFlightStep`; finishing verifies. In between, up
to `lag` further steps may be launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.control.planner import Planner
from outrider.control.prefill import MAX_PROMPT_ROWS
from outrider.engine.rows import PackedRows, Result
from outrider.types import DraftPlan, Options, Plan, StepRecord, Work


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and is not settled."""

    work: list[Work]
    draft_plans: list[DraftPlan]
    packed: PackedRows
    begun: float
    record: StepRecord  # what it costs, written as it runs
    ready: Any = None  # where a device lags: an event after which its logits can be read

    @property
    def done(self) -> bool:
        """Whether finishing it does not wait for a device."""
        return True


class Preparation(Protocol):
    """Captures and measures steps ahead of requests. The defaults are of a device without captured steps."""

    on_demand: bool = False  # whether steps may be captured and measured while a request waits
    idle: bool = True  # whether no request runs while the next piece of `run` is done
    sequences: int = 0  # maximum number that steps are prepared for
    most: int = 0  # maximum number that came at once

    @property
    def counts(self) -> tuple[int, int]:
        """Graphs captured and kernels compiled so far."""
        return 0, 0

    def run(self, planner: Planner, sequences: int) -> Iterator[bool]:
        """Prepares steps of up to this many sequences, piece by piece, and teaches the planner their costs. Yields
        whether requests can be answered without drafts from what is prepared.
        """
        ...

    @property
    def max_prompts(self) -> int:
        """Maximum number of prompts that a prepared step finishes reading: each wants logits."""
        return MAX_PROMPT_ROWS

    def most_prompt_rows(self, decoding: int) -> int:
        """Maximum number of prompt rows in a prepared step with `decoding` sequences."""
        return MAX_PROMPT_ROWS

    def measure(self, planner: Planner, drafter: str, size: int) -> None:
        """Measures the steps of one size now, plain and with this drafter."""
        return


class Runner(Protocol):
    lag: int = 0  # steps that may be in flight while the next one is launched
    preparation: Preparation

    def members(self, work: Seq[Work]) -> Options:
        """Which work is in the persistent batch: all that a plan of an earlier step is checked against."""
        return Options()

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
        return
