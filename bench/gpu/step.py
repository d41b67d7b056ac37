"""One step of a big shape in a CUDA graph: plain at several contexts, verification of n nodes, and where time goes.

    PYTHONPATH=src python bench/gpu/step.py --shape 8b --contexts 512,8192 --rows 1,8,64 --json step.json

Weights are random: a step's time does not depend on what they say.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import check  # beside this file
import torch
from torch import Tensor

from outrider.bench.widen import shape_of
from outrider.cache.store import KeyValueStore
from outrider.engine.certificate import certificate
from outrider.load.config import ModelConfig, Rope
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu import attention, draw, filter, kernels, matmul
from outrider.model.kernels.gpu import rows as rows_module
from outrider.model.kernels.gpu.draw import draw_rows
from outrider.model.kernels.gpu.graph import Captured, GraphedDecoder
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.quantise import KINDS
from outrider.model.rope import rope_tables
from outrider.types import MAX_NODES, Batch, Draft


def random_model(name: str, context: int, weights: str = "bfloat16") -> Decoder:
    w = shape_of(name)
    config = ModelConfig(
        family="llama", vocab=w.vocab, hidden=w.hidden, layers=w.layers, heads=w.heads, kv_heads=w.kv_heads,
        head_dim=64, intermediate=w.intermediate, context=context, norm_eps=1e-5, rope=Rope(), tied=w.tied,
        qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False, windows=(0,) * w.layers,
    )  # fmt: skip
    q, kv = w.heads * 64, w.kv_heads * 64
    shapes = {
        "q_proj.weight": (q, w.hidden), "k_proj.weight": (kv, w.hidden), "v_proj.weight": (kv, w.hidden),
        "o_proj.weight": (w.hidden, q), "gate_proj.weight": (w.intermediate, w.hidden),
        "up_proj.weight": (w.intermediate, w.hidden), "down_proj.weight": (w.hidden, w.intermediate),
        "embed_tokens.weight": (w.vocab, w.hidden), "lm_head.weight": (w.vocab, w.hidden),
    }  # fmt: skip

    def read(name: str) -> Tensor:
        shape = next((s for end, s in shapes.items() if name.endswith(end)), (w.hidden,))
        if len(shape) == 1:
            return torch.ones(shape, device="cuda")
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    tables = rope_tables(config, context + MAX_NODES)
    return Decoder(config, read, GpuKernels(config, *tables, weights=weights))


def plain_batch(table: Tensor, sequences: int, context: int) -> Batch:
    n = torch.arange(sequences, dtype=torch.int32)
    return Batch(
        ids=torch.randint(1000, (sequences,)), positions=torch.full_like(n, context - 1),
        slots=table[:sequences, context - 1].contiguous(), table_rows=n, prefix=torch.full_like(n, context),
        ancestors=torch.zeros(sequences, dtype=torch.int64), table=table, logit_rows=n.long(),
    )  # fmt: skip


def tree_batch(table: Tensor, rows: int, context: int, sequences: int = 1) -> Batch:
    """A root and rows - 1 nodes for each sequence; a tree of branching two, as deep as it gets."""
    nodes = rows - 1
    draft = Draft(tuple(range(nodes)), tuple((i - 2) // 2 if i > 1 else -1 for i in range(nodes)))
    depth = torch.tensor([0, *draft.depths], dtype=torch.int32)
    masks = torch.tensor([0, *draft.ancestors])
    one = torch.full((rows,), context, dtype=torch.int32)
    many = sequences
    return Batch(
        ids=torch.randint(1000, (rows * many,)), positions=(one - 1 + depth).repeat(many),
        slots=table[:many, context - 1 : context - 1 + rows].reshape(-1).contiguous(),
        table_rows=torch.arange(many, dtype=torch.int32).repeat_interleave(rows), prefix=one.repeat(many),
        ancestors=masks.repeat(many), table=table, logit_rows=torch.arange(rows * many),
    )  # fmt: skip


def slot_table(sequences: int, longest: int, scattered: bool) -> Tensor:
    """Slots one after the other, as prompts get them, or all over the place."""
    total = sequences * longest
    slots = torch.randperm(total) if scattered else torch.arange(total)
    return slots.int().view(sequences, longest)


def replayed(graph: torch.cuda.CUDAGraph, count: int = 30) -> float:
    """Milliseconds a replay, median."""
    times = []
    for i in range(count + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured_for(graphed: GraphedDecoder, batch: Batch) -> Captured:
    """A graph of its own for a batch, filled with it."""
    graphed.captured = {}
    graphed.forward(batch)
    torch.cuda.synchronize()
    (captured,) = graphed.captured.values()
    return captured


def left_out(graphed: GraphedDecoder, batch: Batch, name: str) -> float:
    """The step's time without one kind of kernel. Its results are nonsense."""
    kept = getattr(kernels, name)
    setattr(kernels, name, lambda *args, **options: args[0][:, :0] if name == "gated_linear" else None)
    try:
        return replayed(captured_for(graphed, batch).graph)
    finally:
        setattr(kernels, name, kept)


def breakdown(graph: torch.cuda.CUDAGraph, layers: int) -> None:
    """What each kernel of a layer adds to the step: from the end of the kernel before it to its own end."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in prof.events() if "kernel" in e.name and e.device_type.name == "CUDA"]
    spans = sorted((e.time_range.end, e.time_range.start, e.name) for e in events)
    first = next(i for i, (_, _, name) in enumerate(spans) if name == "_matmul_kernel")
    ends = spans[first:]
    each = round((len(ends) - 2) / layers)
    for place in range(each):
        at = range(place + each * 2, each * (layers - 1), each)
        added = statistics.mean(ends[i][0] - ends[i - 1][0] for i in at)
        alive = statistics.mean(ends[i][0] - ends[i][1] for i in at)
        print(f"    {ends[at[0]][2]:20} adds {added:6.2f} us, alive {alive:6.2f}")
    print(
        f"    after the layers: {', '.join(f'{n} {e - ends[-3][0]:.1f}' for e, _, n in ends[-2:])} us",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", *KINDS))
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--batches", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--stages", type=int, default=0)
    parser.add_argument("--unchained", action="store_true")
    parser.add_argument(
        "--without", default="", help="kernels to leave out one at a time, to see what each costs"
    )
    parser.add_argument("--scattered", action="store_true", help="texts whose slots lie all over the place")
    parser.add_argument("--invariance", action="store_true", help="also compare rows bit by bit")
    parser.add_argument("--law", action="store_true")
    parser.add_argument("--json", type=Path, help="a file for the results")
    given = parser.parse_args()
    if given.stages:
        attention.STAGES = dict.fromkeys(attention.TILES, given.stages)
    if given.unchained:
        unchain()
    torch.set_grad_enabled(False)
    contexts = [int(c) for c in given.contexts.split(",")]
    longest = max(contexts) + MAX_NODES + 1
    begin = time.time()
    model = random_model(given.shape, longest, given.weights)
    torch.cuda.synchronize()
    config = model.config
    linear = sum(
        w.weight.nbytes for layer in model.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    linear += model.head.weight.nbytes
    print(
        f"{given.shape}: {linear / 1e9:.2f} GB of weights a pass, made in {time.time() - begin:.0f} s",
        flush=True,
    )
    sequences = max([1, *(int(b) for b in given.batches.split(",") if b)])
    slots = longest * sequences + 1
    store = KeyValueStore(config.layers, 1, config.kv_heads, config.head_dim)
    shape = (slots, config.kv_heads, config.head_dim)
    store.keys = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(config.layers)]
    store.values = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(config.layers)]
    table = slot_table(sequences, longest, given.scattered)
    graphed = GraphedDecoder(model, store, table.cuda())
    seen: list[Captured] = []  # their buffers must outlive the graphs
    steps: list[dict[str, Any]] = []
    for context in contexts:
        plain = 0.0
        for rows in (int(r) for r in given.rows.split(",")):
            batch = plain_batch(table, 1, context) if rows == 1 else tree_batch(table, rows, context)
            captured = captured_for(graphed, batch)
            seen.append(captured)
            ms = replayed(captured.graph)
            plain = plain or ms
            gbs = linear / ms / 1e9
            steps.append({"context": context, "sequences": 1, "rows": rows, "ms": ms, "of_plain": ms / plain})
            print(
                f"context {context:5} rows {rows:3}: {ms:.3f} ms, {ms / plain:.3f}x plain, {gbs:.2f} TB/s of weights",
                flush=True,
            )
            if given.profile and rows in (1, 64):
                breakdown(captured.graph, config.layers)
            for name in (one for one in given.without.split(",") if one):
                print(f"    without {name:16} {ms - left_out(graphed, batch, name):+.3f} ms", flush=True)
        for many in (int(b) for b in given.batches.split(",") if b):
            seen.append(captured_for(graphed, plain_batch(table, many, context)))
            ms = replayed(seen[-1].graph)
            steps.append({"context": context, "sequences": many, "rows": many, "ms": ms, "of_plain": None})
            print(f"context {context:5} batch {many:3}: {ms:.3f} ms", flush=True)
    if given.json:
        report = {
            "kind": "step",
            "certificate": certificate("python bench/gpu/step.py"),
            "shape": given.shape,
            "weights": given.weights,
        }
        given.json.write_text(json.dumps({**report, "weight_gb": linear / 1e9, "steps": steps}, indent=1))
    if given.law:
        law(config.vocab)
    if given.invariance:
        del graphed, store
        counts = [1, 2, 3, 8, 16, 17, 33, 64, 65, 100, 129, 200, 256, 320, 600]
        check.invariance(model, config.vocab, counts, [3, 62, 127, 500, 1100, 2000])
        check.graphs_equal_eager(model, config.vocab)


def unchain() -> None:
    """Every kernel after the end of the one before it."""
    for module in (attention, draw, matmul, rows_module, filter):
        module.chained = lambda: {"CHAIN": False}


def law(vocab: int) -> None:
    """What the argmax with noise costs, and the filters, each with a copy of the logits to work on."""
    for rows in (1, 5, 16, 80, 512):
        logits = torch.randn(rows, vocab, device="cuda") * 2.5
        logits[:, 7] = 16.0  # a likeliest token that stands out, as it does in text
        work = torch.empty_like(logits)
        seeds = torch.arange(rows, device="cuda")
        sampled = torch.ones(rows, dtype=torch.bool, device="cuda")
        methods = {
            "law, sampled": lambda a=logits, b=sampled, s=seeds: draw_rows(a, b, s, s),
            "law, greedy": lambda a=logits, b=~sampled, s=seeds: draw_rows(a, b, s, s),
            "the copy alone": lambda a=logits, w=work: w.copy_(a),
        }
        for name, heat, *filters in (
            ("nobody filters", 1.0, 0, 1.0, -math.inf),
            ("top-p 0.9", 1.0, 0, 0.9, -math.inf),
            ("top-p 0.9, flat", 2.5, 0, 0.9, -math.inf),
            ("top-k 50", 1.0, 50, 1.0, -math.inf),
            ("top-k 50, top-p 0.9", 1.0, 50, 0.9, -math.inf),
            ("min-p 0.05", 1.0, 0, 1.0, math.log(0.05)),
        ):
            columns = [torch.tensor([value] * rows, device="cuda") for value in filters]
            methods[name] = lambda a=logits / heat, w=work, c=columns: filter.filter_rows(w.copy_(a), *c)
        for name, method in methods.items():
            method()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                method()
            print(f"{name:32} rows {rows:3}: {replayed(graph) * 1e3:7.1f} us", flush=True)


if __name__ == "__main__":
    main()
