"""Traffic beside a simulated GPU: requests arrive as others end, and a head of given acceptance drafts beside lookup.

    python -m bench.replay --record answers.json --tasks chat,code,summary --temperatures 0,0.7 --max-tokens 64
    python -m bench.simulated_traffic answers.json --concurrency 8,32,64 --tasks chat,code,mixed

Engine, planner, scheduler and host are real, as in bench/replay_gpu.py; a step takes what a table says (a 1.5B model
and its head on an H200, in ms). `auto` is compared with plain decoding, both warmed up by one round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.replay import set_number
from bench.replay_gpu import PASS_MS, ROWS_MS, WORDS, Recorded
from torch import Tensor

from bench import host
from outrider.bench.answering import out_of_the_collectors_sight
from outrider.control.guards import Guards
from outrider.device.buckets import bucket, chunk_sizes, sizes_up_to
from outrider.device.capture import CapturedStep
from outrider.draft.drafter import Drafter, ResidentDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.reading import PrefillProgress
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.placement import PREFILL_SLOWDOWN, PREFILL_WAIT
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder
from outrider.types import NO_TREE, Draft, Request, SamplingParams, Sequence, TreeShape, Verdict

LEVEL = {1: 0.08, 8: 0.09, 32: 0.12, 64: 0.16, 128: 0.22}  # of the head's draft, by sequences
HEAD_TOKEN, HEAD_PREFILL, PROMPT_TOKEN, PROMPT, ALONE = 0.0012, 0.15, 0.008, 0.3, 1.3
ACCEPTANCE, SPREAD = {"chat": 0.58, "code": 0.8, "rewrite": 0.6, "summary": 0.55, "short": 0.5}, 0.12
LENGTHS = 40, 128  # tokens of answers, uniform

Text = tuple[list[int], list[int], float]  # prompt, answer, acceptance of the head


def pass_ms(tree: TreeShape, size: int, lead: str) -> float:
    ms = PASS_MS[bucket(size, tuple(PASS_MS))] if size else 0.0
    if tree == NO_TREE:
        return ms
    levels = LEVEL[bucket(size, tuple(LEVEL))] * tree.depth if lead == "head" else 0.0
    return ms + ROWS_MS[bucket(size * (tree.nodes + 1), tuple(ROWS_MS))] + levels


class Head(ResidentDrafter):
    """Right as often as each request says; it must prefill a text before it drafts for it."""

    max_depth, usual_depth, trees, window = 8, 8, False, 9

    def __init__(self) -> None:
        self.progress, self.engine = PrefillProgress(), None
        self.rates: dict[str, float] = {}

    def propose(self, sequences: Seq[Sequence], draft_plans: Any) -> list[Draft]:
        return [Draft() for _ in sequences]

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        self.progress.note(sequence, len(sequence.tokens) - 1)

    def tokens_behind(self, sequence: Sequence, coming: int = 0) -> int:
        return self.progress.behind(sequence, coming, self.window)

    def catch_up(self, ops: Any, sequences: list[Sequence]) -> None:
        for one in sequences:
            self.progress.note(one, len(one.tokens) - 1)

    def propose_resident(
        self, ops: Any, rows: Tensor, lengths: Tensor, tree: Any, context: int
    ) -> tuple[Tensor, None]:
        engine: Any = self.engine
        running = {s.row: s.request.id for s in engine.scheduler.running}
        drafts = []
        for row, known in zip(rows.tolist(), lengths.tolist(), strict=True):
            text, dice = engine.model.texts.get(running.get(row), []), random.Random(known * 7919 + row)
            after = [*text[known + 1 : known + 1 + len(tree)], *[0] * len(tree)][: len(tree)]
            rate = self.rates.get(running.get(row, ""), 0.0)
            drafts.append([token if dice.random() < rate else (token + 1) % WORDS for token in after])
        return torch.tensor(drafts), None


def make_engine(drafts: bool, given: argparse.Namespace, clock: host.Reckoned) -> tuple[Engine, Head]:
    head = Head()
    drafting: dict[str, Drafter] = {"head": head, "lookup": LookupDrafter()} if drafts else {}
    engine = host.build(given, open_checkpoint(find("smollm2-135m", cache_folder())), drafting, Recorded)
    assert isinstance(engine.model, Recorded) and isinstance(engine.runner, GraphRunner)
    engine.model.engine = head.engine = engine
    runner, costs = engine.runner, engine.planner.costs.captured
    engine.planner.guards = Guards(
        prefill_slowdown=PREFILL_SLOWDOWN["cuda"], prefill_wait=PREFILL_WAIT["cuda"]
    )
    runner.preparation.on_demand = False
    runner.packer.sample = lambda *_: None  # type: ignore[method-assign] - no logits to look at
    for size in sizes_up_to(given.sequences):
        runner.sizes.made.add(size)
        plain = pass_ms(NO_TREE, size, "") / 1e3
        for name in drafting or ["none"]:
            trees = [(name, t, pass_ms(t, size, name) / 1e3) for t in runner.shapes.trees(name, size)]
            costs.learn(name, size, [("none", NO_TREE, plain), *trees])
        for rows, _ in chunk_sizes(size):
            costs.with_prompts[size, rows] = plain + (PROMPT_TOKEN * rows + PROMPT) / 1e3
    costs.per_token["head"] = HEAD_TOKEN / 1e3

    def took(step: Any) -> float:
        size, tree = (step.shape.size, step.shape.tree) if step.resident else (0, NO_TREE)
        known = sum(one.known for one in step.packed.work)
        ms = pass_ms(tree, size, next(iter(step.shape.drafters), "")) * step.passes
        ms += PROMPT_TOKEN * known + (PROMPT if size else ALONE) * bool(known)
        ms += HEAD_PREFILL + HEAD_TOKEN * step.prefill[1] if step.prefill is not None else 0.0
        return float(ms / 1e3)

    host.time_steps(runner, clock, took)
    return engine, head


def traffic(
    engine: Engine, head: Head, texts: list[Text], given: argparse.Namespace, seed: int, clock: host.Reckoned
) -> tuple[float, float, Counter[str]]:
    """Tokens per second, p99 time per token, and the planner's decisions."""
    model: Any = engine.model
    dice, total, number, tokens = random.Random(seed), given.each * given.sequences, 0, 0
    first, last, counts, kinds = {}, dict[str, float](), Counter[str](), Counter[str]()
    begun = clock.perf_counter()
    while number < total or not engine.idle:
        while len(engine.live) < given.sequences and number < total:
            prompt, answer, rate = texts[(number * 7 + seed) % len(texts)]
            name, prompt = f"{seed}.{number}", [WORDS + (number + 997 * seed) % 8000, *prompt]
            answer = answer[: dice.randint(*LENGTHS)]
            model.texts[name], head.rates[name] = [*prompt, *answer], rate + dice.gauss(0, SPREAD)
            params = SamplingParams(temperature=0.7, max_tokens=len(answer), ignore_eos=True)
            engine.add(Request(name, tuple(prompt), params, number, owner=name))
            number += 1
        for result in engine.step():
            tokens += result.record.emitted
            kinds.update(reason.kind for reason in result.record.reasons)
            for event in result.events:
                name, last[event.request_id] = event.request_id, clock.perf_counter()
                first.setdefault(name, last[name])
                counts[name] += len(event.token_ids)
    spent = clock.perf_counter() - begun
    model.texts.clear()
    each = [(last[name] - first[name]) / (n - 1) for name, n in counts.items() if n > 1]
    return tokens / spent, float(np.percentile(each, 99)), kinds


def texts_of(answers: dict[str, Any]) -> dict[str, list[Text]]:
    """By task, and all of them mixed; two answers are joined, as recorded ones are short."""
    found = defaultdict[str, list[Text]](list)
    for label, some in answers.items():
        task = label.split()[0]
        for one, other in zip(some, [*some[1:], some[0]], strict=True):
            answer = [token % WORDS for token in one["answer"] + other["answer"]]
            text = [token % WORDS for token in one["prompt"]], answer, ACCEPTANCE.get(task, 0.6)
            found[task].append(text)
            found["mixed"].append(text)
    return found


def run(given: argparse.Namespace) -> None:
    texts, cells = texts_of(json.loads(given.answers.read_text())), []
    for streams in given.concurrency:
        given.sequences = streams
        away = host.Clock(CapturedStep, "_step")
        clock = host.Reckoned(away, given.slower)
        engines = [make_engine(drafts, given, clock) for drafts in (False, True)]
        for task in given.tasks or texts:
            ratios, tails, kinds = [], [], Counter[str]()
            with out_of_the_collectors_sight(), host.timed_by(clock):
                for seed in range(given.rounds + 1):
                    plain, auto = (traffic(*one, texts[task], given, seed, clock) for one in engines)
                    if seed:
                        ratios.append(auto[0] / plain[0])
                        tails.append(auto[1] / plain[1])
                        kinds += auto[2]
            cells.append(statistics.mean(ratios))
            said = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(4))
            print(
                f"{task:10}{given.sequences:5}{statistics.mean(ratios):8.3f}x, lowest {min(ratios):.3f}x, "
                f"p99 time per token {statistics.mean(tails):.2f}x; {said}",
                flush=True,
            )
        away.stop()
    print(f"geometric mean {statistics.geometric_mean(cells):.4f}x, lowest {min(cells):.3f}x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=Path)
    parser.add_argument("--concurrency", type=lambda s: [int(n) for n in s.split(",")], default=[8, 32, 64])
    parser.add_argument("--tasks", type=lambda s: s.split(","))
    parser.add_argument("--each", type=int, default=4, help="requests of a round, a stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slower", type=float, default=0.5, help="times as slow a host as this one")
    parser.add_argument("--set", action="append", default=[], type=set_number, help="NAME=VALUE")
    torch.set_num_threads(1)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
