"""What strangers send: broken JSON, broken HTTP, values of every wrong kind. Each is told what is wrong, in the one
shape that clients know, and the server answers the next request as if nothing had happened.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from outrider.serve.wire import ChatRequest, CompletionRequest, ResponsesRequest, Sampling
from tests.serve.conftest import Served

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
JSON = {"content-type": "application/json"}
GOOD = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    PLAIN: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as shared:
        yield shared


@pytest.fixture(autouse=True)
def still_well(client: httpx.Client) -> Iterator[None]:
    yield
    assert client.post(PLAIN, json=GOOD[PLAIN]).status_code == 200


def told(status: int, body: bytes | str) -> dict[str, Any]:
    """What is wrong, once it is said as OpenAI says it."""
    assert 400 <= status < 500 and status != 422, (status, body)
    answer = json.loads(body)
    assert list(answer) == ["error"] and list(answer["error"]) == ["message", "type", "param", "code"]
    error = answer["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None)
    return error


def refused(client: httpx.Client, path: str, body: bytes) -> dict[str, Any]:
    reply = client.post(path, content=body, headers=JSON)
    assert reply.headers["content-type"] == "application/json"
    return told(reply.status_code, reply.content)


def with_field(path: str, name: str, raw: str) -> bytes:
    """A good request but for one field, written as it is."""
    return json.dumps({**GOOD[path], name: "@"}).replace('"@"', raw).encode()


# -------------------------------------------------------------------------------------------- broken JSON


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize("path", [CHAT, PLAIN, RESPONSES])
def test_numbers_that_are_none(client: httpx.Client, path: str, number: str) -> None:
    for name in ("temperature", "top_p", "seed", "unheard_of"):
        refused(client, path, with_field(path, name, number))
    refused(client, path, with_field(path, "logit_bias", f'{{"5": {number}}}'))


@pytest.mark.parametrize("digits", [41, 5000, 100_000])
@pytest.mark.parametrize("name", ["max_tokens", "seed", "n", "temperature", "top_k", "unheard_of", "stop"])
def test_integers_of_absurd_length(client: httpx.Client, name: str, digits: int) -> None:
    refused(client, PLAIN, with_field(PLAIN, name, "9" * digits))
    refused(client, PLAIN, with_field(PLAIN, name, "-" + "9" * digits))


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("name", ["messages", "tools", "metadata", "unheard_of", "response_format"])
def test_nesting_a_hundred_thousand_deep(client: httpx.Client, name: str, opens: str, closes: str) -> None:
    deep = 100_000
    assert (
        "nested"
        in refused(client, CHAT, with_field(CHAT, name, opens * deep + "1" + closes * deep))["message"]
    )
    refused(client, CHAT, with_field(CHAT, name, opens * deep))


HALF = r'"cut \ud83d"'
CUT: dict[str, tuple[str, str]] = {
    "content": ("messages", f'[{{"role": "user", "content": {HALF}}}]'),
    "part": ("messages", f'[{{"role": "user", "content": [{{"type": "text", "text": {HALF}}}]}}]'),
    "role": ("messages", f'[{{"role": {HALF}, "content": "a"}}]'),
    "stop": ("stop", f"[{HALF}]"),
    "bad words": ("bad_words", f"[{HALF}]"),
    "prediction": ("prediction", f'{{"type": "content", "content": {HALF}}}'),
    "schema": (
        "response_format",
        f'{{"type": "json_schema", "json_schema": {{"schema": {{"enum": [{HALF}]}}}}}}',
    ),
    "grammar": ("structured_outputs", f'{{"choice": [{HALF}]}}'),
    "metadata": ("metadata", f'{{"a": {HALF}}}'),
    "a name": ("metadata", f'{{{HALF}: "a"}}'),
    "model": ("model", HALF),
    "salt": ("cache_salt", HALF),
    "tool": ("tools", f'[{{"type": "function", "function": {{"name": "f", "description": {HALF}}}}}]'),
}


@pytest.mark.parametrize("where", CUT)
def test_half_a_surrogate_pair(client: httpx.Client, where: str) -> None:
    name, raw = CUT[where]
    assert "half of a surrogate pair" in refused(client, CHAT, with_field(CHAT, name, raw))["message"]


def test_half_a_pair_within_the_text_of_arguments_is_only_text(client: httpx.Client) -> None:
    """Arguments are JSON within JSON, and the model's own: what it wrote comes back, so it must be taken."""
    function = {"name": "f", "arguments": r'{"a": "\ud83d"}'}
    call = {"id": "1", "type": "function", "function": function}
    turns = [*GOOD[CHAT]["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert client.post(CHAT, json={"messages": turns, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "raw", [b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xf4\x90\x80\x80"', b'"\xc3"', b"\xe2\x82"]
)
def test_what_is_not_utf8(client: httpx.Client, raw: bytes) -> None:
    refused(client, PLAIN, b'{"prompt": ' + raw + b"}")


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b" ",
            b"\x00",
            b"{",
            b"}",
            b"{}}",
            b"{} {}",
            b'{"prompt": "a",}',
            b"{'prompt': 'a'}",
            b"<xml/>",
        ),
        *(
            b'{"prompt": "a"',
            b"prompt=a",
            b'{"prompt": "a\n"}',
            b"\xef\xbb\xbf{}",
            '{"prompt": 1}'.encode("utf-16"),
        ),
    ],
)
@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_json(client: httpx.Client, path: str, body: bytes) -> None:
    assert "JSON" in refused(client, path, body)["message"]


@pytest.mark.parametrize("body", ["null", "[]", "[{}]", '"text"', "1", "true", "1.5"])
@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_object(client: httpx.Client, path: str, body: str) -> None:
    assert refused(client, path, body.encode())["message"] == "the body must be a JSON object"


@pytest.mark.parametrize(
    ("path", "missing"),
    [(CHAT, "messages"), (PLAIN, "prompt"), (RESPONSES, "input"), ("/detokenize", "tokens")],
)
def test_a_missing_field_is_named(client: httpx.Client, path: str, missing: str) -> None:
    error = refused(client, path, b"{}")
    assert error["param"] == missing and missing in error["message"]


def test_of_a_name_given_twice_the_last_counts(client: httpx.Client) -> None:
    body = b'{"prompt": "hello", "max_tokens": 2, "max_tokens": 3, "ignore_eos": true}'
    reply = client.post(PLAIN, content=body, headers=JSON)
    assert reply.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x", ""]
)
def test_other_content_types(client: httpx.Client, media: str) -> None:
    """As a page of another site could have a browser send them."""
    body = json.dumps(GOOD[PLAIN]).encode()
    reply = client.post(PLAIN, content=body, headers={"content-type": media, "sec-fetch-site": "cross-site"})
    assert reply.status_code == 415
    error = told(415, reply.content)
    assert error["code"] == "unsupported_media_type" and "Content-Type: application/json" in error["message"]


def test_what_curl_says_of_a_body_by_itself_is_taken(client: httpx.Client) -> None:
    form, body = {"content-type": "application/x-www-form-urlencoded"}, json.dumps(GOOD[PLAIN]).encode()
    assert client.post(PLAIN, content=body, headers=form).status_code == 200
    for name in ("sec-fetch-site", "sec-fetch-mode", "referer", "cookie"):
        assert client.post(PLAIN, content=body, headers={**form, name: "x"}).status_code == 415


@pytest.mark.parametrize(
    "media", ["application/json; charset=utf-8", "Application/JSON", "application/json;x=y"]
)
def test_json_by_any_spelling(client: httpx.Client, media: str) -> None:
    body = json.dumps(GOOD[PLAIN]).encode()
    assert client.post(PLAIN, content=body, headers={"content-type": media}).status_code == 200


# ----------------------------------------------------------------------------------- values of wrong kinds


WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 2**31, 2**63, -(2**70), "", "x", "\x00", "9" * 30, [], [None], [[]], {}),
    *({"type": "x"}, {"x": [{}]}, ["a", 1], [-1], [2**40], {"9" * 30: 1}, {"type": "json_schema"}, "auto"),
)
KINDS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatRequest,
    PLAIN: CompletionRequest,
    RESPONSES: ResponsesRequest,
}


@pytest.mark.parametrize("path", KINDS)
def test_every_field_with_every_kind_of_value(client: httpx.Client, served: Served, path: str) -> None:
    """Taken or refused, but never an accident. What routes have in common is tried at one of them."""
    lengths = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stream"}
    names = KINDS[path].__struct_fields__
    for name in names if path == CHAT else [n for n in names if n not in Sampling.__struct_fields__]:
        for value in WRONG:
            if value is None and name in lengths:
                continue
            reply = client.post(path, json={**GOOD[path], name: value})
            if reply.status_code != 200:
                told(reply.status_code, reply.content)


MESSAGES: tuple[Any, ...] = (
    *(
        [],
        [{}],
        [{"role": "user"}],
        [{"role": None, "content": "a"}],
        [{"content": "a"}],
        [{"role": [], "content": ""}],
    ),
    *(
        [{"role": "user", "content": c}]
        for c in (1, {}, [1], [None], [{"type": "text"}], [{"text": 5}], [[]])
    ),
    *(
        [{"role": "assistant", "content": "", "tool_calls": c}]
        for c in (1, "a", [1], [{}], [{"function": 1}], [{"function": {"name": 1}}])
    ),
    [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": 5}}]}],
)


@pytest.mark.parametrize("messages", MESSAGES, ids=repr)
def test_messages_that_are_none(client: httpx.Client, messages: Any) -> None:
    for path in (CHAT, "/tokenize"):
        error = refused(client, path, json.dumps({"messages": messages}).encode())
        assert error["param"].startswith("messages")


ITEMS: tuple[Any, ...] = (
    *(
        {},
        {"type": 1},
        {"type": "image"},
        {"role": "user"},
        {"role": 1, "content": "a"},
        {"role": "user", "content": 5},
    ),
    *(
        {"role": "user", "content": c}
        for c in (["a"], [1], [None], [{}], [{"type": "input_image"}], {"a": 1})
    ),
    *({"type": "function_call_output", "call_id": "1", "output": o} for o in (5, {"a": 1}, [1], None)),
    *({"type": "function_call", "name": n} for n in (None, 5, {})),
    {"type": "function_call", "name": "f", "arguments": 5},
)


@pytest.mark.parametrize("item", ITEMS, ids=repr)
def test_input_items_that_are_none(client: httpx.Client, item: Any) -> None:
    refused(client, RESPONSES, json.dumps({"input": [item], "max_output_tokens": 1}).encode())


@pytest.mark.parametrize(
    "form", [[], ["x"], "x", 5, True, {}, {"type": 5}, {"type": "json_schema", "schema": 5}]
)
def test_a_form_that_is_none(client: httpx.Client, form: Any) -> None:
    body = {"input": "a", "max_output_tokens": 1, "text": {"format": form}}
    refused(client, RESPONSES, json.dumps(body).encode())


# ------------------------------------------------------------------------------------------ methods and routes


ROUTES = (
    *GOOD,
    "/v1/models",
    "/v1/models/tiny",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/v1/live",
    "/",
)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND"])
@pytest.mark.parametrize("path", ROUTES)
def test_other_methods(client: httpx.Client, path: str, method: str) -> None:
    reply = client.request(method, path)
    assert reply.status_code == 405
    told(405, reply.content)
    assert reply.headers["allow"] == ("POST" if path in GOOD else "GET")


@pytest.mark.parametrize("path", ROUTES)
def test_get_where_post_is_wanted_and_the_other_way_round(client: httpx.Client, path: str) -> None:
    wrong = "GET" if path in GOOD else "POST"
    reply = client.request(wrong, path)
    assert reply.status_code == 405 and told(405, reply.content)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in GOOD])
def test_head_is_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"") and get.content
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1",
            "/v1/",
            "/v1/chat",
            "/v2/models",
            "/v1/embeddings",
            "/admin",
            "/.env",
        ),
        *(
            "/../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/v1/models/..%2f..%2fetc",
            "/%00",
            "/%ff",
            "/%0d%0aa:b",
        ),
        *(
            "//health",
            "/v1/models/nobody",
            "/" + "a" * 10_000,
            "/docs/none",
            "/invocations",
        ),
    ],
)
def test_unknown_routes(served: Served, path: str) -> None:
    for method in ("GET", "POST"):
        status, body = said(
            served, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert status == (405 if method == "POST" and path.startswith("/v1/models/") else 404)
        assert len(told(status, body)["message"]) <= 500


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_a_slash_at_the_end_is_taken(client: httpx.Client, path: str) -> None:
    assert client.get(f"{path}/").status_code == 200
    assert client.post(f"{CHAT}/", json=GOOD[CHAT]).status_code == 200


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "leave it out of the base URL"),
        ("/completion", "use /v1/completions"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/nowhere/at/all", "GET / lists the routes"),
    ],
)
def test_a_404_names_the_path_and_what_is_near(client: httpx.Client, path: str, says: str) -> None:
    message = told(404, client.post(path, json={}).content)["message"]
    assert message.startswith(f"there is no {path}") and says in message


# ------------------------------------------------------------------------------------------------ broken HTTP


def exchange(served: Served, *pieces: bytes, seconds: float = 20) -> bytes:
    """Everything a server says to some bytes before it closes the connection."""
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=seconds) as connection:
        received = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while part := connection.recv(65536):
                received += part
        except ConnectionError:
            pass
        return received


def said(served: Served, *pieces: str | bytes) -> tuple[int, bytes]:
    """The status and the body of a single answer."""
    received = exchange(served, *(p.encode("latin-1") if isinstance(p, str) else p for p in pieces))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), received[:200]
    return int(head.split()[1]), body


def post(body: bytes, *headers: str, version: str = "1.1", path: str = PLAIN) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


BODY = json.dumps(GOOD[PLAIN]).encode()
LENGTH, CLOSE = f"Content-Length: {len(BODY)}", "Connection: close"


def test_http_1_0(served: Served) -> None:
    status, body = said(served, post(BODY, LENGTH, version="1.0"))
    assert status == 200 and json.loads(body)["choices"]


@pytest.mark.parametrize("sizes", [(1,), (7, 1000), (1000,)])
def test_a_body_in_chunks(served: Served, sizes: tuple[int, ...]) -> None:
    chunks, rest = [], BODY
    for size in sizes * len(BODY):
        piece, rest = rest[:size], rest[size:]
        chunks.append(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if not rest:
            break
    status, body = said(served, post(b"".join(chunks) + b"0\r\n\r\n", "Transfer-Encoding: chunked", CLOSE))
    assert status == 200 and json.loads(body)["choices"]


def test_a_client_that_asks_before_it_sends(served: Served) -> None:
    received = exchange(served, post(b"", LENGTH, CLOSE, "Expect: 100-continue"), BODY)
    assert received.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in received


def test_requests_sent_without_waiting_are_answered_in_order(served: Served) -> None:
    asked = [json.dumps({"prompt": "hi", "max_tokens": n, "ignore_eos": True}).encode() for n in (3, 1, 2)]
    first, second, third = (f"Content-Length: {len(body)}" for body in asked)
    received = exchange(
        served,
        post(asked[0], first)
        + post(asked[1], second)
        + post(b"{", "Content-Length: 1")
        + post(asked[2], third, CLOSE),
    )
    assert [int(part.split()[0]) for part in received.split(b"HTTP/1.1 ")[1:]] == [200, 200, 400, 200]
    written = [int(part.split(b",")[0]) for part in received.split(b'"completion_tokens":')[1:]]
    assert written == [3, 1, 2]


BROKEN: dict[str, bytes] = {
    "no http": b"hello there\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "a version of words": b"GET /health HTTP/one\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "a space in a name": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n",
    "a name of nothing": b"GET /health HTTP/1.1\r\nHost: localhost\r\n: c\r\n\r\n",
    "a zero byte": b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n",
    "a path of bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "length not a number": post(BODY, "Content-Length: many"),
    "length below nothing": post(BODY, "Content-Length: -1"),
    "length with a sign": post(BODY, f"Content-Length: +{len(BODY)}"),
    "length of 5000 digits": post(BODY, "Content-Length: " + "9" * 5000),
    "two lengths": post(BODY, LENGTH, "Content-Length: 1"),
    "an unknown encoding": post(BODY, "Transfer-Encoding: gzip, chunked"),
    "a chunk of no size": post(b"zz\r\n" + BODY + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a chunk below nothing": post(b"-5\r\n" + BODY + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a chunk of 30 digits": post(b"f" * 30 + b"\r\n", "Transfer-Encoding: chunked"),
    "a chunk longer than said": post(b"2\r\n" + BODY + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_http(served: Served, what: str) -> None:
    status, body = said(served, BROKEN[what])
    assert status == 400
    told(status, body)


def test_length_and_chunks_at_once_cannot_smuggle_a_request(served: Served) -> None:
    """They are refused, and what follows is no second request, for the connection is closed."""
    hidden = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    framed = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    received = exchange(served, post(framed + hidden, "Content-Length: 4", "Transfer-Encoding: chunked"))
    assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received and b"content-length and transfer-encoding" in received


@pytest.mark.parametrize(
    "target", ["*", "http://elsewhere.example/health", "localhost:80", "//elsewhere.example"]
)
def test_targets_that_are_no_path(served: Served, target: str) -> None:
    for method in ("GET", "OPTIONS", "CONNECT"):
        status, body = said(
            served, f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        told(status, body)


def test_an_upgrade_is_not_taken_up(served: Served) -> None:
    upgrade = (
        "Connection: close, Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: eA==",
        "Sec-WebSocket-Version: 13",
    )
    status, body = said(served, post(BODY, LENGTH, *upgrade))
    assert status == 200 and json.loads(body)["choices"]


def test_a_client_that_leaves_within_its_request(served: Served) -> None:
    where = urlsplit(served.url)
    for cut in (b"PO", post(b""), post(BODY[:5], LENGTH), post(b"5\r\n{", "Transfer-Encoding: chunked")):
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
            connection.sendall(cut)
    served.wait_idle()
