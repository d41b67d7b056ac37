"""Times of captured steps (draft, target pass, sampling and commit in one graph), and the tokens per second they give
for a stated number of tokens per step.

    PYTHONPATH=src python bench/gpu/captured.py --shape 8b --draft 1b --sizes 1,4,16,32 --json captured.json

Weights are random, because the time of a step does not depend on what is accepted. Tokens per step are assumed values:
all four draft tokens of lookup, and .7, .49, .343 and .24 of the first to fourth token of a draft model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from traffic import random_model  # beside this file

from outrider.bench.widen import shape_of
from outrider.cache.table import SlotTable
from outrider.control.trees import CHAINS, NO_TREE, TREES
from outrider.device.capture import CapturedStep, StepShape
from outrider.draft.drafters import Drafters
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.certificate import certificate
from outrider.engine.graph_runner import GraphRunner, make_graph_runner
from outrider.engine.kv_cache import KvCache
from outrider.model.decoder import make_store
from outrider.model.kernels.gpu.copies import find_copies
from outrider.types import MAX_NODES, TreeShape

ALL_FOUR = 5.0
DRAFTED = 1 + 0.7 + 0.49 + 0.343 + 0.24


def _shape(name: str) -> dict[str, Any]:
    w = shape_of(name)
    return dict(hidden=w.hidden, layers=w.layers, heads=w.heads, kv_heads=w.kv_heads, head_dim=64,
                intermediate=w.intermediate, vocab=w.vocab, tied=w.tied)  # fmt: skip


def make_runner(shape: str, draft: str, size: int, context: int) -> GraphRunner:
    width = context + MAX_NODES
    target, small = (random_model(_shape(name), width, "cuda") for name in (shape, draft))
    table = SlotTable(size * width, size, width)
    cache = KvCache(make_store(target, size * width), table, context)
    vocab = target.config.vocab
    drafters = {"lookup": LookupDrafter(find=find_copies), "lm": LmDrafter(small, table, vocab, context)}
    runner = make_graph_runner(target, cache, Drafters(drafters, vocab), "none")
    state = runner.state
    state.tokens.random_(1000)
    state.temperature.fill_(0.7)
    state.table[:size] = torch.arange(size * width, device=state.device).view(size, width)
    return runner


def captured(runner: GraphRunner, size: int, drafter: str, tree: TreeShape, context: int) -> CapturedStep:
    return runner.graphs.capture(StepShape(size, tree, drafter, context, False))


def seconds(
    runner: GraphRunner, size: int, drafter: str, tree: TreeShape, context: int, count: int = 24
) -> float:
    """Median time of a step on the host's clock. As in an engine, the host is one step behind the device."""
    nodes, state = tree[1], runner.state
    step = captured(runner, size, drafter, tree, context)
    fresh = np.arange(size * (nodes + 1), dtype=np.int32).reshape(size, nodes + 1)
    last, times = None, []
    for _ in range(count + 4):
        state.lengths[:size] = context - 64
        begin = time.perf_counter()
        step.fill(list(range(size)), [nodes] * size, [True] * size, fresh)
        timer = step.launch().timer
        if last is not None:
            last.wait()
        last = timer
        times.append(time.perf_counter() - begin)
    timer.wait()
    return statistics.median(times[4:])


def profiled(graph: torch.cuda.CUDAGraph) -> None:
    """Prints what each kind of kernel adds to a step: the time from the end of the kernel before it to its own end."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in prof.events() if e.device_type.name == "CUDA"]
    spans = sorted((e.time_range.end, e.time_range.start, e.name) for e in events)
    added: dict[str, list[float]] = {}
    for (before, _, _), (end, _, name) in pairwise(spans):
        added.setdefault(name if name.startswith("_") else "torch's", []).append(end - before)
    for name, times in sorted(added.items(), key=lambda item: -sum(item[1])):
        print(f"    {name:20} {len(times):4} of them add {sum(times):7.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--draft", default="1b")
    parser.add_argument("--sizes", default="1,4,16,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--profile", action="store_true", help="print the time by kernel")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    sizes = [int(size) for size in given.sizes.split(",")]
    runner = make_runner(given.shape, given.draft, max(sizes), given.context)
    found: list[dict[str, Any]] = []
    for size in sizes:
        plain = seconds(runner, size, "none", NO_TREE, given.context)
        trees = [("lookup", (4, 4)), *(("lm", tree) for tree in CHAINS[:3])]
        trees += [("lm", tree) for tree in TREES] if size <= 4 else []
        for drafter, tree in (("none", NO_TREE), *trees):
            took = plain if tree == NO_TREE else seconds(runner, size, drafter, tree, given.context)
            tokens = {("none", NO_TREE): 1.0, ("lookup", (4, 4)): ALL_FOUR, ("lm", (4, 4)): DRAFTED}.get(
                (drafter, tree)
            )
            rate = None if tokens is None else size * tokens / took
            found.append(
                {"size": size, "drafter": drafter, "form": tree, "ms": 1e3 * took, "of_plain": took / plain}
            )
            found[-1] |= {"tokens": tokens, "tok_s": rate}
            shown = "" if rate is None else f", {rate:8.1f} tok/s at {tokens:.2f} tokens a step"
            print(
                f"{size:3} {drafter:7} {tree}: {1e3 * took:7.3f} ms, {took / plain:.3f}x plain{shown}",
                flush=True,
            )
            if given.profile:
                profiled(captured(runner, size, drafter, tree, given.context).graph)
    if given.json:
        report = {"kind": "rounds", "certificate": certificate("python bench/gpu/captured.py")}
        report |= {"shape": given.shape, "draft": given.draft, "context": given.context}
        given.json.write_text(json.dumps({**report, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()
