"""Whole answers on a CUDA device as if the model were big: plain, lookup and a draft, by batch; speed and identity.

    PYTHONPATH=src python bench/gpu/rounds.py --model MODEL.gguf --prompts PROMPTS.jsonl --batches 1,4,16,32

The target is the given model widened to the shape of a big one, which costs what the big one costs and writes what
the small one writes. The draft is the same model, some of its layers left out, in the shape of a smaller one. All
runs of a batch are interleaved in one process; every speculative answer is compared with the plain one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from outrider.bench.as_if import AsIf, Wide, shape_of, spread_layers, widen
from outrider.control.planner import Planner
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.flying import make_rounds
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.template import ChatTemplate
from outrider.model.device import DeviceDecoder
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import MAX_NODES, Request, SamplingParams, Sequence

REWRITE = "Rewrite this text word for word, correcting only spelling mistakes:\n\n"


def widened(
    checkpoint: Checkpoint, shape: str, context: int, layers: int | None = None, to_host: bool = False
) -> DeviceDecoder:
    small = checkpoint.config
    assert small is not None
    kept = None if layers is None else spread_layers(small.layers, layers)
    config, read = widen(small, checkpoint.tensor, _shape(shape), "cuda", torch.bfloat16, kept)
    kernels = GpuKernels(config, *rope_tables(config, context + MAX_NODES + 1))
    return DeviceDecoder(AsIf(config, read, kernels, small.vocab), to_host)


def _shape(name: str) -> Wide:
    """A known shape, or hidden:layers:heads:kv_heads:intermediate."""
    if ":" not in name:
        return shape_of(name)
    return Wide(*map(int, name.split(":")), tied=True)


class Run:
    """One engine, set up once; answers batches of prompts."""

    def __init__(self, checkpoint: Checkpoint, given: argparse.Namespace) -> None:
        tokenizer = checkpoint.tokenizer
        self.target = widened(checkpoint, given.shape, given.context)
        settings = Settings(context=given.context, max_sequences=given.most, cache_bytes=given.cache << 30)
        self.engine = Engine(
            self.target, settings.placed(torch.cuda.mem_get_info()[0]), tokenizer.text_stream
        )
        drafters = {"lookup": LookupDrafter()}
        if given.draft_layers:
            small = widened(checkpoint, given.draft_shape, given.context, given.draft_layers, to_host=True)
            vocab = self.target.visible
            drafters["lm"] = LmDrafter(small, 4096, given.most, given.context, vocab)  # type: ignore[assignment]
        self.engine.use_drafters(drafters, Planner("none"))
        self.engine.rounds = make_rounds(self.engine) if given.fly else None
        self.ends = frozenset(tokenizer.eos_ids)
        self.number = 0

    def answer(
        self, prompts: Seq[list[int]], how: object, given: argparse.Namespace, temperature: float
    ) -> Answers:
        params = SamplingParams(
            temperature=temperature, max_tokens=given.tokens, seed=7, speculation=how, ignore_eos=True
        )
        sequences: list[Sequence] = []
        for prompt in prompts:
            self.number += 1
            request = Request(f"q{self.number}", tuple(prompt), params, 1000 + len(sequences))
            sequences += self.engine.add(request)
        first = 0.0
        torch.cuda.synchronize()
        while not self.engine.idle:
            self.engine.step()
            if not first and all(s.first for s in sequences):
                first, counted = time.perf_counter(), sum(len(s.output) for s in sequences)
        torch.cuda.synchronize()
        spent = time.perf_counter() - first
        return Answers(sequences, (sum(len(s.output) for s in sequences) - counted) / spent)


class Answers:
    def __init__(self, sequences: list[Sequence], speed: float) -> None:
        self.tokens = [s.output for s in sequences]
        self.speed = speed
        steps = sum(s.steps for s in sequences)
        self.per_step = sum(map(len, self.tokens)) / steps
        self.held = sum(s.accepted for s in sequences) / max(1, sum(s.drafted for s in sequences))


def read_prompts(file: Path, checkpoint: Checkpoint, limit: int) -> dict[str, list[list[int]]]:
    tokenizer = checkpoint.tokenizer
    template = ChatTemplate.for_tokenizer(checkpoint.chat_template, tokenizer)
    assert template is not None
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    chat = [r["turns"][0] for r in rows if r.get("task") == "chat"][:limit]
    long = [REWRITE + r["turns"][0][:600] for r in rows if len(r["turns"][0]) > 500][:limit]

    def ids(text: str) -> list[int]:
        rendered = template.render([{"role": "user", "content": text}])
        return tokenizer.encode(rendered, special=False, parse_special=True)

    return {"chat": [ids(t) for t in chat], "rewrite": [ids(t) for t in long]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--draft-shape", default="1b")
    parser.add_argument("--draft-layers", type=int, default=0)
    parser.add_argument("--batches", default="1")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=int, default=24, help="GiB")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--fly", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    batches = [int(b) for b in given.batches.split(",")]
    given.most = max(batches)
    checkpoint = open_checkpoint(given.model)
    begin = time.time()
    run = Run(checkpoint, given)
    print(f"as if {given.shape}: ready in {time.time() - begin:.1f} s", flush=True)
    sets = read_prompts(given.prompts, checkpoint, max(given.limit, max(batches)))
    ways = {
        "plain": False,
        "lookup": {"drafter": "lookup", "depth": given.depth, "nodes": given.depth},
        "lookup auto": {"drafter": "lookup"},
    }
    if given.draft_layers:
        ways["lm"] = {"drafter": "lm", "depth": given.depth, "nodes": given.depth}
        ways["lm auto"] = {"drafter": "lm"}
    for task, temperature in (("chat", 0.7), ("rewrite", 0.0)):
        for batch in batches:
            compare(run, sets[task], ways, task, temperature, batch, given)


def compare(
    run: Run,
    prompts: list[list[int]],
    ways: dict[str, object],
    task: str,
    temperature: float,
    batch: int,
    given: argparse.Namespace,
) -> None:
    groups = [prompts[i : i + batch] for i in range(0, max(1, len(prompts) - batch + 1), batch)][
        : given.limit
    ]
    while len(groups[-1]) < batch:
        groups[-1] = (groups[-1] * batch)[:batch]
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    per_step: dict[str, list[float]] = {name: [] for name in ways}
    held: dict[str, list[float]] = {name: [] for name in ways}
    differing = compared = 0
    for how in ways.values():  # captures and compiles
        run.answer(groups[0], how, argparse.Namespace(**{**vars(given), "tokens": 24}), temperature)
    for group in groups:
        plain = None
        for name, how in ways.items():
            got = run.answer(group, how, given, temperature)
            plain = plain or got
            compared += sum(map(len, got.tokens))
            differing += sum(
                a != b
                for x, y in zip(plain.tokens, got.tokens, strict=True)
                for a, b in zip(x, y, strict=True)
            )
            speeds[name].append(got.speed)
            per_step[name].append(got.per_step)
            held[name].append(got.held)
    base = statistics.median(speeds["plain"])
    for name in ways:
        ratios = [s / p for s, p in zip(speeds[name], speeds["plain"], strict=True)]
        print(
            f"{task:8} batch {batch:3} {name:12} {statistics.median(speeds[name]):9.1f} tok/s "
            f"{statistics.median(ratios):6.2f}x (worst {min(ratios):.2f}) {statistics.mean(per_step[name]):5.2f} "
            f"tokens a step, {statistics.mean(held[name]):.2f} of guesses held",
            flush=True,
        )
    print(
        f"{task:8} batch {batch:3} {differing} of {compared} tokens differ, plain {base:.1f} tok/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
