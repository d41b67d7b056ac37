"""Anthropic's Messages through its own Python SDK: answers, events, tools both ways, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from pydantic import BaseModel

from outrider.serve.keys import digest_of
from tests.serve.conftest import Served, start_server
from tests.serve.sdk import MODEL, client, exactly, said, user
from tests.serve.sdk import chat as openai_chat

CLOCK: dict[str, Any] = {
    "name": "get_time",
    "description": "The time in a zone.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


def anthropic_client(served: Served, key: str = "none", **options: Any) -> Anthropic:
    """It never tries again by itself: an error is to be seen."""
    return Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=60, **options)


@pytest.fixture(scope="module")
def api(served: Served) -> Iterator[Anthropic]:
    with anthropic_client(served) as shared:
        yield shared


def create(api: Anthropic, text: str = "hello there", **options: Any) -> Message:
    """Sampling parameters and what Anthropic does not have go in `extra_body`."""
    return api.messages.create(**{"model": MODEL, "messages": user(text), "max_tokens": 12, **options})


def words(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


GREEDY = {"temperature": 0}


# ------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("speculation", [False, True, {"depth": 4}])
@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 0.8, "seed": 5}])
def test_a_message_says_what_chat_says(
    served: Served, api: Anthropic, speculation: Any, sampling: dict[str, Any]
) -> None:
    extra = {**sampling, "speculative_decoding": speculation}
    answer = create(api, max_tokens=24, extra_body=extra)
    assert words(answer) == said(openai_chat(client(served), max_tokens=24, extra_body=extra))
    assert len(answer.content) == 1


def test_a_message_has_anthropics_form(api: Anthropic) -> None:
    answer = create(api, extra_body={**GREEDY, "seed": 8})
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 12
    assert answer.model_extra["seed"] == 8
    assert answer.model_extra["timings"]["predicted_n"] == 12
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_system_and_turns_are_a_conversation(served: Served, api: Anthropic) -> None:
    turns: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": "again"},
    ]
    system: Any = [{"type": "text", "text": "Be kind."}]
    answer = create(api, messages=turns, system=system, metadata={"user_id": "u"}, extra_body=GREEDY)
    messages: list[Any] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "again"},
    ]
    same = client(served).chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12
    )
    assert words(answer) == said(same)


def test_a_begun_answer_is_gone_on_with(served: Served, api: Anthropic) -> None:
    messages: list[Any] = [*user("hello"), {"role": "assistant", "content": "hi the"}]
    answer = create(api, messages=messages, extra_body=GREEDY)
    extra: Any = {"continue_final_message": True}
    same = client(served).chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12, extra_body=extra
    )
    assert words(answer) == said(same)


def known(text: str) -> dict[str, Any]:
    """What makes the model begin with this text, as `extra_body`."""
    options = exactly(text)
    return {"prediction": options["prediction"], **options["extra_body"]}


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_it_is_told(api: Anthropic, stream: bool) -> None:
    options: dict[str, Any] = {"stop_sequences": ["nope", "two"], "extra_body": known("one two three")}
    if stream:
        with api.messages.stream(model=MODEL, max_tokens=40, messages=user("count"), **options) as events:
            answer = events.get_final_message()
    else:
        answer = create(api, max_tokens=40, **options)
    assert (words(answer), answer.stop_reason, answer.stop_sequence) == ("one ", "stop_sequence", "two")


def test_an_answer_ends_where_the_context_does(api: Anthropic) -> None:
    """Agents ask for more than a small model has room for, and are told."""
    answer = create(api, "x" * 1980, max_tokens=32_000, extra_body={"ignore_eos": True})
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens < 100


def test_what_the_cache_held_is_told_apart(api: Anthropic) -> None:
    text = "a prompt that is long enough to be found again " * 6
    first, second = (create(api, text, max_tokens=2).usage for _ in range(2))
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert second.cache_read_input_tokens and second.cache_read_input_tokens > 100
    assert second.input_tokens + second.cache_read_input_tokens == total
    counted = api.messages.count_tokens(model=MODEL, messages=user(text))
    assert counted.input_tokens == total


class Person(BaseModel, extra="forbid"):
    name: Literal["Ada", "Alan"]
    old: bool


def test_the_sdk_parses_into_a_class(api: Anthropic) -> None:
    answer = api.messages.parse(
        model=MODEL, max_tokens=200, messages=user("who?"), output_format=Person, extra_body={"seed": 1}
    )
    assert isinstance(answer.parsed_output, Person)


# ---------------------------------------------------------------------------------------------------- streams


def test_events_come_in_order_and_end_with_the_whole(api: Anthropic) -> None:
    options: dict[str, Any] = {"extra_body": {"seed": 2}}
    events: list[Any] = list(create(api, stream=True, **options))  # type: ignore[call-overload]
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == words(create(api, **options))
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 12
    assert events[-2].model_extra["seed"] == 2


def test_the_sdk_follows_a_stream(api: Anthropic) -> None:
    options: Any = {"model": MODEL, "max_tokens": 12, "messages": user("hello there"), "extra_body": GREEDY}
    with api.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = api.messages.create(**options)
    assert text == words(final) == words(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == total


def test_the_async_client_streams(served: Served, api: Anthropic) -> None:
    async def text() -> str:
        own = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60)
        async with (
            own,
            own.messages.stream(
                model=MODEL, max_tokens=8, messages=user("hello there"), extra_body=GREEDY
            ) as stream,
        ):
            return "".join([piece async for piece in stream.text_stream])

    assert asyncio.run(text()) == words(create(api, max_tokens=8, extra_body=GREEDY))


# ------------------------------------------------------------------------------------------------------ tools


def test_a_tool_is_used(api: Anthropic) -> None:
    answer = create(api, tools=[CLOCK], tool_choice=ONE_CALL, max_tokens=100)
    [use] = answer.content
    assert (use.type, use.name, answer.stop_reason) == ("tool_use", "get_time", "tool_use")
    assert use.input in ({"zone": "UTC"}, {"zone": "CET"})
    assert use.id.startswith("toolu_")


def test_a_tool_can_be_named(api: Anthropic) -> None:
    tools: Any = [CLOCK, {**CLOCK, "name": "get_date"}]
    answer = create(api, tools=tools, tool_choice={"type": "tool", "name": "get_date"}, max_tokens=100)
    assert [use.name for use in answer.content] == ["get_date"]


@pytest.mark.parametrize("speculation", [False, {"depth": 4}])
def test_streamed_tool_use_is_that_of_the_whole_answer(api: Anthropic, speculation: Any) -> None:
    extra = {"seed": 3, "speculative_decoding": speculation}
    options: Any = {"tools": [CLOCK], "tool_choice": {"type": "any"}, "max_tokens": 160, "extra_body": extra}
    with api.messages.stream(model=MODEL, messages=user("hello there"), **options) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    whole = create(api, **options)
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert snapshots


def test_a_model_may_speak_and_use_a_tool(api: Anthropic) -> None:
    text = 'Ok <tool_call>[{"name": "get_time", "arguments": {"zone": "UTC"}}]'
    answer = create(
        api, tools=[CLOCK], max_tokens=80, stop_sequences=["</tool_call>"], extra_body=known(text[:63])
    )
    assert answer.content[0].type == "text"
    assert words(answer).startswith("Ok ")


def test_results_of_tools_are_read(api: Anthropic) -> None:
    answer = create(api, "What time is it?", tools=[CLOCK], tool_choice=ONE_CALL, max_tokens=100)
    [use] = answer.content
    used = []
    for result in ("10:30", [{"type": "text", "text": "a quarter past twelve"}]):
        block = {"type": "tool_result", "tool_use_id": use.id, "content": result}
        messages: list[Any] = [
            *user("What time is it?"),
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [block]},
        ]
        used.append(api.messages.count_tokens(model=MODEL, messages=messages, tools=[CLOCK]).input_tokens)
        read = create(api, messages=messages, tools=[CLOCK], max_tokens=2)
        assert read.usage.input_tokens + (read.usage.cache_read_input_tokens or 0) == used[-1]
    assert used[1] - used[0] == len("a quarter past twelve") - len("10:30")


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", "'disabled'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "image"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": user("x" * 3000)}, "messages", "maximum context length"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop"),
        ({"extra_body": {"temperature": -1}}, "temperature", "temperature"),
        ({"tools": [{**CLOCK, "name": "no good"}]}, "tools[0].name", "letters"),
        (
            {"tools": [{**CLOCK, "input_schema": {"type": "array"}}]},
            "tools[0].input_schema",
            "describe an object",
        ),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type", "json_schema"),
        ({"container": "c"}, "container", "container"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers", "mcp_servers"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    api: Anthropic, options: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said) as refused:
        create(api, **options)
    assert refused.value.type == "invalid_request_error"
    body: Any = refused.value.body
    assert (body["type"], body["error"]["param"]) == ("error", param)
    assert body["request_id"] == refused.value.request_id is not None


def test_an_unknown_model_is_not_found(api: Anthropic) -> None:
    for ask in (create, lambda api, **options: api.messages.count_tokens(messages=user("hi"), **options)):
        with pytest.raises(anthropic.NotFoundError, match="claude-x") as refused:
            ask(api, model="claude-x")
        assert refused.value.type == "not_found_error"


def test_a_body_without_max_tokens_is_refused(served: Served) -> None:
    reply = served.post("/v1/messages", {"messages": user("hi")})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "max_tokens"


KEYS = {"good": "sk-good-0123456789abcdef", "slow": "sk-slow-0123456789abcdef"}


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With keys, of which one may ask once a minute, and for small bodies."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    tables = []
    for name, key in KEYS.items():
        limit = "requests_per_minute = 1\n" if name == "slow" else ""
        tables.append(f'[[key]]\nname = "{name}"\nhash = "sha256:{digest_of(key).hex()}"\n{limit}')
    file.write_text("\n".join(tables))
    server = start_server(tiny_folder, "--key-file", str(file), "--max-body-bytes", "20000")
    yield server
    assert server.stop() == 0


def test_a_key_is_taken_from_either_header(guarded: Served) -> None:
    body = {"max_tokens": 1, "messages": user("hi")}
    bearer, own = {"authorization": f"Bearer {KEYS['good']}"}, {"x-api-key": KEYS["good"]}
    for headers in (bearer, own, {**bearer, **own}):
        assert guarded.post("/v1/messages", body, headers=headers).status_code == 200
        assert guarded.get("/v1/models", headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {**bearer, "x-api-key": KEYS["slow"]}):
        assert guarded.post("/v1/messages", body, headers=headers).status_code == 401


def test_errors_before_the_route_have_anthropics_shape_too(guarded: Served) -> None:
    with anthropic_client(guarded, "wrong") as api, pytest.raises(anthropic.AuthenticationError) as refused:
        create(api)
    assert refused.value.type == "authentication_error"
    with anthropic_client(guarded, KEYS["good"]) as api:
        with pytest.raises(anthropic.RequestTooLargeError) as large:
            create(api, "x" * 30_000)
        assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    for method, status in (("get", 405), ("post", 415)):
        ask = {"get": lambda: guarded.get("/v1/messages", headers={"x-api-key": KEYS["good"]})}
        ask["post"] = lambda: guarded.post(
            "/v1/messages", {}, headers={"x-api-key": KEYS["good"], "content-type": "text/plain"}
        )
        reply = ask[method]()
        assert (reply.status_code, reply.json()["type"]) == (status, "error")
        assert reply.headers["request-id"] == reply.headers["x-request-id"] == reply.json()["request_id"]


def test_a_keys_limit_is_a_rate_limit_error(guarded: Served) -> None:
    with anthropic_client(guarded, KEYS["slow"]) as api:
        create(api, max_tokens=1)
        with pytest.raises(anthropic.RateLimitError) as refused:
            create(api, max_tokens=1)
    assert refused.value.type == "rate_limit_error"
    assert int(refused.value.response.headers["retry-after"]) > 0
