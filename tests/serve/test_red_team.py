"""Attacks that the server once fell for, each as a test named after its number in the list of what broke."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from outrider import LLM, Settings
from outrider.errors import LONGEST_NAME, InvalidRequest, suggest
from outrider.load.tokenizer import Tokenizer
from outrider.serve import backend as backends
from outrider.serve import connection
from outrider.serve.backend import Backend
from outrider.serve.connection import ConnectionLimiter, LogRateLimiter
from outrider.serve.errors import ApiError
from outrider.serve.intake import BURST, RATE, Intake, Pool
from outrider.serve.length import bytes_of_tokens, check_length
from outrider.serve.link import Start
from outrider.serve.metrics import Metrics
from outrider.serve.settings import ServeSettings
from tests.load.tiny import byte_level_backend
from tests.serve.conftest import Served, start_server, wait_for
from tests.serve.test_probes import CHAT, GOOD, PLAIN, exchange, post, told

KEY = "a-key-for-the-red-team"


@pytest.fixture(scope="module")
def hurried(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that waits for nobody long, whose only key may send three requests a minute."""
    from hashlib import sha256

    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    digest = sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[[key]]\nname = "few"\nhash = "sha256:{digest}"\nrequests_per_minute = 3\n')
    flags = [
        "--header-timeout",
        "1",
        "--body-timeout",
        "1",
        "--max-connections",
        "600",
        "--log-level",
        "info",
    ]
    server = start_server(tiny_folder, *flags, "--key-file", str(keys))
    yield server
    assert server.stop() == 0


def connect(served: Served) -> socket.socket:
    where = urlsplit(served.url)
    return socket.create_connection((where.hostname or "", where.port or 0), timeout=20)


# ------------------------------------------------------------------------------------------- 3: long texts


def test_red_team_3_a_length_that_cannot_fit_is_refused_at_the_headers(served: Served) -> None:
    """Nothing of the body was sent, and the answer is there."""
    received = exchange(served, post(b"", "Content-Length: 8000000", path=CHAT))
    assert (
        received.startswith(b"HTTP/1.1 413")
        and b"no text that fits" in received
        and b"connection: close" in received
    )


def test_red_team_3_a_text_that_cannot_fit_is_refused_while_it_arrives(served: Served) -> None:
    """The end of the body never comes."""
    backend = byte_level_backend()
    model_bytes = bytes_of_tokens(Tokenizer(backend), backend.to_str(), 2048) or 0
    text = b'{"prompt": "' + b"7" * (model_bytes + 70_000)
    received = exchange(served, post(text, "Content-Length: 900000"))
    assert received.startswith(b"HTTP/1.1 400") and b"context_length_exceeded" in received
    told(400, received.partition(b"\r\n\r\n")[2])


def test_red_team_3_many_token_ids_are_no_text(served: Served) -> None:
    reply = served.post(PLAIN, {"prompt": [[5] * 1000] * 40, "max_tokens": 1})
    assert reply.status_code == 200


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_red_team_3_a_text_of_too_many_tokens_is_refused_before_it_is_encoded(
    served: Served, path: str
) -> None:
    text = "7" * 10_000
    body = {"prompt": text} if path == PLAIN else {"messages": [{"role": "user", "content": text}]}
    reply = served.post(path, {**body, "max_tokens": 1})
    error = told(reply.status_code, reply.content)
    assert error["code"] == "context_length_exceeded" and "cannot fit" in error["message"]


def test_red_team_3_counting_stops_once_it_is_certain() -> None:
    tokenizer, seen = Tokenizer(byte_level_backend()), []

    class Counting:
        def encode(self, text: str, special: bool = True) -> list[int]:
            seen.append(len(text))
            return tokenizer.encode(text, special)

    with pytest.raises(InvalidRequest, match="maximum context length"):
        check_length("7" * 1_000_000, Counting(), 2048, None, "prompt")  # type: ignore[arg-type]
    assert sum(seen) <= 3 * 8192
    with pytest.raises(InvalidRequest, match="1000000 characters"):
        check_length("7" * 1_000_000, Counting(), 2048, 900_000, "prompt")  # type: ignore[arg-type]
    for text in ("hello world " * 100, "7" * 4096):  # those that may fit pass: encoding them decides
        check_length(text, tokenizer, 2048, None, "prompt")


def test_red_team_3_what_a_token_can_stand_for() -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer(backend)
    shape = json.loads(backend.to_str())
    longest = max(len(tokenizer.token_bytes(i, special=True)) for i in range(tokenizer.vocab_size))
    assert bytes_of_tokens(tokenizer, json.dumps(shape), 100) == 100 * longest
    composing = {**shape, "normalizer": {"type": "NFC"}}
    assert bytes_of_tokens(tokenizer, json.dumps(composing), 100) == 400 * longest
    for swallowing in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}},
        {"added_tokens": [{"id": 0, "content": "x", "rstrip": True}]},
    ):
        assert bytes_of_tokens(tokenizer, json.dumps({**shape, **swallowing}), 100) is None


def test_red_team_3_refused_requests_count_and_tokenizing_does_too(hurried: Served) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    asked: list[tuple[str, Any]] = [
        ("/tokenize", {"prompt": "7" * 100_000}), ("/detokenize", {"tokens": [5]}), (PLAIN, {"prompt": 5}),
        (PLAIN, {"prompt": 5}), ("/tokenize", {"prompt": "hi"}), (CHAT, GOOD[CHAT]),
    ]  # fmt: skip
    replies = [hurried.post(path, body, headers=headers) for path, body in asked]
    assert [reply.status_code for reply in replies] == [400, 200, 400, 429, 429, 429]
    assert "3 requests a minute" in told(429, replies[3].content)["message"]
    assert int(replies[3].headers["retry-after"]) > 0


def test_red_team_3_the_pool_is_bounded_and_forgets_who_hung_up() -> None:
    begun, go = [], threading.Event()

    def work(name: str) -> str:
        begun.append(name)
        assert go.wait(10)
        return name

    async def run() -> None:
        pool = Pool(most_waiting=2, metrics=Metrics(), workers=1)
        first = asyncio.create_task(pool.run(work, "first"))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(pool.run(work, name)) for name in ("gone", "second")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await pool.run(work, "too many")
        assert refused.value.status == 503 and refused.value.after
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert pool.waiting == 1
        first.cancel()  # its thread goes on, and keeps its place until it ends
        await asyncio.sleep(0)
        assert begun == ["first"]
        go.set()
        assert await waiting[1] == "second"

    asyncio.run(run())
    assert begun == ["first", "second"]


def test_red_team_3_large_bodies_are_taken_in_at_a_rate() -> None:
    now = [100.0]
    intake = Intake(lambda: now[0])
    burst = int(RATE * BURST)
    assert intake.take(burst) == 0
    assert intake.take(int(RATE)) == pytest.approx(1, abs=1e-3)
    now[0] += 10
    assert intake.take(burst) == 0


# ------------------------------------------------------------------------------------------ 5: connections


UNREAD: tuple[tuple[str, tuple[str, ...], int], ...] = (
    (CHAT, ("Content-Length: 80000000",), 413),
    ("/nowhere", ("Content-Length: 5000",), 404),
    ("/health", ("Content-Length: 5000", "Host: elsewhere.example"), 400),
)


def test_red_team_5_a_refused_connection_does_not_live_on(served: Served) -> None:
    """Whoever sends a byte now and then after a refusal is cut off."""
    held = [connect(served) for _ in UNREAD]
    for each, (path, headers, status) in zip(held, UNREAD, strict=True):
        each.sendall(post(b"{", *headers, path=path))
        received = b""
        while part := each.recv(65536):  # until nothing more will be said
            received += part
        assert received.startswith(f"HTTP/1.1 {status}".encode()) and b"connection: close" in received
    deadline = time.monotonic() + 60
    while held:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        held = [each for each in held if _sends(each)]


def _sends(each: socket.socket) -> bool:
    try:
        each.sendall(b"x")
    except OSError:
        each.close()
        return False
    return True


def test_red_team_5_five_hundred_trickling_connections(hurried: Served) -> None:
    """Closed within their time, and meanwhile others are answered."""
    held = [connect(hurried) for _ in range(500)]
    began = time.monotonic()
    pieces = (b"POST /v1/completions HT", post(b"{", "Content-Length: 500"))
    for number, each in enumerate(held):
        each.sendall(pieces[number % 2])
    slowest = 0.0
    while held:
        asked = time.monotonic()
        assert hurried.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - asked)
        held = [each for each in held if not _trickle(each)]
        assert time.monotonic() - began < 60
    assert slowest < 10


def _trickle(each: socket.socket) -> bool:
    """One more byte; whether the connection is gone."""
    try:
        each.sendall(b"x")
        each.settimeout(0.001)
        with contextlib.suppress(TimeoutError):
            while each.recv(65536):
                pass
            each.close()
            return True
    except OSError:
        each.close()
        return True
    return False


def test_red_team_5_a_connection_too_many_is_told_so(tiny_folder: Path) -> None:
    server = start_server(tiny_folder, "--max-connections", "3", ready=False)  # no engine is needed for it
    held = [connect(server) for _ in range(3)]
    for each in held:
        each.sendall(b"GET")  # so that it has been taken
    deadline = time.monotonic() + 20
    while not (received := _first_line(server)).startswith(b"HTTP/1.1 503"):
        assert time.monotonic() < deadline, received
    for each in held:
        each.close()
    wait_for(lambda: server.get("/v1/models").status_code == 200)
    assert server.stop() == 0


def _first_line(server: Served) -> bytes:
    with connect(server) as another, contextlib.suppress(OSError):
        another.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return another.recv(65536)
    return b""


def test_red_team_5_connections_are_counted_by_peer() -> None:
    crowd = ConnectionLimiter(most=5, most_per_peer=2)
    for _ in range(2):
        crowd.enter("203.0.113.5")
    assert (
        "from your address" in (crowd.refusal("203.0.113.5") or "") and crowd.refusal("203.0.113.6") is None
    )
    for _ in range(2):
        crowd.enter("127.0.0.1")
    assert crowd.refusal("127.0.0.1") is None and crowd.refusal("::1") is None
    assert crowd.refusal("::ffff:127.0.0.1") is None
    crowd.enter("127.0.0.1")
    assert "--max-connections" in (crowd.refusal("127.0.0.1") or "")
    crowd.leave("203.0.113.5")
    assert crowd.refusal("203.0.113.5") is None


def test_red_team_5_accepting_waits_when_descriptors_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as it waits, and one line of log."""
    waits: list[float] = []

    async def run() -> None:
        async def exhausted(sock: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 5:
                raise asyncio.CancelledError

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", exhausted, raising=False)
        monkeypatch.setattr(connection.asyncio, "sleep", sleep)
        with contextlib.suppress(asyncio.CancelledError):
            await connection.accept(None, None, ConnectionLimiter(1, 0), LogRateLimiter())  # type: ignore[arg-type]

    asyncio.run(run())
    assert waits == [connection.RETRY_ACCEPT] * 5
    assert len([r for r in caplog.records if "no descriptors left" in r.message]) == 1


def test_red_team_5_log_lines_are_throttled(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    throttle = LogRateLimiter(lambda: now[0])
    for _ in range(1000):
        throttle.warn("again")
    now[0] += connection.QUIET
    throttle.warn("again")
    facts = [record.facts for record in caplog.records]  # type: ignore[attr-defined]
    assert facts == [{}, {"left_out": 999}]


def test_red_team_5_an_engine_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    async def refuse(*args: Any, **options: Any) -> Any:
        tries.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(backends.asyncio, "create_subprocess_exec", refuse)
    monkeypatch.setattr(backends, "START_DELAY", 0.0)

    async def run() -> Backend:
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), Metrics())
        assert await backend.run() is False
        return backend

    backend = asyncio.run(run())
    assert len(tries) == backends.START_TRIES and backend.state == "failed"
    assert "Too many open files" in backend.problem


# ------------------------------------------------------------------------------------------- 6: suggestions


def test_red_team_6_a_name_of_megabytes_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr("difflib.get_close_matches", lambda name, *a, **k: compared.append(name) or [])
    suggest("x" * 7_000_000, ["temperature"])
    assert all(len(name) <= LONGEST_NAME for name in compared)


@pytest.mark.parametrize("name", ["speculative_decoding", "structured_outputs", ""])
def test_red_team_6_names_of_megabytes_are_refused_in_short(served: Served, name: str) -> None:
    long = {"x" * 10_000: 1}
    reply = served.post(CHAT, {**GOOD[CHAT], **({name: long} if name else long)})
    error = told(reply.status_code, reply.content)
    assert len(error["message"]) <= 500 and len(error["param"]) < 200


# ----------------------------------------------------------------------------------------------- 8: the rest


def test_red_team_8_headers_have_64_kib(served: Served) -> None:
    for size, status in ((60_000, 200), (100_000, 431)):
        lines = f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: {'y' * size}\r\n\r\n"
        received = exchange(served, lines.encode())
        assert received.startswith(
            (f"HTTP/1.1 {status}".encode(), b"HTTP/1.1 400" if status == 431 else b"-")
        )


@pytest.mark.parametrize("name", ["Authorization", "Content-Type", "X-Api-Key"])
def test_red_team_8_two_of_a_header_are_refused_by_name(served: Served, name: str) -> None:
    lines = f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{name}: a\r\n{name}: b\r\n\r\n"
    received = exchange(served, lines.encode())
    assert received.startswith(b"HTTP/1.1 400") and f"two {name.lower()} headers".encode() in received


def test_red_team_8_what_is_no_http_is_logged_with_id_and_peer(hurried: Served) -> None:
    upgrade = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert exchange(hurried, upgrade.encode()).startswith(b"HTTP/1.1 200")
    received = exchange(hurried, b"hello there\r\n\r\n")
    [name] = [line.split()[1].decode() for line in received.splitlines() if line.startswith(b"x-request-id")]
    log = hurried.printed(f"id={name} peer=127.0.0.1")
    assert "websockets" not in log and "Unsupported upgrade" not in log


def test_red_team_8_a_cache_of_one_byte_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least") as refused:
        LLM(str(tiny_folder), settings=Settings(cache_bytes=1))
    assert refused.value.param == "cache_bytes"


# --------------------------------------------------------------------------------- names of other servers


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("grammar", "root ::= x", "structured_outputs.grammar"), ("n_predict", 5, "max_tokens"),
        ("num_ctx", 4096, "--context"), ("options", {"num_predict": 3}, "beside messages"),
        ("cache_prompt", False, "cache_salt"), ("guided_regex", "a", "structured_outputs.regex"),
        ("temprature", 1, "did you mean 'temperature'"), ("unheard_of", 1, "/openapi.json"),
    ],
)  # fmt: skip
def test_fields_of_other_servers_are_refused_by_name(
    served: Served, field: str, value: Any, instead: str
) -> None:
    reply = served.post(CHAT, {**GOOD[CHAT], field: value})
    error = told(reply.status_code, reply.content)
    assert error["param"] == field and field in error["message"] and instead in error["message"]


def test_fields_that_change_nothing_pass(served: Served) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "cache_prompt": True, "best_of": 1}
    assert (
        served.post(CHAT, {**GOOD[CHAT], **harmless, "verbosity": "low", "extra_body": {}}).status_code == 200
    )


def test_a_nested_extra_body_counts(served: Served) -> None:
    body = {**GOOD[CHAT], "extra_body": {"return_token_ids": True, "max_tokens": 1}}
    reply = served.post(CHAT, body)
    assert reply.status_code == 200 and len(reply.json()["choices"][0]["token_ids"]) == 1
    clash = served.post(CHAT, {**GOOD[CHAT], "extra_body": {"max_tokens": 2}})
    assert told(clash.status_code, clash.content)["param"] == "extra_body.max_tokens"
    misspelt = served.post(CHAT, {**GOOD[CHAT], "extra_body": {"max_token": 2}})
    assert told(misspelt.status_code, misspelt.content)["param"] == "max_token"


def test_403s_name_the_flag(served: Served) -> None:
    host = served.get("/health", headers={"host": "box.lan:8000"})
    assert "--allowed-host box.lan" in told(403, host.content)["message"]
    page = served.post(PLAIN, GOOD[PLAIN], headers={"origin": "http://localhost:3000"})
    assert "--cors-origin http://localhost:3000" in told(403, page.content)["message"]
