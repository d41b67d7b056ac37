"""Tiny random models of every family the decoder serves, as transformers has them and as Outrider does."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outrider.load.families import config_from_json
from outrider.load.weight_map import safetensors_map
from outrider.model.decoder import Decoder, make_kernels
from tests.model.batches import stir

VOCAB, POSITIONS = 97, 256
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
KERNELS = [pytest.param("c", marks=NEEDS_COMPILER), "torch"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _rope(kind: str, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **scaling}}


LLAMA3 = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
SHORT = {"original_max_position_embeddings": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
GEMMA = {
    "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 4, "layer_types": KINDS,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
PHI4: dict[str, Any] = {
    "head_dim": 32, "hidden_size": 128, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75,
        "short_factor": [1 + i / 8 for i in range(12)], "long_factor": [2 + i / 2 for i in range(12)],
    },
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-ungrouped": ("Llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "llama-odd-sizes": ("Llama", {"hidden_size": 84, "head_dim": 48, "intermediate_size": 49}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases-window": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "rope-linear": ("Llama", _rope("linear", factor=2.5)),
    "rope-llama3": ("Llama", LLAMA3),
    "rope-yarn": ("Llama", _rope("yarn", **YARN)),
    "rope-yarn-untruncated": ("Qwen3", {"head_dim": 32, **_rope("yarn", truncate=False, **YARN)}),
    "rope-yarn-mscale": (
        "Llama",
        _rope("yarn", mscale=0.7, mscale_all_dim=0.4, beta_fast=16, beta_slow=2, **YARN),
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "rope_parameters": TWO_ROPES}),
    "gemma3-biases": ("Gemma3Text", {**GEMMA, "attention_bias": True, "final_logit_softcapping": 2.0}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-fourth": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-listed": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 3, "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 4, "layer_types": KINDS, "rope_parameters": TWO_ROPES}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7, "attention_multiplier": 0.3,
            "attention_bias": True, "mlp_bias": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 4}),
    "phi4-short": ("Phi3", {**PHI4, "max_position_embeddings": 384, "original_max_position_embeddings": 256}),
    "phi4-long": ("Phi3", {**PHI4, "max_position_embeddings": 384, "original_max_position_embeddings": 5}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, **_rope("yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4, **YARN | SHORT)},
    ),
    "seed_oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    "glm4": ("Glm4", {"head_dim": 32}),
}  # fmt: skip
# Experts: widths that are no multiple of a panel, ties to break, layers without any.
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 16,
}
GLM_MOE: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 32,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 40, "intermediate_size_mlp": 56,
    "head_dim": 16, "attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.4,
}  # fmt: skip
CASES |= {
    "qwen3_moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3_moe-some": (
        "Qwen3Moe",
        {
            **MOE, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True,
        },
    ),
    "qwen3_moe-window": ("Qwen3Moe", {**MOE, "use_sliding_window": True, "sliding_window": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 40}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "olmoe-normalised": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 6, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4Moe", {**GLM_MOE, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe-groups": (
        "Glm4Moe",
        {
            **GLM_MOE, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False,
            "first_k_dense_replace": 2,
        },
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "num_hidden_layers": 4}),
    "llama4-interleaved": (
        "Llama4Text",
        {
            **LLAMA4, "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "use_qk_norm": False,
            "num_experts_per_tok": 2, "attention_bias": True, "no_rope_layer_interval": 2,
        },
    ),
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 16, "sliding_window": 4,
    "swiglu_limit": 1.0, **_rope("yarn", truncate=False, **YARN),
}  # fmt: skip
CASES |= {
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss-usual": ("GptOss", {**GPT_OSS, "swiglu_limit": 7.0, "intermediate_size": 96}),
    "gpt_oss-four-heads-a-key": (
        "GptOss",
        {
            **GPT_OSS, "num_attention_heads": 8, "num_experts_per_tok": 4, "num_local_experts": 4,
            "attention_bias": False, "layer_types": KINDS[1:] + KINDS[:1], "swiglu_limit": 7.0,
        },
    ),
}  # fmt: skip
FAMILIES_OF_EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "llama4", "gpt_oss")
EXPERTS = [case for case in CASES if case.startswith(FAMILIES_OF_EXPERTS)]
DYNAMIC = ("Llama", {"max_position_embeddings": 16, **_rope("dynamic", factor=2.0)})


@cache
def theirs(case: str) -> Any:
    return make_theirs(case)


def make_theirs(case: str, **changes: Any) -> Any:
    family, options = DYNAMIC if case == "rope-dynamic" else CASES[case]
    config = getattr(transformers, family + "Config")(**deepcopy({**SIZES, **options, **changes}))
    config._attn_implementation = "eager"
    return stir(getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config))


@cache
def ours(case: str, kernels: str, folder: Path, threads: int = 2) -> Decoder:
    model = theirs(case)
    config = config_from_json(json.loads(json.dumps(model.config.to_dict())))
    made = make_kernels(config, POSITIONS, threads, folder, kernels)
    tensors = tensors_of(case)
    return Decoder(config, lambda name: tensors[name].clone(), made)


@cache
def tensors_of(case: str) -> dict[str, Tensor]:
    """The tensors of a case, as the decoder knows them."""
    model = theirs(case)
    config, stored = config_from_json(json.loads(json.dumps(model.config.to_dict()))), model.state_dict()
    return {
        name: source.tensor(stored[source.name]) for name, source in safetensors_map(config, stored).items()
    }


def their_logits(case: str, ids: list[int]) -> Tensor:
    return logits_of(theirs(case), tuple(ids))


@cache  # both kernel sets ask for the same
@torch.no_grad()
def logits_of(model: Any, ids: tuple[int, ...]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
