"""Where each row of logits belongs: which sequence, which node of its draft, at which position.

A sequence's rows are its root (the last known token) and then its draft's nodes in order. Everything is a
flat numpy array over the rows of all sequences, so that what follows has no loop over positions.
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

MIN_TEMPERATURE = 1e-5  # below this logits would overflow; the likeliest token is chosen long before
ALIGNED = 16  # bytes: whatever its type, a tensor may begin there


class Tree(Protocol):
    """A draft, finished or still growing."""

    @property
    def tokens(self) -> Seq[int]: ...

    def path(self, node: int) -> list[int]: ...


class Keys(NamedTuple):
    """Of every row, where its logits are."""

    heat: Tensor  # what logits are divided by; 1 where nothing is sampled
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

    @property
    def position(self) -> Ints:
        """[R] absolute position of the token a row predicts."""
        known = np.array([len(s.tokens) for s in self.sequences], np.int64)
        return known[self.owner] + self.depth

    def spread(self, values: Seq[float] | Seq[int], dtype: type) -> NDArray:
        """One value a sequence -> one value a row."""
        return np.array(values, dtype)[self.owner]

    def keys(self, device: torch.device) -> Keys:
        """What the law goes by, on a device; sent once."""
        if self.sent is None or self.sent.heat.device != device:
            temperatures = [s.request.params.temperature for s in self.sequences]
            heat = [clamp_temperature(one) or 1.0 for one in temperatures]
            made = (
                self.spread(heat, np.float32),
                self.spread([one > 0 for one in temperatures], bool),
                self.spread([s.seed for s in self.sequences], np.int64),
                self.position,
            )
            self.sent = Keys(*to_device_together(made, device))
        return self.sent

    def path(self, row: int) -> list[int]:
        """The draft tokens that lead to a row's node."""
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
        return TreeRows(sequences, drafts, rows, root, np.zeros(len(drafts), np.int64), rows, root, rows)
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
    while (further := drafted[above]).any():  # as often as the deepest draft is deep
        depth += further
        above = parent[above]
    return TreeRows(sequences, drafts, owner, node, depth, starts, token, parent)


def clamp_temperature(temperature: float) -> float:
    """What logits are divided by where a temperature above 0 is asked for."""
    return max(temperature, MIN_TEMPERATURE) if temperature else 0.0


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for, as it would for one from pageable memory."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class Fetched:
    """Numbers that a device is asked for. The host waits for them when it reads them, not before."""

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
    """Write a number to a row. Assigning it would copy it from the host, and wait for the step in flight."""
    column[row].fill_(value)


def to_device_together(values: Seq[NDArray], device: torch.device) -> list[Tensor]:
    """The same of several, in one copy: for a GPU each takes the host as long as all of them together."""
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
