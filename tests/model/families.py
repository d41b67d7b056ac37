"""Tiny random models of every family the decoder serves, as transformers has them and as Outrider does."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outrider.load.config import config_from_json
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
}
DYNAMIC = ("Llama", {"max_position_embeddings": 16, **_rope("dynamic", factor=2.0)})


@cache
def theirs(case: str) -> Any:
    family, options = DYNAMIC if case == "rope-dynamic" else CASES[case]
    config = getattr(transformers, family + "Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"
    return stir(getattr(transformers, family + "ForCausalLM")(config))


@cache
def ours(case: str, kernels: str, folder: Path, threads: int = 2) -> Decoder:
    model = theirs(case)
    raw = json.loads(json.dumps(model.config.to_dict()))
    tensors = model.state_dict()
    config = config_from_json(raw)
    made = make_kernels(config, POSITIONS, threads, folder, kernels)
    return Decoder(config, lambda name: tensors[name].clone(), made)


def their_logits(case: str, ids: list[int]) -> Tensor:
    return logits_of(theirs(case), tuple(ids))


@cache  # both kernel sets ask for the same
@torch.no_grad()
def logits_of(model: Any, ids: tuple[int, ...]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
