"""The KV cache's slot table: a slot for every token of every sequence. Verbs: open, extend, branch, detach,
attach, commit, release.

A sequence is a row of one table; entry i is the slot of its token i. The model reads keys and values through the table,
so a commit moves entries and never keys. A chain rolls back by shortening the row. A tree commits by moving the entries
of its accepted path to the front. Rows may share slots: a slot is written once, when its token is fed, and a branch
writes further tokens to slots of its own.

Keys and values themselves are in store.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.cache.pool import CacheFull, SlotPool, Slots
from outrider.cache.prefix import PrefixIndex


class SlotTable:
    def __init__(
        self, slots: int, sequences: int, context: int, reuse: bool = True, pinned: bool = False
    ) -> None:
        self.pool = SlotPool(slots)
        self.prefix = PrefixIndex(self.pool)
        self.reuse = reuse
        self.tensor = torch.zeros(sequences, context, dtype=torch.int32, pin_memory=pinned)
        self.entries = self.tensor.numpy()  # the same memory
        self.lengths = np.zeros(sequences, np.int64)
        self._idle = list(range(sequences - 1, -1, -1))
        self._open: set[int] = set()

    def open(self, tokens: Sequence[int], owner: str = "", reuse: bool = True) -> tuple[int, int]:
        """Opens a row for a text. Returns the row and how many of its first tokens are cached already.

        The last token is never among them: its logits are needed, so it must be fed.
        """
        row = self._claim()
        if not (reuse and self.reuse):
            return row, 0
        known = self.prefix.match(tokens[: len(tokens) - 1], owner)
        self.pool.share(known)
        self.entries[row, : len(known)] = known
        self.lengths[row] = len(known)
        return row, len(known)

    def extend(self, row: int, n: int) -> Slots:
        """Appends n fresh slots to the row. Evicts cached prefixes if necessary."""
        if n > self.pool.free:
            self.prefix.evict(n)
        taken = self.pool.take(n)
        end = self.lengths[row]
        self.entries[row, end : end + n] = taken
        self.lengths[row] = end + n
        return taken

    def extend_all(self, rows: Slots, n: int) -> Slots:
        """Appends n fresh slots to each of the rows; returns them as [rows, n]."""
        if n * len(rows) > self.pool.free:
            self.prefix.evict(n * len(rows))
        taken = self.pool.take(n * len(rows)).reshape(len(rows), n)
        ends = self.lengths[rows]
        self.entries[rows[:, None], ends[:, None] + np.arange(n)] = taken
        self.lengths[rows] = ends + n
        return taken

    def branch(self, row: int) -> int:
        """Opens a second row over the same slots."""
        twin = self._claim()
        n = self.lengths[row]
        self.entries[twin, :n] = self.entries[row, :n]
        self.lengths[twin] = n
        self.pool.share(self.entries[row, :n])
        return twin

    def commit(self, row: int, length: int, path: Sequence[int] = (), drafted: int | None = None) -> None:
        """Commits a verified draft: keeps the first `length` entries and, of the `drafted` entries after them, those in
        `path`. The others are dropped.

        Entries after these belong to a later step that is in flight, and move up. Without `drafted` there are none.
        """
        if drafted is not None and len(path) == drafted:  # everything was accepted: no entry moves
            return
        end = self.lengths[row]
        last = end if drafted is None else length + drafted
        if len(path) == last - length:
            return
        if last == end and (not path or path[-1] == len(path) - 1):  # nothing moves: the rest is dropped
            self.lengths[row] = length + len(path)
            self.pool.drop(self.entries[row, length + len(path) : end].copy())
            return
        nodes = self.entries[row, length:last].copy()
        later = self.entries[row, last:end].copy()
        kept = nodes[list(path)]
        lost = np.ones(len(nodes), bool)
        lost[list(path)] = False
        after = length + len(kept)
        self.entries[row, length:after] = kept
        self.entries[row, after : after + len(later)] = later
        self.lengths[row] = after + len(later)
        self.pool.drop(nodes[lost])

    def detach(self, row: int, length: int) -> Slots:
        """Removes the slots after the first `length` entries from the row. They stay held, to be attached again."""
        slots = self.entries[row, length : self.lengths[row]].copy()
        self.lengths[row] = length
        return slots

    def attach(self, row: int, slots: Slots, order: Sequence[int]) -> None:
        """Appends detached slots to the row in the given `order`. -1 stands for any slot: an unused detached one, or a
        fresh one. Slots that remain are released. If there are too few free slots, all detached ones are released.
        """
        chosen = [number for number in order if number >= 0]
        spare = np.delete(slots, chosen)
        others = len(order) - len(chosen)
        fresh = max(others - len(spare), 0)
        if not self.make_room(fresh):
            self.pool.drop(slots)
            raise CacheFull(f"{fresh} slots wanted, {self.pool.free} free")
        self.pool.drop(spare[others:])
        left = iter([*spare[:others], *self.pool.take(fresh)])
        end = self.lengths[row]
        self.entries[row, end : end + len(order)] = [slots[i] if i >= 0 else next(left) for i in order]
        self.lengths[row] = end + len(order)

    def release(self, row: int, tokens: Sequence[int] = (), owner: str = "") -> None:
        """Closes the row. `tokens`, the text of its slots, stay in the prefix cache for later requests."""
        held = self.entries[row, : self.lengths[row]].copy()
        self.remember(row, tokens, owner)
        self.pool.drop(held)
        self.lengths[row] = 0
        self._open.remove(row)
        self._idle.append(row)

    def remember(self, row: int, tokens: Sequence[int], owner: str) -> None:
        """Adds this row's text to the prefix cache of its owner."""
        if self.reuse and tokens:
            length = min(len(tokens), int(self.lengths[row]))
            self.prefix.insert(tokens[:length], self.entries[row, :length], owner)

    def make_room(self, n: int) -> bool:
        """Evicts cached prefixes until n slots are free; returns whether they are."""
        self.prefix.evict(n)
        return self.pool.free >= n

    @property
    def rows_left(self) -> int:
        return len(self._idle)

    @property
    def used(self) -> int:
        return self.pool.total - self.pool.free

    @property
    def held(self) -> int:
        """Number of entries of open rows, without the prefix cache."""
        return int(self.lengths.sum())

    def check(self) -> None:
        """Raises unless every slot has exactly as many holders as its reference count."""
        held = np.zeros(self.pool.total, np.int64)
        for row in self._open:
            np.add.at(held, self.entries[row, : self.lengths[row]], 1)
        for node in self.prefix.nodes.values():
            np.add.at(held, node.slots, 1)
        if not np.array_equal(held, self.pool.refs):
            wrong = np.flatnonzero(held != self.pool.refs)
            raise AssertionError(
                f"slot {wrong[0]}: {held[wrong[0]]} holders, count {self.pool.refs[wrong[0]]}"
            )
        free = self.pool.free_slots()
        if (np.bincount(free, minlength=1) > 1).any() or self.pool.refs[free].any():
            raise AssertionError("the free list holds a slot twice or one that is in use")
        if len(free) + np.count_nonzero(held) != self.pool.total:
            raise AssertionError("a slot is neither free nor held")

    def _claim(self) -> int:
        if not self._idle:
            raise CacheFull("every row of the table is taken")
        row = self._idle.pop()
        self._open.add(row)
        self.lengths[row] = 0
        return row
