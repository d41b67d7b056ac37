"""Mixtures of experts: how many distinct experts a pass reads, what that costs, and what the planner makes of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.costs import CapturedCosts, CostModel, EagerCosts
from outrider.control.experts import ExpertCosts, checked
from outrider.draft.what_if import WhatIf
from outrider.errors import InvalidRequest
from outrider.types import NO_TREE, CapturedShape, TreeShape
from tests.control.build import achieves, decoding, depths, options_of, outcome, planner_of, record, work_of

QWEN = 128, 8, 5.4  # of Qwen3-30B-A3B: experts, of each row, and the other bytes of a pass in experts
counts = st.tuples(st.integers(2, 512), st.integers(1, 16), st.floats(0.0, 50.0)).map(
    lambda one: (one[0], min(one[:2]), one[2])
)
exponents = st.floats(0.0, 1.0)


def experts_of(numbers=QWEN, chain: float = 1.0, batch: float = 1.0) -> ExpertCosts:
    made = ExpertCosts(*numbers)
    made.chain.exponent, made.batch.exponent = chain, batch
    return made


# ------------------------------------------------------------------------------------------ the curve


@given(counts, exponents, exponents, st.lists(st.integers(1, 20), min_size=1, max_size=20), st.data())
def test_every_row_adds_experts_and_none_adds_more_than_its_own(numbers, chain, batch, each, data) -> None:
    experts = experts_of(numbers, chain, batch)
    total, chosen, _ = numbers
    read = experts.distinct(experts.independent(each))
    at = data.draw(st.integers(0, len(each) - 1))
    more = [rows + (i == at) for i, rows in enumerate(each)]
    added = experts.distinct(experts.independent(more)) - read
    assert -1e-9 <= added <= chosen * (1 + 1e-9)
    assert chosen * (1 - 1e-9) <= read <= min(total, chosen * sum(each)) * (1 + 1e-9)
    assert experts.ratio(sum(more), read + added) > 0


@given(counts, exponents, exponents, st.integers(1, 20), st.integers(1, 64))
def test_even_rows_read_as_many_as_the_same_rows_one_by_one(numbers, chain, batch, rows, sequences) -> None:
    experts = experts_of(numbers, chain, batch)
    one_by_one = experts.distinct(experts.independent([rows] * sequences))
    assert experts.expected(rows * sequences, sequences) == pytest.approx(one_by_one)


def test_independent_rows_read_as_many_as_were_drawn() -> None:
    experts, dice = experts_of(), random.Random(0)
    for rows in (1, 2, 8, 32):
        drawn = [len({one for _ in range(rows) for one in dice.sample(range(128), 8)}) for _ in range(400)]
        assert experts.expected(rows, rows) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_a_model_whose_rows_read_all_experts_is_dense() -> None:
    experts = experts_of((8, 8, 2.0))
    assert experts.expected(1, 1) == experts.expected(40, 5) == 8
    assert experts.ratio(40, 8) == 1.0
    experts.observe(record(outcome(decoding(), drafted=3), experts=8.0))
    assert experts.chain.exponent == 1.0


# ------------------------------------------------------------------------------------------ learning


def passes(experts: ExpertCosts, each: list[int], alike: float, dice: random.Random, count: int = 60) -> None:
    """Steps whose rows take a share of their experts from the row before, in 24 layers."""
    total, chosen, read = experts.total, experts.chosen, 0.0
    for _ in range(count):
        read = 0
        for _ in range(24):
            found: set[int] = set()
            for rows in each:
                mine: list[int] = []
                for _ in range(rows):
                    kept = [one for one in mine if dice.random() < alike]
                    left = [one for one in range(total) if one not in kept]
                    mine = kept + dice.sample(left, chosen - len(kept))
                    found.update(mine)
            read += len(found) / 24
        drafts = [outcome(decoding(), drafted=rows - 1) for rows in each]
        experts.observe(record(*drafts, experts=read))


@pytest.mark.parametrize("alike", [0.0, 0.4, 0.8])
def test_what_rows_share_is_learned_from_counts(alike: float) -> None:
    """Learned from three rows of one sequence, it holds for other depths and for several sequences."""
    experts, dice = experts_of(), random.Random(1)
    passes(experts, [3], alike, dice)
    for each in ([2], [5], [3, 3, 3, 3], [5, 1, 3, 1]):
        told = experts_of()
        expected = experts.distinct(experts.independent(each))
        passes(told, each, alike, dice, 1)
        counted = drawn(each, alike, dice)
        assert expected == pytest.approx(counted, rel=0.12), each
    assert experts.batch.exponent == 1.0 and (experts.chain.exponent < 0.95) == (alike > 0)


def drawn(each: list[int], alike: float, dice: random.Random) -> float:
    """As `passes` draws them, on average."""

    class Counted(ExpertCosts):
        def observe(self, record) -> None:
            seen.append(record.experts)

    seen: list[float] = []
    passes(Counted(*QWEN), each, alike, dice, 20)
    return sum(seen) / len(seen)


def test_sequences_of_one_topic_share_experts_too() -> None:
    experts, dice = experts_of(), random.Random(2)
    for _ in range(60):
        popular = len({one for _ in range(16) for one in dice.sample(range(60), 8)})  # 60 of 128
        experts.observe(record(sequences=16, experts=float(popular)))
    assert experts.chain.exponent == 1.0 and 0.5 < experts.batch.exponent < 0.9
    assert experts.expected(16, 16) == pytest.approx(52, rel=0.05)


def test_a_pass_that_reads_nearly_all_experts_says_little_about_rows() -> None:
    experts = experts_of()
    for _ in range(60):
        experts.observe(record(sequences=16, experts=52.0))
    known = experts.batch.exponent
    for _ in range(50):
        experts.observe(record(sequences=64, experts=127.9))
        experts.observe(record(sequences=64, experts=128.0))
    assert experts.batch.exponent == pytest.approx(known, abs=0.02) and known < 0.8


# ------------------------------------------------------------------------------------------ costs


def test_costs_of_dense_models_know_no_experts() -> None:
    costs, plain = EagerCosts(), EagerCosts()
    costs.by_rows = plain.by_rows = {1: 1.0, 4: 1.3, 8: 2.0}
    assert costs.step(8) == costs.step(8, 1) == costs.step_of([4, 4]) == 2.0
    assert costs.step(6, 2) == plain.curve_at(6) and costs.shared([3, 3]) == 1.0


def test_a_pass_costs_what_its_experts_do() -> None:
    """Times of passes measured with all rows alike and apart, as on a machine that reads bytes and nothing else."""
    experts, costs = experts_of(), EagerCosts()
    costs.experts = experts
    dense, read = 5.4, 0.01

    def taken(distinct: float) -> float:
        return read * (dense + distinct)

    for rows in (1, 2, 4, 8, 16, 32):
        apart = 0.9 * experts.distinct(rows) if rows > 1 else 8.0  # tokens of a warm-up share some, too
        seconds = experts.learn_pass(rows, taken(8), taken(apart), apart) if rows > 1 else taken(8)
        costs.learn_pass(rows, seconds)
    for rows in (2, 4, 8, 16):
        assert costs.step(rows) == pytest.approx(taken(experts.distinct(rows)))
    experts.chain.exponent = 0.7
    expected = experts.expected(8, 1)
    assert costs.step(8, 1) == pytest.approx(taken(expected)) and expected < experts.distinct(8)
    assert costs.step(8, 8) > costs.step(8, 2) > costs.step(8, 1)


def test_steps_with_few_and_with_many_experts_are_learned_as_one() -> None:
    experts, model = experts_of(), CostModel()
    model.know_experts(experts)
    for number in range(200):
        one = number % 2  # eight rows of one sequence that share experts, and of eight sequences
        read = 25.0 if one else experts.distinct(8)
        drafts = [outcome(decoding(), drafted=7 * one) for _ in range(1 if one else 8)]
        model.observe(record(*drafts, seconds=0.01 * (5.4 + read), experts=read))
    assert model.eager.step(8, 8) == pytest.approx(0.01 * (5.4 + experts.distinct(8)), rel=0.02)
    assert model.eager.step(8, 1) == pytest.approx(0.01 * (5.4 + 25.0), rel=0.03)


def test_captured_steps_are_learned_by_their_experts() -> None:
    experts, costs = experts_of(), CapturedCosts()
    costs.experts, four = experts, TreeShape(4, 4)

    def taken(distinct: float) -> float:
        return 0.001 * (5.4 + distinct)

    for size in (1, 16):
        known = [("lm", four, taken(experts.distinct(5 * size)))]
        costs.learn("lm", size, [("none", NO_TREE, taken(experts.distinct(size))), *known])
    alone = CapturedShape("lm", four, 1)
    assert costs.seconds(alone) == pytest.approx(taken(experts.distinct(5)))
    for _ in range(60):
        seen = record(outcome(decoding(), drafted=4), tree=four, seconds=taken(22.0), experts=22.0)
        costs.observe(seen, False)
    assert costs.seconds(alone) == pytest.approx(taken(22.0), rel=0.01)
    # What the rows of a sequence share, they share in steps of other sizes.
    assert costs.ratio(CapturedShape("lm", four, 16)) < taken(experts.distinct(80)) / taken(
        experts.distinct(16)
    )


def test_an_expert_is_not_charged_for_launches() -> None:
    """Half of a plain step's time is the same whatever it reads."""
    experts, costs = experts_of(chain=0.5), CapturedCosts()
    costs.experts, four = experts, TreeShape(4, 4)
    for size in (1, 16, 64):
        plain, drafting = (0.0134 + 0.001 * experts.distinct(n * size) for n in (1, 5))
        costs.learn("lm", size, [("none", NO_TREE, plain), ("lm", four, drafting)])
    alone = costs.seconds(CapturedShape("lm", four, 1))
    assert alone == pytest.approx(0.0134 + 0.001 * experts.expected(5, 1))
    costs.ahead = {shape: seconds for shape, seconds in costs.ahead.items() if shape.size == 1}
    cheaper = costs.seconds(CapturedShape("lm", four, 1))
    assert cheaper is not None and alone is not None and cheaper < alone  # by bytes: nothing else is known


@pytest.mark.parametrize(
    "broken", [{"alike": {2: 1.2}}, {"alike": {0: 0.5}}, {"chain": 1.1}, {"batch": -0.1}]
)
def test_kept_costs_are_checked(broken) -> None:
    known = experts_of(chain=0.7).known() | {"alike": {"2": 0.8}}
    again = experts_of()
    again.recall(checked(known))
    assert again.chain.exponent == 0.7 and again.alike == {2: 0.8}
    with pytest.raises(ValueError):
        checked(known | broken)


# ------------------------------------------------------------------------------------------ decisions


def planner_for(kind: str, numbers, chain: float = 0.7, host: float = 0.2):
    """Steps that take what their bytes take, and the host's time: a mixture of experts, or a dense model whose rows
    cost 2 % of a step each.
    """
    planner = planner_of(names=("lm",), sizes=(1, 4, 16, 64))
    if numbers is None:
        return planner
    experts = experts_of(numbers, chain)
    planner.costs.know_experts(experts)
    unit = 1 / (experts.dense + experts.chosen)

    def taken(rows: int) -> float:
        return host + unit * (experts.dense + experts.distinct(rows))

    planner.costs.eager.by_rows = {rows: taken(rows) for rows in range(1, 400)}
    for size in (1, 4, 16, 64):
        trees = [("lm", TreeShape(n, n), taken(size * (n + 1))) for n in (1, 2, 4, 8)]
        planner.costs.captured.learn("lm", size, [("none", NO_TREE, taken(size)), *trees])
    return planner


def depth_at(kind: str, numbers, batch: int, rate: float = 0.62) -> float:
    planner, sequences = planner_for(kind, numbers), [decoding() for _ in range(batch)]
    for one in sequences:
        achieves(planner, one, "lm", rate)
    work = work_of(*sequences)
    found = depths(planner.plan(work, options_of(kind, work, lag={"lm": [0] * batch})))
    return sum(found) / batch


@pytest.mark.parametrize("kind", ["persistent", "packed"])
def test_depth_rises_with_the_batch_where_experts_are_read_anyway(kind: str) -> None:
    found = [depth_at(kind, QWEN, batch) for batch in (1, 4, 16)]
    assert found == sorted(found) and found[-1] > found[0] + 1, found


@pytest.mark.parametrize("kind", ["persistent", "packed"])
def test_depth_falls_with_the_batch_where_rows_cost_alike(kind: str) -> None:
    found = [depth_at(kind, None, batch) for batch in (1, 4, 16)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1], found


def test_routing_that_rows_share_allows_deeper_drafts() -> None:
    def depth(chain: float) -> int:
        planner, one = planner_for("packed", QWEN, chain), decoding()
        achieves(planner, one, "lm", 0.7)
        return depths(planner.plan(work_of(one), options_of("packed", work_of(one), lag={"lm": [0]})))[0]

    assert depth(0.1) > depth(0.5) > depth(1.0)


# ------------------------------------------------------------------------------------------ what if


def test_what_if_prices_rows_by_the_experts_that_they_read() -> None:
    (row,) = WhatIf.of("acceptance=0.7 depth=1 cost=0 experts=128:8").answer()
    assert row["step"] == pytest.approx(0.4 + 0.6 * 15.5 / 8)
    alone, sixteen, many = WhatIf.of("acceptance=0.6 cost=0.02 batch=1,16,64 experts=128:8").answer()
    assert alone["best_depth"] < sixteen["best_depth"] <= many["best_depth"]
    (dense,) = WhatIf.of("acceptance=0.7 depth=1 cost=0 experts=8:8").answer()
    assert dense["step"] == 1.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("experts=128", "COUNT:PER_TOKEN"),
        ("experts=8:9", "experts of a token is a whole number from 1 to 8"),
        ("experts=0:1", "from 1 to"),
        ("experts=128:8 rows=1:1,8:2", "give one of them"),
        ("dense=0.4", "add experts"),
        ("experts=128:8 dense=1", "less than 1"),
        ("experts=128:8 dense=x", "dense is a number"),
    ],
)
def test_what_if_refuses_experts_that_cannot_be(given: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        WhatIf.of(f"acceptance=0.7 {given}")
