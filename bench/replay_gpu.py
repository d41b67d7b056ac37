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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
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
from outrider.types import NO_TREE, Batch, Request, SamplingParams, StepRecord, TreeShape

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


def seconds(tree: TreeShape, size: int, lead: str = "lookup", prompt_rows: int = 0) -> float:
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
    engine = engine_of({} if method == "plain" else {"lookup": LookupDrafter()}, given, seconds)
    engine.planner.depth = DEPTH if method == "lookup" else None

    def took(step: Any) -> float:
        size, tree = (step.shape.size, step.shape.tree) if step.resident else (0, NO_TREE)
        known = sum(one.known for one in step.packed.work)
        return seconds(tree, size) * step.record.passes + seconds(NO_TREE, 0, prompt_rows=known)

    assert isinstance(engine.runner, GraphRunner)
    host.time_steps(engine.runner, clock, took)
    return engine


def engine_of(
    drafting: dict[str, Drafter], given: argparse.Namespace, seconds: Callable[..., float]
) -> Engine:
    """`seconds`: of steps by draft tree, size, lead and prompt rows."""
    engine = host.build(given, drafting, seconds, Recorded)
    assert isinstance(engine.model, Recorded) and isinstance(engine.runner, GraphRunner)
    engine.model.engine = engine
    engine.runner.packer.sample = lambda *_: None  # type: ignore[method-assign] - no logits to look at
    for size in sizes_up_to(given.sequences):
        for rows, _ in chunk_sizes(size):
            engine.planner.costs.captured.with_prompts[size, rows] = seconds(NO_TREE, size, prompt_rows=rows)
    return engine


def requests(texts: list[Text], model: Recorded, batch: int, label: str, number: int) -> Iterator[Request]:
    for i in range(number * batch, number * batch + batch):
        one = texts[i % len(texts)]
        prompt, answer = ([token % WORDS for token in one[part]] for part in ("prompt", "answer"))
        prompt = [WORDS + i % 8000, *prompt]  # so that no prompt is cached
        model.texts[f"{label}.{i}"] = [*prompt, *answer]
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=len(answer), ignore_eos=True)
        yield Request(f"{label}.{i}", tuple(prompt), params, i, owner=f"{label}.{i}")


@dataclass
class Answered:
    seconds: float
    records: list[StepRecord]
    each: list[float]  # seconds per token of each answer, from its first on

    def speedup(self, plain: Answered) -> float:
        """Both answered the same."""
        return plain.seconds / self.seconds

    @property
    def tokens_per_step(self) -> float:
        steps = sum(one.sequences * one.passes for one in self.records)
        return sum(one.emitted for one in self.records) / steps


def answer(engine: Engine, asked: Iterator[Request], clock: host.Reckoned, most: int = 1 << 20) -> Answered:
    """At most so many at once. What is said is what was recorded."""
    begin, records, said = clock.perf_counter(), list[StepRecord](), defaultdict[str, list[int]](list)
    first, last = dict[str, float](), dict[str, float]()
    while True:
        for one in islice(asked, most - len(engine.live)):
            engine.add(one)
        if engine.idle:
            break
        for result in engine.step():
            records.append(result.record)
            for event in result.events:
                name, last[event.request_id] = event.request_id, clock.perf_counter()
                said[name] += event.token_ids
                first.setdefault(name, last[name])
    spent = clock.perf_counter() - begin
    assert isinstance(engine.model, Recorded)
    for name, answered in said.items():
        assert engine.model.texts.pop(name)[-len(answered) :] == answered
    each = [(last[name] - first[name]) / (len(got) - 1) for name, got in said.items() if len(got) > 1]
    return Answered(spent, records, each)


def show(task: str, batch: int, ran: dict[str, list[Answered]]) -> float:
    """Prints what the rounds after the first took, in which the planner learned. Returns the speed-up of `auto`."""
    plain, auto = ran["plain"][1:], ran["auto"][1:]
    speedups = {n: [a.speedup(b) for a, b in zip(some[1:], plain, strict=True)] for n, some in ran.items()}
    mean = {name: statistics.mean(some) for name, some in speedups.items()}
    tail, base = (np.percentile([s for one in some for s in one.each], 99) for some in (auto, plain))
    records = [record for one in auto for record in one.records]
    kinds = Counter(reason.kind for record in records for reason in record.reasons)
    trees = [(r.captured.tree.depth, r.passes) for r in records if r.captured and r.decodes_only]
    depth = sum(deep * passes for deep, passes in trees) / max(sum(passes for _, passes in trees), 1)
    print(
        f"{task:10}{batch:5}{mean['auto']:8.3f}x, lowest {min(speedups['auto']):.3f}x, "
        f"p99 time per token {tail / base:.2f}x, depth {depth:.1f}, "
        f"{statistics.mean(one.tokens_per_step for one in auto):.2f} tokens a step; "
        + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(4))
        + "".join(f"; {name} {some:.3f}x" for name, some in mean.items() if name not in ("plain", "auto")),
        flush=True,
    )
    return mean["auto"]


def run(given: argparse.Namespace) -> None:
    texts: dict[str, list[Text]] = json.loads(given.answers.read_text())
    for batch in given.batches:
        given.sequences = batch
        away = host.Clock(CapturedStep, "_step")
        clock = host.Reckoned(away, given.slower)
        engines = {method: make_engine(method, given, clock) for method in ("plain", "auto", "lookup")}
        parts = {part: host.Clock(*where) for part, where in PARTS.items()}
        spent_in, steps = defaultdict[str, Counter[str]](Counter), Counter[str]()
        for task in given.tasks or texts:
            ran = defaultdict[str, list[Answered]](list)
            with out_of_the_collectors_sight(), host.timed_by(clock):
                for number in range(given.rounds + 1):
                    for method, engine in engines.items():
                        assert isinstance(engine.model, Recorded)
                        asked = requests(texts[task], engine.model, batch, f"{task}.{number}", number)
                        before = {part: clock_of.spent for part, clock_of in parts.items()}, away.spent
                        ran[method].append(answer(engine, asked, clock))
                        steps[method] += len(ran[method][-1].records)
                        for part, clock_of in parts.items():
                            off = away.spent - before[1] if part == "packing" else 0.0
                            spent_in[method][part] += clock_of.spent - before[0][part] - off
            show(task, batch, ran)
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
