"""Who drafts for each sequence in a step of one drafter, and what may be expected of it: for all sequences and trees at
once, as a step of hundreds must be planned while the one before it runs.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from outrider.control.acceptance import AcceptanceRates, risk
from outrider.control.trees import TreeShape
from outrider.types import Sequence

Mine = Seq[tuple[Sequence, Seq[str]]]  # sequences, and drafters that each may get
NOBODY = (0.0, 0.0, -1.0, 0.0, 1.0)  # for who may not serve a sequence


class Serving:
    """Arrays are [sequences, trees]. Beside a chain's drafter, those that take no pass may serve; a wider tree is its
    drafter's alone.
    """

    def __init__(
        self,
        rates: AcceptanceRates,
        mine: Mine,
        drafter: str,
        model_free: Seq[str],
        switch: float,
        trees: Seq[TreeShape],
    ) -> None:
        """`switch`: by how much whoever serves already is preferred."""
        self.mine, self.trees = mine, trees
        self.names = (drafter, *(name for name in model_free if name != drafter))
        every = [
            rates.of(sequence, name) if name in allowed else None
            for sequence, allowed in mine
            for name in self.names
        ]
        numbers = [
            NOBODY
            if rate is None
            else (rate.first, rate.next, 1.0 if rate.idle else switch, rate.whole, rate.whole_weight)
            for rate in every
        ]
        table = np.array(numbers).reshape(len(mine), len(self.names), len(NOBODY))
        first, following, preferred = (table[:, :, i, None] for i in range(3))
        depths, left = np.array([depth for depth, _ in trees], np.float64), 1 - following
        reached = np.where(left > 0, (1 - following**depths) / np.where(left > 0, left, 1.0), depths)
        accepted = first * reached  # of chains: [sequences, drafters, trees]
        preference = accepted * preferred
        for column, tree in enumerate(trees):
            if tree[0] != tree[1]:
                own = every[:: len(self.names)]
                accepted[:, 0, column] = [0.0 if rate is None else rate.accepted(tree) for rate in own]
                preference[:, 0, column] = accepted[:, 0, column] * preferred[:, 0, 0]
                preference[:, 1:, column] = -1.0
        preference[preferred[:, :, 0] < 0] = -1.0
        self.chosen = preference.argmax(1)
        rows, columns = np.arange(len(mine))[:, None], np.arange(len(trees))
        self.served = preference[rows, self.chosen, columns] >= 0
        self.accepted = accepted[rows, self.chosen, columns] * self.served
        self.first, self.whole, self.weight = (table[:, :, i][rows, self.chosen] for i in (0, 3, 4))

    @property
    def counts(self) -> NDArray[np.int64]:
        """Sequences that get a draft, by tree."""
        return self.served.sum(0)

    def gains(self, latency: bool) -> NDArray[np.float64]:
        """Tokens beyond one a sequence; or what they bring the mean time per token, as so many tokens."""
        batch = len(self.mine)
        if not latency or batch == 1:
            return self.accepted.sum(0)
        return batch * batch / (1 / (1 + self.accepted)).sum(0) - batch

    def risks(self) -> NDArray[np.float64]:
        """Tokens that one of those that get a draft may fall short by."""
        return risk(self.accepted, self.first, self.whole, self.weight, self.served)

    def least(self, sequences: Collection[Sequence]) -> NDArray[np.float64]:
        """What the one of these may expect that gains least."""
        return self.accepted[[sequence in sequences for sequence, _ in self.mine]].min(0)

    def servers(self, tree: TreeShape) -> list[str]:
        """The drafter of each sequence; nothing where none may serve it."""
        at = self.trees.index(tree)
        pairs = zip(self.chosen[:, at].tolist(), self.served[:, at].tolist(), strict=True)
        return [self.names[chosen] if served else "" for chosen, served in pairs]
