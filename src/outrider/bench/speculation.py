"""Measures what guessing buys: the same prompts plain and guessed in turn, by kind of task. Ratios of whole
answers.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine.llm import LLM
from outrider.types import SamplingParams, Speculation


@dataclass(slots=True)
class Timed:
    tokens: list[int]
    seconds: float  # of decoding: the prompt was read before
    steps: int


def compare(
    llm: LLM, tasks: dict[str, list[list[int]]], params: SamplingParams, tell: Callable[[str], None]
) -> dict[str, Any]:
    """By task: tokens a step, decode rate guessed over plain, and whether the tokens were the same."""
    report: dict[str, Any] = {}
    plain = replace(params, speculation=Speculation(drafter="none"))
    _answer(
        llm, next(iter(tasks.values()))[0], replace(params, max_tokens=16)
    )  # the first steps pay for set-up
    for task, prompts in tasks.items():
        pairs: list[tuple[Timed, Timed]] = []
        for number, prompt in enumerate(prompts):
            if number % 2:
                pairs.append((_answer(llm, prompt, plain), _answer(llm, prompt, params)))
            else:
                pairs.append((_answer(llm, prompt, params), _answer(llm, prompt, plain))[::-1])
        report[task] = _summary(pairs)
        tell(
            f"{task}: {report[task]['speed_up']:.2f}x at {report[task]['tokens_per_step']:.2f} tokens a step"
        )
    return report


def _summary(pairs: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    ratios = [plain.seconds / guessed.seconds for plain, guessed in pairs]
    return {
        "prompts": len(pairs),
        "tokens": sum(len(guessed.tokens) for _, guessed in pairs),
        "tokens_per_step": sum(len(g.tokens) for _, g in pairs) / max(sum(g.steps for _, g in pairs), 1),
        "speed_up": sum(p.seconds for p, _ in pairs) / sum(g.seconds for _, g in pairs),
        "median_speed_up": statistics.median(ratios),
        "worst_speed_up": min(ratios),
        "same_tokens": all(plain.tokens == guessed.tokens for plain, guessed in pairs),
    }


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> Timed:
    # An owner of its own: what one run wrote must not be there for the other to look up.
    owner = secrets.token_hex(8)
    ready = replace(params, n=1, max_tokens=1, min_tokens=0, speculation=Speculation(drafter="none"))
    llm.generate([prompt], ready, owner=owner)
    begin = time.perf_counter()
    out = llm.generate([prompt], params, owner=owner)[0]
    return Timed(out.token_ids, time.perf_counter() - begin, out.stats.steps)
