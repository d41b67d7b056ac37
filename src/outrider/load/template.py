"""A model's chat template: messages in, the text of the conversation out.

The template comes with the model and is not trusted: it is compiled and rendered in a process of its own
(rendering.py), in jinja2's immutable sandbox and with limits on time, memory and the length of the text, so that it can
neither reach out nor hang. Whatever it raises is a `TemplateFailed`. Turning the text into tokens is for tokenizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequest, TemplateFailed, invalid
from outrider.load.rendering import Failed, Renderers
from outrider.load.tokenizer import MARK, Tokenizer

MAX_SOURCE = 1 << 20  # characters
MAX_TEXT = 8 << 20  # characters
MAX_MEMORY = 512 << 20  # bytes beyond what the process takes when idle
MAX_SECONDS = 5.0

renderers = Renderers(
    {"characters": MAX_TEXT, "memory": MAX_MEMORY, "seconds": int(MAX_SECONDS), "mark": MARK}
)


class ChatTemplate:
    """Compiled on first use, so that a model with a broken template still serves plain prompts."""

    def __init__(self, source: str, bos: str | None = None, eos: str | None = None) -> None:
        self.source = source
        self.bos = bos or ""
        self.eos = eos or ""

    @classmethod
    def for_tokenizer(cls, source: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
        """With that tokenizer's own special tokens; None for a model that has no template."""
        if source is None:
            return None
        bos = "" if tokenizer.bos_id is None else tokenizer.token_string(tokenizer.bos_id)
        eos = tokenizer.token_string(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
        return cls(source, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        if len(self.source) > MAX_SOURCE:
            raise TemplateFailed(f"the chat template is longer than {MAX_SOURCE} characters", "messages")
        names = {"bos_token": self.bos, "eos_token": self.eos, "tools": tools, "documents": None, **extra}
        names |= {"messages": checked_messages(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return renderers.render(self.source, names, MAX_SECONDS)
        except Failed as problem:
            raise TemplateFailed(f"the chat template failed: {problem}", "messages") from None


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """A list of `{"role": str, "content": str, ...}`; contents given as parts become one text."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid(where, f"must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where} needs a role, such as 'user'", f"{where}.role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""  # a turn that only calls tools says nothing
    if isinstance(content, (list, tuple)):
        content = "\n".join(_checked_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where} needs a content that is a text or a list of text parts", f"{where}.content"
        )
    return {**message, "content": content}


def _checked_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise invalid(where, f"is of type {kind!r}; only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(where, "has no text")
    return text
