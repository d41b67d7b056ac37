"""Proves identity, or shows where it fails: every prompt plain and with every drafter, token against token.

All runs of a prompt share their steps with each other and with plain decoding, so what is compared is also
the mixed batch, not each run in peace. For `rejection`, which promises a distribution and not a path,
samples of both are compared by a chi-square test.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

import torch

from outrider.bench.adversaries import adversaries
from outrider.engine.llm import LLM, Output
from outrider.types import SamplingParams, Speculation

ALPHA = 1e-4  # a distribution is called different below this p-value


@dataclass(slots=True)
class Divergence:
    drafter: str
    temperature: float
    prompt: int
    position: int
    plain: int
    guessed: int
    margin: float  # between the target's two likeliest tokens there, in log-probability


@dataclass(slots=True)
class Audit:
    tokens: Counter[tuple[str, float]] = field(
        default_factory=Counter
    )  # compared, by drafter and temperature
    differing: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        return sum(self.tokens.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "differing": self.differing,
            "by_drafter_and_temperature": {f"{d} T={t:g}": n for (d, t), n in sorted(self.tokens.items())},
            "drafted": dict(self.drafted),
            "accepted": dict(self.accepted),
            "divergences": [asdict(d) for d in self.divergences],
            "seconds": round(self.seconds, 1),
        }


def audit(
    llm: LLM,
    prompts: list[list[int]],
    drafters: list[str],
    temperatures: list[float],
    params: SamplingParams,
    target: int | None = None,
    tell: Callable[[Audit], None] = lambda _: None,
) -> Audit:
    """Compare until every prompt was run once or, with `target`, until that many tokens were compared."""
    found = Audit()
    answers: dict[tuple[int, ...], list[int]] = {}
    hostile = adversaries(llm.model.config.vocab, llm.model.config.eos_ids, answers)
    engine = llm.engine
    engine.use_drafters(
        {**engine.drafters, **{n: a for n, a in hostile.items() if n in drafters}}, engine.planner
    )
    begin = time.perf_counter()
    for number, temperature, seed in _rounds(len(prompts), temperatures, repeat=target is not None):
        one = _with(params, temperature, seed + (params.seed or 0))
        prompt = prompts[number]
        if "oracle" in drafters or "wrong" in drafters:
            answers[tuple(prompt)] = llm.generate([prompt], _off(one))[0].token_ids
        sets = [_off(one), *(_by(one, drafter) for drafter in drafters)]
        plain, *others = llm.generate([prompt] * len(sets), sets)
        for drafter, other in zip(drafters, others, strict=True):
            _compare(llm, found, drafter, temperature, number, plain, other)
        answers.pop(tuple(prompt), None)
        found.seconds = time.perf_counter() - begin
        tell(found)
        if target is not None and found.compared >= target:
            break
    return found


def _rounds(prompts: int, temperatures: list[float], repeat: bool) -> Iterator[tuple[int, float, int]]:
    """Prompt, temperature and seed of each run, temperatures in turn; without end if asked, with fresh
    seeds.
    """
    for round_ in count() if repeat else range(1):
        for number in range(prompts):
            for temperature in temperatures:
                yield number, temperature, 1000 * round_ + number


def _with(params: SamplingParams, temperature: float, seed: int) -> SamplingParams:
    return replace(params, temperature=temperature, seed=seed)


def _off(params: SamplingParams) -> SamplingParams:
    return replace(params, speculation=Speculation(drafter="none"))


def _by(params: SamplingParams, drafter: str) -> SamplingParams:
    return replace(params, speculation=replace(params.speculation, drafter=drafter))


def _compare(
    llm: LLM, found: Audit, drafter: str, temperature: float, number: int, plain: Output, other: Output
) -> None:
    a, b = plain.token_ids, other.token_ids
    found.tokens[drafter, temperature] += max(len(a), len(b))
    found.drafted[drafter] += other.stats.drafted
    found.accepted[drafter] += other.stats.accepted
    if a == b:
        return
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    found.differing += max(len(a), len(b)) - at
    said = [(tokens[at] if at < len(tokens) else -1) for tokens in (a, b)]
    found.divergences.append(
        Divergence(
            drafter, temperature, number, at, said[0], said[1], _margin(llm, plain.prompt_ids + a[:at])
        )
    )


def _margin(llm: LLM, text: list[int]) -> float:
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=2, speculation=Speculation(drafter="none"))
    logprobs = llm.generate([text], ask)[0].logprobs
    assert logprobs is not None
    (_, first), (_, second) = logprobs[0].alternatives
    return first - second


def same_distribution(
    llm: LLM, prompt: list[int], params: SamplingParams, drafter: str, draws: int, tokens: int = 2
) -> dict[str, Any]:
    """Chi-square of two samples of the first tokens: plain decoding's, and rejection's with this drafter."""
    samples: list[Counter[tuple[int, ...]]] = []
    for seed, how in ((1, Speculation(drafter="none")), (2, replace(params.speculation, drafter=drafter))):
        heard: Counter[tuple[int, ...]] = Counter()
        for start in range(0, draws, 64):
            one = replace(
                params,
                n=min(64, draws - start),
                seed=(params.seed or 0) + seed * 10**6 + start,
                speculation=how,
                max_tokens=tokens + 2,
            )
            for choice in llm.generate([prompt], one)[0].choices:
                heard[tuple(choice.token_ids[:tokens])] += 1
        samples.append(heard)
    statistic, freedom = _two_samples(samples[0], samples[1])
    p = float(
        torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double())
    )
    return {"draws": draws, "chi_square": statistic, "freedom": freedom, "p_value": p, "holds": p >= ALPHA}


def _two_samples(a: Counter[Any], b: Counter[Any]) -> tuple[float, int]:
    """Pearson's statistic for equal sample sizes; what was seen fewer than ten times in all is one bin."""
    bins = {key: (a[key], b[key]) for key in {*a, *b} if a[key] + b[key] >= 10}
    rest = (
        sum(a.values()) - sum(x for x, _ in bins.values()),
        sum(b.values()) - sum(y for _, y in bins.values()),
    )
    pairs = [*bins.values(), *([rest] if sum(rest) else [])]
    return sum((x - y) ** 2 / (x + y) for x, y in pairs), max(len(pairs) - 1, 1)
