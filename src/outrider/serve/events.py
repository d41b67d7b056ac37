"""Answers as a stream of server-sent events, with pings while nothing comes and padding where it is asked for."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.serve.call import Dialect
from outrider.serve.errors import ApiError
from outrider.serve.request import Request
from outrider.serve.settings import ServeSettings
from outrider.serve.stream import Pieces, Stream

PADDED_TO = 256  # bytes; padded events have a multiple of this
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy must pass events on as they come
}

_json = msgspec.json.Encoder()


class EventStream(Response):
    """Written as the engine makes it. Ends at once when the client hangs up, which Starlette's own notices late."""

    def __init__(self, dialect: Dialect, stream: Stream, settings: ServeSettings, deadline: float) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(HEADERS)
        self.dialect, self.stream, self.settings, self.deadline = dialect, stream, settings, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope["request"]
        self.connection, self.facts = request.connection, request.facts
        await request.while_there(self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._put(send, b"".join(map(self._event, self.dialect.begin())))
            await self.stream.follow(self._send, self.deadline, self.settings.ping_seconds, self._ping)
            ending = b"".join(map(self._event, self.dialect.finish()))
            await self._put(send, ending + (b"" if hasattr(self.dialect, "error") else DONE), last=True)
        except ApiError as error:
            self.facts |= error.facts()
            await self._put(send, self._failure(error), last=True)

    def _send(self, pieces: Pieces) -> None:
        feed, event = self.dialect.feed, self._event
        if data := b"".join([event(e) for index, piece in pieces for e in feed(index, piece)]):
            self.connection.push(data)

    def _ping(self) -> None:
        own = getattr(self.dialect, "ping", None)
        self.connection.push(self._event(own) if own else PING)

    def _failure(self, error: ApiError) -> bytes:
        """An error after the stream began, as the dialect's clients know it."""
        own = getattr(self.dialect, "error", None)
        return self._event(own(error) if own else error.body())

    def _event(self, event: dict[str, Any] | bytes) -> bytes:
        if isinstance(event, bytes):
            return event
        data = _json.encode(event)
        if self.dialect.call.options.padding:
            missing = -(len(data) + len(b',"obfuscation":""')) % PADDED_TO
            padding = secrets.token_hex(missing // 2 + 1)[:missing]
            data = data[:-1] + b',"obfuscation":"' + padding.encode() + b'"}'
        name = event.get("type")  # Responses and Messages name their events
        return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"

    async def _put(self, send: Send, data: bytes, last: bool = False) -> None:
        """Write, once the client has taken enough of what came before. One that takes too long is cut off."""
        await send({"type": "http.response.body", "body": data, "more_body": not last})
