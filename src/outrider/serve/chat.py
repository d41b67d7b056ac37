"""`/v1/chat/completions`: conversations, with tools."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from outrider.errors import InvalidRequest, invalid
from outrider.serve.answer import answer
from outrider.serve.call import Call, Choice, parts_of
from outrider.serve.harmony import Reader, check_template, effort_of, reader_of, stop_ids
from outrider.serve.harmony import turns as harmony_turns
from outrider.serve.limits import check_schema
from outrider.serve.link import Piece, Score
from outrider.serve.model import ServedModel
from outrider.serve.model_service import ModelService
from outrider.serve.replies import ChatCompletion
from outrider.serve.request import Request
from outrider.serve.routes import post
from outrider.serve.text_event import TextEvent
from outrider.serve.tool_text import CallArguments, CallBegin, Text, Thought
from outrider.serve.tools import ToolRequest, call_id, check_tools, in_channel, uses_tools, with_tools
from outrider.serve.tools import grammar_of as grammar_of_tools
from outrider.serve.wire import ChatRequest, check_messages, grammar_of
from outrider.types import SamplingParams


async def answer_chat(request: Request) -> Response:
    asked = await request.read(ChatRequest)
    prompt, params, tools = await request.in_pool(_prepared, request.chosen, asked)
    length = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    fitted = request.chosen.fitted(asked, prompt, params, length)
    return await answer(request, asked, [fitted], "chatcmpl-", lambda call: Chat(call, tools, asked))


def _prepared(service: ModelService, asked: ChatRequest) -> tuple[list[int], SamplingParams, ToolRequest]:
    check_messages(asked.messages, "messages")
    tools, params = chat_terms(service, asked)
    if asked.logprobs:
        params = replace(params, logprobs=asked.top_logprobs or 0)
    elif asked.top_logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return chat_ids(service.model, asked, tools), params, tools


def chat_terms(service: ModelService, asked: ChatRequest) -> tuple[ToolRequest, SamplingParams]:
    """What the model may call, and the engine's parameters. Takes time that grows with the request."""
    tools = check_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    params, model = service.params_of(asked, tool_grammar(service, asked, tools)), service.model
    if model.tool_format.channels:
        stops = () if params.ignore_eos else stop_ids(model.tokenizer)
        params = replace(params, mark_special=True, stop_token_ids=(*params.stop_token_ids, *stops))
    return tools, params


def chat_ids(model: ServedModel, asked: ChatRequest, tools: ToolRequest) -> list[int]:
    """The conversation as the model's template writes it. A template may take its time."""
    source = "" if model.template is None else model.template.source
    messages = asked.messages
    if "developer" not in source:  # OpenAI's later name for the system's role
        messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
    channels, variables = model.tool_format.channels, dict(asked.chat_template_kwargs or {})
    if channels:
        check_template(uses_tools(source), tools)
    messages, shown = with_tools(messages, tools.shown, model.tool_format, source)
    if "reasoning_effort" in source:
        variables = effort_of(asked.reasoning_effort, variables, channels)
    return model.chat_ids(
        harmony_turns(messages) if channels else messages,
        shown,
        variables,
        ask=asked.add_generation_prompt is not False,
        go_on=asked.continue_final_message is True,
        cut=asked.truncate_prompt_tokens is not None,
    )


def tool_grammar(service: ModelService, asked: ChatRequest, tools: ToolRequest) -> dict[str, str] | None:
    """What holds the answer to the tools' schemas, where a call is demanded or they are strict."""
    model, settings = service.model, service.settings
    forced = grammar_of_tools(tools, model.tool_format, model.tokens) if tools.allowed else None
    form = grammar_of(asked, settings)
    if forced is not None:
        _check_tool_schemas(tools, forced["lark"], settings.max_schema_bytes)
    if tools.allowed and form is not None:
        raise InvalidRequest(
            "a form for the answer leaves no room for tool calls; set tool_choice to 'none'",
            "response_format",
        )
    if form is not None and model.tool_format.channels and not asked.continue_final_message:
        return in_channel(form, model.tokens)
    return forced


def _check_tool_schemas(tools: ToolRequest, grammar: str, most: int) -> None:
    """What is compiled for tools has the limits of what is compiled for answers."""
    for function in tools.allowed:
        check_schema(function.parameters or {}, most, f"tools.{function.name}.parameters")
    if len(grammar) > most:
        raise InvalidRequest(f"together the tools have more than {most} bytes to be held to", "tools")


@dataclass(slots=True)
class ChatChoice:
    reader: Reader | None
    thoughts: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    unsent: list[Score] = field(default_factory=list)  # of tokens whose text is held back
    sent_steps: int = 0
    plain: TextEvent | None = None  # of text alone, from the first on


class Chat:
    kind = "chat.completion"

    def __init__(self, call: Call, tools: ToolRequest, asked: ChatRequest) -> None:
        self.call, self.scored = call, bool(asked.logprobs)
        fmt, goes_on = call.model.tool_format, asked.continue_final_message is True
        call.count_thoughts()
        self.shown = [ChatChoice(reader_of(fmt, tools, goes_on)) for _ in call.flat]
        self.plain = call.options.plain and not (self.scored or self.shown[0].reader)

    def begin(self) -> list[dict[str, Any]]:
        return [self._event(choice, {"role": "assistant", "content": ""}) for choice in self.call.flat]

    def feed(self, prompt: int, piece: Piece) -> list[dict[str, Any] | bytes]:
        choice = self.call.take(prompt, piece)
        shown = self.shown[choice.index]
        if self.plain and piece.text and not piece.finish_reason:
            if shown.plain is None:
                shown.plain = TextEvent(lambda text: self._event(choice, {"content": text}))
            shown.text.append(piece.text)
            return [shown.plain.of(piece.text)]
        return [*self._events(choice, shown, piece)]

    def _events(self, choice: Choice, shown: ChatChoice, piece: Piece) -> list[dict[str, Any]]:
        shown.unsent.extend(piece.scores or ())
        events = [self._event(choice, delta) for delta in self._deltas(choice, shown, piece)]
        if events and shown.unsent:
            events[0]["choices"][0]["logprobs"] = self._logprobs(shown.unsent)
            shown.unsent = []
        if events and choice.writer is not None:
            events[0]["choices"][0] |= self.call.fresh_steps(choice, shown.sent_steps)
            shown.sent_steps = len(choice.writer.steps)
        if piece.finish_reason:
            events.append(self._last(choice, shown))
        return events

    def finish(self) -> list[dict[str, Any]]:
        if not self.call.options.usage:
            return []
        event = self.call.head(f"{self.kind}.chunk")
        return [{**event, "choices": [], "usage": self.call.usage(), **self.call.extras()}]

    def body(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": self._message(shown),
                "logprobs": self._logprobs(choice.scores) if self.scored else None,
                "finish_reason": self._reason(choice, shown),
                **self.call.choice_extras(choice),
            }
            for choice, shown in zip(self.call.flat, self.shown, strict=True)
        ]
        usage = self.call.usage()
        return {**self.call.head(self.kind), "choices": choices, "usage": usage, **self.call.extras()}

    def _deltas(self, choice: Choice, shown: ChatChoice, piece: Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts_of(piece, shown.reader):
            if isinstance(part, Text):
                shown.text.append(part.text)
                deltas.append({"content": part.text})
            elif isinstance(part, Thought):
                shown.thoughts.append(part.text)
                deltas.append({"reasoning_content": part.text})
            elif isinstance(part, CallBegin):
                function = {"name": part.name, "arguments": ""}
                name = call_id(self.call.seed, choice.index, part.index)
                shown.calls.append({"id": name, "type": "function", "function": function})
                copy = {**shown.calls[-1], "function": dict(function)}
                deltas.append({"tool_calls": [{"index": part.index, **copy}]})
            elif isinstance(part, CallArguments):
                shown.calls[part.index]["function"]["arguments"] += part.text
                deltas.append({"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]})
        return deltas

    def _last(self, choice: Choice, shown: ChatChoice) -> dict[str, Any]:
        event = self._event(choice, {}, self._reason(choice, shown))
        if shown.unsent:
            event["choices"][0]["logprobs"] = self._logprobs(shown.unsent)
            shown.unsent = []
        event["choices"][0] |= self.call.choice_extras(choice, shown.sent_steps)
        if not self.call.options.usage and all(c.finish_reason for c in self.call.flat):
            event |= self.call.extras()
        return event

    def _event(self, choice: Choice, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        event = self.call.head(f"{self.kind}.chunk")
        event["choices"] = [
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        ]
        if self.call.options.usage:
            event["usage"] = self.call.usage() if self.call.options.running_usage else None
        return event

    def _reason(self, choice: Choice, shown: ChatChoice) -> str | None:
        called = shown.calls and choice.finish_reason == "stop"
        return "tool_calls" if called else choice.finish_reason

    def _message(self, shown: ChatChoice) -> dict[str, Any]:
        text = "".join(shown.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if shown.calls:
            message |= {"content": text or None, "tool_calls": shown.calls}
        if shown.thoughts:
            message["reasoning_content"] = "".join(shown.thoughts)
        return message

    def _logprobs(self, scores: list[Score]) -> dict[str, Any]:
        return {"content": self.call.scored_tokens(scores), "refusal": None}


ROUTES = (post("/v1/chat/completions", answer_chat, ChatRequest, "Answer a conversation.", ChatCompletion),)
