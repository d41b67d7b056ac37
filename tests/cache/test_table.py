"""The cache's verbs under thousands of random orders, its books checked after each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from outrider.cache.pool import CacheFull, SlotPool
from outrider.cache.table import SlotTable

SLOTS, ROWS, WIDTH = 96, 6, 64


class TableMachine(RuleBasedStateMachine):
    """A shadow of every row: which token each entry stands for. Slots hold what was last written to them."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS, ROWS, WIDTH)
        self.texts: dict[int, list[int]] = {}
        self.written: dict[int, tuple[int, ...]] = {}  # slot -> the text up to and with its token
        self.owner: dict[int, str] = {}

    def write(self, row: int, tokens: list[int]) -> None:
        slots = self.table.extend(row, len(tokens))
        for slot, token in zip(slots, tokens, strict=True):
            self.texts[row].append(token)
            self.written[int(slot)] = tuple(self.texts[row])

    @precondition(lambda self: self.table.rows_left)
    @rule(
        target=rows, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40), owner=st.sampled_from("ab")
    )
    def open(self, tokens, owner):
        row, known = self.table.open(tokens, owner)
        assert known < len(tokens)
        self.texts[row], self.owner[row] = tokens[:known], owner
        if self.table.make_room(len(tokens) - known):
            self.write(row, tokens[known:])
        return row

    @rule(row=rows, tokens=st.lists(st.integers(0, 1), max_size=5))
    def extend(self, row, tokens):
        if len(self.texts[row]) + len(tokens) > WIDTH:
            return
        try:
            self.write(row, tokens)
        except CacheFull:
            assert self.table.pool.free < len(tokens)

    @precondition(lambda self: self.table.rows_left)
    @rule(target=rows, row=rows)
    def branch(self, row):
        twin = self.table.branch(row)
        self.texts[twin], self.owner[twin] = list(self.texts[row]), self.owner[row]
        return twin

    @rule(row=rows, data=st.data())
    def guess_and_commit(self, row, data):
        """A tree of guesses, of which one path is kept."""
        base = list(self.texts[row])
        nodes = data.draw(st.integers(0, min(8, WIDTH - len(base))))
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(nodes)]
        tokens = [data.draw(st.integers(0, 1)) for _ in range(nodes)]
        try:
            slots = self.table.extend(row, nodes)
        except CacheFull:
            return
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), i])
            self.written[int(slots[i])] = (*base, *(tokens[j] for j in paths[i]))
        path = data.draw(st.sampled_from([[], *paths]))
        self.table.commit(row, len(base), path)
        self.texts[row] = base + [tokens[j] for j in path]

    @rule(row=rows, data=st.data())
    def rearrange(self, row, data):
        """Slots of some nodes, in the order of their drafting, become those of a draft in another order."""
        base = list(self.texts[row])
        room = WIDTH - len(base)
        try:
            slots = self.table.extend(row, data.draw(st.integers(0, min(6, room))))
        except CacheFull:
            return
        numbers = data.draw(st.lists(st.integers(-1, len(slots) - 1), max_size=min(8, room)))
        order = [n for i, n in enumerate(numbers) if n < 0 or n not in numbers[:i]]
        detached = self.table.detach(row, len(base))
        assert (detached == slots).all() and self.table.lengths[row] == len(base)
        try:
            self.table.attach(row, detached, order)
        except CacheFull:
            assert self.table.pool.free < len(order)
            return
        after = self.table.entries[row, len(base) : len(base) + len(order)]
        assert [n < 0 or slots[n] == slot for n, slot in zip(order, after, strict=True)] == [True] * len(
            order
        )
        for i, slot in enumerate(after):
            self.texts[row].append(i % 2)
            self.written[int(slot)] = tuple(self.texts[row])

    @rule(row=rows, data=st.data())
    def shorten(self, row, data):
        length = data.draw(st.integers(0, len(self.texts[row])))
        self.table.commit(row, length)
        self.texts[row] = self.texts[row][:length]

    @rule(row=consumes(rows), remembered=st.booleans())
    def release(self, row, remembered):
        text = self.texts.pop(row)
        self.table.release(row, text if remembered else (), self.owner.pop(row))

    @rule()
    def forget(self):
        self.table.prefix.clear()

    @invariant()
    def books_balance(self):
        self.table.check()

    @invariant()
    def every_entry_holds_its_text(self):
        for row, text in self.texts.items():
            assert self.table.lengths[row] == len(text)
            for i, slot in enumerate(self.table.entries[row, : len(text)]):
                assert self.written[int(slot)] == tuple(text[: i + 1])


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_a_text_is_found_again_by_its_owner_only():
    table = SlotTable(256, 4, 128)
    text = list(range(50))
    row, _ = table.open(text, "ann")
    table.extend(row, 50)
    table.release(row, text, "ann")
    assert table.open(text, "ann")[1] == 48  # whole blocks of 16
    assert table.open(text, "bob")[1] == 0
    assert table.open([*text[:20], 99, *text[21:]], "ann")[1] == 16


def test_the_last_token_is_never_taken_from_the_cache():
    table = SlotTable(256, 4, 128)
    text = list(range(32))
    row, _ = table.open(text)
    table.extend(row, 32)
    table.release(row, text)
    assert table.open(text)[1] == 16


def test_one_text_may_be_read_afresh():
    table = SlotTable(256, 4, 128)
    text = list(range(50))
    row, _ = table.open(text)
    table.extend(row, 50)
    table.release(row, text)
    assert table.open(text, reuse=False)[1] == 0
    assert table.open(text)[1] == 48


def test_reuse_can_be_switched_off():
    table = SlotTable(256, 4, 128, reuse=False)
    text = list(range(32))
    row, _ = table.open(text)
    table.extend(row, 32)
    table.release(row, text)
    assert table.open(text)[1] == 0
    assert table.pool.free == 256


def test_remembered_texts_give_way_oldest_first():
    table = SlotTable(64, 4, 64)
    for first in (0, 100):
        row, _ = table.open([])
        table.extend(row, 32)
        table.release(row, list(range(first, first + 32)))
    row, _ = table.open([])
    table.extend(row, 20)
    assert table.prefix.match(list(range(100, 132)), "").size == 32
    assert table.prefix.match(list(range(32)), "").size == 0  # both blocks of the older text are gone
    table.check()


def test_blocks_that_share_slots_give_all_of_them_back():
    """Two choices of a request share the slots of their prompt, which ends in the middle of a block."""
    table = SlotTable(64, 4, 64)
    row, _ = table.open([])
    table.extend(row, 10)
    twin = table.branch(row)
    for number, one in enumerate((row, twin)):
        table.extend(one, 6)
        table.release(one, [*range(10), *range(100 * number, 100 * number + 6)])
    assert len(table.prefix.nodes) == 2 and table.used == 22
    table.prefix.clear()
    assert table.used == 0
    table.check()


def test_a_full_pool_says_so_and_loses_nothing():
    table = SlotTable(16, 2, 32)
    row, _ = table.open([])
    table.extend(row, 10)
    with pytest.raises(CacheFull):
        table.extend(row, 7)
    assert table.lengths[row] == 10
    table.check()


def test_no_room_for_a_rearranged_row_gives_all_of_it_back():
    table = SlotTable(16, 2, 32)
    row, _ = table.open([])
    table.extend(row, 14)
    with pytest.raises(CacheFull):
        table.attach(row, table.detach(row, 10), [3, -1, 0, -1, -1, -1, -1])  # 4 detached and 2 free for 7
    assert table.lengths[row] == 10 and table.pool.free == 6
    table.check()


def test_check_catches_a_leak():
    table = SlotTable(16, 2, 32)
    table.pool.take(1)
    with pytest.raises(AssertionError, match="holders"):
        table.check()


def test_check_catches_a_double_free():
    pool = SlotPool(4)
    slots = pool.take(2)
    pool.drop(slots)
    table = SlotTable(4, 1, 8)
    table.pool = pool
    pool._stack = np.array([3, 3, 1, 0], np.int32)
    with pytest.raises(AssertionError, match="free list"):
        table.check()
