"""The EAGLE head: its network on the CPU. load/heads.py reads it from disk.

Entry i joins the target's hidden states at token i (several layers, fused by one matrix) with the embedding of token
i + 1 and predicts token i + 2. Past the known tokens an entry joins the hidden state of the entry before it instead.
Its vocabulary may be a part of the target's: `d2t` maps its ids to the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import UnsupportedModel
from outrider.load.checkpoint import open_safetensors, weight_files
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.heads import EMBEDDING, HeadConfig, layer_prefix, read_head
from outrider.load.quants import Blocks
from outrider.model.decoder import Decoder, Layered, kernels_like
from outrider.model.kernels.native import NativeKernels
from outrider.model.kernels.native_eagle import NativeEagle
from outrider.model.rope import RopeTables, rope_tables
from outrider.model.weights import KERNEL_FORMATS, MATRICES, LayerTensors, kept_as
from outrider.types import MAX_NODES, Batch, Sequence

# Hidden states and rows where the head is, how many rows belong to one sequence, how long sequences may be, and whether
# rows branch.
HeadPass = Callable[[Tensor, Batch, int, int, bool], Tensor]
Read = Callable[[str], Tensor]
ReadHead = Callable[[Path, ModelConfig], tuple[HeadConfig, dict[str, Tensor]]]  # of a folder, for a target
# A head with the target's whole vocabulary drafts from the first third of it, unless more than a quarter of a text's
# last tokens are not in there. Of chat and code 3 and 8 % were not: 0.3 % fewer tokens a step at temperature 0, 1.1 %
# at 0.7, for a third of the time for logits (log/114). A quarter is only to tell other scripts, and was not varied.
FREQUENT, RARE, RECENT = 3, 4, 64
ROWS_COMPARED = 256  # of a head's embedding with its target's


class EagleHead:
    """The network. `read` yields tensors by the names of `load.heads.head_shapes`."""

    kind = "stored"  # the format of its matrices, where packing does not round
    _native: NativeEagle | None = None  # passes and drafts in one call each

    def __init__(self, config: HeadConfig, read: Read, target: Layered, context: int) -> None:
        self.config, self.target = config, target
        self.to_target: Tensor | None = None
        if not config.whole:  # d2t holds differences: target id = draft id + d2t[draft id]
            self.to_target = (torch.arange(config.draft_vocab) + read("d2t").long()).to(target.device)
        self._pack(read, rope_tables(config.layer, context))

    def _pack(self, read: Read, tables: RopeTables) -> None:
        assert isinstance(self.target, Decoder)
        self.kernels = kernels_like(self.target.kernels, self.config.layer, tables)
        # Beside a target in blocks, bfloat16 would cost half of a draft's time (log/089).
        self.kind = "bfloat16" if self.target.formats.keys().isdisjoint(KERNEL_FORMATS) else "int8"
        made = [
            kept_layer(layer_of(read, i, self.config.layer.specs[0]), self.kind)
            for i in range(self.config.layers)
        ]
        self.attn_norms = [layer.attn_norm.contiguous() for layer in made if layer.attn_norm is not None]
        self.layers: list[Any] = [self.kernels.pack_layer(layer) for layer in made]
        self._pack_ends(read)
        self._native = self._in_one_call()

    def _in_one_call(self) -> NativeEagle | None:
        """Where one rank has the whole target, on a CPU with the C kernels."""
        target, c = self.target, self.config
        assert isinstance(target, Decoder)
        if not isinstance(self.kernels, NativeKernels) or target.group.size > 1:
            return None
        words = target.head if self.head is None else self.head
        grouped = c.tap_norms or c.joint_norm
        norms = {"embed_norm": self.embed_norm, "first_norm": self.attn_norms[0], "norm": self.norm}
        return NativeEagle(
            self.kernels, self.layers,
            {"embedding": target.embedding, "fuse": self.fuse, "words": words}, {"ones": self.ones, **norms},
            self.to_target, taps=len(c.taps), together=len(self.ones) if grouped else 0,
            normed_residual=c.normed_residual, norm_output=c.norm_output, vocab=c.layer.vocab,
            embedding_scale=target.config.embedding_scale,
        )  # fmt: skip

    def _pack_ends(self, read: Read) -> None:
        """What is before the layers and after them."""
        pack, c, there = self.kernels.pack_linear, self.config, self.target.device
        fusion = folded_fusion(c, read)  # a product of weights, which bfloat16 would round again
        self.fuse = pack(self._rounded(fusion) if self.kind == "int8" else fusion)
        self.ones = torch.ones(c.layer.hidden * (len(c.taps) if c.joint_norm else 1), device=there)
        names = ("midlayer.input_layernorm.weight", "norm.weight")
        self.embed_norm, self.norm = (read(name).to(there).contiguous() for name in names)
        self.head = None  # the target's own
        if not c.shared_head:
            self.head = pack(self._rounded(read("lm_head.weight")))
        elif self.to_target is not None:
            self.head = pack(self._rounded(self.target.head_rows(self.to_target)))

    def _rounded(self, weight: Tensor) -> Tensor | Blocks:
        """As the head's matrices are kept."""
        return kept_as(weight, self.kind)

    @property
    def draft(self) -> Callable[..., Any] | None:
        """Makes drafts in one call; None: it cannot."""
        return None if self._native is None else self._native.draft

    def words_for(self, sequences: Seq[Sequence]) -> int:
        """How many of its words, from the first on, are drafted for these sequences. Tokens are numbered by
        how early they were merged, that is by how often they occur. A text in another language or script shows that it
        has others.
        """
        assert self._native is not None
        every = self._native.outputs
        few = every // FREQUENT
        if self.head is not None or self.to_target is not None:
            return every
        for sequence in sequences:
            recent = sequence.tokens[-RECENT:]
            if sum([token >= few for token in recent]) * RARE > len(recent):
                return every
        return few

    def make_store(self, slots: int) -> KeyValueStore:
        """Where its keys and values go."""
        shapes = self.config.layer.kv_shapes * self.config.layers
        return KeyValueStore(shapes, slots, self.target.device, self.target.dtype)

    def make_pass(self, store: KeyValueStore) -> HeadPass:
        """`forward` as a captured step has it: over rows that lie where the target does."""
        return lambda hidden, batch, *_: self.forward(hidden, batch, store)

    def fused(self, features: Tensor) -> Tensor:
        """[R, taps, hidden] of the target -> [R, hidden]."""
        if self.config.tap_norms or self.config.joint_norm:
            features = self._normed(features.reshape(-1, len(self.ones)).float(), self.ones).view_as(features)
        return self.kernels.linear(self.fuse, features.flatten(1).contiguous())

    def forward(self, hidden: Tensor, batch: Batch, store: KeyValueStore) -> Tensor:
        """All layers over [R, hidden] and the embeddings of batch.ids -> the next hidden states, as they are fed back.
        It may overwrite what it is given.
        """
        if self._native is not None:
            return self._native.forward(hidden, batch, store)
        embedded = self._normed(self.target.embed(batch.ids), self.embed_norm)
        normed = self._normed(hidden, self.attn_norms[0])
        inputs = torch.cat([embedded, normed], dim=1)
        x = (normed if self.config.normed_residual else hidden).clone()
        for i, layer in enumerate(self.layers):
            inputs = self._normed(x, self.attn_norms[i]) if i else inputs
            self.kernels.layer_from(layer, inputs, x, batch, store.keys[i], store.values[i])
        return self._normed(x, self.norm) if self.config.norm_output else x

    def read(self, features: Tensor, slots: NDArray[np.int32], batch: Batch, store: KeyValueStore) -> Tensor:
        """`forward` of known tokens, from the target's hidden states before them, which lie in these slots."""
        if self._native is not None:
            return self._native.read(features, slots, batch, store)
        at = torch.from_numpy(slots.astype(np.int64)).to(features.device)
        return self.forward(self.fused(features[at]), batch, store)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] as `forward` returns them -> [R, target vocab], minus infinity for tokens the head does not
        know.
        """
        normed = hidden if self.config.norm_output else self._normed(hidden, self.norm)
        known: Tensor = (
            self.target.project(normed) if self.head is None else self.kernels.linear(self.head, normed)
        )
        if self.to_target is None:
            return known
        out = known.new_full((len(hidden), self.config.layer.vocab), float("-inf"))
        return out.scatter_(1, self.to_target.expand(len(hidden), -1), known)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self.kernels.norm(x, weight, self.config.layer.norm_eps)
        return normed


def folded_fusion(config: HeadConfig, read: Read) -> Tensor:
    """The fusion's matrix with the weights of the norms before it, so that those need only scale."""
    fusion = read("fc.weight")
    if config.tap_norms:
        return fusion * read("tap_norms.weight").flatten()
    return fusion * read("input_norm.weight") if config.joint_norm else fusion


def kept_layer(layer: LayerTensors, kind: str) -> LayerTensors:
    """The layer with its matrices in the format `kind`."""
    kept: dict[str, Any] = {name: kept_as(getattr(layer, name), kind) for name in MATRICES}
    return replace(layer, **kept)


def layer_of(read: Read, number: int, spec: LayerSpec) -> LayerTensors:
    """A layer of the head. The first reads twice the hidden size, its embedding normed by a norm of its own."""
    prefix = layer_prefix(number)

    def get(name: str) -> Tensor:
        return read(f"{prefix}{name}.weight")

    return LayerTensors(
        attn_norm=get("input_layernorm" if number else "hidden_norm"),
        qkv=torch.cat([get(f"self_attn.{part}_proj") for part in "qkv"]),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        out=get("self_attn.o_proj"),
        out_bias=None,
        mlp_norm=get("post_attention_layernorm"),
        gate=get("mlp.gate_proj"),
        up=get("mlp.up_proj"),
        gate_bias=None,
        up_bias=None,
        down=get("mlp.down_proj"),
        down_bias=None,
        spec=spec,
    )


def load_eagle(
    folder: Path,
    target: Layered,
    context: int,
    network: type[EagleHead] = EagleHead,
    read: ReadHead = read_head,
) -> EagleHead:
    """A head from a folder in any of the layouts, or as `read` makes it of them."""
    config, tensors = read(folder, target.config)
    _check_embedding(folder, target)
    return network(config, lambda name: tensors[name].float(), target, context + MAX_NODES + 1)


def _check_embedding(folder: Path, target: Layered) -> None:
    """Heads are often published with a copy of the target's embedding. One of its own would be another head."""
    for shard in weight_files(folder):
        opened = open_safetensors(folder / shard)
        if EMBEDDING not in opened.keys():  # noqa: SIM118 - not a dict
            continue
        theirs = opened.get_slice(EMBEDDING)[:ROWS_COMPARED].float()
        ours = target.embed(torch.arange(len(theirs))).float().cpu()[:, : theirs.shape[1]]
        # As far apart as a target in few bits may be, not more.
        if theirs.shape != ours.shape or float((theirs - ours).norm()) > 0.25 * float(ours.norm()):
            raise UnsupportedModel(
                f"{folder} has an embedding of its own, which is not this target's: it is a head for another "
                "model, or of a kind that is not supported"
            )
