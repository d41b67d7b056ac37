"""Rows of a prompt file: every form it may have, and what is wrong with the others."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from outrider.errors import InvalidRequest
from outrider.load.prompts import Row, make_row, read_rows

FILE = """\
{"id": "a", "turns": ["one", "two"]}

{"messages": [{"role": "user", "content": "hi"}]}
{"prompt": "Once"}
plain text
"quoted as JSON"
"quoted" in part
"""


def test_every_form_of_row(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(FILE)
    rows = [
        make_row(i, value, None, True) for i, value in read_rows(str(tmp_path / "p.jsonl"), io.StringIO())
    ]
    assert rows == [
        Row("a", turns=("one", "two")),
        Row("2", messages=({"role": "user", "content": "hi"},)),
        Row("3", prompt="Once"),
        Row("4", turns=("plain text",)),
        Row("5", turns=("quoted as JSON",)),
        Row("6", turns=('"quoted" in part',)),
    ]


def test_limit_and_stdin() -> None:
    assert read_rows("-", io.StringIO("a\nb\nc\n"), 2) == [("1", "a"), ("2", "b")]


@pytest.mark.parametrize(
    ("chat", "has_template", "expected"),
    [
        (None, True, Row("1", turns=("x",))),
        (None, False, Row("1", prompt="x")),
        (False, True, Row("1", prompt="x")),
        (True, False, Row("1", turns=("x",))),  # the model then says that it has no template
    ],
)
def test_plain_text_is_a_turn_or_a_raw_prompt(chat: bool | None, has_template: bool, expected: Row) -> None:
    assert make_row("1", "x", chat, has_template) == expected


def test_a_prompt_row_is_raw_unless_asked_otherwise() -> None:
    assert make_row("1", {"prompt": "x"}, None, True).prompt == "x"
    assert make_row("1", {"prompt": "x"}, True, True).turns == ("x",)


@pytest.mark.parametrize(
    ("value", "chat", "message"),
    [
        ({"text": "x"}, None, "needs one of"),
        ({"prompt": "x", "turns": ["y"]}, None, "needs one of"),
        ({"prompt": 3}, None, "must be a string"),
        ({"prompt": ""}, None, "empty"),
        ({"turns": []}, None, "not empty"),
        ({"turns": ["a", ""]}, None, "not empty"),
        ({"turns": "a"}, None, "must be a list"),
        ({"messages": ["a"]}, None, "must hold objects"),
        ({"turns": ["a"]}, False, "leave out --raw"),
    ],
)
def test_bad_rows(value: dict, chat: bool | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_row("1", value, chat, True)


def test_bad_json_names_file_and_line() -> None:
    with pytest.raises(InvalidRequest, match="stdin, line 3: not JSON"):
        read_rows("-", io.StringIO('a\n\n{"turns": \n'))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.jsonl cannot be read: No such file"):
        read_rows(str(tmp_path / "none.jsonl"), io.StringIO())


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_rows(str(tmp_path / "p"), io.StringIO())
