"""The KV cache's pool of slots: reference counts and a free list. Knows nothing of tokens or tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class CacheFull(Exception):
    """Not enough free slots; the scheduler evicts or preempts and tries again."""


class SlotPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = np.zeros(total, np.int32)
        # A stack with the lowest slot on top, so that few sequences keep reusing the same memory.
        self._stack: Slots = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free = total
        self._order = np.empty(total, np.int32)  # scratch of `drop_each`

    def take(self, n: int) -> Slots:
        """Returns n free slots, each with one reference."""
        if n > self.free:
            raise CacheFull(f"{n} slots wanted, {self.free} free")
        taken = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self.refs[taken] = 1
        return taken

    def share(self, slots: Slots) -> None:
        """Adds one reference to each of these distinct, held slots."""
        self.refs[slots] += 1

    def drop(self, slots: Slots) -> None:
        """Drops one reference of each of these distinct slots; slots without references are free again."""
        self.refs[slots] -= 1
        loose = slots[self.refs[slots] == 0]
        self._stack[self.free : self.free + len(loose)] = loose[::-1]
        self.free += len(loose)

    def drop_each(self, some: Sequence[Slots]) -> None:
        """The same for several sets of slots, which may have slots in common."""
        slots = np.concatenate(some)
        order = np.arange(len(slots), dtype=np.int32)
        self._order[slots] = order
        if np.array_equal(self._order[slots], order):  # all distinct, as nearly always
            some = [slots]
        for one in some:
            self.drop(one)

    def free_slots(self) -> Slots:
        return self._stack[: self.free]
