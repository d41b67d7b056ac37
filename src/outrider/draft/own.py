"""A cache of a drafter's own: slots, rows, and how much of each sequence's text they cover.

Rows and slots of sequences that have not been asked for the longest give way when there are too few; such a
sequence is read again when it is next asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.draft.feed import Fed
from outrider.types import Sequence


@dataclass(slots=True)
class State:
    row: int
    valid: int = 0  # entries that hold the sequence's text
    fed: Fed | None = None  # the last guess, until it is judged


class OwnCache:
    def __init__(self, slots: int, sequences: int, width: int) -> None:
        self.table = SlotTable(slots, sequences, width, reuse=False)
        self.states: OrderedDict[Sequence, State] = OrderedDict()  # least recently asked first

    def ask(self, sequences: Seq[Sequence]) -> list[State]:
        """A row for each of these."""
        for sequence in sequences:
            if sequence in self.states:
                self.states.move_to_end(sequence)
                continue
            if not self.table.rows_left:
                self.stop(next(iter(self.states)))
            self.states[sequence] = State(self.table.open([])[0])
        return [self.states[s] for s in sequences]

    def extend(self, row: int, n: int, asked: Seq[Sequence]) -> None:
        """Room at the end of a row, taken from sequences that are not being asked if need be."""
        while not self.table.make_room(n):
            idle = next((s for s in self.states if s not in asked), None)
            if idle is None:
                raise CacheFull("the drafter's cache is full")
            self.stop(idle)
        self.table.extend(row, n)

    def stop(self, sequence: Sequence) -> None:
        if state := self.states.pop(sequence, None):
            self.table.release(state.row)
