"""Which grammars the engine may be given: new ones are tried in a process of their own first (grammar_process.py).

Everything runs on the event loop. What was tried is remembered by hash, so that repeats cost nothing.
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
from typing import Any

import msgspec

from outrider.errors import InvalidRequest
from outrider.load.child import ITS_OWN_DOING
from outrider.serve.errors import ApiError, from_invalid
from outrider.serve.link import Grammar, Ready, Tried, Vocabulary, from_grammars, hear_as, pack
from outrider.verify.grammar_source import DEEPEST, STACK

log = logging.getLogger(__name__)

TRIERS = 2  # processes at most, the second only when the first is busy: a slow grammar holds up one of them
REMEMBERED = 4096
MEMORY = 1 << 30
START_SECONDS = 60.0  # to read the vocabulary
LARGE = 1 << 16  # bytes of a grammar that are not hashed on the event loop


class Grammars:
    def __init__(self, ready: Ready, seconds: float, deepest: int = DEEPEST, memory: int = MEMORY) -> None:
        self.vocabulary = Vocabulary(
            ready.tokenizer, ready.vocab, ready.eos_ids, deepest, stack=STACK // 4, memory=memory
        )
        self.seconds = seconds
        self.crashes = 0
        self._idle: list[Trier] = []
        self._free = asyncio.Semaphore(TRIERS)
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def warm_up(self) -> None:
        """Have one ready before it is needed."""
        self._begin(self.warm())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def warm(self) -> None:
        with contextlib.suppress(OSError, ApiError):
            async with self._free:
                await self._keep(await self._start())

    async def check(self, grammar: Mapping[str, Any]) -> None:
        """Raise what is wrong with a grammar, if anything is."""
        body = msgspec.msgpack.encode(grammar)
        key = await asyncio.to_thread(_digest, body) if len(body) > LARGE else _digest(body)
        if key not in self._known:
            await self._free.acquire()
            trial = self._begin(self._try(key, dict(grammar)))
            trial.add_done_callback(self._tried)
            await asyncio.shield(trial)  # who hangs up leaves it to its end: no process is lost by that
        self._known.move_to_end(key)
        if problem := self._known[key]:
            raise from_invalid(InvalidRequest(problem, "grammar"))

    def _tried(self, trial: asyncio.Task[None]) -> None:
        self._free.release()
        if not trial.cancelled():
            trial.exception()  # seen: no warning if nobody waits any more

    async def _try(self, key: bytes, grammar: dict[str, Any]) -> None:
        try:
            trier = self._idle.pop() if self._idle else await self._start()
        except OSError as error:
            log.error("no process to try a grammar in", extra={"facts": {"problem": str(error)}})
            raise ApiError(503, "the grammar cannot be tried now", code="overloaded", after=1) from None
        try:
            async with asyncio.timeout(self.seconds):
                heard = await trier.ask(Grammar(grammar, math.ceil(self.seconds)))
        except TimeoutError:  # not remembered: the machine may have been busy
            await trier.end()
            raise from_invalid(
                InvalidRequest(f"the grammar took longer than {self.seconds:g} s to compile", "grammar")
            ) from None
        except BaseException:
            await trier.end()
            raise
        if heard is None:
            self._died(key, await trier.end())
        else:
            await self._keep(trier)
            self._remember(key, heard.problem)

    async def _keep(self, trier: Trier) -> None:
        if self._closed:
            await trier.end()
        else:
            self._idle.append(trier)

    def _died(self, key: bytes, code: int) -> None:
        self.crashes += 1
        log.warning("a grammar ended the process that tried it", extra={"facts": {"exit": code}})
        problem = "grammar: it does not compile: it is too deep, or takes too much time or memory"
        if code not in ITS_OWN_DOING:
            raise from_invalid(InvalidRequest(problem, "grammar"))
        self._remember(key, problem)

    def _remember(self, key: bytes, problem: str | None) -> None:
        self._known[key] = problem
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

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
                heard = await trier.ask(self.vocabulary)
        except TimeoutError:
            heard = None
        if heard is None:
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
            return await hear_as(from_grammars, self.reader)
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
