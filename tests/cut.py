"""A dense model cut into experts: each has a share of the MLP, and all together give what the MLP gives.

Of `count` experts a row chooses all, each with the weight 1 / count, and `down` is as many times as large. With a
router of random numbers and fewer experts a row, the model has the costs of a mixture, and writes nonsense.

With a `share`, so many experts are a whole MLP, and there are several copies of it. The router has the same numbers for
the experts of a copy, so a row chooses whole copies: whichever it chooses, the model writes what the dense one does.
Random numbers choose by the hidden states of a real text, so neighbouring tokens choose alike.
`python -m tests.cut MODEL FOLDER --experts 16 --per-token 4 --share 4 --router 0.02` writes one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.config import Experts, ModelConfig
from outrider.load.find import find
from outrider.load.weight_map import ROUTER, expected_shapes
from outrider.settings import cache_folder


def cut_config(config: ModelConfig, count: int, per_token: int, share: int = 0) -> ModelConfig:
    """`share`: experts of a copy of the MLP; 0: there is one copy."""
    experts = Experts(count, per_token, config.intermediate // (share or count))
    return replace(config, family="mixtral").reshaped(intermediate=0, experts=experts)


def cut_reader(
    source: Checkpoint, count: int, router: float = 0.0, share: int = 0
) -> Callable[[str], Tensor]:
    """`router`: the size of its random numbers."""
    assert source.config is not None
    share = share or count
    hidden, width, each = (
        source.config.hidden,
        source.config.intermediate // share,
        1 if share == count else share,
    )
    generator, whole_of = torch.Generator().manual_seed(0), lru_cache(3)(source.tensor)

    def read(name: str) -> Tensor:
        if f".{ROUTER}." in name:
            rows = router * torch.randn(count // each, hidden, generator=generator)
            return rows.repeat_interleave(each, 0)
        stem, found, rest = name.partition(".experts.")
        if not found:
            return source.tensor(name)
        number, _, matrix = rest.partition(".")
        whole = whole_of(f"{stem}.{matrix}")
        first = int(number) % share * width
        own = slice(first, first + width)
        return share * whole[:, own] if "down" in matrix else whole[own]

    return read


def stored_name(name: str) -> str:
    """As Mixtral's files call it."""
    stem, found, rest = name.partition(".mlp.experts.")
    if not found:
        return name
    number, matrix, kind = rest.split(".")
    theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[matrix]
    return f"{stem}.block_sparse_moe.experts.{number}.{theirs}.{kind}"


def write_cut(model: str, folder: Path, count: int, per_token: int, router: float, share: int = 0) -> None:
    source = open_checkpoint(find(model, cache_folder()))
    assert source.config is not None
    config = cut_config(source.config, count, per_token, share)
    write_tensors(source, config, cut_reader(source, count, router, share), folder)


def write_tensors(
    source: Checkpoint, config: ModelConfig, read: Callable[[str], Tensor], folder: Path
) -> None:
    """A folder in Mixtral's layout, with the tokenizer of the source."""
    c, e = config, config.specs[0].experts
    assert e is not None
    raw = {
        "model_type": "mixtral", "vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
        "intermediate_size": e.width, "num_local_experts": e.count, "num_experts_per_tok": e.per_token,
        "max_position_embeddings": c.context, "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope.theta, "tie_word_embeddings": c.tied, "eos_token_id": list(c.eos_ids),
        "bos_token_id": c.bos_id, "sliding_window": None,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(source.tokenizer.to_json())
    if source.chat_template:
        (folder / "chat_template.jinja").write_text(source.chat_template)
    tensors = {stored_name(name): read(name).clone() for name, _ in expected_shapes(config)}
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--router", type=float, default=0.0)
    parser.add_argument("--share", type=int, default=0)
    given = parser.parse_args()
    write_cut(given.model, given.folder, given.experts, given.per_token, given.router, given.share)
