"""`eagle`: an EAGLE-3 head guesses from what the target was thinking.

Entry i of the head joins the target's hidden states at token i (three layers, fused by one matrix) with the
embedding of token i + 1 and predicts token i + 2. Past the known text it feeds on its own hidden state
instead, so a guess of depth d takes d passes of one layer. Its vocabulary may be a part of the target's:
`d2t` maps its ids to the target's.

The target keeps its hidden states slot by slot beside keys and values, so they survive prefix reuse,
preemption and pauses; the head has its own cache of entries made from true hidden states and reads what it
missed when asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.feed import Fed, feed_nodes, text_batch
from outrider.draft.own import OwnCache, State
from outrider.draft.tree import Growth, Place, grow
from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.checkpoint import PICKLES, pickle_refused
from outrider.load.config import ModelConfig, config_from_json
from outrider.model.decoder import Decoder, Layered
from outrider.model.kernels.reference import rotate
from outrider.model.rope import rope_tables
from outrider.types import MAX_NODES, NO_DRAFT, Batch, Bet, Draft, Sequence, Verdict

TAPS = 3
READ_ROWS = 512  # of a text that the head catches up with, in one pass
ROW_FIELDS = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors")


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


class EagleDrafter:
    def __init__(
        self, head: EagleHead, target_store: KeyValueStore, target_table: SlotTable, slots: int, context: int
    ) -> None:
        c = head.config.layer
        self.head, self.target_store, self.target_table = head, target_store, target_table
        self.context = context
        target_store.tap(head.config.taps, c.hidden)
        self.store = head.make_store(slots)
        self.own = OwnCache(slots, len(target_table.lengths), context + MAX_NODES)
        self.table, self.states = self.own.table, self.own.states

    def start(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        able = [i for i, s in enumerate(sequences) if len(s.tokens) > 1 and len(s.tokens) - s.cached == 1]
        drafts = [NO_DRAFT] * len(sequences)
        if not able:
            return drafts
        some = [sequences[i] for i in able]
        try:
            states = self.own.ask(some)
            hidden = self._catch_up(some, states)
            feds = [Fed(state.row, state.valid) for state in states]
            kept: dict[Place, Tensor] = {(i, -1): row for i, row in enumerate(hidden)}
            growths = grow(
                some, [bets[i] for i in able], self.head.logits(hidden).cpu(),
                lambda g, places: self._expand(some, feds, kept, g, places),
            )  # fmt: skip
        except CacheFull:  # too many long texts for the head's cache: no guess is better than a wrong one
            return drafts
        finally:  # entries made from the head's own states were for guessing only
            for state in map(self.states.get, some):
                if state is not None:
                    self.table.commit(state.row, state.valid)
        for i, growth in zip(able, growths, strict=True):
            drafts[i] = growth.harvest()[0]
        return drafts

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        pass

    def stop(self, sequence: Sequence) -> None:
        self.own.stop(sequence)

    def _catch_up(self, sequences: Seq[Sequence], states: Seq[State]) -> Tensor:
        """Make the entries the texts have gained; the head's hidden state at the last of each.

        The text of n tokens has n - 1 entries: the last token's own hidden states do not exist yet. The
        last entry is always made anew, as it is where the guess starts.
        """
        texts, starts, slots = [], [], []
        for s, state in zip(sequences, states, strict=True):
            entries = len(s.tokens) - 1
            state.valid = min(state.valid, entries - 1)
            self.table.commit(state.row, state.valid)
            self.own.extend(state.row, entries - state.valid, sequences)
            texts.append(s.tokens[state.valid + 1 :])
            starts.append(state.valid)
            slots.append(torch.from_numpy(self.target_table.entries[s.row, state.valid : entries]))
        batch = text_batch(self.table, [state.row for state in states], texts, starts)
        hidden = self._read(batch, torch.cat(slots))[batch.logit_rows]
        # Not before: there may have been no room for all.
        for s, state in zip(sequences, states, strict=True):
            state.valid = len(s.tokens) - 1
        return hidden

    def _read(self, batch: Batch, slots: Tensor) -> Tensor:
        """The head over known tokens, so many rows at a time; `slots` hold the hidden states before each."""
        features = self.target_store.features
        assert features is not None
        made = []
        for first in range(0, batch.rows, READ_ROWS):
            rows = slice(first, first + READ_ROWS)
            part = replace(
                batch,
                **{name: getattr(batch, name)[rows] for name in ROW_FIELDS},
                logit_rows=batch.logit_rows[:0],
            )
            fused = self.head.fused(features[slots[rows].to(features.device)])
            made.append(self.head.forward(fused, part, self.store))
        return torch.cat(made)

    def _expand(
        self,
        sequences: Seq[Sequence],
        feds: list[Fed],
        kept: dict[Place, Tensor],
        growths: list[Growth],
        places: list[Place],
    ) -> Tensor:
        batch = feed_nodes(self.table, lambda row: self.own.extend(row, 1, sequences), feds, growths, places)
        parents = torch.stack([kept[i, growths[i].parents[node]] for i, node in places])
        hidden = self.head.forward(parents, batch, self.store)
        kept.update(zip(places, hidden, strict=True))
        return self.head.logits(hidden).cpu()


def load_eagle(folder: Path, target: Layered, context: int) -> EagleHead:
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
    kind = EagleHead if isinstance(target, Decoder) else _device_head()
    return kind(head, lambda name: tensors[name].float(), target, context + MAX_NODES + 1)


def _device_head() -> type[EagleHead]:
    from outrider.draft.eagle_device import DeviceHead  # Triton comes with it

    return DeviceHead


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
