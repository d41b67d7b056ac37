"""Proves identity, or shows where it fails: every prompt is answered plainly and by every other method, and the tokens
are compared.

Prompts go in batches of 1 to 32. The same batch is answered as the planner decides, with chains of one drafter, with
drafting switched off and on as the answers grow, with trees, and mixed: another method for each request of a step,
plain decoding among them. Adversarial drafters come last, beside all others. They run on the host, and so does every
request that shares their steps.

For `rejection`, which promises a distribution and not a path, samples of both are compared by a chi-square test.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from math import inf
from typing import Any, cast

import torch

from outrider.bench.adversaries import Adversary, adversaries
from outrider.bench.compare import differing, first_difference
from outrider.bench.speculation import DEPTH, asked_of
from outrider.control.planner import Planner
from outrider.draft.drafter import Drafter
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.output import Output
from outrider.types import NO_DRAFT_PLAN, Options, Plan, SamplingParams, Sequence, Speculation, Work

ALPHA = 1e-4  # a distribution is called different below this p-value
BATCHES = (32, 8, 32, 1, 32, 16, 32, 4, 32, 2)  # in turn; large ones more often, they have the tokens
TOGGLED, TREE = "toggled ", "tree "  # and a drafter
TREE_NODES = 12
SPELL = 5  # tokens for which a toggled request speculates, and then does not


@dataclass(slots=True)
class Divergence:
    method: str
    temperature: float
    prompt: int
    position: int
    plain: int
    speculative: int
    margin: float  # between the target's two likeliest tokens there, in log-probability


@dataclass(slots=True)
class Audit:
    tokens: Counter[tuple[str, float]] = field(default_factory=Counter)  # compared, by method and temperature
    by_batch: Counter[int] = field(default_factory=Counter)
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
            "by_way_and_temperature": {f"{w} T={t:g}": n for (w, t), n in sorted(self.tokens.items())},
            "by_batch": {str(batch): n for batch, n in sorted(self.by_batch.items())},
            "drafted": dict(self.drafted),
            "accepted": dict(self.accepted),
            "divergences": [asdict(d) for d in self.divergences],
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is compared: every prompt once, or prompts again and again until one of these is reached."""

    tokens: int | None = None
    seconds: float | None = None

    @property
    def repeats(self) -> bool:
        return self.tokens is not None or self.seconds is not None

    def share(self, compared: int, seconds: float, once: float) -> float:
        """Of the audit that is done; `once` is the share of prompts."""
        if not self.repeats:
            return once
        return min(1.0, max(compared / (self.tokens or inf), seconds / (self.seconds or inf)))

    def reached(self, compared: int, seconds: float) -> bool:
        return self.repeats and self.share(compared, seconds, 0.0) >= 1.0


class Toggling:
    """The engine's planner, but requests with some seeds speculate for a few tokens, then do not, and so on."""

    def __init__(self, inner: Planner) -> None:
        self.inner = inner
        self.seeds: set[int] = set()

    def plan(self, work: Seq[Work], options: Options) -> Plan:
        return self._toggled(work, self.inner.plan(work, options))

    def kept(self, work: Seq[Work], members: Options) -> Plan | None:
        plan = self.inner.kept(work, members)
        return None if plan is None else self._toggled(work, plan)

    def _toggled(self, work: Seq[Work], plan: Plan) -> Plan:
        """The plan as it is, without the drafts of sequences that rest."""
        draft_plans = (
            NO_DRAFT_PLAN if self._rests(w.sequence) else draft_plan
            for w, draft_plan in zip(work, plan.draft_plans, strict=True)
        )
        return replace(plan, draft_plans=tuple(draft_plans))

    def _rests(self, sequence: Sequence) -> bool:
        return sequence.request.seed in self.seeds and bool(len(sequence.output) // SPELL % 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def audit(
    llm: LLM,
    prompts: list[list[int]],
    hostile: bool,
    temperatures: list[float],
    params: SamplingParams,
    extent: Extent = Extent(),
    tell: Callable[[Audit, float], None] = lambda *_: None,
    reference: LLM | None = None,
) -> Audit:
    """Compares as much as `extent` says. `tell` is called with what was found so far and the share that is done.

    Plain answers come from `reference`, by default the audited engine itself.
    """
    found, begin = Audit(), time.perf_counter()
    answers: dict[tuple[int, ...], list[int]] = {}
    config, engine = llm.model.config, llm.engine
    enemies = adversaries(config.vocab, config.eos_ids, answers) if hostile else {}
    drafters = [name for name in engine.drafters.names if name != "none"]
    toggling, asked = Toggling(engine.planner), 0
    with borrowed(engine, enemies, cast(Planner, toggling)):
        for numbers, temperature, seed in _batches(len(prompts), temperatures, extent.repeats):
            each = [replace(params, temperature=temperature, seed=(params.seed or 0) + seed + i)
                    for i in range(len(numbers))]  # fmt: skip
            group = Group(
                llm, found, toggling, numbers, [prompts[n] for n in numbers], each, reference or llm
            )
            for part in group.audit(drafters, enemies, answers):
                found.seconds = time.perf_counter() - begin
                once = (asked + part * len(numbers)) / (len(prompts) * len(temperatures))
                tell(found, extent.share(found.compared, found.seconds, once))
                if extent.reached(found.compared, found.seconds):
                    return found
            asked += len(numbers)
    return found


@contextmanager
def borrowed(engine: Engine, more: Mapping[str, Drafter], planner: Planner) -> Iterator[None]:
    """An idle engine with more drafters and this planner, for a while."""
    own, engine.planner = engine.planner, planner
    engine.drafters.add(more)
    try:
        yield
    finally:
        engine.drafters.remove(more)
        engine.planner = own


def _batches(prompts: int, temperatures: list[float], repeat: bool) -> Iterator[tuple[list[int], float, int]]:
    """Prompts of each batch, its temperature, and where its seeds begin. Without end if asked: prompts come again,
    with other seeds.
    """
    at = 0
    for number in count():
        size = BATCHES[number % len(BATCHES)]
        if not repeat:
            size = min(size, prompts - at)
        for temperature in temperatures:
            yield [(at + i) % prompts for i in range(size)], temperature, at
        at += size
        if not repeat and at >= prompts:
            return


class Group:
    """A batch of prompts: its plain answers, and what others make of them."""

    def __init__(
        self, llm: LLM, found: Audit, toggling: Toggling, numbers: list[int], prompts: list[list[int]],
        params: list[SamplingParams], reference: LLM,
    ) -> None:  # fmt: skip
        self.llm, self.found, self.toggling, self.numbers = llm, found, toggling, numbers
        self.prompts, self.params, self.reference = prompts, params, reference
        self.plain = self._run(["plain"] * len(numbers), reference)

    def audit(
        self, drafters: list[str], enemies: dict[str, Adversary], answers: dict[tuple[int, ...], list[int]]
    ) -> Iterator[float]:
        """Gives the share that is done after every comparison."""
        plain = [] if self.reference is self.llm else ["plain"]
        chains = [*plain, "auto", *(kind + name for kind in ("", TOGGLED) for name in drafters)]
        trees = [TREE + name for name in drafters]
        among_us = [[method] * len(self.numbers) for method in (*chains, *trees)] + self._mixed(
            list(dict.fromkeys(["plain", *chains]))
        )
        with_enemies = self._mixed(list(dict.fromkeys(["plain", *enemies, *trees, *chains])))
        count = len(among_us) + len(with_enemies)
        for number, methods in enumerate(among_us + with_enemies):
            if number == len(among_us):
                answers.update((tuple(o.prompt_ids), o.token_ids) for o in self.plain)
            self._compare(methods)
            yield (number + 1) / count
        answers.clear()

    def _mixed(self, methods: list[str]) -> list[list[str]]:
        """Another method for each request; a small batch is repeated until every method had its turn."""
        size = len(self.numbers)
        return [
            [methods[(start + i) % len(methods)] for i in range(size)]
            for start in range(0, len(methods), size)
        ]

    def _compare(self, methods: list[str]) -> None:
        for i, (method, other) in enumerate(zip(methods, self._run(methods, self.llm), strict=True)):
            self._compare_one(method, i, self.plain[i], other)

    def _run(self, methods: list[str], llm: LLM) -> list[Output]:
        asked = [
            replace(p, speculation=how(p, method)) for p, method in zip(self.params, methods, strict=True)
        ]
        toggled = [p.seed for p, method in zip(asked, methods, strict=True) if method.startswith(TOGGLED)]
        self.toggling.seeds = {seed for seed in toggled if seed is not None}
        return llm.generate(self.prompts, asked)

    def _compare_one(self, method: str, i: int, plain: Output, other: Output) -> None:
        a, b = plain.token_ids, other.token_ids
        found, temperature = self.found, self.params[i].temperature
        found.tokens[method, temperature] += max(len(a), len(b))
        found.by_batch[len(self.numbers)] += max(len(a), len(b))
        found.drafted[method] += other.stats.drafted
        found.accepted[method] += other.stats.accepted
        at = first_difference(a, b)
        if at is None:
            return
        found.differing += differing(a, b)
        said = [(tokens[at] if at < len(tokens) else -1) for tokens in (a, b)]
        apart = margin(self.llm, plain.prompt_ids + a[:at])
        found.divergences.append(
            Divergence(method, temperature, self.numbers[i], at, said[0], said[1], apart)
        )


def how(params: SamplingParams, method: str) -> Speculation:
    """What a method asks of the planner and the drafters."""
    asked = params.speculation
    if method == "plain":
        return Speculation(drafter="none")
    if method == "auto":
        return asked
    if method.startswith(TREE):
        return replace(asked, drafter=method.removeprefix(TREE), depth=DEPTH, nodes=TREE_NODES, tree=None)
    return asked_of(method.removeprefix(TOGGLED), asked)


def margin(llm: LLM, text: list[int]) -> float:
    """Between the two likeliest tokens after this text, in log-probability."""
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
        received: Counter[tuple[int, ...]] = Counter()
        for start in range(0, draws, 64):
            one = replace(
                params,
                n=min(64, draws - start),
                seed=(params.seed or 0) + seed * 10**6 + start,
                speculation=how,
                max_tokens=tokens + 2,
            )
            for choice in llm.generate([prompt], one)[0].choices:
                received[tuple(choice.token_ids[:tokens])] += 1
        samples.append(received)
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
