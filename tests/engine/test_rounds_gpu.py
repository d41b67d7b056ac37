"""Rounds in CUDA graphs: the same tokens as packed steps on the same device, speculating or not."""

from __future__ import annotations

import gc

import pytest
import torch

from outrider.control.planner import Planner
from outrider.control.trees import TREES
from outrider.draft import tree
from outrider.draft.eagle import EagleDrafter, load_eagle
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.recording import record
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import MAX_NODES, Bet
from tests.engine.test_rounds import run, some_requests
from tests.engine.test_target_chains import Silent, Steady
from tests.tiny import (
    VOCAB,
    Letters,
    eagle_tensors,
    finish,
    noised,
    prompt_of,
    random_tensors,
    request,
    tiny_config,
    write_eagle,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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

    torch.set_grad_enabled(False)
    config = tiny_config(**SHAPE)

    def make(read, to_host: bool = False) -> DeviceDecoder:
        kernels = GpuKernels(config, *rope_tables(config, config.context + MAX_NODES + 1))
        return DeviceDecoder(Decoder(config, read, kernels), to_host)

    return make(random_tensors(config)), make(noised(config, 0, 0.05), to_host=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config(**SHAPE)
    return write_eagle(tmp_path_factory.mktemp("eagle"), config, eagle_tensors(config, VOCAB))


def make_engine(models, fly: bool, default: str = "lm", folder=None) -> Engine:
    from outrider.engine.flying import make_rounds

    target, small = models
    settings = Settings(max_sequences=32, step_rows=256, cache_bytes=1 << 26, check_integrity=True)
    engine = Engine(target, settings, Letters)
    drafters = {"lookup": LookupDrafter(), "lm": LmDrafter(small, 20_000, 32, 512, VOCAB)}
    drafters["early_exit"] = EarlyExitDrafter(target, engine.store, engine.table, 2)
    if folder is not None:
        head = load_eagle(folder, target, engine.context)
        drafters["eagle"] = EagleDrafter(head, engine.store, engine.table, 20_000, engine.context)
    engine.use_drafters(drafters, Planner(default))
    if fly:
        engine.rounds = make_rounds(engine)
    return engine


@pytest.mark.parametrize("default", ["lm", "lookup"])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_tell_what_packed_steps_tell(models, default, seed) -> None:
    requests = some_requests(seed)
    assert run(make_engine(models, True, default), requests) == run(
        make_engine(models, False, default), requests
    )


@pytest.mark.parametrize("default", ["lm", "lookup"])
def test_prepared_rounds_tell_the_same(models, default) -> None:
    engine = make_engine(models, True, default)
    for _ in engine.preparing(4):
        pass
    assert engine.rounds is not None and engine.rounds.made == {1, 2, 4}
    assert engine.planner.costs.per_token.keys() == ({"lm"} if default == "lm" else set())
    requests = some_requests(1)
    assert run(engine, requests) == run(make_engine(models, False, default), requests)


@pytest.mark.parametrize("name", ["early_exit", "eagle", "lm"])
def test_drafters_guess_in_rounds_as_they_do_packed(models, folder, name, monkeypatch) -> None:
    monkeypatch.setattr(tree, "CANDIDATES", VOCAB)  # on the device every token takes part
    asked = [
        request(f"r{i}", prompt_of(5 + 9 * i, i), max_tokens=80, temperature=0.7, seed=i) for i in range(5)
    ]
    packed = make_engine(models, False, name, folder)
    silent = Silent(packed.drafters[name])
    packed.use_drafters({name: silent}, Steady(Bet(name, 4, 4)))
    answers = {key[0]: tokens for key, tokens in run(packed, asked).items()}
    engine = make_engine(models, True, name, folder)
    engine.planner = Steady(Bet(name, 4, 4))
    sequences = [engine.add(one)[0] for one in asked]
    seen: dict[tuple[str, int], tuple[int, ...]] = {}
    commit = engine._commit

    def noting(picks, drafts, bets, verdicts):
        for pick, draft in zip(picks, drafts, strict=True):
            if pick.guessed is not None:  # a round's; graphs cannot be watched from inside
                seen[pick.sequence.request.id, len(pick.sequence.tokens)] = draft.tokens
        return commit(picks, drafts, bets, verdicts)

    monkeypatch.setattr(engine, "_commit", noting)
    finish(engine)
    assert {s.request.id: s.output for s in sequences} == answers
    compared = {key: tokens for key, tokens in seen.items() if key in silent.seen}
    assert len(compared) > 100
    assert all(tokens == silent.seen[key][0] for key, tokens in compared.items())


def test_guesses_change_nothing_and_hold(models) -> None:
    def ask(**how):
        return [
            request(
                f"r{i}",
                [5, 9, 11 + i, 7] * 6,
                max_tokens=60,
                temperature=0.7,
                seed=i,
                speculation=how or False,
            )
            for i in range(6)
        ]

    engine = make_engine(models, True)
    sequences = [engine.add(one)[0] for one in ask(drafter="lm", depth=4)]
    finish(engine)
    plain = run(make_engine(models, True), ask())
    assert {(s.request.id, 0): s.output for s in sequences} == plain
    assert sum(s.accepted for s in sequences) > 0.2 * sum(s.drafted for s in sequences)
    assert all(s.steps < len(s.output) for s in sequences)


@pytest.mark.parametrize("form", TREES)
def test_trees_change_nothing(models, form) -> None:
    asked = [
        request(f"r{i}", prompt_of(5 + 20 * i, i), max_tokens=150, temperature=0.7, seed=i) for i in range(3)
    ]
    plain = run(make_engine(models, False, "none"), asked)
    engine = make_engine(models, True)
    engine.planner = Steady(Bet("lm", form[1], form[0]))
    sequences = [engine.add(one)[0] for one in asked]
    while not engine.idle:
        engine.step()
    engine._land(0)
    assert {(s.request.id, 0): s.output for s in sequences} == plain
    assert sum(s.accepted for s in sequences) > 0.5 * sum(s.steps for s in sequences)
