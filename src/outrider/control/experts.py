"""What the experts of a mixture of experts cost: a pass reads every expert that one of its rows chose, once.

`R` rows that choose independently, `k` of `E` experts each, read `D(R) = E (1 - (1 - k/E) ** R)` of them. Rows of one
sequence choose alike, and so do sequences of one topic. Two exponents, learned from the counts of the passes, say how
much: `n` rows of a sequence read as many experts as `n ** chain` independent rows, and `S` sequences as many as
`S ** batch` independent ones. At 1 all rows are independent, at 0 all choose the same experts. So the expected number
grows with every row, each row adds fewer, and there are never more than `E`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import expm1, inf, log1p, log2
from typing import Any

from outrider.control.guards import KEEP
from outrider.types import StepRecord


@dataclass(slots=True)
class Sharing:
    """An exponent, averaged over observations. The start counts as one observation of a doubling."""

    exponent: float = 1.0
    weight: float = 1.0

    def observe(self, doublings: float, grown: float, precision: float) -> None:
        """Rows were doubled so often, and the independent rows that read as many experts `grown` times. An observation
        counts by the square of its doublings, as in a fit of a line through the origin, and less the nearer a pass is
        to reading all experts.
        """
        weight = (doublings * precision) ** 2
        if weight:
            found = min(max(grown / doublings, 0.0), 1.0)
            self.exponent += (found - self.exponent) * weight / (self.weight + weight)
            self.weight = min(self.weight + weight, KEEP / (1 - KEEP))


Known = tuple[dict[int, float], float, float]  # `alike`, and the exponents of chains and batches


def checked(known: Mapping[str, Any]) -> Known:
    """What `ExpertCosts.known` wrote. Raises if it cannot be that."""
    alike = {int(rows): float(part) for rows, part in known["alike"].items()}
    chain, batch = float(known["chain"]), float(known["batch"])
    if not all(rows > 0 and 0 < part <= 1 for rows, part in alike.items()):
        raise ValueError("no pass takes longer for reading fewer experts")
    if not all(0 <= exponent <= 1 for exponent in (chain, batch)):
        raise ValueError("no rows read more experts than independent rows")
    return alike, chain, batch


class ExpertCosts:
    """Expected numbers of distinct experts, and what they cost. `dense` is the rest that a pass reads, in experts."""

    def __init__(self, total: int, chosen: int, dense: float) -> None:
        self.total, self.chosen, self.dense = total, chosen, dense
        self.chain, self.batch = Sharing(), Sharing()
        # By rows: what a pass takes whose rows all choose the same experts, relative to one of independent rows.
        self.alike: dict[int, float] = {}
        self._row = log1p(-chosen / total) if chosen < total else -inf

    def distinct(self, independent: float) -> float:
        """Experts that so many independent rows read."""
        return -self.total * expm1(independent * self._row)

    def independent(self, each: Iterable[int]) -> float:
        """Independent rows that read as many experts as sequences with so many rows each."""
        shares = [self.of_chain(rows) for rows in each]
        return self.of_batch(sum(shares), len(shares))

    def of_chain(self, rows: float) -> float:
        return float(rows**self.chain.exponent)

    def of_batch(self, shares: float, sequences: int) -> float:
        """`shares`: of each sequence's rows, added up."""
        return float(shares * max(sequences, 1) ** (self.batch.exponent - 1))

    def expected(self, rows: int, sequences: int) -> float:
        """Distinct experts of a pass whose rows are spread evenly over sequences."""
        sequences = min(max(sequences, 1), max(rows, 1))
        return self.distinct(self.of_batch(sequences * self.of_chain(rows / sequences), sequences))

    def ratio(self, rows: int, distinct: float) -> float:
        """Time of a pass that reads so many experts, relative to one whose rows choose independently."""
        most = self.distinct(rows)
        if most <= self.chosen:
            return 1.0
        alike = self._alike(rows, most)
        return alike + (1 - alike) * (distinct - self.chosen) / (most - self.chosen)

    def _alike(self, rows: int, most: float) -> float:
        """As measured, between measurements in a straight line; until then an expert costs what its bytes do."""
        if not self.alike:
            return (self.dense + self.chosen) / (self.dense + most)
        xs = sorted(self.alike)
        at = bisect_left(xs, rows)
        if at in (0, len(xs)):
            return self.alike[xs[min(at, len(xs) - 1)]]
        low, high = xs[at - 1], xs[at]
        part = (rows - low) / (high - low)
        return self.alike[low] + part * (self.alike[high] - self.alike[low])

    def learn_pass(self, rows: int, alike: float, apart: float, distinct: float) -> float:
        """Two passes were measured ahead: one whose rows are alike, and one that read so many experts. Returns what
        independent rows would have taken.
        """
        most = self.distinct(rows)
        if distinct <= self.chosen or most <= self.chosen:
            return apart  # the rows do not differ in their experts
        slope = max(apart - alike, 0.0) / (distinct - self.chosen)
        seconds = max(apart, alike) + slope * (most - distinct)
        self.alike[rows] = min(alike / seconds, 1.0)
        return seconds

    def known(self) -> dict[str, Any]:
        """What was learned, for the next start."""
        return {"alike": self.alike, "chain": self.chain.exponent, "batch": self.batch.exponent}

    def recall(self, known: Known) -> None:
        self.alike, self.chain.exponent, self.batch.exponent = known

    def observe(self, record: StepRecord) -> None:
        """A step without prompt rows: plain steps teach what sequences share, drafting ones what a chain shares."""
        sequences, read = record.sequences, record.experts / self.total
        if not 0 < read < 1 or self.chosen == self.total:
            return
        rows, found = record.rows / sequences, log1p(-read) / self._row
        # How much the number of experts still says about the number of independent rows.
        precision = -(1 - read) * log1p(-read) / read
        if rows == 1:
            self.batch.observe(log2(sequences), log2(found), precision)
        else:
            share = found / sequences**self.batch.exponent
            self.chain.observe(log2(rows), log2(share), precision)
