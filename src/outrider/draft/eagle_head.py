"""The EAGLE-3 head: its network on the CPU, and how a published one is read.

Entry i joins the target's hidden states at token i (three layers, fused by one matrix) with the embedding of token
i + 1 and predicts token i + 2. Its vocabulary may be a part of the target's: `d2t` maps its ids to the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.checkpoint import PICKLES, pickle_refused
from outrider.load.config import ModelConfig, config_from_json
from outrider.model.decoder import Decoder, Layered
from outrider.model.kernels.reference import rotate
from outrider.model.rope import rope_tables
from outrider.types import MAX_NODES, Batch

TAPS = 3

# Hidden states and rows where the head is, how many rows belong to one sequence, and how long sequences may be.
HeadPass = Callable[[Tensor, Batch, int, int], Tensor]


@dataclass(slots=True)
class HeadConfig:
    """The head's one layer, shaped like a layer of its family, and how it is tied to its target."""

    layer: ModelConfig
    draft_vocab: int
    taps: tuple[int, ...]  # target layers whose inputs it sees


class EagleHead:
    """The network. `read` yields the published layout's tensors: fc, midlayer.*, norm, lm_head, d2t."""

    def __init__(
        self, config: HeadConfig, read: Callable[[str], Tensor], target: Layered, context: int
    ) -> None:
        self.config, self.target = config, target
        self._pack(read, rope_tables(config.layer, context))
        # d2t holds differences: target id = draft id + d2t[draft id].
        self.to_target = (torch.arange(config.draft_vocab) + read("d2t").long()).to(target.device)

    def _pack(self, read: Callable[[str], Tensor], tables: tuple[Tensor, Tensor]) -> None:
        assert isinstance(self.target, Decoder)
        self.kernels = self.target.kernels
        self.cos, self.sin = tables
        pack = self.kernels.pack_linear
        self.fuse, self.qkv = pack(read("fc.weight")), pack(joined_qkv(read))
        self.out = pack(read("midlayer.self_attn.o_proj.weight"))
        self.gate, self.up = (
            pack(read("midlayer.mlp.gate_proj.weight")),
            pack(read("midlayer.mlp.up_proj.weight")),
        )
        self.down, self.head = pack(read("midlayer.mlp.down_proj.weight")), pack(read("lm_head.weight"))
        self.embed_norm = read("midlayer.input_layernorm.weight")
        self.hidden_norm = read("midlayer.hidden_norm.weight")
        self.mlp_norm = read("midlayer.post_attention_layernorm.weight")
        self.norm = read("norm.weight")

    def make_store(self, slots: int) -> KeyValueStore:
        """Where its keys and values go."""
        c, t = self.config.layer, self.target
        return KeyValueStore(1, slots, c.kv_heads, c.head_dim, t.device, t.dtype)

    def make_pass(self, store: KeyValueStore) -> HeadPass:
        """`forward` as a captured step has it: over rows that lie where the target does."""
        return lambda hidden, batch, *_: self.forward(hidden, batch, store)

    def fused(self, features: Tensor) -> Tensor:
        """[R, taps, hidden] of the target -> [R, hidden]."""
        return self.kernels.linear(self.fuse, features.flatten(1).contiguous())

    def forward(self, hidden: Tensor, batch: Batch, store: KeyValueStore) -> Tensor:
        """One layer over [R, hidden] and the embeddings of batch.ids -> the next hidden states, not yet
        normed. It may overwrite what it is given.
        """
        c, k = self.config.layer, self.kernels
        embedded = self.target.embed(batch.ids)
        both = torch.cat(
            [k.norm(embedded, self.embed_norm, c.norm_eps), k.norm(hidden, self.hidden_norm, c.norm_eps)],
            dim=1,
        )
        qkv = k.linear(self.qkv, both).view(len(hidden), -1, c.head_dim)
        q, key, value = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        cos, sin = self.cos[batch.positions][:, None], self.sin[batch.positions][:, None]
        store.keys[0][batch.slots], store.values[0][batch.slots] = rotate(key, cos, sin), value
        turned = rotate(q, cos, sin).contiguous()
        mixed = k.attention(turned, batch, store.keys[0], store.values[0], 0, c.head_dim**-0.5)
        hidden = hidden + k.linear(self.out, mixed.flatten(1))
        h = k.norm(hidden, self.mlp_norm, c.norm_eps)
        act = torch.nn.functional.silu(k.linear(self.gate, h)) * k.linear(self.up, h)
        return hidden + k.linear(self.down, act)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, target vocab], minus infinity for tokens the head does not know."""
        known = self._known(hidden)
        out = known.new_full((len(hidden), self.target.config.vocab), float("-inf"))
        out[:, self.to_target] = known
        return out

    def _known(self, hidden: Tensor) -> Tensor:
        """Logits over the head's own vocabulary."""
        normed = self.kernels.norm(hidden, self.norm, self.config.layer.norm_eps)
        return self.kernels.linear(self.head, normed)


def joined_qkv(read: Callable[[str], Tensor]) -> Tensor:
    """Queries, keys and values as one matrix; its inputs are twice the hidden size."""
    return torch.cat([read(f"midlayer.self_attn.{part}_proj.weight") for part in "qkv"])


def load_eagle(
    folder: Path, target: Layered, context: int, network: type[EagleHead] = EagleHead
) -> EagleHead:
    """A head from a folder with config.json and safetensors, in the published EAGLE-3 layout or our own."""
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as wrong:
        raise BadCheckpoint(f"{folder}: config.json cannot be read: {wrong}") from None
    if "speculators_model_type" in raw:
        raise UnsupportedModel(
            f"{folder} is a head in the layout of speculators ({raw['speculators_model_type']!r:.40}), which is not "
            "read here; EAGLE-3 heads as their authors publish them are"
        )
    c = target.config
    layer = config_from_json({**raw, "model_type": "llama", "num_hidden_layers": 1})
    draft_vocab = int(raw.get("draft_vocab_size") or layer.vocab)
    if layer.hidden != c.hidden or layer.vocab != c.vocab:
        raise BadCheckpoint(
            f"{folder} is a head for a target of hidden size {layer.hidden} and vocabulary {layer.vocab}; "
            f"this target has {c.hidden} and {c.vocab}"
        )
    taps = tuple(raw.get("outrider_taps") or eagle_taps(c.layers))
    if len(taps) != TAPS or not all(type(t) is int and 0 <= t < c.layers for t in taps):
        raise BadCheckpoint(
            f"{folder}: outrider_taps must name {TAPS} of the target's {c.layers} layers, not {taps}"
        )
    tensors = _tensors(folder)
    head = HeadConfig(replace(layer, rope=layer.rope), draft_vocab, taps)
    _check(folder, tensors, head)
    return network(head, lambda name: tensors[name].float(), target, context + MAX_NODES + 1)


def eagle_taps(layers: int) -> tuple[int, ...]:
    """Where published heads look: at what enters the third layer, the middle one, and the third from the
    end.
    """
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 - not a dict
        except SafetensorError as wrong:
            raise BadCheckpoint(f"{file} cannot be read: {wrong}") from None
    if not tensors:
        for file in sorted(folder.iterdir()):
            if file.suffix in PICKLES:
                raise pickle_refused(file)
        raise BadCheckpoint(f"{folder} holds no .safetensors file")
    # Other trainers write the one layer as layers.0 and leave d2t out where vocabularies are equal.
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if "d2t" not in tensors and "lm_head.weight" in tensors:
        tensors["d2t"] = torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.int64)
    return tensors


def _check(folder: Path, tensors: dict[str, Tensor], config: HeadConfig) -> None:
    c = config.layer
    q, kv, h = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden
    expected = {
        "fc.weight": (h, TAPS * h), "d2t": (config.draft_vocab,), "lm_head.weight": (config.draft_vocab, h),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h), "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h), "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (c.intermediate, h), "midlayer.mlp.up_proj.weight": (c.intermediate, h),
        "midlayer.mlp.down_proj.weight": (h, c.intermediate), "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,), "midlayer.post_attention_layernorm.weight": (h,), "norm.weight": (h,),
    }  # fmt: skip
    for name, shape in expected.items():
        if name not in tensors:
            raise BadCheckpoint(f"{folder} has no tensor {name!r}: not an EAGLE-3 head")
        if tuple(tensors[name].shape) != shape:
            raise BadCheckpoint(f"{folder}: {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    ids = torch.arange(config.draft_vocab) + tensors["d2t"].long()
    if bool((ids < 0).any()) or bool((ids >= c.vocab).any()):
        raise BadCheckpoint(f"{folder}: d2t points outside the target's vocabulary of {c.vocab}")
