"""Times captured passes of a model with random weights: decoding rows, draft trees and prompts, beside the bytes read.

    PYTHONPATH=src python bench/gpu/passes.py --shape 8b --weights fp8
    PYTHONPATH=src python bench/gpu/passes.py --shape gpt-oss-20b --decode 1,4,16,64 --prompts 2048 --kernels
    PYTHONPATH=src python bench/gpu/passes.py --shape qwen3-30b-a3b --device cpu --tiny      (a smoke test)

`--same` gives all rows the same token, so that rows of a mixture choose alike. `--kernels` says by which time after its
predecessor each kernel ends. The output of the model is meaningless.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.load.checkpoint import expected_shapes
from outrider.load.config import ModelConfig
from outrider.load.families import config_from_json
from outrider.load.quants import FORMATS, Blocks
from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.recording import record
from outrider.model.rope import rope_tables
from outrider.types import Batch


def published(
    name: str, vocab: int, layers: int, hidden: int, wide: int, heads: str, **more: Any
) -> dict[str, Any]:
    """A config.json. `heads`: query heads, key heads and their size."""
    count, keys, size = map(int, heads.split())
    return dict(
        model_type=name, vocab_size=vocab, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=wide,
        num_attention_heads=count, num_key_value_heads=keys, head_dim=size, max_position_embeddings=135_168,
        rms_norm_eps=1e-6, tie_word_embeddings=False,
    ) | more  # fmt: skip


THETA = {"rope_theta": 1e6}
QWEN_MOE = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
SHAPES = {
    "8b": published("llama", 128_256, 32, 4096, 14_336, "32 8 128", **THETA),
    "qwen3-8b": published("qwen3", 151_936, 36, 4096, 12_288, "32 8 128", **THETA),
    "olmo3-7b": published("olmo3", 100_278, 32, 4096, 11_008, "32 32 128"),
    "glm4-9b": published("glm4", 151_552, 40, 4096, 13_696, "32 2 128", **THETA),
    "gemma3-12b": published("gemma3_text", 262_208, 48, 3840, 15_360, "16 8 256", sliding_window=1024),
    "qwen3-30b-a3b": published("qwen3_moe", 151_936, 48, 2048, 6144, "32 4 128", **THETA, **QWEN_MOE),
    "gpt-oss-20b": published("gpt_oss", 201_088, 24, 2880, 2880, "64 8 64", num_local_experts=32),
    "gpt-oss-120b": published("gpt_oss", 201_088, 36, 2880, 2880, "64 8 64", num_local_experts=128),
}
TINY = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64,
)  # fmt: skip
SLOTS = 70_000
LOGITS = 512  # rows of a pass that want logits; a prompt wants those of its last row


def random_weights(config: ModelConfig, device: str, dtype: torch.dtype) -> Callable[[str], Tensor | Blocks]:
    """A reader of random tensors. Experts of a layer are alike: what they cost does not depend on it."""
    shapes, experts = dict(expected_shapes(config)), dict[tuple[int, ...], Tensor | Blocks]()

    def random(name: str) -> Tensor | Blocks:
        shape = shapes[name]
        if ".experts." not in name or config.family != "gpt_oss":
            return torch.randn(shape, device=device, dtype=dtype) * 0.02
        raw = torch.randint(256, (shape[0], -(-shape[1] // 32), 17), device=device, dtype=torch.uint8)
        raw[..., 0] = 120  # the scale
        return Blocks(name, FORMATS[39], raw.flatten(1), shape[1])  # in MXFP4, as it is published

    def read(name: str) -> Tensor | Blocks:
        shape = shapes[name]
        if len(shape) < 2:
            return torch.ones(shape, device=device)
        if ".experts." not in name:
            return random(name)
        if shape not in experts:
            experts[shape] = random(name)
        return experts[shape]

    return read


def make_batch(given: argparse.Namespace, sequences: int, each: int, context: int, tree: bool) -> Batch:
    """`each` rows of every sequence after `context` tokens; a tree is a root with its children."""
    rows, width, device = sequences * each, max(context + each, 256), given.device
    table = (
        torch.arange(sequences * width, dtype=torch.int32, device=device).view(sequences, width) % given.slots
    )
    owner = torch.arange(sequences, device=device, dtype=torch.int32).repeat_interleave(each)
    at = torch.arange(each, device=device, dtype=torch.int32).repeat(sequences)
    positions, prefix, ancestors = context + at, context + at + 1, torch.zeros_like(at, dtype=torch.int64)
    if tree:
        positions, prefix = context + at.clamp(max=1), torch.full_like(at, context + 1)
        ancestors = torch.where(at == 0, 0, torch.ones_like(ancestors) << (at.long() - 1).clamp(min=0))
    ids = torch.randint(given.vocab, (1 if given.same else rows,), device=device).expand(rows).contiguous()
    return Batch(
        ids=ids, positions=positions.int(), slots=table[owner.long(), (context + at).long()].contiguous(),
        table_rows=owner, prefix=prefix.int(), ancestors=ancestors, table=table,
        logit_rows=torch.arange(rows if rows <= LOGITS else 1, device=device),
    )  # fmt: skip


def wanted(given: argparse.Namespace) -> Iterator[tuple[str, tuple[int, int, int, bool]]]:
    """Names of passes, with sequences, rows of each, context, and whether they branch."""
    for rows in given.decode:
        yield f"decode {rows} at {given.context}", (rows, 1, given.context, False)
    for nodes in given.trees:
        yield f"tree of {nodes} at {given.context}", (1, nodes + 1, given.context, True)
    for length in given.prompts:
        rows = min(length, 2048)
        yield f"prompt {rows} after {length - rows}", (1, rows, length - rows, False)


def milliseconds(graph: Any, turns: int) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairwise(marks))[turns // 2]


def show_kernels(graph: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    ends = sorted((one.time_range.end, one.name) for one in found.events() if "Memset" not in one.name)
    took: dict[str, list[float]] = defaultdict(list)
    for (before, _), (end, name) in pairwise(ends):
        took[name[:50]].append(end - before)
    for name, each in sorted(took.items(), key=lambda one: -sum(one[1]))[:12]:
        print(f"    {sum(each):9.0f} us  {len(each):4} x {sum(each) / len(each):7.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(one) for one in text.split(",") if one]  # noqa: E731 - a name for a parser
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--weights", default="bfloat16")
    parser.add_argument("--decode", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--trees", type=numbers, default=[8, 16, 63])
    parser.add_argument("--prompts", type=numbers, default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    config = config_from_json(SHAPES[given.shape] | (TINY if given.tiny else {}))
    given.vocab, cuda, dtype = config.vocab, given.device == "cuda", torch.bfloat16
    given.slots = max([SLOTS, *given.prompts]) + 256 if cuda else 256
    tables = rope_tables(config, config.context)
    kernels = GpuKernels(config, tables, device=given.device, weights=given.weights)
    model = DeviceDecoder(Decoder(config, random_weights(config, given.device, dtype), kernels))
    model.use_library()
    print(
        f"{given.shape}, {given.weights}: {model.weight_bytes() / 2**30:.2f} GiB; {model.library.describe()}"
    )
    run = DevicePass(model, KeyValueStore(config.kv_shapes, given.slots, given.device, dtype))
    report = {}
    for name, (sequences, each, context, tree) in wanted(given):
        batch = make_batch(given, sequences, each, context, tree)
        if not cuda:
            assert run(batch, each, context + each, tree).isfinite().all()
            continue
        graph, _ = record(lambda: run(batch, each, context + each, tree))  # noqa: B023 - called at once
        kernels.touched = 0
        graph.replay()
        read, took = model.experts_read, milliseconds(graph, given.turns)
        report[name] = {"ms": took, "experts": read, "rows": sequences * each}
        print(f"{name:24} {took:8.3f} ms" + (f"  {read:5.1f} experts a layer" if read else ""), flush=True)
        if given.kernels:
            show_kernels(graph)
    if given.json:
        given.json.write_text(json.dumps({"bytes": model.weight_bytes(), "passes": report}, indent=1))


if __name__ == "__main__":
    main()
