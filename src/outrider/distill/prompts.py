"""What a target is asked: prompts from files and its own, which of them a conversation of some number gets.

Everything here is a function of the recipe and of numbers, so a run that is started again asks the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.distill.recipe import Recipe
from outrider.errors import InvalidRequest, suggest
from outrider.load.prompts import Row, make_row, numbered_rows
from outrider.load.template import checked_messages

NO_TASK = "text"  # of rows that name none
MADE_UP, JOINED = "made-up", "joined"
BLOCK = 1 << 14  # numbers whose prompts are settled together
SHORTEST = 4  # characters of a prompt that was made up
# Of prompts that are joined: characters of a text that is worth reading and of a question, and of all texts together.
PASSAGE, QUESTION, LONG = 200, 160, (1200, 5200)
ASKED_OF_TEXTS = (
    "Summarize:",
    "Summarize the following text.",
    "Write a short summary of this:",
    "What are the main points of the text below?",
    "Explain in your own words what this says.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row with the task it belongs to. What is held out is held out by `id`."""

    id: str
    task: str
    row: Row


def read_prompts(files: Sequence[str], has_template: bool) -> list[Prompt]:
    """The rows of all files. What is wrong with one is said with its file and line."""
    found = [prompt for name in files for prompt in _of_file(name, has_template)]
    if files and not found:
        raise InvalidRequest(f"there is no prompt in {', '.join(files)}", "prompts")
    return found


def _of_file(name: str, has_template: bool) -> Iterator[Prompt]:
    if name == "-":
        raise InvalidRequest(
            "prompts must be in files: a run that is started again reads them again", "prompts"
        )
    for line, row_id, value in numbered_rows(name, sys.stdin):
        try:
            if isinstance(value, str):
                if value == "[" or value.startswith("[{"):
                    raise InvalidRequest("a JSON list; one row a line is needed")
                yield Prompt(_text_id(value), NO_TASK, make_row(row_id, value, None, has_template))
                continue
            task = value.get("task", NO_TASK)
            if not isinstance(task, str) or not task:
                raise InvalidRequest('"task" must be a text')
            row = make_row(row_id, value, None, has_template)
            if row.messages and all(m["role"] == "assistant" for m in checked_messages(row.messages)):
                raise InvalidRequest('"messages" has nothing to answer')
            if (row.turns or row.messages) and not has_template:
                raise InvalidRequest('this target has no chat template, so that a row needs a "prompt"')
            own = {key: value[key] for key in ("turns", "messages", "prompt") if key in value}
            yield Prompt(str(value["id"]) if "id" in value else _text_id(json.dumps(own)), task, row)
        except InvalidRequest as problem:
            raise InvalidRequest(f"{name}, line {line}: {problem}", "prompts") from None


def _text_id(text: str) -> str:
    """Of a row that has none of its own: the same text is the same prompt."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def digest(file: str) -> str:
    return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()


def is_prompt(text: str, complete: bool) -> bool:
    """Whether what a target wrote as a user's turn can be asked: it ended by itself, and is text."""
    return (
        complete
        and len(text.strip()) >= SHORTEST
        and "\ufffd" not in text
        and any(map(str.isalpha, text))
        and all(char.isprintable() or char in "\n\t\r" for char in text)
    )


def made_up_prompts(texts: Sequence[str]) -> list[Prompt]:
    """In order, each text once."""
    return [
        Prompt(f"{MADE_UP}-{_text_id(text)}", MADE_UP, Row(str(i), turns=(text,)))
        for i, text in enumerate(dict.fromkeys(texts))
    ]


def joined_prompts(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Long ones, of texts among the prompts that are joined: to be summarized, or to answer a short one of the prompts
    from. A draft that never saw a long text drafts badly after one.
    """
    texts = [(p.row.turns or (p.row.prompt or "",))[0].strip() for p in prompts]
    passages, questions = (
        [t for t in texts if len(t) >= PASSAGE],
        [t for t in texts if 0 < len(t) <= QUESTION],
    )
    if count and not (passages and questions):
        raise InvalidRequest(
            f"joined prompts need texts of {PASSAGE} characters or more and of {QUESTION} or fewer among the prompts",
            "joined",
        )
    random, made = np.random.Generator(np.random.Philox(key=[seed, 1 << 41])), []
    for i in range(count):
        room, some = int(random.integers(*LONG)), list[str]()
        while not some or sum(map(len, some)) < room:
            some.append(passages[random.integers(len(passages))])
        text = "\n".join(some)[: LONG[1]]
        if random.random() < 0.5:
            asked = f"{ASKED_OF_TEXTS[random.integers(len(ASKED_OF_TEXTS))]} {text}"
        else:
            asked = f"{text}\n\n{questions[random.integers(len(questions))]}"
        made.append(Prompt(f"{JOINED}-{_text_id(asked)}", JOINED, Row(str(i), turns=(asked,))))
    return made


class Schedule:
    """Which prompt the conversation of a number asks, at which temperature.

    Tasks with a share of their own get it, drawn by number; the others share the rest as their rows come. Within
    either, prompts come in a new random order every time over.
    """

    def __init__(self, prompts: Sequence[Prompt], recipe: Recipe) -> None:
        self.seed, self.temperatures = recipe.seed, recipe.temperatures
        tasks = Counter(prompt.task for prompt in prompts)
        for task, share in recipe.shares.items():
            if task not in tasks:
                raise InvalidRequest(f"no prompt is of the task {task!r}{suggest(task, tasks)}", "shares")
            if share == 0:
                tasks.pop(task)
        named = [task for task, share in recipe.shares.items() if share > 0]
        rest = [task for task in tasks if task not in recipe.shares]
        left = 1 - sum(recipe.shares.values())
        if left > 1e-9 and not rest:
            raise InvalidRequest(
                f"shares add up to {1 - left:g}, and no prompt is of another task; let them add up to 1",
                "shares",
            )
        groups = [[task] for task in named] + ([rest] if left > 1e-9 else [])
        self._groups = [[p for p in prompts if p.task in set(group)] for group in groups]
        self._bounds = np.cumsum([recipe.shares[task] for task in named])
        self._numbers: list[tuple[int, int]] = []  # of each conversation: its group, and its number within it
        self._seen = [0] * len(self._groups)
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def prompt(self, number: int) -> tuple[Prompt, float]:
        while number >= len(self._numbers):
            self._settle_block()
        group, place = self._numbers[number]
        prompts = self._groups[group]
        order = self._order(group, place // len(prompts))
        draw = drawn(self.seed, number, "temperature")
        return prompts[order[place % len(prompts)]], float(self.temperatures[draw % len(self.temperatures)])

    def _settle_block(self) -> None:
        block = len(self._numbers) // BLOCK
        random = np.random.Generator(np.random.Philox(key=[self.seed, block]))
        groups = np.searchsorted(self._bounds, random.random(BLOCK), side="right")
        for group in np.minimum(groups, len(self._groups) - 1).tolist():
            self._numbers.append((group, self._seen[group]))
            self._seen[group] += 1

    def _order(self, group: int, time_over: int) -> np.ndarray:
        key = group, time_over
        if key not in self._orders:
            random = np.random.Generator(
                np.random.Philox(key=[self.seed, (1 << 40) + (group << 24) + time_over])
            )
            self._orders[key] = random.permutation(len(self._groups[group]))
        return self._orders[key]


def drawn(seed: int, number: int, what: str) -> int:
    """53 random bits that belong to a number."""
    data = f"{seed}/{number}/{what}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 11
