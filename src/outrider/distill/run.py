"""A distillation: the target answers, a draft learns from that, serving's verifier scores it.

Everything is kept in one folder, and the same command resumes where the last run ended:

    recipe.json     what is made, of which files
    made-up/        prompts that the target made up, as shards
    answers/        its answers, as shards
    answers.json    what is in them; there once the stage is complete
    checkpoints/    of the training
    draft/          the draft, as --draft takes it, with train.json (how it was made) and card.json (its score)
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.distill.answer import ALONE, Conversations, Filling, Part, answered_tokens, one_each
from outrider.distill.answer_together import answer_together
from outrider.distill.answers import Answers
from outrider.distill.folder import Folder, read_json, write_json
from outrider.distill.prompts import Prompt, Schedule, joined_prompts, made_up_prompts, read_prompts
from outrider.distill.recipe import STAGES, Recipe
from outrider.distill.report import Report, Silent, short
from outrider.distill.score import ScoreOptions, make_card, score
from outrider.distill.train import CHECKPOINTS, CURVES, read_curves, train
from outrider.engine.certificate import certificate
from outrider.engine.llm import LLM
from outrider.engine.memory import runs_on_gpu
from outrider.errors import InvalidRequest
from outrider.load.cards import tokens_trained, write_card
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.find import find
from outrider.load.heads import OWN
from outrider.load.token_shards import (
    Conversation,
    read_shard,
    read_shards,
    shard_folders,
    shard_path,
    shard_paths,
)
from outrider.settings import Settings, cache_folder

TRIED = 6  # prompts tried for each made up one that is wanted, until those there are must do
TRAINING_CACHE = 1 << 28  # bytes: training has a cache of its own


def distill(
    recipe: Recipe,
    out: Path,
    settings: Settings,
    report: Report,
    stages: Iterable[str] = STAGES,
    processes: int = 1,
) -> Path:
    """Runs all stages, or some, each skipped if its result is there. Returns the folder of the draft."""
    if recipe.continue_from:
        recipe = replace(recipe, continue_from=str(_draft_folder(Path(recipe.continue_from))))
    folder = Folder(out)
    with folder.held():
        run = Run(recipe, folder, settings, report, folder.begin(recipe), processes)
        for stage in (stage for stage in STAGES if stage in set(stages)):
            {"answer": run.answer, "train": run.train, "score": run.score}[stage]()
    return folder.draft


def _draft_folder(given: Path) -> Path:
    """Of a draft, or of the distillation that made it."""
    folder = given.expanduser()
    if (folder / "draft" / "config.json").exists():
        folder = folder / "draft"
    if not (folder / "config.json").exists():
        raise InvalidRequest(f"{given} is no draft to go on from: it has no config.json", "continue")
    return folder


@dataclass
class Run:
    """One run in a folder. `files` are the digests of the prompts' files."""

    recipe: Recipe
    folder: Folder
    settings: Settings
    report: Report
    files: Mapping[str, str]
    processes: int = 1

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(find(self.recipe.target, cache_folder()))

    @cached_property
    def context(self) -> int:
        """The recipe's, unless the target knows less."""
        own = None if self.checkpoint.config is None else self.checkpoint.config.context
        if own is None or own >= self.recipe.context:
            return self.recipe.context
        self.report.note(f"conversations are of at most {own} tokens, the target's own context")
        return own

    # ------------------------------------------------------------------------------------------------ answer

    def answer(self) -> None:
        if not self.recipe.answers:
            return
        if self._answered():
            self.report.note(f"answers: there ({_in_words(read_json(self.folder.summary))})")
            return
        self._prompts()  # what is wrong with them is said before all else
        count = self.answer_part(ALONE) if self.processes == 1 else self._answer_together()
        goal = self.recipe.answer_tokens
        summary = {"shards": count, "answer_tokens": goal, **summarised(read_shards(self.folder.answers))}
        write_json(self.folder.summary, summary)
        self.report.note(f"answers: {_in_words(summary)}")

    def _answer_together(self) -> int:
        count, settings = self.processes, self.settings
        if runs_on_gpu(settings) and not settings.cache_bytes:
            raise InvalidRequest(
                f"{count} processes share a GPU: say how many bytes of keys and values each may take (--cache-bytes)",
                "cache_bytes",
            )
        settings = replace(settings, threads=max(1, settings.threads // count))
        return answer_together(replace(self, settings=settings, report=Silent()), count, self.report)

    def _prompts(self) -> list[Prompt]:
        has_template = self.checkpoint.chat_template is not None
        prompts = read_prompts(self.recipe.prompts, has_template)
        if self.recipe.made_up and not has_template:
            raise InvalidRequest(
                "a target without a chat template makes up no prompts; give --prompts", "made_up"
            )
        if self.recipe.joined and not has_template:
            raise InvalidRequest("prompts are joined for a chat template, and this target has none", "joined")
        return prompts + joined_prompts(prompts, self.recipe.joined, self.recipe.seed)

    def answer_part(self, part: Part) -> int:
        """Answer with an engine of its own, all or what is one process's part. The number of shards needed."""
        prompts, settings = self._prompts(), replace(self.settings, context=self.context)
        # Hundreds together leave nothing to speculate with.
        draft = "none" if runs_on_gpu(settings) else "auto"
        with _opened(self.recipe.target, draft, settings) as llm:
            if self.recipe.made_up:
                prompts += self._made_up(llm, part)
            talks = Conversations(llm, self.recipe, Schedule(prompts, self.recipe))
            goal, most = self.recipe.answer_tokens, self.recipe.max_tokens
            shards = Filling(
                llm, self.folder.answers, talks.answer, answered_tokens, goal, most / 2, part=part
            )
            return shards.run(self.report, "answer", "tokens")

    def _answered(self) -> bool:
        """Whether all answers are there: a shard may have been deleted since, or more be wanted now."""
        if not self.folder.summary.exists():
            return False
        summary = read_json(self.folder.summary)
        there = list(shard_paths(self.folder.answers)) == list(range(summary["shards"]))
        return there and summary["answer_tokens"] == self.recipe.answer_tokens

    def _made_up(self, llm: LLM, part: Part) -> list[Prompt]:
        """Prompts by the target, as many as are wanted; fewer if it mostly makes up what is none."""
        wanted = self.recipe.made_up
        talks = Conversations(llm, self.recipe)
        filling = Filling(
            llm, self.folder.made_up, talks.make_up, one_each, wanted, 1.0, TRIED * wanted, part
        )
        count = filling.run(self.report, "make up", "prompts")
        rows = (row for number in range(count) for row in read_shard(shard_path(self.folder.made_up, number)))
        texts = (llm.tokenizer.decode(row.ids.tolist()).strip() for row in rows)
        made = made_up_prompts(list(texts))[:wanted]
        if not made:
            raise InvalidRequest("the target made up no prompt that can be asked; give --prompts", "made_up")
        if len(made) < wanted:
            self.report.note(
                f"made up {len(made)} prompts; the rest were empty, odd, cut short or the same again"
            )
        return made

    # ------------------------------------------------------------------------------------------------- train

    def train(self) -> None:
        if self.folder.train.exists():
            self.report.note(f"draft: there ({self.folder.draft})")
            return
        answers = self._answers()
        self._check_same_data(answers)
        cache = self.settings.cache_bytes or TRAINING_CACHE
        settings = replace(self.settings, cache_bytes=cache, gpu_memory_utilization=None)
        with _opened(self.recipe.target, "none", settings) as llm:
            folder = train(llm, self.recipe, answers, self.folder.path, self.report)
        write_json(self.folder.train, self._how_it_was_made(answers))
        self.report.note(f"draft: {folder}")

    def _answers(self) -> Answers:
        if self.recipe.answers and not self._answered():
            raise InvalidRequest(
                f"the answers in {self.folder.path} are not complete; run the stage answer first", "stage"
            )
        folders = [self.folder.answers] if self.recipe.answers else []
        for name in self.recipe.shards:
            found = shard_folders(Path(name).expanduser())
            if not found:
                raise InvalidRequest(f"there are no shards in {name}, nor in folders of it", "shards")
            folders += found
        return Answers(folders, self.context)

    def _check_same_data(self, answers: Answers) -> None:
        """A training that goes on must see what it began with; a server may still write to where it learns from."""
        data = {str(path.resolve()): path.stat().st_size for path in answers.shards}
        kept = self.folder.path / "training-data.json"
        if (self.folder.path / CHECKPOINTS).is_dir() and kept.exists() and read_json(kept) != data:
            raise InvalidRequest(
                f"shards have changed since training began in {self.folder.path}: take another --out, and let "
                "--shards name a copy of what is still being written to",
                "shards",
            )
        write_json(kept, data)

    def _how_it_was_made(self, answers: Answers) -> dict[str, Any]:
        curves = read_curves(self.folder.path / CURVES) if (self.folder.path / CURVES).exists() else []
        shards = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in answers.shards}
        rows = (answers[i] for i in range(len(answers)))
        return {
            **certificate("outrider"),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": self.recipe.target,
            "seed": self.recipe.seed,
            "tokens_seen": max((line["tokens"] for line in curves), default=0),
            "data": {
                "files": dict(self.files),
                "context": self.context,
                **summarised(rows),
                "shards": shards,
            },
            **self._continued(),
            "recipe": self.recipe.to_json(),
            "curves": curves,
        }

    def _continued(self) -> dict[str, Any]:
        """The draft that training went on from, and what it had seen."""
        if not self.recipe.continue_from:
            return {}
        folder = Path(self.recipe.continue_from)
        kept = folder / "train.json"
        before = read_json(kept) if kept.exists() else {}
        now, then = (read_json(each / "config.json").get(OWN, {}) for each in (self.folder.draft, folder))
        return {
            "continued_from": {
                "draft": str(folder),
                "layers": then.get("layers"),
                "layers_added": now.get("layers", 0) - then.get("layers", 0),
                "tokens_seen": tokens_trained(before) or 0,
            }
        }

    # ------------------------------------------------------------------------------------------------- score

    def score(self) -> None:
        if not self.folder.train.exists():
            raise InvalidRequest(
                f"there is no draft in {self.folder.path} yet; run the stage train first", "stage"
            )
        made, r = read_json(self.folder.train), self.recipe
        options = ScoreOptions(r.score_temperatures, r.depth, r.tree_nodes, r.score_tokens, seed=r.seed)
        how = hashlib.sha256(r.text().encode()).hexdigest()
        if self.folder.card.exists() and read_json(self.folder.card).get("recipe") == how:
            self.report.note(f"score: there ({self.folder.card})")
            return
        asked = self._asked()
        found = score(r.target, self.folder.draft, asked, options, self.report, self.settings)
        card = make_card(self.checkpoint, r.target, self.folder.draft, found, tokens_trained(made), how)
        write_card(self.folder.draft, card)
        self.report.note(f"score: {self.folder.card}")

    def _asked(self) -> dict[str, list[Any]]:
        """Prompts by task: of the files that were named for it, else those that were held out, as token ids."""
        asked: dict[str, list[Any]] = {}
        if self.recipe.score_prompts:
            has_template = self.checkpoint.chat_template is not None
            for prompt in read_prompts(self.recipe.score_prompts, has_template):
                asked.setdefault(prompt.task, []).append(self._first_turn(prompt))
        else:
            answers = self._answers()
            held = {answers[row].prompt: answers[row] for row in answers.rows(held_out=True)}
            for one in held.values():
                asked.setdefault(one.task or "text", []).append(
                    one.ids[: int(np.argmax(one.answered))].tolist()
                )
        if not asked:
            raise InvalidRequest(
                "there is no prompt to score with: give --score-prompts FILE", "score_prompts"
            )
        return {task: some[: self.recipe.score_limit] for task, some in sorted(asked.items())}

    def _first_turn(self, prompt: Prompt) -> Any:
        if prompt.row.prompt is not None:
            return self.checkpoint.tokenizer.encode(prompt.row.prompt)
        return prompt.row.turns[0] if prompt.row.turns else list(prompt.row.messages)


@contextlib.contextmanager
def _opened(target: str, draft: str, settings: Settings) -> Iterator[LLM]:
    """For one stage: the next one needs the memory."""
    llm = LLM(target, draft=draft, settings=settings, generation_config="none")
    try:
        yield llm
    finally:
        llm.close()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def summarised(rows: Iterable[Conversation]) -> dict[str, Any]:
    """How many conversations and tokens there are, by task and by temperature."""
    tasks: dict[str, Counter[str]] = {}
    temperatures: Counter[str] = Counter()
    for row in rows:
        count = tasks.setdefault(row.task or "text", Counter())
        count.update(conversations=1, tokens=len(row), answered=answered_tokens(row))
        temperatures[f"{row.temperature:g}"] += 1
    whole: Counter[str] = sum(tasks.values(), Counter())
    for count in tasks.values():
        count["share"] = round(count["conversations"] / whole["conversations"], 4)  # type: ignore[assignment]
    return {
        **whole,
        "tasks": {task: dict(tasks[task]) for task in sorted(tasks)},
        "temperatures": dict(temperatures),
    }


def _in_words(summary: Mapping[str, Any]) -> str:
    tasks = ", ".join(f"{100 * count['share']:.0f} % {task}" for task, count in summary["tasks"].items())
    return f"{short(summary['conversations'])} conversations, {short(summary['answered'])} tokens answered: {tasks}"
