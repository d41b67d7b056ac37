"""Several processes answer at once, each with its own engine and its own shards.

One process is not enough for a GPU that answers hundreds of conversations with a small model: the GPU waits for the
host. The contents of a shard do not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from outrider.distill.answer import Part, answered_tokens, cut_shards, one_each, whole_shards
from outrider.distill.folder import Folder
from outrider.distill.recipe import Recipe
from outrider.distill.report import Report
from outrider.errors import OutriderError
from outrider.load.token_shards import Conversation, read_shard, shard_paths

LOOK_SECONDS = 0.5


class Answering(Protocol):
    """What each process is sent, and calls."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def folder(self) -> Folder: ...

    def answer_part(self, part: Part) -> int: ...


def answer_together(each: Answering, count: int, report: Report) -> int:
    """Answers with `count` processes. Returns the number of shards of answers needed, and deletes the others."""
    recipe, folder = each.recipe, each.folder
    made_up = Watched(folder.made_up, one_each, recipe.made_up)
    answers = Watched(folder.answers, answered_tokens, recipe.answer_tokens)
    context = multiprocessing.get_context("spawn")
    problems: Any = context.SimpleQueue()
    started = [
        context.Process(target=_answer, args=(each, Part(i, count), problems), daemon=True)
        for i in range(count)
    ]
    try:
        for process in started:
            process.start()
        if recipe.made_up:
            _watch(made_up, "make up", "prompts", report, started, problems, answers.folder)
        _watch(answers, "answer", "tokens", report, started, problems)
        _await_end(started, problems)
    finally:
        for process in started:
            process.terminate()
            process.join()
    for watched in (made_up, answers):
        watched.look()
        cut_shards(watched.folder, watched.prefix[0])
    return answers.prefix[0]


@dataclass(slots=True)
class Watched:
    """What is in a folder of shards so far."""

    folder: Path
    worth: Callable[[Conversation], int]
    goal: int
    done: dict[int, int] = field(default_factory=dict)

    def look(self) -> int:
        """What all of it is worth."""
        for number, path in shard_paths(self.folder).items():
            if number not in self.done:
                self.done[number] = sum(map(self.worth, read_shard(path)))
        return sum(self.done.values())

    @property
    def prefix(self) -> tuple[int, int]:
        return whole_shards(self.done, self.goal)


def _watch(
    watched: Watched,
    stage: str,
    unit: str,
    report: Report,
    started: Sequence[BaseProcess],
    problems: Any,
    following: Path | None = None,
) -> None:
    """Until there is enough, the next stage has begun, or no process is left."""
    report.begin(stage, watched.goal, unit, min(watched.look(), watched.goal))
    try:
        while watched.prefix[1] < watched.goal and any(process.is_alive() for process in started):
            if following is not None and shard_paths(following):
                break
            _check(started, problems)
            time.sleep(LOOK_SECONDS)
            report.update(min(watched.look(), watched.goal), f"{len(started)} processes")
    finally:
        report.end()


def _await_end(started: Sequence[BaseProcess], problems: Any) -> None:
    while any(process.is_alive() for process in started):
        _check(started, problems)
        time.sleep(LOOK_SECONDS)
    _check(started, problems)


def _check(started: Sequence[BaseProcess], problems: Any) -> None:
    if not problems.empty():
        raise problems.get()
    for process in started:
        if process.exitcode:
            raise OutriderError(
                f"a process that answered ended by itself (exit status {process.exitcode}): what was finished is kept, "
                "and the same command goes on; with fewer --processes it needs less memory"
            )


def _answer(each: Answering, part: Part, problems: Any) -> None:
    """Runs in a child process, which ends when its parent ends. It then exits at once, as answers are on disk by then
    and a thread that still compiles would abort an orderly exit.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        each.answer_part(part)
    except OutriderError as problem:
        problems.put(problem)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
