"""The KV cache's slot table: a slot for every token of every sequence. Verbs: open, extend, branch, detach,
attach, commit, release.

A sequence is a row of one table; entry i is the slot of its token i, so the model finds everything by table
and slot and never moves a key. A chain rolls back by shortening; a tree commits by moving the entries of its
accepted path to the front. Slots are shared freely between rows: a token's slot is written once, when the
token is fed, and a branch that goes on writes to slots of its own.

Nothing here touches keys or values; store.py holds those.
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
        """A row for a text about to be read, and how many of its first tokens are already there.

        The last token is never among them: its logits are wanted, so it must be fed.
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
        """n fresh slots at the end of the row, evicting remembered prefixes if need be."""
        if n > self.pool.free:
            self.prefix.evict(n)
        taken = self.pool.take(n)
        end = self.lengths[row]
        self.entries[row, end : end + n] = taken
        self.lengths[row] = end + n
        return taken

    def extend_all(self, rows: Slots, n: int) -> Slots:
        """The same for many rows at once: [rows, n] fresh slots."""
        if n * len(rows) > self.pool.free:
            self.prefix.evict(n * len(rows))
        taken = self.pool.take(n * len(rows)).reshape(len(rows), n)
        ends = self.lengths[rows]
        self.entries[rows[:, None], ends[:, None] + np.arange(n)] = taken
        self.lengths[rows] = ends + n
        return taken

    def branch(self, row: int) -> int:
        """A second row over the same slots."""
        twin = self._claim()
        n = self.lengths[row]
        self.entries[twin, :n] = self.entries[row, :n]
        self.lengths[twin] = n
        self.pool.share(self.entries[row, :n])
        return twin

    def commit(self, row: int, length: int, path: Sequence[int] = (), drafted: int | None = None) -> None:
        """Commit a verified draft: keep the first `length` entries and, of the `drafted` after them, those in `path`.
        The others are dropped.

        Entries further on belong to a pass that has begun meanwhile, and move up. By default there are none.
        """
        if drafted is not None and len(path) == drafted:  # all of them stay where they are
            return
        end = self.lengths[row]
        last = end if drafted is None else length + drafted
        if len(path) == last - length:
            return
        nodes = self.entries[row, length:last].copy()
        rest = self.entries[row, last:end].copy()
        kept = nodes[list(path)]
        lost = np.ones(len(nodes), bool)
        lost[list(path)] = False
        after = length + len(kept)
        self.entries[row, length:after] = kept
        self.entries[row, after : after + len(rest)] = rest
        self.lengths[row] = after + len(rest)
        self.pool.drop(nodes[lost])

    def detach(self, row: int, length: int) -> Slots:
        """Take the slots behind the first `length` entries out of the row. They stay held, to be attached again."""
        slots = self.entries[row, length : self.lengths[row]].copy()
        self.lengths[row] = length
        return slots

    def attach(self, row: int, slots: Slots, order: Sequence[int]) -> None:
        """Put detached slots at the end of the row, those numbered in `order` and in that order. Where it says -1 comes
        any other: one that is left over, or a fresh one. What is left over then is given back; if there are too few,
        all of it is.
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
        """Give the row back. `tokens`, the text its slots hold, stay findable for a later request."""
        held = self.entries[row, : self.lengths[row]].copy()
        self.remember(row, tokens, owner)
        self.pool.drop(held)
        self.lengths[row] = 0
        self._open.remove(row)
        self._idle.append(row)

    def remember(self, row: int, tokens: Sequence[int], owner: str) -> None:
        """Let later requests of the same owner start from this row's text."""
        if self.reuse and tokens:
            length = min(len(tokens), int(self.lengths[row]))
            self.prefix.insert(tokens[:length], self.entries[row, :length], owner)

    def make_room(self, n: int) -> bool:
        """Whether n slots are free, once remembered prefixes have been given up as far as needed."""
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
        """Entries of open rows; what is only remembered for later requests does not count."""
        return int(self.lengths.sum())

    def check(self) -> None:
        """Every slot is free or held, by exactly as many holders as its count says. Raises if not."""
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
