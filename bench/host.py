"""Compares plain decoding with an engine whose drafters (lookup and a model) never pay, beside a simulated device.

    python -m bench.host --sequences 32 --pass-ms 1.58 --rounds 7

Engine, steps and tokenizer are the real ones; the model answers at random. Each pass takes that long beside the host,
on a simulated clock: processor time of the host counts `--slower` times, and waiting advances the clock, so that other
programs do not matter. bench/replay_gpu.py prints the host's time by its parts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.control.planner import Planner
from outrider.device.buckets import sizes_up_to
from outrider.device.capture import CapturedStep
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafter import Drafter
from outrider.draft.drafters import Drafters
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine import engine as engine_module
from outrider.engine import graph_runner as runner_module
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.kv_cache import make_kv_cache
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.model.parallel import ALONE
from outrider.settings import Settings, cache_folder
from outrider.types import NO_TREE, Batch, Request, SamplingParams, Sequence, TreeShape

PROMPT_MS, STAGED_MS = 0.01, 1.2  # a prompt's token, and a step that has some
DEAR = 4.0  # times a pass, that the model's draft takes beside the passes of its tree


class Free:
    """A model of the right shape that computes nothing."""

    device, dtype, kept, group, experts_read = torch.device("cpu"), torch.float32, torch.float32, ALONE, 0.0

    def __init__(self, config: Any) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, batch: Batch, store: Any) -> Tensor:
        return torch.zeros(len(batch.logit_rows), 1)

    def filter_logits(self, logits: Tensor, *_: Tensor) -> Tensor:
        return logits

    def draw(self, logits: Tensor, *_: Tensor) -> Tensor:
        return torch.randint(100, 4000, (len(logits),), generator=self.generator)


class Unread(LmDrafter):
    """A draft model that is never asked: the planner sees what it would have to read and what it costs."""

    trees = False

    def __init__(self) -> None:
        self.max_depth = 4

    def start(self, sequence: Sequence) -> None: ...

    def stop(self, sequence: Sequence) -> None: ...

    def tokens_behind(self, sequence: Sequence, coming: int = 0) -> int:
        return len(sequence.tokens)


class Clock:
    """Seconds spent in one function, which is replaced by one that counts."""

    def __init__(self, owner: type, name: str) -> None:
        self.spent, self.owner, self.name, self.inner = 0.0, owner, name, getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return self.inner(*args, **options)
            finally:
                self.spent += time.process_time() - begin

        setattr(owner, name, counted)

    def stop(self) -> None:
        setattr(self.owner, self.name, self.inner)


class Reckoned:
    """The processor's clock, without what the device's part took here and with what the host waits for it."""

    def __init__(self, away: Clock, slower: float) -> None:
        self.away, self.slower = away, slower
        self.waited, self.free_at = 0.0, 0.0

    def perf_counter(self) -> float:
        return (time.process_time() - self.away.spent) * self.slower + self.waited

    monotonic = perf_counter


class Running:
    """A step on its way on such a device, in place of a timer."""

    def __init__(self, clock: Reckoned, seconds: float) -> None:
        self.clock, self.took = clock, seconds
        self.ready = clock.free_at = max(clock.free_at, clock.perf_counter()) + seconds

    done = property(lambda self: self.clock.perf_counter() >= self.ready)

    def wait(self) -> None:
        self.clock.waited += max(0.0, self.ready - self.clock.perf_counter())

    def seconds(self) -> float:
        return self.took


def build(
    given: argparse.Namespace,
    drafting: dict[str, Drafter],
    seconds: Callable[..., float],
    target: type[Free] = Free,
    model: str = "smollm2-135m",
) -> Engine:
    """An engine of captured steps without a device; its first drafter is the default. All sizes are there, and the
    planner knows what their steps take: by draft tree, size, lead and prompt rows.
    """
    checkpoint = open_checkpoint(find(model, cache_folder()))
    assert checkpoint.config is not None
    # With one layer's keys: room for all, in little memory.
    made: Any = target(checkpoint.config.reshaped(layers=1))
    settings = Settings(context=2048, max_sequences=given.sequences, step_rows=2048, cache_bytes=1 << 30)
    cache, drafters = make_kv_cache(made, settings), Drafters(drafting, made.config.vocab)
    default = next(iter(drafting), "none")
    ops = StepOps(SequenceState(*cache.table.tensor.shape, made.device), made)
    runner = GraphRunner(
        made, cache, drafters, ops, lambda batch, *_: made.forward(batch, None), default=default
    )
    planner = Planner(default, choices=tuple(drafting))
    runner.preparation.on_demand, costs = False, planner.costs.captured
    for size in sizes_up_to(given.sequences):
        runner.sizes.made.add(size)
        for name in drafting or ["none"]:
            trees = [(name, tree, seconds(tree, size, name)) for tree in runner.shapes.trees(name, size)]
            costs.learn(name, size, [("none", NO_TREE, seconds(NO_TREE, size)), *trees])
    return Engine(made, cache, drafters, planner, runner, settings, checkpoint.tokenizer.text_stream)


def requests(given: argparse.Namespace, label: str, seed: int) -> Iterator[Request]:
    params = SamplingParams(
        temperature=0.7, max_tokens=given.tokens, ignore_eos=True, speculation=given.speculation
    )
    dice = random.Random(seed)
    for i in range(given.sequences):
        yield Request(f"{label}.{i}", tuple(dice.choices(range(100, 4000), k=given.prompt)), params, i)


def beside_a_device(given: argparse.Namespace) -> None:
    drafting: dict[str, dict[str, Drafter]] = {
        "plain": {},
        "auto": {"lm": Unread(), "lookup": LookupDrafter()},
    }
    away = Clock(CapturedStep, "_step")
    clock = Reckoned(away, given.slower)
    second = given.pass_ms / 1e3

    def seconds(tree: TreeShape, size: int, lead: str = "none") -> float:
        """No draft is worth what it costs."""
        return second * (1 if tree == NO_TREE else 1.1 + 0.2 * tree.nodes + DEAR * (lead == "lm"))

    def took(step: Any) -> float:
        known = sum(one.known for one in step.packed.work)
        prompts = (PROMPT_MS * known + STAGED_MS * bool(known)) / 1e3
        return second * step.record.passes * bool(step.resident) + prompts

    engines = {method: build(given, some, seconds, model=given.model) for method, some in drafting.items()}
    for engine in engines.values():
        engine.planner._probe = lambda *_: None  # type: ignore[method-assign] - there is nothing to ask
        assert isinstance(engine.runner, GraphRunner)
        time_steps(engine.runner, clock, took)
    took: dict[str, list[float]] = {method: [] for method in engines}
    passes: dict[str, list[int]] = {method: [] for method in engines}
    with timed_by(clock):
        for number in range(given.rounds + 2):  # two to get to know the host
            for method, engine in engines.items():
                begin = clock.perf_counter()
                for one in requests(given, f"{method}{number}", number):
                    engine.add(one)
                while not engine.idle:
                    passes[method] += [result.record.passes for result in engine.step()]
                took[method].append(clock.perf_counter() - begin)
    away.stop()
    rounds = [
        plain / auto for plain, auto in zip(*(took[method][2:] for method in ("plain", "auto")), strict=True)
    ]
    print(
        f"{given.sequences} sequences of {given.tokens} tokens, {given.pass_ms:g} ms a pass, host x{given.slower:g}"
    )
    for method, all_rounds in took.items():
        seconds = statistics.median(all_rounds[2:])
        rate, each = given.sequences * given.tokens / seconds, statistics.mean(passes[method])
        print(f"{method:6} {rate:9.0f} tok/s, {each:.1f} passes a step")
    print(
        f"auto, of which nothing pays: {statistics.median(rounds):.3f}x plain (lowest round {min(rounds):.3f}x)"
    )


def time_steps(runner: GraphRunner, clock: Reckoned, took: Callable[[Any], float]) -> None:
    """Have each step take so long on the device."""
    send = runner._send

    def sent(step: Any, *rest: Any) -> Any:
        launched = send(step, *rest)
        launched.timer = Running(clock, took(step))
        read = step.record.experts * step.record.passes * runner.mixtures  # as its passes count them
        launched.experts = torch.tensor([read])
        return launched

    runner._send = sent  # type: ignore[method-assign]


@contextmanager
def timed_by(clock: Reckoned) -> Iterator[None]:
    """The engine and its steps read this clock."""
    modules: tuple[Any, ...] = (engine_module, runner_module)
    try:
        for module in modules:
            module.time = clock
        yield
    finally:
        for module in modules:
            module.time = time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--speculation", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pass-ms", type=float, default=1.58, help="of the device")
    parser.add_argument("--slower", type=float, default=1.0, help="times as slow a host as this one")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    beside_a_device(given)


if __name__ == "__main__":
    main()
