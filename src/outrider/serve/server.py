"""`outrider serve`: the sockets, the signals, the beginning and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import resource
import signal
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from outrider.engine.placement import Memory
from outrider.errors import OutriderError
from outrider.serve.app import App
from outrider.serve.backend import Backend
from outrider.serve.batch_run import BatchRunner
from outrider.serve.batch_store import BatchStore
from outrider.serve.connection import Connection, ConnectionLimiter, LogRateLimiter, accept
from outrider.serve.errors import ApiError
from outrider.serve.host_check import MAX_HEADER_BYTES
from outrider.serve.keys import Keyring
from outrider.serve.link import Start
from outrider.serve.log import set_up_logging
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel
from outrider.serve.service import Service
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings, shown_size
from outrider.types import SamplingParams
from outrider.wrap import fitted

if TYPE_CHECKING:
    from outrider.serve.traffic import TrafficKeeper

log = logging.getLogger(__name__)

RECEIVE_BUFFER = 256 << 10  # bytes a connection
RESERVED = 64  # descriptors for the engine, the log and others
KEEP_ALIVE = 75  # seconds an idle connection stays; longer than the usual proxies keep theirs


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
    given: Collection[str] = (),
) -> int:
    """Serve until asked to stop. The exit code. `given`: the parameters that were set for this server, and do not
    yield to the model's own.
    """
    set_up_logging(serve.log_format, serve.log_level)
    keys = Keyring.of(serve)
    if keys.open and not serve.local:
        log.warning("anyone who can reach %s can use this server; set --api-key or --key-file", serve.host)
    traffic = _traffic(serve, keys)
    store = _batch_store(serve)
    sock = _bind(serve)
    with sock:
        start = Start(model, draft, dataclasses.asdict(settings), (serve.log_format, serve.log_level))
        metrics = Metrics(serve.price_per_hour)
        backend = Backend(start, serve, metrics)
        service = Service(backend, serve, params, keys, metrics, given)
        service.traffic = traffic
        try:
            return asyncio.run(_run(service, sock, store))
        finally:
            if store is not None:
                store.close()
            if traffic is not None:
                traffic.close()


def _traffic(serve: ServeSettings, keys: Keyring) -> TrafficKeeper | None:
    if serve.keep_traffic is None:
        return None
    from outrider.serve.traffic import TrafficKeeper  # brings numpy

    if not keys.keeps_traffic:
        log.warning("no key is marked with keep_traffic, so nothing will be kept in %s", serve.keep_traffic)
    return TrafficKeeper(Path(serve.keep_traffic).expanduser(), serve.keep_traffic_bytes)


def _batch_store(serve: ServeSettings) -> BatchStore | None:
    if serve.batch_folder is None:
        return None
    return BatchStore(Path(serve.batch_folder).expanduser(), serve.batch_bytes)


def _bind(serve: ServeSettings) -> socket.socket:
    """The listening socket, before anything slow: a taken port is known at once."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    # Named TCP, or asyncio leaves small writes to be gathered: 40 ms a request, and as much between events.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Or the system takes in megabytes of a body that is refused, as fast as a client can send them.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    try:
        sock.bind((serve.host, serve.port))
    except OSError as problem:
        sock.close()
        raise OutriderError(
            f"cannot listen on {serve.host} port {serve.port}: {problem.strerror}; choose another with --port"
        ) from None
    sock.listen(2048)
    return sock


async def _run(service: Service, sock: socket.socket, store: BatchStore | None = None) -> int:
    batches = None if store is None else BatchRunner(service, store)
    backend, server = service.backend, _http(App(service, batches))
    background = None if batches is None else asyncio.create_task(batches.run())
    engine = asyncio.create_task(backend.run())
    web = asyncio.create_task(server.serve(sockets=[]))
    accepting = asyncio.create_task(_accept(server, service, sock))
    stopping = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stopping.is_set() else stopping).set())
    loop.add_signal_handler(signal.SIGHUP, _reload_keys, service)
    greeting = asyncio.create_task(_greet(service, sock))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((engine, web, accepting, stop), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if not stopping.is_set():
        code = 1
        print(f"error: {backend.problem or 'the server stopped'}", file=sys.stderr, flush=True)
    else:
        await end_background(background)
        await _drain(service, hurry)
    accepting.cancel()
    backend.stop()
    await engine
    server.should_exit = True
    await web
    for task in (greeting, stop):
        task.cancel()
    return code


def _http(app: App) -> Server:
    return Server(
        uvicorn.Config(
            app,
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


async def _accept(server: Server, service: Service, sock: socket.socket) -> None:
    """Connections, as many as the settings and the descriptors allow."""
    serve = service.settings
    limiter = ConnectionLimiter(
        min(serve.max_connections, max(RESERVED, _descriptors() - RESERVED)), serve.max_connections_per_peer
    )
    log_limiter = LogRateLimiter()
    shared = {
        "header_timeout": serve.header_timeout,
        "write_timeout": serve.write_timeout,
        "limiter": limiter,
        "intake": service.intake,
        "log_limiter": log_limiter,
    }
    kind = type("OwnConnection", (Connection,), shared)
    while not server.started:
        await asyncio.sleep(0.01)
    sock.setblocking(False)
    config, state = server.config, server.server_state
    await accept(sock, lambda: kind(config, state, {}), limiter, log_limiter)


def _descriptors() -> int:
    """How many this process may hold: as many as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def _reload_keys(service: Service) -> None:
    """SIGHUP: the key file has changed. A broken one changes nothing."""
    try:
        service.keys = Keyring.of(service.settings)
        log.info("keys read again", extra={"facts": {"keys": len(service.keys)}})
    except OutriderError as problem:
        log.error("keys not read again: %s", problem)


async def end_background(task: asyncio.Task[None] | None) -> None:
    """Ends the runner of batches. Lines that have no answer yet are done again at the next start."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _drain(service: Service, hurry: asyncio.Event) -> None:
    """Refuse new requests, wait for running ones within the time limit, and fail those that are left."""
    backend, seconds = service.backend, service.settings.drain_seconds
    service.draining = backend.last_life = True
    running = len(backend.jobs)
    some = "1 request" if running == 1 else f"{running} requests"
    todo = f"finishing {some}, at most {seconds:g} s; press Ctrl-C again to stop now"
    log.info(todo if running else "stopping")
    idle = asyncio.create_task(backend.wait_idle(seconds))
    impatient = asyncio.create_task(hurry.wait())
    await asyncio.wait((idle, impatient), return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, impatient):
        task.cancel()
    if backend.jobs:
        backend.fail_all(ApiError(503, "the server is shutting down", code="draining", after=5))
    await asyncio.sleep(0.1)  # for the last events to be written


async def _greet(service: Service, sock: socket.socket) -> None:
    """Say where and what, first that it is loading, then that it is ready."""
    backend = service.backend
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    _say(f"outrider: listening on {url}, loading {backend.start.model}")
    await backend.ready.wait()
    if backend.model is not None:
        _say(_card(backend.model, url, service.answer_tokens))
        print(_trial(backend.model, url, service.settings), flush=True)


def _card(model: ServedModel, url: str, answer_tokens: int) -> str:
    plan = model.plan
    paired = f" (the pair {plan['pair']}: outrider pairs show {plan['pair']})" if plan.get("pair") else ""
    return (
        f"ready     {url}/v1 in {plan['seconds']} s\n"
        f"page      {url} in a browser\n"
        f"model     {model.name}: {plan['parameters'] / 1e6:.0f} million parameters, {plan['weights']} on "
        f"{plan['device']}, context {model.context}\n"
        f"drafter   {model.drafter}{paired}\n"
        f"memory    {_memory(plan)}, {plan['max_sequences']} sequences at once\n"
        f"answers   up to {answer_tokens} tokens where a request sets no max_tokens"
    )


def _trial(model: ServedModel, url: str, serve: ServeSettings) -> str:
    """A request to copy: no line of it is left to the terminal to break."""
    key = '            -H "Authorization: Bearer $KEY" \\\n' if serve.api_keys or serve.key_file else ""
    return (
        f"try       curl {url}/v1/chat/completions \\\n{key}"
        f"            -H 'Content-Type: application/json' \\\n"
        f'            -d \'{{"model": "{model.name}",\n'
        '                 "messages": [{"role": "user", "content": "Hello!"}]}\''
    )


def _memory(plan: dict[str, Any]) -> str:
    if plan["memory"] is not None:
        return Memory(**plan["memory"]).describe()
    weights, cache = shown_size(plan["weight_bytes"]), shown_size(plan["cache_bytes"])
    return f"{weights} weights, {cache} cache for {plan['cache_tokens']} tokens"


def _say(text: str) -> None:
    print(fitted(text, sys.stdout), flush=True)
