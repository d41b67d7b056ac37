"""Candidates: expected tokens and seconds of the drafts that a group of sequences could have."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.control.acceptance import AcceptanceRate, AcceptanceRates
from outrider.control.candidates import Candidates, Estimates, Group, own_chains, shared_trees
from outrider.control.costs import CapturedCosts, EagerCosts
from outrider.control.guards import MARGIN, SECOND
from outrider.control.trees import CHAINS, TREES
from outrider.types import NO_DRAFT_PLAN, NO_TREE, DraftPlan, Options
from tests.control.build import decoding

ROW, LEVEL = 0.02, 0.05


def group_of(
    *allowed: tuple[str, ...], left: float = 100.0, plain: float = 1.0, mode: str = "coupled"
) -> Group:
    count = len(allowed)
    sequences = [decoding(speculation={"mode": mode}) for _ in allowed]
    late = np.zeros(count, bool)
    return Group(
        list(range(count)), sequences, list(allowed), [left] * count, late, 0, 0, False, plain, [1] * count
    )


def rates_of(group: Group, **firsts: tuple[float, ...]) -> AcceptanceRates:
    """By drafter, the acceptance of each sequence; of deeper tokens the same."""
    rates = AcceptanceRates()
    for name, each in firsts.items():
        for one, first in zip(group.sequences, each, strict=True):
            rates.of(one, name)
            rates.by_sequence[one][name] = AcceptanceRate(first, first, 12.0, earned=60, proven=True)
    return rates


def captured_costs(size: int) -> CapturedCosts:
    costs = CapturedCosts()
    for name in ("lm", "lookup"):
        known = [(name, tree, 1 + ROW * tree.nodes + LEVEL * tree.depth) for tree in (*CHAINS, *TREES)]
        costs.learn(name, size, [("none", NO_TREE, 1.0), *known])
    return costs


def eager_costs() -> EagerCosts:
    costs = EagerCosts()
    costs.by_rows, costs.per_level = {n: 1 + ROW * (n - 1) for n in range(1, 200)}, {"lm": LEVEL}
    return costs


def shared(group: Group, rates: AcceptanceRates, trees=CHAINS, lead: str = "lm", **more) -> Candidates:
    options = Options(len(group.sequences), model_free=("lookup",), **more)
    names = tuple(dict.fromkeys(name for names in group.allowed for name in names))
    estimates = Estimates(rates, group, names)
    return shared_trees(lead, trees, group, rates, estimates, captured_costs(len(group.sequences)), options)


def own(
    group: Group, rates: AcceptanceRates, others: tuple[str, ...] = (), max_depth: int = 15, **more
) -> Candidates:
    found = own_chains("lm", others, group, rates, eager_costs(), Options(**more), max_depth)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------ one tree for all


@pytest.mark.parametrize("seed", range(8))
def test_all_at_once_is_each_alone(seed: int) -> None:
    dice = random.Random(seed)
    group = group_of(
        *(dice.choice([("lm", "lookup"), ("lm",), ("lookup",)]) for _ in range(1 + seed)), ("lm",)
    )
    count, trees = len(group.sequences), (*CHAINS, *TREES)
    rates = rates_of(
        group, lm=[dice.random() for _ in range(count)], lookup=[dice.random() for _ in range(count)]
    )
    for one in group.sequences:
        rates.of(one, "lookup").idle = dice.randint(0, 1)
    found = shared(group, rates, trees)
    for column, tree in enumerate(trees):
        plans, gains = found.chosen(column), []
        for one, allowed, plan in zip(group.sequences, group.allowed, plans, strict=True):
            names = [name for name in allowed if name == "lm" or tree.is_chain]
            worth = {
                n: rates.of(one, n).accepted(tree) * (1 + MARGIN * (not rates.of(one, n).idle)) for n in names
            }
            best = max(worth, key=worth.__getitem__, default=None)
            assert plan == (DraftPlan(best, tree.nodes, tree.depth) if best else NO_DRAFT_PLAN)
            gains.append(rates.of(one, best).accepted(tree) if best else 0.0)
        assert found.gains[column] == pytest.approx(gains, abs=2e-3)  # rates of wider trees are rounded
        assert found.seconds[column] == pytest.approx(1 + ROW * tree.nodes + LEVEL * tree.depth)


def test_a_drafter_that_lags_is_paid_by_the_sequence_that_it_drafts_for() -> None:
    group = group_of(("lm",), ("lm",), ("lm", "lookup"))
    rates = rates_of(group, lm=(0.5, 0.5, 0.5), lookup=(0.0, 0.0, 0.1))
    costs = captured_costs(3)
    costs.per_token["lm"] = 0.01
    options = Options(3, model_free=("lookup",), lag={"lm": [0, 100, 100000]})
    estimates = Estimates(rates, group, ("lm", "lookup"))
    found = shared_trees("lm", CHAINS[:1], group, rates, estimates, costs, options)
    assert [plan.drafter for plan in found.chosen(0)] == ["lm", "lm", "lookup"]
    steps = 100 / 1.5
    assert found.seconds[0] == pytest.approx(1 + ROW + LEVEL + 100 * 0.01 / steps)  # spread over its steps
    rates.of(group.sequences[1], "lookup").used, group.sequences[1].steps = 100, 100
    found = shared_trees("lm", CHAINS[:1], group, rates, estimates, costs, options)
    assert found.chosen(0)[1] == NO_DRAFT_PLAN  # lookup leaves it no steps to draft in


def test_a_sequence_keeps_its_drafter_unless_another_is_clearly_better() -> None:
    for idle, used in ((1, "lookup"), (0, "lm")):
        group = group_of(("lm", "lookup"))
        rates = rates_of(group, lm=(0.6,), lookup=(0.6 * (1 + MARGIN / 2),))
        rates.of(group.sequences[0], "lm").idle = idle
        assert shared(group, rates, CHAINS[:1]).chosen(0)[0].drafter == used


def test_what_sequences_differ_by_is_subtracted() -> None:
    group = group_of(("lm",), ("lm",))
    alike, apart = rates_of(group, lm=(0.5, 0.5)), rates_of(group, lm=(0.1, 0.9))
    assert (shared(group, alike).caution < shared(group, apart).caution).all()
    assert not shared(group_of(("lm",)), rates_of(group_of(("lm",)), lm=(0.5,))).caution.any()


# ------------------------------------------------------------------------------------------ a chain for each


def test_nodes_are_added_by_descending_survival() -> None:
    group = group_of(("lm",), ("lm",))
    found = own(group, rates_of(group, lm=(0.9, 0.6)), max_depth=3)
    assert found.nodes == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert found.gains[4] == pytest.approx([0.9 + 0.81 + 0.729, 0.6])
    assert found.seconds[:5] == pytest.approx(
        [1, 1 + ROW + LEVEL, 1 + 2 * (ROW + LEVEL), 1 + 3 * (ROW + LEVEL), 1 + 4 * ROW + 3 * LEVEL]
    )
    assert found.chosen(4) == [DraftPlan("lm", 3, 3), DraftPlan("lm", 1, 1)]
    assert found.chosen(0) == [NO_DRAFT_PLAN] * 2


def test_second_choices_are_nodes_where_drafts_may_branch_and_never_for_rejection() -> None:
    for mode, branching, more in (("coupled", ("lm",), 2), ("coupled", (), 0), ("rejection", ("lm",), 0)):
        group = group_of(("lm",), mode=mode)
        found = own(group, rates_of(group, lm=(0.5,)), max_depth=2, branching=frozenset(branching))
        plan = found.chosen(len(found.nodes))[0]
        assert plan == DraftPlan("lm", 2 + more, 2)
        if more:
            assert found.gains[-1].sum() == pytest.approx(0.75 + SECOND * (0.5 + 0.25))


def test_how_deep_a_draft_may_be() -> None:
    group = group_of(("lm", "lookup"))
    (one,) = group.sequences
    rates = rates_of(group, lm=(0.5,), lookup=(0.5,))
    rate, free = rates.of(one, "lm"), rates.of(one, "lookup")
    rate.earned, free.first = 2, 0.0

    def deepest(found: Candidates) -> DraftPlan:
        return found.chosen(len(found.nodes))[0]

    assert deepest(own(group, rates)).depth == 3  # what accepted tokens have earned, and one
    assert deepest(own(group, rates, max_depth=2)).depth == 2
    one.limit = len(one.tokens) + 1
    assert deepest(own(group, rates)).depth == 1  # the answer's end
    one.limit, free.first, free.proven = 10**6, 0.8, False
    more = dict(others=("lookup",), model_free=("lookup",))
    assert deepest(own(group, rates, available={"lookup": [7]}, **more)) == DraftPlan(
        "lm", 3, 3
    )  # by one token
    free.proven = True
    assert deepest(own(group, rates, available={"lookup": [7]}, **more)) == DraftPlan("lookup", 7, 7)
    assert deepest(own(group, rates, available={"lookup": [0]}, **more)) == DraftPlan("lm", 3, 3)
    rate.earned = -1
    assert own_chains("lm", (), group, rates, eager_costs(), Options(), 15) is None  # nothing to draft


def test_a_head_that_lags_must_earn_its_prefill_for_each() -> None:
    group = group_of(("lm",), ("lm",))
    rates, costs = rates_of(group, lm=(0.5, 0.5)), eager_costs()
    costs.per_token["lm"] = 0.01
    found = own_chains("lm", (), group, rates, costs, Options(lag={"lm": [100, 100000]}), 1)
    assert found is not None and found.nodes == [(0, 1)]
    assert found.seconds[1] == pytest.approx(1 + ROW + LEVEL + 100 * 0.01 / (100 / 1.5))
