"""Events of a stream that differ in their text alone, which nearly all do: what is around it is encoded once."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

_json = msgspec.json.Encoder()


class TextEvent:
    def __init__(self, make: Callable[[str], dict[str, Any]]) -> None:
        """`make` makes the event of a text."""
        mark = secrets.token_hex(16)
        self.before, self.after = framed(make(mark)).split(_json.encode(mark))

    def of(self, text: str) -> bytes:
        return self.before + _json.encode(text) + self.after


def framed(event: dict[str, Any]) -> bytes:
    return b"data: " + _json.encode(event) + b"\n\n"
