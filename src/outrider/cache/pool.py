"""The KV cache's pool of slots: reference counts and a free list. Knows nothing of tokens or tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]


class CacheFull(Exception):
    """Not enough free slots; the scheduler makes room and tries again."""


class SlotPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = np.zeros(total, np.int32)
        # A stack, lowest slot on top, so that a quiet machine keeps using the same, cache-warm memory.
        self._stack: Slots = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free = total

    def take(self, n: int) -> Slots:
        """n slots that nobody holds; the caller holds them now."""
        if n > self.free:
            raise CacheFull(f"{n} slots wanted, {self.free} free")
        taken = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self.refs[taken] = 1
        return taken

    def share(self, slots: Slots) -> None:
        """One more holder for each of these (distinct, held) slots."""
        self.refs[slots] += 1

    def drop(self, slots: Slots) -> None:
        """One holder fewer for each of these distinct slots; those nobody holds are free again."""
        self.refs[slots] -= 1
        loose = slots[self.refs[slots] == 0]
        self._stack[self.free : self.free + len(loose)] = loose[::-1]
        self.free += len(loose)

    def free_slots(self) -> Slots:
        return self._stack[: self.free]
