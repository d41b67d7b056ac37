"""A target that can be learned within seconds, and answers of it to learn from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.bench.as_if import config_json
from outrider.distill.answers import Answers
from outrider.load.checkpoint import expected_shapes
from outrider.load.token_shards import Conversation
from tests.load.tiny import byte_level_backend, vocabulary
from tests.shards import ShardWriter
from tests.tiny import prompt_of, random_tensors, tiny_config

PROMPT, ANSWER = 6, 30
OPTIONS = dict(threads=1, max_sequences=32, cache_bytes=1 << 22, device="cpu")


def write_learnable(folder: Path) -> Path:
    """What it says next hangs mostly on the last token."""
    config = tiny_config(vocab=len(vocabulary()), eos_ids=(0,), tied=False)
    read = random_tensors(config)
    tensors = {name: read(name) for name, _ in expected_shapes(config)}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.04
    order = torch.randperm(config.vocab, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = 2.5 * tensors["model.embed_tokens.weight"][order]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


def answer(llm: LLM, folder: Path, count: int, first: int) -> Answers:
    """Half of them greedy, half at temperature 1."""
    prompts, heat = [prompt_of(PROMPT, first + i) for i in range(count)], [float(i % 2) for i in range(count)]
    params = [
        SamplingParams(temperature=t, seed=first + i, max_tokens=ANSWER, ignore_eos=True)
        for i, t in enumerate(heat)
    ]
    writer = ShardWriter(folder)
    for i, out in enumerate(llm.generate(prompts, params)):
        ids = [*prompts[i], *out.token_ids]
        said = [at >= PROMPT for at in range(len(ids))]
        writer.add(Conversation.of(ids, said, "chat", heat[i], f"p{first + i}"))
    writer.flush()
    return Answers(folder, 64)
