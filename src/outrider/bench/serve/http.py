"""A thin HTTP/1.1 client on asyncio's transports: what arrives is stamped where the socket is read.

It knows what an OpenAI-compatible server sends: a body of a known length, in chunks, or until the connection closes.
One future a request and none an event, so that one core follows many streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from outrider.errors import InvalidRequest

LONGEST_HEAD = 1 << 16
READ_AT_ONCE = 1 << 16  # bytes
LONGEST_REPLY = 1 << 24  # bytes of an answer in one piece


class HungUp(ConnectionError):
    """The server closed the connection where more was to come."""


class NotHttp(ConnectionError):
    """What came is no HTTP/1.1."""


class Receiver(Protocol):
    """A waiting reader: the answer's head, then its body piece by piece, with the time each was read."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def body(self, data: bytes, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, and as whom."""

    host: str
    port: int
    secure: bool = False
    prefix: str = ""  # of paths
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Server:
        """From `http://host:port`, with or without `/v1` at its end."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidRequest(f"{url!r:.99} is not an address such as http://127.0.0.1:8000", "url")
        if parts.query or parts.fragment or parts.username:
            raise InvalidRequest(f"{url!r:.99}: an address ends before ?, # and has no name before @", "url")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidRequest("an API key has letters, digits and signs of ASCII only", "api_key")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, prefix, key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.secure}://{host}:{self.port}{self.prefix}"

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """A request as it goes over the wire."""
        data = b"" if body is None else json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "user-agent: outrider-bench",
        ]
        lines += ["accept: */*", "content-type: application/json", f"content-length: {len(data)}"]
        lines += [f"authorization: Bearer {self.key}"] if self.key is not None else []
        return "\r\n".join([*lines, "", ""]).encode() + data


class Reading:
    """One answer's bytes, as they come: the head, then the body out of its framing."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.status = 0
        self.complete = False
        self.reusable = False
        self.began = False  # some of it is here
        self._rest = b""
        self._left = -1  # bytes of the body or of the chunk that are to come; -1: not known
        self._chunked = False
        self._between = False  # at a chunk's end, before its line break
        self._last = False  # after the chunk of length 0

    def feed(self, data: bytes, now: float) -> None:
        self.began = True
        if not self.status:
            self._rest += data
            if not self._head():
                return
            data, self._rest = self._rest, b""
        body = self._unchunked(data) if self._chunked else self._sized(data)
        if body:
            self.receiver.body(body, now)

    def closed(self) -> None:
        """The connection has ended: so has a body of unknown length."""
        if self.status and not self._chunked and self._left < 0:
            self.complete = True

    def _head(self) -> bool:
        """Whether the head is whole; then it is read and the rest is the body's."""
        head, end, rest = self._rest.partition(b"\r\n\r\n")
        if not self._rest.startswith(b"HTTP/1."[: len(self._rest)]) or len(self._rest) > LONGEST_HEAD + len(
            rest
        ):
            raise NotHttp(f"it answered {self._rest[:40]!r}, which is no HTTP/1.1")
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[1].isdecimal():
            raise NotHttp(f"it answered {first[:40]!r}, which is no HTTP/1.1")
        self._rest = rest
        if words[1].startswith("1"):  # 100 Continue, 103 Early Hints: another head follows
            return self._head() if rest else False
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status = int(words[1])
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        with contextlib.suppress(ValueError):
            self._left = int(headers.get("content-length", "-1"))
        self._left = 0 if self._chunked or self.status in (204, 304) else self._left
        closes = "close" in headers.get("connection", "").lower() or words[0] == "HTTP/1.0"
        self.reusable = not closes and (self._chunked or self._left >= 0)
        self.receiver.head(self.status, headers)
        self.complete = not self._chunked and self._left == 0
        return True

    def _sized(self, data: bytes) -> bytes:
        if self._left < 0:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.complete = self._left == 0
        return body

    def _unchunked(self, data: bytes) -> bytes:
        data = self._rest + data if self._rest else data
        at, parts = 0, []
        while at < len(data) and not self.complete:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                self._between = not self._left
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            if self._between:
                self._between = False
            elif self._last:
                self.complete = not line  # an empty line ends the trailers
            else:
                self._left = _chunk_size(line)
                self._last = not self._left
        self._rest = data[at:]
        return b"".join(parts)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise NotHttp(f"{line[:40]!r} is no length of a chunk") from None


class Connection(asyncio.BufferedProtocol):
    """One connection, for one request after the other. It reads into one buffer: asyncio would otherwise allocate one
    for each read, which costs as much as everything else here.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(READ_AT_ONCE))
        self.transport: asyncio.Transport | None = None
        self.open = True
        self._reading: Reading | None = None
        self._done: asyncio.Future[Reading] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        data, reading = bytes(self._buffer[:nbytes]), self._reading
        if reading is None:  # no request is open
            self.close()
            return
        try:
            reading.feed(data, now)
        except Exception as problem:  # for the request, not for the event loop
            self._end(problem)
            self.close()
            return
        if reading.complete:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._reading is None:
            return
        self._reading.closed()
        broken = HungUp("the server closed the connection in the middle of an answer")
        self._end(None if self._reading.complete else exc or broken)

    def _end(self, problem: Exception | None) -> None:
        reading, done, self._reading, self._done = self._reading, self._done, None, None
        if done is None or reading is None or done.done():
            return
        if problem is None:
            done.set_result(reading)
        else:
            done.set_exception(problem)

    async def ask(self, request: bytes, reading: Reading) -> None:
        """Send it and wait until the answer is whole."""
        if not self.open or self.transport is None:
            raise HungUp("the server closed the connection")
        self._reading, self._done = reading, asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self._reading = self._done = None
            self.close()  # the remaining answer has no reader
            raise

    def close(self) -> None:
        self.open = False
        if self.transport is not None:
            self.transport.abort()


class Pool:
    """Connections to one server, kept for the next request."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.opened = 0
        self._free: list[Connection] = []
        self._tls = ssl.create_default_context() if server.secure else None

    async def ask(self, request: bytes, receiver: Receiver) -> None:
        """A connection that was idle may have been closed meanwhile: then it is asked again on a fresh one."""
        while True:
            connection, used = await self._take()
            reading = Reading(receiver)
            try:
                await connection.ask(request, reading)
            except (HungUp, ConnectionResetError, BrokenPipeError):
                connection.close()
                if used and not reading.began:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if reading.reusable and connection.open:
                self._free.append(connection)
            else:
                connection.close()
            return

    async def fill(self, count: int) -> None:
        """Opens connections ahead of their requests. Failures are reported by the requests."""
        opened = await asyncio.gather(*(self._open() for _ in range(count)), return_exceptions=True)
        self._free += [connection for connection in opened if isinstance(connection, Connection)]

    async def _take(self) -> tuple[Connection, bool]:
        while self._free:
            if (connection := self._free.pop()).open:
                return connection, True
        return await self._open(), False

    async def _open(self) -> Connection:
        loop, server = asyncio.get_running_loop(), self.server
        _, connection = await loop.create_connection(Connection, server.host, server.port, ssl=self._tls)
        self.opened += 1
        return connection

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()


@dataclass(slots=True)
class Reply:
    """An answer in one piece."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now: float) -> None:
        self.data += data
        if len(self.data) > LONGEST_REPLY:
            raise NotHttp("its answer does not end")

    def json(self) -> Any:
        """None where it is none."""
        try:
            return json.loads(self.data)
        except ValueError:
            return None
