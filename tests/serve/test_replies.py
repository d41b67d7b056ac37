"""Real answers have the shapes that the OpenAPI document says: every field, and no other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outrider.draft.what_if import FIELDS, WhatIf
from outrider.serve.app import ROUTES
from outrider.serve.catalogue import PRICE, QUERY
from tests.serve.conftest import Served

ASKED: dict[str, Any] = {
    "speculative_decoding": {"drafter": "lookup", "depth": 3, "stats": True, "steps": True},
    "return_token_ids": True,
    "prediction": {"type": "content", "content": "abc"},
}
TURN = {"messages": [{"role": "user", "content": "aaaa"}], "max_tokens": 40}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REPLIES: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/chat/completions", {**TURN, **ASKED, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {**TURN, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"prompt": ["aaaa", "b"], "logprobs": 2, "max_tokens": 20, "echo": True, **ASKED}),
    ("/v1/completions", {"prompt": "aaaa"}),
    ("/v1/responses", {"input": "aaaa", "max_output_tokens": 20, "top_logprobs": 1, **ASKED}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2, "instructions": "b", "metadata": {"a": "b"}}),
    ("/v1/messages", {**TURN, **ASKED}),
    ("/v1/messages/count_tokens", {"messages": TURN["messages"]}),
    ("/tokenize", {"prompt": "ab", "return_token_strs": True}),
    ("/detokenize", {"tokens": [70, 71]}),
    ("/v1/models", None),
    ("/v1/models/tiny", None),
    ("/v1/draft", None),
    ("/v1/live", None),
    ("/v1/pairs", None),
    ("/v1/what-if?acceptance=0.7&batch=1,4", None),
    ("/v1/what-if?acceptance=0.7&tok_s=40&price_per_hour=2", None),
    ("/health", None),
    ("/version", None),
    ("/", None),
]


@pytest.mark.parametrize(("path", "body"), REPLIES, ids=lambda value: value if isinstance(value, str) else "")
def test_answers_have_the_documented_shape(served: Served, path: str, body: dict[str, Any] | None) -> None:
    reply = served.get(path) if body is None else served.post(path, body)
    assert reply.status_code == 200, reply.text
    [shape] = {one.reply for one in ROUTES if one.path_regex.match(path.partition("?")[0]) and one.reply}
    found = reply.json()
    assert msgspec.to_builtins(msgspec.convert(found, shape)) == found  # an unknown field would be left out


def test_every_route_that_answers_in_json_has_a_shape() -> None:
    shown = {route.path for route in ROUTES if route.reply is None}
    assert shown == {"/metrics", "/openapi.json", "/docs", "/page/{file}", "/v1/files/{file_id}/content"}


def test_the_query_of_what_if_is_the_command_lines() -> None:
    assert (*FIELDS, PRICE) == QUERY


def test_what_if_answers_as_the_command_does(served: Served) -> None:
    numbers = {"acceptance": "0.7,0.6", "cost": "0.1", "batch": "1,4", "rows": "1:1,200:3"}
    text = " ".join(f"{name}={value}" for name, value in numbers.items())
    assert served.get("/v1/what-if", params=numbers).json()["data"] == WhatIf.of(text).answer()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("depth=4", "needs acceptance"),
        ("acceptance=0.5&dept=4", "did you mean 'depth'"),
        ("acceptance=2", "not between 0 and 1"),
        ("acceptance=0.5&acceptance=0.6", "given twice"),
        ("acceptance=0.5&price_per_hour=1", "needs plain decoding's speed"),
        ("acceptance=0.5&tok_s=1&price_per_hour=0", "price_per_hour is a number"),
        ("acceptance=0.5&batch=" + ",".join("1" * 17), "at most 16"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(served: Served, query: str, says: str) -> None:
    reply = served.get(f"/v1/what-if?{query}")
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]
