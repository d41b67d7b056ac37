"""Prompts by task: the user's as they stand, all turns of them, or the built-in workloads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.bench.prompts import KINDS, LENGTHS
from outrider.cli.tasks import task_ids, task_rows, tasks_of
from outrider.errors import InvalidRequest
from tests.cli.conftest import CONTEXT


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, cache_bytes=1 << 22, kernels="torch") as opened:
        yield opened


def written(folder: Path, *rows: Any) -> str:
    file = folder / "asked.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_rows_are_asked_as_they_stand(llm: LLM, tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "be brief"},
        user("hello"),
        {"role": "assistant", "content": "12"},
        user("34"),
    ]
    file = written(
        tmp_path,
        "hello there",
        {"prompt": "12 34"},
        {"task": "chat", "messages": talk},
        {"task": "chat", "turns": ["hi"]},
    )
    found = tasks_of(llm, file, None)
    assert found == {
        "text": [llm.chat_ids([user("hello there")]), llm.tokenizer.encode("12 34")],
        "chat": [llm.chat_ids(talk), llm.chat_ids([user("hi")])],
    }


def test_every_turn_is_asked_after_the_model_answered_those_before(llm: LLM, tmp_path: Path) -> None:
    file = written(tmp_path, {"turns": ["hello", "12", "34"]}, {"turns": ["hi"]})
    one, two, three, other = task_ids(llm, task_rows(file, None), tokens=5)["text"]
    talk = [user("hello")]
    for ids, turn in ((one, "12"), (two, "34"), (three, "")):
        assert ids == llm.chat_ids(talk)
        out = llm.generate([ids], temperature=0, max_tokens=5, speculation=False)[0]
        talk += [{"role": "assistant", "content": out.text}, user(turn)]
    assert other == llm.chat_ids([user("hi")])


def test_turns_without_a_template_are_plain_text(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "template", None)
    monkeypatch.setattr("outrider.cli.tasks._answers", lambda _, prompts, __: ["12"] * len(prompts))
    file = written(tmp_path, {"turns": ["hello", "34"]})
    assert tasks_of(llm, file, None) == {
        "text": [llm.tokenizer.encode("hello"), llm.tokenizer.encode("hello\n12\n34")]
    }


@pytest.mark.parametrize(
    ("rows", "said", "param"),
    [
        (["fine", "{broken"], "line 2: not JSON", "prompts"),
        ([{"turns": ["fine"]}, {"turns": []}], 'line 2: "turns" must be a list', "turns"),
        ([{"turns": ["a", 5]}], 'line 1: "turns" must hold texts', "turns"),
        ([{"prompt": 5}], 'line 1: "prompt" must be a string', "prompt"),
        ([{"messages": ["x"]}], 'line 1: "messages" must hold objects', "messages"),
        ([{"messages": [{"role": "system", "content": "x"}]}], 'nothing of the role "user"', "messages"),
        (["fine", {"text": "x"}], 'line 2: a row needs one of "turns"', "prompts"),
        ([{"prompt": "x", "task": 3}], 'line 1: "task" must be a text', "task"),
        ([], "holds no prompts", "prompts"),
        (["", "   "], "holds no prompts", "prompts"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, rows: list[Any], said: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as told:
        task_rows(written(tmp_path, *rows), None)
    assert told.value.param == param


def test_a_prompt_that_leaves_no_room_is_named(llm: LLM, tmp_path: Path) -> None:
    file = written(tmp_path, "hello", "hello " * CONTEXT)
    with pytest.raises(
        InvalidRequest, match=f"asked.jsonl, line 2: a prompt of .* do not fit a context of {CONTEXT}"
    ):
        tasks_of(llm, file, None)
    assert len(task_ids(llm, task_rows(file, 1), room=0)["text"]) == 1
    broken = written(tmp_path, "hello", "raise")
    with pytest.raises(InvalidRequest, match="line 2: the chat template failed: not this word"):
        tasks_of(llm, broken, None)


def test_tasks_are_chosen_and_rewriting_is_made_of_long_texts(tmp_path: Path) -> None:
    rows = [{"task": "chat", "turns": [f"hello {i}"]} for i in range(4)]
    rows += [{"task": "qa", "turns": ["12 hello"]}, {"task": "qa", "turns": ["hello " * 100]}]
    file = written(tmp_path, *rows)
    assert list(task_rows(file, None)) == ["chat", "qa"]
    found = task_rows(file, None, "rewrite,chat")
    assert list(found) == ["rewrite", "chat"]
    [copy] = found["rewrite"]
    assert copy.text.startswith("Rewrite this text word for word") and copy.text.endswith("hello " * 100)
    with pytest.raises(InvalidRequest, match="no prompt is of the task 'chatt'; did you mean 'chat'"):
        task_rows(file, None, "chatt")
    with pytest.raises(InvalidRequest, match="rewrite"):
        task_rows(file, 3, "rewrite")


def test_the_built_in_workloads() -> None:
    kinds = {"chat", "code", "json", "rewrite", "summary", "creative", "short", "long"}
    assert kinds < set(KINDS) and set(LENGTHS) == {"short", "long"}
    texts = [text for some in KINDS.values() for text in some]
    assert len(set(texts)) == len(texts) and all(len(some) == 8 for some in KINDS.values())
    assert {task: len(some) for task, some in task_rows(None, None, each=2).items()} == dict.fromkeys(
        KINDS, 2
    )
    assert list(task_rows(None, 3)) == list(KINDS)[:3]  # of each task in turn
