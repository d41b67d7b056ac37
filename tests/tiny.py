"""A small random model and the parts around it, for tests that need an engine but no downloads."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from outrider.control.planner import Planner
from outrider.control.reasons import OFF, PREFILL
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.lm import LmDrafter
from outrider.engine.eager_runner import EagerRunner
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.kv_cache import KvCache, make_kv_cache
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.heads import HeadConfig, head_shapes
from outrider.load.weight_map import expected_shapes
from outrider.model.decoder import Decoder, make_kernels
from outrider.model.weights import kept_as
from outrider.settings import Settings, cache_folder
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Event, Reason, Request, SamplingParams, Sequence

VOCAB = 96


def tiny_config(**changes) -> ModelConfig:
    """`changes` are fields of the config, or of all its layers; `windows` are of one layer each."""
    layer = dict(heads=4, kv_heads=2, head_dim=16, intermediate=48)
    layer |= {f.name: changes.pop(f.name) for f in fields(LayerSpec) if f.name in changes}
    count = changes.pop("layers", 2)
    specs = tuple(LayerSpec(**layer, window=w) for w in changes.pop("windows", (0,) * count))
    shape = dict(
        family="llama", vocab=VOCAB, hidden=32, context=256, norm_eps=1e-5, tied=True, specs=specs
    )  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def random_tensors(config: ModelConfig, seed: int = 0):
    """Weights large enough that the model has opinions: a flat one would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    shapes = dict(expected_shapes(config))

    def read(name: str) -> torch.Tensor:
        if name not in made:
            shape = shapes[name]
            if len(shape) == 1:
                made[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
            else:
                made[name] = torch.randn(shape, generator=generator) * (1.5 / math.sqrt(shape[1]))
        return made[name]

    return read


def tiny_model(
    kernels: str = "auto", seed: int = 0, threads: int = 1, weights: str = "stored", **changes
) -> Decoder:
    config = tiny_config(**changes)
    folder: Path = cache_folder() / "kernels"
    made = make_kernels(config, config.context + 64, threads, folder, kernels)
    read = random_tensors(config, seed)
    return Decoder(config, lambda name: kept_as(read(name), weights), made)


class Letters:
    """Token text without a tokenizer: token 65 is 'A', and so on; never an unfinished character."""

    def __init__(self, marked: bool = False) -> None:
        pass

    def feed(self, *tokens: int) -> str:
        return "".join(chr(32 + token) for token in tokens)

    def finish(self) -> str:
        return ""


def tiny_engine(model: Decoder, planner=None, drafter=None, drafters=None, lag=None, **settings) -> Engine:
    """`drafters` makes them by name from the KV cache; a lone `drafter` is called "test". With a `lag` decoding
    sequences are resident, as on a GPU, and the host is so many steps behind.
    """
    options = dict(max_sequences=32, step_rows=64, cache_bytes=1 << 22)
    made = Settings(**{**options, **settings})
    cache = make_kv_cache(model, made)
    by_name = drafters(cache) if drafters else {"test": drafter} if drafter else {}
    some = Drafters(by_name, model.config.vocab)
    planner = planner or Planner()
    runner = EagerRunner(model, cache, some)
    if lag is not None:
        runner = lagging_runner(model, cache, some, lag, planner.default)
    return Engine(model, cache, some, planner, runner, made, Letters)


def lagging_runner(
    model: Decoder, cache: KvCache, drafters: Drafters, lag: int = 1, default: str = "none"
) -> GraphRunner:
    """What a GPU runs, launched one operation after the other on the CPU."""
    rows, width = cache.table.tensor.shape
    ops = StepOps(SequenceState(rows, width, torch.device("cpu"), model.config.vocab), model)
    return GraphRunner(model, cache, drafters, ops, model.make_pass(cache.store), lag=lag, default=default)


def packed(allowed: torch.Tensor) -> np.ndarray:
    """Which tokens a grammar allows, as its matcher says it."""
    return np.packbits(allowed.numpy(), bitorder="little")


def request(
    name: str,
    prompt,
    stop_ids=frozenset(),
    owner: str = "",
    bad_word_ids=(),
    prediction=(),
    grammar=None,
    **params,
) -> Request:
    options = dict(temperature=0, max_tokens=24, seed=hash_seed(name))
    made = SamplingParams(**{**options, **params})
    assert made.seed is not None
    ends = frozenset(stop_ids) | set(made.stop_token_ids)
    words = tuple(bad_word_ids)
    return Request(name, tuple(prompt), made, made.seed, owner, words, ends, tuple(prediction), grammar)


def sequence(tokens, row: int = -1, cached: int = 0, prompt: int | None = None, **options) -> Sequence:
    """A sequence as a drafter sees it, without an engine."""
    one = request("s", tokens[:prompt], **options)
    return Sequence(one, 0, one.seed, list(tokens), row, cached)


class Always(Planner):
    """A planner with the same `draft_plan` for everyone, with the drafter each request asks for."""

    def __init__(self, draft_plan: DraftPlan, on=lambda sequence: True) -> None:
        super().__init__(draft_plan.drafter)
        self.draft_plan, self.on = draft_plan, on

    def _settled(self, item, batch, options):
        if not item.emits or (item.known > 1 and not options.after_prompts):
            return NO_DRAFT_PLAN, PREFILL
        plan = self.one(item.sequence)
        return plan, Reason("asked", plan.depth, (("drafter", plan.drafter),)) if plan.nodes else OFF

    def one(self, sequence: Sequence) -> DraftPlan:
        asked = sequence.request.params.speculation
        if asked.off or not self.on(sequence):
            return NO_DRAFT_PLAN
        plan = self.draft_plan
        return DraftPlan(asked.drafter or plan.drafter, plan.nodes, plan.depth, plan.tree)

    def observe(self, record) -> None: ...
    def forget(self, sequence) -> None: ...
    def forget_drafters(self, names) -> None: ...


class Watched:
    """A drafter that remembers what it proposed, by request and position."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.seen: dict[tuple[str, int], tuple] = {}

    def start(self, sequence) -> None:
        self.inner.start(sequence)

    def propose(self, sequences, draft_plans):
        drafts = self.inner.propose(sequences, draft_plans)
        for s, draft in zip(sequences, drafts, strict=True):
            self.seen[s.request.id, len(s.tokens)] = (draft.tokens, draft.parents)
        return drafts

    def accept(self, sequence, draft, verdict) -> None:
        self.inner.accept(sequence, draft, verdict)

    def stop(self, sequence) -> None:
        self.inner.stop(sequence)


def lm_drafter(model: Decoder, cache: KvCache) -> LmDrafter:
    return LmDrafter(model, cache.table, VOCAB, cache.context, step_rows=64)


def noised(config: ModelConfig, seed: int, amount: float):
    """A reader of random_tensors(seed) with a little noise on top: a draft that is often right."""
    read = random_tensors(config, seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    made: dict[str, torch.Tensor] = {}

    def noisy(name: str) -> torch.Tensor:
        if name not in made:
            value = read(name)
            made[name] = value + amount * value.std() * torch.randn(value.shape, generator=generator)
        return made[name]

    return noisy


def noised_model(amount: float = 0.15, kernels: str = "auto", seed: int = 0, **changes) -> Decoder:
    config = tiny_config(**changes)
    made = make_kernels(config, config.context + 64, 1, cache_folder() / "kernels", kernels)
    return Decoder(config, noised(config, seed, amount), made)


def eagle_tensors(
    config: ModelConfig, draft_vocab: int, heads: int = 2, seed: int = 3
) -> dict[str, torch.Tensor]:
    """A random EAGLE-3 head under the published names, for a draft vocabulary spread over the target's."""
    g = torch.Generator().manual_seed(seed)
    h, q, inner = config.hidden, heads * 16, 40

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * (1.5 / math.sqrt(columns))

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(h, generator=g)

    known = torch.randperm(config.vocab, generator=g)[:draft_vocab].sort().values
    return {
        "fc.weight": matrix(h, 3 * h), "lm_head.weight": matrix(draft_vocab, h), "norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(q, 2 * h), "midlayer.self_attn.k_proj.weight": matrix(16, 2 * h),
        "midlayer.self_attn.v_proj.weight": matrix(16, 2 * h), "midlayer.self_attn.o_proj.weight": matrix(h, q),
        "midlayer.mlp.gate_proj.weight": matrix(inner, h), "midlayer.mlp.up_proj.weight": matrix(inner, h),
        "midlayer.mlp.down_proj.weight": matrix(h, inner), "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(), "midlayer.post_attention_layernorm.weight": norm(),
        "d2t": known - torch.arange(draft_vocab),
        "t2d": torch.zeros(config.vocab, dtype=torch.bool).index_fill(0, known, True),
    }  # fmt: skip


def write_eagle(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    heads = len(tensors["midlayer.self_attn.q_proj.weight"]) // 16
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": config.hidden,
        "vocab_size": config.vocab, "draft_vocab_size": len(tensors["lm_head.weight"]), "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40,
        "rms_norm_eps": 0.05, "max_position_embeddings": config.context,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def head_tensors(config: HeadConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    """A random EAGLE head of any kind, its norms far enough from one to be missed."""
    g = torch.Generator().manual_seed(seed)
    norms = [name for name, shape in head_shapes(config) if len(shape) == 1 or name == "tap_norms.weight"]
    made = {
        name: torch.randn(shape, generator=g) * (0.3 if name in norms else 1.5 / math.sqrt(shape[-1]))
        + (name in norms)
        for name, shape in head_shapes(config)
    }
    if "d2t" in made:
        known = torch.randperm(config.layer.vocab, generator=g)[: config.draft_vocab].sort().values
        made["d2t"] = known - torch.arange(config.draft_vocab)
    return made


def hash_seed(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**40


def finish(engine: Engine) -> dict[tuple[str, int], list[Event]]:
    """Step until nothing is left; the events of each choice."""
    events: dict[tuple[str, int], list[Event]] = {}
    for _ in range(20_000):
        if engine.idle:
            return events
        for result in engine.step():
            for event in result.events:
                events.setdefault((event.request_id, event.choice), []).append(event)
    raise AssertionError("the engine does not come to an end")


def arriving(engine: Engine, requests: list[Request], rnd: random.Random) -> dict[str, list[int]]:
    """Answers to requests that arrive while others decode."""
    waiting, received = list(requests), {one.id: list[int]() for one in requests}
    while waiting or not engine.idle:
        if waiting and (engine.idle or rnd.random() < 0.4):
            engine.add(waiting.pop(0))
        for result in engine.step():
            for event in result.events:
                received[event.request_id] += event.token_ids
    engine.table.check()
    return received


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def run_alone(model: Decoder, one: Request, **settings) -> list[int]:
    engine = tiny_engine(model, **settings)
    engine.add(one)
    return tokens_of(finish(engine)[one.id, 0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
