"""The server's life: loading, stopping, dying engines, clients that go, wait, or do not read, and full queues.

An engine stopped with SIGSTOP stands in for one that is slow: nothing here waits for luck.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from outrider.engine.driver import Driver
from outrider.errors import OutriderError
from outrider.serve.backend import Backend
from outrider.serve.engine_process import EngineProcess, prepare
from outrider.serve.errors import ApiError
from outrider.serve.keys import digest_of
from outrider.serve.link import Accepted, Compiled, Pong, Refused, Start, Submit
from outrider.serve.metrics import Metrics
from outrider.serve.settings import ServeSettings
from outrider.types import SamplingParams
from tests.serve.conftest import COMMAND, UNENCRYPTED, Served, start_server, wait_for, write_tiny
from tests.serve.test_outbox import received
from tests.tiny import prompt_of, request, tiny_engine, tiny_model

CALM = ("--threads", "1")  # a step of the tiny model is not worth a second thread
LONG = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True, "seed": 1}
SHORT = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "seed": 1}
LEAVES = 30.0  # seconds an idle server has to be gone, on a busy machine


class Talk:
    """A streamed completion, read on a thread of its own."""

    def __init__(self, served: Served, **changes: Any) -> None:
        self.status = 0
        self.events: list[dict[str, Any]] = []
        self.done = False  # the stream said it was
        self.reply: dict[str, Any] = {}  # in place of a stream
        self.broken: Exception | None = None
        body = {**LONG, "stream": True, **changes}
        self._thread = threading.Thread(
            target=self._read, args=(served.url + "/v1/completions", body), daemon=True
        )
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url, json=body, timeout=60, verify=UNENCRYPTED) as reply:
                self.status = reply.status_code
                if reply.status_code != 200 or not body["stream"]:
                    self.reply = json.loads(reply.read())
                    return
                for line in reply.iter_lines():
                    self.done = self.done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
        except Exception as problem:
            self.broken = problem

    def begun(self) -> Talk:
        """Once it has text."""
        wait_for(lambda: any(event.get("choices") for event in list(self.events)))
        return self

    def end(self, seconds: float = 60) -> Talk:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the answer did not end"
        assert self.broken is None, self.broken
        return self

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events if event.get("choices"))

    @property
    def error(self) -> dict[str, Any]:
        """What the stream, or the body in its place, ended with instead of an answer."""
        assert not self.done
        return (self.events[-1] if self.events else self.reply)["error"]


def send(served: Served, path: str = "/v1/completions", room: int = 0, **body: Any) -> socket.socket:
    """A request on a socket whose answer nobody reads."""
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if room:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the sender's buffer goes by this
    sock.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@contextlib.contextmanager
def frozen(engine: psutil.Process) -> Iterator[None]:
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def endless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long answer of this one lasts a minute: whatever ends sooner was ended."""
    folder = tmp_path_factory.mktemp("endless") / "tiny"
    write_tiny(folder, context=1 << 16)
    return folder


@pytest.fixture
def serve_endless(endless_folder: Path, start: Callable[..., Served]) -> Callable[..., Served]:
    return partial(start, endless_folder)


# ------------------------------------------------------------------------------------------------ beginning


def test_from_loading_to_the_last_answer(serve_endless: Callable[..., Served]) -> None:
    """While it loads it says so and knows its model. Answers that run are finished before it leaves."""
    server = serve_endless(*CALM, "--drain-seconds", "50", ready=False)
    health = server.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "loading"
    assert health.headers["retry-after"]
    models = server.get("/v1/models")
    assert models.status_code == 200
    assert [card["id"] for card in models.json()["data"]] == ["tiny"]
    early = server.post("/v1/completions", SHORT)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
    assert early.headers["retry-after"]
    server.wait_ready()
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["tiny"]
    wait_for(lambda: server.get("/health").json() == {"status": "ok", "prepared": True})
    assert server.metric("prepared") == 1
    engine = server.engine()
    alone = Talk(server, max_tokens=400).end()
    talks = [Talk(server, max_tokens=400), Talk(server, max_tokens=400, stream=False)]
    talks[0].begun()
    wait_for(lambda: server.metric("num_requests_running") == 2)
    with frozen(engine):  # so that it is still at it while it is looked at
        server.process.send_signal(signal.SIGTERM)
        engine.terminate()  # as init systems do, who tell every process
        wait_for(lambda: server.get("/health").json().get("status") == "draining")
        assert server.get("/health").status_code == 503
        late = server.post("/v1/completions", SHORT)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert late.headers["retry-after"] and late.headers["connection"] == "close"
        assert server.printed("finishing 2 requests, at most 50 s; press Ctrl-C again to stop now\n")
    streamed, whole = talks[0].end(), talks[1].end()
    assert streamed.done
    assert streamed.text == alone.text
    assert whole.reply["choices"][0]["text"] == alone.text
    assert server.process.wait(LEAVES) == 0
    assert gone(engine)


def test_told_to_stop_while_loading_it_leaves(serve_endless: Callable[..., Served]) -> None:
    server = serve_endless(*CALM, ready=False)
    wait_for(lambda: bool(psutil.Process(server.process.pid).children()))
    [engine] = psutil.Process(server.process.pid).children()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LEAVES) == 0
    assert gone(engine)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider", "serve", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"error: {tmp_path} holds no weights" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_log_that_nobody_reads_stops_nothing(tiny_folder: Path) -> None:
    """stderr is a pipe that is full from the start; later its reader is gone, and writing to it fails."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    command = [*COMMAND, "serve", str(tiny_folder), "--port", "0", *CALM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        assert process.stdout is not None
        try:
            server = Served(process, process.stdout.readline().split("listening on ")[1].split(",")[0])
            server.wait_ready()
            for _ in range(3):  # each writes a line
                assert server.get("/v1/nothing").status_code == 404
            os.close(ours)
            assert server.post("/v1/completions", SHORT).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(LEAVES) == 0
        finally:
            process.kill()


def test_a_taken_port_is_known_at_once(tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "outrider", "serve", str(tiny_folder), "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "--port" in ended.stderr  # the way out
    assert "Traceback" not in ended.stderr


# ------------------------------------------------------------------------------------------------------ end


@pytest.mark.slow
def test_answers_that_outlast_the_drain_are_told(serve_endless: Callable[..., Served]) -> None:
    server = serve_endless(*CALM, "--drain-seconds", "0.3", "--max-sequences", "2")
    engine = server.engine()
    talks = [Talk(server).begun(), Talk(server).begun(), Talk(server), Talk(server, stream=False)]
    wait_for(lambda: server.metric("num_requests_waiting") == 2)
    server.process.send_signal(signal.SIGTERM)
    for talk in talks:
        assert talk.end().error["code"] == "draining"
    assert talks[-1].status == 503
    assert server.process.wait(LEAVES) == 0
    assert gone(engine)


def test_a_drain_closes_kept_connections_and_a_second_signal_ends_it(
    serve_endless: Callable[..., Served],
) -> None:
    """A connection that was kept is closed with its next answer. The second signal waits for nobody, not even for
    an engine that hangs.
    """
    server = serve_endless(*CALM, "--drain-seconds", "300")
    engine = server.engine()
    talk = Talk(server).begun()
    with httpx.Client(base_url=server.url, verify=UNENCRYPTED) as client:
        assert "connection" not in client.get("/health").headers
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health").json().get("status") == "draining")
        refused = client.post("/v1/completions", json=SHORT)  # by the connection that was there before
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) > 0
    count = len(talk.events)
    wait_for(lambda: len(talk.events) > count)  # what runs goes on
    engine.suspend()  # for good
    server.process.send_signal(signal.SIGTERM)
    assert talk.end().error["code"] == "draining"
    assert server.process.wait(LEAVES) == 0
    assert gone(engine)


# ------------------------------------------------------------------------------------------ dying engines


def test_a_stopped_engine_goes_on_and_a_killed_one_is_started_again(
    serve_endless: Callable[..., Served],
) -> None:
    server = serve_endless(*CALM, "--max-sequences", "2")
    before = Talk(server, max_tokens=300).end().text
    engine = server.engine()
    talks = [Talk(server, max_tokens=300).begun(), Talk(server, max_tokens=300, stream=False)]
    with frozen(engine):
        late = Talk(server, max_tokens=300)  # waits for the engine, not for a refusal
        assert server.get("/metrics").status_code == 200 and server.get("/v1/models").status_code == 200
    assert talks[0].end().text == late.end().text == before
    assert talks[1].end().reply["choices"][0]["text"] == before
    running, _, waiting = Talk(server).begun(), Talk(server).begun(), Talk(server, stream=False)
    wait_for(lambda: server.metric("num_requests_waiting") == 1)
    engine.suspend()
    engine.kill()
    wait_for(lambda: server.get("/health").status_code == 503)
    assert running.end().error["code"] == "engine_lost"
    assert waiting.end().status == 503
    assert waiting.error["code"] == "engine_lost"
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    assert server.metric("engine_up") == 0
    meanwhile = server.post("/v1/completions", SHORT)
    assert meanwhile.status_code == 503
    assert meanwhile.headers["retry-after"]
    server.wait_ready()
    assert Talk(server, max_tokens=300).end().text == before
    assert server.metric("engine_restarts_total") == 1
    # Asked to stop between two engines, it starts no third.
    engine = server.engine()
    engine.kill()
    wait_for(lambda: server.get("/health").status_code == 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LEAVES) == 0
    assert gone(engine)


def test_an_engine_that_keeps_dying_ends_the_server(serve_endless: Callable[..., Served]) -> None:
    server = serve_endless(*CALM, "--engine-restarts", "0")
    talk = Talk(server).begun()
    server.engine().kill()
    assert talk.end().error["code"] == "engine_lost"
    assert server.process.wait(LEAVES) == 1
    assert server.printed("the engine died")


def test_choices_that_end_in_the_same_step_all_arrive(served: Served) -> None:
    reply = served.post("/v1/completions", {**SHORT, "n": 4})
    assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["length"] * 4


def test_a_request_that_ends_in_its_first_step_is_counted(served: Served) -> None:
    before = served.metric("prompt_tokens_total")
    served.post("/v1/completions", {"prompt": [40, 41, 42], "max_tokens": 1})
    assert served.metric("prompt_tokens_total") == before + 3


# ----------------------------------------------------------------------- clients that go, wait, do not read


@pytest.fixture(scope="module")
def strict(endless_folder: Path) -> Iterator[Served]:
    """Short of everything, and remembers nothing: whatever of the cache is in use, some sequence holds."""
    flags = {
        "--max-sequences": "2",
        "--max-queued-requests": "3",
        "--max-queued-tokens": "60",
        "--write-timeout": "1",
    }
    words = [word for pair in flags.items() for word in pair]
    server = start_server(endless_folder, *CALM, "--no-prefix-reuse", *words)
    yield server
    assert server.stop() == 0


@pytest.fixture
def quiet(strict: Served) -> Iterator[Served]:
    """The strict server with nothing to do, before and after: what a test leaves running is a leak."""
    assert all_free(strict)
    yield strict
    wait_for(lambda: all_free(strict))


def all_free(server: Served) -> bool:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(server.metric(name) for name in gauges)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_goes_frees_what_it_held(quiet: Served, stream: bool) -> None:
    before = quiet.metric("client_disconnects_total")
    with send(quiet, **LONG, n=2, stream=stream):
        wait_for(lambda: quiet.metric("num_requests_running") == 2)
        assert quiet.metric("kv_cache_usage_perc") > 0
        written = quiet.metric("generation_tokens_total")
    wait_for(lambda: all_free(quiet))
    assert quiet.metric("client_disconnects_total") == before + 1
    assert quiet.metric("generation_tokens_total") - written < 2 * LONG["max_tokens"]


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_goes_leaves_the_queue(quiet: Served, stream: bool) -> None:
    with send(quiet, **LONG, stream=True), send(quiet, **LONG, stream=True):
        wait_for(lambda: quiet.metric("num_requests_running") == 2)
        with send(quiet, **LONG, stream=stream):
            wait_for(lambda: quiet.metric("num_requests_waiting") == 1)
        wait_for(lambda: quiet.metric("num_requests_waiting") == 0)
        assert quiet.metric("num_requests_running") == 2  # nobody else was hurt


def test_a_client_that_goes_is_not_waited_for_by_a_slow_engine(quiet: Served) -> None:
    """As while its grammar is compiled: the engine has said neither yes nor no."""
    before = quiet.metric("client_disconnects_total")
    with frozen(quiet.engine()):
        with send(quiet, **SHORT, structured_outputs={"regex": "[a-z]{40}"}):
            wait_for(lambda: quiet.metric("num_requests_waiting") == 1)
        wait_for(lambda: quiet.metric("client_disconnects_total") == before + 1)


@contextlib.contextmanager
def engine_in_hand(
    compile: Callable[[], None] = lambda: None,
) -> Iterator[tuple[EngineProcess, Driver, socket.socket]]:
    """The engine and its side of a socket, with a say in how long a grammar takes; and the other side."""

    def make(prompt: list[int], params: SamplingParams, owner: str, name: str, background: bool) -> Any:
        if params.grammar is not None:
            compile()
        return request(name, prompt)

    driver = Driver(lambda: tiny_engine(tiny_model()))
    llm: Any = SimpleNamespace(driver=driver, engine=driver.engine, request=make)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield EngineProcess(theirs, llm), driver, ours
        driver.close()


def heard_until(sock: socket.socket, kind: type) -> list[Any]:
    """Messages for the API process, up to the first of that kind."""
    heard: list[Any] = []
    while not heard or not isinstance(heard[-1], kind):
        heard += received(sock, 1)
    return heard


REGEX = SamplingParams(grammar={"regex": "[a-z]+"})


def test_a_request_given_up_while_its_grammar_is_compiled_never_starts() -> None:
    asked, compiled = threading.Event(), threading.Event()

    def slowly() -> None:
        asked.set()
        assert compiled.wait(20)

    with engine_in_hand(slowly) as (process, driver, sock):
        process._submit(Submit("left", prompt_of(9), REGEX, ""))
        assert asked.wait(20)
        process._submit(Submit("passed by", prompt_of(9), SamplingParams(), ""))
        assert [message.id for message in heard_until(sock, Accepted)] == ["passed by"]
        process._abort("left")
        compiled.set()
        process.compilers.shutdown()
        driver.run(lambda: None)  # whatever was to be added by then is
        process.outbox.put(Pong())
        heard = heard_until(sock, Pong)
    assert not [message for message in heard if isinstance(message, Accepted)]
    assert not process.building
    assert not process.given_up
    assert not driver.engine.live


def test_a_grammar_given_up_before_its_turn_is_not_compiled() -> None:
    asked, compiled = threading.Semaphore(0), threading.Event()
    begun = []

    def slowly() -> None:
        begun.append(1)
        asked.release()
        assert compiled.wait(20)

    with engine_in_hand(slowly) as (process, *_):
        for name in ("one", "two", "left"):
            process._submit(Submit(name, prompt_of(9), REGEX, ""))
        for _ in range(2):
            assert asked.acquire(timeout=20)
        process._abort("left")
        compiled.set()
        process.compilers.shutdown()
    assert len(begun) == 2
    assert not process.building and not process.given_up


def test_a_compiled_grammar_is_told_before_the_step_in_hand_ends() -> None:
    stepping, stepped = threading.Event(), threading.Event()
    with engine_in_hand() as (process, driver, sock):
        driver.post(lambda: (stepping.set(), stepped.wait(20), None)[-1])
        assert stepping.wait(20)
        process._submit(Submit("one", prompt_of(9), REGEX, ""))
        assert isinstance(received(sock, 1)[0], Compiled)
        assert not select.select([sock], [], [], 0)[0]
        stepped.set()
        assert isinstance(received(sock, 1)[0], Accepted)


def test_only_compiling_counts_against_the_time_for_grammars() -> None:
    async def opened(*messages: Callable[[str], object]) -> int:
        settings = ServeSettings(grammar_timeout=0.05)
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), settings, Metrics())
        backend.state = "ready"
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(backend.open([([1], REGEX)], "", "", loop.time() + 20))
        await asyncio.sleep(0)
        [name] = backend.jobs
        for message in messages:
            await backend._handle(message(name))
        await asyncio.sleep(0.2)
        await backend._handle(Accepted(name, 7))
        return (await task).jobs[0].seed

    assert asyncio.run(opened(Compiled)) == 7
    with pytest.raises(ApiError, match="took longer than"):
        asyncio.run(opened())


def test_the_engine_compiles_grammars_client_by_client() -> None:
    """What one client has compiled again and again waits here, not in the engine's queue before others'."""

    async def main() -> None:
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), Metrics())
        backend.state = "ready"
        deadline = asyncio.get_running_loop().time() + 20
        several = [([1], REGEX), ([2], REGEX)]
        tasks = [
            asyncio.create_task(backend.open(several, "", client, deadline)) for client in ("a", "a", "b")
        ]

        async def sent() -> list[int]:
            for _ in range(9):
                await asyncio.sleep(0)
            return [number for number, job in enumerate(backend.jobs.values()) if job.sent]

        assert await sent() == [0, 4]  # the first of each client
        names = list(backend.jobs)
        await backend._handle(Compiled(names[0]))
        assert await sent() == [0, 2, 4]
        await backend._handle(Compiled(names[4]))
        assert await sent() == [0, 2, 4, 5]
        await backend._handle(Refused(names[2], "no", "grammar"))
        await sent()
        assert isinstance(tasks[1].exception(), ApiError)
        assert names[1] in backend.jobs and backend.jobs[names[1]].sent
        for task in tasks:
            task.cancel()

    asyncio.run(main())


def test_the_first_request_after_a_long_silence_is_no_stall() -> None:
    async def health() -> tuple[bool, bool]:
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), Metrics())
        backend.state, backend.last_received = "ready", time.monotonic() - 3600
        deadline = asyncio.get_running_loop().time() + 20
        task = asyncio.create_task(backend.open([([1], SamplingParams())], "", "", deadline))
        await asyncio.sleep(0)
        early = backend.well
        backend.last_received -= 3600
        late = backend.well
        task.cancel()
        return early, late

    assert asyncio.run(health()) == (True, False)


def test_an_engine_that_gives_no_sign_of_life_is_not_well(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real engine process, stopped while nobody asks anything, and let go on."""
    monkeypatch.setattr("outrider.serve.backend.SILENT", 0.4)
    monkeypatch.setattr("outrider.serve.backend.PING_SECONDS", 0.05)

    async def life() -> None:
        start = Start(str(tiny_folder), "none", {"threads": 1}, ("text", "warning"))
        backend = Backend(start, ServeSettings(), Metrics())
        running = asyncio.create_task(backend.run())
        try:
            await asyncio.wait_for(backend.ready.wait(), 60)
            assert backend._process is not None
            await turns(lambda: backend.well)
            with frozen(psutil.Process(backend._process.pid)):
                await turns(lambda: not backend.well)
                assert backend.state == "ready" and not running.done()  # it is waited for, not replaced
            await turns(lambda: backend.well)
        finally:
            backend.stop()
            assert await asyncio.wait_for(running, 30)

    asyncio.run(life())


async def turns(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_an_engine_whose_thread_is_dead_does_not_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[BaseException] = []
    monkeypatch.setattr("outrider.serve.engine_process._die", deaths.append)
    with engine_in_hand() as (process, driver, _):
        with contextlib.suppress(RuntimeError, OutriderError):
            driver.engine.step = None  # type: ignore[assignment]
            driver.submit([request("fatal", prompt_of(5))], lambda event: None)
        wait_for(lambda: driver._failure is not None)
        process._submit(Submit("next", prompt_of(5), SamplingParams(), ""))
    assert len(deaths) == 1


def test_a_request_that_takes_too_long_ends_and_a_killed_server_leaves_no_engine(
    serve_endless: Callable[..., Served],
) -> None:
    server = serve_endless(*CALM, "--request-timeout", "2")
    begin = time.monotonic()
    talks = [Talk(server).begun(), Talk(server, stream=False)]
    wait_for(lambda: server.metric("num_requests_running") == 2)
    with frozen(server.engine()):
        late = Talk(server)  # not even taken in
        for talk in (*talks, late):
            assert talk.end().error["type"] == "timeout_error"
    assert time.monotonic() - begin > 1.9
    assert [talk.status for talk in (*talks, late)] == [200, 504, 504]
    engine = server.engine()
    Talk(server).begun()
    server.process.kill()
    wait_for(lambda: gone(engine))


def test_a_client_that_does_not_read_is_dropped_and_hurts_nobody(quiet: Served) -> None:
    alone = Talk(quiet, max_tokens=200).end()
    before = quiet.metric("client_disconnects_total")
    with send(quiet, **LONG, stream=True, logprobs=20, room=4096) as deaf:
        wait_for(lambda: quiet.metric("num_requests_running") == 1)
        others = [Talk(quiet, max_tokens=200).end() for _ in range(2)]
        assert [talk.text for talk in others] == [alone.text] * 2
        wait_for(lambda: quiet.metric("client_disconnects_total") == before + 1)
        wait_for(lambda: all_free(quiet))
        wait_for(lambda: not connected(quiet, deaf))


def connected(server: Served, client: socket.socket) -> bool:
    """Whether the server still holds its end of the connection."""
    ports = {c.raddr.port for c in psutil.Process(server.process.pid).net_connections("tcp") if c.raddr}
    return client.getsockname()[1] in ports


# ----------------------------------------------------------------------------------------------- full queues


@pytest.fixture
def busy(quiet: Served) -> Iterator[Served]:
    """Two long answers run, as many as may, and the engine stands still."""
    with send(quiet, **LONG, stream=True), send(quiet, **LONG, stream=True):
        wait_for(lambda: quiet.metric("num_requests_running") == 2)
        with frozen(quiet.engine()):
            yield quiet


def refused(reply: httpx.Response) -> bool:
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
    return int(reply.headers["retry-after"]) >= 1


def test_a_full_queue_refuses_with_a_time_to_come_back(busy: Served) -> None:
    before = busy.metric("admission_rejections_total")
    with send(busy, **LONG, stream=True), send(busy, **LONG), send(busy, **LONG) as last:
        wait_for(lambda: busy.metric("num_requests_waiting") == 3)
        assert refused(busy.post("/v1/completions", SHORT))
        assert busy.metric("admission_rejections_total") == before + 1
        last.close()
        wait_for(lambda: busy.metric("num_requests_waiting") == 2)
        with send(busy, **LONG):  # there is room again
            wait_for(lambda: busy.metric("num_requests_waiting") == 3)


def test_a_queue_full_of_long_prompts_refuses_too(busy: Served) -> None:
    with send(busy, **{**SHORT, "prompt": "x" * 50}):
        wait_for(lambda: busy.metric("num_requests_waiting") == 1)
        assert refused(busy.post("/v1/completions", {**SHORT, "prompt": "x" * 11}))
        with send(busy, **{**SHORT, "prompt": "x" * 10}):
            wait_for(lambda: busy.metric("num_requests_waiting") == 2)


def test_a_key_that_asks_too_much_is_refused_and_others_are_not(
    serve_endless: Callable[..., Served], tmp_path: Path
) -> None:
    limits = {
        "often": "requests_per_minute = 2",
        "much": "tokens_per_minute = 100",
        "at-once": "max_running = 1",
        "free": "",
    }
    tables = [
        f'[[key]]\nname = "{name}"\nhash = "sha256:{digest_of(secret(name)).hex()}"\n{limit}\n'
        for name, limit in limits.items()
    ]
    (tmp_path / "keys.toml").write_text("\n".join(tables))
    server = serve_endless(*CALM, "--key-file", str(tmp_path / "keys.toml"))

    def asked(name: str, **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {secret(name)}"}
        return server.post("/v1/completions", {**SHORT, **changes}, headers=headers)

    assert [asked("often").status_code for _ in range(3)] == [200, 200, 429]
    assert [asked("much", max_tokens=60).status_code for _ in range(2)] == [200, 429]
    assert asked("much", max_tokens=200).status_code == 400  # no waiting will help
    with frozen(server.engine()):
        first = threading.Thread(target=asked, args=("at-once",))
        first.start()
        wait_for(lambda: running(server) == 1)
        refused = asked("at-once")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"]
    first.join(20)
    assert asked("at-once").status_code == 200  # what has ended no longer counts
    assert [asked("free").status_code for _ in range(4)] == [200] * 4


def secret(name: str) -> str:
    return f"sk-{name}-0123456789abcdef"


def running(server: Served) -> float:
    headers = {"authorization": f"Bearer {secret('free')}"}
    text = server.get("/metrics", headers=headers).text
    [line] = [line for line in text.splitlines() if line.startswith("outrider:num_requests_waiting{")]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize(("rest", "pieces", "left"), [(60.0, 5, 0), (0.0, 5, 5), (0.05, 10**9, 1)])
def test_what_answers_can_do_without_is_prepared_for_a_while(rest: float, pieces: int, left: int) -> None:
    waits, work = [], iter(range(pieces))

    class Idle:
        idle_work: object | None = work

        def run(self, ask: Callable[[], bool]) -> bool:
            if next(work, None) is None:
                self.idle_work = None
            return ask()

    driver = Idle()
    prepare(SimpleNamespace(prepare=lambda wait: waits.append(wait), driver=driver), rest)  # type: ignore[arg-type]
    assert waits == ["plain"]
    assert (driver.idle_work is None) == (left == 0)
