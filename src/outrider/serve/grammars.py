"""Which grammars the engine may be given: new ones are tried in a process of their own first (grammar_process.py).

Everything runs on the event loop. What was tried is remembered by hash, so that repeats cost nothing. Clients take
turns, so that one with many costly grammars holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import socket
import sys
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from outrider.errors import InvalidRequest
from outrider.load.child import ITS_OWN_DOING
from outrider.serve.errors import ApiError, from_invalid
from outrider.serve.link import Grammar, Ready, Tried, Vocabulary, from_grammars, pack, receive_event_as
from outrider.serve.metrics import Metrics
from outrider.serve.turns import Turns
from outrider.verify.grammar_source import DEEPEST, STACK

log = logging.getLogger(__name__)
T = TypeVar("T")

TRIERS = (
    2  # processes at most, the second only when the first is busy. One client keeps one of them busy at most.
)
MOST_WAITING = 64  # different grammars of one client
REMEMBERED = 4096
MEMORY = 1 << 30
START_SECONDS = 60.0  # to read the vocabulary
LARGE = 1 << 16  # bytes of a grammar that are not hashed on the event loop


@dataclass(eq=False, slots=True)
class _Trial:
    task: asyncio.Task[str | None]
    size: int
    waiters: int = 0
    begun: bool = False


class Grammars:
    def __init__(
        self, ready: Ready, seconds: float, metrics: Metrics, deepest: int = DEEPEST, memory: int = MEMORY
    ) -> None:
        self.vocabulary = Vocabulary(
            ready.tokenizer, ready.vocab, ready.eos_ids, deepest, stack=STACK // 4, memory=memory
        )
        self.seconds, self._metrics = seconds, metrics
        self.crashes = 0
        self._idle: list[Trier] = []
        self._turns = Turns(TRIERS)
        self._trials: dict[tuple[str, bytes], _Trial] = {}  # that wait or run, by client and grammar
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def warm_up(self) -> None:
        self._begin(self.warm())

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def warm(self) -> None:
        await self._turns.begin("", 0)
        try:
            with contextlib.suppress(OSError):
                await self._keep(await self._start())
        finally:
            self._turns.end("")

    async def check(self, grammar: Mapping[str, Any], client: str) -> None:
        """Raise what is wrong with a grammar, if anything is. `client`: who takes turns with others."""
        body = msgspec.msgpack.encode(grammar)
        key = await asyncio.to_thread(_digest, body) if len(body) > LARGE else _digest(body)
        if key in self._known:
            self._known.move_to_end(key)
            problem = self._known[key]
        else:
            problem = await self._tried(client, key, grammar, len(body))
        if problem:
            raise from_invalid(InvalidRequest(problem, "grammar"))

    async def _tried(self, client: str, key: bytes, grammar: Mapping[str, Any], size: int) -> str | None:
        """Wait for the trial of a grammar. Requests of one client with the same grammar share one."""
        trial = self._trials.get((client, key))
        if trial is None:
            self._make_room(client, size)
            trial = _Trial(self._begin(self._in_turn(client, key, dict(grammar), size)), size)
            self._trials[client, key] = trial
            trial.task.add_done_callback(lambda task: self._ended(client, key, task))
        trial.waiters += 1
        try:
            await asyncio.wait([trial.task])
            if trial.task.cancelled():
                raise self._full()
            return trial.task.result()
        finally:
            trial.waiters -= 1
            if not trial.waiters and not trial.begun:
                trial.task.cancel()  # one that has begun goes on to its end: no process is lost by that

    def _make_room(self, client: str, size: int) -> None:
        """Of too many grammars of one client, the largest one is refused."""
        mine = (trial for (one, _), trial in self._trials.items() if one == client)
        waiting = [trial for trial in mine if not trial.begun and not trial.task.cancelling()]
        if len(waiting) < MOST_WAITING:
            return
        largest = max(waiting, key=lambda trial: trial.size)
        if largest.size <= size:
            raise self._full()
        largest.task.cancel()

    def _full(self) -> ApiError:
        self._metrics.count("admission_rejections", reason="grammars")
        return ApiError(
            503, f"{MOST_WAITING} new grammars of yours wait to be tried, and no more may",
            code="queue_full", after=self.seconds,
        )  # fmt: skip

    def _ended(self, client: str, key: bytes, task: asyncio.Task[str | None]) -> None:
        del self._trials[client, key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: no warning if it is no longer awaited

    async def _in_turn(self, client: str, key: bytes, grammar: dict[str, Any], size: int) -> str | None:
        await self._turns.begin(client, size)
        try:
            self._trials[client, key].begun = True
            return self._known[key] if key in self._known else await self._try(key, grammar)
        finally:
            self._turns.end(client)

    async def _try(self, key: bytes, grammar: dict[str, Any]) -> str | None:
        """What is wrong with it. Remembered, unless something else may have been the cause."""
        try:
            trier = self._idle.pop() if self._idle else await self._start()
        except OSError as error:
            log.error("no process to try a grammar in", extra={"facts": {"problem": str(error)}})
            raise ApiError(503, "the grammar cannot be tried now", code="overloaded", after=1) from None
        try:
            async with asyncio.timeout(self.seconds):
                answer = await trier.ask(Grammar(grammar, math.ceil(self.seconds)))
        except TimeoutError:  # not remembered: the machine may have been busy
            await trier.end()
            return f"the grammar took longer than {self.seconds:g} s to compile"
        except BaseException:
            await trier.end()
            raise
        if answer is None:
            return self._died(key, await trier.end())
        await self._keep(trier)
        return self._remember(key, answer.problem)

    async def _keep(self, trier: Trier) -> None:
        if self._closed:
            await trier.end()
        else:
            self._idle.append(trier)

    def _died(self, key: bytes, code: int) -> str:
        self.crashes += 1
        log.warning("a grammar ended the process that tried it", extra={"facts": {"exit": code}})
        problem = "grammar: it does not compile: it is too deep, or takes too much time or memory"
        if code in ITS_OWN_DOING:
            self._remember(key, problem)
        return problem

    def _remember(self, key: bytes, problem: str | None) -> str | None:
        self._known[key] = problem
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return problem

    async def _start(self) -> Trier:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command = [sys.executable, "-P", "-m", "outrider.serve.grammar_process", str(theirs.fileno())]
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        trier = Trier(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(START_SECONDS):
                received = await trier.ask(self.vocabulary)
        except TimeoutError:
            received = None
        if received is None:
            raise OSError(f"it left with {await trier.end()}")
        return trier

    async def close(self) -> None:
        """Have them leave, and wait until they have. A trial that is still running ends its own.

        Tasks are ended here, one by one: a loop that ends all of them at once also ends those with which asyncio
        starts a process, and then waits for that process for ever.
        """
        self._closed = True
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        idle, self._idle = self._idle, []
        for trier in idle:
            await trier.end()


class Trier:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.reader, self.writer = process, reader, writer

    async def ask(self, message: Vocabulary | Grammar) -> Tried | None:
        """Its answer; None if it died of the question."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(pack(message))
            return await receive_event_as(from_grammars, self.reader)
        return None

    async def end(self) -> int:
        self.writer.close()
        if self.reader.at_eof():  # it is dying by itself: of what?
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self.process.wait(), 1)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
