"""A small decoder of the target's family in torch with gradients, and how it is saved: as any other model.

It has the target's tokenizer and its own tied embedding. If no shape is given, `lm_shape` finds one of
the size asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.distill.head_net import Read
from outrider.distill.layers import SPREAD, Layer, RmsNorm, Turns, plain_of
from outrider.errors import InvalidRequest
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.tokenizer import Tokenizer

HEAD_DIM = 32  # what the kernels like: a multiple of 16
LAYERS = (4, 8)  # what a shape found by size has: wide first, then deep
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip


class _Stack(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=SPREAD)
        self.layers = nn.ModuleList(Layer(config) for _ in config.specs)
        self.norm = RmsNorm((config.hidden,), config.norm_eps)


class LmNet(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.model, self.turns = config, _Stack(config), Turns(config)

    @property
    def head(self) -> Tensor:
        return self.model.embed_tokens.weight

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, T] -> normed hidden states [B, T, hidden], with matmuls in `dtype`; those at i speak of token i + 1."""
        turn = self.turns.of(ids.shape[1], ids.device)
        hidden = self.model.embed_tokens(ids)
        for layer in cast(Sequence[Layer], self.model.layers):
            hidden = layer(hidden, layer.packed(dtype), turn, [])
        out: Tensor = self.model.norm(hidden)
        return out


@torch.no_grad()
def start_lm(net: LmNet, read: Read) -> None:
    """Words that are alike to the target begin alike: its embedding, in the directions in which it differs most."""
    theirs = read("model.embed_tokens.weight").float()
    if theirs.shape[1] < net.config.hidden:
        return
    centred = theirs - theirs.mean(0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, : net.config.hidden]
    start = centred @ directions
    net.model.embed_tokens.weight.copy_(start * (SPREAD / start.std()))


def lm_shape(
    target: ModelConfig,
    size: float,
    hidden: int = 0,
    layers: int = 0,
    heads: int = 0,
    kv_heads: int = 0,
    intermediate: int = 0,
) -> ModelConfig:
    """A decoder with about `size` of the target's parameters; what is given is kept. It is of the target's family, or a
    Llama where that family differs by more than biases and head norms.
    """
    alike = target.family if target.family in ARCHITECTURES else "llama"
    chosen = plain_of(target, family=alike, tied=True)
    bias, norm = alike == "qwen2", "head" if alike == "qwen3" else ""

    def shape(width: int, depth: int) -> ModelConfig:
        count = heads or max(1, width // HEAD_DIM)
        shared = kv_heads or (count // 2 if count % 2 == 0 else count if count < 3 else 1)
        inner = intermediate or -(-8 * width // 3 // 32) * 32
        spec = LayerSpec(count, shared, HEAD_DIM, inner, chosen.rope, qkv_bias=bias, qk_norm=norm)
        return replace(chosen, hidden=width, specs=(spec,) * depth)

    budget = size * target.parameters
    widths = [hidden] if hidden else range(HEAD_DIM, target.hidden + 1, HEAD_DIM)
    fit = [w for w in widths if hidden or shape(w, layers or LAYERS[0]).parameters <= budget]
    if not fit:
        least = shape(HEAD_DIM, layers or LAYERS[0]).parameters / target.parameters
        raise InvalidRequest(
            f"size {size:g} is too small for this target's vocabulary of {target.vocab}: at least {least:.3f}",
            "size",
        )
    depths = [layers] if layers else range(LAYERS[0], LAYERS[1] + 1)
    return [
        made for d in depths if (made := shape(fit[-1], d)).parameters <= budget or d == depths[0]
    ][-1]  # fmt: skip


def lm_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of such a decoder."""
    c = config
    rope: dict[str, Any] = {"rope_theta": c.rope.theta}
    if c.rope.kind != "default":
        rope["rope_scaling"] = {"rope_type": c.rope.kind, **c.rope.scaling}
    return {
        "architectures": [ARCHITECTURES[c.family]], "model_type": c.family, "hidden_act": "silu",
        "vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
        "intermediate_size": c.intermediate, "max_position_embeddings": c.context, "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": True, "bos_token_id": c.bos_id, "eos_token_id": list(c.eos_ids),
        "attention_bias": c.specs[0].qkv_bias, "torch_dtype": "bfloat16", "use_sliding_window": False, **rope,
    }  # fmt: skip


def save_lm(folder: Path, net: LmNet, tokenizer: Tokenizer, chat_template: str | None) -> None:
    """In the Hugging Face layout, bf16, with the target's tokenizer, whatever file that came from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(lm_json(net.config), indent=2) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    special: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.bos_id is not None:
        special["bos_token"] = tokenizer.token_string(tokenizer.bos_id)
    if tokenizer.eos_ids:
        special["eos_token"] = tokenizer.token_string(tokenizer.eos_ids[0])
    if tokenizer.add_bos is not None:
        special["add_bos_token"] = tokenizer.add_bos
    if chat_template is not None:
        special["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in net.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
