"""Tools through OpenAI's Python SDK: a model that speaks at random is held to calls, or is made to say one."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.lib._tools import pydantic_function_tool
from pydantic import BaseModel

from tests.serve.conftest import Served
from tests.serve.sdk import MODEL, async_client, chat, client, exactly, said, user


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False  # a random model would go on adding them
    return {"type": "function", "function": {"name": name, "description": "...", "parameters": parameters}}


WEATHER = function("get_weather", city={"enum": ["Paris", "Oslo"]}, days={"enum": [1, 2, 3]})
CLOCK = function("get_time", zone={"enum": ["UTC", "CET"]})
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
FORCED: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 160}


@pytest.fixture(scope="module")
def api(served: Served) -> OpenAI:
    return client(served)


def check_call(call: Any) -> None:
    """It is a call of one of the two functions, with values they take."""
    assert call.type == "function"
    assert call.id.startswith("call_")
    values = json.loads(call.function.arguments)
    if call.function.name == "get_time":
        assert values in ({"zone": "UTC"}, {"zone": "CET"})
    else:
        assert call.function.name == "get_weather"
        assert values["city"] in ("Paris", "Oslo")
        assert values["days"] in (1, 2, 3)


def test_a_required_call_is_made(api: OpenAI) -> None:
    for seed in range(3):
        [choice] = chat(api, seed=seed, parallel_tool_calls=False, **FORCED).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        check_call(call)


def test_a_named_function_is_the_one_called(api: OpenAI) -> None:
    answer = chat(api, tools=[WEATHER, CLOCK], tool_choice=NAMED, max_tokens=400)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_time"]


def test_calls_can_be_parallel(api: OpenAI) -> None:
    counts = set()
    for seed in range(8):
        calls = chat(api, seed=seed, **{**FORCED, "max_tokens": 800}).choices[0].message.tool_calls
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            check_call(call)
        counts.add(len(calls))
        if max(counts) > 1:
            break
    assert max(counts) > 1


def assembled(stream: Any) -> tuple[list[list[str]], str | None]:
    """Id, name and arguments of each call, put together from deltas as a client does it; and the reason."""
    calls: list[list[str]] = []
    reason = None
    for chunk in stream:
        [choice] = chunk.choices
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments or ""
    return calls, reason


@pytest.mark.parametrize("speculation", [False, {"depth": 4}])
def test_streamed_calls_are_those_of_the_whole_answer(api: OpenAI, speculation: Any) -> None:
    options = {**FORCED, "seed": 5, "extra_body": {"speculative_decoding": speculation}}
    [choice] = chat(api, **options).choices
    whole = [[c.id, c.function.name, c.function.arguments] for c in choice.message.tool_calls]
    assert len(whole) > 1
    assert assembled(chat(api, stream=True, **options)) == (whole, choice.finish_reason)


def test_arguments_are_streamed_in_pieces(api: OpenAI) -> None:
    pieces = [
        part.function.arguments
        for chunk in chat(
            api, tools=[WEATHER], stream=True, tool_choice="required", parallel_tool_calls=False
        )
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0] == ""  # with the name
    assert len(pieces) > 3


FREE = function("f", a={"type": "integer"})
CALL = '<tool_call>[{"name": "f", "arguments": {"a": 1}}]'


def test_the_model_may_call_by_itself(api: OpenAI) -> None:
    """The random model is made to say a call; nobody forced the call itself."""
    answer = chat(api, tools=[FREE], stop="</tool_call>", **exactly(f"{CALL}</tool_call>"))
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')


def test_words_before_a_call_are_content(api: OpenAI) -> None:
    options = {
        "tools": [FREE],
        "stop": "</tool",
        "tool_choice": "auto",
        "seed": 2,
        **exactly(f"ok {CALL}</tool"),
    }
    [choice] = chat(api, **options).choices
    assert choice.message.content == "ok "
    deltas = [chunk.choices[0].delta for chunk in chat(api, stream=True, **options)]
    assert "".join(delta.content or "" for delta in deltas) == "ok "
    assert sum(delta.tool_calls is not None for delta in deltas) >= 1


def test_words_alone_are_content_in_spite_of_tools(api: OpenAI) -> None:
    answer = chat(api, tools=[FREE], stop="!", **exactly("no tool fits!"))
    assert (said(answer), answer.choices[0].finish_reason) == ("no tool fits", "stop")
    assert answer.choices[0].message.tool_calls is None


def test_without_a_choice_the_text_stays_text(api: OpenAI) -> None:
    answer = chat(
        api, tools=[FREE], tool_choice="none", stop="</tool_call>", **exactly(f"{CALL}</tool_call>")
    )
    assert said(answer) == CALL
    assert answer.choices[0].message.tool_calls is None


def test_tools_not_to_be_called_are_not_shown(api: OpenAI) -> None:
    alone = chat(api, max_tokens=1).usage.prompt_tokens
    assert chat(api, tools=[FREE], tool_choice="none", max_tokens=1).usage.prompt_tokens == alone
    assert chat(api, tools=[FREE], max_tokens=1).usage.prompt_tokens > alone


def test_results_of_calls_are_read(api: OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
    used = []
    for result in ("noon", "a little after noon"):
        messages = [
            *user("What time is it?"),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": result},
        ]
        answer = api.chat.completions.create(model=MODEL, messages=messages, tools=[CLOCK], max_tokens=2)
        used.append(answer.usage.prompt_tokens)
    assert used[1] - used[0] == len("a little after ")


def test_an_answer_with_calls_can_be_sent_back_as_it_is(api: OpenAI) -> None:
    """What every agent does: append the message, run the tools, ask again."""
    message = chat(api, seed=1, **FORCED).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
    messages = [*user("hello there"), message, *results]
    answer = api.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER, CLOCK], max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 3


class GetTime(BaseModel, extra="forbid"):
    """The time in a zone."""

    zone: Literal["UTC", "CET"]


def test_the_sdk_parses_arguments_into_a_class(api: OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL,
        messages=user("time?"),
        tools=[pydantic_function_tool(GetTime)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetTime)


def test_the_sdk_follows_a_stream_of_calls(api: OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL,
        messages=user("time?"),
        tools=[pydantic_function_tool(GetTime)],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(call.function.parsed_arguments, GetTime)


def test_each_choice_has_its_own_calls(api: OpenAI) -> None:
    answer = chat(api, n=3, seed=4, parallel_tool_calls=False, **FORCED)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls]
    assert len({call.id for call in calls}) == len(calls) == 3


def test_the_async_client_calls(served: Served, api: OpenAI) -> None:
    async def calls() -> list[list[str]]:
        async with async_client(served) as own:
            stream = await own.chat.completions.create(
                model=MODEL, messages=user("hello there"), seed=1, stream=True, **FORCED
            )
            return assembled([chunk async for chunk in stream])[0]

    [choice] = chat(api, seed=1, **FORCED).choices
    assert asyncio.run(calls()) == [
        [c.id, c.function.name, c.function.arguments] for c in choice.message.tool_calls
    ]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice", "'always'"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "rename one"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice.function.name", "not the name of a tool"),
        ({"tools": [function("f", a={"type": "x"})], "tool_choice": "required"}, "tools", "does not compile"),
        (
            {"tools": [CLOCK], "response_format": {"type": "json_object"}},
            "response_format",
            "no room for tool",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "must be 'function'"),
    ],
)
def test_wrong_tools_are_refused_by_name(
    api: OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        chat(api, **options)
    assert refused.value.param == param
