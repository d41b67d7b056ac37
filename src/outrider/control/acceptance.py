"""Acceptance rates: one estimate for each sequence and drafter, whatever the kind of step.

A sequence's estimate starts from a prior by drafter and temperature, which averages over all sequences. How much the
prior weighs against the sequence's own drafts follows from how much finished sequences differed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.control.guards import (
    CAUTION,
    COOLING,
    DRAFTER_MEMORY,
    FIRST,
    NEXT,
    PRIOR_WEIGHT,
    RECOVERY,
    SEQUENCE_MEMORY,
)
from outrider.control.trees import choice_rate, node_ranks, tree_nodes
from outrider.types import Sequence, TreeShape

Floats = NDArray[np.float64]
LEAST = 1e-3  # avoids division by zero
Band = tuple[str, int]  # a drafter, and the temperature in halves of a degree


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance of the first token of a draft, and of each further one after an accepted one."""

    first: float
    next: float
    weight: float = PRIOR_WEIGHT  # in steps
    idle: int = 1  # steps since it last drafted; 0: it drafted in the last step
    used: int = 0  # steps in which it drafted
    right: bool = True  # whether any token of the last draft was accepted
    proven: bool = False  # whether any token of any draft was
    # Levels beyond the first that may be drafted: one more for each accepted token, half after a rejected draft.
    earned: int = 0
    followed: int = 0  # tokens after an accepted one that were observed
    drafts: int = 0  # that were observed
    hits: int = 0  # those whose first token was accepted
    # Copied text stays copied and new text stays new. Where this is set, `first` and `weight` are those of the next
    # draft, and these those after a draft that was right or wrong, as last known.
    after: dict[bool, tuple[float, float]] | None = None
    # `first` and `weight` after any draft: what the whole answer is like.
    whole: float = field(init=False)
    whole_weight: float = field(init=False)

    def __post_init__(self) -> None:
        self.whole, self.whole_weight = self.first, self.weight

    def observe(self, drafted: int, accepted: int, memory: float) -> None:
        """A draft of this depth. A depth of 0, where a draft was wanted and none found, counts as rejected."""
        right = accepted > 0
        self.drafts, self.hits = self.drafts + 1, self.hits + right
        self.proven = self.proven or right
        self.whole += (right - self.whole) / (self.whole_weight + 1)
        self.whole_weight = min(self.whole_weight + 1, memory)
        self.earned = self.earned + accepted if right else self.earned // 2
        before = max(self.first, LEAST)
        self.first += (right - self.first) / (self.weight + 1)
        if self.after is None:
            # Until `next` is observed by itself, it moves with `first`.
            alike = (self.first / before) ** (1 / (1 + self.followed))
            self.next = min(self.next * alike, max(self.next, NEXT))
        for depth in range(1, min(accepted + 1, drafted)):
            self.followed += 1
            self.next += ((accepted > depth) - self.next) / (self.weight + 1)
        if accepted == drafted:  # a deeper draft might have been accepted as well
            self.next += RECOVERY * max(0.0, NEXT - self.next)
        self.weight = min(self.weight + 1, memory)
        if self.after is not None:
            if self.drafts > 1:
                self.after[self.right] = self.first, self.weight
            self.first, self.weight = self.after[right]
        self.right = right

    def accepted(self, shape: TreeShape) -> float:
        """Expected accepted tokens of a draft of this shape."""
        if shape.depth == shape.nodes:
            left = 1 - self.next
            return self.first * ((1 - self.next**shape.depth) / left if left else shape.depth)
        return _accepted_of_tree(shape, round(self.first, 3), round(self.next, 3))


@lru_cache(maxsize=1 << 14)
def _accepted_of_tree(shape: TreeShape, first: float, following: float) -> float:
    """Cached: it is asked for in every step, of rates that hardly change."""
    reached: list[float] = []
    tree, ranks = tree_nodes(shape), node_ranks(shape)
    for depth, parent, rank in zip(tree.depths, tree.parents, ranks, strict=True):
        rate = choice_rate(rank, first if depth == 1 else following)
        reached.append(rate * (reached[parent] if parent >= 0 else 1.0))
    return sum(reached)


def caution(accepted: Floats, first: Floats, whole: Floats, weight: Floats, counted: Floats) -> Floats:
    """Part of the standard deviation between sequences (the first axis) of `accepted` tokens. It takes each answer's
    mean rate, `whole`: where in its text each sequence is now makes no difference in the end.
    """
    counts, first, whole = counted.sum(0), np.maximum(first, LEAST), np.clip(whole, LEAST, 1.0)
    accepted = accepted * whole / first
    mean = (accepted * counted).sum(0) / np.maximum(counts, 1)
    squares = (accepted - mean) ** 2 + accepted**2 * (1 - whole) / (whole * (weight + 1))
    return np.where(counts > 1, CAUTION * np.sqrt((squares * counted).sum(0) / np.maximum(counts, 1)), 0.0)


@dataclass(slots=True)
class Spread:
    """How much sequences differ: the variance of their own rates for a draft's first token. The start is that of a
    prior that counts for PRIOR_WEIGHT steps, and counts itself for one long sequence.
    """

    variance: float
    weight: float = SEQUENCE_MEMORY

    def observe(self, drafts: int, hits: int, expected: float) -> None:
        """A sequence ended. Of the distance of its mean from the prior, chance explains a part."""
        if drafts > 1:
            mean, weight = hits / drafts, min(drafts - 1, SEQUENCE_MEMORY)
            found = (mean - expected) ** 2 - mean * (1 - mean) / (drafts - 1)
            self.weight = min(self.weight + weight, DRAFTER_MEMORY * SEQUENCE_MEMORY)
            self.variance += (found - self.variance) * weight / self.weight

    def prior_weight(self, expected: float) -> float:
        """Steps that the prior counts for: the fewer, the more sequences differ (a beta distribution's strength)."""
        steps = expected * (1 - expected) / max(self.variance, LEAST**2) - 1
        return min(max(steps, PRIOR_WEIGHT), SEQUENCE_MEMORY)


class AcceptanceRates:
    def __init__(self) -> None:
        self.by_sequence: dict[Sequence, dict[str, AcceptanceRate]] = {}
        # Of model-free drafters also by whether the draft before was right; None: a sequence's first draft.
        self.priors: dict[tuple[Band, bool | None], AcceptanceRate] = {}
        self.spreads: dict[Band, Spread] = {}  # of the other drafters
        self.model_free: tuple[str, ...] = ()  # drafters that every step scores, whether they draft or not
        self.tried: set[str] = set()  # drafters that were observed

    def of(self, sequence: Sequence, drafter: str) -> AcceptanceRate:
        own = self.by_sequence.setdefault(sequence, {})
        if drafter not in own:
            band = _band(drafter, sequence.request.params.temperature)
            prior = self._prior(band)
            if drafter in self.model_free:
                after = {right: (self._prior(band, right).first, PRIOR_WEIGHT) for right in (False, True)}
                own[drafter] = AcceptanceRate(prior.first, prior.next, after=after)
            else:
                weight = self._spread(band).prior_weight(prior.first)
                own[drafter] = AcceptanceRate(prior.first, prior.next, weight)
        return own[drafter]

    def _spread(self, band: Band) -> Spread:
        if band not in self.spreads:
            first = self._prior(band).first
            self.spreads[band] = Spread(first * (1 - first) / (PRIOR_WEIGHT + 1))
        return self.spreads[band]

    def _prior(self, band: Band, right: bool | None = None) -> AcceptanceRate:
        if (band, right) not in self.priors:
            self.priors[band, right] = AcceptanceRate(FIRST / (1 + COOLING * band[1] / 2), NEXT)
        return self.priors[band, right]

    def expect(self, drafter: str, temperature: float, first: float, following: float) -> None:
        """Rates that a drafter was scored with at this temperature."""
        self.priors[_band(drafter, temperature), None] = AcceptanceRate(first, following, SEQUENCE_MEMORY)

    def observe(self, sequence: Sequence, drafter: str, drafted: int, accepted: int) -> None:
        self.tried.add(drafter)
        own = self.by_sequence.get(sequence, {}).get(drafter)
        before = own.right if own is not None and own.after is not None and own.drafts else None
        band = _band(drafter, sequence.request.params.temperature)
        ended = sequence.finish_reason is not None  # its own estimates are forgotten, `before` with them
        if not (ended and drafter in self.model_free):
            self._prior(band, before).observe(drafted, accepted, DRAFTER_MEMORY)
        if not ended:
            self.of(sequence, drafter).observe(drafted, accepted, SEQUENCE_MEMORY)

    def forget_drafters(self, drafters: Iterable[str]) -> None:
        gone = set(drafters)
        self.tried -= gone
        self.priors = {key: prior for key, prior in self.priors.items() if key[0][0] not in gone}
        self.spreads = {band: spread for band, spread in self.spreads.items() if band[0] not in gone}
        for rates in self.by_sequence.values():
            for name in gone & rates.keys():
                del rates[name]

    def note(self, sequence: Sequence, drafting: str) -> None:
        """The drafter that drafted for a sequence in a step."""
        for name, rate in self.by_sequence.get(sequence, {}).items():
            rate.idle = 0 if name == drafting else rate.idle + 1
            rate.used += name == drafting

    def left_to(self, sequences: Iterable[Sequence], drafter: str) -> Iterator[float]:
        """For each sequence the share of its steps so far in which no other drafter drafted."""
        for sequence in sequences:
            own = self.by_sequence.get(sequence, {})
            others = sum(rate.used for name, rate in own.items() if name != drafter)
            yield 1 - min(others / max(sequence.steps, 1), 1.0)

    def forget(self, sequence: Sequence) -> None:
        for drafter, rate in self.by_sequence.pop(sequence, {}).items():
            if rate.after is None:
                band = _band(drafter, sequence.request.params.temperature)
                expected = self._prior(band).first
                self._spread(band).observe(rate.drafts, rate.hits, expected)


def _band(drafter: str, temperature: float) -> Band:
    return drafter, round(2 * temperature)
