"""Predictions against simulation: the law is right if counting what happens gives the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from math import prod

import pytest

from outrider.bench.what_if import what_if_table
from outrider.control.acceptance import AcceptanceRate
from outrider.control.costs import CostModel
from outrider.control.expected import (
    CapturedChains,
    Drafts,
    EagerChains,
    best_speedup,
    interval,
    predict,
    rate_for,
    step_costs,
)
from outrider.draft.what_if import WhatIf
from outrider.errors import InvalidRequest
from outrider.types import NO_TREE, CapturedShape, TreeShape

CURVE = {1: 1.0, 8: 1.2, 32: 1.9, 80: 4.0, 200: 9.0}
STEPS = 20_000
TWO = TreeShape(2, 2)


def row_time(rows: float) -> float:
    """Between the points of the curve, on its own."""
    below = max(r for r in CURVE if r <= rows)
    above = min((r for r in CURVE if r >= rows), default=below)
    share = 0 if above == below else (rows - below) / (above - below)
    return CURVE[below] * (1 - share) + CURVE[above] * share


def simulated(rates: Sequence[float], depth: int, cost: float, batch: int, curve: bool, seed: int) -> float:
    """Speed-up of sequences that draft and are accepted by chance, over plain ones, token by token."""
    chance, tokens, seconds = random.Random(seed), 0, 0.0
    plain = row_time(batch) if curve else 1.0
    for _ in range(STEPS // batch):
        seconds += (row_time(batch * (1 + depth)) if curve else 1.0) + depth * cost * plain
        for _ in range(batch):
            accepted = 0
            while accepted < depth and chance.random() < rates[min(accepted, len(rates) - 1)]:
                accepted += 1
            tokens += 1 + accepted
    return tokens / seconds * plain / batch


@pytest.mark.parametrize("rates", [(0.7, 0.65, 0.6), (0.9,), (0.2, 0.8)])
@pytest.mark.parametrize(("depth", "cost", "batch"), [(4, 0.1, 16), (1, 0.0, 1), (8, 0.05, 4), (3, 0.3, 32)])
@pytest.mark.parametrize("curve", [False, True])
def test_what_if_agrees_with_simulation(rates, depth: int, cost: float, batch: int, curve: bool) -> None:
    """Within 3 %: the standard error of so many steps is below 0.7 %."""
    given = f"acceptance={','.join(map(str, rates))} depth={depth} cost={cost} batch={batch}"
    points = " rows=" + ",".join(f"{r}:{t}" for r, t in CURVE.items())
    (row,) = WhatIf.of(given + (points if curve else "")).answer()
    expected = simulated(rates, depth, cost, batch, curve, seed=depth + batch)
    assert row["speedup"] == pytest.approx(expected, rel=0.03)


def test_expected_tokens_are_the_enumerated_ones() -> None:
    rates, depth = (0.7, 0.4, 0.9), 3
    whole = 0.0
    for fates in product((True, False), repeat=depth):
        likely = prod(r if ok else 1 - r for r, ok in zip(rates, fates, strict=True))
        whole += likely * (1 + (list(fates).index(False) if False in fates else depth))
    assert Drafts.of_rates(rates, depth).tokens == pytest.approx(whole)


def test_the_planner_expects_the_same() -> None:
    rate = AcceptanceRate(0.8, 0.6)
    for depth in (1, 2, 5, 8):
        assert Drafts.of_rates((0.8, 0.6), depth).tokens == pytest.approx(
            1 + rate.accepted(TreeShape(depth, depth))
        )


def test_drafts_of_any_length_cost_the_rows_they_have() -> None:
    """Drafts of different lengths, every sequence on its own: against all combinations."""
    model = CostModel()
    model.eager.by_rows.update(CURVE)
    costs = EagerChains(model.eager, lambda batch, depth: 0.01 * batch * depth)
    outcomes = [(0, 0), (0, 0), (3, 3), (3, 1), (5, 4)]
    drafts = Drafts.of_outcomes(outcomes, 4)
    assert drafts.lengths == {0: 0.4, 3: 0.4, 4: 0.2}
    assert drafts.tokens == pytest.approx(1 + (3 + 1 + 4) / 5)
    lengths = [min(d, 4) for d, _ in outcomes]
    times = [row_time(3 + sum(three)) + 0.01 * 3 * 4 for three in product(lengths, repeat=3)]
    one = predict(drafts, 3, costs)
    assert one.seconds == pytest.approx(sum(times) / len(times))
    assert one.tail_seconds == pytest.approx(sorted(times)[int(0.99 * len(times))])
    assert one.plain_seconds == pytest.approx(row_time(3))
    assert one.speedup == pytest.approx(one.tokens * row_time(3) / one.seconds)
    assert one.tokens_per_second == pytest.approx(3 * one.tokens / one.seconds)


def test_break_even_is_where_the_speed_up_is_one() -> None:
    costs = WhatIf.of("acceptance=1 cost=0.1").costs
    for depth in (1, 3, 8):
        even = predict(Drafts.of_rates([0.5], depth), 1, costs).break_even
        assert even is not None
        assert predict(Drafts.of_rates([even], depth), 1, costs).speedup == pytest.approx(1.0, abs=1e-6)
    assert rate_for(3.5, 2) is None
    assert rate_for(1.0, 4) == 0.0
    assert rate_for(5.0, 4) == pytest.approx(1.0)


def test_captured_steps_are_taken_as_measured() -> None:
    model = CostModel()
    for size, plain in ((1, 2.0), (16, 3.0)):
        model.captured.learn(
            "lm",
            size,
            [("none", NO_TREE, plain), ("lm", TWO, plain + 1), ("lm", TreeShape(3, 15), plain + 2)],
        )
    costs = CapturedChains(model.captured, "lm")
    assert costs.depths(4) == [2]
    one = predict(Drafts.of_outcomes([(2, 2), (2, 0)], 2), 4, costs)
    assert (one.plain_seconds, one.seconds, one.tail_seconds) == (3.0, 4.0, 4.0)
    assert one.speedup == pytest.approx(2.0 * 3 / 4)


def test_the_best_depth_by_what_the_engine_knows_of_its_costs() -> None:
    model = CostModel()
    model.eager.by_rows.update({1: 1.0, 2: 1.0, 3: 1.5})
    model.eager.per_level["eagle"] = 0.25
    eager = step_costs(model, "eagle")
    assert best_speedup([0.5, 0.5], 1, eager) == pytest.approx(1.5 / 1.25)  # two deep: 1.75 / 2
    assert best_speedup([0.9, 0.9], 1, eager) == pytest.approx(1.9 / 1.25)
    assert best_speedup([0.1], 1, eager) == best_speedup([], 1, eager) == 1.0  # none at all
    model.captured.learn(
        "eagle", 2, [("none", NO_TREE, 2.0), ("eagle", TreeShape(1, 1), 2.5), ("eagle", TWO, 2.6)]
    )
    model.captured.device[CapturedShape("none", NO_TREE, 1)] = (
        0.1  # of a size that the drafter was not measured at
    )
    captured = step_costs(model, "eagle")
    assert best_speedup([0.5, 0.5], 1, captured) == pytest.approx(1.75 / 1.3)
    assert step_costs(model, "lookup").plain(1) == 1.0


def test_an_interval_holds_what_it_should() -> None:
    costs = WhatIf.of("acceptance=1 cost=0.1").costs
    chance = random.Random(1)
    same = [[(2, 1)] * 20] * 4
    low, high = interval(same, 2, 1, costs, 0.0)
    assert low == high == pytest.approx(2 / 1.2)
    differing = [[(2, 2 * (chance.random() < 0.5))] * 20 for _ in range(12)]
    low, high = interval(differing, 2, 1, costs, 0.0)
    mean = predict(Drafts.of_outcomes([o for g in differing for o in g], 2), 1, costs).speedup
    assert low < mean < high and high - low > 0.3
    noisy = interval(same, 2, 1, costs, 0.1)
    assert noisy[0] < 2 / 1.2 < noisy[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("depth=4", "acceptance"),
        ("acceptance=1.2", "between 0 and 1"),
        ("acceptance=0.5,,0.3", "acceptance 2"),
        ("acceptance=0.5 depth=0", "depth"),
        ("acceptance=0.5 depth=4.5", "depth"),
        ("acceptance=0.5 batch=1,x", "batch"),
        ("acceptance=0.5 cost=much", "cost"),
        ("acceptance=0.5 cost=-1", "cost"),
        ("acceptance=0.5 rows=8:1", "rows begins with one row"),
        ("acceptance=0.5 rows=1:1,8", "ROWS:TIME"),
        ("acceptance=0.5 tok_s=0", "tok_s"),
        ("acceptance=0.5 dept=4", "did you mean 'depth'"),
        ("acceptance=0.5 acceptance=0.6", "twice"),
        ("0.5", "NAME=VALUE"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_field(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        WhatIf.of(text)


def test_a_curve_is_not_used_beyond_its_end() -> None:
    with pytest.raises(InvalidRequest, match="ends at 64 rows; batch 16, 4 deep, has 80"):
        WhatIf.of("acceptance=0.5 depth=4 batch=16 rows=1:1,64:2").answer()
    with pytest.raises(InvalidRequest, match="tok_s"):
        WhatIf.of("acceptance=0.5").answer(price=2.0)


def test_the_best_depth_is_found_and_none_is_a_choice() -> None:
    (row,) = WhatIf.of("acceptance=0.8 cost=0.05 tok_s=100").answer(price=3.6)
    assert (row["depth"], row["best_depth"]) == (8, 8)
    assert row["speedup"] == pytest.approx(3.09, abs=0.01)
    assert row["plain_per_million"] == pytest.approx(10.0)
    assert row["per_million"] == pytest.approx(10.0 / row["speedup"])
    asked = WhatIf.of("acceptance=0.1 cost=0.2 batch=1,4 depth=2")
    rows = asked.answer()
    assert [row["best_depth"] for row in rows] == [0, 0]
    lines = list(what_if_table(asked, rows))
    assert "no draft" in lines[1] and max(map(len, lines)) <= 80


def test_every_batch_is_priced_by_its_own_rate() -> None:
    """One rate is the first batch's; a pass over four rows takes 1.2 times one over one row."""
    asked = WhatIf.of("acceptance=0.8 depth=3 cost=0.05 batch=1,4 rows=1:1,4:1.2,16:2 tok_s=100")
    rows = asked.answer(price=3.6)
    assert [row["plain_per_million"] for row in rows] == pytest.approx([10.0, 10.0 * 1.2 / 4])
    assert [row["per_million"] * row["speedup"] for row in rows] == pytest.approx([10.0, 3.0])
    assert [1 - row["saving"] for row in rows] == pytest.approx([1 / row["speedup"] for row in rows])
    measured = WhatIf.of("acceptance=0.8 batch=1,4 tok_s=100,250").answer(price=3.6)
    assert [row["plain_per_million"] for row in measured] == pytest.approx([10.0, 4.0])
    lines = list(what_if_table(asked, rows))
    assert "plain $/M tok" in lines[-3] and max(map(len, lines)) <= 80
    with pytest.raises(InvalidRequest, match="2 rates for 3 batches: one each, or one"):
        WhatIf.of("acceptance=0.8 batch=1,4,8 tok_s=100,250")


def test_what_is_assumed_is_said_and_a_draft_is_not_free() -> None:
    asked = WhatIf.of("acceptance=0.7")
    assert asked == WhatIf.of("acceptance=0.7 cost=0.1")
    (row,) = asked.answer()
    assert row["best_depth"] == 4 and row["best_speedup"] == pytest.approx(1.98, abs=0.01)
    lines = list(what_if_table(asked, [row]))
    assert "4 deep: 1.98x" in lines[1] and max(map(len, lines)) <= 80
    assert "Drafting a token is taken to cost 0.1 plain steps; cost=0: nothing, as lookup." in lines
    free = WhatIf.of("acceptance=0.7 cost=0")
    lines = list(what_if_table(free, free.answer()))
    assert (
        any("taken to cost nothing, as lookup does" in line for line in lines) and max(map(len, lines)) <= 80
    )
