"""Replays recorded answers through the whole engine beside a simulated GPU.

    python -m bench.replay --record answers.json --model MODEL --prompts FILE --temperatures 0.7 --max-tokens 112
    python -m bench.replay_gpu answers.json --batches 1,4,16,64 --rounds 4

Engine, planner, scheduler and lookup are the real ones. The target emits the recorded tokens, and a step takes the
time of a table (`PASS_MS`, `ROWS_MS`, `PROMPT_MS`: a 1.5B model on an H200). The clock is that of bench/host.py: the
host's own work counts `--slower` times, and other programs do not matter. It compares plain decoding, the planner's
choice with lookup, and lookup with four tokens in every step. The first round of each cell does not count: the
planner learns in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import host
from outrider.bench.answering import out_of_the_collectors_sight
from outrider.device.buckets import bucket, chunk_sizes, sizes_up_to
from outrider.device.capture import CapturedStep
from outrider.draft.drafter import Drafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder
from outrider.types import NO_TREE, Batch, Request, SamplingParams, TreeShape

TEMPERATURE = 0.7
DEPTH = 4  # of the fixed method
# Milliseconds of a pass by sequences, what more rows add to it, and a prompt's token: measured on a card.
PASS_MS = {1: 1.24, 2: 1.26, 4: 1.29, 8: 1.31, 16: 1.35, 32: 1.60, 64: 1.90, 128: 2.6}
ROWS_MS = {
    2: 0.05, 5: 0.09, 9: 0.12, 17: 0.2, 24: 0.24, 40: 0.45, 80: 0.75, 160: 1.1, 320: 2.4, 640: 4.8, 1024: 7.7,
}  # fmt: skip
PROMPT_MS, BESIDE_MS, ALONE_MS = 0.008, 0.3, 1.3  # the same of steps that have prompt rows at all
WORDS = 40000  # recorded tokens are taken modulo this, and prompts begin with one of their own beyond

PARTS = {"planning": (Engine, "_plan"), "packing": (GraphRunner, "launch"), "settling": (Engine, "_settle")}

Text = dict[str, list[int]]  # a prompt and its answer


def seconds(tree: TreeShape, size: int, prompt_rows: int = 0) -> float:
    """Of a step of a device like that."""
    rows = size * (tree.nodes + 1)
    ms = PASS_MS[bucket(size, tuple(PASS_MS))] if size else 0.0
    ms += ROWS_MS[bucket(rows, tuple(ROWS_MS))] if tree != NO_TREE else 0.0
    ms += PROMPT_MS * prompt_rows + (BESIDE_MS if size else ALONE_MS) * bool(prompt_rows)
    return ms / 1e3


class Recorded(host.Free):
    """A target that says what was recorded, whatever a draft says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.engine: Engine | None = None
        self.texts: dict[str, list[int]] = {}

    def forward(self, batch: Batch, store: Any) -> Tensor:
        assert self.engine is not None
        mine = {s.row: self.texts[s.request.id] for s in self.engine.scheduler.running}
        rows, places = batch.table_rows[batch.logit_rows], batch.positions[batch.logit_rows] + 1
        pairs = zip(rows.tolist(), places.tolist(), strict=True)
        said = [mine[row][at] if row in mine and at < len(mine[row]) else 0 for row, at in pairs]
        return torch.tensor(said, dtype=torch.float64)[:, None]

    def draw(self, logits: Tensor, *_: Tensor) -> Tensor:
        return (logits[:, 0].double() * TEMPERATURE).round().long()  # logits come divided by it


def make_engine(method: str, given: argparse.Namespace, clock: host.Reckoned) -> Engine:
    drafting: dict[str, Drafter] = {} if method == "plain" else {"lookup": LookupDrafter()}
    checkpoint = open_checkpoint(find("smollm2-135m", cache_folder()))
    engine = host.build(given, checkpoint, drafting, Recorded)
    assert isinstance(engine.model, Recorded) and isinstance(engine.runner, GraphRunner)
    engine.model.engine, runner, planner = engine, engine.runner, engine.planner
    planner.depth = DEPTH if method == "lookup" else None
    runner.preparation.on_demand = False
    runner.packer.sample = lambda *_: None  # type: ignore[method-assign] - no logits to look at
    captured = planner.costs.captured
    for size in sizes_up_to(given.sequences):
        runner.sizes.made.add(size)
        for name in drafting:
            costs = [(name, tree, seconds(tree, size)) for tree in runner.shapes.trees(name, size)]
            captured.learn(name, size, [("none", NO_TREE, seconds(NO_TREE, size)), *costs])
        for rows, _ in chunk_sizes(size):
            captured.with_prompts[size, rows] = seconds(NO_TREE, size, rows)

    def took(step: Any) -> float:
        size, tree = (step.shape.size, step.shape.tree) if step.resident else (0, NO_TREE)
        return seconds(tree, size) * step.passes + seconds(NO_TREE, 0, sum(w.known for w in step.packed.work))

    host.time_steps(runner, clock, took)
    return engine


def requests(texts: list[Text], model: Recorded, batch: int, label: str, number: int) -> Iterator[Request]:
    for i in range(number * batch, number * batch + batch):
        one = texts[i % len(texts)]
        prompt, answer = ([token % WORDS for token in one[part]] for part in ("prompt", "answer"))
        prompt = [WORDS + i % 8000, *prompt]  # so that no prompt is cached
        model.texts[f"{label}.{i}"] = [*prompt, *answer]
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=len(answer), ignore_eos=True)
        yield Request(f"{label}.{i}", tuple(prompt), params, i, owner=f"{label}.{i}")


def answer(
    engine: Engine, asked: Iterator[Request], clock: host.Reckoned
) -> tuple[float, float, list[float], int]:
    """Seconds, tokens a step of a sequence, each answer's seconds per token from its first on, and steps. What is said
    is what was recorded.
    """
    begin, tokens, steps, said = clock.perf_counter(), 0, 0, defaultdict[str, list[int]](list)
    first, last, count = dict[str, float](), dict[str, float](), 0
    for one in asked:
        engine.add(one)
    while not engine.idle:
        for result in engine.step():
            tokens += result.record.emitted
            count += 1
            steps += result.record.sequences * result.record.passes
            for event in result.events:
                name = event.request_id
                said[name] += event.token_ids
                last[name] = clock.perf_counter()
                first.setdefault(name, last[name])
    spent = clock.perf_counter() - begin
    assert isinstance(engine.model, Recorded)
    for name, answered in said.items():
        assert engine.model.texts.pop(name)[-len(answered) :] == answered
    each = [(last[name] - first[name]) / (len(got) - 1) for name, got in said.items() if len(got) > 1]
    return spent, tokens / steps, each, count


def run(given: argparse.Namespace) -> None:
    texts: dict[str, list[Text]] = json.loads(given.answers.read_text())
    print("task           batch     auto   lookup  tokens a step of each  p99 time per token, times plain's")
    for batch in given.batches:
        given.sequences = batch
        away = host.Clock(CapturedStep, "_step")
        clock = host.Reckoned(away, given.slower)
        engines = {method: make_engine(method, given, clock) for method in ("plain", "auto", "lookup")}
        parts = {part: host.Clock(*where) for part, where in PARTS.items()}
        spent_in, steps = defaultdict[str, Counter[str]](Counter), Counter[str]()
        for task in given.tasks or texts:
            took, per_step, each = (defaultdict[str, list[float]](list) for _ in range(3))
            with out_of_the_collectors_sight(), host.timed_by(clock):
                for number in range(given.rounds + 1):
                    for method, engine in engines.items():
                        assert isinstance(engine.model, Recorded)
                        asked = requests(texts[task], engine.model, batch, f"{task}.{number}", number)
                        before = {part: clock_of.spent for part, clock_of in parts.items()}, away.spent
                        spent, rate, times, taken = answer(engine, asked, clock)
                        steps[method] += taken
                        for part, clock_of in parts.items():
                            off = away.spent - before[1] if part == "packing" else 0.0
                            spent_in[method][part] += clock_of.spent - before[0][part] - off
                        took[method].append(spent)
                        per_step[method].append(rate)
                        each[method] += times if number else []
            ratios = [
                statistics.mean(p / o for p, o in zip(took["plain"][1:], took[method][1:], strict=True))
                for method in ("auto", "lookup")
            ]
            rates = [statistics.mean(per_step[method][1:]) for method in ("auto", "lookup")]
            p99 = {method: np.percentile(times, 99) for method, times in each.items()}
            print(
                f"{task:15}{batch:5}{ratios[0]:8.2f}x{ratios[1]:8.2f}x{rates[0]:6.2f}{rates[1]:6.2f}"
                f"{p99['auto'] / p99['plain']:12.2f}x{p99['lookup'] / p99['plain']:8.2f}x",
                flush=True,
            )
        for method, found in spent_in.items():
            each_part = ", ".join(f"{part} {1e6 * s / steps[method]:.0f}" for part, s in found.items())
            print(f"host, us a step of {batch} sequences, {method}: {each_part}", flush=True)
        for one in (away, *parts.values()):
            one.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", type=Path)
    parser.add_argument("--batches", type=lambda s: [int(n) for n in s.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--tasks", type=lambda s: s.split(","))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=0.7, help="times as slow a host as this one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run(given)


if __name__ == "__main__":
    main()
