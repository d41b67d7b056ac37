"""Matmul tiles on the device: time, share of the read bandwidth, and whether a row's bits depend on the row count.

    PYTHONPATH=src python bench/gpu/matmul.py --shapes 8b --rows 1,16,32,64,128,256 --out sweep.json

Compiles every candidate in parallel first, then times each in a CUDA graph over weights that do not fit the cache.
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
LARGE = [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)]


def candidates(rows: int, gated: bool, pieces: int, inputs: int) -> list[Tile]:
    if rows <= 16:
        shapes = [(16, *s) for s in SMALL]
    elif rows <= 64:
        shapes = [(32 if rows <= 32 else 64, *s) for s in MIDDLE]
    else:
        shapes = [(128, *s) for s in LARGE] + ([(256, 128, 64, 8, 3)] if rows > 128 else [])
    tiles = []
    for r, n, k, warps, stages in shapes:
        kept = (n * (2 if gated else 1) + r) * k * 2 * stages
        if k > (128 if inputs % 128 == 0 else 64) or kept > 225_000:
            continue
        if gated and n == 128 and r >= 128 and warps == 4:
            continue
        spreads = (True,) if pieces > 1 and rows <= 16 else (True, False) if pieces > 1 else (False,)
        tiles += [Tile(r, n, k, warps, stages, spread) for spread in spreads]
    return tiles


def compile_one(job: tuple) -> str | None:
    """In a process of its own: what it compiles lands in the cache on disk."""
    outputs, inputs, gated, pieces, tile = job
    try:
        depth = 128 if inputs % 128 == 0 else 64
        mm._matmul_kernel.warmup(
            torch.bfloat16, torch.bfloat16, None, torch.bfloat16 if gated else torch.float32,
            7, outputs, inputs, inputs, outputs * inputs,
            SEGMENT=mm.segment_length(inputs, pieces), SEGMENTS=pieces, SPREAD=tile.spread, ROWS=tile.rows,
            OUTPUTS=tile.outputs, INPUTS=tile.inputs, HIGH=mm.HIGH, DEPTH=depth, GATED=gated, BIASED=False,
            EVEN=True, CHAIN=True, launch_pdl=True, num_warps=tile.warps,
            num_stages=tile.stages, grid=(1,),
        )  # fmt: skip
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:200]}"
    return None


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


def weights_of(outputs: int, inputs: int, gated: bool) -> list[torch.Tensor]:
    total = outputs * (2 if gated else 1)
    copies = max(2, min(12, (600 << 20) // (total * inputs * 2)))
    return [torch.randn(total, inputs, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(copies)]


def measure(name: str, shape: tuple, counts: list[int], peak: float, report: list) -> None:
    outputs, inputs, gated, segment_counts = shape
    plain = weights_of(outputs, inputs, gated)
    nbytes = plain[0].nbytes
    torch.manual_seed(1)
    x = torch.randn(max(counts), inputs, device="cuda").bfloat16()
    alone = F.linear(x[:1], plain[0])
    for rows in counts:
        mine = x[:rows].contiguous()
        library = torch.empty(rows, len(plain[0]), dtype=torch.bfloat16, device="cuda")

        def cublas(mine=mine, library=library) -> None:
            for i in range(LAUNCHES):
                torch.mm(mine, plain[i % len(plain)].T, out=library)

        seconds = timed(cublas, LAUNCHES)
        same = torch.equal(F.linear(mine, plain[0])[:1], alone)
        report.append(
            dict(
                shape=name,
                rows=rows,
                kind="cublas",
                us=seconds * 1e6,
                share=nbytes / seconds / peak,
                same=same,
            )
        )
    weights = [mm.pack(weight, gated) for weight in plain]
    for pieces in segment_counts:
        first = None
        for rows in counts:
            for tile in candidates(rows, gated, pieces, inputs):
                record = one_tile(x[:rows].contiguous(), weights, pieces, tile)
                if record is None:
                    continue
                result, seconds = record
                first = result[:1].clone() if first is None else first
                report.append(
                    dict(shape=name, rows=rows, kind="own", pieces=pieces, us=seconds * 1e6,
                         tile=[tile.rows, tile.outputs, tile.inputs, tile.warps, tile.stages, tile.spread],
                         share=nbytes / seconds / peak, same=torch.equal(result[:1], first),
                         like_cublas=None if gated else torch.equal(result[:1].bfloat16(), alone))
                )  # fmt: skip


def one_tile(x: torch.Tensor, weights: list, pieces: int, tile: Tile) -> tuple[torch.Tensor, float] | None:
    shape = (pieces if tile.spread else 1, len(x), weights[0].outputs)
    kind = torch.bfloat16 if weights[0].gated else torch.float32
    out = torch.full(shape, torch.nan, dtype=kind, device="cuda")

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
    parser.add_argument("--shapes", default="8b")
    parser.add_argument("--rows", default="1,16,32,64,128,256")
    parser.add_argument("--only", default="")
    parser.add_argument("--compilers", type=int, default=14)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    counts = [int(r) for r in given.rows.split(",")]
    shapes = {n: s for n, s in SHAPES[given.shapes].items() if not given.only or n in given.only.split(",")}
    jobs = {
        (o, k, g, p, tile)
        for o, k, g, pieces in shapes.values()
        for rows in counts
        for p in pieces
        for tile in candidates(rows, g, p, k)
    }
    begin = time.time()
    with ProcessPoolExecutor(given.compilers, mp_context=get_context("spawn")) as pool:
        problems = [p for p in pool.map(compile_one, sorted(jobs, key=str), chunksize=4) if p]
    print(
        f"{len(jobs)} kernels compiled in {time.time() - begin:.0f} s, {len(problems)} failed",
        *problems[:5],
        sep="\n",
    )
    peak = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read bandwidth {peak / 1e12:.3f} TB/s", flush=True)
    report: list[dict] = []
    for name, shape in shapes.items():
        measure(name, shape, counts, peak, report)
        print(f"{name} done at {time.time() - begin:.0f} s", flush=True)
    if given.out:
        given.out.write_text(json.dumps(dict(peak=peak, rows=report)))
    table(report)


def table(report: list[dict]) -> None:
    """The best of each kind; `odd` counts candidates whose first row has other bits than at the first count."""
    seen = dict.fromkeys((r["shape"], r["rows"], r["kind"], r.get("pieces", 0)) for r in report)
    for key in sorted(seen):
        mine = [r for r in report if (r["shape"], r["rows"], r["kind"], r.get("pieces", 0)) == key]
        best, odd = min(mine, key=lambda r: r["us"]), sum(not r["same"] for r in mine)
        name, rows, kind, pieces = key
        print(f"{name:8} {rows:4} {kind:6} {pieces} {best['us']:7.1f} us {best['share']:.3f}", end=" ")
        print(best.get("tile", ""), f"odd={odd} like={best.get('like_cublas')}")


if __name__ == "__main__":
    main()
