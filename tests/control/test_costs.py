"""The cost model: what steps take that were measured, and those that were not."""

from __future__ import annotations

import pytest

from outrider.control.costs import (
    KEEP,
    KNOWN_AFTER,
    MAX_STALL,
    MIN_READ,
    PLAIN_STALL,
    SLOWEST_READ,
    UNMEASURED_ROW,
    CostModel,
)
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Outcome, StepRecord
from tests.tiny import sequence


def step(rows=1, total=1.0, draft=0.0, drafted=0, known=1) -> StepRecord:
    draft_plan = DraftPlan("lm", drafted, drafted) if drafted else NO_DRAFT_PLAN
    outcome = Outcome(sequence([1, 2]), draft_plan, drafted, drafted, 0, 0)
    return StepRecord(rows, 1, known, drafted, 0, 1, 0, draft, 0, 0, total, [outcome])


def captured(total: float, target: float = 4.0, known: int = 1, size: int = 1, passes: int = 1) -> StepRecord:
    key = "none", (0, 0), size
    return StepRecord(size, 1, known, 0, 0, 1, 0, 0, target, 0, total, captured=key, passes=passes)


def test_costs_between_and_beyond_what_was_measured():
    costs = CostModel()
    assert costs.step(9) / costs.step(1) == pytest.approx((1 + 9 * UNMEASURED_ROW) / (1 + UNMEASURED_ROW))
    costs.by_rows = {2: 1.0, 6: 3.0}
    assert costs.step(2) == 1.0 and costs.step(6) == 3.0
    assert costs.step(3) == pytest.approx(1.5) and costs.step(5) == pytest.approx(2.5)
    assert costs.step(1) < 1.0 and 3.0 < costs.step(12) <= 6.0


def test_costs_are_learned_from_plain_steps_and_drafts():
    costs = CostModel()
    costs.observe(step(total=2.0))
    costs.observe(step(total=1.0))
    assert costs.step(1) == pytest.approx(KEEP * 2 + (1 - KEEP) * 1)
    costs.observe(step(rows=50, total=9.0, known=50))  # a prompt
    assert 50 not in costs.by_rows
    costs.observe(step(rows=5, total=3.0, draft=0.8, drafted=4))
    assert costs.step(5) == pytest.approx(2.2) and costs.drafting({"lm": 3}) == pytest.approx(0.6)
    assert costs.drafting({"lookup": 4}) == 0.0


def test_a_captured_step_costs_what_it_set_out_with_however_many_are_left():
    costs = CostModel()
    costs.observe(captured(4.5, size=16))
    assert costs.plain(16) == 4.5 and costs.plain(8) is None


def test_a_captured_step_costs_the_hosts_time_where_that_is_longer_but_no_stall():
    drafts = "lm", (4, 4), 1
    for total, cost in ((3.0, 4.0), (4.8, 4.8), (400.0, 4.0 * MAX_STALL)):
        costs, drafting = CostModel(), captured(total)
        drafting.captured = drafts
        costs.observe(drafting)
        assert costs.captured[drafts] == cost
    for total, cost in ((3.0, 4.0), (4.4, 4.4), (4.8, 4.0 * PLAIN_STALL)):
        costs = CostModel()  # of plain steps less, as several passes at once hide it
        costs.observe(captured(total))
        assert costs.plain(1) == cost
    costs.observe(captured(5.0, known=40))  # a prompt was read beside it
    assert costs.plain(1) == 4.0 * PLAIN_STALL


def test_answers_that_ended_before_a_step_are_none_of_its_cost():
    costs, late = CostModel(), captured(7.0)
    costs.observe(captured(4.2))
    late.after_end = True
    for _ in range(40):
        costs.observe(late)
    assert costs.plain(1) == pytest.approx(4.0, abs=0.01)
    costs.observe(captured(4.6))
    assert costs.plain(1) > 4.05  # else the host's time counts


def test_a_plain_step_among_drafting_ones_costs_the_devices_time():
    """The host was busy with drafts: plain steps after plain ones do not wait for that."""
    costs = CostModel()
    drafting = captured(8.0, target=6.0)
    drafting.captured = "lm", (4, 4), 1
    costs.observe(drafting)
    assert costs.captured["lm", (4, 4), 1] == 8.0
    costs.observe(captured(5.5))
    assert costs.plain(1) == 4.0 and costs.plain_share[1, drafting.captured] == 0.5
    costs.observe(captured(4.5))
    assert costs.plain(1) == pytest.approx(KEEP * 4.0 + (1 - KEEP) * 4.5)


def test_plain_passes_in_one_captured_step_share_its_time():
    costs = CostModel()
    costs.observe(captured(4.5, passes=8))
    assert costs.plain(1) == 4.5 / 8


def test_captured_steps_that_were_not_measured_are_judged_by_their_neighbours():
    def known(drafter, tree, size, seconds):
        costs.learn(drafter, size, [(drafter, tree, seconds)])

    costs, unmeasured = CostModel(), 1 + 4 * UNMEASURED_ROW
    assert costs.ratio("lm", (4, 4), 16) == unmeasured
    for size in (1, 16):
        known("none", (0, 0), size, 2.0)
    known("lm", (4, 4), 1, 3.0)
    assert costs.ratio("lm", (4, 4), 16) == unmeasured  # another size says nothing
    known("lm", (2, 2), 16, 4.0)
    assert costs.ratio("lm", (4, 4), 16) == 3.0 and costs.ratio("lm", (2, 6), 16) == 4.0  # another tree
    known("lm", (4, 4), 16, 5.0)
    assert costs.ratio("lm", (4, 4), 16) == 2.5 and costs.ratio("lm", (0, 0), 16) == 1.0
    assert costs.ratio("lookup", (4, 4), 16) == unmeasured
    known("lm", (3, 15), 16, 6.0)
    known("lm", (4, 15), 16, 8.0)
    assert costs.ratio("lm", (3, 15), 16) == 3.0 and costs.ratio("lm", (4, 15), 16) == 4.0


def test_what_it_takes_a_drafter_to_catch_up():
    costs = CostModel()
    assert costs.reading("lookup", 9) == 0.0  # nothing to compare it with
    costs.learn("lm", 1, [("none", (0, 0), 2.0)])
    assert costs.reading("lm", MIN_READ) == pytest.approx(SLOWEST_READ * 2.0)  # at most
    costs.learn_reading("lm", 1000, 5.0)
    costs.learn_reading("lm", 1000, 90.0)  # a graph was captured on the way
    assert costs.reading("lm", 2000) == pytest.approx(10.0) and costs.reading("lm", 0) == 0.0
    assert costs.reading("lm", 1) == costs.reading("lm", MIN_READ) > 0  # few take as long as some more


def mixed(prompt_rows: int, total: float, key=None) -> StepRecord:
    """A step of two decoding sequences and a prompt chunk."""
    rows = 2 + prompt_rows
    return StepRecord(rows, 3, rows, 0, 0, 2, 0, 0, 0, 0, total, captured=key, prompt_rows=prompt_rows)


def test_prompt_rows_are_as_many_as_add_a_share_of_a_step():
    costs = CostModel()
    assert costs.prompt_rows(2, 0.5, most=99) == 99  # nothing is known
    costs.by_rows = {2: 1.0}
    costs.observe(mixed(16, total=1.0 + 16 * 0.1))
    assert [costs.prompt_rows(2, share, most=99) for share in (0.1, 0.5, 2.0, 50.0)] == [1, 5, 20, 99]
    assert costs.step(2) == 1.0  # a step's time without prompt rows is not learned from it


def test_prompt_rows_of_a_device_that_hardly_feels_few_of_them():
    costs = CostModel()
    costs.learn("none", 4, [("none", (0, 0), 4.0)])
    for rows, added in ((64, 0.3), (128, 0.6), (256, 2.6), (2048, 60.0)):
        costs.observe(mixed(rows, 4.0 + added, key=("none", (0, 0), 4)))
    assert 64 < costs.prompt_rows(3, 0.15, most=2048) <= 128
    assert 128 < costs.prompt_rows(3, 0.7, most=2048) <= 300
    assert 1500 < costs.prompt_rows(3, 14.0, most=2048) <= 2048


def test_rows_of_a_prompt_alone_say_nothing_of_what_they_add():
    costs = CostModel()
    costs.observe(step(rows=50, total=9.0, known=50))
    assert costs.per_prompt_row == {}


def test_of_two_drafters_the_costlier_is_charged_with_what_the_other_does_not_take():
    made, s = CostModel(), sequence([1, 2])

    def drafted(seconds: float, **levels: int) -> None:
        outcomes = [Outcome(s, DraftPlan(name, n, n), n, n, 0, 0) for name, n in levels.items()]
        made.observe(StepRecord(9, 2, 2, 4, 0, 2, 0, seconds, 0, 0, 5.0, outcomes))

    drafted(0.1, lookup=2)
    drafted(0.8, lookup=4, lm=2)  # of the lm nothing is known yet
    assert made.per_level == pytest.approx({"lookup": 0.05, "lm": 0.3})
    drafted(0.0, lookup=4, lm=2)
    assert made.per_level == pytest.approx({"lookup": 0.05, "lm": 0.27})


def test_captured_steps_have_room_for_certain_numbers_of_prompt_rows():
    costs = CostModel()
    costs.learn("none", 16, [("none", (0, 0), 4.0)])
    for rows, seconds in ((64, 4.2), (128, 5.0), (256, 8.0), (512, 15.0)):
        costs.learn_prompt_rows(16, rows, seconds)
    assert [costs.prompt_rows(9, share, most=2048) for share in (0.01, 0.1, 0.4, 1.5, 50.0)] == [
        64,
        64,
        128,
        256,
        512,
    ]
    assert costs.prompt_rows(9, 50.0, most=100) == 100
    slow = mixed(100, 7.0, ("none", (0, 0), 16))
    slow.target_s = 7.0
    for _ in range(60):  # longer texts
        costs.observe(slow)
    assert costs.prompt_rows(9, 0.4, most=2048) == 64
    assert costs.plain(16) == 4.0 and not costs.per_prompt_row


def test_more_prompt_rows_come_beside_more_sequences_where_those_take_no_longer():
    costs = CostModel()
    for size, plain in ((1, 4.0), (16, 4.2), (64, 4.6), (128, 5.2)):
        costs.learn("none", size, [("none", (0, 0), plain)])
        for rows, seconds in ((64, 1.2), (128, 2.4), (256, 4.2), (512, 9.2)):
            costs.learn_prompt_rows(size, rows, plain + seconds)
    assert [costs.prompt_rows(n, 0.4, most=2048) for n in (1, 16, 64, 128)] == [64, 64, 256, 512]
    assert [costs.prompt_rows(16, 0.4, most=2048, waiting=n) for n in (8, 16, 24, 64)] == [64, 128, 256, 512]


def test_a_pass_that_was_held_up_is_not_taken_for_its_rows() -> None:
    costs = CostModel()
    for rows, seconds in ((1, 0.06), (2, 0.04), (4, 0.05)):
        costs.learn_pass(rows, seconds)
    assert costs.curve == {1: 0.04, 2: 0.04, 4: 0.05}


def test_one_quiet_step_says_less_than_the_curve() -> None:
    """Sixteen rows were taken often, by a busy machine; seventeen once, when it was not."""
    costs, one = CostModel(), sequence([1, 2])
    costs.curve = {16: 0.075, 17: 0.083}

    def take(rows: int, seconds: float, times: int) -> None:
        for _ in range(times):
            drafted = Outcome(one, DraftPlan("lookup", 1, 1), rows - 16, rows - 16, 0, 0)
            costs.observe(StepRecord(rows, 16, 16, rows - 16, 0, 16, 0, 0, seconds, 0, seconds, [drafted]))

    take(16, 0.2, KNOWN_AFTER)
    take(17, 0.083, 1)
    assert costs.step(17) == pytest.approx(0.2 * 83 / 75)
    take(17, 0.19, 50)
    assert costs.step(17) == pytest.approx(0.19, rel=0.02)  # until it is known better


def test_the_first_plain_step_after_a_prompt_is_no_baseline_of_ragged_steps():
    costs = CostModel()
    drafting, prompt = step(rows=5, total=3.0, drafted=4), step(rows=50, total=9.0, known=50)
    prompt.prompt_rows = 50
    for record in (drafting, prompt, step(total=2.0)):
        costs.observe(record)
    assert not costs.plain_share
    costs.observe(step(total=1.5))
    assert costs.plain_share[-1, 5] == pytest.approx(0.5)


@pytest.mark.parametrize("known", [True, False])
def test_a_step_whose_drafting_sequences_have_all_gone_is_no_trouble(known: bool):
    """They were aborted while it ran, and a prompt is read in it; somebody who is not in it waits for a token."""
    costs = CostModel()
    if known:
        costs.learn("lookup", 4, [("none", (0, 0), 1.0), ("lookup", (2, 2), 1.5)])
    record = StepRecord(28, 1, 16, 0, 0, 1, 0, 0, 2.0, 0, 2.0, captured=("lookup", (2, 2), 4), prompt_rows=16)
    record.waiting = 1
    assert record.decoding == 0 < record.answering
    assert costs.plain_seconds(record) == (1.5 if known else 0.0)
