"""Tool calls: what a client may ask, how the model is told, what it is held to, and what it says back."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from outrider.errors import InvalidRequest
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.load.template import ChatTemplate
from outrider.serve.tool_text import CallArguments, CallBegin, CallEnd, Text, ToolReader
from outrider.serve.tools import (
    HERMES,
    LLAMA,
    SMOLLM,
    ToolRequest,
    call_id,
    check_tools,
    choose_format,
    grammar_of,
    uses_tools,
    with_tools,
)
from outrider.types import SamplingParams
from outrider.verify.grammar import GrammarCompiler
from tests.load.tiny import byte_level_backend

FORMATS = [HERMES, SMOLLM, LLAMA]
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def tool(name, parameters=None, **more):
    body = {"name": name, **more}
    return {
        "type": "function",
        "function": body if parameters is None else {**body, "parameters": parameters},
    }


TOOLS = [tool("get_weather", WEATHER, description="Weather of a city"), tool("get_time")]
STRICT = [tool("get_weather", WEATHER, strict=True), tool("get_time")]
NAMED = {"type": "function", "function": {"name": "get_time"}}


# ------------------------------------------------------------------------------------------------- dialects

# The marks by which templates in the field differ, in a template of our own.
QWEN_LIKE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- 'Tools:' }}{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
{{- '\\nCall them as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not tools %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function %}
{{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA_LIKE = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "family", "fmt"),
    [
        (QWEN_LIKE, "qwen2", HERMES),
        (QWEN_LIKE, "llama", HERMES),  # Hermes is a Llama by shape
        ("... answer with <tool_call>[{...}]</tool_call>", "llama", SMOLLM),
        (LLAMA_LIKE, "llama", LLAMA),
        ("{{ '<|python_tag|>' }}", "llama", LLAMA),
        (PLAIN, "qwen3", HERMES),
        (PLAIN, "llama", SMOLLM),
        (PLAIN, "mistral", SMOLLM),
        (None, "qwen2", HERMES),
        (None, "llama", SMOLLM),
        ("", "anything", SMOLLM),
    ],
)
def test_the_dialect_is_read_off_the_template(source, family, fmt):
    assert choose_format(source, family) is fmt


CALLS = [("get_weather", {"city": "Málaga"}), ("get_time", {})]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Málaga"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "smollm": '<tool_call>[{"name": "get_weather", "arguments": {"city": "Málaga"}}, '
    '{"name": "get_time", "arguments": {}}]</tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Málaga"}}; {"name": "get_time", "parameters": {}}',
}


@by_format
def test_calls_are_written_in_the_dialect(fmt):
    assert fmt.write(CALLS) == WRITTEN[fmt.name]


@by_format
def test_a_tag_has_its_first_character_once(fmt):
    for tag in filter(None, (fmt.tag, fmt.end)):
        assert tag.count(tag[0]) == 1


# --------------------------------------------------------------------------------------- what the client asked


def names(request):
    return [function.name for function in request.allowed]


def test_tools_are_called_at_will_by_default():
    request = check_tools(TOOLS)
    assert (request.mode, names(request), request.parallel) == ("auto", ["get_weather", "get_time"], True)
    assert request.shown == TOOLS


def test_a_function_that_must_be_called():
    assert check_tools(TOOLS, "required").mode == "required"
    assert check_tools(TOOLS, "required", False).parallel is False
    assert check_tools(TOOLS, "auto", None).parallel is True


def test_a_named_function_is_called_once():
    request = check_tools(TOOLS, NAMED, True)
    assert (request.mode, names(request), request.parallel, request.named) == (
        *("required", ["get_time"], False, True),
    )


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_a_part_of_the_tools(mode):
    chosen = [NAMED, NAMED]
    request = check_tools(
        TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}, False
    )
    assert (request.mode, names(request), request.parallel, request.named) == (
        mode,
        ["get_time"],
        False,
        False,
    )
    assert request.shown == [TOOLS[1]]


@pytest.mark.parametrize(
    ("tools", "choice"),
    [(None, None), (None, "none"), (None, "auto"), ([], None), ([], "auto"), (TOOLS, "none"), ((), "none")],
)
def test_no_tools_to_call(tools, choice):
    assert check_tools(tools, choice) == ToolRequest("none")
    assert not check_tools(tools, choice).shown


@pytest.mark.parametrize(
    "body", [{"strict": None}, {"description": None}, {"parameters": None}, {"extra": 1}]
)
def test_fields_that_may_be_null_or_unknown(body):
    assert names(check_tools([tool("f", **body)])) == ["f"]


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def allowed(**body):
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED], **body}}


BAD = [
    ("f", None, "tools"),
    ({"type": "function"}, None, "tools"),
    ([tool(f"f{i}") for i in range(129)], None, "tools"),
    (["f"], None, "tools[0]"),
    ([tool("a"), None], None, "tools[1]"),
    ([{"function": {"name": "f"}}], None, "tools[0].type"),
    ([{"type": "web_search"}], None, "tools[0].type"),
    ([{"type": "function"}], None, "tools[0].function"),
    ([{"type": "function", "function": "f"}], None, "tools[0].function"),
    ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
    ([tool("a"), tool("b"), tool("")], None, "tools[2].function.name"),
    ([tool("x" * 65)], None, "tools[0].function.name"),
    ([tool("a b")], None, "tools[0].function.name"),
    ([tool("a\n")], None, "tools[0].function.name"),
    ([tool("é")], None, "tools[0].function.name"),
    ([tool(5)], None, "tools[0].function.name"),
    ([tool("a"), tool("a")], None, "tools[1].function.name"),
    ([tool("a", description=5)], None, "tools[0].function.description"),
    ([tool("a", [1])], None, "tools[0].function.parameters"),
    ([tool("a", {"type": "string"})], None, "tools[0].function.parameters"),
    ([tool("a", {"type": ["object", "null"]})], None, "tools[0].function.parameters"),
    ([tool("a", strict="yes")], None, "tools[0].function.strict"),
    ([tool("a", {"x": float("nan")})], None, "tools[0]"),
    ([tool("a", description="\ud800")], None, "tools[0]"),
    ([tool("a", deep(2000))], None, "tools[0]"),
    (None, "required", "tool_choice"),
    ([], NAMED, "tool_choice"),
    (None, {}, "tool_choice"),
    (TOOLS, "any", "tool_choice"),
    (TOOLS, "Required", "tool_choice"),
    (TOOLS, 1, "tool_choice"),
    (TOOLS, ["auto"], "tool_choice"),
    (TOOLS, {}, "tool_choice.type"),
    (TOOLS, {"type": "custom"}, "tool_choice.type"),
    (TOOLS, {"type": "function"}, "tool_choice.function"),
    (TOOLS, {"type": "function", "function": {}}, "tool_choice.function.name"),
    (TOOLS, {"type": "function", "function": {"name": "get_tim"}}, "tool_choice.function.name"),
    (TOOLS, {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    (TOOLS, allowed(mode="none"), "tool_choice.allowed_tools.mode"),
    (TOOLS, allowed(mode=None), "tool_choice.allowed_tools.mode"),
    (TOOLS, allowed(tools=[]), "tool_choice.allowed_tools.tools"),
    (TOOLS, allowed(tools=None), "tool_choice.allowed_tools.tools"),
    (TOOLS, allowed(tools=[NAMED, "x"]), "tool_choice.allowed_tools.tools[1]"),
    (TOOLS, allowed(tools=[{"type": "mcp"}]), "tool_choice.allowed_tools.tools[0].type"),
    (TOOLS, allowed(tools=[tool("nope")]), "tool_choice.allowed_tools.tools[0].function.name"),
]


@pytest.mark.parametrize(
    ("tools", "choice", "param"), BAD, ids=[f"{i}-{row[2]}" for i, row in enumerate(BAD)]
)
def test_bad_input_is_refused_by_name(tools, choice, param):
    with pytest.raises(InvalidRequest) as refused:
        check_tools(tools, choice)
    assert refused.value.param == param
    str(refused.value).encode()
    assert 10 < len(str(refused.value)) < 400


@pytest.mark.parametrize("parallel", ["yes", 1, 0, []])
def test_parallel_must_be_a_flag(parallel):
    with pytest.raises(InvalidRequest) as refused:
        check_tools(TOOLS, None, parallel)
    assert refused.value.param == "parallel_tool_calls"


def test_a_misspelt_name_is_suggested():
    with pytest.raises(InvalidRequest, match="did you mean 'get_time'"):
        check_tools(TOOLS, {"type": "function", "function": {"name": "get_tim"}})


# --------------------------------------------------------------------------------------- what the model is told


def past_call(name, arguments, call="call_1"):
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = [
    {"role": "user", "content": "Weather in Oslo, and the time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [past_call("get_weather", '{"city":"Oslo"}'), past_call("get_time", "", "call_2")],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


@pytest.fixture(scope="module")
def smollm2():
    cache = Path(os.environ.get("OUTRIDER_CACHE", "~/.cache/outrider")).expanduser()
    return open_checkpoint(find("smollm2-135m", cache))


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        (QWEN_LIKE, True),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}", True),
        ("{{ tools | tojson }}", True),
        ("{%if(tools)%}x{%endif%}", True),
        (PLAIN, False),
        (LLAMA_LIKE, False),
        (None, False),
        ("You have tools. {{ messages }}", False),
        ("{# tools #}{{ x }}", False),
        ("{{ 'the tools' }}{{ \"it's tools\" }}{{ 'a \\' tools' }}", False),
        ("{{ message.tools }}{{ message['tools'] }}{% if xml_tools or tools_in_user %}{% endif %}", False),
        ("{{ 'it' ~ tools ~ 'x' }}", True),
    ],
)
def test_a_template_that_uses_tools_is_known(source, uses):
    assert uses_tools(source) is uses


@pytest.mark.parametrize(
    "source", ["{{" * 50_000, "{{" + "\\'" * 50_000, "{{ '\"" * 30_000, "{%" + "'" * 99_999]
)
def test_looking_for_tools_in_a_hostile_template_is_quick(source):
    begin = time.thread_time()
    uses_tools(source)
    assert time.thread_time() - begin < 5


def test_a_template_that_knows_tools_gets_them_unchanged():
    messages, tools = with_tools(HISTORY, TOOLS, HERMES, QWEN_LIKE)
    assert tools == TOOLS
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    calls = [call["function"] for call in messages[1]["tool_calls"]]
    assert calls == [
        {"name": "get_weather", "arguments": {"city": "Oslo"}},
        {"name": "get_time", "arguments": {}},
    ]
    assert messages[1]["tool_calls"][1]["id"] == "call_2"


def test_history_through_a_template_that_knows_tools():
    messages, tools = with_tools(HISTORY, TOOLS, HERMES, QWEN_LIKE)
    text = ChatTemplate(QWEN_LIKE).render(messages, tools)
    assert json.dumps(TOOLS[0]) in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert "<tool_response>\nnoon\n</tool_response>" in text


def test_the_history_a_client_sent_is_left_as_it_was():
    before = json.dumps([HISTORY, TOOLS])
    for source in (QWEN_LIKE, PLAIN):
        with_tools(HISTORY, TOOLS, SMOLLM, source)
    assert json.dumps([HISTORY, TOOLS]) == before


@pytest.mark.model
def test_history_through_the_built_in_models_own_template(smollm2):
    source = smollm2.chat_template
    fmt = choose_format(source, smollm2.config.family)
    assert fmt is SMOLLM
    messages, tools = with_tools(HISTORY, TOOLS, fmt, source)
    assert tools is None
    text = ChatTemplate(source).render(messages, tools)
    system, user, assistant, results, rest = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou are an expert in composing function")
    assert f"<tools>{json.dumps(TOOLS)}</tools>" in system
    assert system.endswith(
        '<tool_call>[{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}}, '
        '{"name": "func_name2", "arguments": {}}]</tool_call>'
    )
    assert user == "<|im_start|>user\nWeather in Oslo, and the time?"
    assert assistant == (
        '<|im_start|>assistant\n<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "get_time", "arguments": {}}]</tool_call>'
    )
    assert results == (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert rest == "<|im_start|>assistant\n"


@by_format
def test_past_calls_are_written_as_the_model_would(fmt):
    said = {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [past_call(name, json.dumps(arguments)) for name, arguments in CALLS],
    }
    messages, _ = with_tools([{"role": "user", "content": "?"}, said], [], fmt, PLAIN)
    assert messages[1] == {"role": "assistant", "content": "One moment.\n" + WRITTEN[fmt.name]}


def test_tools_join_the_system_message_there_is():
    messages, _ = with_tools(
        [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *HISTORY],
        TOOLS,
        SMOLLM,
        PLAIN,
    )
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou are an expert")


def test_without_tools_nothing_is_said_of_them():
    plain = [{"role": "user", "content": "hi"}]
    for source in (QWEN_LIKE, PLAIN):
        assert with_tools(plain, [], SMOLLM, source) == (plain, None)


def test_results_of_different_turns_stay_apart():
    turns = [*HISTORY[:3], {"role": "user", "content": "and?"}, *HISTORY[1:3]]
    messages, _ = with_tools(turns, [], SMOLLM, PLAIN)
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("", {}),
        ("  ", {}),
        ({"a": 1}, {"a": 1}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ('{"a":', '{"a":'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_past_arguments_become_an_object_where_they_are_one(sent, kept):
    turn = {"role": "assistant", "content": "", "tool_calls": [past_call("f", sent)]}
    messages, _ = with_tools([turn], [], HERMES, QWEN_LIKE)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == kept
    text, _ = with_tools([turn], [], HERMES, PLAIN)
    assert json.dumps(kept) in text[0]["content"]


def past(**body):
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", **body}]


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (past(tool_calls="f"), "messages[1].tool_calls"),
        (past(tool_calls=["f"]), "messages[1].tool_calls[0]"),
        (past(tool_calls=[{"type": "custom"}]), "messages[1].tool_calls[0].type"),
        (past(tool_calls=[{"id": "x"}]), "messages[1].tool_calls[0].function"),
        (past(tool_calls=[past_call(None, "{}")]), "messages[1].tool_calls[0].function.name"),
        (
            past(tool_calls=[past_call("f", "{}"), past_call("f", 5)]),
            "messages[1].tool_calls[1].function.arguments",
        ),
        (past(tool_calls=[past_call("f", nested(2000))]), "messages"),
        (past(content=None), "messages[1].content"),
        ([], "messages"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
    ],
)
def test_bad_history_is_refused_by_name(messages, param):
    with pytest.raises(InvalidRequest) as refused:
        with_tools(messages, TOOLS, SMOLLM, PLAIN)
    assert refused.value.param == param


# ------------------------------------------------------------------------------------ what the model is held to


class Speller:
    """A tokenizer and its grammars: what may be said, in whole answers."""

    def __init__(self, tokens, decode, encode, compiler, end):
        self.tokens, self.decode, self.encode, self.compiler, self.end = tokens, decode, encode, compiler, end

    def allows(self, grammar, text):
        """Whether the grammar takes this text as a whole answer."""
        SamplingParams(grammar=grammar)
        mask = self.compiler.compile(grammar).mask(self.encode(text))
        return mask is not None and bool(mask[self.end])


def toy(tags=(), special=False):
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    vocab = backend.get_vocab_size()
    return Speller(
        set(backend.get_vocab()),
        lambda ids: backend.decode(ids, skip_special_tokens=False),
        lambda text: backend.encode(text).ids,
        GrammarCompiler(backend.to_str(), vocab, [0]),
        0,
    )


@pytest.fixture(scope="module")
def spellers(smollm2):
    """Tags that are text, tags that are tokens, and the built-in model's own vocabulary."""
    own = smollm2.tokenizer
    tags = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"]
    return {
        "bytes": toy(),
        "tags": toy(tags),
        "special": toy(tags, special=True),
        "smollm2": Speller(
            set(own.strings()),
            own.decode,
            lambda text: own.encode(text, special=False),
            GrammarCompiler(own.to_json(), own.vocab_size, [2]),
            2,
        ),
    }


by_speller = pytest.mark.parametrize("vocabulary", ["bytes", "tags", "special", "smollm2"])


@pytest.fixture
def speller(spellers, vocabulary):
    return spellers[vocabulary]


OSLO, PARIS = ("get_weather", {"city": "Oslo", "days": 3}), ("get_weather", {"city": 'a "b" \\ <b> é'})
TIME = ("get_time", {})


def wrong(fmt):
    """Answers that call, but not as they should."""
    return [
        fmt.write([("get_weather", {"city": 5})]),
        fmt.write([("get_weather", {"days": 3})]),
        fmt.write([("get_weather", {"city": "x", "country": "y"})]),
        fmt.write([("get_time", {"zone": 1})]),
        fmt.write([("get_tim", {})]),
        fmt.write([OSLO]).replace(fmt.key, "args"),
        fmt.write([OSLO]).replace(": ", ":"),
        fmt.write([OSLO]).replace(", ", ",\n"),
        fmt.write([OSLO]).replace("{", "{ "),
        fmt.write([OSLO])[:-1],
    ]


@pytest.mark.model
@by_speller
@by_format
def test_a_required_call_is_one_or_more_of_the_tools(fmt, speller):
    grammar = grammar_of(check_tools(TOOLS, "required"), fmt, speller.tokens)
    for calls in ([OSLO], [TIME], [PARIS, TIME], [TIME, TIME, OSLO]):
        assert speller.allows(grammar, fmt.write(calls))
    for text in (
        "",
        "hello",
        " " + fmt.write([OSLO]),
        fmt.write([OSLO]) + "\n",
        "so " + fmt.write([OSLO]),
        *wrong(fmt),
    ):
        assert not speller.allows(grammar, text), text


@pytest.mark.model
@by_speller
@by_format
def test_without_parallel_calls_there_is_exactly_one(fmt, speller):
    grammar = grammar_of(check_tools(TOOLS, "required", False), fmt, speller.tokens)
    assert speller.allows(grammar, fmt.write([OSLO]))
    assert speller.allows(grammar, fmt.write([TIME]))
    assert not speller.allows(grammar, fmt.write([OSLO, TIME]))
    assert not speller.allows(grammar, "")


@pytest.mark.model
@by_speller
@by_format
def test_a_named_function_is_the_only_one(fmt, speller):
    grammar = grammar_of(check_tools(TOOLS, NAMED), fmt, speller.tokens)
    assert speller.allows(grammar, fmt.write([TIME]))
    for calls in ([OSLO], [TIME, TIME], [("get_time", {"a": 1})]):
        assert not speller.allows(grammar, fmt.write(calls))


@pytest.mark.model
@by_speller
@by_format
def test_with_a_strict_function_text_is_free_and_calls_are_not(fmt, speller):
    grammar = grammar_of(check_tools(STRICT), fmt, speller.tokens)
    free = ["", "hello", "a < b <tool", 'say {"name": 1}', "\n\nwords {", "]", "[1] it is"]
    for text in [*free, fmt.write([OSLO]), fmt.write([PARIS, TIME])]:
        assert speller.allows(grammar, text), text
    if not fmt.bare:
        for text in (
            "Let me see.\n" + fmt.write([OSLO]),
            fmt.write([OSLO]) + " so " + fmt.write([TIME]) + "\n",
        ):
            assert speller.allows(grammar, text), text
        for text in ("<tool_call>", "The <tool_call> tag", fmt.write([OSLO]) + "<tool_call>x"):
            assert not speller.allows(grammar, text), text
    for text in wrong(fmt):
        assert not speller.allows(grammar, text), text


@pytest.mark.model
@by_speller
@by_format
def test_with_a_strict_function_and_no_parallel_calls_the_first_ends_the_answer(fmt, speller):
    grammar = grammar_of(check_tools(STRICT, "auto", False), fmt, speller.tokens)
    assert speller.allows(grammar, "hello")
    assert speller.allows(grammar, fmt.write([OSLO]))
    assert not speller.allows(grammar, fmt.write([OSLO, TIME]))
    assert not speller.allows(grammar, fmt.write([OSLO]) + "\nSo")


@pytest.mark.model
@pytest.mark.parametrize("vocabulary", ["tags", "special"])
@pytest.mark.parametrize("fmt", [HERMES, SMOLLM], ids=lambda fmt: fmt.name)
def test_a_tag_spelled_out_is_held_to_the_same(fmt, speller):
    """A model whose tag is one token may still write it letter by letter; the reader would see a call."""
    grammar = grammar_of(check_tools(STRICT), fmt, speller.tokens)
    state = speller.compiler.compile(grammar)
    spelled = [token for c in "so <tool_call>" for token in speller.encode(c)]
    assert len(spelled) == len("so <tool_call>")
    assert state.mask(spelled) is not None
    assert state.mask([*spelled, *speller.encode("x")]) is None


@pytest.mark.model
@by_speller
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("fmt", [HERMES, SMOLLM], ids=lambda fmt: fmt.name)
def test_a_model_may_think_aloud_before_it_calls(fmt, parallel, speller):
    grammar = grammar_of(check_tools(STRICT, "auto", parallel), fmt, speller.tokens)
    thought = "<think>\nOslo, then.\n</think>\n\n"
    assert speller.allows(grammar, thought + "It rains.")
    assert speller.allows(grammar, thought + fmt.write([OSLO]))
    assert not speller.allows(grammar, thought + "<tool_call>x")


@pytest.mark.model
@pytest.mark.parametrize("vocabulary", ["special"])
def test_a_bare_call_may_still_begin_with_its_token(speller):
    grammar = grammar_of(check_tools(STRICT), LLAMA, speller.tokens)
    assert speller.allows(grammar, "<|python_tag|>" + LLAMA.write([OSLO]))
    assert not speller.allows(grammar, "<|python_tag|>hello")


@pytest.mark.parametrize(
    ("tools", "choice"), [(TOOLS, "auto"), (TOOLS, "none"), (STRICT, "none"), (None, None)]
)
@by_format
def test_nothing_is_held_to_a_grammar_that_need_not_be(fmt, tools, choice):
    assert grammar_of(check_tools(tools, choice), fmt, ()) is None


def only(schema, strict=False):
    return grammar_of(check_tools([tool("f", schema, strict=strict)], "required"), HERMES, ())


SCHEMAS = [
    (None, [{}], [{"a": 1}]),
    ({}, [{}, {"a": [1, {"b": None}]}], []),
    ({"type": "object"}, [{}, {"a": 1}], []),
    ({"properties": {"a": {"type": "string"}}}, [{}, {"a": "x"}], [{"b": 1}, {"a": "x", "b": 1}]),
    ({"properties": {"a": {}}, "additionalProperties": True}, [{"a": 1}, {"b": 1}], []),
    (
        {"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": {"n": {"enum": [1, 2]}}}}},
        [{"n": 2}, {}],
        [{"n": 3}],
    ),
    (
        {"properties": {"a": {"type": "object"}}, "allOf": [{"properties": {"b": {"const": 1}}}]},
        [{"a": {}, "b": 1}],
        [{"b": 2}],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "description": '}\nstart: "x" // %json {"a": 1} # \\" é\n',
            "properties": {"<a> // #": {"type": "array", "items": {"type": "integer"}}},
        },
        [{"<a> // #": [1, 2]}, {"<a> // #": []}],
        [{"<a> // #": ["x"]}],
    ),
    ({"x-guidance": {"whitespace_flexible": True}, "properties": {"a": {"type": "integer"}}}, [{"a": 1}], []),
]


@pytest.mark.parametrize(("schema", "right", "bad"), SCHEMAS)
def test_arguments_follow_the_schema(schema, right, bad):
    bytewise = toy()
    grammar = only(schema)
    for arguments in right:
        assert bytewise.allows(grammar, HERMES.write([("f", arguments)])), arguments
    for arguments in bad:
        assert not bytewise.allows(grammar, HERMES.write([("f", arguments)])), arguments
    spaced = HERMES.write([("f", {"a": 1})]).replace(": 1", ":  1")
    assert not bytewise.allows(grammar, spaced)


UNKNOWN = {"properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_schema_known_only_in_part_is_an_error_when_strict_and_a_guide_when_not():
    compiler = toy().compiler
    compiler.compile(only(UNKNOWN))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiler.compile(only(UNKNOWN, strict=True))


def test_as_many_tools_as_there_may_be():
    tools = [tool(f"function_{i}", WEATHER) for i in range(128)]
    bytewise = toy()
    for fmt in FORMATS:
        grammar = grammar_of(check_tools(tools, "required"), fmt, ())
        assert bytewise.allows(
            grammar, fmt.write([("function_127", {"city": "x"}), ("function_1", {"city": "y"})])
        )


def walk(speller, grammar, dice, limit=400):
    """A random answer that the grammar allows, inclined to come to an end; None if it did not."""
    state, ids = speller.compiler.compile(grammar), []
    closing = [token for c in '"}]' for token in speller.encode(c)]
    while len(ids) < limit:
        mask = state.mask([])
        may = mask.nonzero()[0].tolist()
        if speller.end in may and (len(may) == 1 or dice.random() < 0.3):
            return speller.decode(ids)
        may = [token for token in may if token != speller.end]
        soon = [token for token in closing if token in may]
        token = dice.choice(soon if soon and dice.random() < 0.4 else may)
        state.advance(token)
        ids.append(token)
    return None


@pytest.mark.model
@pytest.mark.parametrize("vocabulary", ["bytes", "tags"])
@pytest.mark.parametrize("choice", ["required", "auto"])
@by_format
def test_whatever_a_grammar_lets_through_is_read_as_calls(fmt, choice, speller):
    request = check_tools(STRICT, choice)
    grammar = grammar_of(request, fmt, speller.tokens)
    dice, finished = random.Random(1), 0
    for _ in range(12):
        text = walk(speller, grammar, dice)
        if text is None:
            continue
        finished += 1
        said, calls = merged(read(text, fmt, request))
        if choice == "required":
            assert not said and calls
        for name, arguments, ended in calls:
            assert name in ("get_weather", "get_time") and ended
            assert isinstance(json.loads(arguments), dict)
    assert finished >= 4


# --------------------------------------------------------------------------------------------- what it says back


AUTO = check_tools(TOOLS)
ONE = check_tools(TOOLS, "auto", False)


def read(text, fmt=HERMES, request=AUTO, cuts=()):
    """All pieces, with the text fed in parts that end at the cuts."""
    reader = ToolReader(fmt, request)
    edges = [0, *sorted(cuts), len(text)]
    pieces = [piece for a, b in itertools.pairwise(edges) for piece in reader.feed(text[a:b])]
    return pieces + reader.finish()


def merged(pieces):
    """All text, and each call as name, arguments and whether it ended."""
    said, calls = "", []
    for piece in pieces:
        if isinstance(piece, Text):
            said += piece.text
        elif isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls.append([piece.name, "", False])
        else:
            assert piece.index == len(calls) - 1 and not calls[-1][2]
            if isinstance(piece, CallArguments):
                calls[-1][1] += piece.text
            else:
                calls[-1][2] = True
    return said, [tuple(call) for call in calls]


def joined(pieces):
    """The pieces in their order, neighbours of one kind made one."""
    out = []
    for piece in pieces:
        if out and isinstance(piece, Text) and isinstance(out[-1], Text):
            out[-1] = Text(out[-1].text + piece.text)
        elif out and isinstance(piece, CallArguments) and isinstance(out[-1], CallArguments):
            out[-1] = CallArguments(piece.index, out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def results(text, fmt=HERMES, request=AUTO):
    return merged(read(text, fmt, request))


@by_format
def test_calls_are_read_as_they_are_written(fmt):
    expected = [(name, json.dumps(arguments, ensure_ascii=False), True) for name, arguments in CALLS]
    assert results(fmt.write(CALLS), fmt) == ("", expected)


@by_format
def test_pieces_come_in_order(fmt):
    assert read(fmt.write([OSLO, TIME]), fmt) == [
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Oslo", "days": 3}'),
        CallEnd(0),
        CallBegin(1, "get_time"),
        CallArguments(1, "{}"),
        CallEnd(1),
    ]


def get_time(body='{"name": "get_time", "arguments": {}}'):
    return f"<tool_call>{body}</tool_call>"


TIME_CALL = ("get_time", "{}", True)

LENIENT = {
    "a list in a tag": get_time('[{"name": "get_time", "arguments": {}}]'),
    "one object in a tag": get_time(),
    "white space around": get_time('\n\n {"name": "get_time", "arguments": {}} \n'),
    "white space within": get_time('{ "name"\n:\t"get_time" ,\r\n "arguments" : {} }'),
    "parameters for arguments": get_time('{"name": "get_time", "parameters": {}}'),
    "arguments first": get_time('{"arguments": {}, "name": "get_time"}'),
    "no arguments": get_time('{"name": "get_time"}'),
    "arguments as a text": get_time('{"name": "get_time", "arguments": "{}"}'),
    "arguments as a text, first": get_time('{"arguments": "{}", "name": "get_time"}'),
    "an id and a type": get_time('{"id": 7, "type": "function", "name": "get_time", "arguments": {}}'),
    "more after it": get_time('{"name": "get_time", "arguments": {}, "note": [{"name": "x"}], "n": 1e5}'),
    "an escaped name": get_time('{"name": "get\\u005ftime", "arguments": {}}'),
    "a brace too many": get_time('{"name": "get_time", "arguments": {}}}'),
    "a brace too few": get_time('{"name": "get_time", "arguments": {}'),
    "a list not closed": get_time('[{"name": "get_time", "arguments": {}}'),
    "a comma too many": get_time('[{"name": "get_time", "arguments": {},},]'),
    "no end": '<tool_call>\n{"name": "get_time", "arguments": {}}',
    "no end, cut in the tag": '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_c',
    "white space before": " \n" + get_time(),
    "white space after": get_time() + "\n\n",
}


@pytest.mark.parametrize("text", LENIENT.values(), ids=LENIENT.keys())
@pytest.mark.parametrize("fmt", [HERMES, SMOLLM], ids=lambda fmt: fmt.name)
def test_small_slips_are_forgiven(fmt, text):
    assert results(text, fmt) == ("", [TIME_CALL])


BARE = '{"name": "get_time", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (BARE, 1),
        (f"\n{BARE}\n", 1),
        (f"<|python_tag|>{BARE}", 1),
        (f"<|python_tag|>\n{BARE}", 1),
        (f"{BARE};{BARE}", 2),
        (f"{BARE}; {BARE}; {BARE}", 3),
        (f"{BARE}\n{BARE}", 2),
        (f"{BARE}<|python_tag|>{BARE}", 2),
        (f"[{BARE}, {BARE}]", 2),
        (BARE.replace("parameters", "arguments"), 1),
        ('{"type": "function", "parameters": {}, "name": "get_time"}', 1),
    ],
)
def test_a_bare_message_is_a_call(text, count):
    assert results(text, LLAMA) == ("", [TIME_CALL] * count)


def test_a_bare_call_after_words_is_words():
    assert results(f"Here: {BARE}", LLAMA) == (f"Here: {BARE}", [])
    assert results(f"Here: <|python_tag|>{BARE}", LLAMA) == ("Here: ", [TIME_CALL])


NOT_CALLS = [
    "",
    " ",
    "hello",
    "hello \n ",
    "a < b, <b>, <tool, <tool_cal",
    "<tool_call",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call> [ ] </tool_call>",
    "The <tool_call> tag opens and </tool_call> closes.",
    "<<tool_call>>",
    get_time("{}"),
    get_time("5"),
    get_time('"x"'),
    get_time("[[]]"),
    get_time('{"name": "nope", "arguments": {}}'),
    get_time('{"name": "nope", "arguments": {"a": "</tool_call>"}}'),
    get_time('[{"name": "nope", "arguments": {}}, {"name": "no", "arguments": {}}]'),
    get_time('{"name": null, "arguments": {}}'),
    get_time('{"name": ["get_time"], "arguments": {}}'),
    get_time('{"arguments": {}}'),
    get_time('{"name": "get_time", "arguments": 5}'),
    get_time('{"name": "get_time", "arguments": [{}]}'),
    get_time('{"name": "get_time", "arguments": null}'),
    get_time('{"name": "get_time", "arguments": "x"}'),
    get_time('{"name": "get_time", "arguments": "[]"}'),
    get_time('{"name": "get_time", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'),
    get_time('{"name": "get_time", "argments": {}}'),
    get_time('{"name": "get_time" "arguments": {}}'),
    get_time('{"name" "get_time", "arguments": {}}'),
    get_time("{'name': 'get_time', 'arguments': {}}"),
    get_time('{name: "get_time", "arguments": {}}'),
    get_time('{"na\\qme": 1}'),
    get_time('{"name": "get_time\\'),
    '<tool_call>{"name": "get_time", "argum',
    '<tool_call>\n{"name": "get_time", "arguments": ',
    '<tool_call>{"arguments": {"a": [1',
    '{"answer": 42}',
    '{"answer": 42} \n',
    '{"answer": [{"name": "get_time"}]}, and more',
    '[1, 2, {"name": 3}]',
    '{"name": "get_time", "description": "when it is", "parameters": {}}',
    "{",
    "[",
    "<|python_tag|>",
    "<|python_tag|>print(1)",
]


@pytest.mark.parametrize("text", NOT_CALLS)
@by_format
def test_what_is_not_a_call_is_text_just_as_written(fmt, text):
    assert results(text, fmt) == (text, [])
    assert results("so " + text + "\n", fmt) == ("so " + text + "\n", [])


def test_with_no_tools_allowed_everything_is_text():
    for fmt in FORMATS:
        assert results(fmt.write([TIME]), fmt, ToolRequest("none")) == (fmt.write([TIME]), [])


def test_a_tool_that_is_not_allowed_is_text():
    request = check_tools(TOOLS, NAMED)
    assert results(HERMES.write([OSLO]), HERMES, request) == (HERMES.write([OSLO]), [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"Let me see.\n{get_time()}", "Let me see.\n"),
        (f"{get_time()}\nThat is it. ", "\nThat is it. "),
        (f" a {get_time()} b {get_time()} c ", " a  b  c "),
        (f"a{get_time()}\n \n{get_time()}\n", "a"),
        (f"<tool_call>{get_time()}", "<tool_call>"),
        (f"<tool_call> oops {get_time()}", "<tool_call> oops "),
        (f"<{get_time()}", "<"),
        (f"{get_time()}</tool_call>", "</tool_call>"),
        (f"{get_time()}<tool_call></tool_call>", "<tool_call></tool_call>"),
        (f"{get_time()} <tool_call>", " <tool_call>"),
        (f"{get_time()}{get_time('{}')}", get_time("{}")),
        ('<tool_call>{"name": "get_time", "arguments": {}}\nSo be it.', "\nSo be it."),
        (f'<tool_call>{{"name": "get_time", "arguments": {{}}}}\n{get_time()}', ""),
    ],
)
def test_text_around_calls_is_kept(text, said):
    got, calls = results(text)
    assert got == said
    assert calls == [TIME_CALL] * len(calls) and calls


def test_an_unknown_function_among_known_ones_is_text_and_the_others_are_calls():
    bad, good = '{"name": "nope", "arguments": {"a": [1]}}', '{"name": "get_time", "arguments": {}}'
    assert results(f"<tool_call>[{good}, {bad}, {good}]</tool_call>") == (bad, [TIME_CALL] * 2)
    assert results(f"<tool_call>[{bad}, {good}]</tool_call>") == (f"<tool_call>[{bad}", [TIME_CALL])


TRICKY = [
    {"a": 'quote " and \\ and \\" }]{['},
    {"a": "</tool_call>", "b": "<tool_call>"},
    {"a": "\\"},
    {"a": "\\\\\\"},
    {'}"': {"]": [[{}], [], "]"]}},
    {"a": "é 😀 \u2028 \x7f", "b": [1.5e-7, True, None]},
    {"name": "nope", "arguments": {"name": 1}},
]


@pytest.mark.parametrize("arguments", TRICKY)
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])
@by_format
def test_arguments_are_passed_on_letter_by_letter(fmt, arguments, style):
    raw = json.dumps(arguments, **style)
    for body in (
        f'{{"name": "get_weather", "arguments": {raw}}}',
        f'{{"parameters": {raw}, "name": "get_weather"}}',
    ):
        text = body if fmt.bare else f"{fmt.tag}{fmt.before}{body}{fmt.after}{fmt.end}"
        assert results(text, fmt) == ("", [("get_weather", raw, True)])
        assert merged(read(text, fmt, cuts=range(len(text)))) == ("", [("get_weather", raw, True)])


def test_arguments_written_as_a_text_are_taken_out_of_it():
    inner = json.dumps({"city": 'a "b"'})
    assert results(HERMES.write([("get_weather", inner)])) == ("", [("get_weather", inner, True)])


@by_format
def test_text_is_given_on_as_soon_as_it_is_certain(fmt):
    reader = ToolReader(fmt, AUTO)
    first = fmt.tag[0]
    assert reader.feed("It is") == [Text("It is")]
    assert reader.feed(f" {first}") == [Text(" ")]
    assert reader.feed(fmt.tag[1:5]) == []
    assert reader.feed("!") == [Text(fmt.tag[:5] + "!")]
    assert reader.finish() == []


def test_arguments_are_given_on_as_they_come():
    reader = ToolReader(HERMES, AUTO)
    assert reader.feed('Now. <tool_call>\n{"name": "get_wea') == [Text("Now. ")]
    assert reader.feed('ther", "arguments": ') == []
    assert reader.feed('{"ci') == [CallBegin(0, "get_weather"), CallArguments(0, '{"ci')]
    assert reader.feed('ty": "O') == [CallArguments(0, 'ty": "O')]
    assert reader.feed('slo"}') == [CallArguments(0, 'slo"}'), CallEnd(0)]
    assert reader.feed("}\n</tool_call>") == []
    assert not reader.done
    assert reader.finish() == []
    assert reader.done


def test_a_call_cut_off_has_no_end():
    text = HERMES.write([OSLO])
    cut = text.index("Os") + 1
    assert results(text[:cut]) == ("", [("get_weather", '{"city": "O', False)])


@pytest.mark.parametrize(
    ("broken", "sent"),
    [
        ('{"a": [1}', '{"a": [1'),
        ('{"a": 1\n</tool_call>', '{"a": 1\n'),
        ('{"a": <x>', '{"a": '),
        ("{'a': 1}", "{"),
    ],
)
def test_a_call_that_goes_wrong_has_no_end_and_does_not_swallow_the_rest(broken, sent):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {broken}</tool_call> And so on. {get_time()}'
    said, calls = results(text)
    assert said.endswith(" And so on. ")
    assert calls == [("get_weather", sent, False), TIME_CALL]


@by_format
def test_without_parallel_calls_the_first_is_the_last(fmt):
    reader = ToolReader(fmt, ONE)
    text = fmt.write([OSLO, TIME]) + " and more"
    pieces = []
    for i, c in enumerate(text):
        pieces += reader.feed(c)
        if reader.done:
            assert text[: i + 1].endswith('"days": 3}')
            break
    assert reader.feed(text[i + 1 :]) == reader.finish() == []
    assert merged(pieces) == ("", [("get_weather", json.dumps(OSLO[1]), True)])


def test_without_parallel_calls_a_broken_one_is_the_last_too():
    reader = ToolReader(HERMES, ONE)
    reader.feed('<tool_call>{"name": "get_weather", "arguments": {"a": <')
    assert reader.done


# ---- the law: what comes out does not depend on how the text was cut

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<tool_", "</tool", "call>", "<", ">", "<|"),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
        "\\",
        '\\"',
        "'",
        " ",
        "\n",
        "\t",
        "1",
        "true",
        "-2.5",
        "x",
        "é",
        "\u00a0",
    ),
    *('"name"', '"arguments"', '"parameters"', '"id"', '"get_time"', '"get_weather"', '"nope"', ": ", ", "),
    *('{"name": "get_time", "arguments": {', '{"arguments": {"a": "', '"arguments": {', '"name": "get_time"'),
    *(
        get_time(),
        BARE,
        HERMES.write(CALLS),
        SMOLLM.write(CALLS),
        LLAMA.write(CALLS),
        "words and ",
        "{}",
        "[]",
    ),
]
messes = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
formats = st.sampled_from(FORMATS)
requests = st.sampled_from([AUTO, ONE, check_tools(TOOLS, NAMED), ToolRequest("none")])


@given(text=messes, fmt=formats, request=requests, data=st.data())
def test_the_result_is_the_same_however_the_text_is_cut(text, fmt, request, data):
    whole = joined(read(text, fmt, request))
    assert joined(read(text, fmt, request, range(len(text)))) == whole
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert joined(read(text, fmt, request, cuts)) == whole


@given(text=messes, fmt=formats)
def test_without_a_call_nothing_is_lost(text, fmt):
    said, calls = results(text, fmt)
    if not calls:
        assert said == text
    position = 0
    for c in re.sub(r"\s", "", said):  # what is said is a part of the text, in its order
        position = text.index(c, position) + 1


@given(text=messes, fmt=formats)
def test_no_more_than_one_call_is_reported_unless_allowed(text, fmt):
    assert merged(read(text, fmt, ONE))[1] == results(text, fmt)[1][:1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", '"', "\\", '\\"}', "}]", "{["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
objects = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
call_texts = st.tuples(
    st.sampled_from(["get_weather", "get_time"]),
    objects,
    st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
    st.booleans(),
    st.sampled_from(["arguments", "parameters"]),
)
words = st.text(alphabet='ab<>/|_ {}"\n\\é', max_size=12)


def spelled(call):
    """The text of a call, and what should be read from it."""
    name, arguments, style, name_first, key = call
    raw = json.dumps(arguments, **style)
    parts = [f'"name": "{name}"', f'"{key}": {raw}']
    return "{" + ", ".join(parts if name_first else parts[::-1]) + "}", (name, raw, True)


@given(
    turns=st.lists(st.tuples(words, st.lists(call_texts, min_size=1, max_size=3), st.booleans()), max_size=3),
    last=words,
    fmt=st.sampled_from([HERMES, SMOLLM]),
    data=st.data(),
)
def test_words_and_calls_are_told_apart(turns, last, fmt, data):
    text, said, expected = "", "", []
    for before, calls, listed in turns:
        bodies = [spelled(call) for call in calls]
        inside = (
            ["[" + ", ".join(body for body, _ in bodies) + "]"] if listed else [body for body, _ in bodies]
        )
        text += before + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in inside)
        said += before if before.strip() else ""
        expected += [call for _, call in bodies]
    text += last
    said += last if last.strip() or not expected else ""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert merged(read(text, fmt, AUTO, cuts)) == (said, expected)


@given(
    calls=st.lists(call_texts, min_size=1, max_size=3),
    separator=st.sampled_from([";", "; ", "\n", ""]),
    data=st.data(),
)
def test_bare_calls_are_read(calls, separator, data):
    bodies = [spelled(call) for call in calls]
    text = separator.join(body for body, _ in bodies)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert merged(read(text, LLAMA, AUTO, cuts)) == ("", [call for _, call in bodies])


LONG = 40_000
LONG_TEXTS = {
    "plain": "word " * (LONG // 5),
    "white": " " * LONG,
    "openings": "<" * LONG,
    "tags": "<tool_call>" * (LONG // 11),
    "tags and braces": "<tool_call>{" * (LONG // 12),
    "half calls": '<tool_call>{"name": "get_time", ' * (LONG // 32),
    "refused calls": get_time('{"name": "nope"}') * (LONG // 40),
    "calls": get_time() * (LONG // 60),
    "white in a tag": "<tool_call>" + " " * LONG,
    "a long key": '<tool_call>{"' + "\\\\" * (LONG // 2),
    "deep arguments": '<tool_call>{"name": "get_time", "arguments": ' + '{"a":[' * (LONG // 6),
    "arguments first": '<tool_call>{"arguments": {"a": "' + "x" * LONG,
    "arguments as text": '<tool_call>{"name": "get_time", "arguments": "' + "[" * LONG + '"}',
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
@pytest.mark.parametrize("fmt", [HERMES, LLAMA], ids=lambda fmt: fmt.name)
def test_work_grows_with_the_length_alone(fmt, text):
    """Were it quadratic, this would take minutes."""
    begin = time.thread_time()
    read(text, fmt, cuts=range(0, len(text), 4))
    assert time.thread_time() - begin < 5


# -------------------------------------------------------------------------------------------------- identities


def test_ids_of_calls_are_the_same_for_the_same_seed_and_differ_otherwise():
    ids = [
        call_id(seed, choice, index)
        for seed in (0, 1, 11, -1)
        for choice in (0, 1, 11)
        for index in (0, 1, 11)
    ]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"call_[A-Za-z0-9_-]{24}", name) for name in ids)
    assert call_id(1, 0, 0) == ids[9]
    assert call_id(7, 0, 1) == "call_nrv8WVR85vXciZ1DyNMlFeN8"


def test_tools_do_not_load_torch():
    """The process that answers HTTP must start quickly and stay small."""
    code = "import sys, outrider.serve.tool_text; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
