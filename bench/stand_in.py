"""A stand-in for a GPU: an engine whose steps take a set time, in which the host has nothing to do, and whose tokens
are made up. Everything else is real: scheduler, KV cache's table, detokenising, the server's processes.

    python -m bench.stand_in serve smollm2-135m --port 0        the server, with such an engine
    STEP_MS=5 ...                                               what a step takes

As with captured graphs the host is one step behind: a step is launched while the one before it runs, and waiting for
one is a sleep, during which other threads may run.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider import LLM
from outrider.cli.main import run
from outrider.control.planner import Planner
from outrider.control.trees import NO_TREE
from outrider.draft.drafters import Drafters
from outrider.draft.names import Part
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KvCache, make_kv_cache
from outrider.engine.live_draft import LiveDraft
from outrider.engine.runner import EagerRunner, InFlightStep, Result, StagedPart
from outrider.serve import engine_process
from outrider.serve.backend import Backend
from outrider.types import NO_DRAFT, Batch, Options, Plan, Verdict, Work

LAST = 4000  # token ids that are made up: up to here they are words and parts of words in most vocabularies


class NoModel:
    """Of the right shape; computes nothing."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        self.config = config

    def forward(self, batch: Batch, store: Any) -> Tensor:
        raise AssertionError("nothing is computed here")

    def weight_bytes(self) -> int:
        return 0


class TimedRunner(EagerRunner):
    """Steps take `seconds` each, one after the other, whatever is in them."""

    lag = 1

    def __init__(
        self, model: Any, cache: KvCache, drafters: Drafters, seconds: float, tokens: Seq[int]
    ) -> None:
        super().__init__(model, cache, drafters)
        self.seconds, self.free_at = seconds, 0.0
        self.tokens = itertools.cycle(tokens)

    def options(self, work: Seq[Work], waiting: int) -> Options:
        return Options()

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        step = InFlightStep(work, list(plan.bets), plan.reasons, StagedPart([], []))
        for one in work:
            decodes = one.emits and one.known == 1 and one.sequence.launched == 0
            one.launch(1, wait=not decodes)
        step.rows = sum(one.known for one in work)
        step.captured = ("none", NO_TREE, len(work))
        self.free_at = max(time.perf_counter(), self.free_at) + self.seconds
        step.ready = self.free_at
        return step

    def finish(self, step: InFlightStep) -> list[Result]:
        time.sleep(max(0.0, step.ready - time.perf_counter()))
        step.target_s = self.seconds
        return [(NO_DRAFT, Verdict([next(self.tokens)], []) if one.emits else None) for one in step.work]

    def measure_rows(self, sequences: int, known: Mapping[int, float]) -> Iterator[tuple[int, float]]:
        return iter(())


class StandIn(LLM):
    def _build(self, parts: Seq[Part]) -> Engine:
        torch.set_num_threads(1)
        assert self.checkpoint.config is not None
        self.settings = replace(self.settings.placed(None), max_sequences=256, step_rows=2048)
        # One layer's keys: room for all, in little memory.
        self.model = NoModel(replace(self.checkpoint.config, layers=1))  # type: ignore[assignment]
        cache = make_kv_cache(self.model, self.settings)
        self.drafter, drafters = "none", Drafters({}, self.model.config.vocab)
        self.live_draft = LiveDraft((), drafters, self._sources(cache))
        # Whole characters: a token without text is an event less, and would look like one that came late.
        known = range(min(LAST, self.model.config.vocab))
        shown = [token for token in known if self.tokenizer.decode([token]).isascii()]
        seconds = float(os.environ.get("STEP_MS", "5")) / 1000
        shuffled = random.Random(1).sample(shown, len(shown))
        runner = TimedRunner(self.model, cache, drafters, seconds, shuffled)
        text = self.tokenizer.text_stream
        return Engine(self.model, cache, drafters, Planner("none"), runner, self.settings, text)


def main() -> int:
    if sys.argv[1].isdigit():  # as the server starts it
        engine_process.LLM = StandIn  # type: ignore[misc]
        return engine_process.main(int(sys.argv[1]))
    Backend.engine_module = "bench.stand_in"
    os.environ["PYTHONPATH"] = os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", "")))
    run(sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
