"""What is expected of all sequences at once is what each one's own rate says."""

from __future__ import annotations

import random

import pytest

from outrider.control.acceptance import AcceptanceRate, AcceptanceRates
from outrider.control.serving import Serving
from outrider.control.trees import CHAINS, TREES
from tests.tiny import sequence

SWITCH = 1.1


def made(seed: int, count: int):
    """Rates, sequences with the drafters that each may get, and the trees that are looked at."""
    dice, rates = random.Random(seed), AcceptanceRates()
    mine = [
        (sequence([i + 1]), dice.choice([("lm", "lookup"), ("lm",), ("lookup",), ()])) for i in range(count)
    ]
    for one, _ in mine:
        for name in ("lm", "lookup"):
            rate = AcceptanceRate(dice.random(), dice.choice([1.0, dice.random()]), dice.uniform(1, 12))
            rate.idle = dice.randint(0, 2)
            rates.by_sequence.setdefault(one, {})[name] = rate
    return rates, mine


def best_alone(rates, one, allowed, tree):
    """The drafter of a sequence, and what it brings, one after the other."""
    names = [name for name in ("lm", "lookup") if name in allowed]
    if tree[0] != tree[1]:
        names = [name for name in names if name == "lm"]

    def value(name):
        rate = rates.of(one, name)
        return rate.accepted(tree) * (1.0 if rate.idle else SWITCH)

    return max(names, key=value, default="")


@pytest.mark.parametrize("seed", range(20))
def test_all_at_once_is_each_alone(seed: int) -> None:
    rates, mine = made(seed, 1 + seed)
    trees = [*CHAINS, *TREES]
    serving = Serving(rates, mine, "lm", ("lookup",), SWITCH, trees)
    for column, tree in enumerate(trees):
        alone = [best_alone(rates, *one, tree) for one in mine]
        assert serving.servers(tree) == alone
        accepted = [
            rates.of(s, name).accepted(tree) if name else 0.0
            for (s, _), name in zip(mine, alone, strict=True)
        ]
        assert serving.accepted[:, column] == pytest.approx(accepted, abs=1e-6)
        assert serving.counts[column] == sum(map(bool, alone))
        assert serving.gains(False)[column] == pytest.approx(sum(accepted), abs=1e-6)
        waits = sum(1 / (1 + tokens) for tokens in accepted)
        by_time = len(mine) ** 2 / waits - len(mine) if len(mine) > 1 else sum(accepted)
        assert serving.gains(True)[column] == pytest.approx(by_time, abs=1e-6)
        late = {s for s, _ in mine[::2]}
        assert serving.least(late)[column] == pytest.approx(min(accepted[::2]), abs=1e-6)
