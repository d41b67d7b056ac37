"""Which rows of the device's state are up to date with what the host knows, and bringing them there."""

from __future__ import annotations

import numpy as np

from outrider.cache.table import SlotTable
from outrider.device.state import SequenceState
from outrider.types import Sequence, Work


class Residency:
    def __init__(self, state: SequenceState, table: SlotTable) -> None:
        self.state, self.table = state, table
        # By row of the state: whose it is, and how often that had given its row back.
        self.synced: dict[int, tuple[Sequence, int]] = {}
        # Those that the host has taken further since: the same, and the tokens that were known and in the KV cache.
        self.left: dict[int, tuple[Sequence, int, int, int]] = {}
        # The same of slots alone, where rows are staged, and how many of them there are.
        self.tabled: dict[int, tuple[Sequence, int, int]] = {}
        self.special = np.zeros(state.rows, bool)  # rows of requests that may need the host's eye in a step

    def sync(self, sequence: Sequence) -> None:
        """Upload a sequence, unless it has been resident since the host last changed it."""
        known, row = (sequence, sequence.released), sequence.row
        if self.synced.get(row) != known:
            *owner, tokens, cached = self.left.pop(row, (None, 0, 0, 0))
            if tuple(owner) == known:
                self.state.advance(sequence, self.table.entries[row], tokens, cached)
            else:
                self.state.upload(sequence, self.table.entries[row])
            self.synced[row] = known
            self.tabled.pop(row, None)
            params = sequence.request.params
            self.special[row] = (
                sequence.request.edits_logits
                or params.logprobs is not None
                or params.speculation.mode != "coupled"
            )

    def leave(self, sequence: Sequence) -> None:
        """The host will say how the sequence goes on: what the device holds is then out of date."""
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
