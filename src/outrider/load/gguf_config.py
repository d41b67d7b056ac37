"""A model's shape from a GGUF file's metadata, and from its tensors where only they tell."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.config import (
    CLAMPED,
    PARTIAL,
    QUERY_BETA,
    TRAINED,
    LayerSpec,
    ModelConfig,
    Rope,
    check_layers,
)
from outrider.load.families import FAMILIES, OPTIONAL_NORM

GGUF_FAMILIES = {family.gguf: name for name, family in reversed(FAMILIES.items()) if family.gguf}
Factors = Mapping[str, Sequence[float]]  # tensors of numbers for rotary positions, by their names
ROPE_FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, LONG, SHORT)
# Numbers of yarn by their keys, then fields of ModelConfig.
YARN = {
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
SCALES = {
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_divisor": "logit_scale",
}


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Collection[str] = (), factors: Factors | None = None
) -> ModelConfig:
    """From a GGUF file's metadata, and the names of its tensors where only they tell: biases and a tied head."""
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_FAMILIES:
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r} is not one of {', '.join(sorted(GGUF_FAMILIES))}"
        )
    entry = _GgufEntries(metadata, architecture)
    name = GGUF_FAMILIES[architecture]
    if architecture == "olmo2" and entry.whole("attention.sliding_window", 0):
        name = "olmo3"
    if architecture == "llama" and entry.whole("expert_count", 0):
        name = "mixtral"
    if entry.whole("expert_count", 0) and FAMILIES[name].routing is None:
        able = sorted(family.gguf for family in FAMILIES.values() if family.routing and family.gguf)
        raise UnsupportedModel(
            f"this {architecture} model has expert_count = {entry.whole('expert_count')}; architectures with experts: "
            + ", ".join(able)
        )
    hidden, layers = entry.whole("embedding_length"), entry.whole("block_count")
    layers -= extra_layers(metadata)
    check_layers(layers)
    family = FAMILIES[name]
    scales = {ours: entry.number(theirs, 1.0) for ours, theirs in SCALES.items() if ours in family.fields}
    softcap = entry.number("final_logit_softcapping", 30.0 if name == "gemma2" else 0.0)
    return ModelConfig(
        family=name,
        vocab=entry.whole("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden=hidden,
        specs=tuple(_layer(entry, name, i, tensors, factors or {}) for i in range(layers)),
        context=entry.whole("context_length"),
        norm_eps=entry.number("attention.layer_norm_rms_epsilon", 1e-6),
        tied="output.weight" not in tensors,
        embedding_scale=scales.pop("embedding_scale", hidden**0.5 if family.gemma else 1.0),
        **scales,
        softcap=softcap,
        eos_ids=gguf_end_ids(metadata),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        raw={key: value for key, value in metadata.items() if not isinstance(value, list)},
    )


def extra_layers(metadata: Mapping[str, Any]) -> int:
    """Layers that predict further tokens: they follow the others and are not run."""
    architecture = str(metadata.get("general.architecture"))
    extra = _GgufEntries(metadata, architecture).whole("nextn_predict_layers", 0)
    check_layers(extra + 1)
    return extra


def _layer(
    entry: _GgufEntries, name: str, index: int, tensors: Collection[str], factors: Factors
) -> LayerSpec:
    family, heads, hidden = (
        FAMILIES[name],
        entry.whole("attention.head_count"),
        entry.whole("embedding_length"),
    )
    head_dim = entry.whole("attention.key_length", hidden // heads if heads else 0)
    if entry.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("keys and values of different sizes are not supported")
    window = _window(entry, name, index)
    given = family.routing.given_by_gguf(entry.whole, entry.number) if family.routing else {}
    experts = family.routing.experts(given, index) if family.routing else None
    has = lambda part: f"blk.0.{part}.bias" in tensors  # noqa: E731 - a word for three questions
    has_norm = "blk.0.attn_q_norm.weight" in tensors
    return LayerSpec(
        heads=heads,
        kv_heads=entry.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=family.routing.beside(given, experts)
        if family.routing
        else entry.whole("feed_forward_length"),
        rope=_rope(entry, name, index, head_dim, factors),
        window=window,
        attention_scale=_scale(entry, name, heads, head_dim),
        softcap=entry.number("attn_logit_softcapping", 50.0) if name == "gemma2" else 0.0,
        qkv_bias=has("attn_q") or has("attn_qkv"),
        out_bias=has("attn_output"),
        mlp_bias=has("ffn_gate"),
        qk_norm=family.qk_norm if family.qk_norm != OPTIONAL_NORM else "head" * has_norm,
        norms=family.norms,
        activation=family.activation,
        clamp=family.defaults["swiglu_limit"] if family.activation == CLAMPED else 0.0,
        sinks=family.sinks,
        experts=experts,
    )


def _scale(entry: _GgufEntries, name: str, heads: int, head_dim: int) -> float | None:
    """GGUF leaves out Gemma's scale of scores: only the 27B models have one that is not by the size of a head."""
    if FAMILIES[name].gemma and entry.whole("block_count") == {"gemma2": 46, "gemma3_text": 62}[name]:
        return float((entry.whole("embedding_length") // heads) ** -0.5)
    scale = entry.number("attention.scale", 0.0)
    return scale or None


def _window(entry: _GgufEntries, name: str, index: int) -> int:
    family, window = FAMILIES[name], entry.whole("attention.sliding_window", 0)
    if not window:
        return 0
    pattern = entry.metadata.get(entry.prefix + "attention.sliding_window_pattern")
    if isinstance(pattern, list) and index < len(pattern):
        return window if pattern[index] else 0
    if name == "llama" or family.windows == "all":
        return window
    every = pattern if type(pattern) is int else family.full_every
    if not every:
        raise UnsupportedModel(f"GGUF does not say which layers of a {name} model have its sliding window")
    return 0 if (index + 1) % every == 0 else window


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [metadata[key] for key in keys if type(metadata.get(key)) is int]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    if metadata.get("general.architecture") == "gpt-oss":  # its <|end|> ends a message of an answer
        ids = [i for i in ids if not (0 <= i < len(tokens) and tokens[i] == "<|end|>")]
    return tuple(dict.fromkeys(ids))


class _GgufEntries:
    """Metadata of one architecture, by the part of the key after its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.prefix = architecture + "."

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(self.prefix + key, default)
        if type(value) not in (int, bool) or (type(value) is bool and key != "expert_weights_norm"):
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


def _rope(entry: _GgufEntries, name: str, index: int, head_dim: int, factors: Factors) -> Rope | None:
    family, windowed = FAMILIES[name], bool(_window(entry, name, index))
    if name == "smollm3" and (index + 1) % 4 == 0:
        return None
    theta = entry.number("rope.freq_base", 10000.0)
    turned = entry.whole("rope.dimension_count", head_dim)
    part = {} if turned == head_dim else {PARTIAL: turned / head_dim}
    if family.two_ropes and windowed:  # scaling is for the layers that see everything
        usual = 10000.0 if family.gemma else theta
        return Rope(entry.number("rope.freq_base_swa", usual), "default", part)
    kind = entry.text("rope.scaling.type", "none")
    if LONG in factors or SHORT in factors:
        return Rope(theta, "longrope", part | _longrope(entry, factors))
    if ROPE_FREQS in factors:
        if kind != "none":
            raise UnsupportedModel(f"rope scaling {kind!r} together with a {ROPE_FREQS} tensor")
        return Rope(theta, "llama3", _llama3_scaling(theta, head_dim, factors[ROPE_FREQS]))
    if kind == "none":
        return Rope(theta, "default", part)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not one of none, linear, yarn")
    scaling: dict[str, Any] = part | {"factor": entry.number("rope.scaling.factor", 1.0)}
    return Rope(theta, kind, scaling if kind == "linear" else scaling | _yarn(entry, name))


def _yarn(entry: _GgufEntries, name: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {TRAINED: entry.whole("rope.scaling.original_context_length")}
    for key, ours in YARN.items():
        if value := entry.number(f"rope.scaling.{key}", 0.0):
            scaling[ours] = value
    if name == "gpt_oss":
        scaling["truncate"] = False  # GGUF has no word for it
    if name == "ministral3":
        if beta := entry.number("attention.temperature_scale", 0.0):
            scaling[QUERY_BETA] = beta
        if mscale := entry.number("rope.scaling.yarn_log_multiplier", 0.0):
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return scaling


def _longrope(entry: _GgufEntries, factors: Factors) -> dict[str, Any]:
    trained = entry.whole("rope.scaling.original_context_length")
    lists = {"long_factor": list(factors.get(LONG, ())), "short_factor": list(factors.get(SHORT, ()))}
    gain = entry.number("rope.scaling.attn_factor", 0.0)
    factor = entry.whole("context_length") / trained if trained else 0.0
    return {TRAINED: trained, "factor": factor, **lists, **({"attention_factor": gain} if gain else {})}


def _llama3_scaling(theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, float]:
    """The numbers that made `rope_freqs.weight`. Every published Llama 3 has these but for `factor`."""
    scaling = {
        "factor": round(max(factors, default=1.0), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        TRAINED: 8192,
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
        turns = scaling[TRAINED] / (2 * math.pi * theta ** (2 * i / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors
