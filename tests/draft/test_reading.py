"""What a drafter reads of resident sequences: every token that it lacks, once, in passes of few sizes."""

from __future__ import annotations

import pytest
import torch

from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.reading import TOGETHER, PrefillProgress, Reader
from outrider.types import Batch, Sequence
from tests.tiny import prompt_of, sequence, tiny_model

ROWS, WIDTH, SIZES = 4, 200, (32, 64)


class Reading:
    """A reader, and the passes it asked for."""

    def __init__(self, behind: int) -> None:
        self.state = SequenceState(ROWS, WIDTH, torch.device("cpu"))
        self.state.table[:] = torch.arange(WIDTH, dtype=torch.int32)
        self.ops, self.passes = StepOps(self.state, tiny_model()), list[tuple[Batch, int, int]]()
        self.progress = PrefillProgress()
        self.reader = Reader(self._run, self.progress, SIZES, behind)

    def _run(self, batch: Batch, together: int, longest: int, branching: bool) -> torch.Tensor:
        assert not branching
        self.passes.append((batch, together, longest))
        return torch.empty(0)

    def add(self, row: int, length: int) -> Sequence:
        one = sequence(prompt_of(length, row))
        one.row = row
        self.state.tokens[row, :length] = torch.tensor(one.tokens)
        return one

    def read(self) -> dict[int, list[tuple[int, int]]]:
        """By row: slots and tokens, in order, each once."""
        found: dict[int, dict[int, int]] = {}
        for batch, *_ in self.passes:
            for row, slot, token in zip(
                batch.table_rows.tolist(), batch.slots.tolist(), batch.ids.tolist(), strict=True
            ):
                if row != self.state.rows:
                    found.setdefault(row, {})[slot] = token
        return {row: list(one.items()) for row, one in found.items()}


@pytest.mark.parametrize("behind", [0, 1])
def test_every_token_that_is_lacking_but_the_last(behind: int) -> None:
    reading = Reading(behind)
    short, long, begun = reading.add(0, 7), reading.add(1, 90), reading.add(2, 40)
    reading.progress.note(begun, 30)
    reading.reader.catch_up(reading.ops, [short, long, begun])
    expected = {0: (behind, short), 1: (behind, long), 2: (30, begun)}
    assert reading.read() == {
        row: list(enumerate(one.tokens))[start:-1] for row, (start, one) in expected.items()
    }
    assert [reading.progress.of(one) for one in (short, long, begun)] == [6, 89, 39]
    for batch, together, longest in reading.passes:
        assert batch.rows in SIZES and together == TOGETHER and longest <= 90
        assert (batch.positions >= 0).all() and torch.equal(batch.prefix, batch.positions + 1)
        groups = batch.table_rows.view(-1, TOGETHER)
        assert (groups == groups[:, :1]).all()  # neighbours are one sequence's, at rising positions
        assert (batch.positions.view(-1, TOGETHER).diff(dim=1) >= 0).all()
        assert torch.equal(batch.slots.long() - behind, batch.positions.long())
    before = len(reading.passes)
    reading.reader.catch_up(reading.ops, [short, long, begun])
    assert len(reading.passes) == before  # nothing is read twice


def test_warming_up_has_every_size_and_writes_to_nobodys_slots() -> None:
    reading = Reading(1)
    assert reading.reader.warm_up(reading.ops, 150) == sum(SIZES)
    assert [(batch.rows, longest) for batch, _, longest in reading.passes] == [(32, 150), (64, 150)]
    assert not reading.read()
