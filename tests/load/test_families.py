"""Families from config.json: what is left out, nested or wrong in it; and folders whose tensors have other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.families import FAMILIES, config_from_json, sample_config
from outrider.load.weight_map import expected_shapes
from outrider.model.gpu_limits import gpu_obstacle

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 50,
}  # fmt: skip


def test_gemma_3_as_it_is_published_leaves_most_out() -> None:
    """Nested, with the older names: a window and a factor are all that its text part says beside sizes."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    made = config_from_json({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (made.family, made.vocab, made.tied, made.eos_ids) == ("gemma3_text", 262_208, True, (1, 106))
    assert made.windows[:7] == (1024,) * 5 + (0, 1024)
    local, whole = made.specs[0].rope, made.specs[5].rope
    assert local is not None and (local.theta, local.kind) == (1e4, "default")
    assert whole is not None and (whole.theta, whole.kind, whole.scaling["factor"]) == (1e6, "linear", 8.0)
    assert made.specs[0].scale == 256**-0.5 and made.embedding_scale == 2560**0.5
    assert (made.heads, made.kv_heads, made.head_dim) == (8, 4, 256)


def test_layers_that_a_config_leaves_out() -> None:
    smollm3 = config_from_json({"model_type": "smollm3", **SIZES})
    assert [spec.rope is None for spec in smollm3.specs] == [False, False, False, True, False, False]
    assert config_from_json({"model_type": "olmo3", **SIZES}).windows == (4096, 4096, 4096, 0, 4096, 4096)
    assert config_from_json({"model_type": "phi3", **SIZES, "sliding_window": None}).windows == (0,) * 6
    glm = config_from_json({"model_type": "glm4", **SIZES}).specs[0]
    assert glm.rope is not None and glm.rope.turned(glm.head_dim) == 64 and glm.qkv_bias


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model_type": "gemma3_text", "hidden_activation": "relu"},
            "gemma3_text model has hidden_activation",
        ),
        (
            {"model_type": "olmo3", "layer_types": ["conv"] * 6},
            "layer_types of this olmo3 model names 'conv'",
        ),
        ({"model_type": "granite", "rope_scaling": {"type": "mrope"}}, "'mrope' of this granite model"),
        ({"model_type": "granite", "logits_scaling": "x"}, "could not convert"),
        ({"model_type": "granite", "residual_multiplier": -1.0}, "residual_scale = -1.0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "cannot be read"),
        ({"model_type": "olmo2", "hidden_size": None}, "olmo2|cannot be read"),
        ({"model_type": "glm4", "partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
    ],
)
def test_a_field_that_is_not_supported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises((UnsupportedModel, BadCheckpoint), match=said):
        config_from_json({**SIZES, **change})
    missing = {name: value for name, value in SIZES.items() if name != "num_attention_heads"}
    with pytest.raises(BadCheckpoint, match="olmo2 model has no 'num_attention_heads'"):
        config_from_json({"model_type": "olmo2", **missing})
    with pytest.raises(UnsupportedModel, match=r"'rwkv' is not one of llama, mistral, .*glm4"):
        config_from_json({**SIZES, "model_type": "rwkv"})


def stored(config: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Random tensors under Llama's names with another prefix."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config)}
    return {name.replace("model.", prefix, 1): value for name, value in made.items()}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_for_images(prefix: str, tmp_path: Path) -> None:
    text = {"model_type": "mistral", **SIZES, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    config = config_from_json(text)
    tensors = stored(config, prefix)
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    check_shapes(opened)
    assert opened.names() == [name for name, _ in expected_shapes(config)]
    for name in opened.names():
        assert torch.equal(opened.tensor(name), tensors[name.replace("model.", prefix, 1)])


def test_matrices_stored_as_one_must_have_the_rows_of_all(tmp_path: Path) -> None:
    raw = {"model_type": "phi3", **SIZES, "num_hidden_layers": 1, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    names = {
        "model.embed_tokens": (50, 64), "model.norm": (64,), "model.layers.0.input_layernorm": (64,),
        "model.layers.0.post_attention_layernorm": (64,), "model.layers.0.self_attn.qkv_proj": (192, 64),
        "model.layers.0.self_attn.o_proj": (64, 64), "model.layers.0.mlp.gate_up_proj": (192, 64),
        "model.layers.0.mlp.down_proj": (64, 96),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    opened, fused = open_checkpoint(tmp_path), tensors["model.layers.0.self_attn.qkv_proj.weight"]
    check_shapes(opened)
    assert torch.equal(opened.tensor("model.layers.0.self_attn.k_proj.weight"), fused[64:128])
    assert torch.equal(opened.stored("model.layers.0.self_attn.v_proj.weight"), fused[128:])
    tensors["model.layers.0.self_attn.qkv_proj.weight"] = torch.randn(193, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        BadCheckpoint, match=r"q_proj.weight' .* has shape \[193, 64\]; its config says \[64, 64\]"
    ):
        check_shapes(open_checkpoint(tmp_path))


def test_what_a_gpu_cannot_do_is_known_from_the_config() -> None:
    found = {name: gpu_obstacle(sample_config(name)) for name in FAMILIES}
    assert {name for name, missing in found.items() if missing} == {"gemma2", "llama4_text"}
    capped = config_from_json({"model_type": "gemma2", **SIZES})
    assert capped.softcap == 30 and capped.specs[0].softcap == 50
