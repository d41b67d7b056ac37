"""Passes of many rows, by our kernels and by cuBLASLt: bits, single shapes, segments, whole passes, first tokens;
and attention over long prompts, in programs of several kinds.

    PYTHONPATH=src python bench/gpu/prefill_matmul.py --json prefill.json
    PYTHONPATH=src python bench/gpu/prefill_matmul.py --sections bits,passes

The model has random weights in the shape of Llama 3.1 8B, heads of 128. A section that fails says so and the next one
goes on. Both ways take turns within each figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.engine.certificate import certificate
from outrider.load.config import ModelConfig, Rope
from outrider.model.decoder import Decoder, make_store
from outrider.model.device import DeviceDecoder
from outrider.model.kernels.gpu import attention as at
from outrider.model.kernels.gpu import library, same_bits
from outrider.model.kernels.gpu import matmul as mm
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.rope import rope_tables
from outrider.types import Batch

CHUNK = 2048
SHAPES = {
    "qkv": (6144, 4096, 1),
    "out": (4096, 4096, 1),
    "gate-up": (14_336, 4096, 2),
    "down": (4096, 14_336, 1),
    "head": (128_256, 4096, 1),
}
COUNTS = (128, 192, 256, 384, 512, 1024, 2048)
FEW = (1, 16, 64)  # rows of decoding, which segments are there for


# ------------------------------------------------------------------------------------------------------ the model


def random_model(layers: int, context: int) -> DeviceDecoder:
    config = ModelConfig(
        family="llama", vocab=128_256, hidden=4096, layers=layers, heads=32, kv_heads=8, head_dim=128,
        intermediate=14_336, context=context, norm_eps=1e-5, rope=Rope(), tied=False, qkv_bias=False, out_bias=False,
        mlp_bias=False, qk_norm=False, windows=(0,) * layers,
    )  # fmt: skip
    shapes = {
        "q_proj.weight": (4096, 4096), "k_proj.weight": (1024, 4096), "v_proj.weight": (1024, 4096),
        "o_proj.weight": (4096, 4096), "gate_proj.weight": (14_336, 4096), "up_proj.weight": (14_336, 4096),
        "down_proj.weight": (4096, 14_336), "embed_tokens.weight": (128_256, 4096), "lm_head.weight": (128_256, 4096),
    }  # fmt: skip

    def read(name: str) -> Tensor:
        shape = next((s for end, s in shapes.items() if name.endswith(end)), None)
        if shape is None:
            return torch.ones(4096, device="cuda")
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    return DeviceDecoder(Decoder(config, read, GpuKernels(config, *rope_tables(config, context))))


def prompt_batch(table: Tensor, first: int, rows: int) -> Batch:
    """Rows of a prompt from position `first` on, on the host; `table` is the device's, slots in order."""
    at = torch.arange(first, first + rows, dtype=torch.int32)
    return Batch(
        ids=torch.randint(1000, (rows,), generator=torch.Generator().manual_seed(first)),
        positions=at, slots=at, table_rows=torch.zeros_like(at), prefix=at + 1,
        ancestors=torch.zeros(rows, dtype=torch.int64), table=table, logit_rows=torch.tensor([rows - 1]),
    )  # fmt: skip


def read_prompt(model: DeviceDecoder, store: KeyValueStore, table: Tensor, length: int) -> Tensor:
    """The last token's logits, chunk by chunk as the engine reads it, launched operation by operation."""
    logits = torch.empty(0)
    for first in range(0, length, CHUNK):
        batch = prompt_batch(table, first, min(CHUNK, length - first))
        logits = model._eager(batch, store, model.config.layers)
    return logits


class Ways:
    """Our kernels alone, or the library where it was found to have their bits."""

    def __init__(self, model: DeviceDecoder) -> None:
        self.weights = [one.weight for one in model._linears()]
        self.kept = [weight.library for weight in self.weights]

    def use(self, way: str) -> None:
        for weight, kept in zip(self.weights, self.kept, strict=True):
            weight.library = kept if way == "library" else None


# --------------------------------------------------------------------------------------------------------- timing


def elapsed(work: Callable[[], Any]) -> float:
    """Milliseconds of a run, the host's part included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def replayed(work: Callable[[], Any], launches: int, replays: int = 5) -> float:
    """Microseconds of one of the launches in a graph, median over replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for i in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i:
            times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def in_turn(ways: Ways, rounds: int, work: Callable[[], Any]) -> dict[str, float]:
    """Median milliseconds of either way; the first run of each compiles and is not counted."""
    times: dict[str, list[float]] = {"own": [], "library": []}
    for number in range(rounds + 1):
        for way, seen in times.items():
            ways.use(way)
            took = elapsed(work)
            if number:
                seen.append(took)
    return {way: statistics.median(seen) for way, seen in times.items()}


# ------------------------------------------------------------------------------------------------------- sections


def bits(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """The check that every start makes, and whole passes, both ways."""
    model, ways = given.model, given.ways
    report["describe"], report["shapes"] = model.library.describe(), model.library.shapes
    print(model.library.describe(), model.library.shapes)
    wrong = []
    for rows in (97, 128, 150, 500, 1000, 1999, 2048):
        seen = []
        for way in ("own", "library"):
            ways.use(way)
            store = make_store(model, rows)
            logits = model._eager(prompt_batch(given.table, 0, rows), store, model.config.layers)
            seen.append((logits, store.keys[-1], store.values[-1]))
        if not all(torch.equal(ours, theirs) for ours, theirs in zip(*seen, strict=True)):
            wrong.append(rows)
    report["differing_rows"] = wrong
    print("whole passes, both ways:", f"OTHER BITS at {wrong} rows" if wrong else "the same bits")


def shapes(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """Microseconds of each shape: ours, and the library's two ways with today's segments."""
    layers = given.model.decoder.layers[:4]
    for name in SHAPES:
        linears = [given.model.decoder.head] if name == "head" else [getattr(w, _field(name)) for w in layers]
        weights = [one.weight for one in linears]
        copies = [same_bits.row_major(weight) for weight in weights]
        for rows in COUNTS if name != "head" else COUNTS[:3]:
            x = torch.randn(rows, weights[0].inputs, device="cuda").bfloat16()
            row = {"own": _own_us(x, weights)}
            for way in library.WAYS[: mm.segments(weights[0])]:
                row[way.__name__] = _library_us(x, weights, copies, way, mm.segments(weights[0]))
            report[f"{name} {rows}"] = row
            print(f"{name:8} {rows:5} rows, {mm.segments(weights[0])} segments, us:", _shown(row), flush=True)


def segments(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """What other numbers of segments would cost few rows, and save many. A new number is a new arithmetic."""
    layers = given.model.decoder.layers[:4]
    for name in ("qkv", "out", "down"):
        weights = [getattr(w, _field(name)).weight for w in layers]
        copies = [same_bits.row_major(weight) for weight in weights]
        for pieces in (1, 2, 4):
            row = {}
            for rows in FEW:
                x = torch.randn(rows, weights[0].inputs, device="cuda").bfloat16()
                row[f"own {rows}"] = _own_us(x, weights, pieces)
            for rows in (512, 2048):
                x = torch.randn(rows, weights[0].inputs, device="cuda").bfloat16()
                row[f"library {rows}"] = min(
                    _library_us(x, weights, copies, way, pieces) for way in library.WAYS[:pieces]
                )
            report[f"{name} {pieces}"] = row
            print(f"{name:5} in {pieces} segments, us:", _shown(row), flush=True)


def passes(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """Milliseconds of passes over the beginning of a prompt."""
    for rows in (128, 256, 512, 1024, 2048):
        row = in_turn(
            given.ways, 3, lambda rows=rows: read_prompt(given.model, given.store, given.table, rows)
        )
        report[str(rows)] = row
        print(f"pass of {rows:5} rows, ms:", _shown(row), flush=True)


def prompts(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """Milliseconds to the logits of the last token."""
    for length in (8192, 32_768):

        def first_token(length: int = length) -> int:
            return int(read_prompt(given.model, given.store, given.table, length).argmax())

        row = in_turn(given.ways, 2 if length < 10_000 else 1, first_token)
        report[str(length)] = row
        print(f"prompt of {length:6} tokens, ms:", _shown(row), flush=True)


MANY = [(64, 4, 2), (64, 4, 3), (64, 4, 4)]  # rows times heads, warps, stages
SINGLE = [(16, 4, 2), (16, 4, 3), (16, 4, 4), (16, 4, 6)]


def attention(given: argparse.Namespace, report: dict[str, Any]) -> None:
    """Of a prompt's last 2,048 rows, and of one row, in programs of several kinds: microseconds a layer, and bits."""
    config, keys, values = given.model.config, given.store.keys[0], given.store.values[0]
    keys.normal_()
    values.normal_()
    kept = at._stages, at._warps
    for rows, ways, contexts in ((CHUNK, MANY, (2048, 8192, 32_768)), (1, SINGLE, (2048, 8192, 32_768))):
        for context in contexts:
            batch = prompt_batch(given.table, context - rows, rows).to(keys.device)
            q = torch.randn(rows, config.heads, config.head_dim, device=keys.device).to(keys.dtype)
            first = None
            for tile, warps, stages in ways:
                at._stages, at._warps = lambda *a, n=stages: n, lambda *a, n=warps: n
                name, out = (
                    f"{rows} of {context}: {tile} by {warps} warps, {stages} stages",
                    torch.empty_like(q),
                )
                try:
                    took = _attention_us(q, batch, keys, values, out)
                    first = out.clone() if first is None else first
                    same = torch.equal(out, first)
                    report[name] = {"us": took, "same_bits": same}
                    print(f"attention {name}: {took:.1f} us, {'same' if same else 'OTHER'} bits", flush=True)
                except Exception as error:
                    report[name] = {"failed": f"{type(error).__name__} {error}"}
                    print(f"attention {name} failed: {type(error).__name__} {str(error)[:150]}", flush=True)
                finally:
                    at._stages, at._warps = kept


def _attention_us(q: Tensor, batch: Batch, keys: Tensor, values: Tensor, out: Tensor) -> float:
    _, heads, dim = q.shape
    plan = at.plan_attention(batch, heads, keys.shape[1], dim)
    return replayed(lambda: at.attend(q, batch, keys, values, 0, dim**-0.5, plan, out), 1)


SECTIONS = {
    "bits": bits,
    "passes": passes,
    "prompts": prompts,
    "shapes": shapes,
    "attention": attention,
    "segments": segments,
}


def _field(name: str) -> str:
    return name.replace("-", "_")


def _shown(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in row.items())


def _tile(weight: mm.Packed, rows: int, pieces: int | None) -> tuple[int, mm.Tile]:
    """As the library of kernels would take it if the weight had so many segments."""
    if pieces is None:
        return mm.segments(weight), mm.choose_tile(weight, rows)
    kept = mm.segments
    mm.segments = lambda weight: pieces
    try:
        return pieces, mm.choose_tile(weight, rows)
    finally:
        mm.segments = kept


def _own_us(x: Tensor, weights: list[mm.Packed], pieces: int | None = None) -> float:
    cut, tile = _tile(weights[0], len(x), pieces)
    dtype = x.dtype if weights[0].gated else torch.float32
    out = x.new_empty((cut if tile.spread else 1, len(x), weights[0].outputs), dtype=dtype)

    def work() -> None:
        for weight in weights:
            mm.launch_multiply(x, weight, None, out, cut, tile)

    return replayed(work, len(weights))


def _library_us(
    x: Tensor, weights: list[mm.Packed], copies: list[Tensor], way: library.Product, pieces: int
) -> float:
    first = weights[0]
    made = [library.Library(copy, frozenset(), way) for copy in copies]
    dtype = x.dtype if first.gated else torch.float32
    out = x.new_empty((1 if first.gated else pieces, len(x), first.outputs), dtype=dtype)
    length = mm.segment_length(first.width, pieces)

    def work() -> None:
        for one in made:
            if first.gated:
                one.multiply_gated(x, None, out)
            else:
                one.multiply(x, length, None, out)

    return replayed(work, len(made))


# ------------------------------------------------------------------------------------------------------ compiling


def kernels_to_compile(sections: list[str]) -> set[tuple[Any, ...]]:
    jobs = set()
    for outputs, inputs, halves in SHAPES.values():
        weight = mm.room_for(halves, outputs, inputs, "bfloat16", torch.bfloat16, "meta")
        for rows in (*FEW, 150, *COUNTS):
            jobs.add((outputs, inputs, halves, *_tile(weight, rows, None)))
        if "segments" in sections and halves == 1 and outputs < 10_000:
            jobs |= {(outputs, inputs, 1, *_tile(weight, rows, n)) for rows in FEW for n in (1, 2, 4)}
    return jobs


def compile_one(job: tuple[Any, ...]) -> str | None:
    """In a process of its own: what it compiles is in the cache on disk then."""
    outputs, inputs, halves, pieces, tile = job
    try:
        weight = mm.room_for(halves, outputs, inputs, "bfloat16", torch.bfloat16, "meta")
        x = torch.empty((7, inputs), dtype=torch.bfloat16, device="meta")
        dtype = torch.bfloat16 if halves == 2 else torch.float32
        out = torch.empty((pieces if tile.spread else 1, 7, outputs), dtype=dtype, device="meta")
        args, options = mm.kernel_arguments(x, weight, None, out, pieces, tile)
        mm._matmul_kernel.warmup(*args, grid=(1,), **options)
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:200]}"
    return None


def compile_all(sections: list[str], compilers: int) -> None:
    jobs = kernels_to_compile(sections)
    begin = time.time()
    with ProcessPoolExecutor(compilers, mp_context=get_context("spawn")) as pool:
        problems = [found for found in pool.map(compile_one, sorted(jobs, key=str), chunksize=2) if found]
    print(
        f"{len(jobs)} matmul kernels compiled in {time.time() - begin:.0f} s", *problems, sep="\n", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--compilers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sections = given.sections.split(",")
    torch.set_grad_enabled(False)
    begin = time.time()
    compile_all(sections, given.compilers)
    given.model = random_model(given.layers, given.longest + 64)
    torch.cuda.empty_cache()
    print(f"model after {time.time() - begin:.0f} s", flush=True)
    took = elapsed(lambda: given.model.use_library(torch.cuda.mem_get_info()[0]))
    print(f"copied and compared in {took:.0f} ms", flush=True)
    given.ways = Ways(given.model)
    given.store = make_store(given.model, given.longest + 1)
    given.table = torch.arange(given.longest, dtype=torch.int32, device="cuda")[None]
    report: dict[str, Any] = {"certificate": certificate(), "adopt_ms": took}
    for name in sections:
        report[name] = {}
        try:
            SECTIONS[name](given, report[name])
        except Exception:
            report[name]["failed"] = traceback.format_exc()
            print(f"section {name} FAILED", report[name]["failed"], sep="\n", flush=True)
        print(f"-- {name} done after {time.time() - begin:.0f} s", flush=True)
        if given.json:
            given.json.write_text(json.dumps(report, default=str))


if __name__ == "__main__":
    main()
