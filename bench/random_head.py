"""Writes an EAGLE-3 head with random weights for a model: it guesses nonsense, and nonsense must change
nothing.

    python bench/random_head.py smollm2-135m FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder


def main() -> None:
    config = open_checkpoint(find(sys.argv[1], cache_folder())).config
    folder = Path(sys.argv[2])
    if config is None:
        raise SystemExit("only families the decoder knows have heads")
    h, i, q, kv = (
        config.hidden,
        config.intermediate,
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    )
    vocab = config.vocab // 4
    shapes = {
        "fc.weight": (h, 3 * h), "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h), "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q), "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h), "midlayer.mlp.down_proj.weight": (h, i), "lm_head.weight": (vocab, h),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) / s[1] ** 0.5 for n, s in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(h)
    tensors["norm.weight"] = torch.ones(h)
    tensors["d2t"] = torch.arange(vocab) * 3  # draft id d stands for target id 4 d
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": config.vocab,
        "draft_vocab_size": vocab, "hidden_size": h, "intermediate_size": i, "num_hidden_layers": 1,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps, "rope_theta": config.rope.theta, "max_position_embeddings": config.context,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
