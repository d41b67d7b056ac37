"""Traffic beside a simulated GPU: requests arrive as others end, and a head of given acceptance drafts beside lookup.

    python -m bench.replay --record answers.json --tasks chat,code,summary --temperatures 0,0.7 --max-tokens 64
    python -m bench.simulated_traffic answers.json --concurrency 8,32,64 --tasks chat,code,mixed
    python -m bench.simulated_traffic answers.json --concurrency 1,4,16,64 --experts --depths 1,2,4,8

Engine, planner, scheduler and host are real, as in bench/replay_gpu.py; a step takes what a table says (a 1.5B model
and its head on an H200, in ms), or with `--experts` what its rows and experts cost a mixture (`PASS`). `auto` and
fixed depths are compared with plain decoding, all warmed up by one round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from bench.replay import set_number
from bench.replay_gpu import PASS_MS, ROWS_MS, WORDS, Answered, answer, engine_of, show
from torch import Tensor

from bench import host
from outrider.bench.answering import out_of_the_collectors_sight
from outrider.control.experts import ExpertCosts
from outrider.control.guards import Guards
from outrider.device.buckets import bucket
from outrider.device.capture import CapturedStep
from outrider.draft.drafter import Drafter, ResidentDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.reading import PrefillProgress
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.placement import PREFILL_SLOWDOWN, PREFILL_WAIT
from outrider.types import NO_TREE, Draft, Request, SamplingParams, Sequence, TreeShape, Verdict

LEVEL = {1: 0.08, 8: 0.09, 32: 0.12, 64: 0.16, 128: 0.22}  # of the head's draft, by sequences
HEAD_TOKEN, HEAD_PREFILL, PROMPT_TOKEN, PROMPT, ALONE = 0.0012, 0.15, 0.008, 0.3, 1.3
ACCEPTANCE, SPREAD = {"chat": 0.58, "code": 0.8, "rewrite": 0.6, "summary": 0.55, "short": 0.5}, 0.12
LENGTHS = 40, 128  # tokens of answers, uniform

# Qwen3-30B-A3B in bfloat16: experts, those of a row, the other bytes in experts. Its passes on an H200 (log/111) take
# so many ms, and more by rows and by experts a layer: a least-squares fit, at most 6 % from what was measured.
MIXTURE, LAYERS, PASS, ROW, EXPERT = (128, 8, 2.46 / 0.453), 48, 1.91, 0.033, 0.123
CHAIN, BATCH, NOISE = 0.72, 0.95, 0.02  # how many experts its steps read: the planner does not know

Text = tuple[list[int], list[int], float]  # prompt, answer, acceptance of the head


def pass_ms(tree: TreeShape, size: int, lead: str, read: float = 0.0) -> float:
    """`read`: experts of a mixture."""
    rows = size * (tree.nodes + 1)
    ms = LEVEL[bucket(size, tuple(LEVEL))] * tree.depth if lead == "head" else 0.0
    if read:
        return ms + PASS + ROW * rows + EXPERT * read
    ms += PASS_MS[bucket(size, tuple(PASS_MS))] if size else 0.0
    return ms if tree == NO_TREE else ms + ROWS_MS[bucket(rows, tuple(ROWS_MS))]


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


def make_engine(method: str, given: argparse.Namespace, clock: host.Reckoned) -> tuple[Engine, Head]:
    """`method`: "plain", "auto", or the depth of all drafts."""
    head, dice, mixture = Head(), random.Random(0), ExpertCosts(*MIXTURE)
    drafting: dict[str, Drafter] = {"head": head, "lookup": LookupDrafter()} if method != "plain" else {}

    def seconds(tree: TreeShape, size: int, lead: str = "", prompt_rows: int = 0) -> float:
        read = mixture.distinct(size * (tree.nodes + 1)) if given.experts else 0.0
        added = PROMPT_TOKEN * prompt_rows + PROMPT * bool(prompt_rows)
        return (pass_ms(tree, size, lead, read) + added) / 1e3

    head.engine = engine = engine_of(drafting, given, seconds)
    slowdown, wait = PREFILL_SLOWDOWN["cuda"], PREFILL_WAIT["cuda"]
    engine.planner.guards = Guards(prefill_slowdown=slowdown, prefill_wait=wait)
    engine.planner.costs.captured.per_token["head"] = HEAD_TOKEN / 1e3
    if method.isdecimal():
        engine.planner.default, engine.planner.depth = "head", int(method)
    assert isinstance(engine.runner, GraphRunner)
    if given.experts:
        engine.planner.costs.know_experts(ExpertCosts(*MIXTURE))
        engine.runner.mixtures = LAYERS
    mixture.chain.exponent, mixture.batch.exponent = CHAIN, BATCH

    def took(step: Any) -> float:
        size, tree = (step.shape.size, step.shape.tree) if step.resident else (0, NO_TREE)
        known, here = sum(one.known for one in step.packed.work), len(step.resident)
        if given.experts and here:
            read = mixture.expected(here * (tree.nodes + 1), here) * dice.gauss(1, NOISE)
            step.record.experts = min(read, mixture.total)
        lead = next(iter(step.shape.drafters), "")
        ms = pass_ms(tree, size, lead, step.record.experts) * step.record.passes
        ms += PROMPT_TOKEN * known + (PROMPT if size else ALONE) * bool(known)
        if step.prefill is not None:
            ms += (prefill := HEAD_PREFILL + HEAD_TOKEN * step.prefill[1])
            step.prefill = *step.prefill[:2], SimpleNamespace(seconds=lambda: prefill / 1e3)
        return float(ms / 1e3)

    host.time_steps(engine.runner, clock, took)
    return engine, head


def requests(engine: Engine, head: Head, texts: list[Text], given: Any, seed: int) -> Iterator[Request]:
    model, dice = cast(Any, engine.model), random.Random(seed)
    for number in range(given.each * given.sequences):
        prompt, answered, rate = texts[(number * 7 + seed) % len(texts)]
        name, prompt = f"{seed}.{number}", [WORDS + (number + 997 * seed) % 8000, *prompt]
        answered = answered[: dice.randint(*LENGTHS)]
        model.texts[name], head.rates[name] = [*prompt, *answered], rate + dice.gauss(0, SPREAD)
        params = SamplingParams(temperature=0.7, max_tokens=len(answered), ignore_eos=True)
        yield Request(name, tuple(prompt), params, number, owner=name)


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
        engines = {name: make_engine(name, given, clock) for name in ("plain", "auto", *given.depths)}
        for task in given.tasks or texts:
            ran = defaultdict[str, list[Answered]](list)
            with out_of_the_collectors_sight(), host.timed_by(clock):
                for seed in range(given.rounds + 1):
                    for name, (engine, head) in engines.items():
                        asked = requests(engine, head, texts[task], given, seed)
                        ran[name].append(answer(engine, asked, clock, streams))
            cells.append(show(task, streams, ran))
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
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--depths", type=lambda s: s.split(","), default=[], help="fixed ones beside auto")
    parser.add_argument("--set", action="append", default=[], type=set_number, help="NAME=VALUE")
    torch.set_num_threads(1)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
