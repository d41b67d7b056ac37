"""GGUF files of every family against transformers, written here as converters write them: names, row order, norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import UnsupportedModel
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.gguf_config import config_from_gguf
from outrider.model.decoder import Decoder, make_kernels
from tests.load.tiny import tokenizer_metadata, write_gguf
from tests.model.batches import Reader, furthest, random_ids
from tests.model.families import POSITIONS, VOCAB, their_logits, theirs

TOLERANCE = 2e-5
SANDWICH = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GLM_MOE = {
    "mlp.gate": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip
# By case: the architecture, whether rotary pairs become neighbours, what is added to norms, names that are not Llama's.
CASES: dict[str, tuple[str, bool, int, dict[str, str]]] = {
    "gemma2": ("gemma2", False, 1, SANDWICH | {"pre_feedforward_layernorm": "ffn_norm"}),
    "gemma3": ("gemma3", False, 1, SANDWICH | {"pre_feedforward_layernorm": "ffn_norm"}),
    "smollm3-fourth": ("smollm3", True, 0, {}),
    "olmo2": ("olmo2", False, 0, SANDWICH),
    "olmo3": ("olmo2", False, 0, SANDWICH),
    "granite": ("granite", True, 0, {}),
    "phi3": ("phi3", False, 0, {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
    "phi4-long": ("phi3", False, 0, {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
    "ministral3": ("mistral3", True, 0, {}),
    "seed_oss": ("seed_oss", False, 0, {"post_attention_layernorm": "post_attention_norm"}),
    "glm4": (
        "glm4", False, 0,
        {
            "mlp.gate_up_proj": "ffn_up", "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "qwen3_moe": ("qwen3moe", False, 0, {"mlp.gate": "ffn_gate_inp"}),
    "mixtral": ("llama", True, 0, {"mlp.gate": "ffn_gate_inp"}),
    "olmoe": ("olmoe", False, 0, {"mlp.gate": "ffn_gate_inp"}),
    "glm4_moe": ("glm4moe", False, 0, GLM_MOE),
    "glm4_moe-groups": ("glm4moe", False, 0, GLM_MOE),
    "gpt_oss-usual": (
        "gpt-oss", False, 0, {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    ),
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def metadata_of(case: str) -> dict[str, Any]:
    c, architecture = theirs(case).config, CASES[case][0]
    rope = c.rope_parameters
    full = rope.get("full_attention", rope)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    own: dict[str, Any] = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "rope.freq_base": full["rope_theta"], "vocab_size": c.vocab_size,
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    if full["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if trained := full.get("original_max_position_embeddings"):
        own["rope.scaling.original_context_length"] = trained
    own |= {
        "gemma2": {
            "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "attention.sliding_window": 4,
            "attention.sliding_window_pattern": 2, "attention.scale": 24**-0.5,
        },
        "gemma3": {
            "attention.sliding_window": 4, "attention.sliding_window_pattern": 2, "attention.scale": 24**-0.5,
            "rope.freq_base_swa": 100.0,
        },
        "olmo3": {
            "attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 100.0,
        },
        "granite": {
            "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 1.7, "attention.scale": 0.3,
        },
        "phi3": {"attention.sliding_window": 4},
        "qwen3_moe": {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40},
        "mixtral": {"expert_count": 4, "expert_used_count": 2},
        "olmoe": {"expert_count": 8, "expert_used_count": 3},
        "glm4_moe": {
            "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40, "expert_shared_count": 1,
            "leading_dense_block_count": 1, "expert_weights_scale": 1.7, "expert_weights_norm": True,
            "expert_gating_func": 2, "block_count": 4, "nextn_predict_layers": 1,
        },
        "glm4_moe-groups": {
            "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40, "expert_shared_count": 2,
            "leading_dense_block_count": 2, "expert_weights_scale": 1.7, "expert_weights_norm": False,
            "expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2,
        },
        "gpt_oss-usual": {
            "attention.sliding_window": 4, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 96,
        },
        "ministral3": {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.4},
    }.get(case, {})  # fmt: skip
    made = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in own.items()}
    return made | tokenizer_metadata()


def tensors_of(case: str) -> dict[str, np.ndarray]:
    _, neighbours, shift, names = CASES[case]
    model, made = theirs(case), {}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array, (stem, kind) = value.numpy(), name.rsplit(".", 1)
        if neighbours and (count := heads.get(stem.split(".")[-1], 0)):
            halves = array.reshape(count, 2, array.shape[0] // count // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        if stem.endswith("norm"):
            array = array + np.float32(shift)
        if kind == "sinks" or stem.endswith(".experts"):
            made |= own_tensors(stem, kind, array, case.startswith("gpt_oss"))
        elif kind == "e_score_correction_bias":
            made[f"blk.{stem.split('.')[2]}.exp_probs_b.bias"] = array
        elif stem.startswith("model.layers."):
            _, _, number, part = stem.split(".", 3)
            made[f"blk.{number}.{(NAMES | names)[part]}.{kind}"] = array
        else:
            made[f"{TOP[stem]}.{kind}"] = array
    if full := model.config.rope_parameters.get("long_factor"):
        short = model.config.rope_parameters["short_factor"]
        made["rope_factors_long.weight"] = np.array(full, np.float32)
        made["rope_factors_short.weight"] = np.array(short, np.float32)
    return made


def own_tensors(stem: str, kind: str, array: np.ndarray, turned: bool) -> dict[str, np.ndarray]:
    """Sinks, and stacks of experts, which gpt-oss stores turned and with rows of gate and up in turns."""
    block = f"blk.{stem.split('.')[2]}"
    if kind == "sinks":
        return {f"{block}.attn_sinks.weight": array}
    suffix = "bias" if kind.endswith("_bias") else "weight"
    array = array if suffix == "bias" or not turned else np.ascontiguousarray(array.swapaxes(1, 2))
    if kind.startswith("down"):
        return {f"{block}.ffn_down_exps.{suffix}": array}
    half = array.shape[1] // 2
    parts = {"gate": array[:, ::2], "up": array[:, 1::2]}
    if not turned:
        parts = {"gate": array[:, :half], "up": array[:, half:]}
    return {f"{block}.ffn_{part}_exps.{suffix}": np.ascontiguousarray(rows) for part, rows in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_gives_transformers_logits(case: str, tmp_path: Path, kernel_folder: Path) -> None:
    metadata = metadata_of(case)
    tensors = tensors_of(case)
    if case == "glm4_moe":  # the layer that predicts one token more
        tensors["blk.3.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    check_shapes(checkpoint)
    config = checkpoint.config
    assert config is not None
    model = Decoder(config, checkpoint.stored, make_kernels(config, POSITIONS, 2, kernel_folder, "auto"))
    ids = random_ids(VOCAB, 33)
    assert furthest(Reader(config).read(model, ids), their_logits(case, ids)) < TOLERANCE


def test_what_a_gguf_file_cannot_say_is_refused() -> None:
    metadata = metadata_of("granite")
    with pytest.raises(UnsupportedModel, match=r"'bert' is not one of gemma2, gemma3, glm4"):
        config_from_gguf(metadata | {"general.architecture": "bert"})
    with pytest.raises(UnsupportedModel, match="this granite model has expert_count = 4"):
        config_from_gguf(metadata | {"granite.expert_count": 4})


def test_gemma_s_largest_models_scale_scores_by_the_width_of_their_stream() -> None:
    metadata = metadata_of("gemma3")
    del metadata["gemma3.attention.scale"]
    assert config_from_gguf(metadata).specs[0].scale == 32**-0.5
    large = config_from_gguf(metadata | {"gemma3.block_count": 62})
    assert large.specs[0].scale == (64 // 4) ** -0.5 and torch.tensor(large.embedding_scale) == 8
