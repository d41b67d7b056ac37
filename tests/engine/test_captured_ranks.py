"""Captured steps of ranks that share a model: the tokens of one process, with every drafter.

Here ranks are threads that gather over gloo, and tests/model/replayed.py stands in for graphs. captured_ranks.py runs
the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.control.planner import Planner
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.kv_cache import make_kv_cache
from outrider.model.decoder import Decoder, make_store
from outrider.model.parallel import ALONE, Group, Ranks, SharedGraph, follow
from outrider.settings import Settings, cache_folder
from outrider.types import DraftPlan, Request
from tests.model.families import NEEDS_COMPILER
from tests.model.replayed import Line, Messages, captured
from tests.model.test_parallel import decoder, on_ranks
from tests.tiny import (
    VOCAB,
    Always,
    Letters,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    random_tensors,
    request,
    tiny_config,
    tokens_of,
)

pytestmark = NEEDS_COMPILER
SETTINGS = Settings(max_sequences=8, step_rows=24, cache_bytes=1 << 22)


def engine_of(model: Decoder, small: Decoder, planner: Any, record: Any) -> Engine:
    cache = make_kv_cache(model, SETTINGS)
    some = {
        "lookup": LookupDrafter(),
        "lm": lm_drafter(small, cache),
        "early_exit": EarlyExitDrafter(model, cache.store, cache.table, 1),
    }
    drafters = Drafters(some, VOCAB)
    rows, width = cache.table.tensor.shape
    ops = StepOps(SequenceState(rows, width, torch.device("cpu"), VOCAB), model)
    run = model.make_pass(cache.store)
    runner = GraphRunner(model, cache, drafters, ops, run, record, 1, planner.default)
    return Engine(model, cache, drafters, planner, runner, SETTINGS, Letters)


def requests() -> list[Request]:
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"min_tokens": 5}, {"logit_bias": {3: 2.0}}]
    return [
        request(f"r{i}", prompt_of(3 + 9 * i, i), max_tokens=9, temperature=0.7 * (i % 2), **kinds[i % 4])
        for i in range(6)
    ]


def answers(engine: Engine) -> dict[str, list[int]]:
    some = requests()
    for one in some:
        engine.add(one)
    found = finish(engine)
    return {one.id: tokens_of(found[one.id, 0]) for one in some}


@pytest.mark.parametrize("drafter", ["none", "lm", "early_exit", "lookup"])
def test_captured_steps_of_two_ranks_emit_the_tokens_of_one_process(
    drafter: str,
) -> None:
    config = tiny_config()
    small, read, line = noised_model(0.15), random_tensors(config), Line()
    messages = Messages(iter(line))
    plan = Always(DraftPlan(drafter, 3, 3)) if drafter != "none" else Planner("none")

    def whole(group: Group) -> Decoder:
        return decoder(config, read, cache_folder() / "kernels", group)

    expected = answers(engine_of(whole(ALONE), small, Planner("none"), None))

    def run(group: Ranks) -> Any:
        model = whole(group)
        if group.rank:
            return follow(model, messages, lambda slots: make_store(model, slots), messages.capture)
        group.channel = line

        def record(step: Callable[[], Any]) -> tuple[Any, Any]:
            step()
            return group.recorded(lambda: captured(group, step))

        try:
            engine = engine_of(model, small, plan, record)
            found = answers(engine)
            graphs = [step.graph for step in engine.runner.graphs.steps.values()]
            assert any(isinstance(graph, SharedGraph) for graph in graphs)
            return found
        finally:
            line.messages.put(None)

    found, _ = on_ranks(2, run)
    assert found == expected
    assert messages.calls.count("replay") > 3
