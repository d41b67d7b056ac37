"""Gives the engine a thread of its own: requests go in from anywhere, events go to the requester, in a `Stream` if it
wants them one by one.

One thread loads the model and does all steps: the engine needs no locks, and the kernels' helpers serve one caller
(a second at the same time would do its work alone). No lock is held while the target runs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeVar

from outrider.engine.engine import Engine
from outrider.engine.memory import in_words
from outrider.errors import InvalidRequest, OutriderError, stopped
from outrider.types import Event, Request, Sequence, StepRecord, StepResult

Listener = Callable[[Event | BaseException], None]
T = TypeVar("T")
DONE = object()
LEAVE_SECONDS = 10.0  # for the step in hand, when the interpreter leaves
QUIET = 0.25  # seconds without requests before idle work starts: many clients send the next request at once
# Under load, idle work begins after PATIENCE seconds without any. One piece is done between two steps, and all of it
# takes at most BUSY_SHARE of the time.
PATIENCE, BUSY_SHARE = 2.0, 0.05
LOOK_SECONDS = 0.5  # between two looks of a stream at an engine that is silent


def _leave_in_time(driver: Driver) -> None:
    """Stop before the interpreter takes itself apart: a thread that comes back from a kernel to find no interpreter
    aborts the process.
    """
    known = weakref.ref(driver)

    def stop() -> None:
        if (still := known()) is not None:
            still.stop(LEAVE_SECONDS)

    atexit.register(stop)
    weakref.finalize(driver, atexit.unregister, stop).atexit = False


class Driver:
    def __init__(self, build: Callable[[], Engine], wait: bool = True) -> None:
        """Builds the engine on its thread. Without `wait` the caller goes on meanwhile and calls `wait_until_built`."""
        self.engine: Engine
        # Takes the record of every step, after its events.
        self.observer: Callable[[StepRecord], None] | None = None
        # Takes the error that stopped the engine.
        self.on_failure: Callable[[BaseException], None] | None = None
        # Work that is done in pieces while no request runs, and seldom beside requests that leave no such moment.
        self.idle_work: Iterator[None] | None = None
        self._busy_from = 0.0  # when a piece of it may be done beside requests
        self._build = build
        self._commands: deque[Callable[[], None]] = deque()  # run by the engine's thread between steps
        self._listeners: dict[str, Listener] = {}
        self._answered_at = float("-inf")  # when the last step ended; no request was answered yet
        self._wake = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        _leave_in_time(self)
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()
        if wait:
            self.wait_until_built()

    def wait_until_built(self) -> Engine:
        """Raises what building raised."""
        self.run(lambda: None)
        return self.engine

    def run(self, work: Callable[[], T], settled: bool = False) -> T:
        """Do something on the engine's thread, between steps, and wait for it. `settled`: nothing is in flight then."""
        done = threading.Event()
        result: list[T] = []
        failure: list[BaseException] = []

        def command() -> None:
            if settled:
                self._report(self.engine.drain())  # what fails here fails as a step does, for everyone
            try:
                result.append(work())
            except BaseException as error:
                failure.append(error)
            finally:
                done.set()

        self.post(command)
        while not done.wait(0.5):
            self._raise_if_dead()
        if failure:
            raise failure[0]
        return result[0]

    def post(self, work: Callable[[], None]) -> None:
        """Has `work` done on the engine's thread, between steps, without waiting. It must not raise."""
        self.check()
        with self._wake:
            self._commands.append(work)
            self._wake.notify()

    def submit(self, requests: Seq[Request], listener: Listener) -> list[list[Sequence]]:
        """Start requests together; events go to `listener`, on the engine's thread. All start, or none if one is
        refused, which raises.
        """
        return self.run(lambda: self.add(requests, listener))

    def add(self, requests: Seq[Request], listener: Listener) -> list[list[Sequence]]:
        """What `submit` does, for callers on the engine's thread."""
        added: list[list[Sequence]] = []
        try:
            added.extend(map(self.engine.add, requests))  # keeps those before one that raises
        except BaseException:
            for request in requests[: len(added)]:
                self.engine.abort(request.id)
            raise
        self._listeners.update((request.id, listener) for request in requests)
        return added

    def check(self) -> None:
        """Raise why nothing can be asked of this engine, if that is so."""
        # A forked process has the object, but not its thread, and locks as they stood.
        if os.getpid() != self._pid:
            raise OutriderError(
                f"this LLM belongs to process {self._pid}, and a forked child cannot use it: make an LLM in the child, "
                "or start it with multiprocessing's 'spawn'"
            )
        self._raise_if_dead()

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its listener hears an `abort` event for each choice."""
        self.post(lambda: self._deliver(self.engine.abort(request_id)))

    def close(self) -> None:
        """Stop after the step in hand. Requests still running are aborted. In a forked child nothing happens."""
        self.stop()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self, seconds: float = 0.0) -> None:
        """The same, waiting for so long at most."""
        if os.getpid() != self._pid:
            return
        with self._wake:
            self._closed = True
            self._wake.notify()
        if seconds:
            self._thread.join(seconds)

    def _raise_if_dead(self) -> None:
        if isinstance(self._failure, OutriderError):
            raise self._failure
        if self._failure is not None:
            raise OutriderError(f"the engine stopped: {self._failure!r}") from self._failure
        if self._closed:
            raise OutriderError("the engine is closed; make another LLM")

    def _run(self) -> None:
        try:
            self.engine = self._build()
            while self._run_commands():
                self._report(self.engine.step())
                self._answered_at = time.monotonic()
                if self.engine.idle:
                    self.engine.keep_costs()
                    self._busy_from = max(self._busy_from, self._answered_at + PATIENCE)
                else:
                    self._work_beside_requests()
        except BaseException as problem:
            error = in_words(problem, "answering" if hasattr(self, "engine") else "loading the model")
            self._failure = error
            for listener in list(self._listeners.values()):
                listener(error)
            if self.on_failure:
                self.on_failure(error)

    def _run_commands(self) -> bool:
        """Runs the commands that came since the last step, and sleeps while there are none. False: closed."""
        while True:
            with self._wake:
                while not (self._commands or self._closed) and self.engine.idle and (wait := self._rest()):
                    self._wake.wait(wait)
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            if self._closed:
                for request_id in list(self._listeners):
                    self._deliver(self.engine.abort(request_id))
                return False
            if not self.engine.idle:
                return True
            if self.idle_work is not None and not self._rest():
                self._do_piece()
                self._busy_from = time.monotonic() + PATIENCE

    def _do_piece(self) -> None:
        if self.idle_work is not None and next(self.idle_work, DONE) is DONE:
            self.idle_work = None

    def _work_beside_requests(self) -> None:
        """Under steady load no moment is quiet: without this nothing would ever be prepared."""
        if self.idle_work is None:
            self.idle_work = self.engine.prepare_more()
            return
        begun = time.monotonic()
        if begun >= self._busy_from:
            self._do_piece()
            ended = time.monotonic()
            self._busy_from = ended + (ended - begun) * (1 / BUSY_SHARE - 1)

    def _rest(self) -> float:
        """Seconds to sleep while no request comes; 0 if idle work may go on. It starts only after a quiet time,
        because a request would have to wait for the piece in progress.
        """
        if self.idle_work is None:
            return threading.TIMEOUT_MAX
        return max(0.0, self._answered_at + QUIET - time.monotonic())

    def _report(self, results: list[StepResult]) -> None:
        for result in results:
            self._deliver(result.events)
            if self.observer:
                self.observer(result.record)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            listener = self._listeners.get(event.request_id)
            if listener is None:
                continue  # it failed once already
            try:
                listener(event)
            except Exception:  # its event loop was closed, for example: no other listener may suffer for it
                del self._listeners[event.request_id]
                self.engine.abort(event.request_id)
        for event in events:
            if event.finish_reason and event.request_id not in self.engine.live:
                self._listeners.pop(event.request_id, None)


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
