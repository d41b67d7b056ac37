"""How much of a client's prediction came true, counted while the answer is written.

A function of the two texts alone, so that it does not depend on what the planner found worth drafting.
What counts is the longest run of tokens, not necessarily next to each other, that both texts have in the same
order; a token takes part only together with a neighbour that both have too, so that stray commas do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

MANY = 64  # places from which a pair's bits are kept rather than made each time; bounds both time and memory

Pair = tuple[int | None, int]


class PredictionOverlap:
    """Bit i of every number is token i of the prediction. A token of the answer costs a few operations on such
    numbers (Hyyrö's way to the longest common subsequence); a text's beginning counts as a neighbour.
    """

    def __init__(self, prediction: list[int]) -> None:
        self.tokens, self.size = prediction, len(prediction)
        self._all = (1 << self.size) - 1
        self._missing = self._all  # as many bits as tokens have not come true
        self._before: int | None = None
        self._ends = 0  # where the last two tokens of the answer end in the prediction
        places: dict[Pair, list[int]] = {}
        before: int | None = None
        for i, token in enumerate(prediction):
            places.setdefault((before, token), []).append(i)
            before = token
        self._places: dict[Pair, list[int] | int] = {
            pair: where if len(where) < MANY else self._bits(where) for pair, where in places.items()
        }

    def again(self) -> PredictionOverlap:
        """The same for another answer, as long as nothing has been fed yet."""
        return copy(self)

    def feed(self, tokens: Iterable[int]) -> None:
        """The next tokens of the answer. The last one waits for its neighbour."""
        for token in tokens:
            where = self._places.get((self._before, token), 0)
            ends = where if isinstance(where, int) else self._bits(where)
            self._missing = self._after(self._ends | ends >> 1)
            self._before, self._ends = token, ends

    @property
    def held(self) -> int:
        """Tokens of the prediction that came true so far."""
        return self.size - self._after(self._ends).bit_count()

    def _after(self, matches: int) -> int:
        """What is missing once a token has come that may be any of `matches`."""
        found = self._missing & matches
        return (self._missing + found | self._missing - found) & self._all

    def _bits(self, places: list[int]) -> int:
        bits = bytearray(self.size // 8 + 1)
        for i in places:
            bits[i >> 3] |= 1 << (i & 7)
        return int.from_bytes(bits, "little")
