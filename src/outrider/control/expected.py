"""What drafting would bring, from numbers: expected tokens of a step over its time. No torch, no model.

The planner decides by the same law at every step (planner.py); here the rates and costs are settled beforehand. Advice,
what-if and the score of a draft all ask here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from outrider.control.costs import CapturedCosts, CostModel, EagerCosts
from outrider.types import CapturedShape, TreeShape

Outcome = tuple[int, int]  # how deep a draft was, and how many of its tokens were accepted
SAMPLES = 200  # drawn for an interval
SHARE = 0.9  # of them inside it
TAIL = 0.99
NEVER = 1e-8  # a share of steps


class StepCosts(Protocol):
    def plain(self, batch: int) -> float:
        """Seconds of a plain step."""
        ...

    def step(self, batch: int, depth: int, drafted: int) -> float:
        """Seconds of a step in which drafts of up to `depth` were asked for and `drafted` rows were drafted."""
        ...


@dataclass(frozen=True, slots=True)
class EagerChains:
    """Eager steps, which have a row for each drafted token. `rows` knows their seconds, `draft` those of drafting."""

    rows: EagerCosts
    draft: Callable[[int, int], float]  # seconds by batch and depth
    # The same by batch, where it was measured: rows of several sequences take longer than rows of one.
    by_batch: Mapping[int, EagerCosts] = field(default_factory=dict)

    def plain(self, batch: int) -> float:
        return self.by_batch.get(batch, self.rows).step(batch)

    def step(self, batch: int, depth: int, drafted: int) -> float:
        return self.by_batch.get(batch, self.rows).step(batch + drafted, batch) + self.draft(batch, depth)


@dataclass(frozen=True, slots=True)
class CapturedChains:
    """Captured steps: chains of a fixed depth for a fixed number of sequences, measured as a whole."""

    costs: CapturedCosts
    drafter: str

    def plain(self, batch: int) -> float:
        seconds = self.costs.plain(self._size(batch))
        assert seconds is not None
        return seconds

    def step(self, batch: int, depth: int, drafted: int) -> float:
        shape = CapturedShape(self.drafter, TreeShape(depth, depth), self._size(batch))
        return self.plain(batch) * self.costs.ratio(shape)

    def depths(self, batch: int) -> list[int]:
        """Depths of the chains that were measured with this batch."""
        return self.costs.depths(self.drafter, self._size(batch))

    def _size(self, batch: int) -> int:
        sizes = self.costs.sizes(self.drafter)
        return next((size for size in sizes if size >= batch), sizes[-1])


def step_costs(costs: CostModel, drafter: str) -> StepCosts:
    """As the engine knows them by now: of captured steps where it has any of this drafter, else by rows."""
    if costs.captured.sizes(drafter):
        return CapturedChains(costs.captured, drafter)
    return EagerChains(costs.eager, lambda batch, depth: costs.eager.drafting({drafter: depth}))


@dataclass(frozen=True)
class Drafts:
    """What the drafts of a step are like: how many tokens long, how often, and what comes of them."""

    depth: int  # asked for
    lengths: Mapping[int, float]  # share of steps by tokens drafted
    tokens: float  # expected of a step and sequence, its own token included

    @classmethod
    def of_rates(cls, rates: Seq[float], depth: int) -> Drafts:
        """Chains of this depth; deeper tokens than there are rates have the last."""
        each = [rates[min(k, len(rates) - 1)] for k in range(depth)]
        return cls(depth, {depth: 1.0}, 1 + sum(accumulate(each, mul)))

    @classmethod
    def of_outcomes(cls, outcomes: Seq[Outcome], depth: int) -> Drafts:
        """As measured, cut to this depth."""
        count = Counter(min(drafted, depth) for drafted, _ in outcomes)
        lengths = {length: n / len(outcomes) for length, n in sorted(count.items())}
        accepted = sum(min(one, depth) for _, one in outcomes) / len(outcomes)
        return cls(depth, lengths, 1 + accepted)

    def rows(self, batch: int) -> list[tuple[int, float]]:
        """Draft rows of a step, and how likely each number is; every sequence is drafted for independently."""
        total: Mapping[int, float] = {0: 1.0}
        for bit in f"{batch:b}":
            total = _sums(total, total)
            total = _sums(total, self.lengths) if bit == "1" else total
        return sorted(total.items())


def _sums(a: Mapping[int, float], b: Mapping[int, float]) -> Mapping[int, float]:
    """Of two independent numbers, with their shares; what hardly ever comes up is left out."""
    found: dict[int, float] = defaultdict(float)
    for x, p in a.items():
        for y, q in b.items():
            found[x + y] += p * q
    return {n: share for n, share in found.items() if share > NEVER}


@dataclass(frozen=True, slots=True)
class Prediction:
    batch: int
    depth: int
    tokens: float  # of a step and sequence
    seconds: float  # of a step, on average
    plain_seconds: float
    tail_seconds: float  # of the step that 99 % are not longer than

    @property
    def speedup(self) -> float:
        return self.tokens * self.plain_seconds / self.seconds

    @property
    def slowdown(self) -> float:
        """The 99th percentile of steps against a plain one."""
        return self.tail_seconds / self.plain_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.tokens / self.seconds

    @property
    def break_even(self) -> float | None:
        """The acceptance rate, equal at every depth, at which a step earns what it costs; None: no rate does."""
        return rate_for(self.seconds / self.plain_seconds, self.depth)


def predict(drafts: Drafts, batch: int, costs: StepCosts) -> Prediction:
    times = sorted((costs.step(batch, drafts.depth, rows), share) for rows, share in drafts.rows(batch))
    seconds = sum(time * share for time, share in times)
    shares = accumulate(share for _, share in times)
    tail = next((time for (time, _), upto in zip(times, shares, strict=True) if upto >= TAIL), times[-1][0])
    return Prediction(batch, drafts.depth, drafts.tokens, seconds, costs.plain(batch), tail)


def best_speedup(rates: Seq[float], batch: int, costs: StepCosts) -> float:
    """Of chains as deep as there are rates at most, and of none at all."""
    found = (predict(Drafts.of_rates(rates, 1 + d), batch, costs).speedup for d in range(len(rates)))
    return max([1.0, *found])


def rate_for(tokens: float, depth: int) -> float | None:
    """The acceptance rate, equal at every depth, of chains that give `tokens` a step; None: no rate gives as many."""
    if tokens > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if Drafts.of_rates([middle], depth).tokens < tokens:
            low = middle
        else:
            high = middle
    return high if high > 1e-6 else 0.0


def interval(
    groups: Seq[Seq[Outcome]], depth: int, batch: int, costs: StepCosts, noise: float
) -> tuple[float, float]:
    """Where the speed-up lies in 90 % of samples, drawn over from the prompts measured: another day's prompts are
    others. From steps, where there is one prompt. `noise` is how well the ratio of times is known.
    """
    units = groups if len(groups) > 1 else [[one] for one in groups[0]]
    chance, found = random.Random(0), []
    for _ in range(SAMPLES):
        drawn = [one for unit in chance.choices(units, k=len(units)) for one in unit]
        speedup = predict(Drafts.of_outcomes(drawn, depth), batch, costs).speedup
        found.append(speedup * max(0.1, chance.gauss(1.0, noise)))
    found.sort()
    outside = round(SAMPLES * (1 - SHARE) / 2)
    return found[outside], found[-1 - outside]
