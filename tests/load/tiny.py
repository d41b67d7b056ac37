"""Small models on disk for the tests of load/: a byte-level vocabulary, a GGUF file, a safetensors folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 32, 4, 2, 2, 64
SPECIAL = ["<|end|>", "<|start|>"]
USER_DEFINED = ["<tool>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "1 2"]


def vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES), *USER_DEFINED]


def token_types(strings: list[str]) -> list[int]:
    return [3 if s in SPECIAL else 4 if s in USER_DEFINED else 1 for s in strings]


def tokenizer_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    strings = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": strings,
        "tokenizer.ggml.token_type": token_types(strings),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    } | changes


def model_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    own = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    } | changes
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in own.items()}


def hf_weights(tied: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face's names."""
    random = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    vocab, head_dim = len(vocabulary()), HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": values(vocab, HIDDEN), "model.norm.weight": values(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = values(vocab, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": values(HIDDEN),
            prefix + "post_attention_layernorm.weight": values(HIDDEN),
            prefix + "self_attn.q_proj.weight": values(HEADS * head_dim, HIDDEN),
            prefix + "self_attn.k_proj.weight": values(KV_HEADS * head_dim, HIDDEN),
            prefix + "self_attn.v_proj.weight": values(KV_HEADS * head_dim, HIDDEN),
            prefix + "self_attn.o_proj.weight": values(HIDDEN, HEADS * head_dim),
            prefix + "mlp.gate_proj.weight": values(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": values(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": values(HIDDEN, INTERMEDIATE),
        }
    return weights


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(weights: dict[str, torch.Tensor], permuted: bool = True) -> dict[str, np.ndarray]:
    """Names and row order as GGUF files of the llama architecture have them."""
    tensors = {}
    for name, value in weights.items():
        array = value.numpy()
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else 0
        if permuted and heads:
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        for long, short in GGUF_NAMES.items():
            name = name.replace(long, short)
        tensors[name] = array
    return tensors


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> None:
    metadata = model_metadata() | tokenizer_metadata() if metadata is None else metadata
    tensors = gguf_tensors(hf_weights()) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        writer.add_tensor(name, array if kind is None else gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders.get(type(value), writer.add_array)(key, value)


def hf_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    } | changes


def byte_level_backend() -> Tokenizer:
    vocab = {string: i for i, string in enumerate(vocabulary())}
    backend = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in MERGES]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(USER_DEFINED)
    return backend


def write_folder(path: Path, shards: int = 1, dtype: torch.dtype = torch.float32, **config: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(**config)))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": "T"}))
    byte_level_backend().save(str(path / "tokenizer.json"))
    weights = {name: value.to(dtype) for name, value in hf_weights().items()}
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in weights if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
