"""The whole decoder on the device: against float32 on the CPU, against transformers, and against itself.

    PYTHONPATH=src python bench/gpu/check.py --model model.gguf [--as-if 8b] [--weights int8]

Prints logit errors, how long greedy texts stay equal, and for how many row counts and trees a row's bits change.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from outrider.bench.as_if import config_json
from outrider.bench.widen import shape_of, widen
from outrider.cache.store import KeyValueStore
from outrider.load.checkpoint import open_checkpoint
from outrider.model.decoder import Decoder
from outrider.model.kernels.gpu.graph import GraphedDecoder
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.quantise import KINDS
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.rope import rope_tables
from outrider.types import MAX_NODES, NO_DRAFT, Batch, Draft

PROMPT = "Here is how to make a simple vegetable soup. First, chop two onions, three carrots and a stick of celery."


class DeviceReader:
    """As the tests' reader, with store and table on the device."""

    def __init__(self, config, texts: int, longest: int, seed: int = 7) -> None:
        width = longest + MAX_NODES
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randperm(texts * width, generator=generator, dtype=torch.int32).view(texts, width)
        self.store = device_store(config, texts * width + 1)
        self.lengths = [0] * texts

    def batch(self, *parts) -> Batch:
        rows = [row for part in parts for row in self._rows(*part)]
        owner, ids, entry, positions, prefix, ancestors = (torch.tensor(c) for c in zip(*rows, strict=True))
        return Batch(
            ids=ids, positions=positions.int(), slots=self.table[owner, entry].contiguous(),
            table_rows=owner.int(), prefix=prefix.int(), ancestors=ancestors, table=self.table,
            logit_rows=torch.arange(len(rows)),
        )  # fmt: skip

    def _rows(self, text: int, tokens: list[int], draft: Draft = NO_DRAFT) -> list[tuple[int, ...]]:
        begin = self.lengths[text]
        end = begin + len(tokens)
        known = [(text, t, begin + i, begin + i, begin + i + 1, 0) for i, t in enumerate(tokens)]
        nodes = zip(draft.tokens, draft.depths, draft.ancestors, strict=True)
        return known + [(text, t, end + i, end - 1 + d, end, mask) for i, (t, d, mask) in enumerate(nodes)]


def device_store(config, slots: int) -> KeyValueStore:
    store = KeyValueStore(config.layers, 1, config.kv_heads, config.head_dim)
    shape = (slots, config.kv_heads, config.head_dim)
    store.keys = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(config.layers)]
    store.values = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(config.layers)]
    return store


def on_device(batch: Batch) -> Batch:
    return Batch(**{name: getattr(batch, name).cuda() for name in Batch.__slots__})


def feed(model, reader: DeviceReader, *parts) -> torch.Tensor:
    logits = model.forward(on_device(reader.batch(*parts)), reader.store)
    for part in parts:
        reader.lengths[part[0]] += len(part[1])
    return logits


def against_float32(model, source, ids: list[int]) -> None:
    """Logits over one prompt: float32 on the CPU, transformers in bfloat16 on the device, ours."""
    config = source.config
    cpu = Decoder(config, source.tensor, ReferenceKernels(config, *rope_tables(config, 2048)))
    store = KeyValueStore(config.layers, len(ids), config.kv_heads, config.head_dim)
    n = torch.arange(len(ids), dtype=torch.int32)
    batch = Batch(torch.tensor(ids), n, n, torch.zeros_like(n), n + 1, torch.zeros(len(ids), dtype=torch.int64),
                  n[None].clone(), torch.arange(len(ids)))  # fmt: skip
    exact = cpu.forward(batch, store)
    ours = feed(model, DeviceReader(model.config, 1, 512), (0, ids)).cpu().float()[:, : exact.shape[1]]
    spread = exact.std()
    print(f"logits, ours bf16 against float32: rms {float((ours - exact).pow(2).mean().sqrt() / spread):.4f} of their "
          f"spread, largest {float((ours - exact).abs().max()):.3f} of {float(exact.abs().max()):.1f}, "
          f"argmax equal {int((ours.argmax(-1) == exact.argmax(-1)).sum())}/{len(ids)}", flush=True)  # fmt: skip
    theirs = transformers_logits(source, ids)
    print(f"transformers bf16 against float32: rms {float((theirs - exact).pow(2).mean().sqrt() / spread):.4f}, "
          f"argmax equal {int((theirs.argmax(-1) == exact.argmax(-1)).sum())}/{len(ids)}", flush=True)  # fmt: skip


def transformers_logits(source, ids: list[int]) -> torch.Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_dict(config_json(source.config)))
    state = {name: source.tensor(name) for name in source.names()}
    model.load_state_dict(state, strict=False)
    model = model.to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        return model(torch.tensor([ids], device="cuda")).logits[0].float().cpu()


def greedy(model, ids: list[int], count: int) -> list[int]:
    reader, out = DeviceReader(model.config, 1, 1024), []
    logits = feed(model, reader, (0, ids))
    for _ in range(count):
        out.append(int(logits[-1].argmax()))
        logits = feed(model, reader, (0, out[-1:]))
    return out


def random_draft(nodes: int, vocab: int, rng: random.Random) -> Draft:
    parents = [rng.randint(max(-1, i - 6), i - 1) for i in range(nodes)]
    return Draft(tuple(rng.randrange(vocab) for _ in range(nodes)), tuple(parents))


def invariance(model, vocab: int, counts: list[int], lengths: list[int]) -> None:
    """Every row of passes of many sizes, with trees, against the row as plain text, one token at a time."""
    rng, odd, rows_seen = random.Random(3), 0, 0
    begin = time.time()
    for count in counts:
        length = rng.choice(lengths)
        ids = [rng.randrange(vocab) for _ in range(length)]
        reader = DeviceReader(model.config, 8, 2300, seed=count)
        feed(model, reader, (0, ids[:-1]))
        rows_left, parts = count, []
        nodes = min(rows_left - 1, rng.choice([0, 5, 63]))
        draft = random_draft(nodes, vocab, rng) if nodes > 0 else Draft()
        parts.append((0, ids[-1:], draft))
        rows_left -= 1 + len(draft)
        for text in range(1, 8):
            if rows_left > 0:
                take = rows_left if text == 7 else min(rows_left, rng.choice([1, 7, 40]))
                parts.append((text, [rng.randrange(vocab) for _ in range(take)]))
                rows_left -= take
        together = model.forward(on_device(reader.batch(*parts)), reader.store)
        for node in [-1, *rng.sample(range(len(draft)), min(4, len(draft)))]:
            alone = DeviceReader(model.config, 1, 2300, seed=99)
            path = [draft.tokens[i] for i in draft.path(node)]
            whole = [*ids, *path]
            cut = len(ids) - 1
            if cut:
                feed(model, alone, (0, whole[:cut]))
            for token in whole[cut:]:  # plain decoding
                logits = feed(model, alone, (0, [token]))[-1]
            rows_seen += 1
            odd += not torch.equal(logits, together[1 + node])
    print(f"rows against themselves as text: {odd} of {rows_seen} differ, over passes of {counts[0]}..{counts[-1]} "
          f"rows, {time.time() - begin:.0f} s", flush=True)  # fmt: skip


def graphs_equal_eager(model, vocab: int) -> None:
    rng, reader = random.Random(5), DeviceReader(model.config, 4, 600)
    feed(model, reader, *((t, [rng.randrange(vocab) for _ in range(100 + t)]) for t in range(4)))
    graphed = GraphedDecoder(model, reader.store, reader.table.cuda())
    odd = 0
    for parts in (
        [(0, [5])], [(0, [5]), (1, [6]), (2, [7])], [(0, [5], random_draft(63, vocab, rng))],
        [(t, [5], random_draft(9, vocab, rng)) for t in range(4)],
    ):  # fmt: skip
        batch = reader.batch(*parts)
        expected = model.forward(on_device(batch), reader.store)
        got = graphed.forward(batch)
        odd += not torch.equal(got[:, : expected.shape[1]], expected)
    print(f"graphs against eager: {odd} of 4 differ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--as-if", default="")
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", *KINDS))
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    source = open_checkpoint(given.model)
    config = source.config
    ids = source.tokenizer.encode(PROMPT)
    begin = time.time()
    weights = {"weights": given.weights}
    small = Decoder(config, source.tensor, GpuKernels(config, *rope_tables(config, 8192), **weights))
    print(f"model packed in {time.time() - begin:.1f} s", flush=True)
    against_float32(small, source, ids)
    text = greedy(small, ids, given.tokens)
    print(repr(source.tokenizer.decode(text)[:200]))
    model = small
    if given.as_if:
        begin = time.time()
        wide, read = widen(config, source.tensor, shape_of(given.as_if), "cuda", torch.bfloat16)
        model = Decoder(wide, read, GpuKernels(wide, *rope_tables(wide, 8192), **weights))
        torch.cuda.synchronize()
        print(f"as if {given.as_if}: built in {time.time() - begin:.1f} s", flush=True)
        against_float32(model, source, ids)
        mine = greedy(model, ids, given.tokens)
        equal = next((i for i, (a, b) in enumerate(zip(mine, text, strict=True)) if a != b), len(text))
        print(f"greedy text, as if against small: equal for {equal} of {len(text)} tokens", flush=True)
    counts = [1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 64, 65, 100, 127, 129, 191, 200, 256]
    invariance(model, config.vocab, counts, [3, 62, 127, 500, 1100, 2000])
    graphs_equal_eager(model, config.vocab)


if __name__ == "__main__":
    main()
