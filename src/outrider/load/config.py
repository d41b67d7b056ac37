"""A model's shape, read from config.json or GGUF metadata into one frozen word. No weights here.

`FAMILIES` is the table of what distinguishes the families the one decoder serves; a family that is not in it
goes to model/hf.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import BadCheckpoint, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """What one decoder must know to be this family. `None` = the config says."""

    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windowed: bool = False  # honours `sliding_window`


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, out_bias=None, mlp_bias=None),  # SmolLM and SmolLM2 are Llama by shape
    "mistral": Family(windowed=True),
    "qwen2": Family(qkv_bias=True, windowed=True),
    "qwen3": Family(qkv_bias=None, out_bias=None, qk_norm=True, windowed=True),
}


MAX_LAYERS = 10_000  # checked before anything is made per layer; the deepest models have a few hundred
TRAINED = "original_max_position_embeddings"
# Kinds of rotary positions, and the numbers that each needs.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    "yarn": ("factor",),
}
ROPE_OPTIONS = (TRAINED, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is one of ROPE_KINDS; `scaling` holds its numbers."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {name: self.scaling[name] for name in ROPE_OPTIONS if self.scaling.get(name) is not None}
        needed = {name: self.scaling.get(name) for name in ROPE_KINDS[self.kind]}
        for name, value in {"theta": self.theta, **given, **needed}.items():
            sound = type(value) in (int, float) and (value == 0 or 1e-9 <= value <= 1e12)
            if not sound or (value == 0 and name in needed) or (name == "theta" and value <= 1):
                raise BadCheckpoint(
                    f"the model's rotary positions have {name} = {value!r:.60}, which cannot be right"
                )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    norm_eps: float
    rope: Rope
    tied: bool  # the head is the embedding
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # a layer's sliding window; 0 = it sees everything
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)  # config.json as it was, for model/hf.py

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= 1 << 28:
                raise BadCheckpoint(f"the model's config gives {name} = {value!r:.60}, which cannot be right")
        if len(self.windows) < self.layers or not all(type(w) is int and w >= 0 for w in self.windows):
            raise BadCheckpoint(f"the model's config does not give each of {self.layers} layers a window")
        if not 0 <= self.norm_eps < math.inf:
            raise BadCheckpoint(f"the model's config gives norm_eps = {self.norm_eps}, which cannot be right")
        if self.heads % self.kv_heads:
            raise BadCheckpoint(f"{self.heads} heads do not divide over {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise BadCheckpoint(f"rotary positions need an even head size, got {self.head_dim}")

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Numbers in the weight matrices; norms and biases are too few to count."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)


def is_known_family(raw: Mapping[str, Any]) -> bool:
    return str(raw.get("model_type")) in FAMILIES


def config_from_json(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From a Hugging Face config.json (and generation_config.json, which has the fuller list of end ids)."""
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModel(f"model_type {name!r:.60} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    try:
        hidden, heads, layers = raw["hidden_size"], raw["num_attention_heads"], raw["num_hidden_layers"]
        _check_layers(layers)
        attention_bias = bool(raw.get("attention_bias", False))
        return ModelConfig(
            family=name,
            vocab=raw["vocab_size"],
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            intermediate=raw["intermediate_size"],
            context=raw.get("max_position_embeddings", 2048),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope_from_json(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=attention_bias if family.out_bias is None else family.out_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            windows=_windows(raw, family, layers),
            eos_ids=end_ids(raw, generation),
            bos_id=raw.get("bos_token_id"),
            raw=raw,
        )
    except KeyError as missing:
        raise BadCheckpoint(f"config.json has no {missing.args[0]!r}") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError) as wrong:
        raise BadCheckpoint(f"config.json cannot be read: {wrong!s:.300}") from None


def _check_layers(layers: int) -> None:
    if not 0 < layers <= MAX_LAYERS:
        raise BadCheckpoint(f"the model's config gives layers = {layers!r:.60}, which cannot be right")


def end_ids(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids that end a text: config.json's and generation_config.json's together."""
    ids: list[int] = []
    for source in (raw, generation or {}):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int))


def _windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    window = raw.get("sliding_window") if family.windowed else None
    if not window or raw.get("use_sliding_window") is False:
        return (0,) * layers
    if kinds := raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if raw.get("model_type") in ("qwen2", "qwen3"):  # only the layers from max_window_layers on are windowed
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return (window,) * layers


def _rope_from_json(raw: Mapping[str, Any]) -> Rope:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope scaling {kind!r:.60} is not one of {', '.join(ROPE_KINDS)}")
    if raw.get("original_max_position_embeddings"):
        parameters.setdefault("original_max_position_embeddings", raw["original_max_position_embeddings"])
    return Rope(float(theta), kind, parameters)


GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Collection[str] = (), rope_factors: Sequence[float] | None = None
) -> ModelConfig:
    """From a GGUF file's metadata, and the names of its tensors where only they tell: biases and a tied head.

    `rope_factors` are the values of the tensor `rope_freqs.weight`, which is how llama3 scaling travels.
    """
    name = metadata.get("general.architecture")
    if name not in GGUF_FAMILIES:
        raise UnsupportedModel(f"GGUF architecture {name!r} is not one of {', '.join(GGUF_FAMILIES)}")
    entry = _GgufEntries(metadata, name)
    if entry.whole("expert_count", 0):
        raise UnsupportedModel(f"this {name} model is a mixture of experts, which is not supported")
    heads, hidden = entry.whole("attention.head_count"), entry.whole("embedding_length")
    kv_heads = entry.whole("attention.head_count_kv", heads)
    layers, context = entry.whole("block_count"), entry.whole("context_length")
    _check_layers(layers)
    head_dim = entry.whole("attention.key_length", hidden // heads if heads else 0)
    if entry.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("keys and values of different sizes are not supported")
    if entry.whole("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("rotary positions on a part of each head are not supported")
    return ModelConfig(
        family=name,
        vocab=entry.whole("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=entry.whole("feed_forward_length"),
        context=context,
        norm_eps=entry.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=_rope_from_gguf(entry, head_dim, rope_factors),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=FAMILIES[name].qk_norm,
        windows=_windows_from_gguf(entry, name, layers),
        eos_ids=gguf_end_ids(metadata),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        raw={key: value for key, value in metadata.items() if not isinstance(value, list)},
    )


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [metadata[key] for key in keys if type(metadata.get(key)) is int]
    return tuple(dict.fromkeys(ids))


class _GgufEntries:
    """Metadata of one architecture, by the part of the key after its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.prefix = architecture + "."

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(self.prefix + key, default)
        if type(value) is not int:
            raise BadCheckpoint(
                f"GGUF metadata {self.prefix + key!r} should be a whole number, not {value!r:.60}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(self.prefix + key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BadCheckpoint(f"GGUF metadata {self.prefix + key!r} should be a number, not {value!r:.60}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(self.prefix + key, default)
        if not isinstance(value, str):
            raise BadCheckpoint(f"GGUF metadata {self.prefix + key!r} should be a text, not {value!r:.60}")
        return value


def _windows_from_gguf(entry: _GgufEntries, name: str, layers: int) -> tuple[int, ...]:
    window = entry.whole("attention.sliding_window", 0)
    if window and name != "llama":
        raise UnsupportedModel(f"GGUF does not say which layers of a {name} model have its sliding window")
    return (window,) * layers


def _rope_from_gguf(entry: _GgufEntries, head_dim: int, factors: Sequence[float] | None) -> Rope:
    theta = entry.number("rope.freq_base", 10000.0)
    kind = entry.text("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise UnsupportedModel(f"rope scaling {kind!r} together with a rope_freqs.weight tensor")
        return Rope(theta, "llama3", _llama3_scaling(theta, head_dim, factors))
    if kind == "none":
        return Rope(theta)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not one of none, linear, yarn")
    scaling: dict[str, Any] = {"factor": entry.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = entry.whole("rope.scaling.original_context_length")
    return Rope(theta, kind, scaling)


def _llama3_scaling(theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, float]:
    """The numbers that made `rope_freqs.weight`. Every published Llama 3 has these but for `factor`."""
    scaling = {
        "factor": round(max(factors, default=1.0), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(theta, head_dim, scaling)
    if len(expected) != len(factors) or any(
        not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
    ):
        raise UnsupportedModel(
            "the factors in tensor 'rope_freqs.weight' are not those of llama3 rope scaling"
        )
    return scaling


def _llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, float]) -> list[float]:
    """By how much llama3 scaling divides each rotary frequency."""
    if theta <= 0:
        raise BadCheckpoint(f"the rotary base is {theta}")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(head_dim // 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (2 * i / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors
