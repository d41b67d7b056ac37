"""What the server writes about each request: its reason where it was refused, its speed where it was answered."""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.serve.errors import LONGEST_LOGGED, ApiError
from tests.serve.conftest import Served, start_server

CHAT = "/v1/chat/completions"
TALK = {"messages": [{"role": "user", "content": "hello"}]}
SECRET = "zebra77"


def line_of(server: Served, name: str) -> str:
    """The line about the request that had this id."""
    [line] = [one for one in server.printed(f"id={name} ").splitlines() if f"id={name} " in one]
    return line


@pytest.mark.parametrize(
    ("name", "body", "headers", "status", "says"),
    [
        ("field", {**TALK, "temprature": 1}, {}, 400, "did you mean"),
        ("range", {**TALK, "temperature": -1}, {}, 400, "param=temperature"),
        ("model", {**TALK, "model": "gpt-9"}, {}, 404, "code=model_not_found"),
        ("origin", TALK, {"Origin": "http://localhost:3000"}, 403, "--cors-origin http://localhost:3000"),
        ("host", TALK, {"Host": "evil.example"}, 403, "--allowed-host evil.example"),
        ("media", TALK, {"Content-Type": "text/plain"}, 415, "code=unsupported_media_type"),
        ("long", {**TALK, "max_tokens": 10**6}, {}, 400, "code=context_length_exceeded"),
    ],
)
def test_a_refusal_has_its_reason(
    served: Served, name: str, body: Any, headers: dict[str, str], status: int, says: str
) -> None:
    answer = served.post(CHAT, body, headers={"x-request-id": f"why-{name}", **headers})
    line = line_of(served, f"why-{name}")
    assert answer.status_code == status and f"status={status}" in line
    assert "error=" in line and says in line


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
        {"messages": [{"role": SECRET, "content": SECRET}], "temperature": -1},
        {"messages": [{"role": "user", "content": {"text": SECRET}}]},
        {**TALK, "messages": SECRET},
        {**TALK, "stop": [SECRET] * 99},
        {**TALK, "prediction": {"type": "content", "content": SECRET}, "temperature": "hot"},
        {"messages": [{"role": "user", "content": SECRET * 10_000}]},
    ],
)
def test_a_reason_holds_nothing_of_a_prompt(served: Served, body: Any) -> None:
    name = f"hush-{zlib.crc32(json.dumps(body).encode())}"
    assert served.post(CHAT, body, headers={"x-request-id": name}).status_code == 400
    assert "error=" in (line := line_of(served, name)) and SECRET not in line


def test_a_reason_is_one_bounded_quoted_line() -> None:
    wrong = ApiError(400, "no\nsuch " + "x" * 1000, param="a b\n" + "y" * 1000, code="bad")
    facts = wrong.facts()
    assert all(len(text) <= LONGEST_LOGGED and text.isprintable() for text in facts.values())
    assert facts["error"].startswith("no such x") and facts["code"] == "bad"
    assert "param" not in ApiError(400, "no").facts()


@pytest.fixture(scope="module")
def flagged(tiny_folder: Path) -> Iterator[Served]:
    """It writes its log as JSON, knows another page, and gives short answers unless asked for longer ones."""
    flags = ("--cors-origin", "http://page.example", "--log-format", "json", "--max-tokens", "7")
    server = start_server(tiny_folder, *flags)
    yield server
    assert server.stop() == 0


def test_a_path_that_is_not_there_and_a_preflight_have_reasons(flagged: Served) -> None:
    assert flagged.get("/v1/chats", headers={"x-request-id": "why-path"}).status_code == 404
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "PATCH"}
    wrong = httpx.options(flagged.url + CHAT, headers={"x-request-id": "why-preflight", **asked})
    assert wrong.status_code == 400
    flagged.printed("why-preflight")
    rows = [json.loads(line) for line in flagged.lines if line.startswith("{")]
    lines = {row["id"]: row for row in rows if "id" in row}
    assert "/v1/chats" in lines["why-path"]["error"] and lines["why-path"]["code"] == "not_found"
    assert "method" in lines["why-preflight"]["error"]


def test_an_answer_has_its_speed(served: Served) -> None:
    asked = {**TALK, "max_tokens": 20, "ignore_eos": True, "n": 2}
    used = served.post(CHAT, asked, headers={"x-request-id": "fast"}).json()["usage"]
    line = line_of(served, "fast")
    facts = dict(re.findall(r"(\w+)=(\S+)", line))
    assert facts["completion_tokens"] == str(used["completion_tokens"]) == "40"
    assert (facts["choices"], facts["finish"]) == ("2", "length") and "error" not in facts
    assert 0 < float(facts["first_token_ms"]) <= float(facts["ms"])
    assert float(facts["tokens_per_s"]) > 0 and 0 <= int(facts["accepted"]) <= int(facts["drafted"])


def test_an_answer_without_a_length_ends(served: Served, flagged: Served) -> None:
    [card] = served.get("/v1/models").json()["data"]
    assert (card["max_model_len"], card["default_max_tokens"]) == (2048, 512)
    for path, body in ((CHAT, TALK), ("/v1/responses", {"input": "hello"})):
        answer = served.post(path, {**body, "ignore_eos": True}).json()
        used = answer["usage"].get("completion_tokens") or answer["usage"]["output_tokens"]
        assert used == 512
    assert "answers   up to 512 tokens" in served.printed("try ")
    assert flagged.get("/v1/models").json()["data"][0]["default_max_tokens"] == 7
    for path, body in ((CHAT, TALK), ("/v1/completions", {"prompt": "hello"})):
        assert flagged.post(path, {**body, "ignore_eos": True}).json()["usage"]["completion_tokens"] == 7


def test_the_line_to_try_is_a_command(served: Served) -> None:
    """As a person copies it: from `curl` to the end."""
    printed = served.printed("Hello!")
    command = printed[printed.index("curl ") : printed.index("Hello!") + len("Hello!\"}]}'")]
    assert all(len(line) <= 80 for line in command.splitlines())
    words = shlex.split(command.replace("\\\n", " "))
    assert words[1] == f"{served.url}{CHAT}" and words[2:4] == ["-H", "Content-Type: application/json"]
    assert served.post(CHAT, {**json.loads(words[5]), "max_tokens": 2}).status_code == 200
