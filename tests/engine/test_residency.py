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


def make(table_rows: int = 4) -> tuple[Residency, list[list[tuple[int, int]]]]:
    """With a list of what was sent: of each time, the tokens and slots that each row had already."""
    table = SlotTable.__new__(SlotTable)  # its entries are all that is looked at
    table.entries = np.zeros((table_rows, WIDTH), np.int32)
    residency = Residency(SequenceState(table_rows, WIDTH, torch.device("cpu"), VOCAB), table)
    sent: list[list[tuple[int, int]]] = []
    bring = residency.state.bring

    def logged(changes) -> None:
        if changes:
            sent.append([(one.known, one.cached) for one in changes])
        bring(changes)

    residency.state.bring = logged
    return residency, sent


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
    residency, sent = make()
    one = Sequence(request("a", [1, 2, 3], temperature=0.7, **more), 0, 11, [1, 2, 3], row=2)
    grow(residency, one, [4], 3, 40)
    residency.sync([one])
    residency.sync([one])
    assert sent == [[(0, 0)]]
    residency.leave(one)
    grow(residency, one, [5, 6], 5, 50)
    residency.sync([one])
    assert sent == [[(0, 0)], [(4, 3)]]
    fresh, _ = make()
    fresh.table.entries[:] = residency.table.entries
    fresh.sync([one])
    assert held(residency, one) == held(fresh, one)
    assert held(residency, one)["slots"] == [40, 41, 42, 50, 51]


def test_who_gave_its_row_back_or_is_new_there_is_sent_whole() -> None:
    residency, sent = make()
    one = Sequence(request("a", [1, 2, 3]), 0, 1, [1, 2, 3], row=1)
    grow(residency, one, [], 2, 9)
    residency.sync([one])
    residency.leave(one)
    one.released += 1
    residency.sync([one])
    assert sent == [[(0, 0)]] * 2
    residency.leave(one)
    other = Sequence(request("b", [7, 8]), 0, 2, [7, 8], row=1)
    residency.sync([other])
    assert sent == [[(0, 0)]] * 3 and held(residency, other)["tokens"] == [7, 8]
    residency.leave(one)  # it is not there: nothing to come back to
    residency.sync([other])
    assert sent == [[(0, 0)]] * 4


def test_many_are_sent_at_once_as_each_would_be() -> None:
    """Prompts of any length, some of whom were there before, with whatever they ask for."""
    together, sent = make()
    apart, _ = make()
    asked = [{}, {"temperature": 0.7, "top_k": 3}, {"frequency_penalty": 0.5}, {"prediction": [5, 6, 7]}]
    everybody = [
        Sequence(request(f"r{i}", [1, 2, 3][: i + 1], **more), 0, 10 + i, [1, 2, 3][: i + 1], row=i)
        for i, more in enumerate(asked)
    ]
    for round_, row in ((0, range(4)), (1, (1, 3))):
        for i in row:
            if round_:
                together.leave(everybody[i])
                apart.leave(everybody[i])
            grow(together, everybody[i], [4, 5], everybody[i].cached + 1 + i, 30 + 8 * i + 4 * round_)
        apart.table.entries[:] = together.table.entries
        together.sync(everybody)
        for one in everybody:
            apart.sync([one])
        for one in everybody:
            assert held(together, one) == held(apart, one)
        for name in ("top_k", "top_p", "log_min_p", "references", "spans", "tokens", "table"):
            assert torch.equal(getattr(together.state, name), getattr(apart.state, name)), name
    assert sent == [[(0, 0)] * 4, [(4, 2), (5, 4)]]
