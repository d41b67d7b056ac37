"""Tensors of a small model in the shape of a big one, which compute the same.

Every tensor is widened so that the function stays the same. The residual stream is padded with zeros that
nothing writes to; norms are rescaled for the wider mean; each group of query heads is padded, and so are the
groups; layers are added that write nothing. What is read by a matmul and may hold anything is random, drawn
on the device, the same for the same name.

In the shape of a mixture of experts an MLP is cut into a few experts, of which there are several copies. A router of
random numbers has the same ones for the experts of a copy. So a row chooses whole copies, by its hidden state, and gets
what the MLP gives whichever it chooses.

The vocabulary is padded too, and the ids that do not exist must never be chosen, by any engine that loads
these tensors. So the first pad of the stream holds a tiny constant, which only the last norm lets through:
there it reads 1 / rms of the stream, and the head's rows of the padded ids turn that into a logit far below
all others. The constant's square is lost in the rounding of every norm.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidRequest, UnsupportedModel, suggest
from outrider.load.config import Experts, ModelConfig
from outrider.load.weight_map import ROUTER

Read = Callable[[str], Tensor]
VOCAB = 128_256  # of Llama 3
SPREAD = 0.02  # of the random parts: about what trained weights have
# Powers of two, exact in every format. Their product with 1 / rms of the last stream (1/8 to 1/80 for SmolLM2) is
# the logit of an id that does not exist: -13,000 or less.
CONSTANT, LIFT, DROP = 2.0**-14, 2.0**14, 2.0**20


@dataclass(frozen=True, slots=True)
class Wide:
    """The shape to look like. Heads keep the small model's size."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int  # of each expert, if it has experts
    vocab: int = VOCAB
    tied: bool = False
    experts: int = 0  # of a layer
    per_token: int = 0

    @property
    def dense(self) -> Wide:
        """Without experts: its MLP is as wide as all experts of a row together."""
        wide = self.intermediate * max(self.per_token, 1)
        return replace(self, intermediate=wide, experts=0, per_token=0)


SHAPES = {
    "1b": Wide(2048, 16, 32, 8, 8192, tied=True),
    "8b": Wide(4096, 32, 64, 16, 14_336),
    "70b": Wide(8192, 80, 128, 16, 28_672),
    "30b-a3b": Wide(2048, 48, 64, 8, 768, 151_936, experts=128, per_token=8),
}
FORM = "hidden:layers:heads:kv_heads:intermediate[:vocab][:EXPERTSxPER_TOKEN], such as 640:30:12:3:384:49408:16x8"


def shape_of(name: str) -> Wide:
    """A known shape, or numbers: hidden:layers:heads:kv_heads:intermediate, the vocabulary if it is another than Llama
    3's, and the experts of a layer and of a row (128x8) if it has any; the head is then tied to the embedding.
    """
    if name in SHAPES:
        return SHAPES[name]
    *parts, last = name.split(":")
    count, cross, chosen = last.partition("x")
    if not cross:
        parts, count, chosen = [*parts, last], "", ""
    numbers, experts = ([_number(part) for part in some] for some in (parts, (count, chosen)))
    if len(numbers) not in (5, 6) or not all(numbers) or (cross and not all(experts)):
        raise InvalidRequest(f"unknown shape {name!r}{suggest(name, SHAPES)}; or write {FORM}", "as_if")
    hidden, layers, heads, kv_heads, intermediate, *vocab = numbers
    size = vocab[0] if vocab else VOCAB
    return Wide(hidden, layers, heads, kv_heads, intermediate, size, True, *experts)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def spread_layers(count: int, wanted: int) -> tuple[int, ...]:
    """Which `wanted` of `count` layers to keep: the first and the last, and evenly between."""
    if wanted >= count:
        return tuple(range(count))
    if wanted < 2:
        raise InvalidRequest(f"a draft needs at least 2 layers, not {wanted}", "draft_layers")
    return tuple(round(i * (count - 1) / (wanted - 1)) for i in range(wanted))


def named_layers(count: int, wanted: str) -> tuple[int, ...]:
    """Layers by their number ("28": that number of them, evenly spread) or by name ("0-3,5-16,18-29")."""
    if wanted.isdecimal():
        return spread_layers(count, int(wanted))
    kept: list[int] = []
    for part in wanted.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            raise InvalidRequest(f"layers are a number or ranges like 0-3,5: not {wanted!r}", "draft_layers")
        kept += range(int(first), int(last) + 1)
    if len(kept) < 2 or kept != sorted(set(kept)) or kept[-1] >= count:
        raise InvalidRequest(
            f"{wanted!r} is not two or more of {count} layers, each once, in order", "draft_layers"
        )
    return tuple(kept)


def widen(
    config: ModelConfig,
    read: Read,
    wide: Wide,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    kept: Sequence[int] | None = None,
) -> tuple[ModelConfig, Read]:
    """The config and the tensors of `config`'s model in the shape `wide`.

    `kept` names the layers of the model that are used, all of them by default; leaving some out makes a draft
    whose drafts are often, not always, accepted.
    """
    made = Widened(config, read, wide, torch.device(device), dtype, kept)
    return made.config, made.read


class Widened:
    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        wide: Wide,
        device: torch.device,
        dtype: torch.dtype,
        kept: Sequence[int] | None,
    ) -> None:
        self.kept = tuple(range(config.layers)) if kept is None else tuple(kept)
        _check(config, wide, self.kept)
        self.small, self.small_read, self.device, self.dtype = config, read, device, dtype
        self.share = _copy_of(config, wide)
        self._whole = lru_cache(3)(read)  # of an MLP: each of its experts has a part
        self.silences = wide.vocab > config.vocab  # the place of the constant is the first pad of the stream
        specs = [config.specs[layer] for layer in self.kept]
        specs += [replace(specs[0], window=0)] * (wide.layers - len(specs))
        made = replace(
            config,
            hidden=wide.hidden,
            specs=tuple(specs),
            vocab=wide.vocab,
            tied=wide.tied,
            norm_eps=config.norm_eps * config.hidden / wide.hidden,
        )
        sizes: dict[str, Any] = {
            "heads": wide.heads, "kv_heads": wide.kv_heads, "intermediate": wide.intermediate
        }  # fmt: skip
        if wide.experts:
            made = replace(made, family="mixtral")
            experts = Experts(wide.experts, wide.per_token, wide.intermediate)
            sizes |= {"intermediate": 0, "experts": experts}
        self.config = made.reshaped(**sizes)

    def read(self, name: str) -> Tensor:
        if name == "model.embed_tokens.weight" or name == "lm_head.weight":
            return self._embedding(name)
        if name == "model.norm.weight":
            return self._norm(name, name)
        prefix, layer, part = _split(name)
        source = f"{prefix}{self.kept[layer]}.{part}" if layer < len(self.kept) else None
        if part.endswith("layernorm.weight"):
            return self._norm(name, source)
        if part == f"{ROUTER}.weight":
            rows = self._random(name, (self._experts.count // self.share, self.config.hidden))
            return rows.repeat_interleave(self.share, 0)
        if part.startswith("mlp.experts."):
            return self._expert(name, part.removeprefix("mlp.experts."), source)
        if part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            return self._writer(part, source)
        return self._reader(name, part, source)

    def _embedding(self, name: str) -> Tensor:
        """Real ids fill the real part of the stream, and the constant. In a head of its own the pads are random."""
        small = self.small_read("model.embed_tokens.weight" if self.small.tied else name)
        shape = (self.config.vocab, self.config.hidden)
        head = name == "lm_head.weight"
        made = self._random(name, shape) if head else self._zeros(shape)
        made[: len(small), : self.small.hidden] = small.to(made)
        if self.silences:
            # Tied, it lifts all real ids alike.
            made[: len(small), self.small.hidden] = 0 if head else CONSTANT
            made[len(small) :, self.small.hidden] = -DROP if head or self.config.tied else 0
        return made

    def _norm(self, name: str, source: str | None) -> Tensor:
        return self._widened_norm(name, None if source is None else self.small_read(source))

    def _widened_norm(self, name: str, small: Tensor | None) -> Tensor:
        made = 1 + self._random(name, (self.config.hidden,))
        if small is not None:
            gain = math.sqrt(self.small.hidden / self.config.hidden)
            made[: self.small.hidden] = small.to(made) * gain
        if self.silences:
            made[self.small.hidden] = LIFT if name == "model.norm.weight" else 0
        return made

    def _reader(self, name: str, part: str, source: str | None, streams: int = 1) -> Tensor:
        """q, k, v, gate, up: they read the stream, whose pads are zero, so every pad may be random. A head's first
        layer reads two streams.
        """
        outputs, hidden = _outputs(self.config)[part], self.config.hidden
        made = self._random(name, (outputs, streams * hidden))
        if source is not None:
            small = self.small_read(source).to(made).unflatten(1, (streams, -1))
            made.view(outputs, streams, hidden)[self._places(part), :, : self.small.hidden] = small
        return made

    def _writer(self, part: str, source: str | None) -> Tensor:
        """o and down: they write the stream, so only what the small model writes may be there."""
        inputs = self.config.heads * self.config.head_dim if "o_proj" in part else self.config.intermediate
        made = self._zeros((self.config.hidden, inputs))
        if source is not None:
            small = self.small_read(source).to(made)
            if "o_proj" in part:
                made[: self.small.hidden, self._places("self_attn.q_proj.weight")] = small
            else:
                made[: self.small.hidden, : small.shape[1]] = small
        return made

    @property
    def _experts(self) -> Experts:
        experts = self.config.specs[0].experts
        assert experts is not None
        return experts

    def _expert(self, name: str, part: str, source: str | None) -> Tensor:
        """Its part of the small model's MLP. `down` is as many times as large as a copy has experts."""
        number, _, matrix = part.partition(".")
        width, hidden, down = self._experts.width, self.config.hidden, matrix.startswith("down")
        made = self._zeros((hidden, width)) if down else self._random(name, (width, hidden))
        if source is not None:
            first = int(number) % self.share * width
            whole = self._whole(source.replace(f"experts.{number}.", ""))
            own = (whole[:, first : first + width] if down else whole[first : first + width]).to(made)
            made[: own.shape[0], : own.shape[1]] = self.share * own if down else own
        return made

    def _places(self, part: str) -> Tensor:
        """Where the small model's outputs of a matrix go: query heads stay with their group."""
        if "q_proj" not in part:
            return torch.arange(_outputs(self.small)[part], device=self.device)
        small, dim = self.small, self.small.head_dim
        group, wide_group = small.heads // small.kv_heads, self.config.heads // self.config.kv_heads
        heads = torch.arange(small.heads, device=self.device)
        places = heads // group * wide_group + heads % group
        return (places[:, None] * dim + torch.arange(dim, device=self.device)).flatten()

    def _random(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        made = torch.empty(shape, device=self.device, dtype=self.dtype)
        return made.normal_(0.0, SPREAD, generator=generator)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=self.dtype)


def _copy_of(config: ModelConfig, wide: Wide) -> int:
    """How many experts of this shape hold the model's MLP."""
    share = -(-config.intermediate // wide.intermediate) if wide.experts else 1
    if wide.experts % share or wide.per_token % share or wide.per_token > wide.experts:
        raise InvalidRequest(
            f"{share} experts of {wide.intermediate} hold this model's MLP of {config.intermediate}: the experts of a "
            f"layer ({wide.experts}) and of a row ({wide.per_token}) must be multiples of that",
            "as_if",
        )
    return share


def _outputs(config: ModelConfig) -> dict[str, int]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": kv,
        "self_attn.v_proj.weight": kv,
        "mlp.gate_proj.weight": config.intermediate,
        "mlp.up_proj.weight": config.intermediate,
    }


def _split(name: str) -> tuple[str, int, str]:
    """`model.layers.7.mlp.up_proj.weight` -> its prefix, 7, and the rest."""
    prefix = "model.layers."
    number, _, part = name.removeprefix(prefix).partition(".")
    return prefix, int(number), part


def _check(config: ModelConfig, wide: Wide, kept: tuple[int, ...]) -> None:
    odd = any(s.qkv_bias or s.out_bias or s.mlp_bias or s.qk_norm for s in config.specs)
    if odd or not config.plain:
        raise UnsupportedModel(
            f"only a Llama without biases and head norms can be widened, not this {config.family} model"
        )
    if wide.tied and not config.tied:
        raise UnsupportedModel("the shape ties its head to its embedding; this model does not")
    for name in ("hidden", "heads", "kv_heads", "intermediate", "vocab"):
        cut = name == "intermediate" and wide.experts  # into experts
        if not cut and getattr(wide, name) < getattr(config, name):
            raise InvalidRequest(
                f"the shape's {name} is smaller than the model's {getattr(config, name)}", "as_if"
            )
    if wide.vocab > config.vocab and wide.hidden == config.hidden:
        raise InvalidRequest(f"the shape's hidden must be larger than the model's {config.hidden}", "as_if")
    if len(kept) > wide.layers:
        raise InvalidRequest(f"{len(kept)} layers do not fit into {wide.layers}; keep fewer", "as_if")
    if wide.heads % wide.kv_heads or wide.heads // wide.kv_heads < config.heads // config.kv_heads:
        raise InvalidRequest(
            "the shape's groups of query heads are narrower than the model's, or not whole", "as_if"
        )
