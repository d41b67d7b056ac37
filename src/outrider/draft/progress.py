"""How much of each sequence a drafter's keys and values cover."""

from __future__ import annotations

from outrider.types import Draft, Sequence, Verdict


class PrefillProgress:
    """By row of the slot table. A sequence that gave its row back counts from nothing, even if it has the same row
    again: its slots are others.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[Sequence, int, int]] = {}

    def of(self, sequence: Sequence) -> int:
        """Its first tokens that have been read."""
        owner, released, read = self._by_row.get(sequence.row, (None, 0, 0))
        return read if owner is sequence and released == sequence.released else 0

    def behind(self, sequence: Sequence, coming: int, window: int) -> int:
        """Tokens to be read by a drafter that reads the last `window` in a captured step itself."""
        known, read = len(sequence.tokens) + coming, self.of(sequence)
        return known - 1 - read if read < known - window else 0

    def note(self, sequence: Sequence, read: int) -> None:
        self._by_row[sequence.row] = sequence, sequence.released, read

    def clear(self) -> None:
        """Nothing counts as read any more: what reads has changed."""
        self._by_row.clear()

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict, fed: bool) -> None:
        """All that was known when the draft was made has been read; if draft nodes were `fed`, so have the accepted
        ones. A node without children was not: its continuation was not needed.
        """
        if draft:
            path = verdict.accepted if fed else []
            leaf = bool(path) and path[-1] not in draft.parents
            self.note(sequence, len(sequence.tokens) - len(verdict.tokens) + len(path) - leaf)
