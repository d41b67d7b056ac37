"""Matmul tiles on the device: time, share of the read bandwidth, and whether a row's bits depend on the row count.

    PYTHONPATH=src python bench/gpu/matmul.py --shapes 8b --rows 1,16,32,64,128,256 --out sweep.json
    PYTHONPATH=src python bench/gpu/matmul.py --kinds bfloat16,fp8,int8,int4 --rows 1,16,64 --only out,gate-up,down
    PYTHONPATH=src python bench/gpu/matmul.py --kinds bfloat16,fp8,int8,int4 --chosen --rows 1,16,64,256

Compiles every candidate in parallel first, then times each in a CUDA graph over weights that do not fit the cache.
With several kinds of weights the table says each one's time as a share of bfloat16's. `--chosen`: only the tiles that
the library itself would take.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from outrider.model.kernels.gpu import matmul as mm
from outrider.model.kernels.gpu.matmul import Tile

# name: outputs, inputs, gated, segment counts to try
SHAPES = {
    "8b": {
        "qkv": (6144, 4096, False, (2, 4)),
        "out": (4096, 4096, False, (2, 4)),
        "gate-up": (14336, 4096, True, (1,)),
        "down": (4096, 14336, False, (4,)),
        "head": (128256, 4096, False, (1,)),
    },
    "135m": {
        "qkv": (960, 576, False, (1,)),
        "out": (576, 576, False, (1,)),
        "gate-up": (1536, 576, True, (1,)),
        "down": (576, 1536, False, (1, 2)),
        "head": (49152, 576, False, (1,)),
    },
}
SMALL = [(64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (128, 128, 8, 4)]
MIDDLE = [
    (64, 64, 4, 5),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (128, 64, 4, 4),
    (128, 128, 4, 3),
    (128, 128, 8, 3),
]
LAUNCHES = 16  # in one graph
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}  # a weight, scales aside
LARGE = [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)]


def candidates(rows: int, gated: bool, pieces: int, inputs: int, kind: str) -> list[Tile]:
    deep = 128 if inputs % 128 == 0 else 64
    shapes = _plain_shapes(rows) if kind == "bfloat16" else _scaled_shapes(rows, deep)
    tiles = []
    for r, n, k, warps, stages in shapes:
        kept = (n * (2 if gated else 1) * BYTES[kind] + r * 2) * k * stages
        segment = mm.segment_length(inputs, pieces)
        fits = k <= deep if kind == "bfloat16" else inputs % k == 0 and segment % k == 0
        if not fits or kept > 225_000:
            continue
        if gated and n == 128 and r >= 128 and (warps == 4 or kind != "bfloat16"):
            continue
        spreads = (True,) if pieces > 1 and rows <= 16 else (True, False) if pieces > 1 else (False,)
        tiles += [Tile(r, n, k, warps, stages, spread) for spread in spreads]
    return tiles


def _plain_shapes(rows: int) -> list[tuple[int, ...]]:
    if rows <= 16:
        return [(16, *s) for s in SMALL]
    if rows <= 64:
        return [(32 if rows <= 32 else 64, *s) for s in MIDDLE]
    low = [(64, *s) for s in ((64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4))]
    return low + [(128, *s) for s in LARGE] + ([(256, 128, 64, 8, 3)] if rows > 128 else [])


def _scaled_shapes(rows: int, deep: int) -> list[tuple[int, ...]]:
    """Of weights in fewer bits: steps of one tile or more, and stages enough to keep as many bytes on their way."""
    if rows <= 16:
        steps = [(16, 64, deep * many, 4, stages) for many in (1, 2, 4) for stages in (3, 4, 5, 6, 8)]
        return [*steps, (16, 128, deep, 8, 4), (16, 128, 2 * deep, 8, 4)]
    if rows <= 64:
        high = 32 if rows <= 32 else 64
        steps = [(high, 64, deep * many, 4, stages) for many in (1, 2) for stages in (3, 4, 5)]
        return [*steps, (high, 128, deep, 8, 3), (high, 128, deep, 8, 4)]
    low = [(64, 64, deep, 4, 4), (64, 128, deep, 8, 3), (64, 128, deep, 8, 4)]
    return [*low, (128, 64, deep, 4, 3), (128, 128, deep, 8, 3)]


def tiles_of(shape: tuple, kind: str, rows: int, pieces: int, chosen: bool) -> list[Tile]:
    outputs, inputs, gated, _ = shape
    if not chosen:
        return candidates(rows, gated, pieces, inputs, kind)
    weight = mm.room_for(2 if gated else 1, outputs, inputs, kind, torch.bfloat16, "meta")
    return [mm.choose_tile(weight, rows)] if pieces == mm.segments(weight) else []


def compile_one(job: tuple) -> str | None:
    """In a process of its own: what it compiles lands in the cache on disk."""
    outputs, inputs, gated, kind, pieces, tile = job
    try:
        weight = mm.room_for(2 if gated else 1, outputs, inputs, kind, torch.bfloat16, "meta")
        x = torch.empty((7, inputs), dtype=torch.bfloat16, device="meta")
        given, options = mm.kernel_arguments(x, weight, None, _out(x, weight, pieces, tile), pieces, tile)
        mm._matmul_kernel.warmup(*given, grid=(1,), **options)
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:200]}"
    return None


def _out(x: torch.Tensor, weight: mm.Packed, pieces: int, tile: Tile) -> torch.Tensor:
    shape = (pieces if tile.spread else 1, len(x), weight.outputs)
    dtype = torch.bfloat16 if weight.gated else torch.float32
    return torch.full(shape, torch.nan, dtype=dtype, device=x.device)


@triton.jit
def _read_kernel(data, out, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * TURNS
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(TURNS, num_stages=1):
        total ^= tl.load(data + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.reduce(total, 0, _xor))


@triton.jit
def _xor(a, b):
    return a ^ b


def read_bandwidth() -> float:
    """Bytes a second, the best of a few ways to read 4 GiB."""
    data = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    best = 0.0
    for block, turns, warps in ((4096, 4, 8), (4096, 8, 8), (8192, 4, 16), (2048, 8, 4), (8192, 8, 8)):
        out = torch.empty(len(data) // (block * turns), dtype=torch.int32, device="cuda")

        def run(b=block, t=turns, w=warps, o=out) -> None:
            _read_kernel[(len(o),)](data, o, b, t, num_warps=w)

        best = max(best, data.nbytes / timed(run, 1, 7))
    return best


def timed(run, launches: int, replays: int = 7) -> float:
    """Seconds a launch: median over replays of a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for i in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i > 1:
            times.append(begin.elapsed_time(end) / 1e3 / launches)
    return statistics.median(times)


def weights_of(outputs: int, inputs: int, gated: bool, kind: str) -> list[mm.Packed]:
    """Copies enough that none is in the cache when its turn comes again."""
    total = outputs * (2 if gated else 1)
    copies = max(2, min(48, int((600 << 20) / (total * inputs * BYTES[kind]))))
    made = []
    for _ in range(copies):
        weight = torch.randn(total, inputs, dtype=torch.bfloat16, device="cuda") * 0.02
        made.append(mm.pack(*weight.chunk(2 if gated else 1), kind=kind))
    return made


def measure_cublas(name: str, shape: tuple, counts: list[int], peak: float, report: list) -> None:
    outputs, inputs, gated, _ = shape
    plain = [weight.unpacked() for weight in weights_of(outputs, inputs, gated, "bfloat16")]
    x = rows_of(max(counts), inputs)
    alone = F.linear(x[:1], plain[0])
    for rows in counts:
        mine = x[:rows].contiguous()
        library = torch.empty(rows, len(plain[0]), dtype=torch.bfloat16, device="cuda")

        def cublas(mine=mine, library=library) -> None:
            for i in range(LAUNCHES):
                torch.mm(mine, plain[i % len(plain)].T, out=library)

        seconds = timed(cublas, LAUNCHES)
        same = torch.equal(F.linear(mine, plain[0])[:1], alone)
        report.append(timing(name, rows, "cublas", 0, seconds, plain[0].nbytes, peak, same))


def measure(
    name: str, shape: tuple, kind: str, counts: list[int], chosen: bool, peak: float, report: list
) -> None:
    outputs, inputs, gated, segment_counts = shape
    weights = weights_of(outputs, inputs, gated, kind)
    x = rows_of(max(counts), inputs)
    for pieces in segment_counts:
        first = None
        for rows in counts:
            for tile in tiles_of(shape, kind, rows, pieces, chosen):
                record = one_tile(x[:rows].contiguous(), weights, pieces, tile)
                if record is None:
                    continue
                result, seconds = record
                first = result[:1].clone() if first is None else first
                same = torch.equal(result[:1], first)
                one = timing(name, rows, kind, pieces, seconds, weights[0].nbytes, peak, same)
                one["tile"] = [tile.rows, tile.outputs, tile.inputs, tile.warps, tile.stages, tile.spread]
                report.append(one)


def rows_of(count: int, inputs: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, inputs, device="cuda").bfloat16()


def timing(
    name: str, rows: int, kind: str, pieces: int, seconds: float, nbytes: int, peak: float, same: bool
) -> dict:
    return dict(
        shape=name, rows=rows, kind=kind, pieces=pieces, us=seconds * 1e6,
        gbs=nbytes / seconds / 1e9, share=nbytes / seconds / peak, same=same,
    )  # fmt: skip


def one_tile(x: torch.Tensor, weights: list, pieces: int, tile: Tile) -> tuple[torch.Tensor, float] | None:
    out = _out(x, weights[0], pieces, tile)

    def ours() -> None:
        for i in range(LAUNCHES):
            mm.launch_multiply(x, weights[i % len(weights)], None, out, pieces, tile)

    try:
        seconds = timed(ours, LAUNCHES)
        out.fill_(torch.nan)
        mm.launch_multiply(x, weights[0], None, out, pieces, tile)
        return mm.add_parts(out), seconds
    except Exception as error:
        print("failed", tuple(x.shape), pieces, tile, type(error).__name__, str(error)[:150], flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="8b", choices=SHAPES)
    parser.add_argument("--kinds", default="bfloat16", help=",".join(BYTES))
    parser.add_argument("--rows", default="1,16,32,64,128,256")
    parser.add_argument("--only", default="")
    parser.add_argument("--chosen", action="store_true", help="only the tiles that the library takes")
    parser.add_argument("--compilers", type=int, default=14)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    counts, kinds = [int(r) for r in given.rows.split(",")], given.kinds.split(",")
    shapes = {n: s for n, s in SHAPES[given.shapes].items() if not given.only or n in given.only.split(",")}
    begin = time.time()
    compile_all(shapes, kinds, counts, given.chosen, given.compilers)
    peak = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read bandwidth {peak / 1e12:.3f} TB/s", flush=True)
    report: list[dict] = []
    for name, shape in shapes.items():
        if "bfloat16" in kinds:
            measure_cublas(name, shape, counts, peak, report)
        for kind in kinds:
            measure(name, shape, kind, counts, given.chosen, peak, report)
        print(f"{name} done at {time.time() - begin:.0f} s", flush=True)
    if given.out:
        given.out.write_text(json.dumps(dict(peak=peak, rows=report)))
    table(report)


def compile_all(shapes: dict, kinds: list[str], counts: list[int], chosen: bool, compilers: int) -> None:
    jobs = {
        (*shape[:3], kind, pieces, tile)
        for shape in shapes.values()
        for kind in kinds
        for rows in counts
        for pieces in shape[3]
        for tile in tiles_of(shape, kind, rows, pieces, chosen)
    }
    begin = time.time()
    with ProcessPoolExecutor(compilers, mp_context=get_context("spawn")) as pool:
        problems = [p for p in pool.map(compile_one, sorted(jobs, key=str), chunksize=4) if p]
    spent = f"{len(jobs)} kernels compiled in {time.time() - begin:.0f} s"
    print(f"{spent}, {len(problems)} failed", *problems[:5], sep="\n")


def table(report: list[dict]) -> None:
    """The best of each kind, and its time as a share of bfloat16's; `odd` counts candidates whose first row has other
    bits than at the first count.
    """
    seen = dict.fromkeys((r["shape"], r["rows"], r["kind"], r["pieces"]) for r in report)
    for key in sorted(seen):
        name, rows, kind, pieces = key
        mine = [r for r in report if (r["shape"], r["rows"], r["kind"], r["pieces"]) == key]
        whole = [r["us"] for r in report if (r["shape"], r["rows"], r["kind"]) == (name, rows, "bfloat16")]
        best, odd = min(mine, key=lambda r: r["us"]), sum(not r["same"] for r in mine)
        print(f"{name:8} {rows:4} {kind:8} {pieces} {best['us']:7.1f} us {best['gbs']:5.0f} GB/s", end=" ")
        ratio = f"{best['us'] / min(whole):.2f}x bfloat16" if whole else ""
        print(f"{best['share']:.3f} {ratio}", best.get("tile", ""), f"odd={odd}")


if __name__ == "__main__":
    main()
