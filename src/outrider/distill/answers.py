"""What a draft is trained on: conversations out of shards, as batches whose order is a function of seed and step.

How they came to be is for answer.py (the target's own answers) and for the server (what it kept of its traffic).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import InvalidRequest
from outrider.load.token_shards import Conversation, read_shard, shard_paths

HELD_OUT = 0.02  # of the prompts
POOL = 64  # batches' worth of conversations that are sorted by length together
ROUND = 16  # lengths of batches are multiples of it, so that few shapes occur


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B conversations of about the same length, padded with zeros to T."""

    ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64
    answered: Tensor  # [B, T] bool; False in the padding

    @property
    def tokens(self) -> int:
        """Without the padding."""
        return int(self.lengths.sum())


class Answers:
    """The conversations of one folder or several, each cut to `context` tokens; those with nothing answered in them
    are left out. Reading checks every shard against its digest, and names one that is corrupt.
    """

    def __init__(self, folders: Path | Sequence[Path], context: int = 2048) -> None:
        self.folders = [folders] if isinstance(folders, Path) else list(folders)
        self.context = context
        self.shards = [path for folder in self.folders for path in shard_paths(folder).values()]
        self._all = [cut for path in self.shards for one in read_shard(path) if (cut := _cut(one, context))]
        if not self._all:
            where = ", ".join(map(str, self.folders))
            raise InvalidRequest(f"there is nothing to train on in {where}: no shard with an answer", "out")
        held = held_out(one.prompt for one in self._all)
        self._rows = {
            part: np.array([i for i, one in enumerate(self._all) if (one.prompt in held) == part], np.int64)
            for part in (False, True)
        }
        self._lengths = np.array([len(one) for one in self._all], np.int64)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Conversation:
        return self._all[index]

    @property
    def tokens(self) -> int:
        return int(self._lengths.sum())

    @property
    def answered(self) -> int:
        """Tokens that the target wrote."""
        return sum(int(one.answered.sum()) for one in self._all)

    def rows(self, held_out: bool = False) -> list[int]:
        """Which conversations are trained on, or held out."""
        return [int(row) for row in self._rows[held_out]]

    def batches(
        self,
        rows_tokens: int,
        seed: int,
        start_step: int = 0,
        held_out: bool = False,
        epochs: int | None = None,
    ) -> Iterator[TrainBatch]:
        """Batches of at most `rows_tokens` tokens, padding counted, from a step on; without `epochs` they never end.

        Batch n is the same whether one starts at it or comes to it.
        """
        if rows_tokens < self.context:
            raise InvalidRequest(
                f"batches of {rows_tokens} tokens do not hold one conversation of {self.context} (context)",
                "batch_tokens",
            )
        epoch, skip = 0, start_step
        while epochs is None or epoch < epochs:
            batches = self._epoch(rows_tokens, seed, epoch, held_out)
            if not batches:
                return
            for rows in batches[skip:]:
                yield self.batch(rows)
            skip, epoch = max(0, skip - len(batches)), epoch + 1

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> TrainBatch:
        some = [self._all[row] for row in rows]
        width = _rounded(max(map(len, some)))
        ids = np.zeros((len(some), width), np.int64)
        answered = np.zeros((len(some), width), np.bool_)
        for row, one in enumerate(some):
            ids[row, : len(one)], answered[row, : len(one)] = one.ids, one.answered
        lengths = torch.tensor([len(one) for one in some])
        return TrainBatch(torch.from_numpy(ids), lengths, torch.from_numpy(answered))

    def _epoch(self, rows_tokens: int, seed: int, epoch: int, held_out: bool) -> list[NDArray[np.int64]]:
        """All conversations once: shuffled, then sorted by length in pools, cut into batches, and those shuffled."""
        rows = self._rows[held_out]
        if not len(rows):
            return []
        random = np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch]))
        rows = rows[random.permutation(len(rows))]
        pool = max(1, POOL * rows_tokens // max(1, int(self._lengths[rows].mean())))
        batches: list[NDArray[np.int64]] = []
        for begin in range(0, len(rows), pool):
            some = rows[begin : begin + pool]
            some = some[np.argsort(self._lengths[some], kind="stable")]
            batches += _packed(some, self._lengths[some], rows_tokens)
        return [batches[i] for i in random.permutation(len(batches))]


def _packed(rows: NDArray[np.int64], lengths: NDArray[np.int64], rows_tokens: int) -> list[NDArray[np.int64]]:
    """Rows in order of length, as many together as fit once padded. The longest begin, so that the rest is short."""
    batches, end = [], len(rows)
    while end:
        fit = max(1, rows_tokens // _rounded(int(lengths[end - 1])))
        begin = max(0, end - fit)
        batches.append(rows[begin:end])
        end = begin
    return batches


def _rounded(length: int) -> int:
    return -(-length // ROUND) * ROUND


def _cut(one: Conversation, context: int) -> Conversation | None:
    if len(one) > context:
        one = Conversation(one.ids[:context], one.answered[:context], one.task, one.temperature, one.prompt)
    return one if one.answered.any() else None


def held_out(prompts: Iterator[str]) -> frozenset[str]:
    """Prompts that are never trained on: a fixed share, by the hashes of their ids; one at least, if there are two."""
    places = {prompt: _place(prompt) for prompt in prompts}
    if len(places) < 2:
        return frozenset()
    least = min(places.values())
    return frozenset(p for p, place in places.items() if place < HELD_OUT or place == least)


def _place(prompt: str) -> float:
    """Where in [0, 1) a prompt falls."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:6], "big") / 2**48
