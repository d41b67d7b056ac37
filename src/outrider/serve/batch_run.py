"""Runs batches behind other requests. A line is answered by its route, as if a client had sent it.

Lines begin only while no other request waits, and the engine pauses them while one runs (engine/scheduler.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.responses import Response

from outrider.errors import InvalidRequest
from outrider.serve.batch_store import BatchStore, Line, result_line
from outrider.serve.chat import answer_chat
from outrider.serve.completions import answer_completion
from outrider.serve.errors import ApiError
from outrider.serve.request import JSON, ClientGone, Request, refusal
from outrider.serve.responses import answer_response
from outrider.serve.routes import Handler
from outrider.serve.service import Service

log = logging.getLogger(__name__)

# A request that comes while lines run waits for their step to end, and a step of few sequences is short: with half of
# the sequences, first tokens of a small model on two cores came 0.35 s later.
SHARE = 8
POLL = 0.1  # seconds between two looks whether other requests wait
HOLD = 5.0  # seconds until what failed by the disk is tried again
AHEAD = 256  # lines of a batch that are read from the database at once
RETRIED = frozenset({429, 503})  # answers that say "not now": the line is done again
EXPIRED = "batch_expired", "the batch's time was over before this line was done"
FULL = "storage_full", "the server keeps no more results: delete files, or have its --batch-bytes raised"

# Routes that a batch may name.
HANDLERS: Mapping[str, Handler] = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
    "/v1/responses": answer_response,
}

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class RunningBatch:
    body: dict[str, Any]
    owner: str
    lines: deque[Line] = field(default_factory=deque)  # the next ones
    read: int = -1  # the last line that was taken from the database
    running: int = 0
    held_until: float = 0.0  # by a limit of its key
    stopped: bool = False  # no further line begins


class BatchRunner:
    def __init__(self, service: Service, store: BatchStore) -> None:
        self.service, self.store = service, store
        self.wake = asyncio.Event()
        self.running: dict[str, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "outrider-batches")  # the store is for one thread

    async def call(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Has the store do something, on its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **options))

    async def run(self) -> None:
        """Until cancelled. What runs then is done again at the next start."""
        try:
            while True:
                self.wake.clear()
                try:
                    await self.advance()
                except (sqlite3.Error, OSError) as problem:
                    log.error("batches cannot go on; trying again", extra={"facts": {"reason": str(problem)}})
                    await asyncio.sleep(HOLD)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), POLL if self.running else None)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def advance(self) -> None:
        """Takes in new batches, begins lines, and ends batches that have none left."""
        active = await self.call(self.store.active)
        for name, owner, body in active:
            if body["status"] == "validating":
                await self.call(self.store.validate, body)
            if body["status"] != "failed":
                self.running.setdefault(name, RunningBatch(body, owner)).body = body
        for batch in list(self.running.values()):
            await self._stop_if_due(batch)
        while await self._begin_some():
            pass
        for name, batch in list(self.running.items()):
            if not (batch.running or batch.lines) and (batch.stopped or not await self._read(batch)):
                await self.call(self.store.finalize, batch.body)
                log.info("a batch ended", extra={"facts": {"id": name, "status": batch.body["status"]}})
                del self.running[name]

    async def _stop_if_due(self, batch: RunningBatch) -> None:
        """Cancelled, expired, or no room for results: nothing further begins, and lines without an answer say why."""
        why = EXPIRED if batch.body["expires_at"] <= time.time() else FULL if self.store.full else None
        if batch.body["status"] not in ("cancelling", "finalizing") and why is None:
            return
        batch.stopped = True
        batch.lines.clear()
        if why is not None and not batch.running and batch.body["status"] == "in_progress":
            await self.call(self.store.refuse_pending, batch.body["id"], *why)

    async def _read(self, batch: RunningBatch) -> bool:
        """Reads further lines, if there are any."""
        batch.lines.extend(await self.call(self.store.pending, batch.body["id"], batch.read, AHEAD))
        batch.read = batch.lines[-1].number if batch.lines else batch.read
        return bool(batch.lines)

    async def _begin_some(self) -> bool:
        """Begins one line of every batch in turn. False: nothing more can begin now."""
        begun = False
        for batch in list(self.running.values()):
            if len(self._tasks) >= self.most or self._others_wait:
                return False
            if batch.stopped or batch.held_until > time.monotonic():
                continue
            if batch.lines or await self._read(batch):
                batch.running += 1
                task = asyncio.create_task(self._do(batch, batch.lines.popleft()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                begun = True
        return begun

    @property
    def most(self) -> int:
        """Lines at once: of a model that is loaded for them, one."""
        loaded = [model.model.plan for model in self.service.table.models if model.state == "ready"]
        room = min((plan["max_sequences"] for plan in loaded), default=1)
        return min(self.service.settings.batch_sequences or room // SHARE or 1, room)

    @property
    def _others_wait(self) -> bool:
        models = self.service.table.models
        usable = any(model.usable for model in models)
        return self.service.draining or not usable or any(model.backend.queued for model in models)

    async def _do(self, batch: RunningBatch, line: Line) -> None:
        """Answers a line and keeps the answer, or puts the line back where the answer is "not now"."""
        try:
            body = await self.call(self.store.read_body, batch.body["input_file_id"], line)
            request, response = await self._answer(batch, body)
            if response.status_code in RETRIED:
                seconds = float(response.headers.get("retry-after", 1))
                batch.held_until = time.monotonic() + seconds
                batch.lines.appendleft(line)
                return
            said = msgspec.Raw(bytes(response.body))
            answer = {"status_code": response.status_code, "request_id": request.id, "body": said}
            result = result_line(line.custom_id, answer)
            await self.call(self.store.record, batch.body["id"], line.number, response.status_code, result)
            request.metrics.count("batch_lines", status=str(response.status_code))
        except (sqlite3.Error, OSError) as problem:
            log.error(
                "a line's answer cannot be kept; trying again", extra={"facts": {"reason": str(problem)}}
            )
            batch.held_until = time.monotonic() + HOLD
            batch.lines.appendleft(line)
        finally:
            batch.running -= 1
            self.wake.set()

    async def _answer(self, batch: RunningBatch, body: bytes) -> tuple[Request, Response]:
        """The answer to a line, by the handler of its route."""
        path = batch.body["endpoint"]
        headers = [(b"content-type", JSON.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        request = Request({**scope, "client": None, "state": {}}, _sent(body), self.service)
        request.background = True
        try:
            request.key = self._key_of(batch.owner)
            if msgspec.json.decode(body).get("stream"):
                raise InvalidRequest("stream: answers of a batch are not streamed", "stream")
            response = await HANDLERS[path](request)
        except (ApiError, InvalidRequest) as problem:
            response = refusal(problem, request)
        except ClientGone:
            response = refusal(ApiError(503, "the line was not answered", after=1), request)
        except Exception:
            log.exception("a line of a batch failed", extra={"facts": {"id": request.id}})
            response = refusal(ApiError(500, "something went wrong here", code="internal_error"), request)
        finally:
            request.settle()
        facts = {"id": request.id, "path": path, "status": response.status_code, **request.facts}
        log.debug("line", extra={"facts": facts})
        return request, response

    def _key_of(self, owner: str) -> Any:
        """The key that a batch belongs to. Its limits hold for its lines, too."""
        keys = self.service.keys
        key = keys.of_owner(owner)
        if key is None and not (keys.open and not owner):
            raise ApiError(401, "the key of this batch is not valid any more", code="invalid_api_key")
        return key


def _sent(body: bytes) -> Any:
    """What a connection gives a request: its body, and then nothing."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await asyncio.Event().wait()
        raise AssertionError  # nothing sets it

    return receive
