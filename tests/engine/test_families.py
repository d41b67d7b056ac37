"""New families through the whole engine: tokens of transformers, the same with every drafter, alone and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from outrider import LLM, SamplingParams
from outrider.load.checkpoint import open_checkpoint
from outrider.load.config import LayerSpec, ModelConfig
from outrider.model.decoder import Decoder, make_kernels
from outrider.settings import cache_folder
from tests.load.tiny import byte_level_backend, vocabulary
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.families import logits_of, make_theirs
from tests.tiny import eagle_tensors, random_tensors, tiny_config, write_eagle

VOCAB = len(vocabulary())
CASES = ["gemma3", "olmo3", "granite", "phi4-short", "glm4", "glm4_moe-groups", "llama4", "gpt_oss-usual"]
PROMPTS = ["hello hello 12", "one", "hello one two three hello one two"]


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    logging.disable_progress_bar()
    path = tmp_path_factory.mktemp(request.param)
    model = make_theirs(request.param, vocab_size=VOCAB)
    model.save_pretrained(path)
    byte_level_backend().save(str(path / "tokenizer.json"))
    return model, path


def answers(folder: Path, draft: str = "none", **params: Any) -> list[list[int]]:
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 10, "ignore_eos": True, "seed": 3, **params})
    with LLM(folder, draft=draft, threads=2, context=96, device="cpu") as llm:
        together = [list(out.token_ids) for out in llm.generate(PROMPTS, asked)]
        assert [list(llm.generate(prompt, asked)[0].token_ids) for prompt in PROMPTS] == together
        return together


def test_greedy_tokens_are_those_of_transformers(folder: tuple[Any, Path]) -> None:
    model, path = folder
    tokenizer = open_checkpoint(path).tokenizer
    for prompt, answer in zip(PROMPTS, answers(path), strict=True):
        ids = list(tokenizer.encode(prompt))
        for token in answer:
            logits = logits_of(model, tuple(ids))[-1]
            assert logits[token] > logits.max() - 1e-4
            ids.append(token)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    folder: tuple[Any, Path], temperature: float, tmp_path: Path
) -> None:
    _, path = folder
    config = open_checkpoint(path).config
    assert config is not None
    head = write_eagle(tmp_path / "head", config, eagle_tensors(config, 50))
    plain = answers(path, temperature=temperature)
    asked = {"temperature": temperature, "speculation": {"depth": 3}}
    for draft in ("lookup", "early_exit:2", str(head)):
        assert answers(path, draft, **asked) == plain, draft


def mixed_config(**changes: Any) -> ModelConfig:
    """Layers that differ in head sizes, key heads, MLP, window, positions, norms and activation."""
    specs = (
        LayerSpec(4, 2, 16, 48),
        LayerSpec(2, 1, 32, 80, rope=None, window=3, norms="both", activation="gelu_tanh", softcap=2.0),
        LayerSpec(4, 4, 16, 32, norms="after", qk_norm="whole", attention_scale=0.1),
    )
    return tiny_config(specs=specs, residual_scale=0.7, embedding_scale=2.0, logit_divisor=1.5, softcap=3.0)


def test_layers_may_differ_in_everything() -> None:
    """Both kernel sets agree, and a row's bits depend on no other row and on no chunk."""
    config, ids = mixed_config(), random_ids(96, 30)
    assert config.kv_bytes_per_token == 4 * 2 * (32 + 32 + 64)
    read = random_tensors(config)
    made = {
        name: Decoder(config, read, make_kernels(config, 128, 2, cache_folder() / "kernels", name))
        for name in ("auto", "torch")
    }
    whole = {name: Reader(config).read(model, ids) for name, model in made.items()}
    assert furthest(whole["auto"], whole["torch"]) < 2e-5
    for name, model in made.items():
        for chunk in (1, 7):
            assert torch.equal(Reader(config).read(model, ids, chunk), whole[name]), (name, chunk)
    reader = Reader(config, texts=3)
    both = reader.feed(made["auto"], Part(0, ids[:9]), Part(1, ids), Part(2, ids[5:]))
    assert torch.equal(both[9:39], whole["auto"]) and torch.equal(both[:9], whole["auto"][:9])
