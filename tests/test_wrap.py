"""Lines that break between words: whole texts, and texts that come in pieces."""

from __future__ import annotations

import pytest

from outrider.wrap import WordWrap, wrapped

RED, PLAIN = "\x1b[31m", "\x1b[0m"


def streamed(text: str, width: int, piece: int = 1) -> str:
    wrap = WordWrap(width)
    return "".join(wrap.feed(text[i : i + piece]) for i in range(0, len(text), piece)) + wrap.flush()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("one two t", "one two t"),
        ("exactly 10 chars", "exactly 10\nchars"),
        ("  two in", "  two in"),
        ("a\n\n- b c d e f g", "a\n\n- b c d e\nf g"),
        ("end  \nnext", "end\nnext"),
        ("https://example.org/x y", "https://example.org/x\ny"),
        ("at https://example.org/x", "at\nhttps://example.org/x"),
        ("日本語のテキスト", "日本語のテ\nキスト"),
        ("é" * 10 + " x", "é" * 10 + "\nx"),
        ("e\u0301" * 8 + " x", "e\u0301" * 8 + " x"),
        ("a\tb cdefg", "a\tb\ncdefg"),
        ("```\nx = 1 + 2 + 3 + 4\n```\none two three", "```\nx = 1 + 2 + 3 + 4\n```\none two\nthree"),
    ],
)
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_lines_break_between_words(text: str, shown: str, piece: int) -> None:
    assert streamed(text, 10, piece) == shown


def test_colours_take_no_room() -> None:
    assert streamed(f"one {RED}two{PLAIN} three", 10, 100) == f"one {RED}two{PLAIN}\nthree"
    assert streamed(f"one two{RED} three{PLAIN}", 10, 100) == f"one two{RED}\nthree{PLAIN}"


def test_only_the_last_word_is_held_back() -> None:
    wrap = WordWrap(10)
    assert [wrap.feed("on"), wrap.feed("e tw"), wrap.feed("o "), wrap.feed("\n")] == ["", "one", " two", "\n"]
    assert wrap.feed("x" * 11) == "x" * 11  # longer than a line: written as it comes
    assert wrap.feed("xx") == "xx" and wrap.feed(" y") == "" and wrap.flush() == "\ny"


def test_the_second_column_stays_one() -> None:
    assert wrapped("/set NAME  a b c d e f g h", 24) == "/set NAME  a b c d e f g\n           h"
    assert wrapped("  indented as it was before", 16) == "  indented as it\n  was before"
    assert wrapped("one\n\ntwo", 10) == "one\n\ntwo"
