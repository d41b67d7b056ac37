"""Attention of a layer on a CPU by the KV cache's format, in ms: `python -m bench.kv_cache smollm2-135m`."""

import statistics
import sys
import time

import torch

from outrider import LLM
from outrider.cache.formats import FORMATS, stored
from outrider.model.decoder import make_kernels
from outrider.settings import cache_folder
from outrider.types import Batch

LAYERS, RUNS = 12, 15  # layers: more than the processor's caches hold


def batch_of(context: int, rows: int) -> Batch:
    """The last `rows` tokens of a text in slots that lie anywhere."""
    table = torch.randperm(context, dtype=torch.int32)
    at = torch.arange(context - rows, context, dtype=torch.int32)
    ids = torch.zeros(rows, dtype=torch.int64)
    return Batch(ids, at, table[at.long()], torch.zeros_like(at), at + 1, ids, table[None], ids[:0])


with LLM(sys.argv[1], draft="none") as llm:
    spec, config, threads = llm.model.config.specs[0], llm.model.config, llm.settings.threads
for context in (500, 4_000, 16_000):
    kernels = make_kernels(config, context, threads, cache_folder() / "kernels", "c")
    numbers = torch.randn(context + 1, spec.kv_heads, spec.head_dim)
    caches = {name: [stored(numbers, kind) for _ in range(2 * LAYERS)] for name, kind in FORMATS.items()}
    for rows in (1, 4, 128):
        batch, q, times = batch_of(context, rows), torch.randn(rows, spec.heads, spec.head_dim), []
        for name, cache in list(caches.items()) * RUNS:
            begin = time.perf_counter()
            for keys, values in zip(cache[::2], cache[1::2], strict=True):
                kernels.attention(q, batch, keys, values, 0, spec.scale)
            times.append((name, 1e3 * (time.perf_counter() - begin) / LAYERS))
        found = {name: round(statistics.median(t for one, t in times if one == name), 3) for name in caches}
        print(f"context {context}, rows {rows}: {found}", flush=True)
