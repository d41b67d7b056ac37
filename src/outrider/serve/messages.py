"""`/v1/messages`: Anthropic's Messages, stateless as the other routes are. `/v1/messages/count_tokens` beside it.

A request becomes the chat request that asks for the same; an answer becomes blocks of text and of tool use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.responses import Response

from outrider.errors import InvalidRequest, brief, invalid
from outrider.serve.answer import answer
from outrider.serve.call import Call, parts_of
from outrider.serve.chat import chat_ids, chat_terms
from outrider.serve.errors import ApiError
from outrider.serve.harmony import reader_of
from outrider.serve.link import Piece
from outrider.serve.model_service import ModelService
from outrider.serve.replies import InputTokens, MessageReply
from outrider.serve.request import Reply, Request
from outrider.serve.routes import post
from outrider.serve.tool_text import CallArguments, CallBegin, CallEnd, Text, Thought
from outrider.serve.tools import ToolRequest, call_id, check_tools
from outrider.serve.wire import ChatRequest, Count, Sampling, check_messages
from outrider.types import SamplingParams

Json = dict[str, Any]


class CountTokensRequest(Sampling, kw_only=True):
    """What a prompt is made of; all that a message is asked for with may be sent along."""

    messages: list[Json]
    system: str | list[Json] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    context_management: Json | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count  # it must be sent here


async def create(request: Request) -> Response:
    asked = await request.read(MessagesRequest)
    service = request.chosen
    prompt, params, tools = await request.in_pool(_prepared, service, asked)
    room = service.model.longest - min(len(prompt), asked.truncate_prompt_tokens or len(prompt))
    narrowed, begun = 1 <= room < asked.max_tokens, asked.messages[-1].get("role") == "assistant"
    fitted = service.fitted(asked, prompt, params, room if narrowed else asked.max_tokens)
    return await answer(request, asked, [fitted], "msg_", lambda call: Messages(call, tools, narrowed, begun))


async def count_tokens(request: Request) -> Response:
    asked = await request.read(CountTokensRequest)
    return Reply({"input_tokens": await request.in_pool(_counted, request.chosen, asked)})


ROUTES = (
    post(
        "/v1/messages",
        create,
        MessagesRequest,
        "Answer a conversation, as Anthropic's Messages does.",
        MessageReply,
    ),
    post(
        "/v1/messages/count_tokens",
        count_tokens,
        CountTokensRequest,
        "Count the tokens of its prompt.",
        InputTokens,
    ),
)


def _bounded_chat(asked: CountTokensRequest) -> ChatRequest:
    check_messages(asked.messages, "messages")
    check_messages([{"content": asked.system}], "system")
    return as_chat(asked)


def _prepared(service: ModelService, asked: MessagesRequest) -> tuple[list[int], SamplingParams, ToolRequest]:
    chat = _bounded_chat(asked)
    if service.model.tool_format.channels and (asked.thinking or {}).get("type") == "disabled":
        raise invalid("thinking", "cannot be disabled: this model always thinks; leave it out")
    with _blaming_own_fields():
        tools, params = chat_terms(service, chat)
    return chat_ids(service.model, chat, tools), params, tools


def _counted(service: ModelService, asked: CountTokensRequest) -> int:
    chat = _bounded_chat(asked)
    with _blaming_own_fields():
        tools = check_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    return len(chat_ids(service.model, chat, tools))


@contextmanager
def _blaming_own_fields() -> Iterator[None]:
    """Errors name the field that the client sent, not the chat field it became."""
    try:
        yield
    except InvalidRequest as problem:
        raise problem.about(_own_field(problem.param or "")) from None


def _own_field(param: str) -> str:
    root, *inner = param.split(".")
    if root == "response_format":
        inner = ["format", *(part for part in inner if part != "json_schema")]
    elif root.startswith(("tools[", "tool_choice")):
        inner = [part for part in inner if part != "function"]
    if root.startswith("tools") and inner and inner[-1] == "parameters":
        inner[-1] = "input_schema"
    renamed = {
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "stop": "stop_sequences",
    }
    return ".".join([renamed.get(root, root), *inner])


# Fields of the other routes: what they are called here.
_ELSEWHERE = {
    "n": "one answer is given",
    "stop": "use stop_sequences",
    "response_format": "use output_config",
}


def as_chat(asked: CountTokensRequest) -> ChatRequest:
    for name, instead in _ELSEWHERE.items():
        if getattr(asked, name) is not None:
            raise invalid(name, f"is not known here: {instead}")
    _check_thinking(asked.thinking)
    _check_context(asked.context_management)
    shared = {name: getattr(asked, name) for name in Sampling.__struct_fields__}
    messages = _Conversation(asked).messages
    choice, parallel = _chat_choice(asked.tool_choice)
    return ChatRequest(
        **shared
        | {
            "messages": messages,
            "stop": asked.stop_sequences,
            "response_format": (asked.output_config or {}).get("format"),
            "reasoning_effort": _effort(asked.output_config),
            "tools": _chat_tools(asked.tools),
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "continue_final_message": messages[-1]["role"] == "assistant",
        }
    )


def _effort(config: Json | None) -> str | None:
    return (
        None if (config or {}).get("effort") is None else _field(config or {}, "effort", str, "output_config")
    )


def _check_thinking(thinking: Json | None) -> None:
    """A model that decides by itself how much to think may decide not to; one that is asked to cannot."""
    kind = None if thinking is None else thinking.get("type")
    if kind not in (None, "disabled", "adaptive"):
        raise invalid(
            "thinking", f"of type {brief(kind)} is not supported: leave it out, or send type 'disabled'"
        )


def _check_context(management: Json | None) -> None:
    """There are no thoughts to clear; everything else would change what the model reads."""
    for i, edit in enumerate(_list((management or {}).get("edits"), "context_management.edits")):
        kind = edit.get("type")
        if not str(kind).startswith("clear_thinking"):
            where = f"context_management.edits[{i}]"
            raise invalid(where, f"of type {brief(kind)} is not supported: shorten the conversation yourself")


class _Conversation:
    """Turns as chat has them. Turns of one role in a row become one, as they do at Anthropic."""

    def __init__(self, asked: CountTokensRequest) -> None:
        self.messages: list[Json] = []
        self.calls: set[str] = set()  # ids of tool uses so far
        if asked.system:
            self._add("system", _text(asked.system, "system"))
        if not asked.messages:
            raise invalid("messages", "must have at least one message")
        for i, message in enumerate(asked.messages):
            self._turn(message, f"messages[{i}]")
        for turn in self.messages:
            if isinstance(turn["content"], list):
                turn["content"] = "\n".join(turn["content"])
            if "reasoning_content" in turn:
                turn["reasoning_content"] = "\n\n".join(turn["reasoning_content"])
        if self.messages[-1].get("tool_calls"):
            raise InvalidRequest("the last message uses a tool: send its tool_result after it", "messages")

    def _turn(self, message: Json, where: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role", f"must be 'user', 'assistant' or 'system', not {brief(role)}")
        if isinstance(content, str):
            self._add(role, content)
            return
        blocks = _list(content, f"{where}.content", "a text or a list of blocks")
        if not blocks:
            self._add(role)
        for k, block in enumerate(blocks):
            self._block(role, block, f"{where}.content[{k}]")

    def _block(self, role: str, block: Json, where: str) -> None:
        kind = block.get("type")
        if kind == "text":
            self._add(role, _field(block, "text", str, where))
        elif kind == "thinking" and role == "assistant":
            thoughts = _field(block, "thinking", str, where)
            self._add(role).setdefault("reasoning_content", []).append(thoughts)
        elif kind == "tool_use" and role == "assistant":
            self._call(block, where)
        elif kind == "tool_result" and role == "user":
            self._result(block, where)
        else:
            raise invalid(
                where,
                f"of type {brief(kind)} is not supported in a turn of the {role}: this server reads text, "
                "thinking and tool_use (of the assistant) and tool_result (of the user)",
            )

    def _call(self, block: Json, where: str) -> None:
        name, given = _field(block, "id", str, where), _field(block, "input", dict, where)
        function = {"name": _field(block, "name", str, where), "arguments": given}
        self.calls.add(name)
        turn = self._add("assistant")
        turn.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": function})

    def _result(self, block: Json, where: str) -> None:
        name = _field(block, "tool_use_id", str, where)
        if name not in self.calls:
            raise invalid(f"{where}.tool_use_id", f"{brief(name)} names no tool_use that came before")
        text = _text(block.get("content") or "", f"{where}.content")
        if block.get("is_error"):
            text = f"Error: {text}" if text else "Error"
        self.messages.append({"role": "tool", "tool_call_id": name, "content": text})

    def _add(self, role: str, text: str | None = None) -> Json:
        """The turn of this role, which the last one is if it can be. Its texts are gathered as a list."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        lines = self.messages[-1]["content"]
        if text or (lines and text is not None):
            lines.append(text)
        return self.messages[-1]


def _text(content: Any, where: str) -> str:
    """A text, or the lines of its text blocks."""
    if isinstance(content, str):
        return content
    lines = []
    for i, block in enumerate(_list(content, where, "a text or a list of text blocks")):
        if block.get("type") != "text":
            kind = block.get("type")
            raise invalid(f"{where}[{i}]", f"of type {brief(kind)} is not supported: only text is read here")
        lines.append(_field(block, "text", str, f"{where}[{i}]"))
    return "\n".join(lines)


def _list(value: Any, where: str, what: str = "a list of objects") -> list[Json]:
    if value is None and what == "a list of objects":
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(where, f"must be {what}")
    return value


_KINDS: dict[type, str] = {str: "a text", dict: "an object"}


def _field(block: Json, name: str, kind: type, where: str) -> Any:
    if not isinstance(block.get(name), kind):
        raise invalid(f"{where}.{name}", f"must be {_KINDS[kind]}")
    return block[name]


def _chat_tools(tools: list[Json] | None) -> list[Json] | None:
    return None if tools is None else [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _chat_tool(tool: Json, where: str) -> Json:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f"{where} of type {brief(kind)} is not supported: this server runs no tools itself, so send those that "
            "you run, with a name and an input_schema",
            f"{where}.type",
        )
    if tool.get("defer_loading"):
        raise InvalidRequest(f"{where}.defer_loading is not supported: tools are all shown", where)
    schema = _field(tool, "input_schema", dict, where)
    if tool.get("input_examples"):
        schema = {**schema, "examples": tool["input_examples"]}
    function = {"name": _field(tool, "name", str, where), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _chat_choice(choice: Json | None) -> tuple[Any, bool | None]:
    if choice is None:
        return None, None
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(single, (bool, type(None))):
        where = "tool_choice.disable_parallel_tool_use"
        raise invalid(where, "must be true or false")
    parallel = None if single is None else not single
    if kind == "tool":
        name = _field(choice, "name", str, "tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    mode = {"auto": "auto", "any": "required", "none": "none"}.get(kind if isinstance(kind, str) else "")
    if mode is None:
        raise invalid("tool_choice.type", f"must be 'auto', 'any', 'tool' or 'none', not {brief(kind)}")
    return mode, parallel


class Messages:
    """One answer as blocks: what was thought and said, and tools used."""

    ping: Json = {"type": "ping"}  # noqa: RUF012 - never changed

    def __init__(self, call: Call, tools: ToolRequest, narrowed: bool, goes_on: bool = False) -> None:
        """`narrowed`: there was less room for the answer than was asked for. `goes_on`: it was begun in the prompt."""
        self.call, self.narrowed = call, narrowed
        self.reader = reader_of(call.model.tool_format, tools, goes_on)
        call.count_thoughts()
        self.blocks: list[Json] = []
        self.written: list[str] = []  # of the open block
        self.open = False

    def begin(self) -> list[Json]:
        usage = {"input_tokens": len(self.call.jobs[0].prompt), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, usage)}]

    def feed(self, prompt: int, piece: Piece) -> list[Json]:
        self.call.take(prompt, piece)
        events: list[Json] = []
        for part in parts_of(piece, self.reader):
            if isinstance(part, Text):
                events += self._write({"type": "text", "text": ""}, "text", part.text)
            elif isinstance(part, Thought):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._write(block, "thinking", part.text)
            elif isinstance(part, CallBegin):
                events += [*self._close(), *self._open_call(part)]
            elif isinstance(part, CallArguments):
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.text}))
                self.written.append(part.text)
            elif isinstance(part, CallEnd):
                events += self._close()
        return events

    def finish(self) -> list[Json]:
        events = self._close()
        reason, sequence = self._ending()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        extras = {**self.call.choice_extras(self.call.flat[0]), **self.call.extras()}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(), **extras}
        return [*events, last, {"type": "message_stop"}]

    def body(self) -> Json:
        self._close()
        reason, sequence = self._ending()
        extras = {**self.call.choice_extras(self.call.flat[0]), **self.call.extras()}
        return {**self._message(self.blocks, reason, self._usage(), sequence), **extras}

    def error(self, error: ApiError) -> Json:
        return error.anthropic_body()

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _write(self, block: Json, kind: str, text: str) -> list[Json]:
        """In a block of this kind, which is opened if there is none."""
        begun = []
        if not self.open or self.blocks[-1]["type"] != kind:
            begun = [*self._close(), *self._open(block)]
        self.written.append(text)
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def _open_call(self, begun: CallBegin) -> list[Json]:
        name = "toolu_" + call_id(self.call.seed, 0, begun.index).removeprefix("call_")
        return self._open({"type": "tool_use", "id": name, "name": begun.name, "input": {}})

    def _open(self, block: Json) -> list[Json]:
        self.blocks.append(block)
        self.written, self.open = [], True
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Json]:
        if not self.open:
            return []
        block, written = self.blocks[-1], "".join(self.written)
        kind = block["type"]
        block |= {"input": _input(written)} if kind == "tool_use" else {kind: written}
        self.open = False
        return [{"type": "content_block_stop", "index": self._index}]

    def _message(
        self, blocks: list[Json], reason: str | None, usage: Json, sequence: str | None = None
    ) -> Json:
        return {
            "id": self.call.id,
            "type": "message",
            "role": "assistant",
            "model": self.call.shown,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _ending(self) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence that did it."""
        choice = self.call.flat[0]
        if choice.finish_reason == "length":
            return "model_context_window_exceeded" if self.narrowed else "max_tokens", None
        if choice.end is not None and choice.end.stop is not None:
            return "stop_sequence", choice.end.stop
        return "tool_use" if any(block["type"] == "tool_use" for block in self.blocks) else "end_turn", None

    def _usage(self) -> Json:
        """Anthropic's input tokens are those that were not found in the cache."""
        usage = self.call.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        details = usage["completion_tokens_details"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": details["reasoning_tokens"],
                "accepted_prediction_tokens": details["accepted_prediction_tokens"],
                "rejected_prediction_tokens": details["rejected_prediction_tokens"],
            },
        }


def _input(written: str) -> Json:
    """A tool's input as an object. What a model wrote that is none, or was cut off, is kept as it is."""
    try:
        value = msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": written}
