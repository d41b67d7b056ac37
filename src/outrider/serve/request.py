"""One request: Starlette's, with a body that is bounded in size and time, an end when the client hangs up, and what
this server keeps of it until it is answered. And answers in one piece; those in events are in `events.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

import msgspec
from starlette.requests import Request as BaseRequest
from starlette.responses import Response
from starlette.types import Receive, Scope

from outrider.errors import InvalidRequest
from outrider.serve.call import Call
from outrider.serve.connection import Connection
from outrider.serve.errors import ApiError, from_invalid
from outrider.serve.keys import Key
from outrider.serve.limits import ESCAPED_BYTE, StringScan, read_json
from outrider.serve.metrics import Metrics
from outrider.serve.model_service import ModelService
from outrider.serve.service import Service, keep_traffic
from outrider.serve.stream import Stream
from outrider.serve.wire import T, read_request

JSON = "application/json"
ANTHROPIC = "/v1/messages"
FORM = "application/x-www-form-urlencoded"
BROWSERS_SEND = ("origin", "sec-fetch-site", "sec-fetch-mode", "referer", "cookie")
LONG_BODY = 256 << 10  # bytes; reading more than this would hold up other requests
ESCAPED = 2 * ESCAPED_BYTE  # a prompt, and a prediction of the answer
OTHER_FIELDS = 1 << 20  # bytes of a body that are neither

P = ParamSpec("P")
R = TypeVar("R")
_json = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client hung up."""


class Request(BaseRequest):
    def __init__(self, scope: Scope, receive: Receive, service: Service) -> None:
        super().__init__(scope, receive)
        self.service = service
        self.path: str = scope["path"]
        self.id = _request_id(self.headers.get("x-request-id"))
        self.arrived = time.perf_counter()
        self.key: Key | None = None
        self.background = False  # a line of a batch: it yields to other requests
        self.reserved: int | None = None  # tokens, with the limiter
        self.running: Stream | None = None  # at the engine
        self.call: Call | None = None
        self.waited = 0.0  # seconds, for its model to be loaded
        self._chosen: ModelService | None = None
        self.facts: dict[str, Any] = {}  # for the log
        self._whole = False  # its body has been read

    @property
    def connection(self) -> Connection:
        return cast(Connection, self.scope["state"]["connection"])

    @property
    def for_anthropic(self) -> bool:
        """Whether the client expects Anthropic's errors and headers."""
        return self.path == ANTHROPIC or self.path.startswith(f"{ANTHROPIC}/")

    @property
    def from_browser(self) -> bool:
        """Whether a person opened the path in a browser, which asks for HTML first."""
        return self.method in ("GET", "HEAD") and self.headers.get("accept", "").startswith("text/html")

    async def read(self, kind: type[T], prompts: int = 1, counted: bool = False) -> T:
        """The body as a struct, or an error that says what is wrong with it. `prompts`: how many it may hold.

        The request counts against its key's limit from here on, also if it is refused in the end; unless it was
        `counted` before.
        """
        service = self.service
        if self.key is not None and not counted:
            service.count(self.key)
        self._check_media()
        body = await self._read_body(prompts)
        if len(body) > LONG_BODY:
            asked = await self.in_pool(_parsed, body, kind)
        else:
            asked = _parsed(body, kind)
        chosen = service.table.choose(getattr(asked, "model", None), self.key)
        if service.draining:
            raise ApiError(503, "the server is shutting down", code="draining", after=5)
        await self._enter(chosen, len(body))
        return asked

    @property
    def chosen(self) -> ModelService:
        """The model that the request's body names. Only after that has been read."""
        assert self._chosen is not None
        return self._chosen

    @property
    def metrics(self) -> Metrics:
        """Of the request's model; of one that has none, of the first."""
        return (self._chosen or self.service.table.first).metrics

    async def _enter(self, chosen: ModelService, size: int) -> None:
        """Makes the request a user of its model, once that is loaded."""
        table, begun = self.service.table, time.perf_counter()
        if chosen.away is None:
            await table.enter(chosen, size)
        else:
            await self.while_there(table.enter(chosen, size, self.background))
            self.waited = time.perf_counter() - begun
        self._chosen = chosen

    def _check_media(self) -> None:
        """Only JSON: what a page of another site can have a browser send without asking is something else. What curl
        says of a body by itself is let pass where no browser can have sent it.
        """
        media = self.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if media == FORM and not any(name in self.headers for name in BROWSERS_SEND):
            return
        if media != JSON:
            raise ApiError(
                415,
                f"the body must be sent as JSON: add the header 'Content-Type: {JSON}'",
                code="unsupported_media_type",
            )

    @property
    def unread(self) -> bool:
        """Whether some of its body may still be on its way."""
        announced = self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers
        return announced and not self._whole

    def read_whole(self) -> None:
        """The body was read to its end by other code than `read`."""
        self._whole = True

    async def _read_body(self, prompts: int) -> bytes:
        """The whole body, unless it is too long or too slow, or holds a text that cannot fit the model."""
        settings, intake = self.service.settings, self.service.intake
        most, longest = settings.max_body_bytes, None
        if most_bytes := self.service.table.most_bytes:
            longest = max(most_bytes, settings.max_schema_bytes)  # of a prompt, or of a grammar
            most = min(most, prompts * (ESCAPED * longest + OTHER_FIELDS))
        announced = self.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most, settings.max_body_bytes)
        parts, scan = bytearray(), StringScan()
        try:
            async with asyncio.timeout(settings.body_timeout):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    parts += chunk
                    if len(parts) > most:
                        raise _too_large(most, settings.max_body_bytes)
                    if longest:
                        scan.feed(chunk)
                        if scan.inside and scan.open_bytes > longest:
                            raise _text_too_long(longest)
                    if not message.get("more_body"):
                        self._whole = True
                        return bytes(parts)
                    if len(parts) > LONG_BODY and (pause := intake.take(len(chunk))):
                        await asyncio.sleep(pause)
        except TimeoutError:
            seconds = settings.body_timeout
            raise ApiError(
                408, f"the body did not arrive within {seconds:g} s", code="body_timeout"
            ) from None

    async def in_pool(self, work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Run what takes its time (templates, tokenizing) beside the event loop."""
        return await self.while_there(self.service.pool.run(work, *args, **options))

    async def while_there(self, work: Coroutine[Any, Any, R]) -> R:
        """Do the work, but stop it at once when the client hangs up. Only after the body has been read."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def settle(self) -> None:
        if self.running is not None:
            self.running.close()
        used = 0
        if self.call is not None:
            used = self.call.usage()["total_tokens"]
            self.facts |= self.call.facts()
            if self.service.settings.log_prompts:
                self.facts |= self.call.said()
            if self.key is not None:
                keep_traffic(self.chosen, self.key, self.call)
        if self.key is not None and self.reserved is not None:
            self.service.limiter.done(self.key, max(0, self.reserved - used))
        if self._chosen is not None:
            self.service.table.leave(self._chosen)


def _too_large(most: int, allowed: int) -> ApiError:
    why = "" if most == allowed else ": no text that fits the model's context is that long"
    return ApiError(413, f"the body is larger than {most} bytes{why}", code="body_too_large")


def _text_too_long(longest: int) -> ApiError:
    return ApiError(
        400, f"a text of the request is longer than {longest} bytes, and no longer one fits the model's context",
        code="context_length_exceeded",
    )  # fmt: skip


def _parsed(body: bytes, kind: type[T]) -> T:
    return read_request(read_json(body), kind)


def _request_id(given: str | None) -> str:
    """The client's own, if it can be written to a log and a header; else a fresh one."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return f"req_{secrets.token_hex(12)}"


class Reply(Response):
    media_type = JSON

    def render(self, content: Any) -> bytes:
        return _json.encode(content)


def refusal(error: ApiError | InvalidRequest, request: Request) -> Reply:
    """An error in the shape that the route's clients know."""
    known = from_invalid(error) if isinstance(error, InvalidRequest) else error
    request.facts |= known.facts()
    body = known.anthropic_body(request.id) if request.for_anthropic else known.body()
    return Reply(body, known.status, known.headers())
