"""Runs other engines beside Outrider on the same as-if model, prompts and machine, in turn.

    python -m bench.peers MODEL --as-if 8b --draft-as-if 2048:28:32:8:4096 --draft-layers 0-3,5-16,18-29 \
        --prompts PROMPTS.jsonl --tasks chat,rewrite --batches 1,16,32 --json peers.json

The model is a small one widened to the shape of a big one: the big one's cost, the small one's text. transformers
runs it plain, compiled with a static cache, assisted by the draft model, and with prompt lookup. vLLM, if it is
installed, runs it plain, with n-grams, and with the draft model. All use their public APIs and as many draft tokens a
step as Outrider. All answers are greedy and of the same length, and every engine answers a batch before the next.

Engines round bfloat16 differently, so their texts diverge. The number of tokens before that is reported, for
information. Ids that padding added to the vocabulary cannot win in any engine: the widened tensors give them logits far
below all others (see src/outrider/bench/as_if.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.answering import answer
from outrider.bench.as_if import AsIf, WideCheckpoint
from outrider.bench.compare import first_difference
from outrider.bench.peers import Run, Transformers, Vllm
from outrider.bench.speculation import asked_of, groups_of
from outrider.cli.measure import Report, described
from outrider.cli.tasks import tasks_of
from outrider.load.find import find
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams, Speculation

BASE = "outrider plain"  # the others are compared with it


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with one method. `most` is its largest batch."""

    name: str
    greedy: Callable[[list[list[int]], int], Run]
    most: int


def outrider_engines(llm: AsIf, depth: int, most: int) -> list[Engine]:
    def engine(name: str, method: Speculation) -> Engine:
        def greedy(prompts: list[list[int]], tokens: int) -> Run:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=method)
            return answer(llm, prompts, params).run

        return Engine(name, greedy, most)

    fixed = Speculation(depth=depth, nodes=depth)
    made = [engine(BASE, Speculation(drafter="none"))]
    return made + [
        engine(f"outrider {name}", asked_of(name, fixed))
        for name in llm.engine.drafters.names
        if name != "none"
    ]


def transformers_engines(
    peer: Transformers, draft: Transformers | None, depth: int, most: int
) -> list[Engine]:
    def engine(name: str, most: int, **options: Any) -> Engine:
        return Engine(f"transformers {name}", lambda prompts, n: peer.greedy(prompts, n, **options), most)

    made = [engine("plain", most), engine("prompt lookup", 1, prompt_lookup_num_tokens=depth)]
    if draft is not None:
        settings = draft.model.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = depth, "constant"
        settings.assistant_confidence_threshold = 0.0  # always `depth` draft tokens, as the others
        made.append(engine("assisted", 1, assistant_model=draft.model))
    if peer.model.device.type == "cuda":  # `generate` compiles there by itself, given a static cache
        made.append(engine("compiled", most, cache_implementation="static"))
    else:
        print("transformers compiles on a GPU only; left out", flush=True)
    return made


def vllm_engines(target: Path, draft: Path | None, given: argparse.Namespace) -> list[Engine]:
    """The methods that this version of vLLM supports; a refused one is reported and left out."""
    guesses = {"num_speculative_tokens": given.depth}
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, **guesses}
    methods: dict[str, dict[str, Any] | None] = {"plain": None, "n-gram": ngram}
    if draft is not None:
        methods["draft"] = {"method": "draft_model", "model": str(draft), **guesses}
    made = []
    most = max(given.batches)
    for name, speculative in methods.items():
        try:
            peer = Vllm(target, given.vllm_share, given.context, most, speculative)
        except Exception as problem:  # versions refuse with different exceptions
            print(f"vllm {name}: {type(problem).__name__}: {problem}; left out", flush=True)
            continue
        made.append(Engine(f"vllm {name}", peer.greedy, most))
    return made


def engines_of(llm: AsIf, given: argparse.Namespace, folder: Path) -> list[Engine]:
    """Every requested engine that is installed, over the same tensors."""
    made = outrider_engines(llm, given.depth, max(given.batches))
    if not {"transformers", "vllm"} & set(given.engines):
        return made
    target, draft = (_in_transformers(c, llm.place) for c in checkpoints(llm))
    assert target is not None
    if "transformers" in given.engines:
        made += transformers_engines(target, draft, given.depth, max(given.batches))
    if "vllm" in given.engines and importlib.util.find_spec("vllm") is None:
        print("vllm is not installed; left out", flush=True)
    elif "vllm" in given.engines:
        saved = target.save(folder / "target"), None if draft is None else draft.save(folder / "draft")
        made += vllm_engines(*saved, given)
    return made


def checkpoints(llm: AsIf) -> tuple[WideCheckpoint, WideCheckpoint | None]:
    wide = llm.checkpoint
    assert isinstance(wide, WideCheckpoint)
    return wide, None if llm.draft_shape is None else llm.widened_draft(wide.small)


def _in_transformers(checkpoint: WideCheckpoint | None, device: str) -> Transformers | None:
    return None if checkpoint is None else Transformers.of(checkpoint, device)


# -------------------------------------------------------------------------------------------------- measure


def compare(
    engines: list[Engine], prompts: list[list[int]], batch: int, given: argparse.Namespace
) -> dict[str, Any]:
    able = [engine for engine in engines if engine.most >= batch]
    groups = groups_of(prompts, batch, given.groups)
    longest = max(groups, key=lambda group: max(map(len, group)))
    for engine in able:  # compiles, captures, and sizes its caches once
        engine.greedy(longest, given.tokens)
    runs: dict[str, list[Run]] = {engine.name: [] for engine in able}
    for number, group in enumerate(groups):
        turn = number % len(able)
        for engine in able[turn:] + able[:turn]:
            runs[engine.name].append(engine.greedy(group, given.tokens))
    found = {name: _summary(mine, runs[BASE]) for name, mine in runs.items()}
    return {"groups": len(groups), "tokens_each": given.tokens, "engines": found}


def _summary(runs: list[Run], base: list[Run]) -> dict[str, Any]:
    pairs = [
        pair
        for run, ours in zip(runs, base, strict=True)
        for pair in zip(run.answers, ours.answers, strict=True)
    ]
    agreed = [len(a) if (at := first_difference(a, b)) is None else at for a, b in pairs]
    ratios = [run.decode_rate / ours.decode_rate for run, ours in zip(runs, base, strict=True)]
    return {
        "tok_s": statistics.median(run.decode_rate for run in runs),
        "ratio": statistics.median(ratios),
        "first_s": statistics.median(run.first_s for run in runs),
        "agreed_tokens": statistics.mean(agreed),
        "answers_equal": sum(a == b for a, b in pairs),
        "answers": len(pairs),
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--as-if", required=True, help="the shape, as outrider bench takes it")
    parser.add_argument("--draft-as-if", help="also with a draft model: the same one in this shape")
    parser.add_argument("--draft-layers", help="how many of its layers to keep, or which: 0-3,5-29")
    parser.add_argument("--prompts", help="a file of prompts; built-in ones without it")
    parser.add_argument("--tasks", default="chat,rewrite")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--groups", type=int, help="maximum number of batches for each task and size")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="draft tokens a step")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--cache-gib", type=float, default=8, help="for Outrider's keys and values")
    parser.add_argument(
        "--vllm-share", type=float, default=0.2, help="of the GPU's memory, for each vLLM engine"
    )
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["transformers", "vllm"])
    parser.add_argument("--json", help="a file for the results")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    given = arguments(argv)
    report = Report("peers", given.json)
    cache = int(given.cache_gib * 2**30)
    settings = Settings(
        device=given.device, context=given.context, max_sequences=max(given.batches), cache_bytes=cache
    )
    path = find(given.model, cache_folder())
    with (
        AsIf(path, given.as_if, settings, "auto", given.draft_as_if, given.draft_layers) as llm,
        tempfile.TemporaryDirectory() as folder,
    ):
        report |= {**described(llm, "python -m bench.peers"), "depth": given.depth, "tasks": {}}
        engines = engines_of(llm, given, Path(folder))
        for task, prompts in tasks_of(llm, given.prompts, None, given.tasks).items():
            report["tasks"][task] = found = {}
            for batch in given.batches:
                found[str(batch)] = compare(engines, prompts, batch, given)
                report.keep()
                for name, one in found[str(batch)]["engines"].items():
                    print(
                        f"{task:8} batch {batch:3} {name:28} {one['tok_s']:9.1f} tok/s {one['ratio']:6.2f}x; "
                        f"{one['agreed_tokens']:.0f} tokens agree before the first difference",
                        flush=True,
                    )
    report.deliver()


if __name__ == "__main__":
    main()
