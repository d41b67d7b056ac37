"""`/v1/chat/completions`: conversations, with tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.serve.call import Call, Choice, parts_of
from outrider.serve.link import Piece, Score
from outrider.serve.tool_text import CallArguments, CallBegin, Text, ToolReader
from outrider.serve.tools import ToolRequest, call_id


@dataclass(slots=True)
class Spoken:
    """A choice's answer as chat shows it."""

    reader: ToolReader | None
    text: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    unsent: list[Score] = field(default_factory=list)  # of tokens whose text is held back


class Chat:
    kind = "chat.completion"

    def __init__(self, call: Call, tools: ToolRequest, scored: bool) -> None:
        self.call, self.scored = call, scored
        fmt = call.model.tool_format
        self.spoken = [Spoken(ToolReader(fmt, tools) if tools.allowed else None) for _ in call.flat]

    def begin(self) -> list[dict[str, Any]]:
        return [self._event(choice, {"role": "assistant", "content": ""}) for choice in self.call.flat]

    def feed(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        choice = self.call.take(prompt, piece)
        spoken = self.spoken[choice.index]
        spoken.unsent.extend(piece.scores or ())
        events = [self._event(choice, delta) for delta in self._deltas(choice, spoken, piece)]
        if events and spoken.unsent:
            events[0]["choices"][0]["logprobs"] = self._logprobs(spoken.unsent)
            spoken.unsent = []
        if piece.finish_reason:
            events.append(self._last(choice, spoken))
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
                "message": self._message(spoken),
                "logprobs": self._logprobs(choice.scores) if self.scored else None,
                "finish_reason": self._reason(choice, spoken),
                **self.call.choice_extras(choice),
            }
            for choice, spoken in zip(self.call.flat, self.spoken, strict=True)
        ]
        usage = self.call.usage()
        return {**self.call.head(self.kind), "choices": choices, "usage": usage, **self.call.extras()}

    def _deltas(self, choice: Choice, spoken: Spoken, piece: Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts_of(piece, spoken.reader):
            if isinstance(part, Text):
                spoken.text.append(part.text)
                deltas.append({"content": part.text})
            elif isinstance(part, CallBegin):
                function = {"name": part.name, "arguments": ""}
                name = call_id(self.call.seed, choice.index, part.index)
                spoken.calls.append({"id": name, "type": "function", "function": function})
                copy = {**spoken.calls[-1], "function": dict(function)}
                deltas.append({"tool_calls": [{"index": part.index, **copy}]})
            elif isinstance(part, CallArguments):
                spoken.calls[part.index]["function"]["arguments"] += part.text
                deltas.append({"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]})
        return deltas

    def _last(self, choice: Choice, spoken: Spoken) -> dict[str, Any]:
        event = self._event(choice, {}, self._reason(choice, spoken))
        if spoken.unsent:
            event["choices"][0]["logprobs"] = self._logprobs(spoken.unsent)
            spoken.unsent = []
        event["choices"][0] |= self.call.choice_extras(choice)
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

    def _reason(self, choice: Choice, spoken: Spoken) -> str | None:
        called = spoken.calls and choice.finish_reason == "stop"
        return "tool_calls" if called else choice.finish_reason

    def _message(self, spoken: Spoken) -> dict[str, Any]:
        text = "".join(spoken.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if spoken.calls:
            message |= {"content": text or None, "tool_calls": spoken.calls}
        return message

    def _logprobs(self, scores: list[Score]) -> dict[str, Any]:
        return {"content": self.call.scored_tokens(scores), "refusal": None}
