"""The folder of a distillation: what it was begun with, and whether another recipe may go on in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.distill.open_shards import open_shards
from outrider.distill.prompts import digest
from outrider.distill.recipe import STAGES, Recipe
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.token_shards import read_shard, read_shards, shard_paths, write_atomically


class Folder:
    """Names of what is in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.recipe = path, path / "recipe.json"
        self.made_up, self.answers = path / "made-up", path / "answers"
        self.summary = path / "answers.json"  # of the answers; there once they are complete
        self.draft = path / "draft"
        self.train = self.draft / "train.json"  # how the draft was made; there once it is
        self.card = self.draft / "card.json"
        self.gate = path / "gate.json"  # how the draft compares with the one in use

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """By one process at a time."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as problem:
            raise InvalidRequest(f"{self.path} cannot be written: {problem.strerror}", "out") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidRequest(f"another distillation is at work in {self.path}", "out") from None
            yield

    def begun(self) -> set[str]:
        """Stages with something in the folder that another recipe would have made otherwise."""
        found = {
            "answer": any(shard_paths(each) or open_shards(each) for each in (self.made_up, self.answers)),
            "train": self.draft.is_dir() or (self.path / "checkpoints").is_dir(),
        }
        return {stage for stage, there in found.items() if there}

    def kept(self) -> str:
        """What an interrupted run goes on with; empty if nothing was finished."""
        if self.train.exists():
            return "the trained draft"
        steps = sorted((self.path / "checkpoints").glob("checkpoint-*.safetensors"))
        if steps:
            return f"all answers, and training up to step {int(steps[-1].stem.partition('-')[2])}"
        if self.summary.exists():
            return "all answers; no step of training was finished, so that training begins again"
        rows = [row for each in (self.made_up, self.answers) for row in read_shards(each)]
        for each in (self.made_up, self.answers):
            rows += [row for path in open_shards(each).values() for row in read_shard(path)]
        tokens = sum(int(row.answered.sum()) for row in rows)
        return f"{len(rows)} conversations with {tokens} tokens of answers" if rows else ""

    def begin(self, recipe: Recipe) -> dict[str, str]:
        """Refuse a recipe that what is here was not made by; keep it. The digests of its files."""
        files = {name: _digest(name) for name in recipe.prompts}
        if self.recipe.exists():
            before, known = self._kept()
            for name, stage in recipe.changed(before).items():
                self._allow(name, stage, recipe, before)
            for name in known.keys() & files.keys():
                if known[name] != files[name] and "answer" in self.begun():
                    raise InvalidRequest(
                        f"{name} has changed since its prompts were answered; {self._way_out()}", "prompts"
                    )
        write_json(self.recipe, {"recipe": recipe.to_json(), "files": files})
        return files

    def _kept(self) -> tuple[Recipe, dict[str, str]]:
        try:
            raw = json.loads(self.recipe.read_text())
            return Recipe.of(raw["recipe"]), raw["files"]
        except (OSError, ValueError, KeyError, TypeError, InvalidRequest) as problem:
            raise InvalidRequest(
                f"{self.recipe} cannot be understood ({problem}); {self._way_out()}", "out"
            ) from None

    def _allow(self, name: str, stage: str, recipe: Recipe, before: Recipe) -> None:
        """A later stage may change; and more answers may be asked for until training begins."""
        begun, new, old = self.begun(), getattr(recipe, name), getattr(before, name)
        if name == "answer_tokens" and new > old and "train" not in begun:
            return
        if begun & set(STAGES[STAGES.index(stage) :]):
            raise InvalidRequest(
                f"{self.path} was begun with {name} {_shown(old)}, not {_shown(new)}; {self._way_out()}", name
            )

    def _way_out(self) -> str:
        return "leave it as it was, or take another --out"


def _digest(file: str) -> str:
    try:
        return digest(file)
    except OSError as problem:
        raise InvalidRequest(f"{file} cannot be read: {problem.strerror}", "prompts") from None


def _shown(value: Any) -> str:
    return json.dumps(value) if value or value == 0 else "nothing"


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise OutriderError(
            f"{path} cannot be read ({problem}): delete it, and run the command again"
        ) from None
