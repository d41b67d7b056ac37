"""Prompts by task, for commands that measure or compare: the user's, all turns of them, or the built-in workloads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.flag import option
from outrider.cli.output import note
from outrider.errors import InvalidRequest, OutriderError, suggest
from outrider.load.prompts import Row, read_checked_rows

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

TOKENS = 64  # of an answer, unless the user says otherwise
TASK = "text"  # of a row that names none

Tasks = Annotated[
    str | None,
    option(
        "tasks",
        "Only these tasks. Rewrite, where the prompts have none, is made of their longer texts.",
        "NAME,NAME",
    ),
]


@dataclass(frozen=True, slots=True, eq=False)
class TaskRow:
    """What is asked, of which task, and where it stands."""

    task: str
    row: Row
    where: str

    @property
    def text(self) -> str:
        """Of the first turn."""
        return self.row.prompt or next(iter(self.row.turns), "")


def task_rows(
    prompts: str | None, limit: int | None, wanted: str | None = None, each: int | None = None
) -> dict[str, list[TaskRow]]:
    """By task; the built-in ones if there is no file, the first `each` of a task unless there is a limit."""
    from outrider.bench.prompts import rewriting

    rows = _built_in(None if limit else each)[:limit] if prompts is None else _read(prompts, limit)
    found: dict[str, list[TaskRow]] = {}
    for one in rows:
        found.setdefault(one.task, []).append(one)
    if wanted is not None:
        copies = [_made("rewrite", text) for text in rewriting(one.text for one in rows)]
        found = _chosen({**({"rewrite": copies} if copies else {}), **found}, wanted.split(","))
    return found


def _built_in(each: int | None) -> list[TaskRow]:
    """Of each task in turn, so that a limit leaves some of every one."""
    from outrider.bench.prompts import KINDS

    longest = max(map(len, KINDS.values()))
    turns = [[(task, texts[i]) for task, texts in KINDS.items() if i < len(texts)] for i in range(longest)]
    return [_made(task, text) for turn in turns[:each] for task, text in turn]


def _made(task: str, text: str) -> TaskRow:
    return TaskRow(task, Row(task, turns=(text,)), f"the task {task}")


def _read(prompts: str, limit: int | None) -> list[TaskRow]:
    found = []
    for line, row, value in read_checked_rows(prompts, sys.stdin, limit):
        where = f"{prompts}, line {line}"
        task = value.get("task", TASK) if isinstance(value, dict) else TASK
        if not isinstance(task, str) or not task:
            raise InvalidRequest(f'{where}: "task" must be a text that is not empty', "task")
        found.append(TaskRow(task, row, where))
    return found


def _chosen(found: dict[str, list[TaskRow]], wanted: Iterable[str]) -> dict[str, list[TaskRow]]:
    for task in wanted:
        if task not in found:
            raise InvalidRequest(f"no prompt is of the task {task!r}{suggest(task, found)}", "tasks")
    return {task: found[task] for task in wanted}


def tasks_of(
    llm: LLM, prompts: str | None, limit: int | None, wanted: str | None = None, each: int | None = None
) -> dict[str, list[list[int]]]:
    return task_ids(llm, task_rows(prompts, limit, wanted, each))


def task_ids(
    llm: LLM, tasks: Mapping[str, list[TaskRow]], tokens: int = TOKENS, room: int | None = None
) -> dict[str, list[list[int]]]:
    """A prompt for every turn. Earlier turns are answered plainly and greedily, with at most `tokens` tokens, so that
    every measurement answers the same conversation. Each prompt must leave `room` tokens of the context, by default
    `tokens`.
    """
    room = tokens if room is None else room
    rows = [one for some in tasks.values() for one in some]
    talks: dict[TaskRow, list[dict[str, Any]]] = {one: [] for one in rows}
    asked: dict[TaskRow, list[list[int]]] = {one: [] for one in rows}
    for number in range(max((len(one.row.turns) for one in rows), default=0) or 1):
        now = [one for one in talks if number < max(1, len(one.row.turns))]
        for one in now:
            if one.row.turns:
                talks[one].append({"role": "user", "content": one.row.turns[number]})
            asked[one].append(_checked(llm, one, talks[one], room))
        more = [one for one in now if number + 1 < len(one.row.turns)]
        for one, text in zip(more, _answers(llm, [asked[one][-1] for one in more], tokens), strict=True):
            talks[one].append({"role": "assistant", "content": text})
    return {task: [ids for one in some for ids in asked[one]] for task, some in tasks.items()}


def _answers(llm: LLM, prompts: list[list[int]], tokens: int) -> list[str]:
    from outrider.types import SamplingParams, Speculation

    if not prompts:
        return []
    note(f"answering {len(prompts)} turns that others follow")
    plain = SamplingParams(temperature=0, max_tokens=tokens, speculation=Speculation(drafter="none"))
    return [out.text for out in llm.generate(prompts, plain)]


def _checked(llm: LLM, one: TaskRow, talk: list[dict[str, Any]], room: int) -> list[int]:
    """What cannot be asked is said before anything is measured."""
    try:
        ids = _ids(llm, one.row, talk)
    except OutriderError as problem:
        raise InvalidRequest(f"{one.where}: {problem}", "prompts") from None
    if not ids or len(ids) + room > llm.engine.context:
        raise InvalidRequest(
            f"{one.where}: a prompt of {len(ids)} tokens and an answer of {room} do not fit a context of "
            f"{llm.engine.context}",
            "prompts",
        )
    return ids


def _ids(llm: LLM, row: Row, talk: list[dict[str, Any]]) -> list[int]:
    if row.prompt is not None:
        return llm.tokenizer.encode(row.prompt)
    if row.messages:
        return llm.chat_ids(row.messages)
    if llm.template is None:
        return llm.tokenizer.encode("\n".join(turn["content"] for turn in talk))
    return llm.chat_ids(talk)
