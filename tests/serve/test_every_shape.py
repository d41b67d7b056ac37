"""No request costs the event loop more than its bytes: 8 MB in every shape that a route accepts, and `/health` answers
within a quarter of a second throughout. Routes, fields and types are read off the application, so that a new field
or route is sent such bodies without a line here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec.inspect as mi
import psutil
import pytest

from outrider.errors import InvalidRequest
from outrider.serve import request as requests
from outrider.serve.app import ROUTES
from outrider.serve.completions import _prepared as prepared_completion
from outrider.serve.errors import ApiError
from outrider.serve.intake import Intake
from outrider.serve.limits import StringScan
from outrider.serve.settings import ServeSettings
from outrider.serve.wire import CompletionRequest, Prediction
from outrider.types import SamplingParams
from tests.serve.conftest import Served, start_server, write_tiny
from tests.serve.test_probes import post

SIZE = 8_000_000  # bytes of a body; the server takes 8 MiB
VALUES, FIELDS = 990_000, 95_000  # a little less than are parsed at most
SLOWEST = 0.25  # seconds
TRIES = 3  # a busy machine may be slow once; what holds up the server does so each time
POSTS = {route.path: route.body for route in ROUTES if route.body is not None}

Make = Callable[[], bytes]  # a value as JSON; made when it is sent, for together they have gigabytes
Shape = tuple[str, Make]


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose tokens may stand for texts of any length, so that every body is read to its end."""
    folder = tmp_path_factory.mktemp("unbounded") / "tiny"
    write_tiny(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    server = start_server(folder, "--draft-folder", str(folder.parent))
    yield server
    assert server.stop() == 0


# ------------------------------------------------------------------------------------------------- the shapes


def many(item: bytes, most: int = SIZE) -> bytes:
    return b"[" + b",".join([item] * min(most, SIZE // (len(item) + 1))) + b"]"


def names(value: bytes, most: int = FIELDS) -> bytes:
    return (
        b"{" + b",".join(b'"%d":%b' % (i, value) for i in range(min(most, SIZE // (len(value) + 10)))) + b"}"
    )


@cache
def text(size: int = SIZE) -> bytes:
    """Letters, escaped backslashes, and characters of six bytes."""
    third = size // 3
    return b'"' + b"x" * third + b"\\\\" * (third // 2) + b"\\u0007" * (third // 6) + b'"'


def object_of(**fields: bytes) -> bytes:
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in fields.items()) + b"}"


def schema() -> bytes:
    whole = names(b"{}", FIELDS // 3)
    own = object_of(type=b'"json_schema"', schema=whole, json_schema=object_of(schema=whole))
    return own[:-1] + b',"format":' + own + b"}"


def function(**more: bytes) -> bytes:
    takes = object_of(type=b'"object"', properties=names(b"{}", FIELDS // 7))
    body = object_of(name=b'"f"', parameters=takes, strict=b"true")
    return object_of(name=b'"f"', parameters=takes, input_schema=takes, function=body, **more)


@cache
def past_call() -> bytes:
    """Its arguments are a text that holds JSON."""
    arguments = json.dumps(many(b"{}").decode()).encode()
    call = object_of(id=b'"a"', type=b'"function"', function=object_of(name=b'"f"', arguments=arguments))
    return object_of(role=b'"assistant"', content=b'""', tool_calls=b"[" + call + b"]")


ANY: tuple[Shape, ...] = (
    ("of everything", lambda: object_of(
        type=text(SIZE // 2), names=names(b"0", FIELDS // 2), deep=many(b"[" * 60 + b"]" * 60, FIELDS // 150),
    )),
    ("of a long list", lambda: object_of(type=many(b"0", VALUES), role=many(b'""', 9), content=many(b"0", 9))),
)  # fmt: skip
FORMS: tuple[Shape, ...] = (("schema", schema),)
ITEMS: tuple[Shape, ...] = (
    ("blocks", lambda: object_of(
        role=b'"user"', content=many(object_of(type=b'"text"', text=b'"' + b"x" * 450 + b'"'), 16_000)
    )),
    ("function", lambda: function(type=b'"function"')), ("tool", function), ("past call", past_call),
)  # fmt: skip
# Refused before any field is looked at.
UNREADABLE: tuple[Shape, ...] = (
    ("digits", lambda: b"7" * SIZE), ("a fraction", lambda: b"0." + b"7" * SIZE), ("depth", lambda: b"[" * SIZE),
    ("numbers of 40 digits", lambda: many(b"7" * 40)), ("zeros", lambda: many(b"0")), ("lists", lambda: many(b"[]")),
    ("objects", lambda: many(b"{}")), ("closing brackets", lambda: b"]" * SIZE), ("quotes", lambda: b'"' * SIZE),
    ("names", lambda: names(b"0", SIZE)), ("spaces", lambda: b" " * SIZE + b"0"), ("zero bytes", lambda: b"\0" * SIZE),
    ("surrogates", lambda: b'"' + b"\\ud83d\\ude00" * (SIZE // 12)), ("exponents", lambda: b"1e" * (SIZE // 2)),
)  # fmt: skip


def shapes(kind: mi.Type) -> Iterator[Shape]:
    """Values of a type, each as long as a body may be."""
    match kind:
        case mi.UnionType():
            for each in kind.types:
                yield from shapes(each)
        case mi.StrType():
            yield "text", text
        case mi.ListType(item_type=item):
            flat = not isinstance(item, (mi.DictType, mi.StructType))
            yield "items", lambda: many(sample(item), VALUES if flat else FIELDS // 4)
            for name, make in (*shapes(item), *(() if flat else ITEMS)):
                yield f"an item: {name}", lambda make=make: b"[" + make() + b"]"
        case mi.DictType(value_type=mi.AnyType()):
            yield from (*ANY, *FORMS)
        case mi.DictType(value_type=value):
            yield "names", lambda: names(sample(value))
        case mi.StructType():
            for field in kind.fields:
                for name, make in shapes(field.type):
                    yield f"{field.encode_name}: {name}", body_of(kind, field.encode_name, make)


def sample(kind: mi.Type) -> bytes:
    """A short value of a type."""
    match kind:
        case mi.UnionType():
            return sample(kind.types[0])
        case mi.StrType():
            return b'"a"'
        case mi.ListType():
            return b"[" + sample(kind.item_type) + b"]"
        case mi.DictType():
            return b'{"role":"user","content":"a","type":"text"}'
        case mi.StructType():
            return object_of(
                **{field.encode_name: sample(field.type) for field in kind.fields if field.required}
            )
    return b"1"


def body_of(kind: mi.StructType, name: str, make: Make) -> Make:
    """With what else must be there."""
    needed = {field.encode_name: sample(field.type) for field in kind.fields if field.required}
    return lambda: object_of(**{**needed, name: make()})


def cases(path: str, everywhere: bool) -> Iterator[Shape]:
    """Bodies for a route. `everywhere`: with all that routes share; else each such field is sent to one of them."""
    kind = mi.type_info(POSTS[path])
    assert isinstance(kind, mi.StructType)
    for at, field in enumerate(kind.fields):
        [*_, owner] = [cls for cls in kind.cls.__mro__ if field.name in getattr(cls, "__annotations__", ())]
        sharing = [other for other, body in POSTS.items() if issubclass(body, owner)]
        if everywhere or sharing[at % len(sharing)] == path:
            for name, make in shapes(field.type):
                yield f"{field.encode_name}: {name}", body_of(kind, field.encode_name, make)
    for at, (name, make) in enumerate(UNREADABLE):
        if everywhere or [*POSTS][at % len(POSTS)] == path:
            yield name, body_of(kind, "user", make)


# ------------------------------------------------------------------------------------------------- the watch


@contextlib.contextmanager
def health(served: Served) -> Iterator[list[float]]:
    """Seconds that each `/health` took meanwhile, less those in which other programs had the processors: what counts is
    when the server itself was at work, or nobody was.
    """
    taken, done, server = list[float](), threading.Event(), psutil.Process(served.process.pid)
    where = urlsplit(served.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    connection.connect()

    def ours() -> float:
        return sum(server.cpu_times()[:2]) + psutil.cpu_times().idle

    def watch() -> None:
        while not done.wait(0.01):
            began, before = time.perf_counter(), ours()
            connection.request("GET", "/health")
            connection.getresponse().read()
            taken.append(min(time.perf_counter() - began, ours() - before))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()
        connection.close()


def send(served: Served, raw: bytes) -> int:
    """The status of the answer, once it has come."""
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # it may be refused before it has been sent
            connection.sendall(raw)
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


def slowest(served: Served, attack: Callable[[], Any]) -> float:
    """The longest that `/health` took while it was attacked, in the best of a few tries if it took too long."""
    best = float("inf")
    for _ in range(TRIES):
        with health(served) as taken:
            attack()
        best = min(best, max(taken, default=0.0))
        if best < SLOWEST:
            break
    return best


def request(path: str, body: bytes) -> bytes:
    return post(body, f"Content-Length: {len(body)}", "Connection: close", path=path)


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", POSTS)
def test_health_is_answered_whatever_a_route_is_sent(unbounded: Served, path: str, everywhere: bool) -> None:
    late, failed = [], []
    for name, make in cases(path, everywhere):
        raw, statuses = request(path, make()), set[int]()
        took = slowest(unbounded, lambda raw=raw, statuses=statuses: statuses.add(send(unbounded, raw)))
        print(f"{path} {name}: {len(raw) / 1e6:.1f} MB, {statuses}, /health {1000 * took:.0f} ms")
        if took >= SLOWEST:
            late.append((name, took))
        if not statuses <= {200, 400, 403, 404, 413}:
            failed.append((name, statuses))
    assert not late and not failed


def test_health_is_answered_while_a_body_comes_byte_by_byte(unbounded: Served) -> None:
    """In chunks of one byte, which the connection parses: each costs as much as one of a thousand."""
    path, kind = next(iter(POSTS.items()))
    body = sample(mi.type_info(kind)) + b" " * 30_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    raw = post(chunks, "Transfer-Encoding: chunked", "Connection: close", path=path)
    statuses = set[int]()
    assert slowest(unbounded, lambda: statuses.add(send(unbounded, raw))) < SLOWEST
    assert statuses == {200}


def test_every_field_that_can_be_long_is_sent() -> None:
    """By name: what a route takes and what is sent to it agree, with one field of each kind looked up by hand."""
    sent = {(path, name.partition(":")[0]) for path in POSTS for name, _ in cases(path, everywhere=True)}
    assert {("/v1/completions", "prompt"), ("/v1/messages", "system"), ("/v1/responses", "metadata")} <= sent
    assert {("/v1/chat/completions", "speculative_decoding"), ("/v1/draft/swap", "path")} <= sent
    once = [name for path in POSTS for name, _ in cases(path, everywhere=False)]
    assert once.count("speculative_decoding: tree: items") == 1


# --------------------------------------------------------------------------------------------- what is bounded

TEXT_BLOCK = {"type": "text", "text": "a"}
BLOCKS = [TEXT_BLOCK] * 16_385  # one more than four a message, of as many messages as there may be
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": BLOCKS}]}, "messages.content"),
        ("/v1/messages", {"messages": [{"role": "user", "content": BLOCKS}], "max_tokens": 1}, "messages.content"),
        ("/v1/messages/count_tokens", {"messages": [USER], "system": BLOCKS}, "system.content"),
        ("/v1/responses", {"input": [{"role": "user", "content": BLOCKS}]}, "input.content"),
        ("/tokenize", {"messages": [USER] * 4097}, "messages"),
        ("/detokenize", {"tokens": [5] * 8193}, "tokens"),
        ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": "7" * 5000}}, "prediction"),
    ],
)  # fmt: skip
def test_more_than_a_route_reads_is_refused_by_name(served: Served, path: str, body: Any, param: str) -> None:
    reply = served.post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_prediction_is_not_copied_for_many_prompts_without_end() -> None:
    """Each prompt takes its own copy to the engine: 256 of a megabyte would be a quarter of a gigabyte."""
    asked = CompletionRequest(prompt=["a"] * 3, prediction=Prediction(type="content", content="x" * 400))
    model = SimpleNamespace(text_ids=lambda text, cut: [1])
    params = SamplingParams(prediction="x" * 400)
    for most, refused in ((1200, False), (1199, True)):
        settings = ServeSettings(max_body_bytes=most)
        service: Any = SimpleNamespace(
            settings=settings, model=model, params_of=lambda asked: params, length=None
        )
        service.fitted = lambda asked, prompt, params, length: (prompt, params)
        with pytest.raises(InvalidRequest, match="3 prompts") if refused else contextlib.nullcontext():
            assert len(prepared_completion(service, asked)) == 3


def test_each_byte_of_a_body_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it comes: a text that is too long is noticed while it arrives, and what has come is not read again."""
    seen: list[bytes] = []

    class Counting(StringScan):
        def feed(self, piece: bytes) -> bytes:
            seen.append(piece)
            return super().feed(piece)

    monkeypatch.setattr(requests, "StringScan", Counting)
    body = b'{"prompt": "' + b"\\" * 3000 + b'"}'
    left = [body[at : at + 1] for at in range(len(body))]

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    table = SimpleNamespace(most_bytes=1000)
    service: Any = SimpleNamespace(
        settings=ServeSettings(max_schema_bytes=1000), intake=Intake(), table=table
    )
    scope = {"type": "http", "path": "/", "headers": []}
    with pytest.raises(ApiError) as refused:
        asyncio.run(requests.Request(scope, receive, service)._read_body(1))
    assert refused.value.code == "context_length_exceeded"
    assert b"".join(seen) == body[: len(seen)] and len(seen) == len(b'{"prompt": "') + 2 * 1001
