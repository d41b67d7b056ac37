"""Captured steps against eager ones on a CUDA device, token by token, for several shapes with random weights.

PYTHONPATH=src:. python bench/gpu/lag_check.py
"""

from __future__ import annotations

import time

import torch

from outrider.control.planner import Planner
from outrider.draft.drafters import Drafters
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import make_graph_runner
from outrider.engine.kv_cache import make_kv_cache
from outrider.engine.runner import EagerRunner
from outrider.load.config import ModelConfig, Rope
from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import MAX_NODES, Request, SamplingParams

SHAPES = {
    "tiny": (256, 3, 8, 4, 512, 96),
    "135m": (576, 8, 9, 3, 1536, 49152),
    "8b": (4096, 3, 64, 16, 14336, 32000),
}


class Numbers:
    def feed(self, *tokens: int) -> str:
        return "".join(f" {token}" for token in tokens)

    def finish(self) -> str:
        return ""


def make_model(name: str, noise: float) -> DeviceDecoder:
    hidden, layers, heads, kv_heads, intermediate, vocab = SHAPES[name]
    config = ModelConfig(
        family="llama", vocab=vocab, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=64,
        intermediate=intermediate, context=1024, norm_eps=1e-5, rope=Rope(), tied=True, qkv_bias=False,
        out_bias=False, mlp_bias=False, qk_norm=False, windows=(0,) * layers,
    )  # fmt: skip
    q, kv = heads * 64, kv_heads * 64
    shapes = {
        "q_proj.weight": (q, hidden), "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden),
        "o_proj.weight": (hidden, q), "gate_proj.weight": (intermediate, hidden),
        "up_proj.weight": (intermediate, hidden), "down_proj.weight": (hidden, intermediate),
        "embed_tokens.weight": (vocab, hidden),
    }  # fmt: skip

    def read(part: str) -> torch.Tensor:
        shape = next((s for end, s in shapes.items() if part.endswith(end)), None)
        if shape is None:
            return torch.ones(hidden, device="cuda")
        generator = torch.Generator("cuda").manual_seed(hash(part) % 2**31)
        made = torch.randn(shape, device="cuda", generator=generator) * (1.5 / shape[1] ** 0.5)
        return made + noise * made.std() * torch.randn(shape, device="cuda", generator=generator)

    kernels = GpuKernels(config, *rope_tables(config, config.context + MAX_NODES + 1))
    return DeviceDecoder(Decoder(config, read, kernels))


def answers(
    models: tuple[DeviceDecoder, DeviceDecoder], way: str, requests: list[Request]
) -> list[list[int]]:
    target, small = models
    settings = Settings(max_sequences=32, step_rows=512, cache_bytes=1 << 30)
    cache, vocab = make_kv_cache(target, settings), target.config.vocab
    drafters = Drafters(
        {"lookup": LookupDrafter(), "lm": LmDrafter(small, cache.table, vocab, cache.context)}, vocab
    )
    runner = EagerRunner(target, cache, drafters)
    if way != "eager":
        runner = make_graph_runner(target, cache, drafters, "lm")
        runner.lag = int(way[-1])
    engine = Engine(target, cache, drafters, Planner("lm"), runner, settings, Numbers)
    sequences = [engine.add(one)[0] for one in requests]
    while not engine.idle:
        engine.step()
    engine.table.check()
    return [s.output for s in sequences]


def main() -> None:
    torch.set_grad_enabled(False)
    for name in SHAPES:
        begin = time.time()
        models = make_model(name, 0.0), make_model(name, 0.05)
        vocab = models[0].config.vocab
        for speculation in (
            False,
            {"drafter": "lookup", "depth": 3, "nodes": 3},
            {"drafter": "lm", "depth": 4, "nodes": 4},
        ):
            requests = []
            for i in range(7):
                prompt = tuple((7 * j + 13 * i) % min(vocab, 90) for j in range(10 + 9 * i)) * (1 + i % 3)
                params = SamplingParams(
                    temperature=(0, 0.7, 1.0)[i % 3],
                    max_tokens=50,
                    seed=i,
                    speculation=speculation,
                    ignore_eos=True,
                )
                requests.append(Request(f"{i}", prompt, params, i))
            outputs = {way: answers(models, way, requests) for way in ("eager", "lag 0", "lag 1")}
            firsts = {}
            for way, got in outputs.items():
                pairs = zip(outputs["eager"], got, strict=True)
                wrong = [
                    next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), -1)
                    for a, b in pairs
                ]
                firsts[way] = [k for k in wrong if k >= 0]
            shown = {way: k for way, k in firsts.items() if k}
            print(
                f"{name:5} {speculation}: first differences {shown or 'none'} ({time.time() - begin:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
