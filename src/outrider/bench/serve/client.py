"""The load itself, in one process: requests kept in flight (closed loop) or sent when they are due (open loop).

The client's own lag is reported too: how much later than asked for the event loop wakes up. It tells a slow server from
a client that cannot keep up.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.serve.answer import Sample, Stream
from outrider.bench.serve.asked import Asked
from outrider.bench.serve.conversations import Conversation, Conversations
from outrider.bench.serve.http import NotHttp, Pool, Server

PROBE = 0.01  # seconds between looks at the clock
TELL = 0.25  # seconds between signs of progress

Tell = Callable[[int], None]  # requests that have ended


@dataclass(frozen=True, slots=True)
class Load:
    """What one round asks of one server. With `arrivals` the loop is open, else `concurrency` are in flight."""

    server: Server
    asked: Asked
    concurrency: int = 1
    arrivals: Sequence[float] | None = None
    requests: int | None = None
    seconds: float | None = None  # after which no request is begun
    first: int = 0  # number of the first request
    timeout: float = 600.0
    conversations: Conversations | None = None  # `requests` of them

    def share(self, index: int, count: int) -> tuple[int, Iterator[int]]:
        """Of one of `count` processes: requests in flight, and the numbers it asks, from 0."""
        numbers = (
            itertools.count(index, count) if self.requests is None else range(index, self.requests, count)
        )
        return (self.concurrency - index + count - 1) // count, iter(numbers)


@dataclass(slots=True)
class Drove:
    """The results of one load in one process."""

    samples: list[Sample] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # seconds the event loop woke up too late
    cpu: float = 0.0  # seconds of this process
    seconds: float = 0.0
    connections: int = 0


def failure(problem: BaseException) -> tuple[str, str]:
    """Kind of an error and its words."""
    if isinstance(problem, TimeoutError):
        return "timed out", str(problem) or "no answer in time"
    if isinstance(problem, socket.gaierror):
        return "no such host", str(problem.strerror)
    if isinstance(problem, ConnectionRefusedError):
        return "connection refused", "no server listens there"
    if isinstance(problem, ssl.SSLError):
        return "TLS failed", str(problem)
    if isinstance(problem, NotHttp):
        return "no HTTP", str(problem)
    if isinstance(problem, ConnectionError):
        return "connection lost", str(problem) or type(problem).__name__
    return "network error", str(problem)


class Client:
    """Asks one server, from one event loop."""

    def __init__(self, server: Server, asked: Asked, timeout: float) -> None:
        self.pool = Pool(server)
        self.asked, self.timeout = asked, timeout
        self.begin = time.perf_counter()  # of the round

    async def ask(self, number: int, due: float | None = None) -> Sample:
        return (await self._ask(number, self.asked.body(number), due))[0]

    async def turn(self, talk: Conversation) -> tuple[Sample, bool]:
        """The next turn of a conversation, and whether another one follows. None follows a failure."""
        turn = talk.turn
        sample, answer = await self._ask(talk.number, talk.body())
        sample.turn = turn
        return sample, not sample.error and talk.goes_on(answer)

    async def _ask(self, number: int, body: dict[str, Any], due: float | None = None) -> tuple[Sample, str]:
        request = self.pool.server.request("POST", self.asked.path, body)
        start = time.perf_counter()
        since = start - self.begin
        sample = Sample(number, since if due is None else due, since)
        stream = Stream(sample, start)
        try:
            async with asyncio.timeout(self.timeout):
                await self.pool.ask(request, stream)
        except (OSError, ValueError) as problem:
            sample.error, sample.said = failure(problem)
        stream.finish(time.perf_counter())
        return sample, stream.text


async def drive(load: Load, index: int, count: int, ready: Callable[[], float], tell: Tell) -> Drove:
    """One process's share of a load. `ready` is called with connections open, and says when all begin, by the clock."""
    drove, client = Drove(), Client(load.server, load.asked, load.timeout)
    kept = Kept(drove, tell)
    if load.arrivals is None:
        await client.pool.fill(load.share(index, count)[0])
    client.begin = begin = ready()
    await asyncio.sleep(max(0.0, begin - time.perf_counter()))
    spent = time.process_time()
    probe = asyncio.create_task(_probe(drove.lags))
    try:
        loop = _talking if load.conversations else _closed if load.arrivals is None else _open
        await loop(load, client, index, count, kept.add)
    finally:
        probe.cancel()
        client.pool.close()
    drove.cpu, drove.seconds = time.process_time() - spent, time.perf_counter() - begin
    drove.connections = client.pool.opened
    return drove


class Kept:
    """Keeps samples, and says how many there are now and then."""

    def __init__(self, drove: Drove, tell: Tell) -> None:
        self.drove, self.tell, self.last = drove, tell, 0.0

    def add(self, sample: Sample) -> None:
        self.drove.samples.append(sample)
        if (now := time.perf_counter()) - self.last > TELL:
            self.last = now
            self.tell(len(self.drove.samples))


async def _closed(load: Load, client: Client, index: int, count: int, keep: Callable[[Sample], None]) -> None:
    slots, numbers = load.share(index, count)

    async def slot() -> None:
        for number in numbers:
            if load.seconds is not None and time.perf_counter() - client.begin >= load.seconds:
                return
            keep(await client.ask(load.first + number))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(slots):
            tasks.create_task(slot())


async def _talking(
    load: Load, client: Client, index: int, count: int, keep: Callable[[Sample], None]
) -> None:
    """A closed loop over conversations: every one of them has its turn before one has its next."""
    assert load.conversations is not None
    slots, numbers = load.share(index, count)
    waiting = deque(Conversation(client.asked, load.conversations, load.first, number) for number in numbers)

    async def slot() -> None:
        while waiting and (load.seconds is None or time.perf_counter() - client.begin < load.seconds):
            talk = waiting.popleft()
            sample, goes_on = await client.turn(talk)
            keep(sample)
            if goes_on:
                waiting.append(talk)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(slots):
            tasks.create_task(slot())


async def _open(load: Load, client: Client, index: int, count: int, keep: Callable[[Sample], None]) -> None:
    assert load.arrivals is not None

    async def one(number: int, due: float) -> None:
        keep(await client.ask(load.first + number, due))

    async with asyncio.TaskGroup() as tasks:
        for number, due in list(enumerate(load.arrivals))[index::count]:
            if (wait := client.begin + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(number, due))


async def _probe(lags: list[float]) -> None:
    while True:
        asleep = time.perf_counter()
        await asyncio.sleep(PROBE)
        lags.append(time.perf_counter() - asleep - PROBE)
