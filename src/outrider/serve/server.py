"""`outrider serve`: the sockets, the signals, the beginning and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from outrider.engine.placement import Memory
from outrider.errors import OutriderError, install, invalid
from outrider.serve.app import App
from outrider.serve.batch_run import BatchRunner
from outrider.serve.batch_store import BatchStore
from outrider.serve.connection import Connection, ConnectionLimiter, LogRateLimiter, accept
from outrider.serve.errors import ApiError
from outrider.serve.host_check import MAX_HEADER_BYTES
from outrider.serve.keys import Keyring
from outrider.serve.log import set_up_logging
from outrider.serve.model import ServedModel
from outrider.serve.model_room import measure_room
from outrider.serve.model_service import ModelService
from outrider.serve.model_spec import ModelSpec, check_table
from outrider.serve.model_table import ModelTable
from outrider.serve.service import Service
from outrider.serve.settings import ServeSettings
from outrider.settings import shown_size
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


def run_server(table: Sequence[ModelSpec], serve: ServeSettings) -> int:
    """Serve the models until asked to stop. The exit code."""
    set_up_logging(serve.log_format, serve.log_level)
    check_table(table)
    check_events(table)
    keys = Keyring.of(serve)
    if keys.open and not serve.local:
        log.warning("anyone who can reach %s can use this server; set --api-key or --key-file", serve.host)
    _check_key_models(keys, table)
    with contextlib.ExitStack() as closing:
        store = _batch_store(serve, closing)
        sock = closing.enter_context(bind(serve))
        room = measure_room(table, serve.memory_bytes)
        service = Service(ModelTable([ModelService.of(spec) for spec in table], room), serve, keys)
        for model in service.table.models:
            model.traffic = _traffic(model.settings, keys, closing)
        return asyncio.run(_run(service, sock, store))


def check_events(table: Sequence[ModelSpec]) -> None:
    """Raises if events cannot be published as the table says, before anything is loaded."""
    addresses = [spec.serve.kv_events for spec in table if spec.serve.kv_events is not None]
    if addresses and find_spec("zmq") is None:
        raise OutriderError(f"kv_events needs pyzmq, which is not installed; {install('events')}")
    for spec in table:
        if spec.serve.kv_events is not None and not spec.settings.prefix_reuse:
            raise invalid("kv_events", "has nothing to publish without prefix_reuse")
    for address in addresses:
        if not address.startswith(("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")):
            log.warning("anyone who can reach %s can read the tokens of prompts", address)


def _check_key_models(keys: Keyring, table: Sequence[ModelSpec]) -> None:
    for name in sorted(keys.model_names.difference(*(spec.names for spec in table))):
        log.warning("a key may use the model %r, which is not served here", name)


def _traffic(serve: ServeSettings, keys: Keyring, closing: contextlib.ExitStack) -> TrafficKeeper | None:
    if serve.keep_traffic is None:
        return None
    from outrider.serve.traffic import TrafficKeeper  # brings numpy

    if not keys.keeps_traffic:
        log.warning("no key is marked with keep_traffic, so nothing will be kept in %s", serve.keep_traffic)
    keeper = TrafficKeeper(Path(serve.keep_traffic).expanduser(), serve.keep_traffic_bytes)
    closing.callback(keeper.close)
    return keeper


def _batch_store(serve: ServeSettings, closing: contextlib.ExitStack) -> BatchStore | None:
    if serve.batch_folder is None:
        return None
    store = BatchStore(Path(serve.batch_folder).expanduser(), serve.batch_bytes)
    closing.callback(store.close)
    return store


def bind(serve: ServeSettings) -> socket.socket:
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


async def _run(service: Service, sock: socket.socket, store: BatchStore | None) -> int:
    batches = None if store is None else BatchRunner(service, store)
    table, server = service.table, _http(App(service, batches))
    background = None if batches is None else asyncio.create_task(batches.run())
    engine = asyncio.create_task(table.run())
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
        print(f"error: {table.problem or 'the server stopped'}", file=sys.stderr, flush=True)
    else:
        await end_background(background)
        await _drain(service, hurry)
    accepting.cancel()
    table.stop()
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
        _check_key_models(service.keys, [model.spec for model in service.table.models])
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
    table, seconds = service.table, service.settings.drain_seconds
    service.draining = True
    table.begin_draining()
    running = table.jobs
    some = "1 request" if running == 1 else f"{running} requests"
    todo = f"finishing {some}, at most {seconds:g} s; press Ctrl-C again to stop now"
    log.info(todo if running else "stopping")
    idle = asyncio.create_task(table.wait_idle(seconds))
    impatient = asyncio.create_task(hurry.wait())
    await asyncio.wait((idle, impatient), return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, impatient):
        task.cancel()
    table.fail_all(ApiError(503, "the server is shutting down", code="draining", after=5))
    await asyncio.sleep(0.1)  # for the last events to be written


async def _greet(service: Service, sock: socket.socket) -> None:
    """Say where and what, first that it is loading, then that it is ready."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    loading = [model for model in service.table.models if model.away is None]
    later = [model.names[0] for model in service.table.models if model.away is not None]
    names = ", ".join(model.spec.source for model in loading) or "no model yet"
    _say(f"outrider: listening on {url}, loading {names}")
    for model in loading:
        await model.backend.ready.wait()
        if model.backend.model is not None:
            _say(_card(model.backend.model, url, model.answer_tokens))
            print(_trial(model.backend.model, url, service.settings), flush=True)
    if later:
        _say(f"later     {', '.join(later)}: loaded for the first request that names it")


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
