"""The runner executes a plan as it is, whatever requests share the step. Answers are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.planner import Planner
from outrider.control.trees import CHAINS, TREES
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphStep
from outrider.types import NO_TREE, Plan, Request, Speculation, Work
from tests.engine.scripted import pretend
from tests.tiny import (
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    run_alone,
    tiny_engine,
    tiny_model,
    tokens_of,
)

ASKED: list = [
    True, True, True, False, {"depth": 2}, {"depth": 5}, {"drafter": "lookup"}, {"drafter": "lookup", "depth": 4},
    {"depth": 2, "nodes": 6}, {"tree": [2, 2]}, {"mode": "rejection"},
]  # fmt: skip


@pytest.fixture(scope="module")
def models():
    return tiny_model(), noised_model(0.15)


def make_planner(row: float) -> Planner:
    """A draft row adds this share of a step; nothing is learned from the clock."""
    planner = Planner("lm", choices=("lm", "lookup"))
    costs = planner.costs
    costs.observe = partial(pretend, costs)
    costs.eager.by_rows = {n: 1 + row * (n - 1) for n in range(1, 300)}
    for name in ("lm", "lookup"):
        for size in (1, 2, 4, 8):
            known = [(name, tree, 1 + row * tree.nodes) for tree in (*CHAINS, *TREES)]
            costs.captured.learn(name, size, [("none", NO_TREE, 1.0), *known])
    return planner


def watch(engine: Engine) -> list[Plan]:
    """Compares each launched step with its plan. Returns the plans."""
    plans, launch = list[Plan](), engine.runner.launch

    def compared(work: list[Work], plan: Plan) -> GraphStep:
        step = launch(work, plan)
        assert isinstance(step, GraphStep) and step.shape is not None
        assert step.draft_plans == list(plan.draft_plans) and step.record.reasons == plan.reasons
        assert step.resident == [i for i, here in enumerate(plan.resident) if here]
        assert step.shape.tree == plan.tree and (plan.tree == NO_TREE or step.shape.drafters == plan.drafters)
        if step.record.captured is not None:
            assert step.record.captured.tree == plan.tree
        for i, draft in zip(step.packed_places, step.packed.drafts, strict=True):
            assert len(draft) <= plan.draft_plans[i].nodes
        assert (step.prefill is not None) <= bool(plan.prefills)
        plans.append(plan)
        return step

    engine.runner.launch = compared
    return plans


def plain(model, one: Request) -> list[int]:
    return run_alone(model, replace(one, params=replace(one.params, speculation=Speculation.of(False))))


@pytest.mark.parametrize("lag", [0, 1])
@settings(max_examples=6)
@given(data=st.data())
def test_a_plan_is_executed_as_it_is(models, lag, data) -> None:
    model, small = models
    requests = [
        request(
            f"r{i}", prompt_of(data.draw(st.integers(1, 40)), i), max_tokens=data.draw(st.integers(6, 25)), seed=i,
            speculation=(asked := data.draw(st.sampled_from(ASKED))),
            # The ratio test of `rejection` keeps the distribution and not the path.
            temperature=0.0 if asked == {"mode": "rejection"} else data.draw(st.sampled_from([0.0, 0.8, 1.6])),
            **data.draw(st.sampled_from([{}, {}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"min_tokens": 6}])),
        )
        for i in range(data.draw(st.integers(1, 6)))
    ]  # fmt: skip
    engine = tiny_engine(
        model, make_planner(data.draw(st.sampled_from([0.001, 0.05, 2.0]))), lag=lag, max_sequences=8,
        drafters=lambda cache: {"lookup": LookupDrafter(), "lm": lm_drafter(small, cache)},
    )  # fmt: skip
    plans, found, waiting = watch(engine), {one.id: [] for one in requests}, list(requests)
    while waiting or not engine.idle:
        if waiting and (engine.idle or data.draw(st.booleans())):
            engine.add(waiting.pop(0))
        for event in (event for result in engine.step() for event in result.events):
            found[event.request_id] += event.token_ids
    engine.table.check()
    assert plans and not engine.drafters.faults
    assert found == {one.id: plain(model, one) for one in requests}


def test_steps_with_drafts_of_all_kinds_are_among_them(models) -> None:
    """A shared tree with a drafter each, a draft that the host makes, a prefill and a kept plan."""
    model, small = models
    engine = tiny_engine(
        model, make_planner(0.001), lag=1,
        drafters=lambda cache: {"lookup": LookupDrafter(), "lm": lm_drafter(small, cache)},
    )  # fmt: skip
    plans = watch(engine)
    asked = ({"depth": 4}, {"drafter": "lookup", "depth": 4}, {"tree": [2, 2]}, False)
    requests = [
        request(f"r{i}", prompt_of(9, i) * 3, max_tokens=30, speculation=how) for i, how in enumerate(asked)
    ]
    for one in requests:
        engine.add(one)
    found = {key[0]: tokens_of(events) for key, events in finish(engine).items()}
    assert found == {one.id: plain(model, one) for one in requests}
    off = request("off", prompt_of(9), max_tokens=30, speculation=False)
    engine.add(off)
    finish(engine)
    assert any(plan.drafters == ("lm", "lookup") and plan.tree == (4, 4) for plan in plans)
    assert any(plan.prefills for plan in plans) and any(plan.cached for plan in plans)
    assert any(
        one.tree == (2, 2) and not here
        for plan in plans
        for one, here in zip(plan.draft_plans, plan.resident, strict=True)
    )
