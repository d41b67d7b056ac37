"""How pieces reach whoever writes an answer: once a step, in order, and without anybody else suffering."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serve.backend import Backend
from outrider.serve.errors import ApiError
from outrider.serve.link import Gauges, Piece, Progress, Start
from outrider.serve.metrics import Metrics
from outrider.serve.settings import ServeSettings
from outrider.serve.stream import Job, Pieces, Stream
from outrider.types import SamplingParams

FAR = 1e9  # a deadline that does not come


def piece(name: str, choice: int = 0, text: str = "a", reason: str | None = None) -> Piece:
    return Piece(name, choice, [1], text, reason, None, None)


class Received:
    """Everything that was handed over, one list a call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, pieces: Pieces) -> None:
        self.calls.append([one.text for _, one in pieces])


def run(work: Callable[[Backend], Awaitable[None]]) -> None:
    async def main() -> None:
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), Metrics())
        await asyncio.wait_for(work(backend), 20)

    asyncio.run(main())


def job_of(backend: Backend, name: str, stream: Stream | None = None, n: int = 1) -> Job:
    stream = stream or Stream(backend.drop)
    job = Job(stream, len(stream.jobs), name, [1], SamplingParams(n=n))
    stream.jobs.append(job)
    backend.jobs[name] = job
    backend.queued += 1
    return job


def step(backend: Backend, *pieces: Piece) -> None:
    backend._progress(Progress(list(pieces), [], None, Gauges(0, 0, 0, 0, 0)))


async def following(stream: Stream, receive: Any, *args: Any) -> asyncio.Task[None]:
    task = asyncio.create_task(stream.follow(receive, FAR, *args))
    await asyncio.sleep(0)
    return task


def test_a_step_is_handed_over_at_once_and_in_one_call() -> None:
    async def work(backend: Backend) -> None:
        one, two = job_of(backend, "a", n=2), job_of(backend, "b")
        job_of(backend, "c", one.stream)
        received, other = Received(), Received()
        tasks = [await following(one.stream, received), await following(two.stream, other)]
        step(backend, piece("a", 0, "1"), piece("b", 0, "x"), piece("a", 1, "2"), piece("c", 0, "3"))
        assert (received.calls, other.calls) == ([["1", "2", "3"]], [["x"]])  # before any task has run
        step(backend, piece("a", 0, "4", "stop"), piece("c", 0, "5", "stop"), piece("b", 0, "y", "stop"))
        await tasks[1]
        assert not tasks[0].done()
        step(backend, piece("a", 1, "6", "length"))
        await tasks[0]
        assert received.calls[1:] == [["4", "5"], ["6"]]

    run(work)


def test_what_came_before_anybody_followed_is_kept() -> None:
    async def work(backend: Backend) -> None:
        job, received = job_of(backend, "a"), Received()
        step(backend, piece("a", text="1"))
        step(backend, piece("a", text="2", reason="stop"))
        await job.stream.follow(received, FAR)
        assert received.calls == [["1", "2"]]

    run(work)


def test_a_fault_of_one_answer_is_its_own() -> None:
    async def work(backend: Backend) -> None:
        bad, good, received = job_of(backend, "a"), job_of(backend, "b"), Received()

        def broken(pieces: Pieces) -> None:
            raise ZeroDivisionError

        tasks = [await following(bad.stream, broken), await following(good.stream, received)]
        step(backend, piece("a"), piece("b", text="x"))
        step(backend, piece("a"), piece("b", text="y", reason="stop"))
        await tasks[1]
        assert received.calls == [["x"], ["y"]]
        with pytest.raises(ZeroDivisionError):
            await tasks[0]

    run(work)


def test_an_engine_that_dies_ends_it_with_what_it_says() -> None:
    async def work(backend: Backend) -> None:
        jobs = [job_of(backend, name) for name in "ab"]
        for job in jobs:
            job.sent = True
        tasks = [await following(job.stream, Received()) for job in jobs]
        backend._lost()
        for task in tasks:
            with pytest.raises(ApiError) as lost:
                await task
            assert lost.value.code == "engine_lost"

    run(work)


def test_silence_is_told_again_and_again_and_the_deadline_once() -> None:
    async def work(backend: Backend) -> None:
        job, quiet = job_of(backend, "a"), []
        deadline = asyncio.get_running_loop().time() + 0.2
        with pytest.raises(ApiError) as late:
            await job.stream.follow(Received(), deadline, 0.01, lambda: quiet.append(1))
        assert late.value.code == "timeout" and len(quiet) >= 2

    run(work)


def test_after_whoever_followed_is_gone_nothing_is_handed_over() -> None:
    async def work(backend: Backend) -> None:
        job, received, aborted = job_of(backend, "a"), Received(), []
        backend._send = aborted.append  # type: ignore[method-assign]
        task = await following(job.stream, received)
        task.cancel()
        await asyncio.wait((task,))
        step(backend, piece("a"))
        job.stream.close()
        assert received.calls == [] and [message.id for message in aborted] == ["a"]

    run(work)


def test_events_are_not_written_to_who_has_hung_up() -> None:
    from outrider.serve.connection import Connection

    written: list[bytes] = []
    made = object.__new__(Connection)
    made._own = SimpleNamespace(write=written.append, is_closing=lambda: False)
    made.conn = SimpleNamespace(their_http_version=b"1.1")  # type: ignore[assignment]
    made.cycle = SimpleNamespace(disconnected=False)  # type: ignore[assignment]
    made.push(b"0123456789abcdef")
    assert written == [b"10\r\n0123456789abcdef\r\n"]
    made.conn.their_http_version = b"1.0"
    made.push(b"plain")
    assert written[1:] == [b"plain"]
    made.cycle.disconnected = True
    made.push(b"lost")
    assert len(written) == 2
