"""What a caller in Python may give as prompts and messages, checked before anything else is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from outrider.errors import InvalidRequest

Prompt = str | Seq[int]
Message = Mapping[str, Any]

BYTES = (bytes, bytearray, memoryview)


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt (a string or token ids) or many -> many."""
    if isinstance(prompts, str):
        return [prompts]
    many = plain_list(prompts)
    if many is None:
        raise InvalidRequest(
            "prompts must be a text, a list of token ids, or a list of those, "
            f"not {type(prompts).__name__}{' (decode it first)' if isinstance(prompts, BYTES) else ''}",
            "prompts",
        )
    return [many] if many and isinstance(many[0], int) else many


def plain_list(value: Any) -> list[Any] | None:
    """A list of a list, tuple, range, array or tensor; None for anything else, bytes included."""
    if isinstance(value, (*BYTES, str, Mapping)):
        return None
    if hasattr(value, "tolist"):  # an array or tensor
        value = value.tolist()
    if not isinstance(value, Seq):
        return None
    return [item.tolist() if hasattr(item, "dtype") else item for item in value]


def check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequest(
            'messages must be a list such as [{"role": "user", "content": "..."}], or a list of those, '
            f"not {type(messages).__name__}",
            "messages",
        )
