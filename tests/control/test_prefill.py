"""How many prompt rows a step with decoding sequences gets."""

from __future__ import annotations

import pytest

from outrider.control import prefill
from outrider.control.costs import CostModel
from outrider.control.guards import Guards
from outrider.control.prefill import MAX_PROMPT_ROWS, background_rows, prompt_rows
from outrider.types import NO_TREE
from tests.control.build import record


def with_captured(added: dict[int, float], plain: dict[int, float]) -> CostModel:
    costs = CostModel()
    for size, seconds in plain.items():
        costs.captured.learn("none", size, [("none", NO_TREE, seconds)])
        costs.captured.with_prompts |= {(size, rows): seconds + more for rows, more in added.items()}
    return costs


def test_no_bound_unless_one_is_set_and_costs_are_known() -> None:
    known = with_captured({64: 1.0}, {1: 1.0})
    assert prompt_rows(known, Guards(), 1, 0.0) == MAX_PROMPT_ROWS
    assert prompt_rows(CostModel(), Guards(prefill_slowdown=0.1), 1, 0.0) == MAX_PROMPT_ROWS
    assert (
        prompt_rows(known, Guards(prefill_slowdown=0.1), 2, 0.0) == MAX_PROMPT_ROWS
    )  # more than any known size
    assert prompt_rows(known, Guards(prefill_slowdown=0.1), 1, 0.0) == 64


def test_host_packed_prompt_rows_add_a_share_of_a_step_which_grows_with_the_wait() -> None:
    costs = CostModel()
    costs.eager.by_rows = {2: 1.0}
    assert prompt_rows(costs, Guards(prefill_slowdown=0.5), 2, 0.0) == MAX_PROMPT_ROWS
    costs.observe(record(sequences=3, known=18, rows=18, prompt_rows=16, seconds=1.0 + 16 * 0.1))
    rows = [prompt_rows(costs, Guards(prefill_slowdown=share), 2, 0.0) for share in (0.05, 0.5, 2.0, 50.0)]
    assert rows == [1, 5, 20, 32]  # no more than twice what was measured
    waited = [prompt_rows(costs, Guards(prefill_slowdown=0.5), 2, seconds) for seconds in (1.0, 2.0, 4.0)]
    assert waited == [5, 10, 20]


def test_captured_steps_have_room_for_certain_numbers_of_prompt_rows() -> None:
    costs = with_captured({64: 0.2, 128: 1.0, 256: 4.0, 512: 11.0}, {16: 4.0})
    rows = [prompt_rows(costs, Guards(prefill_slowdown=s), 9, 0.0) for s in (0.01, 0.1, 0.4, 1.5, 50.0)]
    assert rows == [64, 64, 128, 256, 512]
    for _ in range(60):  # longer texts
        slow = record(sequences=3, known=102, prompt_rows=100, tree=NO_TREE, size=16, seconds=7.0)
        costs.observe(slow)
    assert prompt_rows(costs, Guards(prefill_slowdown=0.4), 9, 0.0) == 64


def test_more_sequences_and_more_waiting_prompts_get_more_rows() -> None:
    costs = with_captured({64: 1.2, 128: 2.4, 256: 4.2, 512: 9.2}, {1: 4.0, 16: 4.2, 64: 4.6, 128: 5.2})
    guards = Guards(prefill_slowdown=0.4)
    assert [prompt_rows(costs, guards, n, 0.0) for n in (16, 64, 128)] == [64, 256, 512]
    assert [prompt_rows(costs, guards, 16, 0.0, waiting=n) for n in (8, 16, 24, 64)] == [64, 128, 256, 512]


def test_a_burst_of_prompts_is_prefilled_in_few_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = with_captured({64: 1.5, 512: 10.0, 1984: 41.0}, {16: 4.0})

    def rows(decoding: int, waiting: int, pending: int) -> int:
        return prompt_rows(costs, Guards(prefill_slowdown=0.4), decoding, 0.0, waiting, pending)

    assert rows(8, waiting=4, pending=3968) == rows(8, waiting=4, pending=992) == 1984
    assert rows(8, waiting=4, pending=991) == 512
    assert rows(8, waiting=4, pending=3969) == rows(8, waiting=4, pending=20) == 64  # too many, and few
    assert rows(8, waiting=3, pending=3968) == rows(1, waiting=1, pending=1984) == 64  # for too few prompts
    monkeypatch.setattr(prefill, "BURST_STEPS", 0)
    assert rows(8, waiting=4, pending=1984) == 64


def test_a_measured_curve_bounds_the_rows() -> None:
    costs = CostModel()
    assert background_rows(costs, 0, 0.05) == MAX_PROMPT_ROWS  # nothing is known
    for rows in (1, 4, 16, 64):
        costs.eager.learn_pass(rows, 0.004 + 0.001 * rows)
    assert background_rows(costs, 0, 0.05) == 46
    assert background_rows(costs, 6, 0.05) == 40
    assert background_rows(costs, 100, 0.05) == 0


@pytest.mark.parametrize(("decoding", "rows"), [(0, 25), (2, 20)])
def test_without_a_curve_prompt_rows_that_were_timed_do(decoding: int, rows: int) -> None:
    costs = CostModel()
    costs.eager.per_prompt_row[32] = 0.002
    costs.eager.by_rows[2] = 0.01
    assert background_rows(costs, decoding, 0.05) == rows


def test_a_step_of_prompts_alone_teaches_what_they_take() -> None:
    costs = CostModel()
    costs.observe(record(seconds=0.064, rows=32, known=32, prompt_rows=32, emitted=0))
    assert background_rows(costs, 0, 0.05) == 25 and not costs.eager.per_prompt_row
