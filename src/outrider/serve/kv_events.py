"""Tells routers which blocks of prompts the KV cache holds, by ZMQ in the layout that vLLM's publisher has.

    PUB     topic, sequence number (8 bytes, big-endian), msgpack of [time, events, 0]
    ROUTER  a sequence number -> the messages from there on as PUB sent them, then one with an empty payload

Only blocks that any request may reuse are published: those of requests without a key and without a `cache_salt`.
Routers find blocks by their tokens alone, so they would take one key's blocks for another's. Runs in the engine
process; the engine's thread only puts what happened into a queue.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from outrider.cache.prefix import BLOCK
from outrider.errors import OutriderError
from outrider.serve.link import EventAddress

log = logging.getLogger(__name__)

KEPT_MESSAGES = 10_000  # for subscribers that missed some, as many as vLLM keeps
WAITING_MESSAGES = 100_000  # for a slow subscriber; later ones are dropped, and it sees a gap in the numbers
END = (-1).to_bytes(8, "big", signed=True)  # the number of the message that ends a replay
MEDIUM = "GPU"  # the tier that attention reads from, on every device: routers know no other name for it


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int = BLOCK
    lora_id: int | None = None
    medium: str = MEDIUM


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
Stored = tuple[
    int | None, list[int], Sequence[int]
]  # the parent's number, those of the blocks, and their tokens


class BlockHashes:
    """Turns the numbers of cached blocks into hashes that are the same in every process that serves this model."""

    def __init__(self, model: str) -> None:
        self._root = hashlib.blake2b(model.encode(), digest_size=8).digest()
        self._known: dict[int, bytes] = {}  # by the block's number

    def stored(self, parent: int | None, numbers: Sequence[int], tokens: Sequence[int]) -> BlockStored | None:
        """None for blocks whose parent was not published."""
        above = self._root if parent is None else self._known.get(parent)
        if above is None:
            return None
        before, hashes = above, list[int]()
        for start, number in zip(range(0, len(tokens), BLOCK), numbers, strict=True):
            own = array("q", tokens[start : start + BLOCK]).tobytes()
            above = self._known[number] = hashlib.blake2b(above + own, digest_size=8).digest()
            hashes.append(int.from_bytes(above, "big"))
        return BlockStored(hashes, None if parent is None else int.from_bytes(before, "big"), list(tokens))

    def removed(self, numbers: Sequence[int]) -> BlockRemoved | None:
        gone = [self._known.pop(number) for number in numbers if number in self._known]
        return BlockRemoved([int.from_bytes(one, "big") for one in gone]) if gone else None


class EventPublisher:
    """Watches a prefix cache (cache/prefix.py) and publishes what it holds. The first message says: nothing."""

    def __init__(self, at: EventAddress, model: str) -> None:
        """Raises if an address cannot be had."""
        self._topic, self._hashes = at.topic.encode(), BlockHashes(model)
        self._queue: queue.SimpleQueue[Stored | list[int]] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_MESSAGES)  # number and payload
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._context = zmq.Context(io_threads=1)
        self._pub = self._bound(zmq.PUB, at.publish)
        self._router = self._bound(zmq.ROUTER, at.replay) if at.replay else None
        self._publish([AllBlocksCleared()])
        threading.Thread(target=self._run, name="kv-events", daemon=True).start()
        if self._router is not None:
            threading.Thread(target=self._replay, name="kv-events-replay", daemon=True).start()

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.SNDHWM, WAITING_MESSAGES)
        made.set(zmq.LINGER, 0)
        try:
            made.bind(address)
        except zmq.ZMQError as problem:
            self._context.destroy()
            raise OutriderError(f"kv_events: cannot publish at {address}: {problem.strerror}") from None
        return made

    def stored(self, owner: str, parent: int | None, numbers: list[int], tokens: Sequence[int]) -> None:
        if not owner:
            self._queue.put((parent, numbers, tokens))

    def removed(self, numbers: list[int]) -> None:
        self._queue.put(numbers)

    def _run(self) -> None:
        while True:
            happened = [self._queue.get()]
            while not self._queue.empty():
                happened.append(self._queue.get())
            found = (
                self._hashes.stored(*one) if isinstance(one, tuple) else self._hashes.removed(one)
                for one in happened
            )
            if events := [one for one in found if one is not None]:
                self._publish(events)

    def _publish(self, events: Sequence[Event]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        number = next(self._numbers).to_bytes(8, "big")
        with self._lock:
            self._kept.append((number, payload))
        self._pub.send_multipart([self._topic, number, payload])

    def _replay(self) -> None:
        """Answers requests for messages that were missed: client, an empty frame, and the first number."""
        assert self._router is not None
        while True:
            client, *frames = self._router.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != len(END):
                continue
            with self._lock:
                missed = [one for one in self._kept if one[0] >= frames[1]]
            for number, payload in missed:
                self._router.send_multipart([client, b"", self._topic, number, payload])
            self._router.send_multipart([client, b"", b"", END, b""])
