"""What the device holds of a sequence that the host takes further now and then."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.cache.table import SlotTable
from outrider.device.state import SequenceState
from outrider.engine.residency import Residency
from outrider.types import Sequence
from tests.tiny import request

WIDTH, VOCAB = 64, 32


def make(table_rows: int = 4) -> tuple[Residency, list[str]]:
    table = SlotTable.__new__(SlotTable)  # its entries are all that is looked at
    table.entries = np.zeros((table_rows, WIDTH), np.int32)
    residency = Residency(SequenceState(table_rows, WIDTH, torch.device("cpu"), VOCAB), table)
    calls: list[str] = []
    for name in ("upload", "advance"):
        residency.state.__dict__[name] = _logged(getattr(residency.state, name), name, calls)
    return residency, calls


def _logged(do, name: str, calls: list[str]):
    def logged(*given) -> None:
        calls.append(name)
        do(*given)

    return logged


def grow(residency: Residency, sequence: Sequence, tokens: list[int], cached: int, first_slot: int) -> None:
    residency.table.entries[sequence.row, sequence.cached : cached] = range(
        first_slot, first_slot + cached - sequence.cached
    )
    sequence.tokens += tokens
    sequence.cached = cached


def held(residency: Residency, sequence: Sequence) -> dict[str, list]:
    state, row = residency.state, sequence.row
    known, cached = len(sequence.tokens), sequence.cached
    found = {
        "tokens": state.tokens[row, :known].tolist(),
        "slots": state.table[row, :cached].tolist(),
        "length": state.lengths[row].item(),
        "seed": state.seeds[row].item(),
        "temperature": state.temperature[row].item(),
    }
    if row in state.edits.held:
        found["counts"] = state.edits.counts[state.edits.held[row][1]].tolist()
    return found


@pytest.mark.parametrize("more", [{}, {"frequency_penalty": 0.5}])
def test_only_what_is_new_is_sent_of_who_was_there(more) -> None:
    residency, calls = make()
    one = Sequence(request("a", [1, 2, 3], temperature=0.7, **more), 0, 11, [1, 2, 3], row=2)
    grow(residency, one, [4], 3, 40)
    residency.sync(one)
    residency.sync(one)
    assert calls == ["upload", "advance"]  # the one within the other
    residency.leave(one)
    grow(residency, one, [5, 6], 5, 50)
    residency.sync(one)
    assert calls == ["upload", "advance", "advance"]
    fresh, _ = make()
    fresh.table.entries[:] = residency.table.entries
    fresh.sync(one)
    assert held(residency, one) == held(fresh, one)
    assert held(residency, one)["slots"] == [40, 41, 42, 50, 51]


def test_who_gave_its_row_back_or_is_new_there_is_sent_whole() -> None:
    residency, calls = make()
    one = Sequence(request("a", [1, 2, 3]), 0, 1, [1, 2, 3], row=1)
    grow(residency, one, [], 2, 9)
    residency.sync(one)
    residency.leave(one)
    one.released += 1
    residency.sync(one)
    assert calls == ["upload", "advance"] * 2
    residency.leave(one)
    other = Sequence(request("b", [7, 8]), 0, 2, [7, 8], row=1)
    residency.sync(other)
    assert calls == ["upload", "advance"] * 3 and held(residency, other)["tokens"] == [7, 8]
    residency.leave(one)  # it is not there: nothing to come back to
    residency.sync(other)
    assert calls == ["upload", "advance"] * 4
