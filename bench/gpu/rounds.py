"""What whole rounds cost: draft, target pass, law and commit in one graph, and what that means in tokens a second if a
given number of guesses holds.

    PYTHONPATH=src python bench/gpu/rounds.py --shape 8b --draft 1b --sizes 1,4,16,32 --json rounds.json

Weights are random: a round takes as long whatever is accepted, so the tokens a round brings are given, not measured:
all four of a lookup's guesses, and for a draft .7, .49, .343 and .24 of the first to the fourth.
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
from step import random_model, slot_table  # beside this file
from torch.profiler import ProfilerActivity, profile

from outrider.bench.certificate import certificate
from outrider.cache.table import SlotTable
from outrider.control.trees import CHAINS, NO_TREE, TREES, TreeShape
from outrider.draft.chains import LmChain, LookupChain
from outrider.draft.state_device import DeviceBetween
from outrider.engine.rounds import Rounds
from outrider.model.decoder import make_store
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.kernels.gpu.copies import find_copies
from outrider.types import MAX_NODES

ALL_FOUR = 5.0
DRAFTED = 1 + 0.7 + 0.49 + 0.343 + 0.24


def make_rounds(shape: str, draft: str, size: int, context: int) -> Rounds:
    width = context + MAX_NODES
    target, small = (DeviceDecoder(random_model(name, width)) for name in (shape, draft))
    table = SlotTable(size * width, size, width)
    store, keys = make_store(target, size * width), make_store(small, size * width)
    run = DevicePass(target, store)
    rounds = Rounds(target, store, table, target.device, run, between=DeviceBetween())
    lm = LmChain(small, DevicePass(small, keys), target.config.vocab)
    rounds.drafters = {"lookup": LookupChain(find_copies), "lm": lm}
    state = rounds.state
    state.tokens.random_(1000)
    state.temperature.fill_(0.7)
    state.table[:size] = slot_table(size, width, scattered=False).to(state.device)
    return rounds


def seconds(rounds: Rounds, size: int, drafter: str, form: TreeShape, context: int, count: int = 24) -> float:
    """Of a round, median, by the host's clock: rounds follow each other as in an engine, one behind."""
    nodes = form[1]
    shape = rounds._shape(size, nodes, form, drafter, context, False)
    fresh = np.arange(size * (nodes + 1), dtype=np.int32).reshape(size, nodes + 1)
    last, times = None, []
    for _ in range(count + 4):
        rounds.state.lengths[:size] = context - 64
        begin = time.perf_counter()
        shape.fill(list(range(size)), fresh, [nodes] * size, rounds.state.rows, rounds.dummy)
        _, timer = shape.fly()
        if last is not None:
            last.wait()
        last = timer
        times.append(time.perf_counter() - begin)
    last.wait()
    return statistics.median(times[4:])


def profiled(graph: torch.cuda.CUDAGraph) -> None:
    """What each kind of kernel adds to a round: from the end of what came before to its own end."""
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
    parser.add_argument("--profile", action="store_true", help="say where a round's time goes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    sizes = [int(size) for size in given.sizes.split(",")]
    rounds = make_rounds(given.shape, given.draft, max(sizes), given.context)
    found: list[dict[str, Any]] = []
    for size in sizes:
        plain = seconds(rounds, size, "none", NO_TREE, given.context)
        forms = [("lookup", (4, 4)), *(("lm", form) for form in CHAINS[:3])]
        forms += [("lm", form) for form in TREES] if size <= 4 else []
        for drafter, form in (("none", NO_TREE), *forms):
            took = plain if form == NO_TREE else seconds(rounds, size, drafter, form, given.context)
            tokens = {("none", NO_TREE): 1.0, ("lookup", (4, 4)): ALL_FOUR, ("lm", (4, 4)): DRAFTED}.get(
                (drafter, form)
            )
            rate = None if tokens is None else size * tokens / took
            found.append(
                {"size": size, "drafter": drafter, "form": form, "ms": 1e3 * took, "of_plain": took / plain}
            )
            found[-1] |= {"tokens": tokens, "tok_s": rate}
            told = "" if rate is None else f", {rate:8.1f} tok/s at {tokens:.2f} tokens a round"
            print(
                f"{size:3} {drafter:7} {form}: {1e3 * took:7.3f} ms, {took / plain:.3f}x plain{told}",
                flush=True,
            )
            if given.profile:
                profiled(rounds._shape(size, form[1], form, drafter, given.context, False).graph)
    if given.json:
        report = {"kind": "rounds", "certificate": certificate("python bench/gpu/rounds.py")}
        report |= {"shape": given.shape, "draft": given.draft, "context": given.context}
        given.json.write_text(json.dumps({**report, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()
