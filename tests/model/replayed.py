"""Stands in for CUDA graphs where there are none: what was captured is run again, and exchanges what a graph would."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from outrider.model.parallel import Ranks


class Line:
    """A channel between threads."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        self.messages.put(message)

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self.messages.get, object())

    def reason(self, error: BaseException) -> BaseException:
        return RuntimeError(f"the group is over: {error}")


class Nowhere(Line):
    """While rank 0 replays: the others know what comes."""

    def send(self, message: bytes) -> None:
        pass


class Again:
    """A graph of rank 0: calls that broadcast what they are given, and announce nothing."""

    def __init__(self, group: Ranks, work: Callable[[], Any]) -> None:
        self.group, self.work, self.result = group, work, work()

    def replay(self) -> None:
        line, self.group.channel, self.group._recording = self.group.channel, Nowhere(), True
        try:
            for held, found in zip(_tensors(self.result), _tensors(self.work()), strict=True):
                held.copy_(found)
        finally:
            self.group.channel, self.group._recording = line, False


def captured(group: Ranks, work: Callable[[], Any]) -> tuple[Again, Any]:
    """What `Ranks.recorded` asks for."""
    graph = Again(group, work)
    return graph, graph.result


def _tensors(result: Any) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]


class Messages:
    """What rank 0 announces to another rank, whose graphs are the messages that it captured from."""

    def __init__(self, line: Iterator[bytes | None]) -> None:
        self.line, self.again = line, list[bytes]()  # what is replayed
        self.heard: list[list[bytes]] = []  # of recordings that run
        self.calls: list[str] = []

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        message = self.again.pop(0) if self.again else next(self.line)
        if message is None:
            raise StopIteration
        self.calls.append(json.loads(message.partition(b"\n")[0])[0])
        for heard in self.heard:
            heard.append(message)
        return message

    def capture(self, run: Callable[[], None]) -> tuple[Any, None]:
        self.heard.append([])
        run()
        heard = self.heard.pop()

        return HeardAgain(self, heard, run), None


class HeardAgain:
    """A graph of another rank."""

    def __init__(self, messages: Messages, heard: list[bytes], run: Callable[[], None]) -> None:
        self.messages, self.heard, self.run = messages, heard, run

    def replay(self) -> None:
        self.messages.again = list(self.heard)
        self.run()
        assert not self.messages.again
