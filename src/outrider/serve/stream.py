"""What one API call has at the engine, and how what comes back reaches whoever writes the answer.

Pieces are handed over, not fetched: one call a step, from where the engine's message is read, and no task is woken for
it. At a hundred streams that is most of what a token would cost.
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
    """One request at the engine."""

    __slots__ = (
        "accepted", "began", "compiled", "id", "index", "left", "params", "prompt", "seed", "sent", "stream",
    )  # fmt: skip

    def __init__(
        self, stream: Stream, index: int, name: str, prompt: list[int], params: SamplingParams
    ) -> None:
        self.stream, self.index, self.id, self.prompt, self.params = stream, index, name, prompt, params
        self.seed = 0
        self.left = params.n
        self.sent = False  # the engine has heard of it
        self.began = False  # left the engine's queue
        self.compiled = asyncio.Event()  # its grammar, if it has one
        if params.grammar is None:
            self.compiled.set()
        self.accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def receive(self, piece: Piece) -> None:
        self.left -= piece.finish_reason is not None
        self.stream.news.append((self.index, piece))

    def fail(self, error: ApiError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen: no warning if nobody waits any more
        self.compiled.set()
        self.stream.end(error)


class Stream:
    """The jobs of one API call, and their pieces in the order they come. `close` in any case."""

    def __init__(self, drop: Callable[[Seq[Job]], None]) -> None:
        """`drop` has the engine give up jobs that it still works on."""
        self._drop = drop
        self.jobs: list[Job] = []
        self.news: Pieces = []  # not handed over yet
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._hear: Callable[[Pieces], None] | None = None
        self._interval = 0.0
        self._gathering: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    async def follow(
        self,
        receive: Callable[[Pieces], None],
        deadline: float,
        silence: float = 0.0,
        quiet: Callable[[], None] | None = None,
        interval: float = 0.0,
    ) -> None:
        """Have `hear` called with everything that has come, after every step that brought something, or once gathered
        for `interval` seconds; until all has come. `quiet` is called for every `silence` seconds without news.
        """
        self._hear, self._interval, self._heard_at = receive, interval, self._loop.time()
        try:
            self.deliver()
            for wait in self._waits(deadline, silence, quiet):
                await asyncio.wait((self._over,), timeout=wait)
            self._over.result()
        finally:
            self._hear = None
            if self._gathering is not None:
                self._gathering.cancel()

    def _waits(self, deadline: float, silence: float, quiet: Callable[[], None] | None) -> Iterator[float]:
        """How long to wait for the end, again and again until it has come."""
        while not self._over.done():
            due = min(deadline, self._heard_at + silence) if silence else deadline
            if (wait := due - self._loop.time()) > 0:
                yield wait
            elif due == deadline:
                raise too_late()
            else:
                self._heard_at = self._loop.time()
                if quiet is not None:
                    quiet()

    def deliver(self) -> None:
        """Everything a step brought has been heard."""
        if not self._interval:
            self._hand_over()
        elif self.news and self._gathering is None:
            self._gathering = self._loop.call_later(self._interval, self._hand_over)

    def _hand_over(self) -> None:
        self._gathering = None
        if self._hear is None or not self.news or self._over.done():
            return
        news, self.news = self.news, []
        self._heard_at = self._loop.time()
        try:
            self._hear(news)
        except Exception as problem:  # whoever follows gets it; nobody else may suffer for it
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
            self._over.exception()  # seen: no warning if nobody follows any more

    def close(self) -> None:
        """Free whatever it holds. After the last piece there is nothing to free."""
        self._drop(self.jobs)


def too_late() -> ApiError:
    return ApiError(504, "the request took too long", code="timeout", after=1)
