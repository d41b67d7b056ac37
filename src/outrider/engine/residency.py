"""The persistent batch as the host sees it: which rows of the device's state are current, and the steps in flight."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from outrider.cache.table import SlotTable
from outrider.device.capture import Launched, StepShape, Timer
from outrider.device.state import Change, SequenceState
from outrider.engine.runner import InFlightStep
from outrider.types import Sequence, Work


class Residency:
    def __init__(self, state: SequenceState, table: SlotTable) -> None:
        self.state, self.table = state, table
        # By row of the state: its sequence, and that sequence's `released` count at the upload.
        self.synced: dict[int, tuple[Sequence, int]] = {}
        # Rows that the host has moved on since: the same, with the tokens then known and then in the KV cache.
        self.left: dict[int, tuple[Sequence, int, int, int]] = {}
        # Host-packed rows, of which only slots are uploaded: the same, with the number of slots.
        self.tabled: dict[int, tuple[Sequence, int, int]] = {}
        # Rows of requests that the host may have to verify or report on.
        self.special = np.zeros(state.rows, bool)

    def sync(self, sequences: Iterable[Sequence]) -> None:
        """Upload those that have not been resident since the host last changed them."""
        stale = [one for one in sequences if self.synced.get(one.row) != (one, one.released)]
        self.state.bring([self._change(one) for one in stale])
        for one in stale:
            params = one.request.params
            self.synced[one.row] = one, one.released
            self.tabled.pop(one.row, None)
            self.special[one.row] = (
                one.request.edits_logits
                or params.logprobs is not None
                or params.speculation.mode != "coupled"
            )

    def _change(self, sequence: Sequence) -> Change:
        row, entries = sequence.row, self.table.entries[sequence.row]
        *owner, tokens, cached = self.left.pop(row, (None, 0, 0, 0))
        held = (tokens, cached) if owner == [sequence, sequence.released] else (0, 0)
        return Change(sequence, entries, *held)

    def leave(self, sequence: Sequence) -> None:
        """Marks a sequence's row as out of date, because the host decides its next tokens."""
        row, known = sequence.row, (sequence, sequence.released)
        if self.synced.pop(row, None) == known:
            self.left[row] = *known, len(sequence.tokens), sequence.cached

    def upload_slots(self, one: Work) -> None:
        """Slots before staged rows: of a prefix that was in the KV cache, or of the accepted path of a draft."""
        sequence, row = one.sequence, one.sequence.row
        owner, released, good = self.tabled.get(row, (None, 0, 0))
        if owner is not sequence or released != sequence.released:
            good = 0
        if good < one.start:
            self.state.upload_slots(row, good, self.table.entries[row, good : one.start])
        self.tabled[row] = sequence, sequence.released, one.start + one.known


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

    @property
    def done(self) -> bool:
        return self.launched is None or self.launched.timer.done


class InFlightDrafts(NamedTuple):
    """Of a step in flight: who drafts for which rows, and the most tokens that rows bring with and without a draft."""

    lead: str
    drafters: dict[int, str]
    drafted: int
    plain: int
