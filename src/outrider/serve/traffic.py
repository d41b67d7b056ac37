"""Keeps tokens of served requests on this machine's disk, to train drafts on: of keys marked for it, and of no others.

What is kept of a request that ended by itself: the token ids of its prompt and of its answer, which of them the target
wrote, the temperature, and a hash of the prompt. No text, no names, no times. Answers of the mode that is not exact are
left out: the target did not write them. Nothing is sent anywhere.

    DIR/                          mode 700; deleting it ends it
        key-NAME/                 one folder a key, which can be erased alone (`outrider keys forget`)
            shard-00000.safetensors   as load/token_shards.py has them
            erased                    when that was done last, in nanoseconds: what ended before is not written

A request costs the event loop one `put_nowait`. A thread writes; if it cannot keep up, requests are dropped
and counted; if it cannot write, nothing more is kept until the server is started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np

from outrider.errors import OutriderError
from outrider.load.token_shards import SHARD_TOKENS, Conversation, shard_path, shard_paths, write_shard
from outrider.serve.private_folder import locked, make_private

log = logging.getLogger(__name__)

QUEUED = 1024  # answers that may wait for the thread
WRITE_SECONDS = 30.0  # between two writes, unless a shard is full
CLOSE_SECONDS = 5.0  # for the last write
SHARES = 8  # a shard is no more than this part of what may be kept
TOKEN_BYTES, ENTRY_BYTES, SHARD_BYTES = 5, 160, 4096  # of a shard, rounded up
LONGEST_NAME = 100  # of a folder; longer ones are hashed
TASK, ERASED = "traffic", "erased"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt, as the event loop hands it over."""

    key: str  # by name
    ended: int  # nanoseconds since 1970
    prompt: list[int]
    tokens: list[int]
    temperature: float

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass(slots=True)
class OpenShard:
    """The last shard of a key, written anew with more in it until it is full."""

    number: int = -1  # not written yet
    answers: list[Answer] = field(default_factory=list)
    fresh: int = 0  # of those, the last, that are not on disk
    tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.fresh += 1
        self.tokens += answer.size

    def cut_to(self, answers: list[Answer]) -> int:
        """Have these left, in a shard of their own. How many others there were that are on no disk."""
        fresh = min(self.fresh, len(answers))
        lost, self.fresh, self.answers, self.number = self.fresh - fresh, fresh, answers, -1
        self.tokens = sum(one.size for one in answers)
        return lost


class TrafficKeeper:
    def __init__(self, folder: Path, most_bytes: int, write_seconds: float = WRITE_SECONDS) -> None:
        self.folder, self.most_bytes, self.write_seconds = folder, most_bytes, write_seconds
        self.shard_tokens = min(SHARD_TOKENS, most_bytes // SHARES // TOKEN_BYTES)
        self.keeping = True
        self.counts = Counter(kept=0, queue=0, off=0, unwritten=0, erased=0)  # what was kept, and why not
        self.bytes = 0
        make_private(folder, "traffic")
        try:
            with locked(folder):
                self._prune(0)
        except OSError as problem:
            raise OutriderError(f"traffic cannot be kept in {folder}: {problem.strerror}") from None
        self._open: dict[str, OpenShard] = {}
        self._queue: queue.Queue[Answer | None] = queue.Queue(QUEUED)
        self._made: set[Path] = set()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def keep(self, key: str, prompt: list[int], tokens: list[int], temperature: float) -> None:
        """From the event loop; never waits."""
        if not self.keeping:
            self.counts["off"] += 1
            return
        try:
            self._queue.put_nowait(Answer(key, time.time_ns(), prompt, tokens, temperature))
        except queue.Full:
            self.counts["queue"] += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        due, more = time.monotonic() + self.write_seconds, True
        while more:
            try:
                answer = self._queue.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._write_all()
                due = time.monotonic() + self.write_seconds
                continue
            more = answer is not None
            if answer is not None:
                self._hold(answer)
        self._write_all()

    def _hold(self, answer: Answer) -> None:
        shard = self._open.setdefault(answer.key, OpenShard())
        shard.add(answer)
        if shard.tokens >= self.shard_tokens:
            self._try_write([answer.key])
            self._open.pop(answer.key, None)

    def _write_all(self) -> None:
        self._try_write([key for key, shard in self._open.items() if shard.fresh])

    def _try_write(self, keys: list[str]) -> None:
        if not keys or not self.keeping:
            return
        try:
            with locked(self.folder):
                for key in keys:
                    self._write(key)
        except (OSError, OutriderError) as problem:
            self.keeping = False
            self.counts["unwritten"] += sum(shard.fresh for shard in self._open.values())
            self._open.clear()
            log.warning("traffic is kept no longer, until the server is started again: %s", problem)

    def _write(self, key: str) -> None:
        shard, folder = self._open[key], self.folder / folder_name(key)
        self._drop_erased(shard, folder)
        if not shard.fresh:
            return
        self._prune(TOKEN_BYTES * shard.tokens + ENTRY_BYTES * len(shard.answers) + SHARD_BYTES)
        if shard.number < 0:
            shard.number = self._next_number()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._made.add(folder)
        path = write_shard(folder, shard.number, [_conversation(one) for one in shard.answers])
        path.chmod(0o600)
        self.counts["kept"] += shard.fresh
        shard.fresh = 0
        self._prune(0)

    def _drop_erased(self, shard: OpenShard, folder: Path) -> None:
        """What was erased, by `forget` or by hand, must not come back from memory."""
        left = shard.answers
        if folder in self._made and not folder.exists():
            left = []
        elif shard.number >= 0 and not shard_path(folder, shard.number).exists():
            left = left[len(left) - shard.fresh :]
        since = _erased(folder)
        left = [one for one in left if one.ended > since]
        if len(left) < len(shard.answers):
            self.counts["erased"] += shard.cut_to(left)
            self._made.discard(folder)

    def _next_number(self) -> int:
        """After every shard of every key: a lower number is an older shard."""
        return max((number for number, _ in self._shards()), default=-1) + 1

    def _shards(self) -> list[tuple[int, Path]]:
        folders = (folder for folder in self.folder.iterdir() if folder.is_dir())
        return sorted(one for folder in folders for one in shard_paths(folder).items())

    def _prune(self, room: int) -> None:
        """Let the oldest shards go until there is this much room."""
        shards = self._shards()
        sizes = {path: path.stat().st_size for _, path in shards}
        self.bytes = sum(sizes.values())
        for _, path in shards:
            if self.bytes + room <= self.most_bytes:
                return
            path.unlink()
            self.bytes -= sizes[path]


def forget(folder: Path, key: str) -> int:
    """Erase what was kept of a key, also what a running server still holds of it. How many shards that were."""
    if not folder.is_dir():
        raise OutriderError(f"{folder} is no folder; name the one that the server's --keep-traffic has")
    own, erased = folder / folder_name(key), 0
    try:
        with locked(folder):
            shards = list(shard_paths(own).values())
            for path in [*shards, *own.glob(".*.part")]:  # first: it makes room for the mark
                path.unlink()
            erased = len(shards)
            own.mkdir(mode=0o700, exist_ok=True)
            (own / ERASED).write_text(str(time.time_ns()))
    except OSError as problem:
        raise OutriderError(
            f"{erased} shards are erased, but {problem.filename or own / ERASED} cannot be written: "
            f"{problem.strerror}; a running server may still write what it holds of this key: try again"
        ) from None
    return erased


def folder_name(key: str) -> str:
    data = key.encode("utf-8", "surrogatepass")
    plain = quote(data, safe=" ")
    if len(plain) <= LONGEST_NAME:
        return f"key-{plain}"
    return f"key-={hashlib.sha256(data).hexdigest()}"  # no quoted name holds the sign


def _conversation(answer: Answer) -> Conversation:
    ids = np.array([*answer.prompt, *answer.tokens], np.int32)
    prompt = hashlib.sha256(ids[: len(answer.prompt)].tobytes()).hexdigest()[:16]
    wrote = np.arange(len(ids)) >= len(answer.prompt)
    return Conversation(ids, wrote, TASK, answer.temperature, prompt)


def _erased(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / ERASED).read_text())
    return 0
