"""Scores a draft with the verifier that serves it: real answers of `LLM(target, draft=...)`, counted by their origins.

Every prompt is answered plainly, with chains of a fixed depth and with trees of a fixed size, the same seeds each time;
tokens must agree. Some prompts are answered again one at a time, plainly and as the planner decides in turn: their
times give the measured speed-up, and the costs that the engine learns meanwhile give the expected one.
"""

from __future__ import annotations

import datetime
import math
import queue
import secrets
import statistics
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.control.expected import best_speedup, step_costs
from outrider.distill.report import Report, Silent
from outrider.engine.certificate import certificate
from outrider.engine.llm import LLM
from outrider.errors import BadCheckpoint, InvalidRequest, stopped
from outrider.load.cards import VERSION, Acceptance, Card, Score, TargetFacts, TaskScore
from outrider.load.checkpoint import Checkpoint
from outrider.load.heads import card_facts, count_parameters
from outrider.load.pairs import fingerprint
from outrider.settings import Settings
from outrider.types import Event, SamplingParams, Speculation

BATCH = {"cpu": 8, "cuda": 64}  # prompts answered together, where only tokens are counted
PLAIN = Speculation(drafter="none")

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]  # one user turn, token ids, or messages


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    temperatures: tuple[float, ...] = (0.0, 0.7)
    depth: int = 5  # of chains
    tree_nodes: int = 24
    max_tokens: int = 128  # of an answer
    timed: int = 2  # prompts of a task whose answers are timed; none: no speed-up is measured
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("depth", 1), ("tree_nodes", 1), ("max_tokens", 2), ("timed", 0)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be at least {low}, not {getattr(self, name)}", name)
        if not self.temperatures:
            raise InvalidRequest("temperatures must not be empty", "temperatures")


def score(
    target: str | Path,
    draft: str | Path,
    prompts: Mapping[str, Seq[Prompt]],
    options: ScoreOptions | None = None,
    report: Report | None = None,
    settings: Settings | None = None,
) -> Score:
    """Of a draft for a target, on prompts by task."""
    with LLM(target, draft=str(draft), settings=settings) as llm:
        asked = {task: [prompt_ids(llm, one) for one in some] for task, some in prompts.items()}
        return score_open(llm, asked, options or ScoreOptions(), report or Silent())


def prompt_ids(llm: LLM, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        return llm.tokenizer.encode(prompt) if llm.template is None else llm.chat_ids(messages)
    if prompt and isinstance(prompt[0], Mapping):
        return llm.chat_ids(prompt)  # type: ignore[arg-type]
    return list(prompt)  # type: ignore[arg-type]


def score_open(
    llm: LLM, prompts: Mapping[str, Seq[list[int]]], options: ScoreOptions, report: Report
) -> Score:
    """The same of an LLM that is open with the draft, on token ids."""
    if llm.drafter not in ("eagle", "lm"):
        raise InvalidRequest(
            f"what is scored is a model or an EAGLE head that drafts alone, not {llm.drafter}", "draft"
        )
    asked = _fitting(llm, prompts, options, report)
    runs = sum(3 * len(some) + 3 * min(options.timed, len(some)) for some in asked.values())
    report.begin("score", runs * len(options.temperatures), "answers")
    llm.prepare(min(BATCH[llm.model.device.type], llm.settings.max_sequences))
    done, found = 0, []
    for task, some in asked.items():
        for temperature in options.temperatures:

            def tell(answers: int, task: str = task, temperature: float = temperature) -> None:
                nonlocal done
                done += answers
                report.update(done, f"{task}, T = {temperature:g}")

            found.append(_Scoring(llm, options, temperature, tell).of(task, some))
    report.end()
    born = certificate()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Score(
        options.depth, options.tree_nodes, options.max_tokens, tuple(found), born["machine"], today, born["commit"],
        born["versions"],
    )  # fmt: skip


def _fitting(
    llm: LLM, prompts: Mapping[str, Seq[list[int]]], options: ScoreOptions, report: Report
) -> dict[str, list[list[int]]]:
    """Those that leave room for an answer."""
    room = llm.engine.context - options.max_tokens
    asked = {task: [ids for ids in some if len(ids) <= room] for task, some in prompts.items()}
    asked = {task: some for task, some in asked.items() if some}
    if left := sum(map(len, prompts.values())) - sum(map(len, asked.values())):
        report.note(f"{left} prompts leave no room for {options.max_tokens} tokens and are left out")
    if not asked:
        raise InvalidRequest(
            f"no prompt leaves room for an answer of {options.max_tokens} tokens within {llm.engine.context}",
            "prompts",
        )
    return asked


# ------------------------------------------------------------------------------------------------ counting


def count_origins(origins: Iterable[str]) -> Acceptance:
    """What an answer's steps with a draft reached and accepted, by depth. A position counts where the answer has a
    token: what a draft holds beyond the answer's end was never written.
    """
    reached: list[int] = []
    accepted: list[int] = []
    steps = tokens = depth = 0

    def reach(held: bool) -> None:
        if depth == len(reached):
            reached.append(0)
            accepted.append(0)
        reached[depth] += 1
        accepted[depth] += held

    for origin in origins:
        if origin == "plain":
            continue
        tokens += 1
        if origin == "accepted":
            reach(True)
            depth += 1
            continue
        if (
            origin == "recovered"
        ):  # at a position for which the draft had a token; a bonus comes where it had none
            reach(False)
        steps, depth = steps + 1, 0
    return Acceptance(steps + (depth > 0), tokens, tuple(reached), tuple(accepted))


# ------------------------------------------------------------------------------------------------ answering


@dataclass(slots=True)
class _Scoring:
    """One task at one temperature."""

    llm: LLM
    options: ScoreOptions
    temperature: float
    tell: Callable[[int], None]
    chances: list[float] = field(default_factory=list)  # that the target gave the tokens of plain answers

    def of(self, task: str, prompts: list[list[int]]) -> TaskScore:
        o, name = self.options, self.llm.drafter
        chains = Speculation(drafter=name, depth=o.depth, nodes=o.depth)
        trees = Speculation(drafter=name, nodes=o.tree_nodes, depth=min(o.tree_nodes, 2 * o.depth))
        plain, _ = self._answers(prompts, PLAIN)
        chain, by_chain = self._answers(prompts, chains)
        tree, by_tree = self._answers(prompts, trees)
        ratios, same = self._timed(prompts[: o.timed], chains)
        differing = sum(a != b for others in (chain, tree) for a, b in zip(plain, others, strict=True))
        return TaskScore(
            task=task,
            temperature=self.temperature,
            prompts=len(prompts),
            chain=by_chain,
            tree=by_tree,
            expected_speedup=self._expected(by_chain) if o.timed else None,
            speedup=statistics.median(ratios) if ratios else None,
            compared=2 * sum(map(len, plain)),
            differing=differing + same.count(False),
            target_probability=statistics.fmean(self.chances),
        )

    def _answers(self, prompts: list[list[int]], how: Speculation) -> tuple[list[list[int]], Acceptance]:
        tokens, counts = [], Acceptance()
        size = min(BATCH[self.llm.model.device.type], self.llm.settings.max_sequences)
        for start in range(0, len(prompts), size):
            some = prompts[start : start + size]
            scored = 0 if how is PLAIN else None
            params = [replace(self._params(start + i, how), logprobs=scored) for i in range(len(some))]
            for out in self.llm.generate(some, params, owner=secrets.token_hex(8)):
                tokens.append(out.token_ids)
                self.chances += [math.exp(entry.logprob) for entry in out.logprobs or ()]
                counts += count_origins(out.stats.origins)
            self.tell(len(some))
        return tokens, counts

    def _params(self, number: int, how: Speculation) -> SamplingParams:
        o = self.options
        return SamplingParams(
            temperature=self.temperature, max_tokens=o.max_tokens, seed=o.seed + number, speculation=how
        )

    def _timed(self, prompts: list[list[int]], chains: Speculation) -> tuple[list[float], list[bool]]:
        """Tokens per second as the planner likes over plain ones', by prompt, and whether the tokens were the same.
        Chains of the fixed depth run beside them, so that the cost model knows what those cost.
        """
        ratios, same = [], []
        for number, ids in enumerate(prompts):
            methods = [PLAIN, Speculation(), chains]
            methods = methods[number % 3 :] + methods[: number % 3]  # the first rotates
            found = {how: self._alone(ids, self._params(number, how)) for how in methods}
            (tokens, plain), (others, auto) = found[PLAIN], found[Speculation()]
            same.append(tokens == others == found[chains][0])
            if plain and auto:
                ratios.append(auto / plain)
            self.tell(3)
        return ratios, same

    def _alone(self, ids: list[int], params: SamplingParams) -> tuple[list[int], float]:
        """An answer at batch 1, and its tokens per second after the first."""
        llm = self.llm
        received: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        # What one run wrote must not be there for the next to look up.
        request = llm.request(ids, params, owner=secrets.token_hex(8))
        [[sequence]] = llm.driver.submit([request], received.put)
        while True:
            event = received.get()
            if isinstance(event, BaseException):
                raise stopped(event) from event
            if event.finish_reason is not None:
                break
        seconds = sequence.ended - sequence.first
        return sequence.output, (len(sequence.output) - 1) / seconds if seconds > 0 else 0.0

    def _expected(self, counts: Acceptance) -> float:
        costs = self.llm.engine.planner.costs
        return best_speedup([rate or 0.0 for rate in counts.by_depth], 1, step_costs(costs, self.llm.drafter))


# --------------------------------------------------------------------------------------------------- cards


def make_card(
    target: Checkpoint,
    target_name: str,
    draft: Path,
    score: Score | None = None,
    trained_tokens: int | None = None,
    recipe: str | None = None,
    licence: str | None = None,
) -> Card:
    """Of the draft in this folder or file."""
    own = fingerprint(target)
    if own is None:
        raise BadCheckpoint(
            f"{target.path} runs through transformers; pairs are for families that Outrider runs"
        )
    return Card(
        VERSION,
        TargetFacts(target_name, own, count_parameters(target)),
        card_facts(draft, target),
        licence=licence,
        trained_tokens=trained_tokens,
        recipe=recipe,
        score=score,
    )
