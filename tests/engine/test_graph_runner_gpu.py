"""Steps in CUDA graphs: the same tokens as eager steps on the same device, speculating or not, whoever arrives."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from outrider.control.planner import Planner
from outrider.control.trees import TREES
from outrider.device.state import Change, SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.eagle import EagleDrafter
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.eager_runner import EagerRunner
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import make_graph_runner
from outrider.engine.kv_cache import make_kv_cache
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.recording import record
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import MAX_NODES, DraftPlan, Request
from tests.tiny import (
    VOCAB,
    Always,
    Letters,
    arriving,
    eagle_tensors,
    finish,
    noised,
    prompt_of,
    random_tensors,
    request,
    sequence,
    tiny_config,
    tokens_of,
    write_eagle,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_uploading_a_sequence_waits_for_nothing() -> None:
    """A step is in flight meanwhile: the host would stand still until it is through."""
    state, entries = SequenceState(4, 64, torch.device("cuda"), VOCAB), np.arange(64, dtype=np.int32)
    asked = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.2, logit_bias={3: 1.0})
    for turn in range(2):  # the first time, memory is taken
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            for row, options in ((0, asked), (1, dict(prediction=(4, 5))), (2, {}), (0, {}), (1, {})):
                one = sequence(prompt_of(20), row=row, cached=12, prompt=15, **options)
                state.upload(one, entries)
                one.cached = 18
                state.bring([Change(one, entries, 20, 12)])
                state.upload_slots(row, 3, entries[3:9])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert state.lengths.tolist() == [18, 18, 18, 0, 0]


def test_graphs_of_a_dead_engine_do_not_spoil_a_recording() -> None:
    class Dead:
        def __init__(self) -> None:
            self.itself, self.graph = self, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                torch.zeros(1, device="cuda").add_(1)

    x = torch.zeros(1, device="cuda")

    def work() -> torch.Tensor:
        kept_alive = [[] for _ in range(9)]  # enough to set the collector off
        return x.add_(len(kept_alive))

    gc.collect()
    gc.disable()
    Dead()
    gc.enable()
    kept = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graph, _ = record(work)
    finally:
        gc.set_threshold(*kept)
    graph.replay()
    assert x.item() == 18 and gc.isenabled()


SHAPE = dict(
    hidden=256, heads=8, kv_heads=4, head_dim=64, intermediate=512, layers=3, context=512, windows=(0,) * 3
)


@pytest.fixture(scope="module")
def models():
    from outrider.model.device import DeviceDecoder
    from outrider.model.kernels.gpu.kernels import GpuKernels

    config = tiny_config(**SHAPE)

    def make(read) -> DeviceDecoder:
        kernels = GpuKernels(config, rope_tables(config, config.context + MAX_NODES + 1))
        return DeviceDecoder(Decoder(config, read, kernels))

    return make(random_tensors(config)), make(noised(config, 0, 0.05))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config(**SHAPE)
    return write_eagle(tmp_path_factory.mktemp("eagle"), config, eagle_tensors(config, VOCAB))


def make_engine(models, captured: bool, planner=None, folder=None) -> Engine:
    """`captured`: resident rows in CUDA graphs, the host a step behind; else all rows are packed by the host."""
    from outrider.draft.eagle_head import load_eagle
    from outrider.draft.eagle_head_gpu import GpuEagleHead
    from outrider.model.device import GraphedPass
    from outrider.model.kernels.gpu.copies import find_copies

    target, small = models
    settings = Settings(max_sequences=32, step_rows=256, cache_bytes=1 << 26)
    cache = make_kv_cache(target, settings)
    by_name = {
        "lookup": LookupDrafter(find=find_copies),
        "lm": LmDrafter(small, cache.table, VOCAB, cache.context, GraphedPass),
        "early_exit": EarlyExitDrafter(target, cache.store, cache.table, 2),
    }
    if folder is not None:
        head = load_eagle(folder, target, cache.context, GpuEagleHead)
        by_name["eagle"] = EagleDrafter(head, cache.store, cache.table, graphed=GraphedPass)
    drafters = Drafters(by_name, VOCAB)
    runner = (
        make_graph_runner(target, cache, drafters, "lm") if captured else EagerRunner(target, cache, drafters)
    )
    return Engine(target, cache, drafters, planner or Planner(), runner, settings, Letters)


def some_requests(seed: int, count: int = 14) -> list[Request]:
    """Requests of every kind that differs in how its rows are drafted, sampled or verified."""
    rnd, made = random.Random(seed), []
    kinds: list[dict] = [
        {},
        {"logprobs": 3},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0, 5: -4.0}},
        {"min_tokens": 20},
        {"speculation": {"depth": 3}},
        {"speculation": {"tree": [2, 2]}},
        {"speculation": {"drafter": "early_exit", "depth": 2}},
        {"speculation": False},
    ]
    for i in range(count):
        prediction = prompt_of(20, i) if i % 5 == 4 else ()
        made.append(
            request(
                f"r{i}", prompt_of(rnd.randint(3, 200), i + seed), max_tokens=rnd.randint(20, 60),
                prediction=prediction, temperature=rnd.choice([0, 0.7, 1.0]), top_k=rnd.choice([0, 0, 20]),
                top_p=rnd.choice([1.0, 0.9]), **kinds[i % len(kinds)],
            )
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def alone(models):
    """Each request alone, plain and packed by the host."""
    answers = {}
    for seed in range(2):
        engine = make_engine(models, False)
        for one in some_requests(seed):
            engine.add(one)
            answers[seed, one.id] = tokens_of(finish(engine)[one.id, 0])
    return answers


PLANNERS = {
    "plain": lambda: Planner("none"),
    "lm": lambda: Always(DraftPlan("lm", 4, 4)),
    "lookup": lambda: Always(DraftPlan("lookup", 4, 4)),
    "auto": lambda: Planner("lm", choices=("lm", "lookup")),
    **{f"tree of {tree[1]}": lambda tree=tree: Always(DraftPlan("lm", tree[1], tree[0])) for tree in TREES},
}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("seed", range(2))
def test_captured_steps_emit_what_eager_ones_do(models, alone, planner, seed) -> None:
    engine = make_engine(models, True, PLANNERS[planner]())
    received = arriving(engine, some_requests(seed), random.Random(seed))
    assert received == {one: alone[seed, one] for one in received}
    assert any(step.graph is not None for step in engine.runner.graphs.steps.values())


@pytest.mark.parametrize("default", ["lm", "lookup"])
def test_prepared_steps_emit_the_same(models, alone, default) -> None:
    engine = make_engine(models, True, Planner(default, choices=(default,)))
    for _ in engine.prepare(4):
        pass
    assert engine.runner.sizes.made == {1, 2, 4}
    assert {size for _, size in engine.planner.costs.captured.measured} == {1, 2, 4}
    received = arriving(engine, some_requests(1), random.Random(1))
    assert received == {one: alone[1, one] for one in received}


@pytest.mark.parametrize("name", ["early_exit", "eagle", "lm"])
def test_drafts_of_captured_steps_are_accepted(models, folder, name) -> None:
    """As often as those of eager steps, which read everything before they draft."""
    asked = [
        request(f"r{i}", prompt_of(5 + 9 * i, i), max_tokens=80, temperature=0.7, seed=i) for i in range(5)
    ]
    rates = []
    for captured in (False, True):
        engine = make_engine(models, captured, Always(DraftPlan(name, 4, 4)), folder)
        sequences = [engine.add(one)[0] for one in asked]
        finish(engine)
        rates.append(sum(s.accepted for s in sequences) / sum(s.steps for s in sequences))
    assert rates[1] == pytest.approx(rates[0], rel=0.15, abs=0.05)
