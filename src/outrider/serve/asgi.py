"""HTTP as the routes see it: an `Ask` comes in; `Reply` or `Events` goes out. Straight on ASGI, no framework."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outrider.serve.backend import Stream
from outrider.serve.call import Call, Dialect
from outrider.serve.errors import ApiError
from outrider.serve.keys import Key
from outrider.serve.settings import ServeSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PADDED_TO = 256  # bytes; padded events have a multiple of this
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_json = msgspec.json.Encoder()


class ClientGone(Exception):
    """Nobody is there to answer."""


class Ask:
    """One HTTP request."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.id = _request_id(self.headers.get("x-request-id"))
        self.arrived = time.perf_counter()
        self.key: Key | None = None
        self.reserved: int | None = None  # tokens, with the limiter
        self.stream: Stream | None = None
        self.call: Call | None = None
        self.facts: dict[str, Any] = {}  # for the log
        self._receive = receive

    async def body(self, most: int, seconds: float) -> bytes:
        """The whole body, unless it is too long or too slow."""
        announced = self.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most)
        parts = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts += message.get("body", b"")
                    if len(parts) > most:
                        raise _too_large(most)
                    if not message.get("more_body"):
                        return bytes(parts)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {seconds:g} s", code="body_timeout"
            ) from None

    async def gone(self) -> None:
        """Returns when the client has hung up. Only after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")


def _request_id(given: str | None) -> str:
    """The client's own, if it can be written to a log and a header; else a fresh one."""
    if given and len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return f"req_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Reply:
    """An answer in one piece."""

    body: Any  # an object for JSON, or bytes as they are
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media: str = "application/json"

    async def write(self, send: Send, more: Mapping[str, str]) -> None:
        data = self.body if isinstance(self.body, bytes) else _json.encode(self.body)
        headers = {
            "content-type": self.media,
            "content-length": str(len(data)),
            **self.headers,
            **more,
        }
        await send({"type": "http.response.start", "status": self.status, "headers": _raw(headers)})
        await send({"type": "http.response.body", "body": data})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


class Events:
    """An answer as a stream of events, written as the engine makes them."""

    status = 200

    def __init__(self, dialect: Dialect, stream: Stream, settings: ServeSettings, deadline: float) -> None:
        self.dialect, self.stream, self.settings, self.deadline = dialect, stream, settings, deadline

    async def write(self, send: Send, more: Mapping[str, str]) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a proxy must pass events on as they come
            **more,
        }
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        try:
            await self._put(send, b"".join(map(self._event, self.dialect.begin())))
            await self._follow(send)
            ending = b"".join(map(self._event, self.dialect.finish()))
            await self._put(send, ending + (b"" if hasattr(self.dialect, "error") else DONE), last=True)
        except ApiError as error:
            await self._put(send, self._failure(error), last=True)

    async def _follow(self, send: Send) -> None:
        settings = self.settings
        async for batch in self.stream.batches(
            self.deadline, settings.ping_seconds, settings.stream_interval
        ):
            if not batch:
                await self._put(send, PING)
                continue
            lines = [self._event(e) for index, piece in batch for e in self.dialect.feed(index, piece)]
            if lines:
                await self._put(send, b"".join(lines))

    def _failure(self, error: ApiError) -> bytes:
        """An error after the stream began, as the dialect's clients know it."""
        body = error.body()
        own = getattr(self.dialect, "error", None)
        return self._event(own(body["error"]) if own else body)

    def _event(self, event: dict[str, Any]) -> bytes:
        data = _json.encode(event)
        if self.dialect.call.options.padding:
            missing = -(len(data) + len(b',"obfuscation":""')) % PADDED_TO
            padding = secrets.token_hex(missing // 2 + 1)[:missing]
            data = data[:-1] + b',"obfuscation":"' + padding.encode() + b'"}'
        name = event.get("type")  # Responses names its events
        return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"

    async def _put(self, send: Send, data: bytes, last: bool = False) -> None:
        """Write, once the client has taken enough of what came before. One that takes too long is cut off."""
        await send({"type": "http.response.body", "body": data, "more_body": not last})
