"""One client's connection: uvicorn's HTTP with limits on everything a client could draw out, and an accept loop
that counts connections and waits when there are no descriptors left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.serve.errors import ApiError
from outrider.serve.intake import Intake

log = logging.getLogger(__name__)

LINGER = 5.0  # seconds a refused client has to read the answer while what it still sends is thrown away
RETRY_ACCEPT = 0.5  # seconds, when there are no descriptors left
FEED = 4096  # bytes that are parsed at once; as chunks of one byte they are 700 events, and take about 10 ms
TURN = 0.005  # seconds of the processor that one connection is parsed before others are
WAIT = 4  # times as long it then waits: no client has more than a fifth of the event loop
QUIET = 10.0  # seconds between log lines of one kind
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class LogRateLimiter:
    """Limits the rate of log lines of one kind, and counts those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left: Counter[str] = Counter()

    def warn(self, message: str, **facts: Any) -> None:
        now = self._clock()
        if now - self._last.get(message, -QUIET) < QUIET:
            self._left[message] += 1
            return
        self._last[message] = now
        more = {"left_out": self._left.pop(message)} if message in self._left else {}
        log.warning(message, extra={"facts": {**facts, **more}})


class ConnectionLimiter:
    """Who is connected, and whether another may be. Programs of this machine are not counted apart: one of them may
    be a proxy, and stand for everyone.
    """

    def __init__(self, most: int, most_per_peer: int) -> None:
        self.most, self.most_per_peer = most, most_per_peer
        self.peers: Counter[str] = Counter()
        self.total = 0

    def refusal(self, peer: str) -> str | None:
        if self.total >= self.most:
            return f"{self.total} connections are open, at most {self.most} may be (--max-connections)"
        held = self.peers.get(peer, 0)
        if self.most_per_peer and held >= self.most_per_peer and not _is_loopback(peer):
            return f"{held} connections from your address are open, at most {self.most_per_peer} may be"
        return None

    def enter(self, peer: str) -> None:
        self.total += 1
        self.peers[peer] += 1

    def leave(self, peer: str) -> None:
        self.total -= 1
        self.peers[peer] -= 1
        if not self.peers[peer]:
            del self.peers[peer]


def _is_loopback(peer: str) -> bool:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return True  # a socket file has no address
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class _Errors(logging.Logger):
    """uvicorn's log without its warnings: what they are about is logged here, with an id and the peer."""

    def warning(self, *args: Any, **options: Any) -> None:
        pass


_errors = _Errors("uvicorn.error")
_errors.parent = logging.getLogger("uvicorn.error")


class _Transport:
    """A transport whose `close` lets the client read the answer, though it may still be sending."""

    def __init__(self, transport: Any, connection: Connection) -> None:
        self._own, self._connection = transport, connection
        self.write = transport.write  # the way of every event: no detour

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def close(self) -> None:
        if not self._connection.linger():
            self._own.close()

    def is_closing(self) -> bool:
        return self._connection.lingering or self._own.is_closing()


class Connection(H11Protocol):
    """HTTP with time limits for a request to begin and for an answer to be read. The body of a refused request is not
    waited for.
    """

    header_timeout = 10.0
    write_timeout = 60.0
    limiter: ConnectionLimiter
    intake: Intake
    log_limiter: LogRateLimiter
    lingering = False
    _peer = ""
    _unread: asyncio.TimerHandle | None = None
    _unasked: asyncio.TimerHandle | None = None
    _cut: asyncio.TimerHandle | None = None
    _turn: asyncio.TimerHandle | None = None  # when what has come is parsed further

    def connection_made(self, transport: Any) -> None:
        self.logger = _errors
        self._own = transport
        self._unparsed = bytearray()
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        self.app_state["connection"] = self  # found in the scope of its requests
        self._peer = self.client[0] if self.client else ""
        self.limiter.enter(self._peer)
        self._unasked = self.loop.call_later(self.header_timeout, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.lingering:
            self._throw_away(data)
            return
        self._unparsed += data
        if self._turn is None:
            self._parse()
        else:
            self._own.pause_reading()

    def _parse(self) -> None:
        """Parse what has come for one turn, and the remainder in turns that follow."""
        waited, began, spent = self._turn is not None, time.thread_time(), 0.0
        self._turn = None
        while self._unparsed and spent < TURN and not (self.lingering or self._own.is_closing()):
            piece = bytes(self._unparsed[:FEED])
            del self._unparsed[:FEED]
            super().data_received(piece)
            spent = time.thread_time() - began
        if self.lingering or self._own.is_closing():
            self._unparsed.clear()
            return
        if self._unparsed:
            self._own.pause_reading()
            self._turn = self.loop.call_later(WAIT * spent, self._parse)
        elif waited and not self.flow.read_paused:
            self._own.resume_reading()
        if self.conn.their_state is not h11.IDLE:  # a request has come
            self._has_asked()
        elif self._unasked is None:  # the beginning of one, on a connection that had others before
            self._unasked = self.loop.call_later(self.header_timeout, self._own.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._unasked, self._unread, self._cut, self._turn):
            if timer is not None:
                timer.cancel()
        self.limiter.leave(self._peer)
        self.app_state.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.lingering:
            self._own.abort()
        else:
            super().shutdown()

    def linger(self) -> bool:
        """Close once the client has, or soon. Closed at once, with bytes still coming, the answer would be lost."""
        if self.lingering:
            return True
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR) or self._own.is_closing():
            return False
        self.lingering = True
        self._own.write_eof()
        self._own.resume_reading()
        self._cut = self.loop.call_later(LINGER, self._own.abort)
        return True

    def _throw_away(self, data: bytes) -> None:
        if pause := self.intake.take(len(data)):
            self._own.pause_reading()
            self.loop.call_later(pause, self._own.resume_reading)

    def push(self, data: bytes) -> None:
        """A part of the body of the answer that has begun, written at once. ASGI's way, through every layer to h11 and
        a task of its own, costs more than everything else about a token. Slow readers are cut off here, too.
        """
        if self.cycle.disconnected or self._own.is_closing():
            return
        chunked = self.conn.their_http_version != b"1.0"  # as h11 announced it
        self._own.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Not `close`, which would wait for the client to take what is on its way.
        self._unread = self.loop.call_later(self.write_timeout, self._own.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def _has_asked(self) -> None:
        if self._unasked is not None:
            self._unasked.cancel()
            self._unasked = None

    def send_400_response(self, msg: str) -> None:
        name = f"req_{secrets.token_hex(12)}"
        self.log_limiter.warn("not an HTTP request", id=name, peer=self._peer)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = ApiError(400, "this is not an HTTP request", code="bad_http")
            self._own.write(plain_answer(error, name))
        self.transport.close()


def plain_answer(error: ApiError, name: str) -> bytes:
    """An error where there is no request to answer. The connection is closed after it."""
    body = msgspec.json.encode(error.body())
    lines = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
    head = "".join(
        f"{key}: {value}\r\n" for key, value in ({"x-request-id": name} | lines | error.headers()).items()
    )
    reason = {400: "Bad Request", 503: "Service Unavailable"}[error.status]
    return f"HTTP/1.1 {error.status} {reason}\r\n{head}\r\n".encode() + body


class Turned(asyncio.Protocol):
    """A connection too many: it gets an answer that says so, and a moment to read it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: Any) -> None:
        transport.write(self._answer)
        transport.write_eof()
        asyncio.get_running_loop().call_later(1.0, transport.abort)


async def accept(
    sock: socket.socket,
    make: Callable[[], Connection],
    limiter: ConnectionLimiter,
    log_limiter: LogRateLimiter,
) -> None:
    """Take connections until cancelled. Where there is nothing to take them with, wait instead of trying at once."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            taken, address = await loop.sock_accept(sock)
        except OSError as problem:
            if problem.errno in EXHAUSTED:
                log_limiter.warn("no descriptors left for connections; waiting", reason=problem.strerror)
                await asyncio.sleep(RETRY_ACCEPT)
            continue
        peer = address[0] if isinstance(address, tuple) else ""
        reason = limiter.refusal(peer)
        with contextlib.suppress(OSError):
            if reason is None:
                await loop.connect_accepted_socket(make, taken)
            else:
                log_limiter.warn("connection refused", peer=peer, reason=reason)
                error = ApiError(503, f"too many connections: {reason}", code="too_many_connections", after=1)
                answer = plain_answer(error, f"req_{secrets.token_hex(12)}")
                await loop.connect_accepted_socket(lambda: Turned(answer), taken)  # noqa: B023 (called at once)
