"""Keeps one client's input from delaying others: a rate for large bodies, and a few threads for slow work."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from outrider.serve.errors import ApiError
from outrider.serve.metrics import Metrics

RATE = 50e6  # bytes a second, over all connections
BURST = 0.4  # seconds of it at once
WORKERS = max(2, min(4, os.cpu_count() or 2))

P = ParamSpec("P")
R = TypeVar("R")


class Intake:
    """Rate limit for large bodies and for bodies of refused requests. TCP makes faster senders wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid = 0.0  # until when the bytes taken are paid for

    def take(self, size: int) -> float:
        """Seconds to wait before the next bytes are taken."""
        now = self._clock()
        self._paid = max(self._paid, now - BURST) + size / RATE
        return max(0.0, self._paid - now)


class Pool:
    """Threads for templates, tokenizing and long JSON. A client that hangs up leaves the queue."""

    def __init__(self, most_waiting: int, metrics: Metrics, workers: int = WORKERS) -> None:
        self._threads = ThreadPoolExecutor(workers, "outrider-pool")
        self._free = asyncio.Semaphore(workers)
        self._most, self._metrics = most_waiting, metrics
        self.waiting = 0

    async def run(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        if self.waiting >= self._most:
            self._metrics.count("admission_rejections", reason="preparing")
            raise ApiError(
                503, f"{self.waiting} requests wait to be read, at most {self._most} may", code="queue_full", after=1
            )  # fmt: skip
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **options))
        future.add_done_callback(self._done)
        return await asyncio.shield(future)  # a thread cannot be stopped: its place is free when it ends

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # marks it as retrieved: no warning if it is no longer awaited
