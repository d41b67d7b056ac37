"""Tools on their way to the model: what a client may ask, how a model sees them, what its calls are held to.

A `ToolFormat` is the dialect a model calls functions in, read off its chat template. `check_tools` turns a
client's `tools` and `tool_choice` into a `ToolRequest`; `with_tools` writes tools and past calls so that the
template can render them; `grammar_of` is the grammar of a forced or strict call. Reading calls out of what the
model says is for tool_text.py.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import InvalidRequest, brief, invalid, suggest
from outrider.load.template import checked_messages
from outrider.sampling_params import JSON_SPELLING
from outrider.serve.limits import read_json

MAX_TOOLS = 128
MAX_DEPTH = 64  # of a past call's arguments, where they are a text

ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One dialect. The first character of `tag` and of `end` occurs in it only once; the reader counts on it."""

    name: str
    tag: str  # opens calls
    end: str  # closes them; "" where only the end of the message does
    before: str  # between the tag and the first call
    after: str  # between the last call and the end
    inside: str | None  # between calls of one tag; None: each call has a tag of its own
    outside: str  # between tags
    key: str  # of the arguments
    bare: bool = False  # a message may begin with a call, and is then written without the tag
    channels: bool = False  # answers are messages in channels, which harmony.py reads

    def call(self, name: str, arguments: Any) -> str:
        return json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)

    def write(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Calls as the model itself would write them, spelled as `grammar_of` has it."""
        texts = [self.call(name, arguments) for name, arguments in calls]
        groups = texts if self.inside is None else [self.inside.join(texts)]
        opening, closing = ("", "") if self.bare else (self.tag + self.before, self.after + self.end)
        return self.outside.join(f"{opening}{group}{closing}" for group in groups)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", "\n", None, "\n", "arguments")
SMOLLM = ToolFormat("smollm", "<tool_call>", "</tool_call>", "[", "]", ", ", "\n", "arguments")
LLAMA = ToolFormat("llama", "<|python_tag|>", "", "", "", "; ", "\n", "parameters", bare=True)

HARMONY = ToolFormat("harmony", "", "", "", "", None, "", "arguments", channels=True)

_HERMES_FAMILIES = ("qwen2", "qwen3")


def choose_format(template_source: str | None, family: str) -> ToolFormat:
    """The dialect a chat template teaches; SmolLM's where there is nothing to tell by."""
    source = template_source or ""
    if "<|channel|>" in source:
        return HARMONY
    if "<tool_call>[" in source:
        return SMOLLM
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or "<|start_header_id|>" in source:
        return LLAMA
    return HERMES if family in _HERMES_FAMILIES else SMOLLM


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: Mapping[str, Any] | None  # a JSON schema; None: it takes no arguments
    strict: bool
    tool: Mapping[str, Any]  # as the client sent it


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """What the model may call, and whether it must. With mode none nothing is allowed."""

    mode: ToolMode
    allowed: tuple[Function, ...] = ()
    parallel: bool = True  # more than one call
    named: bool = False  # the client chose the function

    @property
    def shown(self) -> list[Mapping[str, Any]]:
        return [function.tool for function in self.allowed]


def check_tools(tools: Any, tool_choice: Any = None, parallel: Any = None) -> ToolRequest:
    """From `tools`, `tool_choice` and `parallel_tool_calls` of a request, each None where it was not sent."""
    functions = _functions(tools)
    if parallel is not None and not isinstance(parallel, bool):
        raise invalid("parallel_tool_calls", "must be true or false")
    if not functions and tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "needs tools: send the functions to choose from")
    mode, allowed, named = _choice(tool_choice, functions)
    if mode == "none" or not allowed:
        return ToolRequest("none")
    return ToolRequest(mode, allowed, parallel is not False and not named, named)


def _functions(tools: Any) -> dict[str, Function]:
    if tools is None:
        return {}
    if not isinstance(tools, (list, tuple)):
        raise invalid("tools", "must be a list of functions")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"there may be at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        function = _function(tool, f"tools[{i}]")
        if function.name in functions:
            raise InvalidRequest(
                f"two tools have the name {function.name!r}; rename one", f"tools[{i}].function.name"
            )
        functions[function.name] = function
    return functions


def _function(tool: Any, where: str) -> Function:
    body = _named_body(tool, where)
    inside = f"{where}.function"
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", body["name"]):
        raise invalid(f"{inside}.name", f"must be 1 to 64 letters, digits, _ or -, got {brief(body['name'])}")
    for key, kind, what in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(body.get(key), (kind, type(None))):
            raise invalid(f"{inside}.{key}", f"must be {what}")
    parameters = body.get("parameters")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f'{inside}.parameters must describe an object: {{"type": "object", "properties": ...}}',
            f"{inside}.parameters",
        )
    _check_writable(tool, where)
    return Function(body["name"], parameters, bool(body.get("strict")), tool)


def _named_body(tool: Any, where: str) -> Mapping[str, Any]:
    """The `function` of `{"type": "function", "function": {"name": ...}}`."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f'{where} must be an object such as {{"type": "function", ...}}', where)
    if tool.get("type") != "function":
        raise invalid(f"{where}.type", f"must be 'function', got {brief(tool.get('type'))}")
    body = tool.get("function")
    if not isinstance(body, Mapping):
        raise invalid(f"{where}.function", "must be an object with a name")
    if not isinstance(body.get("name"), str):
        raise invalid(f"{where}.function.name", "must be a text")
    return body


def _check_writable(tool: Any, where: str) -> None:
    """Prompt and grammar hold the tool as JSON: refuse what cannot be written, such as NaN or half a character."""
    try:
        json.dumps(tool, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise invalid(
            where, "cannot be written as JSON; look for NaN, broken characters or very deep nesting"
        ) from None


def _choice(choice: Any, functions: dict[str, Function]) -> tuple[ToolMode, tuple[Function, ...], bool]:
    """Mode, what may be called, and whether the client named it."""
    everything = tuple(functions.values())
    if choice is None:
        return "auto", everything, False
    if isinstance(choice, str):
        return _mode(choice, ("none", "auto", "required"), "tool_choice"), everything, False
    if not isinstance(choice, Mapping):
        raise invalid("tool_choice", "must be 'none', 'auto', 'required' or an object")
    if choice.get("type") == "allowed_tools":
        return *_allowed(choice.get("allowed_tools"), functions), False
    if choice.get("type") != "function":
        raise invalid(
            "tool_choice.type", f"must be 'function' or 'allowed_tools', got {brief(choice.get('type'))}"
        )
    return "required", (_chosen(choice, functions, "tool_choice"),), True


def _allowed(body: Any, functions: dict[str, Function]) -> tuple[ToolMode, tuple[Function, ...]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(body, Mapping):
        raise invalid(where, "must be an object with a mode and a list of tools")
    mode = _mode(body.get("mode"), ("auto", "required"), f"{where}.mode")
    tools = body.get("tools")
    if not isinstance(tools, (list, tuple)) or not tools:
        raise invalid(f"{where}.tools", "must be a list of at least one function")
    chosen = [_chosen(tool, functions, f"{where}.tools[{i}]") for i, tool in enumerate(tools)]
    return mode, tuple({function.name: function for function in chosen}.values())


def _mode(value: Any, known: tuple[ToolMode, ...], where: str) -> ToolMode:
    for mode in known:
        if value == mode:
            return mode
    raise InvalidRequest(f"unknown {where} {brief(value)}{suggest(value, known)}", where)


def _chosen(choice: Any, functions: dict[str, Function], where: str) -> Function:
    name = _named_body(choice, where)["name"]
    if name not in functions:
        raise InvalidRequest(
            f"{brief(name)} is not the name of a tool{suggest(name, functions)}", f"{where}.function.name"
        )
    return functions[name]


INSTRUCTIONS = """\
You are an expert in composing function calls. From what the user says, decide whether one or more of the tools \
below are needed, and with which values. If no tool fits, or a value that a tool needs is not known, say so in \
words.

You have these tools, described in JSON:
<tools>{tools}</tools>

To call tools, answer in this format and write nothing else:
{sample}"""

_SAMPLE = [("func_name1", {"argument1": "value1", "argument2": "value2"}), ("func_name2", {})]
# An open quote reaches to the end, so that no text, however made, is searched twice.
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?""", re.DOTALL)


def with_tools(
    messages: Any, tools: Sequence[Mapping[str, Any]], fmt: ToolFormat, template_source: str | None
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """The messages and the `tools` to render a template with. A template that knows tools gets them as they
    are; for any other they become part of the system message, and past calls and results become text.
    """
    clean = [_readable_calls(message, i) for i, message in enumerate(checked_messages(messages))]
    if uses_tools(template_source):
        return clean, list(tools) or None
    try:
        shown = _as_text(clean, fmt)
    except RecursionError:
        raise InvalidRequest("the arguments of a past call are nested too deep", "messages") from None
    if tools:
        listed = json.dumps(list(tools), ensure_ascii=False)
        shown = _with_system(shown, INSTRUCTIONS.format(tools=listed, sample=fmt.write(_SAMPLE)))
    return shown, None


@functools.lru_cache(maxsize=16)
def uses_tools(template_source: str | None) -> bool:
    """Whether the template reads the variable `tools`, and not just a text or a field of that name."""
    code = [
        re.split(r"[%}]\}", piece, maxsplit=1)[0] for piece in re.split(r"\{[{%]", template_source or "")[1:]
    ]
    return any(re.search(r"(?<![\w.])tools\b", _QUOTED.sub("''", piece)) for piece in code)


def _readable_calls(message: dict[str, Any], i: int) -> dict[str, Any]:
    """With the arguments of past calls, which clients send as JSON text, as the objects templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    where = f"messages[{i}].tool_calls"
    if not isinstance(calls, (list, tuple)):
        raise invalid(where, "must be a list of calls")
    return {**message, "tool_calls": [_readable_call(call, f"{where}[{k}]") for k, call in enumerate(calls)]}


def _readable_call(call: Any, where: str) -> dict[str, Any]:
    body = _named_body({"type": "function", **call} if isinstance(call, Mapping) else call, where)
    arguments = body.get("arguments", "")
    if not isinstance(arguments, (str, Mapping)):
        raise invalid(f"{where}.function.arguments", "must be a JSON text")
    return {**call, "function": {**body, "arguments": _object_of(arguments)}}


def _object_of(arguments: str | Mapping[str, Any]) -> Any:
    """The object in a JSON text; a text that holds none stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = read_json(arguments.strip().encode() or b"{}", MAX_DEPTH)
    except (InvalidRequest, UnicodeEncodeError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(messages: list[dict[str, Any]], fmt: ToolFormat) -> list[dict[str, Any]]:
    """Calls as the model would have written them; results, those in a row together, as a turn of the user."""
    shown: list[dict[str, Any]] = []
    for are_results, turns in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            texts = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in turns]
            shown.append({"role": "user", "content": "\n".join(texts)})
        else:
            shown += [_with_calls(turn, fmt) for turn in turns]
    return shown


def _with_calls(message: dict[str, Any], fmt: ToolFormat) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    bodies = [call["function"] for call in message["tool_calls"]]
    calls = fmt.write((body["name"], body["arguments"]) for body in bodies)
    said = message["content"]
    gap = "\n" if said and not said.endswith("\n") else ""
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": f"{said}{gap}{calls}"}


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The text at the end of the system message, which is made if there is none."""
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    own = messages[0]["content"]
    return [{**messages[0], "content": f"{own}\n\n{text}" if own else text}, *messages[1:]]


_COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties"}


def grammar_of(request: ToolRequest, fmt: ToolFormat, tokens: Container[str]) -> dict[str, str] | None:
    """The grammar of an answer that must be a call, or whose calls must be exact (a strict function); else None.

    `tokens` are the strings of the tokenizer's vocabulary: llguidance reads a tag that is one token only by
    its own notation, and one that is not only as text.
    """
    if fmt.channels:
        if request.mode != "required" and not any(function.strict for function in request.allowed):
            return None
        rules = _in_channels(request, tokens)
    elif request.mode == "required":
        rules = _forced(request, fmt, tokens)
    elif any(function.strict for function in request.allowed):
        rules = _free(request, fmt, tokens)
    else:
        return None
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(request.allowed))))
    for i, function in enumerate(request.allowed):
        if fmt.channels:
            channel, kind, body = (
                _mark(tag, tokens) for tag in ("<|channel|>", "<|constrain|>", "<|message|>")
            )
            to = _literal(f"commentary to=functions.{function.name} ")
            rules.append(f'call_{i}: {channel} {to} {kind} "json" {body} arguments_{i}')
        else:
            opening = json.dumps(f'{{"name": "{function.name}", "{fmt.key}": ')
            rules.append(f'call_{i}: {opening} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(function))}")
    return {"lark": "\n".join(rules) + "\n"}


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _mark(tag: str, tokens: Container[str]) -> str:
    return tag if tag in tokens else _literal(tag)


def _forced(request: ToolRequest, fmt: ToolFormat, tokens: Container[str]) -> list[str]:
    if fmt.bare:
        return [f"start: {_many(request, fmt)}"]
    more = fmt.inside is None and request.parallel
    return [
        f"start: block ({_literal(fmt.outside)} block)*" if more else "start: block",
        f"block: {_mark(fmt.tag, tokens)} {_body(request, fmt, tokens)}",
    ]


def _free(request: ToolRequest, fmt: ToolFormat, tokens: Container[str]) -> list[str]:
    """Any text, but a call once one is begun."""
    if fmt.bare:
        # What the reader skips before a call may also come before words, but not before a brace.
        text = r"/[\s,;\[\]}]*([^\s,;\[\]{}](.|\n)*)?/"
        tag = f"{fmt.tag}? " if fmt.tag in tokens else ""
        return ["start: TEXT | block", f"TEXT: {text}", f"block: {tag}{_many(request, fmt)}"]
    # Text cannot hold what is one token, such as these; a model that thinks aloud must still be able to.
    thoughts = [tag for tag in ("<think>", "</think>") if tag in tokens]
    words = f"(TEXT ({' | '.join(thoughts)}))* " if thoughts else ""
    heads = ["spelled", f"TEXT {fmt.tag}"] if fmt.tag in tokens else ["spelled"]
    return [
        "start: block* tail" if request.parallel else "start: block | tail",
        f"tail: {words}TEXT",
        r"TEXT: /(.|\n)*/",
        f"spelled[lazy]: TEXT {_literal(fmt.tag)}",
        f"block: {words}({' | '.join(heads)}) {_body(request, fmt, tokens)}",
    ]


def _in_channels(request: ToolRequest, tokens: Container[str]) -> list[str]:
    """Thoughts, then a call; where none is forced there may be words instead. A call ends the answer."""
    channel, message = _mark("<|channel|>", tokens), _mark("<|message|>", tokens)
    words = f'{channel} ("final" | "commentary") {message} TEXT'
    free = "" if request.mode == "required" else f" | {words}"
    return [f"start: thought* (call{free})", *_thoughts(tokens)]


def _thoughts(tokens: Container[str]) -> list[str]:
    channel, message, end, start = (
        _mark(tag, tokens) for tag in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    )
    return [
        f'thought: {channel} "analysis" {message} TEXT {end} {start} "assistant"',
        r"TEXT: /(.|\n)*/",
    ]


def in_channel(form: Mapping[str, Any], tokens: Container[str]) -> dict[str, Any]:
    """The grammar of an answer in channels whose last message has this form. A grammar of the client's is for the whole
    answer, as it stands.
    """
    ((kind, value),) = form.items()
    if kind == "lark":
        return dict(form)
    channel, message = _mark("<|channel|>", tokens), _mark("<|message|>", tokens)
    rules = [f'start: thought* {channel} "final" {message} form', *_thoughts(tokens)]
    if kind == "choice":
        rules.append(
            "form: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(value))
        )
    elif kind == "regex":
        rules.append("form: FORM\nFORM: /" + re.sub(r"(\\.)|/", lambda at: at[1] or r"\/", value) + "/")
    else:
        schema = json.loads(value) if kind == "json_schema" else {"type": "object"}
        if isinstance(schema, dict):
            schema = {"x-guidance": JSON_SPELLING, **schema}
        rules.append(f"form: %json {json.dumps(schema)}")
    return {"lark": "\n".join(rules) + "\n"}


def _body(request: ToolRequest, fmt: ToolFormat, tokens: Container[str]) -> str:
    return f"{_literal(fmt.before)} {_many(request, fmt)} {_literal(fmt.after)} {_mark(fmt.end, tokens)}"


def _many(request: ToolRequest, fmt: ToolFormat) -> str:
    return f"call ({_literal(fmt.inside)} call)*" if fmt.inside and request.parallel else "call"


def _schema(function: Function) -> dict[str, Any]:
    """What the arguments must be. A function has the parameters it names and no others, unless it says so;
    one that is not strict may have a schema that llguidance knows only in part.
    """
    if function.parameters is None:
        schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    else:
        schema = {"type": "object", **function.parameters}
    if "properties" in schema and not _COMBINED & schema.keys():
        schema.setdefault("additionalProperties", False)
    return {**schema, "x-guidance": {**JSON_SPELLING, "lenient": not function.strict}}


def call_id(seed: int, choice: int, index: int) -> str:
    """The id of a call: the same for the same seeded request, so that its answers are equal byte for byte."""
    digest = hashlib.sha256(f"{seed}:{choice}:{index}".encode()).digest()
    return "call_" + base64.urlsafe_b64encode(digest[:18]).decode()
