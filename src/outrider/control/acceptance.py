"""How often drafts are accepted: one estimate for each sequence and drafter, whatever the kind of step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt
from typing import Any

from outrider.control.trees import TreeShape, choice_rate, node_ranks, tree_nodes
from outrider.types import Sequence

# Before a drafter was ever tried: high enough that it is tried, lower where sampling is hotter.
FIRST, NEXT, PER_TEMPERATURE = 0.7, 0.8, 0.25
PRIOR_WEIGHT = 4.0  # steps that a new estimate's starting point counts for
SEQUENCE_MEMORY, DRAFTER_MEMORY = 12, 200  # steps: a text changes its nature, a drafter hardly does
RECOVERY = 0.02  # share of the way back to NEXT after a draft that was accepted as far as it went
MIN_RATE = 0.02  # below, it makes no difference how seldom a draft is accepted
BANDS_PER_DEGREE = 2  # of temperature, each with a prior of its own


@dataclass(slots=True)
class AcceptanceRate:
    """Of the first token of a draft, and of each next one after an accepted one."""

    first: float
    next: float
    weight: float = PRIOR_WEIGHT  # in steps

    def observe(self, drafted: int, accepted: int, memory: float) -> None:
        """A draft of this depth. None at all (0) where one was wanted counts as a rejected one."""
        self.first += ((accepted > 0) - self.first) / (self.weight + 1)
        for depth in range(1, min(accepted + 1, drafted)):
            self.next += ((accepted > depth) - self.next) / (self.weight + 1)
        if accepted == drafted:  # a deeper draft might have been accepted as well
            self.next += RECOVERY * max(0.0, NEXT - self.next)
        self.weight = min(self.weight + 1, memory)

    def survival(self, depth: int) -> float:
        """The chance that a chain is accepted down to this depth."""
        return self.first * self.next ** (depth - 1)

    def accepted(self, shape: TreeShape) -> float:
        """Expected accepted tokens of a draft of this shape."""
        if shape[0] == shape[1]:
            return sum(self.first * self.next**k for k in range(shape[0]))
        reached: list[float] = []
        tree, ranks = tree_nodes(shape), node_ranks(shape)
        for depth, parent, rank in zip(tree.depths, tree.parents, ranks, strict=True):
            rate = choice_rate(rank, self.first if depth == 1 else self.next)
            reached.append(rate * (reached[parent] if parent >= 0 else 1.0))
        return sum(reached)


def deviation(rates: Seq[AcceptanceRate], accepted: Seq[float]) -> float:
    """Standard deviation over sequences of `accepted` tokens: as the rates differ, and as well as they are known."""
    mean, squares = sum(accepted) / len(accepted), 0.0
    for rate, tokens in zip(rates, accepted, strict=True):
        first = max(rate.first, MIN_RATE)
        squares += (tokens - mean) ** 2 + tokens**2 * (1 - first) / (first * (rate.weight + 1))
    return sqrt(squares / len(rates))


class AcceptanceRates:
    """A new sequence starts from what its drafter achieved at such temperatures, over all sequences."""

    def __init__(self) -> None:
        self.by_sequence: dict[Sequence, dict[str, AcceptanceRate]] = {}
        self.priors: dict[tuple[str, int], AcceptanceRate] = {}  # by drafter and band of temperature
        self.trials: Counter[str] = Counter()  # by drafter: drafts of single sequences

    def of(self, sequence: Sequence, drafter: str) -> AcceptanceRate:
        own = self.by_sequence.setdefault(sequence, {})
        if drafter not in own:
            prior = self.prior(drafter, sequence.request.params.temperature)
            own[drafter] = AcceptanceRate(prior.first, prior.next)
        return own[drafter]

    def prior(self, drafter: str, temperature: float) -> AcceptanceRate:
        band = drafter, round(BANDS_PER_DEGREE * temperature)
        if band not in self.priors:
            self.priors[band] = AcceptanceRate(FIRST / (1 + PER_TEMPERATURE * temperature), NEXT)
        return self.priors[band]

    def observe(self, sequence: Sequence, drafter: str, drafted: int, accepted: int) -> None:
        self.trials[drafter] += 1
        self.prior(drafter, sequence.request.params.temperature).observe(drafted, accepted, DRAFTER_MEMORY)
        if not sequence.finish_reason:  # else already forgotten
            self.of(sequence, drafter).observe(drafted, accepted, SEQUENCE_MEMORY)

    def forget_drafter(self, name: str) -> None:
        """Alone or merged with others."""
        for band in [band for band in self.priors if name in band[0].split("+")]:
            del self.priors[band]
        every: list[dict[str, Any]] = [self.trials, *self.by_sequence.values()]
        for rates in every:
            for drafter in [one for one in rates if name in one.split("+")]:
                del rates[drafter]

    def forget(self, sequence: Sequence) -> None:
        self.by_sequence.pop(sequence, None)
