"""Compares a candidate draft with the one in use on held-out conversations, with the verifier that serves and in a
separate engine, so that no request waits for it.

Both drafts answer the same prompts with the same seeds. The tokens are the same, because output does not depend on the
draft; what differs is how many passes they take. So the drafts are compared conversation by conversation, and the
uncertainty is that of the mean difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.distill.answers import Answers
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.token_shards import Conversation, shard_folders
from outrider.types import SamplingParams, Speculation

DEPTH = 4  # of chains, fixed for both: what the planner would choose is another question
LIMIT = 64  # conversations
MAX_TOKENS = 128  # of an answer
FEWEST = 4  # conversations, or nothing can be said of the uncertainty
HOW = Speculation.of({"depth": DEPTH})
SURE = 2.0  # standard errors that a gain must exceed


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per step of both, means over conversations; the difference, and its standard error."""

    conversations: int
    tokens: int
    running: float
    candidate: float
    gain: float
    error: float

    @property
    def better(self) -> bool:
        """By more than its uncertainty."""
        return self.gain > SURE * self.error

    def __str__(self) -> str:
        return (
            f"tokens per step {self.running:.3f} -> {self.candidate:.3f}, a difference of {self.gain:+.3f} with a "
            f"standard error of {self.error:.3f} over {self.conversations} conversations"
        )


def traffic_folders(folder: Path) -> list[Path]:
    """Folders of shards in what a server kept, one a key; or the folder itself, if it holds shards."""
    folders = shard_folders(folder)
    if not folders:
        raise InvalidRequest(f"{folder} holds no kept traffic: no shards, nor folders of them", "traffic")
    return folders


def held_conversations(folders: Sequence[Path], limit: int = LIMIT) -> list[Conversation]:
    """Conversations that no draft is trained on; raises if they are too few to compare drafts with."""
    answers = Answers(folders)
    held = [answers[row] for row in answers.rows(held_out=True)][:limit]
    if len(held) < FEWEST:
        raise InvalidRequest(
            f"{len(held)} of {len(answers)} conversations are held out, and fewer than {FEWEST} say nothing: "
            "keep more traffic first",
            "traffic",
        )
    return held


def compare(
    target: str, running: Path, candidate: Path, folders: Sequence[Path], limit: int = LIMIT, **options: Any
) -> Comparison:
    """`options` are the engine's. The two drafts must be of one shape, as for a swap."""
    held = held_conversations(folders, limit)
    with LLM(target, draft=str(running), **options) as llm:
        first, before = _answer(llm, held)
        llm.live_draft.swap(llm.driver, candidate)
        second, after = _answer(llm, held)
    if first != second:
        raise OutriderError("the same requests gave other tokens with another draft: report this as a bug")
    gains = [b - a for a, b in zip(before, after, strict=True)]
    return Comparison(
        len(held),
        sum(map(len, first)),
        statistics.fmean(before),
        statistics.fmean(after),
        statistics.fmean(gains),
        statistics.stdev(gains) / math.sqrt(len(gains)),
    )


def _answer(llm: LLM, held: Sequence[Conversation]) -> tuple[list[list[int]], list[float]]:
    """Tokens of every answer, and how many a step brought of each."""
    prompts, params = [], []
    for number, one in enumerate(held):
        written = one.answered.argmax()  # the first token that the target wrote
        prompts.append(one.ids[:written].tolist() or one.ids[:1].tolist())
        length = min(MAX_TOKENS, max(2, int(one.answered[written:].sum())))
        params.append(
            SamplingParams(
                temperature=one.temperature, max_tokens=length, seed=number, ignore_eos=True, speculation=HOW
            )
        )
    outputs = [output.choices[0] for output in llm.generate(prompts, params)]
    return [one.token_ids for one in outputs], [one.stats.tokens_per_step for one in outputs]
