"""The requests of one API call at the engine, and how their pieces reach the code that writes the answer.

Pieces are handed over by a call per step, from where the engine's message is read. Waking a task for each would be most
of a token's cost at a hundred streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from outrider.serve.errors import ApiError
from outrider.serve.link import Piece
from outrider.types import SamplingParams

Pieces = list[tuple[int, Piece]]  # each with the index of its prompt


class Job:
    __slots__ = (
        "accepted", "background", "began", "compiled", "id", "index", "left", "params", "prompt", "seed", "sent",
        "stream",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        index: int,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        background: bool = False,
    ) -> None:
        self.stream, self.index, self.id, self.prompt, self.params = stream, index, name, prompt, params
        self.seed = 0
        self.left = params.n
        self.sent = False  # to the engine
        self.background = background
        self.began = background  # left the engine's queue, or was never counted there
        self.compiled = asyncio.Event()  # its grammar, if it has one
        if params.grammar is None:
            self.compiled.set()
        self.accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def receive(self, piece: Piece) -> None:
        self.left -= piece.finish_reason is not None
        self.stream.pending.append((self.index, piece))

    def fail(self, error: ApiError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved: no warning if it is no longer awaited
        self.compiled.set()
        self.stream.end(error)


class Stream:
    """The jobs of one API call, and their pieces in the order they come. `close` in any case."""

    def __init__(self, drop: Callable[[Seq[Job]], None]) -> None:
        """`drop` aborts the jobs that the engine still works on."""
        self._drop = drop
        self.jobs: list[Job] = []
        self.pending: Pieces = []  # not handed over yet
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._receive: Callable[[Pieces], None] | None = None
        self._received_at = 0.0

    async def follow(
        self,
        receive: Callable[[Pieces], None],
        deadline: float,
        silence: float = 0.0,
        quiet: Callable[[], None] | None = None,
    ) -> None:
        """Calls `receive` with the pieces of every step until all have come, and `quiet` after every `silence` seconds
        without any.
        """
        self._receive, self._received_at = receive, self._loop.time()
        try:
            self.deliver()
            for wait in self._waits(deadline, silence, quiet):
                await asyncio.wait((self._over,), timeout=wait)
            self._over.result()
        finally:
            self._receive = None

    def _waits(self, deadline: float, silence: float, quiet: Callable[[], None] | None) -> Iterator[float]:
        """How long to wait for the end, again and again until it has come."""
        while not self._over.done():
            due = min(deadline, self._received_at + silence) if silence else deadline
            if (wait := due - self._loop.time()) > 0:
                yield wait
            elif due == deadline:
                raise too_late()
            else:
                self._received_at = self._loop.time()
                if quiet is not None:
                    quiet()

    def deliver(self) -> None:
        if self._receive is None or not self.pending or self._over.done():
            return
        pieces, self.pending = self.pending, []
        self._received_at = self._loop.time()
        try:
            self._receive(pieces)
        except Exception as problem:  # raised in `follow`; other streams go on
            self.end(problem)
            return
        if not any(job.left for job in self.jobs):
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """There is no more to come."""
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # marks it as retrieved: no warning without `follow`

    def close(self) -> None:
        self._drop(self.jobs)


def too_late() -> ApiError:
    return ApiError(504, "the request took too long", code="timeout", after=1)
