"""Sums up the runs of one method: speed against plain decoding and its uncertainty, latency, acceptance by depth, time
by stage, identity.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from outrider.bench.answering import Answers
from outrider.bench.peers import Run
from outrider.bench.spread import spread_of_rounds
from outrider.types import StepRecord

STAGES = ("plan", "draft", "target", "verify")
PAIRS = 5  # runs beside plain ones before a ratio is known at all
MEDIAN_ERROR = math.sqrt(math.pi / 2)  # of a median against a mean's
NOISY = 1.35  # ratio of times that should be equal: above it, other programs disturb

ALIKE = 10  # steps with no draft before they are compared

Rounds = dict[int, list[float]]  # values by the number of the round
Outcome = tuple[int, int]  # how deep a draft was, and how many of its tokens were accepted


@dataclass(slots=True)
class Tally:
    """Of one method. A group is a batch of prompts; it is answered again in every round."""

    rates: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by group, a round each
    totals: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds, likewise
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    differing: int = 0
    longest: float = 0.0
    making: float = 0.0
    firsts: Rounds = field(default_factory=lambda: defaultdict(list))
    gaps: Rounds = field(default_factory=lambda: defaultdict(list))
    paces: Rounds = field(default_factory=lambda: defaultdict(list))  # seconds a token, of each answer
    reasons: Counter[str] = field(default_factory=Counter)  # of the planner's decisions, by kind
    # Seconds, summed over sequences that waited for a token: plain as the engine has it, and taken.
    gauged: list[float] = field(default_factory=lambda: [0.0, 0.0])
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    decoding_steps: int = 0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of those steps
    full_tokens: int = 0  # of decode steps in which no request had ended
    full_seconds: float = 0.0
    by_rows: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # of decode steps

    def add(self, group: int, done: Answers, plain: Run) -> None:
        self.rates[group].append(done.rate)
        self.totals[group].append(done.run.total_s)
        self.tokens += done.tokens
        self.steps += done.steps
        self.drafted += done.drafted
        self.accepted += done.accepted
        self.differing += done.run.differing(plain)
        self.longest, self.making = max(self.longest, done.longest), self.making + done.making
        number = len(self.rates[group])
        self.firsts[number] += done.firsts
        self.gaps[number] += done.gaps
        self.paces[number] += [seconds / tokens for tokens, seconds in done.own if tokens]
        for step in done.decoding:
            self.by_rows[step.rows].append(step.seconds)
            self.full_tokens, self.full_seconds = (
                self.full_tokens + step.tokens,
                self.full_seconds + step.seconds,
            )
        for record in done.records:
            self._add_step(record)

    def _add_step(self, record: StepRecord) -> None:
        self.outcomes.update((o.deepest, o.accepted) for o in record.outcomes if o.drafted)
        self.reasons.update(reason.kind for reason in record.reasons)
        if record.plain_s:
            self.gauged[0] += record.answering * record.plain_s
            self.gauged[1] += record.answering * record.total_s
        if record.decodes_only and record.sequences:
            self.decoding_steps += record.passes
            self.stages["total"] += record.total_s
            for stage in STAGES:
                self.stages[stage] += getattr(record, f"{stage}_s")

    @property
    def usual_rows(self) -> int | None:
        """Of the commonest decode step."""
        if not self.by_rows:
            return None
        return max(self.by_rows, key=lambda rows: (len(self.by_rows[rows]), rows))

    def ratios(self, plain: Tally) -> dict[int, list[float]]:
        """To plain decoding, by group, a round each."""
        return _divided(self.rates, plain.rates)

    def total_ratios(self, plain: Tally) -> dict[int, list[float]]:
        """Of the time until all answers have ended, prompts included."""
        return _divided(plain.totals, self.totals)

    def within(self, plain: Tally) -> float | None:
        return within(self.ratios(plain))

    @property
    def full_rate(self) -> float:
        """Tokens per second while no request has ended, as where new requests take the place of old ones."""
        return self.full_tokens / self.full_seconds if self.full_seconds else 0.0

    def figures(self, plain: Tally) -> dict[str, Any]:
        ratios = self.ratios(plain)
        steps = self.decoding_steps or 1
        stages = {stage: 1e3 * self.stages[stage] / steps for stage in STAGES}
        total = 1e3 * self.stages["total"] / steps
        return {
            "tok_s": statistics.median(rate for own in self.rates.values() for rate in own),
            "ratio": speedup(ratios),
            "ratio_within": within(ratios) if self is not plain else 0.0,
            "total_ratio": speedup(self.total_ratios(plain)),
            "full_batch_ratio": self.full_rate / plain.full_rate if plain.full_rate else None,
            "gauge": self.gauged[0] / self.gauged[1] if self.gauged[1] else None,
            "worst": min(map(statistics.median, ratios.values())),
            "tokens_per_step": self.tokens / max(1, self.steps),
            "drafted": self.drafted,
            "held": self.accepted / self.drafted if self.drafted else None,
            "acceptance": acceptance_by_depth(self.outcomes),
            "ttft_ms": _milliseconds(self.firsts),
            "itl_ms": _milliseconds(self.gaps),
            "tpot_ms": _milliseconds(self.paces),
            "reasons": dict(self.reasons.most_common()),
            "stages_ms": {**stages, "other": total - sum(stages.values()), "total": total},
            "compared": self.tokens,
            "differing": self.differing,
            "longest_step_ms": 1e3 * self.longest,
            "making_graphs_s": self.making,
        }


def _divided(these: dict[int, list[float]], those: dict[int, list[float]]) -> dict[int, list[float]]:
    return {n: [a / b for a, b in zip(these[n], those[n], strict=True)] for n in these}


def _milliseconds(rounds: Rounds) -> dict[str, Any] | None:
    return spread_of_rounds([1e3 * seconds for seconds in own] for own in rounds.values())


def noise(tallies: Iterable[Tally], batch: int) -> float:
    """The 90th percentile of the times of steps without drafts over the 10th, of all methods: the same work, so it
    should be close to 1. So should the times to the first token: a method that drafts less cannot be later because of
    its drafts.
    """
    tallies = list(tallies)
    reading = [
        (tally.drafted, statistics.median(chain.from_iterable(tally.firsts.values())))
        for tally in tallies
        if tally.firsts
    ]
    held_up = max((a / b for few, a in reading for many, b in reading if few <= many), default=1.0)
    alike = [seconds for tally in tallies for seconds in tally.by_rows.get(batch, ())]
    if len(alike) < ALIKE:
        return held_up
    fast, slow = np.percentile(alike, [10, 90])
    return max(float(slow / fast), held_up)


def speedup(ratios: Mapping[int, Seq[float]]) -> float:
    """Over groups, the geometric mean; of a group, the median of its rounds."""
    return statistics.geometric_mean(map(statistics.median, ratios.values()))


def within(ratios: Mapping[int, Seq[float]]) -> float | None:
    """How far off the speed-up may be, as a share of it: 95 % of the time no further. From how much the rounds of a
    group differ; None while they are too few to say.
    """
    pairs = sum(map(len, ratios.values()))
    free = pairs - len(ratios)
    if pairs < PAIRS or free < 1:
        return None
    squares = 0.0
    for own in ratios.values():
        middle = statistics.fmean(map(math.log, own))
        squares += sum((math.log(one) - middle) ** 2 for one in own)
    # The 97.5th percentile of Student's t, from 2 on within 3 %.
    student = 1.96 + 2.37 / free + 2.82 / free**2 + 2.6 / free**3
    return student * MEDIAN_ERROR * math.sqrt(squares / free / pairs)


def acceptance_by_depth(outcomes: Mapping[Outcome, int] | Iterable[Outcome]) -> list[dict[str, float]]:
    """Of draft tokens whose predecessors were accepted: how often, and of how many."""
    counted, found = Counter(outcomes), []
    for depth in range(max((drafted for drafted, _ in counted), default=0)):
        of = sum(n for (drafted, accepted), n in counted.items() if drafted > depth and accepted >= depth)
        right = sum(n for (drafted, accepted), n in counted.items() if drafted > depth and accepted > depth)
        if of:
            found.append({"depth": depth + 1, "rate": right / of, "of": of})
    return found
