"""A dense model cut into experts of which a row chooses a part, by a router that is trained for minutes.

Each layer in turn: its router learns to choose the experts that matter for the states that the layers before it leave,
and one least-squares fit moves the rows of `down` towards what the dense model would have after this layer. So
neighbouring tokens choose alike, as in a trained mixture, and the text stays readable.
`python -m tests.learned_cut MODEL FOLDER --texts answers.json`: texts as `python -m bench.replay --record` writes them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.config import ModelConfig
from outrider.load.find import find
from outrider.load.weight_map import ROUTER
from outrider.settings import cache_folder
from tests.cut import cut_config, cut_reader, write_tensors

STEPS, ROWS, RATE = 120, 512, 3e-3  # of a router's training
RIDGE = (
    0.3  # of the mean square of what `down` reads, so that texts that were not learned from are read as well
)


def as_in_transformers(source: Checkpoint, config: ModelConfig) -> Any:
    c = config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.layers,
            num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
            tie_word_embeddings=c.tied, max_position_embeddings=c.context,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        )
    )  # fmt: skip
    model.load_state_dict({name: source.tensor(name) for name in source.names()}, strict=False)
    return model.eval().requires_grad_(False)


def chosen(logits: Tensor, per_token: int) -> Tensor:
    """Weights of all experts [N, experts]; 0 of those that a row does not choose."""
    top = logits.topk(per_token, 1)
    return torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(1))


def learned_router(given: Tensor, parts: Tensor, wanted: Tensor, per_token: int) -> Tensor:
    """`parts` [N, experts, hidden]: what each expert gives. Near to what is wanted, and choosing the largest parts."""
    router = torch.zeros(parts.shape[1], given.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([router], lr=RATE)
    for _ in range(STEPS):
        at = torch.randint(len(given), (ROWS,))
        logits = given[at] @ router.T
        made = per_token * (chosen(logits, per_token)[:, None] @ parts[at])[:, 0]
        size = parts[at].pow(2).sum(2)
        like = F.kl_div(logits.log_softmax(1), size / size.sum(1, keepdim=True), reduction="batchmean")
        loss = (made - wanted[at]).pow(2).sum(1).mean() + 0.1 * like
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return router.detach()


def learn(source: Checkpoint, texts: list[list[int]], count: int, per_token: int) -> dict[str, Tensor]:
    """The routers, and `down` of all experts side by side, by layer."""
    assert source.config is not None
    model, learned = as_in_transformers(source, source.config), dict[str, Tensor]()
    dense = [model.model.embed_tokens(torch.tensor([text])) for text in texts]
    cut, turns = list(dense), [model.model.rotary_emb(h, torch.arange(h.shape[1])[None]) for h in dense]

    def attended(layer: Any, states: list[Tensor]) -> list[Tensor]:
        pairs = zip(states, turns, strict=True)
        return [
            h + layer.self_attn(layer.input_layernorm(h), position_embeddings=t, attention_mask=None)[0]
            for h, t in pairs
        ]

    for index, layer in enumerate(model.model.layers):
        mlp, norm = layer.mlp, layer.post_attention_layernorm
        dense, cut = attended(layer, dense), attended(layer, cut)
        dense = [h + mlp(norm(h)) for h in dense]
        given = torch.cat([norm(h)[0] for h in cut])
        wanted = torch.cat([after[0] - h[0] for after, h in zip(dense, cut, strict=True)])
        # The first tokens of a text have states a thousand times as large: all rows count alike.
        even = wanted.norm(dim=1, keepdim=True).clamp(min=1e-6)
        wanted, inner = wanted / even, F.silu(mlp.gate_proj(given)) * mlp.up_proj(given) / even
        inner = inner.unflatten(1, (count, -1))
        down = mlp.down_proj.weight.unflatten(1, (count, -1)).permute(1, 2, 0)  # [experts, width, hidden]
        router = learned_router(given, torch.einsum("new,ewh->neh", inner, down), wanted, per_token)
        read = (chosen(given @ router.T, per_token)[:, :, None] * inner).flatten(1)
        first, squares = per_token * down.flatten(0, 1), read.T @ read
        squares += RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
        fitted = first + torch.linalg.solve(squares, read.T @ (wanted - read @ first))
        made = read @ fitted
        left, made = (made - wanted).pow(2).sum(1).mean(), even * made
        print(f"layer {index}: {float(left):.3f} of the square of the MLP is missing", flush=True)
        cut = [h + part[None] for h, part in zip(cut, made.split([h.shape[1] for h in cut]), strict=True)]
        learned |= {f"model.layers.{index}.{ROUTER}.weight": router, f"model.layers.{index}.down": fitted.T}
    return learned


def write_learned(model: str, folder: Path, texts: Path, count: int, per_token: int) -> None:
    source = open_checkpoint(find(model, cache_folder()))
    assert source.config is not None
    torch.manual_seed(0)
    some = [
        (one["prompt"] + one["answer"])[:256]
        for task in json.loads(texts.read_text()).values()
        for one in task
    ]
    config, learned = cut_config(source.config, count, per_token), learn(source, some, count, per_token)
    read, width = cut_reader(source, count), source.config.intermediate // count

    def learned_or_cut(name: str) -> Tensor:
        stem, found, rest = name.partition(".mlp.experts.")
        if found and "down_proj" in rest:
            first = int(rest.split(".")[0]) * width
            return learned[f"{stem}.down"][:, first : first + width]
        return learned[name] if name in learned else read(name)

    write_tensors(source, config, learned_or_cut, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=6)
    options = parser.parse_args()
    write_learned(options.model, options.folder, options.texts, options.experts, options.per_token)
