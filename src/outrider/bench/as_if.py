"""A small model in the shape of a big one: the big one's cost, the small one's text.

Every tensor is widened so that the function stays the same. The residual stream is padded with zeros that
nothing writes to; norms are rescaled for the wider mean; each group of query heads is padded, and so are the
groups; layers are added that write nothing; the vocabulary is padded with ids that are cut off the logits.
What is read by a matmul and may hold anything is random, drawn on the device, the same for the same name.

It says what a big model costs to run. It says nothing of what a big model would write.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import InvalidRequest, UnsupportedModel, suggest
from outrider.load.config import ModelConfig
from outrider.model.decoder import Decoder

Read = Callable[[str], Tensor]
SPREAD = 0.02  # of the random parts: about what trained weights have


@dataclass(frozen=True, slots=True)
class Wide:
    """The shape to look like. Heads keep the small model's size."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 128_256
    tied: bool = False


SHAPES = {
    "1b": Wide(2048, 16, 32, 8, 8192, tied=True),
    "8b": Wide(4096, 32, 64, 16, 14_336),
    "70b": Wide(8192, 80, 128, 16, 28_672),
}


def shape_of(name: str) -> Wide:
    if name not in SHAPES:
        raise InvalidRequest(f"unknown shape {name!r}{suggest(name, SHAPES)}", "as_if")
    return SHAPES[name]


def spread_layers(count: int, wanted: int) -> tuple[int, ...]:
    """Which `wanted` of `count` layers to keep: the first and the last, and evenly between."""
    if wanted >= count:
        return tuple(range(count))
    return tuple(round(i * (count - 1) / (wanted - 1)) for i in range(wanted))


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
    that guesses well but not always right.
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
        windows = [config.windows[layer] for layer in self.kept]
        self.config = replace(
            config,
            hidden=wide.hidden,
            layers=wide.layers,
            heads=wide.heads,
            kv_heads=wide.kv_heads,
            intermediate=wide.intermediate,
            vocab=wide.vocab,
            tied=wide.tied,
            norm_eps=config.norm_eps * config.hidden / wide.hidden,
            windows=tuple(windows + [0] * (wide.layers - len(windows))),
        )

    def read(self, name: str) -> Tensor:
        if name == "model.embed_tokens.weight" or name == "lm_head.weight":
            return self._embedding(name)
        if name == "model.norm.weight":
            return self._norm(name, name)
        prefix, layer, part = _split(name)
        source = f"{prefix}{self.kept[layer]}.{part}" if layer < len(self.kept) else None
        if part.endswith("layernorm.weight"):
            return self._norm(name, source)
        if part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            return self._writer(part, source)
        return self._reader(name, part, source)

    def _embedding(self, name: str) -> Tensor:
        """Real ids fill the real part of the stream and nothing else. In a head of its own the pads are random."""
        small = self.small_read("model.embed_tokens.weight" if self.small.tied else name)
        shape = (self.config.vocab, self.config.hidden)
        head = name == "lm_head.weight"
        made = self._random(name, shape) if head else self._zeros(shape)
        made[: len(small), : self.small.hidden] = small.to(made)
        return made

    def _norm(self, name: str, source: str | None) -> Tensor:
        made = 1 + self._random(name, (self.config.hidden,))
        if source is not None:
            gain = math.sqrt(self.small.hidden / self.config.hidden)
            made[: self.small.hidden] = self.small_read(source).to(made) * gain
        return made

    def _reader(self, name: str, part: str, source: str | None) -> Tensor:
        """q, k, v, gate, up: they read the stream, whose pads are zero, so every pad may be random."""
        outputs = _outputs(self.config)[part]
        made = self._random(name, (outputs, self.config.hidden))
        if source is not None:
            small = self.small_read(source).to(made)
            made[self._places(part), : self.small.hidden] = small
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
    if config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm:
        raise UnsupportedModel("only models without biases and head norms can be widened")
    for name in ("hidden", "heads", "kv_heads", "intermediate", "vocab"):
        if getattr(wide, name) < getattr(config, name):
            raise InvalidRequest(
                f"the shape's {name} is smaller than the model's {getattr(config, name)}", "as_if"
            )
    if len(kept) > wide.layers:
        raise InvalidRequest(f"{len(kept)} layers do not fit into {wide.layers}; keep fewer", "as_if")
    if wide.heads // wide.kv_heads < config.heads // config.kv_heads:
        raise InvalidRequest("the shape's groups of query heads are narrower than the model's", "as_if")


class AsIf(Decoder):
    """A widened decoder whose logits end where the small model's vocabulary does."""

    def __init__(self, config: ModelConfig, read: Read, kernels: object, vocab: int) -> None:
        super().__init__(config, read, kernels)
        self.visible = vocab

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        made = super().logits(x, rows)[:, : self.visible]
        return made if made.is_cuda else made.contiguous()
