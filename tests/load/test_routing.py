"""Experts from config.json: what is wrong in it; and their tensors, one an expert or stacked, under every name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.config import Experts
from outrider.load.families import config_from_json, sample_config
from outrider.model.weights import kept_formats
from tests.model.families import EXPERTS, tensors_of, theirs

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40, "intermediate_size_mlp": 80,
}  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    return config_from_json({"model_type": name, **SIZES, **changes})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3_moe", {"scoring_func": "tanh"}, "scoring_func = 'tanh' of this qwen3_moe model; supported: softmax"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method = 'greedy' of this glm4_moe model; supported: noaux_tc"),
        ("qwen3_moe", {"topk_method": "group_limited_greedy"}, "of this qwen3_moe model; supported: greedy"),
        ("glm4_moe", {"n_group": 3}, "this glm4_moe model: 8 experts do not divide into 3 groups; .* n_group = 3"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "3 of 2 groups cannot be used; .* topk_group = 3"),
        ("glm4_moe", {"n_group": 8, "topk_group": 8}, "groups of one"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "3 experts a token are more than"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "router's scale is -1.0"),
        ("glm4_moe", {"routed_scaling_factor": None}, "cannot be read"),
        ("mixtral", {"num_experts_per_tok": 9}, "mixtral model: 9 experts a token are more than the 8 .*per_tok = 9"),
        ("mixtral", {"num_local_experts": 0}, "the experts' count = 0"),
        ("mixtral", {"num_local_experts": 1 << 20}, "1048576 experts; 4096 are supported"),
        ("mixtral", {"num_local_experts": "8"}, "the experts' count = '8'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "cannot be read"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "the experts' width = -1"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "cannot be read"),
        ("olmoe", {"clip_qkv": 8.0}, "this olmoe model has clip_qkv = 8.0; supported: None"),
        ("llama4_text", {"attention_chunk_size": -8}, "a chunk of -8"),
        ("llama4_text", {"floor_scale": 0}, "original_max_position_embeddings = 0"),
        ("llama4_text", {"moe_layers": "all"}, "cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises((UnsupportedModel, BadCheckpoint), match=said):
        config(name, **change)


@pytest.mark.parametrize("field", ["num_experts_per_tok", "moe_intermediate_size", "num_experts"])
def test_a_missing_field_is_named(field: str) -> None:
    given = {name: value for name, value in SIZES.items() if name not in (field, "num_local_experts")}
    with pytest.raises(BadCheckpoint, match=f"this qwen3_moe model has no '{field}'"):
        config_from_json({"model_type": "qwen3_moe", **given})


def test_which_layers_have_experts() -> None:
    def layers(name: str, **changes: Any) -> list[int]:
        return [spec.experts.count if spec.experts else 0 for spec in config(name, **changes).specs]

    assert layers("qwen3_moe") == [8, 8, 8, 8] == layers("mixtral")
    assert layers("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]) == [0, 8, 0, 0]
    assert layers("glm4_moe") == [0, 8, 8, 8] and layers("glm4_moe", first_k_dense_replace=3) == [0, 0, 0, 8]
    assert layers("llama4_text", interleave_moe_layer_step=2) == [0, 8, 0, 8]
    assert layers("llama4_text", moe_layers=[0]) == [8, 0, 0, 0]
    llama = config("llama4_text", moe_layers=[0]).specs
    assert [spec.intermediate for spec in llama] == [96, 80, 80, 80]
    assert [spec.chunk for spec in llama] == [8192, 8192, 8192, 0]
    assert [spec.intermediate for spec in config("glm4_moe", n_shared_experts=2).specs] == [96, 80, 80, 80]


def test_sizes_count_experts() -> None:
    """The published numbers of Qwen3-30B-A3B: 30.5 billion, 3.3 billion of them for a row."""
    big = config(
        "qwen3_moe", vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    )  # fmt: skip
    assert round(big.parameters / 1e9, 1) == 30.5 and 3.3 < big.active_parameters / 1e9 < 3.4
    dense = sample_config("llama")
    assert dense.active_parameters == dense.parameters and not big.plain


@pytest.mark.parametrize("case", EXPERTS)
def test_tensors_as_transformers_writes_them(case: str, tmp_path: Path) -> None:
    """In its files they are one an expert; in memory they are stacked, which `tensors_of` reads."""
    theirs(case).save_pretrained(tmp_path)
    opened, expected = open_checkpoint(tmp_path), tensors_of(case)
    check_shapes(opened)
    assert sorted(opened.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(opened.tensor(name), tensor), name
    size = sum(tensor.nbytes for tensor in expected.values())
    assert sum(kept_formats(opened, "stored").values()) == size
    matrices = sum(t.numel() for n, t in expected.items() if t.dim() == 2)
    assert opened.config is not None
    gates = sum(
        tensor.numel() for name, tensor in expected.items() if name.endswith("shared_expert_gate.weight")
    )
    assert opened.config.parameters == matrices - gates


def test_stacked_and_half_the_size(tmp_path: Path) -> None:
    """Matrices in bfloat16 stay so, whichever way a stack lies; a stack of another count is refused."""
    raw = json.loads(json.dumps(theirs("llama4").config.to_dict()))
    tensors = {name: value.bfloat16() for name, value in theirs("llama4").state_dict().items()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    opened, name = open_checkpoint(tmp_path), "model.layers.0.mlp.experts.2.up_proj.weight"
    check_shapes(opened)
    fused = tensors["model.layers.0.feed_forward.experts.gate_up_proj"]
    assert torch.equal(opened.stored(name), fused[2].T[40:]) and opened.stored_format(name) == "bfloat16"
    tensors["model.layers.0.feed_forward.experts.gate_up_proj"] = fused[:3].contiguous()
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"experts.0.gate_proj.weight' .* has shape \[3, 64, 80\]"):
        check_shapes(open_checkpoint(tmp_path))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    theirs("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    said = (
        r"no tensor '.*layers.1.mlp.experts.3.up_proj.weight', .*\(mixtral\) .*block_sparse_moe.experts.3.w3"
    )
    with pytest.raises(BadCheckpoint, match=said):
        check_shapes(open_checkpoint(tmp_path))


def test_a_score_that_no_router_has() -> None:
    with pytest.raises(UnsupportedModel, match="score 'tanh' is not one of softmax, sigmoid"):
        Experts(8, 2, 40, score="tanh")
