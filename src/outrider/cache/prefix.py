"""The prefix cache: which slots hold the keys and values of known prefixes. Blocks of 16 tokens in a tree.

A block is found by its parent and its tokens, not by a hash, so two texts are never confused. Each owner has a root of
its own, so the prompts of one owner neither speed up nor reveal those of another. The index holds one reference to the
slots of its blocks and evicts the least recently used blocks on request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.cache.pool import SlotPool, Slots

BLOCK = 16

Key = tuple[int | str, tuple[int, ...]]  # parent's number (or the owner, at the root) and the block's tokens


@dataclass(slots=True)
class Node:
    number: int
    slots: Slots


class PrefixWatch(Protocol):
    """Learns which blocks the index holds, by their numbers."""

    def stored(self, owner: str, parent: int | None, numbers: list[int], tokens: Sequence[int]) -> None:
        """`tokens`: those of the blocks, which follow `parent`, or begin a text where that is None."""
        ...

    def removed(self, numbers: list[int]) -> None: ...


class PrefixIndex:
    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.watch: PrefixWatch | None = None
        self.nodes: OrderedDict[Key, Node] = OrderedDict()  # least recently used first
        self._made = 0

    def match(self, tokens: Sequence[int], owner: str) -> Slots:
        """Returns the slots of the longest cached prefix of `tokens`, in whole blocks. The caller must share them."""
        keys = self._walk(tokens, owner)
        self._touch(keys)
        found = [self.nodes[key].slots for key in keys]
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def insert(self, tokens: Sequence[int], slots: Slots, owner: str) -> None:
        """Records that `slots[i]` holds token i of this text. Known blocks stay unchanged."""
        keys = self._walk(tokens, owner)
        parent: int | str = self.nodes[keys[-1]].number if keys else owner
        first = self._made + 1
        known, end = len(keys) * BLOCK, len(tokens) // BLOCK * BLOCK
        added = slots[known:end].copy()
        self.pool.share(added)
        for start in range(known, end, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            self._made += 1
            node = Node(self._made, added[start - known : start - known + BLOCK])
            self.nodes[key] = node
            keys.append(key)
            parent = node.number
        self._touch(keys)
        if self.watch is not None and end > known:
            before = self.nodes[keys[known // BLOCK - 1]].number if known else None
            self.watch.stored(owner, before, [*range(first, self._made + 1)], tokens[known:end])

    def evict(self, wanted: int) -> None:
        """Evicts blocks, least recently used first, until `wanted` slots are free or the index is empty."""
        while (lacking := wanted - self.pool.free) > 0 and self.nodes:
            # No more at once than are needed if all of their slots become free.
            count = min(-(-lacking // BLOCK), len(self.nodes))
            evicted = [self.nodes.popitem(last=False)[1] for _ in range(count)]
            self.pool.drop_each([node.slots for node in evicted])
            if self.watch is not None:
                self.watch.removed([node.number for node in evicted])

    def clear(self) -> None:
        self.evict(self.pool.total + 1)

    def _walk(self, tokens: Sequence[int], owner: str) -> list[Key]:
        keys: list[Key] = []
        parent: int | str = owner
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            node = self.nodes.get(key)
            if node is None:
                break
            keys.append(key)
            parent = node.number
        return keys

    def _touch(self, keys: list[Key]) -> None:
        """Marks leaves first, so that the least recently used block is always a leaf."""
        for key in reversed(keys):
            self.nodes.move_to_end(key)
