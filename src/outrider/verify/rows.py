"""The layout of rows of logits: which sequence, which node of its draft, at which position.

A sequence's rows are its root (the last known token) and then its draft's nodes in order. All fields are flat numpy
arrays over the rows of all sequences, so that verification has no loop over positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.types import Draft, Sequence

Ints = NDArray[np.int64]

MIN_TEMPERATURE = 1e-5  # below this, logits divided by the temperature would overflow
ALIGNED = 16  # bytes: alignment that fits every dtype


class Tree(Protocol):
    """A draft, finished or still growing."""

    @property
    def tokens(self) -> Seq[int]: ...

    def path(self, node: int) -> list[int]: ...


class Keys(NamedTuple):
    """The law's inputs for every row, on the device of the logits."""

    temperature: Tensor  # divisor of the logits; 1 for greedy rows
    sampled: Tensor
    seeds: Tensor
    positions: Tensor


@dataclass(slots=True)
class LogitRows:
    """Any rows of any sequences, in any order."""

    sequences: Seq[Sequence]
    drafts: Seq[Tree]
    owner: Ints  # [R] index of the sequence
    node: Ints  # [R] index in its draft; -1 at the root
    depth: Ints  # [R] 0 at the root
    sent: Keys | None = field(default=None, init=False)
    roots: bool = field(default=False, init=False)  # whether the rows are the sequences, in order

    @property
    def position(self) -> Ints:
        """[R] absolute position of the token a row predicts."""
        known = np.array([len(s.tokens) for s in self.sequences], np.int64)
        return known if self.roots else known[self.owner] + self.depth

    def spread(self, values: Seq[float] | Seq[int], dtype: type) -> NDArray:
        """One value per sequence -> one value per row."""
        each: NDArray = np.array(values, dtype)
        return each if self.roots else each[self.owner]

    def keys(self, device: torch.device) -> Keys:
        """The law's inputs on a device; copied there once."""
        if self.sent is None or self.sent.temperature.device != device:
            temperatures = [s.request.params.temperature for s in self.sequences]
            divisors = [clamp_temperature(one) or 1.0 for one in temperatures]
            made = (
                self.spread(divisors, np.float32),
                self.spread([one > 0 for one in temperatures], bool),
                self.spread([s.seed for s in self.sequences], np.int64),
                self.position,
            )
            self.sent = Keys(*to_device_together(made, device))
        return self.sent

    def path(self, row: int) -> list[int]:
        """The draft tokens on the path to a row's node."""
        draft = self.drafts[self.owner[row]]
        return [draft.tokens[i] for i in draft.path(int(self.node[row]))]


@dataclass(slots=True)
class TreeRows(LogitRows):
    """All rows of all sequences in order, with what a walk needs."""

    drafts: Seq[Draft]
    starts: Ints  # [S] the root row of each sequence
    token: Ints  # [R] the token at this row's node; -1 at a root
    parent: Ints  # [R] the row of the parent; a root is its own


def lay_out(sequences: Seq[Sequence], drafts: Seq[Draft]) -> TreeRows:
    if not any(drafts):  # plain decoding: every row is a root
        rows = np.arange(len(drafts))
        root = np.full(len(drafts), -1, np.int64)
        made = TreeRows(sequences, drafts, rows, root, np.zeros(len(drafts), np.int64), rows, root, rows)
        made.roots = True
        return made
    if len(drafts) == 1:  # numbers of one draft need no offsets
        [draft] = drafts
        node, depth = np.arange(-1, len(draft)), np.array([0, *draft.depths])
        parent = np.array([0, *draft.parents])
        parent[1:] += 1
        token, none = np.array([-1, *draft.tokens], np.int64), np.zeros(1 + len(draft), np.int64)
        return TreeRows(sequences, drafts, none, node, depth, none[:1], token, parent)
    sizes = np.array([1 + len(d) for d in drafts], np.int64)
    starts = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    owner = np.repeat(np.arange(len(drafts)), sizes)
    node = np.arange(total) - starts[owner] - 1
    drafted = node >= 0
    token = np.full(total, -1, np.int64)
    token[drafted] = np.fromiter(chain.from_iterable(d.tokens for d in drafts), np.int64)
    parent = np.arange(total)
    parent[drafted] = (
        np.fromiter(chain.from_iterable(d.parents for d in drafts), np.int64) + starts[owner[drafted]] + 1
    )
    depth, above = drafted.astype(np.int64), parent
    while (further := drafted[above]).any():  # one iteration per level of the deepest draft
        depth += further
        above = parent[above]
    return TreeRows(sequences, drafts, owner, node, depth, starts, token, parent)


def clamp_temperature(temperature: float) -> float:
    """The divisor of the logits for a temperature; 0 for greedy."""
    return max(temperature, MIN_TEMPERATURE) if temperature else 0.0


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies to the device without waiting. A copy from pageable memory would wait."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class Fetched:
    """Numbers on their way from a device. The host waits only when it reads them."""

    def __init__(self, there: Tensor) -> None:
        self._here, self._ready = there, None
        if there.is_cuda:
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._here.copy_(there, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def numpy(self) -> Ints:
        if self._ready is not None:
            self._ready.synchronize()
        return self._here.numpy()


def put(column: Tensor, row: int, value: float) -> None:
    """Writes a number to a row. Plain assignment would copy from the host and wait for the step in flight."""
    column[row].fill_(value)


def to_device_together(values: Seq[NDArray], device: torch.device) -> list[Tensor]:
    """Copies several arrays in one transfer: for a GPU each transfer costs the host about the same."""
    if device.type != "cuda":
        return [torch.from_numpy(one) for one in values]
    ends = np.cumsum([-(-one.nbytes // ALIGNED) * ALIGNED for one in values]).tolist()
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    filled, begins = host.numpy(), [0, *ends]
    for begin, one in zip(begins, values, strict=False):
        filled[begin : begin + one.nbytes] = np.ascontiguousarray(one).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[begin : begin + one.nbytes].view(torch.from_numpy(one[:0]).dtype).view(one.shape)
        for begin, one in zip(begins, values, strict=False)
    ]
