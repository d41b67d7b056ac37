"""Traffic without HTTP: an engine with random weights in the shape of Llama 3.1 8B, in this process.

    PYTHONPATH=src python bench/gpu/traffic.py --json traffic.json
    PYTHONPATH=src python bench/gpu/traffic.py --sections closed --concurrency 16,64 --stretch 0.25
    PYTHONPATH=src python bench/gpu/traffic.py --sections prepare,first --sequences 1 --context 33000
    PYTHONPATH=src python bench/gpu/traffic.py --device cpu --tiny      (to see that it runs)

Sections: what preparing takes, the steps that were measured, first tokens alone by length of the prompt, closed loops
(prompts of 256 tokens, 192 tokens out, greedy), plain decoding, 256 long requests at once, and an open loop. Each says
how many graphs were captured and kernels compiled meanwhile. Output is worth nothing: a step takes as long whatever the
weights say.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.lookup import LookupDrafter
from outrider.engine.certificate import certificate
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner, make_graph_runner
from outrider.engine.kv_cache import make_kv_cache
from outrider.engine.placement import PREFILL_SLOWDOWN, PREFILL_WAIT
from outrider.load.config import ModelConfig, Rope
from outrider.model.decoder import Decoder, make_kernels
from outrider.model.kernels.gpu.recording import Recorded
from outrider.model.rope import rope_tables
from outrider.settings import Settings, cache_folder
from outrider.types import MAX_NODES, Request, SamplingParams

LLAMA = dict(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocab=128_256)
TINY = dict(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=96)
SECTIONS = ("prepare", "steps", "first", "closed", "plain", "long", "open")

SPARE = 8 << 30  # bytes for graphs and what steps need
KINDS = 8  # of steps that are shown
TIMES = ("device_ms", "whole_ms", "waited_ms")
ALONE = 4  # tokens of an answer whose first one is what matters


class Numbers:
    def feed(self, *tokens: int) -> str:
        return "".join(f" {token}" for token in tokens)

    def finish(self) -> str:
        return ""


def make_model(given: argparse.Namespace) -> Any:
    shape = TINY if given.tiny else LLAMA
    config = ModelConfig(
        family="llama", context=given.context, norm_eps=1e-5, rope=Rope(), tied=False, qkv_bias=False,
        out_bias=False, mlp_bias=False, qk_norm=False, windows=(0,) * shape["layers"], **shape,
    )  # fmt: skip
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, wide = config.hidden, config.intermediate
    shapes = {
        "q_proj.weight": (q, hidden), "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden),
        "o_proj.weight": (hidden, q), "gate_proj.weight": (wide, hidden), "up_proj.weight": (wide, hidden),
        "down_proj.weight": (hidden, wide), "embed_tokens.weight": (config.vocab, hidden),
        "lm_head.weight": (config.vocab, hidden),
    }  # fmt: skip
    kind = torch.bfloat16 if given.device == "cuda" else torch.float32

    def read(name: str) -> Tensor:
        shape = next((s for end, s in shapes.items() if name.endswith(end)), None)
        if shape is None:
            return torch.ones(hidden, device=given.device)
        return torch.randn(shape, device=given.device, dtype=kind) * 0.02

    positions = given.context + MAX_NODES + 1
    if given.device == "cpu":
        return Decoder(config, read, make_kernels(config, positions, 1, cache_folder() / "kernels", "auto"))
    from outrider.model.device import DeviceDecoder
    from outrider.model.kernels.gpu.kernels import GpuKernels

    model = DeviceDecoder(Decoder(config, read, GpuKernels(config, *rope_tables(config, positions))))
    torch.cuda.empty_cache()
    model.use_library(torch.cuda.mem_get_info()[0] - int(given.cache_gib * 2**30) - SPARE)
    print(model.library.describe(), flush=True)
    return model


def make_engine(given: argparse.Namespace) -> Engine:
    model = make_model(given)
    room = 1 << 26 if given.device == "cpu" else int(given.cache_gib * 2**30)
    settings = Settings(
        context=given.context, max_sequences=given.sequences, step_rows=max(2048, given.sequences),
        cache_bytes=room, prefix_reuse=False,
    )  # fmt: skip
    cache = make_kv_cache(model, settings)
    drafters = Drafters({"lookup": LookupDrafter()} if given.draft == "lookup" else {}, model.config.vocab)
    if given.device == "cuda":
        runner = make_graph_runner(model, cache, drafters, given.draft)
    else:
        rows, width = cache.table.tensor.shape
        ops = StepOps(SequenceState(rows, width, torch.device("cpu"), model.config.vocab), model)
        runner = GraphRunner(model, cache, drafters, ops, model.make_pass(cache.store), default=given.draft)
    choices = () if given.draft == "none" else (given.draft,)
    guards = Guards(prefill_stretch=given.stretch, prefill_wait=given.wait)
    planner = Planner(given.draft, choices=choices, guards=guards)
    return Engine(model, cache, drafters, planner, runner, settings, Numbers)


@dataclass
class Seen:
    """What clients saw: seconds to first tokens and between tokens, and what was made while they waited."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    graphs: int = 0
    kernels: int = 0
    steps: int = 0
    rows: int = 0
    kinds: dict[tuple[int, int], list[tuple[float, ...]]] = field(default_factory=dict)

    def note(self, rows: int, prompt_rows: int, *seconds: float) -> None:
        """A step: by how many decoding rows, up to a power of two, and prompt rows, up to a multiple of 64, it had."""
        size = 0 if not rows else 1 << (rows - 1).bit_length()
        self.kinds.setdefault((size, -(-prompt_rows // 64) * 64), []).append(seconds)

    def by_kind(self) -> list[dict[str, float]]:
        """Steps, those first that took longest together: of the device, from step to step, and what the host waited."""
        found = [
            {"rows": size, "prompt_rows": rows, "steps": len(seen)}
            | {
                name: 1e3 * statistics.median(some)
                for name, some in zip(TIMES, zip(*seen, strict=True), strict=True)
            }
            | {"share": sum(whole for _, whole, _ in seen) / self.seconds}
            for (size, rows), seen in self.kinds.items()
        ]
        return sorted(found, key=lambda one: -one["share"])

    def report(self) -> dict[str, Any]:
        ordered = sorted(self.between)

        def share(part: float) -> float:
            return 1e3 * ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0

        return {
            "tok_s": self.tokens / self.seconds, "seconds": self.seconds, "requests": len(self.first),
            "ttft_ms": 1e3 * statistics.mean(self.first), "ttft_p50_ms": 1e3 * statistics.median(self.first),
            "ttft_max_ms": 1e3 * max(self.first), "itl_p50_ms": share(0.5), "itl_p99_ms": share(0.99),
            "itl_max_ms": share(1.0), "steps": self.steps, "rows_a_step": self.rows / max(self.steps, 1),
            "graphs": self.graphs, "kernels": self.kernels, "kinds": self.by_kind(),
        }  # fmt: skip


def run(
    engine: Engine, arrivals: Callable[[float, int], list[Request]], most: float, lasts: float = 0.0
) -> Seen:
    """Until nothing is left and it lasted so long, at `most` so long. Before every step `arrivals` are asked, with the
    seconds since the beginning and how many are running.
    """
    seen, begun = Seen(), time.perf_counter()
    asked: dict[str, float] = {}
    last: dict[str, float] = {}
    before, ended = (Recorded.graphs, Recorded.kernels), begun
    while time.perf_counter() - begun < most:
        for one in arrivals(time.perf_counter() - begun, len(engine.live)):
            asked[one.id] = time.perf_counter()
            engine.add(one)
        if engine.idle:
            if time.perf_counter() - begun > lasts:
                break
            continue
        for result in engine.step():
            now = time.perf_counter()
            record = result.record
            seen.steps, seen.rows = seen.steps + record.passes, seen.rows + record.rows
            times = record.target_s, now - ended, record.waited_s
            seen.note(record.rows - record.prompt_rows, record.prompt_rows, *times)
            ended = now
            for event in result.events:
                if event.request_id in last:
                    seen.between.append(now - last[event.request_id])
                else:
                    seen.first.append(now - asked[event.request_id])
                last[event.request_id] = now
                seen.tokens += len(event.token_ids)
    for name in list(engine.live):
        engine.abort(name)
    engine.drain()
    seen.seconds = time.perf_counter() - begun
    seen.graphs, seen.kernels = Recorded.graphs - before[0], Recorded.kernels - before[1]
    return seen


class Asked:
    """Requests one after the other."""

    def __init__(self, vocab: int, name: str) -> None:
        self.dice, self.vocab, self.name, self.count = random.Random(1), vocab, name, 0

    def next(self, prompt: int, tokens: int) -> Request:
        self.count += 1
        ids = tuple(self.dice.randrange(self.vocab) for _ in range(prompt))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return Request(f"{self.name}-{self.count}", ids, params, self.count)


def closed(engine: Engine, concurrency: int, total: int, prompt: int, tokens: int, most: float) -> Seen:
    asked = Asked(engine.model.config.vocab, f"closed{concurrency}-{total}-{prompt}")

    def arrivals(_: float, running: int) -> list[Request]:
        wanted = min(concurrency - running, total - asked.count)
        return [asked.next(prompt, tokens) for _ in range(max(wanted, 0))]

    return run(engine, arrivals, most)


def poisson(engine: Engine, rate: float, seconds: float, shortest: int, longest: int) -> Seen:
    """Prompts of many lengths, most of them short: logarithms of lengths are evenly spread."""
    asked, dice = Asked(engine.model.config.vocab, "open"), random.Random(2)
    due = [0.0]

    def arrivals(now: float, running: int) -> list[Request]:
        found = []
        while due[0] <= min(now, seconds):
            length = int(shortest * (longest / shortest) ** dice.random())
            found.append(asked.next(length, 128))
            due[0] += dice.expovariate(rate)
        return found

    return run(engine, arrivals, seconds + 10, seconds)


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name:26} {found['tok_s']:8.0f} tok/s  TTFT mean {found['ttft_ms']:7.1f} p50 {found['ttft_p50_ms']:7.1f} max "
        f"{found['ttft_max_ms']:7.1f} ms  ITL p50 {found['itl_p50_ms']:6.2f} p99 {found['itl_p99_ms']:6.2f} max "
        f"{found['itl_max_ms']:6.1f} ms  {found['steps']} steps of {found['rows_a_step']:.0f} rows  captured "
        f"{found['graphs']} graphs, compiled {found['kernels']} kernels  ({found['seconds']:.1f} s)",
        flush=True,
    )
    for one in found["kinds"][:KINDS]:
        print(
            "    up to {rows:3.0f} rows, {prompt_rows:4.0f} of prompts: {steps:5.0f} steps of {device_ms:6.2f} ms on "
            "the device, {whole_ms:6.2f} from step to step, {waited_ms:5.2f} waited for, {share:4.0%}".format(
                **one
            ),
            flush=True,
        )


def prepare(engine: Engine, given: argparse.Namespace) -> dict[str, Any]:
    begun, pieces = time.perf_counter(), 0
    before = torch.cuda.mem_get_info()[0] if given.device == "cuda" else 0
    answerable = 0.0
    for _ in engine.prepare(given.sequences):
        pieces += 1
        if not answerable and given.sequences in engine.runner.sizes.made:
            answerable = time.perf_counter() - begun
        if time.perf_counter() - begun > given.prepare_seconds:
            print("    preparing was cut short: --prepare-seconds", flush=True)
            break
    seconds = time.perf_counter() - begun
    taken = before - torch.cuda.mem_get_info()[0] if given.device == "cuda" else 0
    print(
        f"prepared in {seconds:.1f} s (every size in {answerable:.1f} s): {Recorded.graphs} graphs, {Recorded.kernels} "
        f"kernels, {pieces} pieces, {taken / 2**30:.2f} GiB",
        flush=True,
    )
    return {"seconds": seconds, "plain": answerable, "graphs": Recorded.graphs, "kernels": Recorded.kernels}


def steps(engine: Engine) -> dict[str, Any]:
    costs, found = engine.planner.costs, {}
    for size in sorted({size for name, _, size in costs.captured if name == "none"}):
        plain = costs.plain(size) or 0.0
        beside = {rows: s for (known, rows), s in sorted(costs.beside.items()) if known == size}
        found[size] = {"plain_ms": 1e3 * plain, "beside_ms": {rows: 1e3 * s for rows, s in beside.items()}}
        shown = ", ".join(f"{rows}: {1e3 * s:.2f} ({s / plain:.2f}x)" for rows, s in beside.items())
        chosen = engine.planner.prompt_rows(size, 0.0)
        print(
            f"    {size:3} sequences: {1e3 * plain:6.2f} ms; with prompt rows {shown}; bite {chosen}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--concurrency", default="1,16,64,128")
    parser.add_argument("--lengths", default="128,512,2048,8192,32768", help="of prompts that come alone")
    parser.add_argument("--plain", default="64,256")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--cache-gib", type=float, default=48.0)
    parser.add_argument("--draft", choices=("none", "lookup"), default="none")
    parser.add_argument("--stretch", type=float, default=PREFILL_SLOWDOWN["cuda"])
    parser.add_argument("--wait", type=float, default=PREFILL_WAIT["cuda"])
    parser.add_argument("--rate", type=float, default=20.0, help="of the open loop, requests a second")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each section, at most")
    parser.add_argument("--prepare-seconds", type=float, default=180.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that this runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    begun = time.perf_counter()
    engine = make_engine(given)
    print(f"model and cache in {time.perf_counter() - begun:.1f} s", flush=True)
    asked = given.sections.split(",")
    report: dict[str, Any] = {"kind": "traffic", "certificate": certificate("python bench/gpu/traffic.py")}
    if "prepare" in asked:
        report["prepare"] = prepare(engine, given)
    if "steps" in asked:
        report["steps"] = steps(engine)
    lengths = [one for one in map(int, given.lengths.split(",")) if one + ALONE <= given.context]
    for length in lengths if "first" in asked else ():
        report[f"first {length}"] = found = closed(engine, 1, 5, length, ALONE, given.seconds).report()
        show(f"alone, {length} tokens", found)
    for concurrency in map(int, given.concurrency.split(",")) if "closed" in asked else ():
        total = concurrency * (6 if concurrency == 1 else 3)
        report[f"closed {concurrency}"] = found = closed(
            engine, concurrency, total, 256, 192, given.seconds
        ).report()
        show(f"closed loop, {concurrency} at once", found)
    for count in map(int, given.plain.split(",")) if "plain" in asked else ():
        report[f"plain {count}"] = found = closed(engine, count, count, 16, 256, given.seconds).report()
        show(f"plain, {count} together", found)
    if "long" in asked:
        count = min(256, given.sequences)
        report["long"] = found = closed(engine, count, count, 1024, 256, 2 * given.seconds).report()
        show(f"{count} of 1,024 in, 256 out", found)
    if "open" in asked:
        longest = min(4096, given.context // 2)
        report["open"] = found = poisson(engine, given.rate, given.seconds, 64, longest).report()
        show(f"open loop, {given.rate:g} a second", found)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
