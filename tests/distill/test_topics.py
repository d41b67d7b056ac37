"""Prompts made by combining: always the same, no two alike, and readable as any file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.distill.prompts import read_prompts
from outrider.distill.topics import SHARES, main, rows


def test_rows_are_the_same_every_time_and_no_two_alike(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = rows(200)
    assert some == rows(200) == rows(300)[:200] and len({row["turns"][0] for row in some}) == 200
    assert {row["task"] for row in some} == set(SHARES) and not any("{" in row["turns"][0] for row in some)
    assert main(["3"]) == 0
    (tmp_path / "topics.jsonl").write_text(printed := capsys.readouterr().out)
    assert [json.loads(line) for line in printed.splitlines()] == some[:3]
    assert len(read_prompts([str(tmp_path / "topics.jsonl")], True)) == 3
