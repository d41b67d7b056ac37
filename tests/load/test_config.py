"""Shapes from GGUF metadata and, for what hostile files put there, from config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import BadCheckpoint, OutriderError, UnsupportedModel
from outrider.load.checkpoint import open_checkpoint
from outrider.load.config import ROPE_KINDS, TRAINED, ModelConfig
from outrider.load.families import config_from_json
from outrider.load.gguf_config import ROPE_FREQS, config_from_gguf
from outrider.model.rope import rope_tables

from . import tiny


def from_gguf(
    arch: str = "llama", tensors: tuple[str, ...] = (), factors: Any = None, **changes: Any
) -> ModelConfig:
    metadata = tiny.model_metadata(arch, **changes) | tiny.tokenizer_metadata()
    return config_from_gguf(metadata, tensors, None if factors is None else {ROPE_FREQS: factors})


def test_equals_the_same_model_from_json() -> None:
    from_json = config_from_json(tiny.hf_config())
    made = from_gguf()
    for name in ModelConfig.__slots__:
        if name not in ("raw", "bos_id", "norm_eps"):
            assert getattr(made, name) == getattr(from_json, name), name
    assert made.norm_eps == pytest.approx(1e-5)
    assert made.bos_id == 1


def test_what_only_the_tensors_tell() -> None:
    assert from_gguf().tied
    assert not from_gguf(tensors=("output.weight",)).tied
    assert not from_gguf().specs[0].qkv_bias
    biases = ("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias")
    made = from_gguf("qwen2", biases).specs[0]
    assert (made.qkv_bias, made.out_bias, made.mlp_bias, made.qk_norm) == (True, True, True, "")
    assert from_gguf("qwen3").specs[0].qk_norm == "head"


def test_optional_entries() -> None:
    made = from_gguf(**{"attention.key_length": 16, "attention.value_length": 16, "vocab_size": 999})
    assert (made.head_dim, made.vocab) == (16, 999)
    assert from_gguf(**{"attention.sliding_window": 64}).windows == (64, 64)
    metadata = tiny.model_metadata() | tiny.tokenizer_metadata()
    assert config_from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 5}).eos_ids == (0, 5)
    assert config_from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 0}).eos_ids == (0,)


def test_rope_scaling() -> None:
    made = from_gguf(
        **{"rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ).rope
    assert (made.theta, made.kind, made.scaling) == (5e5, "linear", {"factor": 4.0})
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    made = from_gguf(**yarn, **{"rope.scaling.original_context_length": 64}).rope
    assert (made.kind, made.scaling) == ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64})
    with pytest.raises(BadCheckpoint, match="original_context_length"):
        from_gguf(**yarn)
    with pytest.raises(UnsupportedModel, match="longrope"):
        from_gguf(**{"rope.scaling.type": "longrope"})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(factor: float) -> None:
    """The tensor holds what transformers divides each frequency by."""
    numbers = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **numbers},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    factors = (plain / scaled).tolist()
    changes: dict[str, Any] = {"embedding_length": 256, "attention.head_count": 2, "rope.freq_base": 500000.0}
    made = from_gguf(factors=factors, **changes).rope
    assert (made.theta, made.kind, made.scaling) == (500000.0, "llama3", numbers)
    factors[-20] *= 1.01
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        from_gguf(factors=factors, **changes)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        from_gguf(factors=factors[:-1], **changes)
    with pytest.raises(UnsupportedModel, match="together"):
        from_gguf(factors=factors, **changes, **{"rope.scaling.type": "linear"})


def test_refusals_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="different sizes"):
        from_gguf(**{"attention.value_length": 4})
    with pytest.raises(BadCheckpoint, match=r"llama\.expert_used_count"):
        from_gguf(expert_count=8)


def test_other_architectures_are_refused() -> None:
    for arch in ("gemma", None, 3):
        with pytest.raises(
            UnsupportedModel, match=f"architecture {arch!r} is not one of gemma2, .*llama, .*qwen3"
        ):
            config_from_gguf({"general.architecture": arch})
    with pytest.raises(UnsupportedModel, match="which layers"):
        from_gguf("qwen2", **{"attention.sliding_window": 64})


@pytest.mark.parametrize("key", [key for key in tiny.model_metadata() if key.startswith("llama.")])
@pytest.mark.parametrize("value", [0, -1, 2**63, "x", [1], True, None, float("nan"), float("inf")])
def test_nonsense_metadata(key: str, value: Any) -> None:
    metadata = tiny.model_metadata() | tiny.tokenizer_metadata() | {key: value}
    try:
        config_from_gguf(metadata)
    except OutriderError as problem:
        assert str(problem)
    else:
        assert "epsilon" in key or "rope" in key  # the only entries that may be any finite number


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("value", [0, -1, 10**39, 1e300, 1e-300, "x", [1], True, float("nan"), float("inf")])
def test_nonsense_in_rotary_positions_is_named_before_it_is_used(kind: str, value: Any) -> None:
    sound: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 1e4,
        TRAINED: 64,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    sound |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sound |= {"factor": 4.0, "low_freq_factor": 1, "high_freq_factor": 4, "attention_factor": 1.0}
    rope_tables(config_from_json(tiny.hf_config() | {"rope_parameters": sound}), 16)
    for name in sound.keys() - {"rope_type"}:
        raw = tiny.hf_config() | {"rope_parameters": sound | {name: value}}
        try:
            rope_tables(config_from_json(raw), 16)
        except BadCheckpoint as problem:
            assert "cannot be right" in str(problem) or "cannot be read" in str(problem)
    for name in ROPE_KINDS[kind]:
        with pytest.raises(BadCheckpoint, match=f"{name} = "):
            config_from_json(tiny.hf_config() | {"rope_parameters": sound | {name: value}})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_number_of_many_digits_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / name).write_text('{"rope_theta": 1' + "0" * 400 + "}")
    with pytest.raises(BadCheckpoint, match=rf"{name} is not sound JSON: an integer has 401 digits"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("key", list(tiny.hf_config()))
@pytest.mark.parametrize("value", [2**60, -1, "x", [1], {"a": 1}, None])
def test_nonsense_json(key: str, value: Any) -> None:
    try:
        config_from_json(tiny.hf_config() | {key: value})
    except OutriderError as problem:
        assert str(problem)
