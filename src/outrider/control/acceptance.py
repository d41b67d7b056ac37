"""How often drafts are accepted: one estimate for each sequence and drafter, whatever the kind of step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.control.guards import is_flat
from outrider.control.trees import TreeShape, choice_rate, node_ranks, tree_nodes
from outrider.types import SamplingParams, Sequence

Floats = NDArray[np.float64]

# Before a drafter was ever tried: high enough that it is tried, lower where sampling is hotter.
FIRST, NEXT = 0.7, 0.8
FIRST_PER_DEGREE, NEXT_PER_DEGREE = 0.25, 0.1
TRUNCATED = 0.7  # of its temperature, that sampling counts for which leaves unlikely tokens out
AFTER_WRONG = 0.5  # of that, where the last draft was rejected
PRIOR_WEIGHT = 4.0  # steps that a new estimate's starting point counts for
COSTLY_PRIOR_WEIGHT = 2.0  # the same of a drafter that takes passes: to find out takes time
SCORED_WEIGHT = 24.0  # the same, where the drafter was scored before: on other prompts, but on many
SEQUENCE_MEMORY, DRAFTER_MEMORY = 12, 200  # steps: a text changes its nature, a drafter hardly does
RECOVERY = 0.02  # share of the way back to NEXT after a draft that was accepted as far as it went
MIN_RATE = 0.02  # below, it makes no difference how seldom a draft is accepted
ROUNDED = 3  # digits of rates that a draft tree is valued by
BANDS_PER_DEGREE = 2  # of heat, each with a prior of its own
# Of a standard deviation over answers, that is subtracted from what is expected of all: those with low acceptance
# finish last, in a batch that has shrunk.
CAUTION = 0.5


@dataclass(slots=True)
class AcceptanceRate:
    """Of the first token of a draft, and of each next one after an accepted one."""

    first: float
    next: float
    weight: float = PRIOR_WEIGHT  # in steps
    idle: int = 1  # steps since the last one in which it drafted; 0: it drafts now
    drafts: int = 0  # that it was observed for
    used: int = 0  # steps in which it drafted
    right: bool = True  # whether any of the last draft was accepted
    proven: bool = False  # whether any of any draft was
    earned: int = 0  # levels beyond the first: one an accepted token, and a rejected draft halves them
    followed: int = 0  # tokens after an accepted one that were observed
    # Copied text goes on being copied, and new text being new. So `first` and its weight hold after a draft as right as
    # the last one, and these after one that was not. None: no difference is made.
    other: tuple[float, float] | None = None
    # `first` and its weight after any draft, right or not: what the answer is like, wherever in it this is.
    whole: float = field(init=False)
    whole_weight: float = field(init=False)

    def __post_init__(self) -> None:
        self.whole, self.whole_weight = self.first, self.weight

    def observe(self, drafted: int, accepted: int, memory: float) -> None:
        """A draft of this depth. None at all (0) where one was wanted counts as a rejected one."""
        self.whole += ((accepted > 0) - self.whole) / (self.whole_weight + 1)
        self.whole_weight = min(self.whole_weight + 1, memory)
        self.drafts += 1
        self.proven = self.proven or accepted > 0
        self.earned = self.earned + accepted if accepted else self.earned // 2
        before = max(self.first, MIN_RATE)
        self.first += ((accepted > 0) - self.first) / (self.weight + 1)
        if self.other is None:
            # Where the first token is right less often than was expected, the next ones are, too, until they are known
            # by themselves.
            alike = (self.first / before) ** (1 / (1 + self.followed))
            self.next = min(self.next * alike, max(self.next, NEXT))
        for depth in range(1, min(accepted + 1, drafted)):
            self.followed += 1
            self.next += ((accepted > depth) - self.next) / (self.weight + 1)
        if accepted == drafted:  # a deeper draft might have been accepted as well
            self.next += RECOVERY * max(0.0, NEXT - self.next)
        self.weight = min(self.weight + 1, memory)
        if self.other is not None and self.right != (accepted > 0):
            (self.first, self.weight), self.other = self.other, (self.first, self.weight)
            self.right = not self.right

    def survivals(self, depth: int, least: float) -> tuple[float, ...]:
        """The chance that a chain is accepted down to each level of this depth, the first and those of at least
        `least`.
        """
        found, chance = [self.first], self.first * self.next
        while chance >= least and len(found) < depth:
            found.append(chance)
            chance *= self.next
        return tuple(found)

    def accepted(self, shape: TreeShape) -> float:
        """Expected accepted tokens of a draft of this shape."""
        if shape[0] == shape[1]:
            left = 1 - self.next
            return self.first * ((1 - self.next ** shape[0]) / left if left else shape[0])
        return _accepted_of_tree(shape, round(self.first, ROUNDED), round(self.next, ROUNDED))


@lru_cache(maxsize=1 << 14)
def _accepted_of_tree(shape: TreeShape, first: float, following: float) -> float:
    """Kept, as it is asked for in every step, of rates that hardly change."""
    reached: list[float] = []
    tree, ranks = tree_nodes(shape), node_ranks(shape)
    for depth, parent, rank in zip(tree.depths, tree.parents, ranks, strict=True):
        rate = choice_rate(rank, first if depth == 1 else following)
        reached.append(rate * (reached[parent] if parent >= 0 else 1.0))
    return sum(reached)


def heat(params: SamplingParams) -> float:
    """How hot sampling is: its temperature, and less where it leaves unlikely tokens out."""
    return params.temperature * (1.0 if is_flat(params) else TRUNCATED)


def risk(
    accepted: Floats, first: Floats, whole: Floats, weight: Floats, counted: Floats | bool = True
) -> Floats:
    """A share of the standard deviation over sequences, the first axis, of `accepted` tokens: as the rates of their
    answers differ, and as well as those are known. Each has its stretches of copied text and of new text, and that one
    is in the one now and another in the other makes no difference in the end. Of one sequence nobody knows how others
    are.
    """
    counted = np.broadcast_to(counted, accepted.shape)
    counts, first, whole = counted.sum(0), np.maximum(first, MIN_RATE), np.maximum(whole, MIN_RATE)
    accepted = accepted * whole / first
    mean = (accepted * counted).sum(0) / np.maximum(counts, 1)
    squares = (accepted - mean) ** 2 + accepted**2 * (1 - whole) / (whole * (weight + 1))
    return np.where(counts > 1, CAUTION * np.sqrt((squares * counted).sum(0) / np.maximum(counts, 1)), 0.0)


class AcceptanceRates:
    """A new sequence starts from what its drafter achieved at such heat, over all sequences."""

    def __init__(self) -> None:
        self.by_sequence: dict[Sequence, dict[str, AcceptanceRate]] = {}
        self.priors: dict[tuple[str, int], AcceptanceRate] = {}  # by drafter and band of heat
        self.wrong: dict[tuple[str, int], AcceptanceRate] = {}  # the same, where the last draft was rejected
        self.scored: tuple[str, ...] = ()  # drafters of which every step tells, asked or not
        self.trials: Counter[str] = Counter()  # by drafter: drafts of single sequences
        self.degrees: dict[Sequence, float] = {}  # its heat, as far as it was asked for

    def of(self, sequence: Sequence, drafter: str) -> AcceptanceRate:
        own = self.by_sequence.setdefault(sequence, {})
        if drafter not in own:
            degrees = self.degrees.setdefault(sequence, heat(sequence.request.params))
            prior, wrong = self.prior(drafter, degrees), self.prior(drafter, degrees, False)
            other = (wrong.first, PRIOR_WEIGHT) if drafter in self.scored else None
            own[drafter] = AcceptanceRate(prior.first, prior.next, self._weight(drafter), other=other)
        return own[drafter]

    def prior(self, drafter: str, degrees: float, right: bool = True) -> AcceptanceRate:
        """After a draft that was `right`; of drafters for which that makes no difference, after any."""
        band, priors = (drafter, round(BANDS_PER_DEGREE * degrees)), self.priors if right else self.wrong
        if band not in priors:
            degrees = band[1] / BANDS_PER_DEGREE
            first, following = (
                FIRST / (1 + FIRST_PER_DEGREE * degrees),
                NEXT / (1 + NEXT_PER_DEGREE * degrees),
            )
            first = first if right else AFTER_WRONG * first
            priors[band] = AcceptanceRate(first, following, self._weight(drafter))
        return priors[band]

    def _weight(self, drafter: str) -> float:
        return PRIOR_WEIGHT if drafter in self.scored else COSTLY_PRIOR_WEIGHT

    def expect(self, drafter: str, degrees: float, first: float, following: float) -> None:
        """A drafter was scored at this heat: the first token of its drafts, and each next one after an accepted one."""
        band = drafter, round(BANDS_PER_DEGREE * degrees)
        self.priors[band] = AcceptanceRate(first, following, SCORED_WEIGHT)

    def observe(self, sequence: Sequence, drafter: str, drafted: int, accepted: int) -> None:
        self.trials[drafter] += 1
        own = self.by_sequence.get(sequence, {}).get(drafter)
        degrees = self.degrees.get(sequence)
        degrees = heat(sequence.request.params) if degrees is None else degrees
        prior = self.prior(drafter, degrees, own is None or own.right)
        prior.observe(drafted, accepted, DRAFTER_MEMORY)
        if not sequence.finish_reason:  # else already forgotten
            self.of(sequence, drafter).observe(drafted, accepted, SEQUENCE_MEMORY)

    def forget_drafter(self, name: str) -> None:
        """Alone or merged with others."""
        for priors in (self.priors, self.wrong):
            for band in [band for band in priors if name in band[0].split("+")]:
                del priors[band]
        every: list[dict[str, Any]] = [self.trials, *self.by_sequence.values()]
        for rates in every:
            for drafter in [one for one in rates if name in one.split("+")]:
                del rates[drafter]

    def note(self, sequence: Sequence, drafting: str) -> None:
        """Who drafted for it in a step."""
        for name, rate in self.by_sequence.get(sequence, {}).items():
            rate.idle = 0 if name == drafting else rate.idle + 1
            rate.used += name == drafting

    def left_to(self, sequence: Sequence, drafter: str) -> float:
        """The share of a sequence's steps so far in which no other drafter drafted."""
        others = (rate.used for name, rate in self.by_sequence.get(sequence, {}).items() if name != drafter)
        return 1 - min(sum(others) / max(sequence.steps, 1), 1.0)

    def forget(self, sequence: Sequence) -> None:
        self.by_sequence.pop(sequence, None)
        self.degrees.pop(sequence, None)
