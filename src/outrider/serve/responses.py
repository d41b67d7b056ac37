"""`/v1/responses`: the stateless part of OpenAI's newer route. Nothing is stored; the whole conversation comes
with every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from outrider.errors import InvalidRequest, brief, invalid
from outrider.serve.answer import answer
from outrider.serve.call import Call, parts_of
from outrider.serve.chat import chat_ids, chat_terms
from outrider.serve.errors import ApiError
from outrider.serve.harmony import reader_of
from outrider.serve.link import Piece
from outrider.serve.model_service import ModelService
from outrider.serve.replies import ResponseReply
from outrider.serve.request import Request
from outrider.serve.routes import post
from outrider.serve.tool_text import CallArguments, CallBegin, CallEnd, Text, Thought
from outrider.serve.tools import ToolRequest, call_id
from outrider.serve.wire import ChatRequest, ResponsesRequest, Sampling, check_messages, text_of
from outrider.types import SamplingParams


async def answer_response(request: Request) -> Response:
    asked = await request.read(ResponsesRequest)
    prompt, params, wanted = await request.in_pool(_prepared, request.chosen, asked)
    scored = "message.output_text.logprobs" in (asked.include or ()) or bool(asked.top_logprobs)
    if scored:
        params = replace(params, logprobs=asked.top_logprobs or 0)
    fitted = request.chosen.fitted(asked, prompt, params, asked.max_output_tokens)
    return await answer(
        request, asked, [fitted], "resp_", lambda call: Responses(call, asked, wanted, scored)
    )


def _prepared(
    service: ModelService, asked: ResponsesRequest
) -> tuple[list[int], SamplingParams, ToolRequest]:
    if isinstance(asked.input, list):
        check_messages(asked.input, "input")
    chat = as_chat(asked)
    tools, params = chat_terms(service, chat)
    return chat_ids(service.model, chat, tools), params, tools


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    for name, value in (("n", asked.n), ("max_tokens", asked.max_tokens)):
        if value is not None:
            instead = "one answer is given" if name == "n" else "use max_output_tokens"
            raise invalid(name, f"is not known here: {instead}")
    shared = {name: getattr(asked, name) for name in Sampling.__struct_fields__}
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, (str, type(None))):
        raise invalid("reasoning.effort", "must be a text")
    if (form := (asked.text or {}).get("format")) is not None:
        shared["response_format"] = form
    return ChatRequest(
        messages=_messages(asked),
        tools=_chat_tools(asked.tools),
        tool_choice=_chat_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning_effort=effort,
        **shared,
    )


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    thoughts = ""  # are a part of the turn that follows them
    for i, item in enumerate(asked.input):
        if item.get("type") == "reasoning":
            thoughts = _thoughts(item, f"input[{i}]")
            continue
        message = _message(item, f"input[{i}]")
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"] = thoughts
        messages.append(message)
        thoughts = ""
    return messages


def _thoughts(item: dict[str, Any], where: str) -> str:
    """Of an item that this server wrote; other servers' may be encrypted, or leave nothing but a summary."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
    ):
        raise invalid(f"{where}.content", "must be a list of parts with a text")
    return "\n\n".join(part["text"] for part in parts)


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if not isinstance(content, (str, list)):
            raise invalid(f"{where}.content", "must be a text or a list of parts")
        return {"role": item.get("role"), "content": text_of(content, f"{where}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else text_of(output, f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    raise InvalidRequest(
        f"{where} is of type {brief(kind)}; messages, reasoning and function calls are known", f"{where}.type"
    )


def _chat_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Responses writes a function's fields beside its type; chat writes them within `function`."""
    if tools is None:
        return None
    chat = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise invalid(f"tools[{i}].type", "must be 'function'")
        chat.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
    return chat


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


class Responses:
    """One answer as a list of items: what was said, and calls."""

    def __init__(self, call: Call, asked: ResponsesRequest, tools: ToolRequest, scored: bool) -> None:
        self.call, self.asked, self.tools, self.scored = call, asked, tools, scored
        self.reader = reader_of(call.model.tool_format, tools)
        call.count_thoughts()
        self.items: list[dict[str, Any]] = []
        self.number = 0
        self.scores: list[Any] = []  # of the text not yet sent

    def begin(self) -> list[dict[str, Any]]:
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def feed(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        self.call.take(prompt, piece)
        self.scores.extend(piece.scores or ())
        events: list[dict[str, Any]] = []
        for part in parts_of(piece, self.reader):
            if isinstance(part, Text):
                events += self._say(part.text)
            elif isinstance(part, Thought):
                events += self._think(part.text)
            elif isinstance(part, CallBegin):
                events += [*self._close(), *self._open_call(part)]
            elif isinstance(part, CallArguments):
                events += self._argue(part.text)
            elif isinstance(part, CallEnd):
                events += self._close()
        if piece.finish_reason and all(item["type"] == "reasoning" for item in self.items):
            events += [*self._close(), *self._say("")]
        return events

    def finish(self) -> list[dict[str, Any]]:
        status = self._status()
        return [*self._close(status), self._event(f"response.{status}", response=self._response(status))]

    def body(self) -> dict[str, Any]:
        self._close(self._status())
        return self._response(self._status())

    def error(self, error: ApiError) -> dict[str, Any]:
        inner = error.body()["error"]
        fields = {name: inner[name] for name in ("message", "code", "param")}
        return self._event("error", **fields)

    def _status(self) -> str:
        return "incomplete" if self.call.flat[0].finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **fields}

    @property
    def _open_item(self) -> dict[str, Any] | None:
        return self.items[-1] if self.items and self.items[-1]["status"] == "in_progress" else None

    def _say(self, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        item = self._open_item
        if item is None or item["type"] != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item, events = self._open({"type": "message", "role": "assistant", "content": []}, "msg", part)
        item["content"][0]["text"] += text
        scored = self.call.scored_tokens(self.scores) if self.scored else []
        item["content"][0]["logprobs"] = item["content"][0]["logprobs"] + scored
        self.scores = []
        delta = dict(content_index=0, delta=text, logprobs=scored)
        return [*events, self._event("response.output_text.delta", **self._place(item), **delta)]

    def _think(self, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        item = self._open_item
        if item is None or item["type"] != "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item, events = self._open({"type": "reasoning", "summary": [], "content": []}, "rs", part)
        item["content"][0]["text"] += text
        place = self._place(item)
        return [*events, self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)]

    def _open(
        self, item: dict[str, Any], prefix: str, part: dict[str, Any]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A new item of one part, after the one before it."""
        events = self._close()
        item = self._add(item, prefix)
        events += [
            self._event("response.output_item.added", output_index=self._index, item=dict(item)),
            self._event("response.content_part.added", **self._place(item), content_index=0, part=dict(part)),
        ]
        item["content"] = [part]
        return item, events

    def _open_call(self, begun: CallBegin) -> list[dict[str, Any]]:
        name = call_id(self.call.seed, 0, begun.index)
        item = self._add(
            {"type": "function_call", "call_id": name, "name": begun.name, "arguments": ""}, "fc"
        )
        return [self._event("response.output_item.added", output_index=self._index, item=dict(item))]

    def _argue(self, text: str) -> list[dict[str, Any]]:
        item = self.items[-1]
        item["arguments"] += text
        return [self._event("response.function_call_arguments.delta", **self._place(item), delta=text)]

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        item = self._open_item
        if item is None:
            return []
        item["status"] = status
        place = self._place(item)
        if item["type"] == "message":
            part = item["content"][0]
            done = dict(content_index=0, text=part["text"], logprobs=part["logprobs"])
            events = [
                self._event("response.output_text.done", **place, **done),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        elif item["type"] == "reasoning":
            part = item["content"][0]
            events = [
                self._event("response.reasoning_text.done", **place, content_index=0, text=part["text"]),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        else:
            done = dict(name=item["name"], arguments=item["arguments"])
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        return [*events, self._event("response.output_item.done", output_index=self._index, item=dict(item))]

    def _add(self, item: dict[str, Any], prefix: str) -> dict[str, Any]:
        suffix = self.call.id.removeprefix("resp_")
        self.items.append({"id": f"{prefix}_{suffix}{len(self.items)}", **item, "status": "in_progress"})
        return self.items[-1]

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._index}

    def _response(self, status: str) -> dict[str, Any]:
        asked, params, call = self.asked, self.call.jobs[0].params, self.call
        done = status != "in_progress"
        return {
            "id": call.id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "model": call.shown,
            "output": self.items if done else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            **({**call.choice_extras(call.flat[0]), **call.extras()} if done else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.call.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


ROUTES = (
    post(
        "/v1/responses", answer_response, ResponsesRequest, "Answer a conversation, stateless.", ResponseReply
    ),
)
