"""How a drafter reads known tokens that it lacks of resident sequences: a pass over rows that lie on the device, which
the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from outrider.device.ops import Pass, StepOps, known_batch
from outrider.draft.progress import PrefillProgress
from outrider.types import Sequence

TOGETHER = 16  # neighbouring rows that are one sequence's


class Reader:
    def __init__(self, run: Pass, progress: PrefillProgress, sizes: Seq[int], behind: int = 0) -> None:
        """A pass has rows for one of these `sizes`: on a GPU each has a graph. A drafter's first entry may be of a
        later token than the first, so that positions lie `behind`.
        """
        self.run, self.progress, self.sizes, self.behind = run, progress, sizes, behind

    def catch_up(self, ops: StepOps, sequences: list[Sequence]) -> None:
        """All but the last token of each: that one need not have a slot yet."""
        rows, at = [], []
        for sequence in sequences:
            start, end = max(self.progress.of(sequence), self.behind), len(sequence.tokens) - 1
            if start < end:
                lacking = (start - end) % TOGETHER  # the last token is read several times over
                at.append(np.pad(np.arange(start, end), (0, lacking), mode="edge"))
                rows.append(np.full(len(at[-1]), sequence.row))
            self.progress.note(sequence, max(start, end))
        if not at:
            return
        every, where = np.concatenate(rows), np.concatenate(at)
        for first in range(0, len(where), self.sizes[-1]):
            some = slice(first, first + self.sizes[-1])
            self._read(ops, every[some], where[some])

    def warm_up(self, ops: StepOps, longest: int) -> int:
        for count in self.sizes:
            at = np.arange(count) % TOGETHER + self.behind
            self._read(ops, np.full(count, ops.state.rows), at, longest)
        return sum(self.sizes)

    def _read(self, ops: StepOps, rows: np.ndarray, at: np.ndarray, longest: int = 1) -> None:
        lacking = next(count for count in self.sizes if count >= len(rows)) - len(rows)
        rows = np.pad(rows, (0, lacking), constant_values=ops.state.rows)
        at = np.pad(at, (0, lacking), constant_values=self.behind)
        longest = max(longest, int(at.max()) + 1)
        self.run(known_batch(ops.state, rows, at, self.behind), TOGETHER, longest, False)
