"""Who moves in a step, and with how many prompt rows, over a real slot table and no model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.cache.table import SlotTable
from outrider.engine.scheduler import Scheduler
from outrider.types import Sequence
from tests.tiny import request

MANY = 1 << 20


class Room:
    """A scheduler whose steps are settled at once, and a record of what it was asked."""

    def __init__(self, step_rows: int = 64, allowed: int = MANY, slots: int = 4096, rows: int = 32) -> None:
        self.scheduler = Scheduler(SlotTable(slots, rows, 1024), step_rows)
        self.allowed = allowed
        self.asked: list[tuple[int, float]] = []
        self.waiting: list[int] = []
        self.pending: list[int] = []
        self.max_prompts = MANY
        self.behind = 1 << 20  # prompt rows of steps with background requests alone

    def add(self, name: str, prompt: int, background: bool = False) -> Sequence:
        one = replace(request(name, range(1, prompt + 1), max_tokens=100), background=background)
        sequence = Sequence(one, 0, 0, list(one.prompt_ids))
        self.scheduler.add([sequence])
        return sequence

    def rows(self, decoding: int, waited: float, waiting: int, pending: int, begun: bool) -> int:
        self.asked.append((decoding, waited))
        self.waiting.append(waiting)
        self.pending.append(pending)
        return self.allowed

    def step(self) -> dict[str, int]:
        """Known tokens by request; whoever is at its end emits one."""
        work = self.scheduler.schedule(self.rows, lambda decoding: self.behind, self.max_prompts)
        for one in work:
            one.sequence.cached += one.known
            if one.emits:
                one.sequence.tokens.append(7)
        return {one.sequence.request.id: one.known for one in work}


def decoding(room: Room, *names: str) -> None:
    for name in names:
        room.add(name, 2)
    room.step()


def test_prompts_get_the_whole_step_if_nobody_decodes():
    room = Room(allowed=4)
    room.add("a", 200)
    assert room.step() == {"a": 64}
    assert room.asked == []


def test_beside_decoding_sequences_a_step_has_as_many_prompt_rows_as_the_planner_says():
    room = Room(allowed=10)
    decoding(room, "a", "b")
    room.add("c", 25)
    assert [room.step() for _ in range(4)] == [
        {"a": 1, "b": 1, "c": 10}, {"a": 1, "b": 1, "c": 10}, {"a": 1, "b": 1, "c": 5}, {"a": 1, "b": 1, "c": 1},
    ]  # fmt: skip
    assert [asked for asked, _ in room.asked] == [2, 2, 2]  # nothing is asked where there is no prompt


def test_several_short_prompts_share_the_rows_in_the_order_they_came():
    room = Room(allowed=10)
    decoding(room, "a")
    for name in "bcd":
        room.add(name, 4)
    assert room.step() == {"a": 1, "b": 4, "c": 4, "d": 2}
    assert room.waiting == [3]
    assert room.step() == {"a": 1, "b": 1, "c": 1, "d": 2}
    assert room.waiting == [3, 1]  # half of a prompt is left
    assert room.pending == [12, 2]


def test_the_planner_knows_how_long_the_oldest_prompt_has_waited(monkeypatch: pytest.MonkeyPatch):
    room = Room(allowed=10)
    decoding(room, "a")
    first, second = room.add("b", 30), room.add("c", 30)
    first.arrived, second.arrived = 100.0, 103.0
    monkeypatch.setattr("outrider.engine.scheduler.time.perf_counter", lambda: 104.0)
    room.step()
    first.cached = 29  # it has read its prompt and decodes
    room.step()
    assert [waited for _, waited in room.asked] == [4.0, 1.0]


def test_short_prompts_overtake_a_long_one_which_keeps_at_least_half_of_the_rows():
    room = Room(allowed=16)
    decoding(room, "a")
    room.add("long", 100)
    for name in "bcd":
        room.add(name, 4)
    assert room.step() == {"a": 1, "long": 8, "b": 4, "c": 4}
    assert room.step() == {"a": 1, "b": 1, "c": 1, "long": 12, "d": 4}
    assert room.step() == {"a": 1, "b": 1, "c": 1, "d": 1, "long": 16}


def test_long_prompts_do_not_slow_one_another_down():
    room = Room(allowed=16)
    decoding(room, "a")
    for name in ("one", "two"):
        room.add(name, 40)
    assert [room.step() for _ in range(4)] == [
        {"a": 1, "one": 16}, {"a": 1, "one": 16}, {"a": 1, "one": 8, "two": 8}, {"a": 1, "one": 1, "two": 16},
    ]  # fmt: skip


def test_a_stream_of_short_prompts_cannot_hold_a_long_one_up():
    room = Room(allowed=16)
    decoding(room, "a")
    long = room.add("long", 80)
    steps = 0
    while long.cached < 80:
        for i in range(4):
            room.add(f"short {steps} {i}", 3)
        room.step()
        steps += 1
    assert steps <= 80 / 8


def test_there_is_always_a_row_for_a_prompt_that_is_partly_read():
    room = Room(step_rows=4, allowed=1)
    decoding(room, "a", "b")
    room.add("c", 3)
    assert room.step()["c"] == 1
    room.allowed = 0
    assert [room.step()["c"] for _ in range(2)] == [1, 1]
    room.add("d", 3)
    assert "d" not in room.step()  # it was not begun, so it may have to wait


def test_background_sequences_pause_while_another_request_runs_or_waits():
    room = Room()
    one, two = room.add("one", 3, background=True), room.add("two", 3, background=True)
    assert room.step() == {"one": 3, "two": 3}
    room.add("late", 3, background=True)
    user = room.add("user", 4)
    assert room.step() == {"user": 4}
    assert room.step() == {"user": 1}
    room.scheduler.finish(user)
    assert room.step() == {"one": 1, "two": 1, "late": 3}
    for sequence in (one, two):
        room.scheduler.finish(sequence)
    assert room.step() == {"late": 1} and room.scheduler.background == 1 and not room.scheduler.idle


def test_steps_of_background_sequences_are_short_once_others_have_come():
    """The next request waits for the step in hand."""
    room = Room()
    room.add("one", 40, background=True)
    room.add("two", 40, background=True)
    room.behind = 8
    assert room.step() == {"one": 40, "two": 24}  # only a batch is here
    user = room.add("user", 30)
    assert room.step() == {"user": 30}
    room.scheduler.finish(user)
    assert room.step() == {"one": 1, "two": 8}
    room.behind = 0
    assert room.step() == {"one": 1, "two": 1}  # it moves all the same
    room.scheduler.finish(room.scheduler.running[0])
    assert room.step() == {"two": 1}


@pytest.mark.parametrize("full", [{"rows": 2}, {"slots": 24}])
def test_background_sequences_are_preempted_for_another_request(full):
    """Of rows or of slots: no other request waits for them."""
    room = Room(**full)
    room.add("one", 8, background=True)
    room.add("two", 8, background=True)
    assert room.step() == {"one": 8, "two": 8}
    user = room.add("user", 8)
    assert room.step() == {"user": 8}
    assert room.scheduler.preemptions == 1
    room.scheduler.finish(user)
    room.scheduler.table.check()
    assert room.step() == {"one": 1, "two": 9}  # the younger reads its text again


def test_a_background_request_preempts_nothing():
    room = Room(rows=1)
    user = room.add("user", 4)
    room.step()
    room.scheduler.finish(user)
    room.add("first", 4, background=True)
    room.add("second", 4, background=True)
    assert room.step() == {"first": 4}
    assert room.step() == {"first": 1} and room.scheduler.preemptions == 0


def test_a_step_finishes_only_so_many_prompts():
    """Each wants logits. The others wait, and keep their order."""
    room = Room(rows=8)
    room.max_prompts = 3
    for name in "abcde":
        room.add(name, 4)
    assert room.step() == dict.fromkeys("abc", 4)
    assert room.step() == dict.fromkeys("abc", 1) | dict.fromkeys("de", 4)
