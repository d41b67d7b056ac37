"""OpenAI's Responses through its Python SDK: answers, events, tools and forms, and no state."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.serve.conftest import Served
from tests.serve.sdk import MODEL, async_client, chat, client, said

CLOCK: dict[str, Any] = {
    "type": "function",
    "name": "get_time",
    "description": "The time in a zone.",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
CALL: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def api(served: Served) -> OpenAI:
    return client(served)


NULL: dict[str, Any] = {"format": {"type": "json_schema", "name": "nothing", "schema": {"type": "null"}}}


def respond(api: OpenAI, asked: Any = "hello there", **options: Any) -> Any:
    return api.responses.create(model=MODEL, input=asked, **options)


def test_a_response_says_what_chat_says(api: OpenAI) -> None:
    answer = respond(api, temperature=0, max_output_tokens=12)
    assert answer.output_text == said(chat(api, temperature=0, max_tokens=12))
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (12, answer.usage.input_tokens + 12)
    assert answer.store is False


def test_a_response_that_ends_by_itself_is_completed(api: OpenAI) -> None:
    answer = respond(api, text=NULL)
    assert (answer.output_text.strip(), answer.status, answer.incomplete_details) == (
        "null",
        "completed",
        None,
    )
    assert [item.status for item in answer.output] == ["completed"]


def test_instructions_and_messages_are_a_conversation(api: OpenAI) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        {"role": "user", "content": "again"},
    ]
    answer = respond(api, items, instructions="Be kind.", temperature=0, max_output_tokens=12)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "again"},
    ]
    same = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    assert answer.output_text == said(same)


def test_events_come_in_order_and_end_with_the_whole(api: OpenAI) -> None:
    options = {"max_output_tokens": 12, "extra_body": {"seed": 2}}
    events = list(respond(api, stream=True, **options))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == respond(api, **options).output_text


def test_the_sdk_follows_a_stream(api: OpenAI) -> None:
    with api.responses.stream(model=MODEL, input="hello there", text=NULL) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "null"


def test_a_tool_is_called(api: OpenAI) -> None:
    [call] = respond(api, **CALL).output
    assert (call.type, call.name, call.status) == ("function_call", "get_time", "completed")
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    assert call.call_id.startswith("call_")


def test_a_tool_can_be_named(api: OpenAI) -> None:
    other = {**CLOCK, "name": "get_date"}
    answer = respond(api, tools=[CLOCK, other], tool_choice={"type": "function", "name": "get_date"})
    assert [call.name for call in answer.output] == ["get_date"]


def test_a_streamed_call_is_the_whole_call(api: OpenAI) -> None:
    seeded = {**CALL, "extra_body": {"seed": 3}}
    events = list(respond(api, stream=True, **seeded))
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
    [whole] = respond(api, **seeded).output
    assert arguments == done.arguments == whole.arguments == events[-1].response.output[0].arguments
    assert events[-1].response.output[0].call_id == whole.call_id
    assert events[-1].type == "response.completed"


def test_results_of_calls_are_read(api: OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"zone": "UTC"}'}
    asked = {"role": "user", "content": "What time is it?"}
    used = []
    for result in ("10:30", "a quarter past twelve"):
        items = [asked, call, {"type": "function_call_output", "call_id": "c1", "output": result}]
        used.append(respond(api, items, tools=[CLOCK], max_output_tokens=2).usage.input_tokens)
    assert used[1] - used[0] == len("a quarter past twelve") - len("10:30")


class Person(BaseModel, extra="forbid"):
    name: Literal["Ada", "Alan"]
    old: bool


def test_the_sdk_parses_into_a_class(api: OpenAI) -> None:
    answer = api.responses.parse(
        model=MODEL, input="who?", text_format=Person, max_output_tokens=300, extra_body={"seed": 1}
    )
    assert isinstance(answer.output_parsed, Person)


def test_logprobs_come_with_the_text(api: OpenAI) -> None:
    answer = respond(
        api, temperature=0, max_output_tokens=4, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    scored = answer.output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in scored] == [2] * 4
    same = chat(api, temperature=0, max_tokens=4, logprobs=True).choices[0].logprobs.content
    assert [entry.logprob for entry in scored] == pytest.approx([e.logprob for e in same], abs=1e-5)


def test_speculation_is_asked_for_and_reported(api: OpenAI) -> None:
    options = {"seed": 8, "speculative_decoding": {"depth": 3, "stats": True}}
    first, second = (respond(api, max_output_tokens=24, extra_body=options) for _ in range(2))
    assert first.output_text == second.output_text
    report = second.metrics["speculative_decoding"]
    assert report["num_accepted_draft_tokens"] == second.timings["draft_n_accepted"] > 0
    assert second.seed == 8


def test_the_async_client_streams(served: Served, api: OpenAI) -> None:
    async def text() -> str:
        async with async_client(served) as own:
            stream = await own.responses.create(
                model=MODEL, input="hello there", temperature=0, max_output_tokens=8, stream=True
            )
            return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

    assert asyncio.run(text()) == respond(api, temperature=0, max_output_tokens=8).output_text


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no state"),
        ({"conversation": "conv_1"}, "conversation", "keeps no state"),
        ({"background": True}, "background", "keeps no state"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length"),
        ({"input": "x" * 3000}, "input", "maximum context length"),
        ({"input": [{"type": "image"}]}, "input[0].type", "'image'"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text", "does not compile"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    api: OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        api.responses.create(**{"model": MODEL, "input": "hello", **options})
    assert refused.value.param == param
