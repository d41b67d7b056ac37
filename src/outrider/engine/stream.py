"""The events of one request as they come: what `LLM.stream` returns, for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from functools import partial

from outrider.engine.driver import Driver
from outrider.errors import InvalidRequest, OutriderError, stopped
from outrider.types import Event, Request

LOOK_SECONDS = 0.5  # between two looks at an engine that is silent


class Inbox:
    """Events on their way from the engine's thread to the reader. The driver holds it, and never the stream: a stream
    without a reader must be freed.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self.wake: Callable[[], object] | None = None  # an event loop that waits

    def put(self, event: Event | BaseException) -> None:
        self.events.put(event)
        if self.wake is not None:
            self.wake()


class Stream:
    """An iterator and an asynchronous iterator. The request starts with the first event that is asked for. Leaving the
    loop, `close`, `aclose` or cancelling the reader's task aborts it.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        self._driver, self._request = driver, request
        self._inbox = Inbox()
        self._left = request.params.n  # choices that have not ended
        self._started = False

    @property
    def request_id(self) -> str:
        return self._request.id

    def __iter__(self) -> Stream:
        return self

    def __aiter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        if not self._left:
            raise StopIteration
        try:
            self._start()
            while True:
                with contextlib.suppress(queue.Empty):
                    return self._read(self._inbox.events.get(timeout=LOOK_SECONDS))
                self._check()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    async def __anext__(self) -> Event:
        if not self._left:
            raise StopAsyncIteration
        there = asyncio.Event()
        self._inbox.wake = partial(asyncio.get_running_loop().call_soon_threadsafe, there.set)
        try:
            self._start()
            while True:
                with contextlib.suppress(queue.Empty):
                    return self._read(self._inbox.events.get_nowait())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await there.wait()
                there.clear()
                self._check()
        except BaseException:  # the reader's task was cancelled, or the engine stopped
            self.close()
            raise

    def close(self) -> None:
        """Abort the request, if it runs."""
        running, self._left = self._started and self._left > 0, 0
        if running:
            with contextlib.suppress(OutriderError):  # closed, or a forked child: there is nothing to abort
                self._driver.abort(self._request.id)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        if self._started:
            return
        driver, request, inbox = self._driver, self._request, self._inbox

        def start() -> None:
            try:
                driver.add([request], inbox.put)
            except BaseException as refused:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    inbox.put(refused)

        driver.post(start)  # from here on an abort comes after it, even without a reader
        self._started = True

    def _read(self, event: Event | BaseException) -> Event:
        if isinstance(event, InvalidRequest):
            raise event
        if isinstance(event, BaseException):
            raise stopped(event) from event
        self._left -= event.finish_reason is not None
        return event

    def _check(self) -> None:
        """Whether the engine is there at all to send an event."""
        if self._inbox.events.empty():
            self._driver.check()
