"""A small random model and the parts around it, for tests that need an engine but no downloads."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from outrider.engine.engine import Engine
from outrider.load.config import ModelConfig, Rope
from outrider.model.decoder import Decoder, make_kernels
from outrider.settings import Settings, cache_folder
from outrider.types import Event, Request, SamplingParams

VOCAB = 96


def tiny_config(**changes) -> ModelConfig:
    shape = dict(
        family="llama", vocab=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48,
        context=256, norm_eps=1e-5, rope=Rope(), tied=True, qkv_bias=False, out_bias=False, mlp_bias=False,
        qk_norm=False, windows=(0, 0),
    )  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def random_tensors(config: ModelConfig, seed: int = 0):
    """Weights large enough that the model has opinions: a flat one would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    kv, q = config.kv_heads * config.head_dim, config.heads * config.head_dim
    shapes = {
        "q_proj.weight": (q, config.hidden), "k_proj.weight": (kv, config.hidden),
        "v_proj.weight": (kv, config.hidden), "o_proj.weight": (config.hidden, q),
        "gate_proj.weight": (config.intermediate, config.hidden),
        "up_proj.weight": (config.intermediate, config.hidden),
        "down_proj.weight": (config.hidden, config.intermediate),
        "embed_tokens.weight": (config.vocab, config.hidden), "lm_head.weight": (config.vocab, config.hidden),
    }  # fmt: skip

    def read(name: str) -> torch.Tensor:
        if name not in made:
            shape = next((s for end, s in shapes.items() if name.endswith(end)), None)
            if shape is None:
                made[name] = 1 + 0.1 * torch.randn(config.hidden, generator=generator)
            else:
                made[name] = torch.randn(shape, generator=generator) * (1.5 / math.sqrt(shape[1]))
        return made[name]

    return read


def tiny_model(kernels: str = "auto", seed: int = 0, **changes) -> Decoder:
    config = tiny_config(**changes)
    folder: Path = cache_folder() / "kernels"
    return Decoder(config, random_tensors(config, seed), make_kernels(config, config.context + 64, 2, folder, kernels))


class Letters:
    """Token text without a tokenizer: token 65 is 'A', and so on; never an unfinished character."""

    def feed(self, token: int) -> str:
        return chr(32 + token)

    def finish(self) -> str:
        return ""


def tiny_engine(model: Decoder, planner=None, drafter=None, **settings) -> Engine:
    options = dict(max_sequences=32, step_rows=64, cache_bytes=1 << 22, check_integrity=True)
    engine = Engine(model, Settings(**{**options, **settings}), Letters)
    if planner is not None:
        engine.use_drafters({"test": drafter} if drafter else {}, planner)
    return engine


def request(name: str, prompt, stop_ids=frozenset(), owner: str = "", bad_word_ids=(), **params) -> Request:
    options = dict(temperature=0, max_tokens=24, seed=hash_seed(name))
    made = SamplingParams(**{**options, **params})
    assert made.seed is not None
    return Request(name, tuple(prompt), made, made.seed, owner, tuple(bad_word_ids), frozenset(stop_ids))


def hash_seed(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**40


def finish(engine: Engine) -> dict[tuple[str, int], list[Event]]:
    """Step until nothing is left; the events of each choice."""
    events: dict[tuple[str, int], list[Event]] = {}
    for _ in range(20_000):
        if engine.idle:
            return events
        for event in engine.step():
            events.setdefault((event.request_id, event.choice), []).append(event)
    raise AssertionError("the engine does not come to an end")


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def run_alone(model: Decoder, one: Request, **settings) -> list[int]:
    engine = tiny_engine(model, **settings)
    engine.add(one)
    return tokens_of(finish(engine)[one.id, 0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
