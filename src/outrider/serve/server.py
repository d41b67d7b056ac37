"""`outrider serve`: the sockets, the signals, the beginning and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Collection
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.errors import OutriderError
from outrider.serve.app import App
from outrider.serve.backend import Backend
from outrider.serve.errors import ApiError
from outrider.serve.keys import Keyring
from outrider.serve.link import Start
from outrider.serve.log import set_up_logging
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel
from outrider.serve.service import Service
from outrider.serve.settings import ServeSettings
from outrider.settings import Memory, Settings, shown_size
from outrider.types import SamplingParams

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
KEEP_ALIVE = 75  # seconds an idle connection stays; longer than the usual proxies keep theirs


class PatientProtocol(H11Protocol):
    """HTTP that waits neither for ever for a request to begin nor for ever for an answer to be read."""

    header_timeout = 10.0
    write_timeout = 60.0
    _unread: asyncio.TimerHandle | None = None
    _unasked: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._unasked = self.loop.call_later(self.header_timeout, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # a request has come
            self._has_asked()
        elif self._unasked is None:  # the beginning of one, on a connection that had others before
            self._unasked = self.loop.call_later(self.header_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_asked()
        self._has_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Not `close`, which would wait for the client to take what is on its way.
        self._unread = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def _has_asked(self) -> None:
        if self._unasked is not None:
            self._unasked.cancel()
            self._unasked = None

    def send_400_response(self, msg: str) -> None:
        """In the shape every other error has."""
        reply = ApiError(400, "this is not an HTTP request", code="bad_http")
        body = msgspec.json.encode(reply.body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Leaves signals to `run`, which drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def run_server(
    model: str,
    draft: str,
    params: SamplingParams,
    settings: Settings,
    serve: ServeSettings,
    length: int | None = None,
    given: Collection[str] = (),
) -> int:
    """Serve until told to stop. The exit code. `length`: of answers whose request names none; `given`: the
    parameters that were set for this server, and do not yield to the model's own.
    """
    set_up_logging(serve.log_format, serve.log_level)
    keys = Keyring.of(serve)
    if keys.open and not serve.local:
        log.warning("anyone who can reach %s can use this server; set --api-key or --key-file", serve.host)
    sock = _bind(serve)
    with sock:
        start = Start(model, draft, dataclasses.asdict(settings), (serve.log_format, serve.log_level))
        metrics = Metrics()
        backend = Backend(start, serve, metrics)
        return asyncio.run(_run(Service(backend, serve, params, keys, metrics, length, given), sock))


def _bind(serve: ServeSettings) -> socket.socket:
    """The listening socket, before anything slow: a taken port is known at once."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    # Named TCP, or asyncio leaves small writes to be gathered: 40 ms a request, and as much between events.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((serve.host, serve.port))
    except OSError as problem:
        sock.close()
        raise OutriderError(
            f"cannot listen on {serve.host} port {serve.port}: {problem.strerror}; choose another with --port"
        ) from None
    sock.listen(2048)
    return sock


async def _run(service: Service, sock: socket.socket) -> int:
    backend, serve = service.backend, service.settings
    server = _http(App(service), serve)
    engine = asyncio.create_task(backend.run())
    web = asyncio.create_task(server.serve(sockets=[sock]))
    told = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if told.is_set() else told).set())
    loop.add_signal_handler(signal.SIGHUP, _reload_keys, service)
    greeting = asyncio.create_task(_greet(backend, serve, sock))
    stop = asyncio.create_task(told.wait())
    await asyncio.wait((engine, web, stop), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if not told.is_set():
        code = 1
        print(f"error: {backend.problem or 'the server stopped'}", file=sys.stderr, flush=True)
    else:
        await _drain(service, hurry)
    backend.stop()
    await engine
    server.should_exit = True
    await web
    for task in (greeting, stop):
        task.cancel()
    return code


def _http(app: App, serve: ServeSettings) -> Server:
    limits = {"header_timeout": serve.header_timeout, "write_timeout": serve.write_timeout}
    protocol = type("Protocol", (PatientProtocol,), limits)
    return Server(
        uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,
        )
    )


def _reload_keys(service: Service) -> None:
    """SIGHUP: the key file has changed. A broken one changes nothing."""
    try:
        service.keys = Keyring.of(service.settings)
        log.info("keys read again", extra={"facts": {"keys": len(service.keys)}})
    except OutriderError as problem:
        log.error("keys not read again: %s", problem)


async def _drain(service: Service, hurry: asyncio.Event) -> None:
    """Take nothing new; let what runs end, as long as that may take; tell the rest."""
    backend, seconds = service.backend, service.settings.drain_seconds
    service.draining = backend.last_life = True
    log.info("draining", extra={"facts": {"running": len(backend.jobs), "seconds": seconds}})
    idle = asyncio.create_task(backend.wait_idle(seconds))
    impatient = asyncio.create_task(hurry.wait())
    await asyncio.wait((idle, impatient), return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, impatient):
        task.cancel()
    if backend.jobs:
        backend.fail_all(ApiError(503, "the server is shutting down", code="draining", after=5))
    await asyncio.sleep(0.1)  # for the last events to be written


async def _greet(backend: Backend, serve: ServeSettings, sock: socket.socket) -> None:
    """Say where and what, first that it is loading, then that it is ready."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    _say(f"outrider: listening on {url}, loading {backend.start.model}")
    await backend.ready.wait()
    if backend.model is not None:
        _say(_card(backend.model, url, serve))


def _card(model: ServedModel, url: str, serve: ServeSettings) -> str:
    plan = model.plan
    key = ' -H "Authorization: Bearer $KEY"' if serve.api_keys or serve.key_file else ""
    body = f'{{"model": "{model.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"ready     {url}/v1 in {plan['seconds']} s\n"
        f"model     {model.name}: {plan['parameters'] / 1e6:.0f} million parameters, {plan['weights']} on "
        f"{plan['device']}, context {model.context}\n"
        f"drafter   {model.drafter}\n"
        f"memory    {_memory(plan)}, {plan['max_sequences']} sequences at once\n"
        f"try       curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def _memory(plan: dict[str, Any]) -> str:
    if plan["memory"] is not None:
        return Memory(**plan["memory"]).describe()
    weights, cache = shown_size(plan["weight_bytes"]), shown_size(plan["cache_bytes"])
    return f"{weights} weights, {cache} cache for {plan['cache_tokens']} tokens"


def _say(text: str) -> None:
    print(text, flush=True)
