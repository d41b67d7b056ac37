"""Times an engine with random weights in the shape of Llama 3.1 8B, in this process and without HTTP.

    python -m bench.gpu.traffic --json traffic.json
    python -m bench.gpu.traffic --sections prepare,first --sequences 1 --context 33000
    python -m bench.gpu.traffic --sections grow,plain --prepared 64 --plain 512 --sequences 512
    python -m bench.gpu.traffic --device cpu --tiny      (a smoke test)

Sections: decoding more sequences than were prepared (`--prepared`), by quarters of a second; warm-up; the first token
of single prompts by length; plain decoding of many sequences; 256 long requests at once. Each reports how many graphs
were captured and kernels compiled meanwhile. The output is meaningless: the time of a step does not depend on the
weights. `outrider bench serve` measures the same over HTTP.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.gpu.passes import SHAPES, TINY, random_weights

from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.engine.certificate import certificate
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner, make_graph_runner
from outrider.engine.kv_cache import make_kv_cache
from outrider.engine.placement import PREFILL_SLOWDOWN, PREFILL_WAIT
from outrider.load.families import config_from_json
from outrider.model.decoder import Decoder, make_kernels
from outrider.model.kernels.gpu.recording import Recorded
from outrider.model.rope import rope_tables
from outrider.settings import Settings, cache_folder
from outrider.types import MAX_NODES, Request, SamplingParams

SECTIONS = ("grow", "prepare", "first", "plain", "long")
WINDOW = 0.25  # seconds
STEP_FIELDS = "decoding prompt_rows passes emitted target_s waited_s plan_s verify_s total_s graphs_captured"

ALONE = 4  # tokens of an answer of which only the first is timed


class Numbers:
    def __init__(self, marked: bool = False) -> None: ...

    def feed(self, *tokens: int) -> str:
        return "".join(f" {token}" for token in tokens)

    def finish(self) -> str:
        return ""


def make_model(given: argparse.Namespace) -> Any:
    raw = SHAPES["8b"] | (TINY if given.tiny else {}) | dict(max_position_embeddings=given.context)
    config = config_from_json(raw)
    read = random_weights(config, given.device, torch.bfloat16 if given.device == "cuda" else torch.float32)
    positions = given.context + MAX_NODES + 1
    if given.device == "cpu":
        return Decoder(config, read, make_kernels(config, positions, 1, cache_folder() / "kernels", "auto"))
    from outrider.model.device import DeviceDecoder
    from outrider.model.kernels.gpu.kernels import GpuKernels

    model = DeviceDecoder(Decoder(config, read, GpuKernels(config, rope_tables(config, positions))))
    torch.cuda.empty_cache()
    model.use_library()
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
    drafters = Drafters({}, model.config.vocab)
    if given.device == "cuda":
        runner = make_graph_runner(model, cache, drafters, "none")
    else:
        rows, width = cache.table.tensor.shape
        ops = StepOps(SequenceState(rows, width, torch.device("cpu"), model.config.vocab), model)
        runner = GraphRunner(model, cache, drafters, ops, model.make_pass(cache.store), default="none")
    bounds = PREFILL_SLOWDOWN[given.device], PREFILL_WAIT[given.device]
    guards = Guards(prefill_slowdown=bounds[0], prefill_wait=bounds[1])
    return Engine(model, cache, drafters, Planner("none", guards=guards), runner, settings, Numbers)


@dataclass
class Seen:
    """Seconds to first tokens and between tokens, and what was captured and compiled meanwhile."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    graphs: int = 0
    kernels: int = 0
    steps: int = 0
    rows: int = 0
    windows: dict[int, int] = field(default_factory=dict)  # tokens by quarter of a second
    records: list[tuple[float, ...]] = field(default_factory=list)  # STEP_FIELDS of each step

    def report(self) -> dict[str, Any]:
        ordered = sorted(self.between)

        def share(part: float) -> float:
            return 1e3 * ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0

        return {
            "tok_s": self.tokens / self.seconds, "seconds": self.seconds, "requests": len(self.first),
            "ttft_ms": 1e3 * statistics.mean(self.first), "ttft_p50_ms": 1e3 * statistics.median(self.first),
            "ttft_max_ms": 1e3 * max(self.first), "itl_p50_ms": share(0.5), "itl_p99_ms": share(0.99),
            "itl_max_ms": share(1.0), "steps": self.steps, "rows_a_step": self.rows / max(self.steps, 1),
            "graphs": self.graphs, "kernels": self.kernels, "records": self.records,
            "tok_s_by_window": [self.windows.get(i, 0) / WINDOW for i in range(max(self.windows, default=0))],
        }  # fmt: skip


def closed(engine: Engine, concurrency: int, total: int, prompt: int, tokens: int, most: float) -> Seen:
    """Keeps `concurrency` requests running until `total` are answered, for at most `most` seconds."""
    seen, begun, count, dice = Seen(), time.perf_counter(), 0, random.Random(1)
    asked: dict[str, float] = {}
    last: dict[str, float] = {}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    before = Recorded.graphs, Recorded.kernels
    while time.perf_counter() - begun < most:
        while count < total and len(engine.live) < concurrency:
            count += 1
            ids = tuple(dice.randrange(engine.model.config.vocab) for _ in range(prompt))
            one = Request(f"{concurrency}-{prompt}-{count}", ids, params, count)
            asked[one.id] = time.perf_counter()
            engine.add(one)
        if engine.idle:
            break
        for result in engine.step():
            now, record = time.perf_counter(), result.record
            seen.steps, seen.rows = seen.steps + record.passes, seen.rows + record.rows
            seen.records.append(tuple(round(getattr(record, name), 6) for name in STEP_FIELDS.split()))
            window = int((now - begun) / WINDOW)
            seen.windows[window] = seen.windows.get(window, 0) + record.emitted
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


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name:26} {found['tok_s']:8.0f} tok/s  TTFT mean {found['ttft_ms']:7.1f} p50 {found['ttft_p50_ms']:7.1f} max "
        f"{found['ttft_max_ms']:7.1f} ms  ITL p50 {found['itl_p50_ms']:6.2f} p99 {found['itl_p99_ms']:6.2f} max "
        f"{found['itl_max_ms']:6.1f} ms  {found['steps']} steps of {found['rows_a_step']:.0f} rows  captured "
        f"{found['graphs']} graphs, compiled {found['kernels']} kernels  ({found['seconds']:.1f} s)",
        flush=True,
    )


def prepare(engine: Engine, given: argparse.Namespace, sequences: int) -> dict[str, Any]:
    begun, pieces = time.perf_counter(), 0
    before = torch.cuda.mem_get_info()[0] if given.device == "cuda" else 0
    answerable = 0.0
    for _ in engine.prepare(sequences):
        pieces += 1
        if not answerable and engine.answerable:
            answerable = time.perf_counter() - begun
            if given.plain_only:
                break
        if time.perf_counter() - begun > given.prepare_seconds:
            print("    preparing was cut short: --prepare-seconds", flush=True)
            break
    seconds = time.perf_counter() - begun
    taken = before - torch.cuda.mem_get_info()[0] if given.device == "cuda" else 0
    print(
        f"prepared {sequences} in {seconds:.1f} s (every size in {answerable:.1f} s): {Recorded.graphs} graphs, "
        f"{Recorded.kernels} kernels, {pieces} pieces, {taken / 2**30:.2f} GiB",
        flush=True,
    )
    return {"seconds": seconds, "plain": answerable, "graphs": Recorded.graphs, "kernels": Recorded.kernels}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--lengths", default="128,512,2048,8192,32768", help="of single prompts")
    parser.add_argument("--plain", default="64,256")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer of plain decoding")
    parser.add_argument(
        "--prepared", type=int, default=64, help="sequences prepared for before the section grow"
    )
    parser.add_argument(
        "--plain-only", action="store_true", help="prepare steps without drafts, short texts alone"
    )
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--cache-gib", type=float, default=48.0)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each section, at most")
    parser.add_argument("--prepare-seconds", type=float, default=180.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    begun = time.perf_counter()
    engine = make_engine(given)
    print(f"model and cache in {time.perf_counter() - begun:.1f} s", flush=True)
    gc.collect()
    gc.freeze()  # as the server does: collecting the model would stop a step for a tenth of a second
    asked = given.sections.split(",")
    report: dict[str, Any] = {"kind": "traffic", "certificate": certificate("python -m bench.gpu.traffic")}
    if "grow" in asked:
        prepare(engine, given, given.prepared)
        count = min(4 * given.prepared, given.sequences)
        report["grow"] = found = closed(engine, count, count, 16, given.tokens, given.seconds).report()
        show(f"{count} after preparing {given.prepared}", found)
        windows = " ".join(f"{one:.0f}" for one in found["tok_s_by_window"])
        print(f"    tok/s by {WINDOW} s: {windows}", flush=True)
    if "prepare" in asked:
        report["prepare"] = prepare(engine, given, given.sequences)
    lengths = [one for one in map(int, given.lengths.split(",")) if one + ALONE <= given.context]
    for length in lengths if "first" in asked else ():
        report[f"first {length}"] = found = closed(engine, 1, 5, length, ALONE, given.seconds).report()
        show(f"alone, {length} tokens", found)
    for count in map(int, given.plain.split(",")) if "plain" in asked else ():
        report[f"plain {count}"] = found = closed(
            engine, count, count, 16, given.tokens, given.seconds
        ).report()
        show(f"plain, {count} together", found)
    if "long" in asked:
        count = min(256, given.sequences)
        report["long"] = found = closed(engine, count, count, 1024, 256, 2 * given.seconds).report()
        show(f"{count} of 1,024 in, 256 out", found)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
