"""Events that are filled in, not made: byte for byte what they would have been."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.serve.text_event import TextEvent, framed

TEXTS = ("a", "", ' "quoted" \\ ', "two\nlines\x00", "\u00e9 \u4f60 \U0001f600", "data: [DONE]\n\n", '"}]}')


@pytest.mark.parametrize("text", TEXTS)
def test_a_filled_event_is_the_made_one(text: str) -> None:
    def make(said: str) -> dict[str, Any]:
        return {"id": 'x"y', "choices": [{"index": 0, "delta": {"content": said}, "finish_reason": None}]}

    event = TextEvent(make)
    assert event.of(text) == framed(make(text))
    assert event.of("b") == framed(make("b"))
