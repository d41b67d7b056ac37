"""Rounds in CUDA graphs: the same tokens as packed steps on the same device, speculating or not."""

from __future__ import annotations

import pytest
import torch

from outrider.control.planner import Planner
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.model.decoder import Decoder
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import MAX_NODES
from tests.engine.test_rounds import run, some_requests
from tests.tiny import VOCAB, Letters, finish, noised, random_tensors, request, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


def make_engine(models, fly: bool, default: str = "lm") -> Engine:
    from outrider.engine.flying import make_rounds

    target, small = models
    settings = Settings(max_sequences=32, step_rows=256, cache_bytes=1 << 26, check_integrity=True)
    engine = Engine(target, settings, Letters)
    drafters = {"lookup": LookupDrafter(), "lm": LmDrafter(small, 20_000, 32, 512, VOCAB)}
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
