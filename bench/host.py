"""What the host does for every token when many sequences run at once: a model that costs nothing answers at random.

    python -m bench.host --sequences 512 --tokens 128

The engine, its steps and the tokenizer are the real ones; only the device's part of a step is replaced, and the
time it takes is not counted. Times are the processor's, so that other work on the machine does not count either.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.control.planner import Planner
from outrider.device.capture import CapturedStep
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.kv_cache import make_kv_cache
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import Settings, cache_folder
from outrider.types import Batch, Request, SamplingParams


class Free:
    """A model of the right shape that computes nothing."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, batch: Batch, store: Any) -> Tensor:
        return torch.zeros(len(batch.logit_rows), 1)

    def filter_logits(self, logits: Tensor, *_: Tensor) -> Tensor:
        return logits

    def draw(self, logits: Tensor, *_: Tensor) -> Tensor:
        return torch.randint(100, 4000, (len(logits),), generator=self.generator)


class Clock:
    """Seconds spent in one function, which is replaced by one that counts."""

    def __init__(self, owner: type, name: str) -> None:
        self.spent = 0.0
        inner = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return inner(*args, **options)
            finally:
                self.spent += time.process_time() - begin

        setattr(owner, name, counted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--speculation", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--single", action="store_true", help="one plain pass a step, however far behind the host is"
    )
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(find(given.model, cache_folder()))
    assert checkpoint.config is not None
    model = Free(replace(checkpoint.config, layers=1))  # one layer's keys: room for all, in little memory
    settings = Settings(context=1024, max_sequences=given.sequences, step_rows=2048, cache_bytes=1 << 30)
    cache = make_kv_cache(model, settings)
    drafters = Drafters({"lookup": LookupDrafter()}, model.config.vocab)
    rows, width = cache.table.tensor.shape
    ops = StepOps(SequenceState(rows, width, model.device), model)
    runner = GraphRunner(
        model, cache, drafters, ops, lambda batch, *_: model.forward(batch, None), default="lookup"
    )
    if given.single:
        runner.runs.choose = lambda *_: 1
    text = checkpoint.tokenizer.text_stream
    engine = Engine(model, cache, drafters, Planner("lookup"), runner, settings, text)
    away = Clock(CapturedStep, "_step")
    params = SamplingParams(
        temperature=0.7, max_tokens=given.tokens, ignore_eos=True, speculation=given.speculation
    )
    begin = time.process_time()
    for i in range(given.sequences):
        engine.add(Request(f"r{i}", tuple(range(1 + i, 1 + i + given.prompt)), params, i))
    added = time.process_time()
    profile = cProfile.Profile()
    if given.profile:
        profile.enable()
    prompts = 0.0
    while not engine.idle:
        engine.step()
        if not prompts and any(step.captured for step in engine.in_flight):
            prompts = time.process_time()
    done = time.process_time()
    profile.disable()
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    tokens = given.sequences * given.tokens
    print(f"{given.sequences} sequences, {given.tokens} tokens each")
    print(f"taking requests in: {(added - begin) / given.sequences * 1e6:.1f} us a request")
    print(f"reading prompts: {prompts - added:.3f} s")
    print(f"steps: {(done - prompts - away.spent) / tokens * 1e6:.2f} us a token on the host")


if __name__ == "__main__":
    main()
