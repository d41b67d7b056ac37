"""Which drafts the engine has, as the API process knows it, and the swaps that were asked of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

from outrider.errors import OutriderError
from outrider.load.cards import FILE, Card, read_card
from outrider.serve.errors import ApiError
from outrider.serve.link import ServedDraft, Swap, Swapped
from outrider.serve.metrics import Metrics

log = logging.getLogger(__name__)


class DraftSwaps:
    """On the event loop. An engine that was started again is asked for the draft that its predecessor had at last."""

    def __init__(self, send: Callable[[Swap], None], metrics: Metrics) -> None:
        self.drafts: dict[str, ServedDraft] = {}  # by drafter
        self.cards: dict[str, Card] = {}  # of those that have one
        self.metrics = metrics
        self._send = send
        self._asked: dict[int, asyncio.Future[ServedDraft]] = {}
        self._numbers = itertools.count()
        self._last: dict[str, str] = {}  # by drafter: where a swap's weights are
        self._again: set[asyncio.Task[None]] = set()

    async def swap(self, path: Path | None, seconds: float) -> ServedDraft:
        """Have the engine draft with the weights in this folder, or without one, with those before."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Swap(number, None if path is None else str(path)))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise ApiError(504, "the draft was not swapped in time; it may be yet", code="timeout") from None
        finally:
            del self._asked[number]

    def received(self, message: Swapped) -> None:
        if (draft := message.draft) is not None:  # also if the request has ended
            self._in_use(draft)
            self._last[draft.drafter] = draft.path
            log.info("draft swapped", extra={"facts": {"drafter": draft.drafter, "path": draft.path}})
        answer = self._asked.get(message.number)
        if answer is None or answer.done():
            return
        if message.draft is not None:
            answer.set_result(message.draft)
        else:
            answer.set_exception(
                ApiError(500 if message.fault else 400, message.problem, param="path", code="draft_refused")
            )

    def started(self, drafts: list[ServedDraft], seconds: float) -> None:
        for draft in drafts:
            self._in_use(draft)
        for name, path in self._last.items():
            if name in self.drafts and self.drafts[name].path != path:
                task = asyncio.create_task(self._repeat(Path(path), seconds))
                self._again.add(task)
                task.add_done_callback(self._again.discard)

    def _in_use(self, draft: ServedDraft) -> None:
        name = draft.drafter
        self.drafts[name] = draft
        self.cards.pop(name, None)
        folder = Path(draft.path)
        if (folder / FILE).exists():
            try:
                self.cards[name] = read_card(folder)
            except OutriderError as problem:
                log.warning("%s", problem)
        score = self.cards[name].score if name in self.cards else None
        rates = (score.first_accept_rate, score.target_probability) if score is not None else (None, None)
        self.metrics.draft_in_use(name, *rates)

    async def _repeat(self, path: Path, seconds: float) -> None:
        try:
            await self.swap(path, seconds)
        except ApiError as error:
            log.warning("the engine was started again, without the draft %s: %s", path, error.message)

    def lost(self) -> None:
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(
                    ApiError(503, "the engine stopped; try again", code="engine_lost", after=5)
                )
