"""Anthropic's Messages: requests become the chat requests that ask for the same, answers become blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidRequest
from outrider.serve.link import Piece
from outrider.serve.messages import Messages, MessagesRequest, _blaming_own_fields, as_chat
from outrider.serve.tools import SMOLLM, ToolRequest, check_tools
from tests.serve.test_call import call_of, piece

CLOCK: dict[str, Any] = {
    "name": "get_time",
    "description": "The time in a zone.",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
ASKED = {"role": "user", "content": "What time is it?"}
USED: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {"zone": "UTC"}}


def chat(*messages: dict[str, Any], **fields: Any) -> Any:
    body = {"max_tokens": 8, "messages": messages or [ASKED], **fields}
    return as_chat(msgspec.convert(body, MessagesRequest))


def turns(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(*messages, **fields).messages


def result(content: Any, **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}
    return {"role": "user", "content": [block]}


# ------------------------------------------------------------------------------------------------- requests


def test_a_system_text_or_its_blocks_come_first() -> None:
    blocks = [
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    assert turns(system="Be kind.\nBe brief.") == turns(system=blocks)
    assert turns(system=blocks)[0] == {"role": "system", "content": "Be kind.\nBe brief."}


def test_turns_of_one_role_in_a_row_are_one() -> None:
    hello, there = ({"role": "user", "content": text} for text in ("hello", "there"))
    assert turns(hello, there) == [{"role": "user", "content": "hello\nthere"}]


def test_blocks_are_lines_of_their_turn() -> None:
    blocks = [{"type": "text", "text": text} for text in ("", "a", "", "b")]
    assert turns({"role": "user", "content": blocks}, ASKED)[0]["content"] == "a\n\nb\nWhat time is it?"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_list_without_blocks_is_an_empty_text(role: str) -> None:
    assert turns({"role": role, "content": []}) == [{"role": role, "content": ""}]
    assert turns(ASKED, {"role": "user", "content": []}) == [ASKED]


@pytest.mark.parametrize("kind", [[], {}, ["auto"], {"type": "auto"}, 5, None, "x" * 10_000])
def test_a_tool_choice_of_no_known_type_is_refused_in_short(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tool_choice\.type must be") as refused:
        chat(tools=[CLOCK], tool_choice={"type": kind})
    assert len(str(refused.value)) < 250


def test_a_tool_and_its_result_are_told_as_chat_tells_them() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "I shall look."}, USED]}
    asked, used, answered = turns(ASKED, said, result([{"type": "text", "text": "10:30"}]))
    assert asked == ASKED
    function = {"name": "get_time", "arguments": {"zone": "UTC"}}
    call = {"id": "toolu_1", "type": "function", "function": function}
    assert used == {"role": "assistant", "content": "I shall look.", "tool_calls": [call]}
    assert answered == {"role": "tool", "tool_call_id": "toolu_1", "content": "10:30"}


def test_words_beside_a_result_are_a_turn_of_the_user() -> None:
    both = result("10:30")
    both["content"].append({"type": "text", "text": "Is it late?"})
    last = turns(ASKED, {"role": "assistant", "content": [USED]}, both)[-2:]
    assert [message["role"] for message in last] == ["tool", "user"]
    assert last[-1]["content"] == "Is it late?"


@pytest.mark.parametrize(
    ("content", "told"), [("no such zone", "Error: no such zone"), (None, "Error"), ([], "Error")]
)
def test_a_failure_is_told_as_one(content: Any, told: str) -> None:
    used = {"role": "assistant", "content": [USED]}
    assert turns(ASKED, used, result(content, is_error=True))[-1]["content"] == told


def test_an_answer_that_was_begun_is_gone_on_with() -> None:
    assert chat(ASKED, {"role": "assistant", "content": "It is"}).continue_final_message is True
    assert chat(ASKED).continue_final_message is False


def test_tools_become_functions() -> None:
    [tool] = chat(tools=[{**CLOCK, "strict": True, "cache_control": {"type": "ephemeral"}}]).tools
    function = {"name": "get_time", "description": "The time in a zone.", "strict": True}
    assert tool == {"type": "function", "function": {**function, "parameters": CLOCK["input_schema"]}}


def test_examples_of_a_tools_input_are_shown_with_its_schema() -> None:
    [tool] = chat(tools=[{**CLOCK, "input_examples": [{"zone": "UTC"}]}]).tools
    assert tool["function"]["parameters"]["examples"] == [{"zone": "UTC"}]


@pytest.mark.parametrize(
    ("choice", "told", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "get_time"},
            {"type": "function", "function": {"name": "get_time"}},
            None,
        ),
    ],
)
def test_a_choice_of_tools_means_the_same(choice: Any, told: Any, parallel: bool | None) -> None:
    asked = chat(tools=[CLOCK], tool_choice=choice)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (told, parallel)
    check_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)


def test_a_form_and_stop_sequences_are_handed_on() -> None:
    form = {"type": "json_schema", "schema": {"type": "null"}}
    asked = chat(output_config={"format": form, "effort": "low"}, stop_sequences=["x"], top_k=3, seed=4)
    assert (asked.response_format, asked.stop, asked.top_k, asked.seed) == (form, ["x"], 3, 4)


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_no_thinking_may_be_asked_for(thinking: dict[str, Any]) -> None:
    context = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert turns(thinking=thinking, context_management=context) == [ASKED]


IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "list of blocks"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content", "list of blocks"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]",
            "'document'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
            "messages[0].content[0].thinking",
            "a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "a text",
        ),
        ({"messages": [{"role": "user", "content": [USED]}]}, "messages[0].content[0]", "'tool_use'"),
        ({"messages": [result("x")]}, "messages[0].content[0].tool_use_id", "names no tool_use"),
        ({"messages": [ASKED, {"role": "assistant", "content": [USED]}]}, "messages", "tool_result"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [USED]}, result([IMAGE])]},
            "messages[2].content[0].content[0]",
            "'image'",
        ),
        ({"system": [IMAGE]}, "system[0]", "only text"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking", "'disabled'"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0]",
            "clear_tool_uses",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
            "runs no tools",
        ),
        ({"tools": [{"name": "get_time"}]}, "tools[0].input_schema", "an object"),
        ({"tools": [{**CLOCK, "defer_loading": True}]}, "tools[0]", "defer_loading"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "'any'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "a text"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
            "true or false",
        ),
        ({"n": 2}, "n", "one answer"),
        ({"stop": "x"}, "stop", "stop_sequences"),
        ({"response_format": {"type": "json_object"}}, "response_format", "output_config"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        chat(**{"messages": [ASKED], **fields})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("stop", "stop_sequences"),
        ("tools[0].function.name", "tools[0].name"),
        ("tools[1].function.parameters", "tools[1].input_schema"),
        ("tools.stop.parameters", "tools.stop.input_schema"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("temperature", "temperature"),
    ],
)
def test_an_error_of_chat_names_the_field_that_was_sent(param: str, own: str) -> None:
    """The rest of its text is left alone: it may hold the same word."""
    with pytest.raises(InvalidRequest) as refused, _blaming_own_fields():
        raise InvalidRequest(f"{param}: do not stop at a function with parameters", param)
    assert (str(refused.value), refused.value.param) == (
        f"{own}: do not stop at a function with parameters",
        own,
    )
    with pytest.raises(InvalidRequest, match=r"^two tools stop$"), _blaming_own_fields():
        raise InvalidRequest("two tools stop", param)


# -------------------------------------------------------------------------------------------------- answers


def answer(*pieces: Piece, tools: bool = False, narrowed: bool = False, prompt: int = 5) -> Messages:
    call = call_of(prompt)
    call.model.tool_format = SMOLLM
    wanted = check_tools(chat(tools=[CLOCK]).tools) if tools else ToolRequest("none")
    dialect = Messages(call, wanted, narrowed)
    dialect.events = [*dialect.begin(), *(e for p in pieces for e in dialect.feed(0, p))]  # type: ignore[attr-defined]
    return dialect


CALL = '<tool_call>[{"name": "get_time", "arguments": {"zone": "UTC"}}]</tool_call>'


def test_words_are_one_block_of_text() -> None:
    dialect = answer(piece("ab"), piece("c", reason="stop"))
    body = dialect.body()
    assert body["content"] == [{"type": "text", "text": "abc"}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "shown")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)


def test_events_come_in_anthropics_order() -> None:
    dialect = answer(piece("ab"), piece("c", reason="stop"))
    events = [*dialect.events, *dialect.finish()]  # type: ignore[attr-defined]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"] == {"input_tokens": 5, "output_tokens": 0}
    assert [event["index"] for event in events[1:5]] == [0] * 4
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[5]["usage"]["output_tokens"] == 3


def test_a_tool_use_is_a_block_of_its_own() -> None:
    dialect = answer(*map(piece, "Well. " + CALL), piece("", reason="stop"), tools=True)
    events = [*dialect.events, *dialect.finish()]  # type: ignore[attr-defined]
    text, use = dialect.body()["content"]
    assert text == {"type": "text", "text": "Well. "}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_time", {"zone": "UTC"})
    assert use["id"].startswith("toolu_")
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts == [{"type": "text", "text": ""}, {**use, "input": {}}]
    deltas = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", ())]
    assert "".join(deltas) == '{"zone": "UTC"}'
    assert len([event for event in events if event["type"] == "content_block_stop"]) == 2
    assert dialect.body()["stop_reason"] == "tool_use"


def test_a_tool_use_that_was_cut_off_keeps_what_was_written() -> None:
    cut = CALL[: CALL.index("UTC") + 2]
    body = answer(piece(cut, reason="length"), tools=True).body()
    assert body["content"][0]["input"] == {"INVALID_JSON": '{"zone": "UT'}
    assert body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("reason", "stop", "narrowed", "ending"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
    ],
)
def test_why_it_ended_is_told(reason: str, stop: str | None, narrowed: bool, ending: tuple[str, Any]) -> None:
    body = answer(piece("ab", reason=reason, stop=stop), narrowed=narrowed).body()
    assert (body["stop_reason"], body["stop_sequence"]) == ending


def test_tokens_found_in_the_cache_are_not_input_tokens() -> None:
    usage = answer(piece("ab", reason="stop", cached=4), prompt=10).body()["usage"]
    counts = (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"])
    assert (counts, usage["output_tokens"]) == ((6, 4, 0), 2)


def test_an_answer_of_nothing_has_no_blocks() -> None:
    dialect = answer(piece("", reason="stop"))
    assert [event["type"] for event in dialect.finish()] == ["message_delta", "message_stop"]
    assert dialect.body()["content"] == []
