"""The families that the one decoder runs: a table of what distinguishes them, and config.json read by it.

A family is one row of `FAMILIES`: its layers, fields of config.json, names of tensors (as far as they are not Llama's)
and what GGUF calls it. Kernels do not know families; they know `LayerSpec`. Other model_types go to model/hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.config import (
    ACTIVATIONS,
    CLAMPED,
    GAIN_FROM,
    PARTIAL,
    QUERY_BETA,
    ROPE_KINDS,
    TRAINED,
    LayerSpec,
    ModelConfig,
    Rope,
    check_layers,
    end_ids,
)
from outrider.load.routing import (
    GLM_ROUTING,
    GPT_OSS_ROUTING,
    LLAMA4_ROUTING,
    MIXTRAL_ROUTING,
    OLMOE_ROUTING,
    SOFTMAX_ROUTING,
    Routing,
)

OPTIONAL_NORM = "use_qk_norm"  # a field of config.json
SLIDING, FULL = "sliding_attention", "full_attention"
# Names of norms, ours (Llama's, and two of our own) first, and of matrices that are stored as one.
SANDWICH = {
    "self_attn.post_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
FUSED_QKV = {f"self_attn.{part}_proj": "self_attn.qkv_proj" for part in "qkv"}
FUSED_MLP = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}
# The same for GGUF, beside the names that all architectures share (weight_map.py).
GGUF_AFTER = {"self_attn.post_norm": "post_attention_norm", "mlp.post_norm": "post_ffw_norm"}
GGUF_QKV = {f"self_attn.{part}_proj": "attn_qkv" for part in "qkv"}
GGUF_MLP = {"mlp.gate_proj": "ffn_up", "mlp.up_proj": "ffn_up"}


@dataclass(frozen=True, slots=True)
class Family:
    """What one decoder must know to be this family. A bias that is a text is a field of config.json."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: str = ""  # as in LayerSpec
    norms: str = "before"
    norm_shift: float = 0.0  # norms are stored less this much
    windows: str = (
        ""  # which layers have `sliding_window`: "all", "listed" in `layer_types`, "late": from a layer on
    )
    full_every: int = 0  # where `layer_types` is left out: every so many layers one sees everything
    two_ropes: bool = False  # windowed layers have rotary positions of their own
    pairs: bool = False  # rotary pairs are neighbours, not half a head apart
    gemma: bool = False  # embeddings times the root of the hidden size, scores by query_pre_attn_scalar
    activation: str = "silu"
    sinks: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)  # of ModelConfig, by their names in config.json
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json may leave out
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors: ours to theirs
    gguf: str = ""  # its architecture in GGUF files; empty: not read
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_pairs: bool = False  # GGUF keeps rotary pairs as neighbours
    routing: Routing | None = None  # of a mixture of experts
    unsupported: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields, and the only value that is supported


GEMMA: dict[str, Any] = {
    "norms": "both", "norm_shift": 1.0, "windows": "listed", "gemma": True, "activation": "gelu_tanh",
    "out_bias": "attention_bias", "qkv_bias": "attention_bias", "names": SANDWICH, "gguf_names": GGUF_AFTER,
}  # fmt: skip
GEMMA_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    # SmolLM and SmolLM2 are Llama by shape.
    "llama": Family(
        "attention_bias", "attention_bias", "mlp_bias", gguf="llama", gguf_pairs=True
    ),
    "mistral": Family(windows="all", gguf="llama", gguf_pairs=True),
    "qwen2": Family(True, windows="late", gguf="qwen2"),
    "qwen3": Family("attention_bias", "attention_bias", qk_norm="head", windows="late", gguf="qwen3"),
    "gemma2": Family(
        **GEMMA, full_every=2, gguf="gemma2", fields={"softcap": "final_logit_softcapping"},
        defaults=GEMMA_DEFAULTS | {
            "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        **GEMMA, full_every=6, qk_norm="head", two_ropes=True, gguf="gemma3",
        fields={"softcap": "final_logit_softcapping"},
        defaults=GEMMA_DEFAULTS | {
            "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
    ),
    "smollm3": Family(
        "attention_bias", "attention_bias", "mlp_bias", windows="listed", gguf="smollm3", gguf_pairs=True,
        defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "olmo2": Family(
        "attention_bias", "attention_bias", qk_norm="whole", norms="after", gguf="olmo2", gguf_names=GGUF_AFTER,
        names=SANDWICH, defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "attention_bias", "attention_bias", qk_norm="whole", norms="after", windows="listed", full_every=4,
        two_ropes=True, names=SANDWICH, gguf="olmo2", gguf_names=GGUF_AFTER,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "granite": Family(
        "attention_bias", "attention_bias", "mlp_bias", gguf="granite", gguf_pairs=True,
        fields={
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "logit_divisor": "logits_scaling",
        },
        defaults={"attention_multiplier": 1.0},
    ),
    "phi3": Family(
        windows="all", names=FUSED_QKV | FUSED_MLP, gguf="phi3", gguf_names=GGUF_QKV | GGUF_MLP,
        defaults={"rms_norm_eps": 1e-5, TRAINED: 4096},
    ),
    "ministral3": Family(
        windows="all", gguf="mistral3", gguf_pairs=True,
        defaults={
            "rms_norm_eps": 1e-5, "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, TRAINED: 16_384, "mscale": 1.0,
                "mscale_all_dim": 1.0, QUERY_BETA: 0.1,
            },
        },
    ),
    "seed_oss": Family(
        "attention_bias", "attention_out_bias", "mlp_bias", gguf="seed_oss",
        gguf_names={"post_attention_layernorm": "post_attention_norm"},
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "glm4": Family(
        "attention_bias", norms="both", pairs=True, gguf="glm4", gguf_names=GGUF_MLP | GGUF_AFTER, gguf_pairs=True,
        names=FUSED_MLP | {"self_attn.post_norm": "post_self_attn_layernorm", "mlp.post_norm": "post_mlp_layernorm"},
        defaults={"attention_bias": True, PARTIAL: 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    ),
    "qwen3_moe": Family(
        "attention_bias", "attention_bias", qk_norm="head", windows="all", routing=SOFTMAX_ROUTING,
        defaults={"use_sliding_window": False}, gguf="qwen3moe",
    ),
    "mixtral": Family(
        windows="all", routing=MIXTRAL_ROUTING, gguf="llama", gguf_pairs=True, defaults={"rms_norm_eps": 1e-5},
    ),
    "olmoe": Family(
        "attention_bias", "attention_bias", qk_norm="whole", routing=OLMOE_ROUTING, unsupported={"clip_qkv": None},
        defaults={"rms_norm_eps": 1e-5}, gguf="olmoe",
    ),
    "glm4_moe": Family(
        "attention_bias", qk_norm=OPTIONAL_NORM, routing=GLM_ROUTING, gguf="glm4moe",
        gguf_names={"post_attention_layernorm": "post_attention_norm"}, defaults={PARTIAL: 0.5, "rms_norm_eps": 1e-5},
    ),
    "llama4_text": Family(
        "attention_bias", "attention_bias", qk_norm=OPTIONAL_NORM, pairs=True, routing=LLAMA4_ROUTING,
        names={f"mlp.{part}": f"feed_forward.{part}" for part in ("gate_proj", "up_proj", "down_proj")},
        defaults={
            "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "no_rope_layer_interval": 4, "use_qk_norm": True,
            "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        },
    ),
    "gpt_oss": Family(
        "attention_bias", "attention_bias", windows="listed", full_every=2, activation=CLAMPED, sinks=True,
        routing=GPT_OSS_ROUTING, unsupported={"swiglu_alpha": 1.702, "hidden_act": "silu"},
        gguf="gpt-oss", gguf_names={"post_attention_layernorm": "post_attention_norm"},
        defaults={
            "attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "sliding_window": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "hidden_act": "silu",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, TRAINED: 4096, "truncate": False,
            },
        },
    ),
}  # fmt: skip


def sample_config(name: str) -> ModelConfig:
    """A small model of a family, as config.json leaves it where it says nothing special."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size_mlp": 256}
    experts |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
    return config_from_json(
        {"model_type": name, "vocab_size": 256, **sizes, **experts, "num_key_value_heads": 2}
    )


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own entries, where config.json is that of a model for images or sound, too."""
    nested = raw.get("text_config")
    return nested if isinstance(nested, dict) and nested.get("model_type") in FAMILIES else raw


def is_known_family(raw: Mapping[str, Any]) -> bool:
    return str(text_part(raw).get("model_type")) in FAMILIES


def config_from_json(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From a Hugging Face config.json (and generation_config.json, which has the fuller list of end ids)."""
    text = text_part(raw)
    name = str(text.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModel(f"model_type {name!r:.60} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    try:
        given = {**family.defaults, **text}
        if "rope_scaling" in text and "rope_parameters" not in text:  # its older name
            given.pop("rope_parameters", None)
        for key, only in family.unsupported.items():
            if given.get(key) != only:
                raise UnsupportedModel(f"this {name} model has {key} = {given[key]!r:.60}; supported: {only}")
        check_layers(layers := given["num_hidden_layers"])
        hidden = given["hidden_size"]
        around = {ours: float(given[theirs]) for ours, theirs in family.fields.items() if given.get(theirs)}
        tied = text.get(
            "tie_word_embeddings", raw.get("tie_word_embeddings", given.get("tie_word_embeddings"))
        )
        return ModelConfig(
            family=name,
            vocab=given["vocab_size"],
            hidden=hidden,
            specs=tuple(_layer(name, given, i) for i in range(layers)),
            context=given.get("max_position_embeddings", 2048),
            norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            tied=bool(tied),
            embedding_scale=around.pop("embedding_scale", hidden**0.5 if family.gemma else 1.0),
            **around,
            eos_ids=end_ids(raw if "eos_token_id" in raw else text, generation),
            bos_id=raw.get("bos_token_id", text.get("bos_token_id")),
            raw=raw,
        )
    except KeyError as missing:
        raise BadCheckpoint(f"config.json of this {name} model has no {missing.args[0]!r}") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError, IndexError) as wrong:
        raise BadCheckpoint(f"config.json cannot be read: {wrong!s:.300}") from None


def _layer(name: str, given: Mapping[str, Any], index: int) -> LayerSpec:
    family, heads, window = FAMILIES[name], given["num_attention_heads"], _window(name, given, index)

    def has(bias: bool | str) -> bool:
        return bool(given.get(bias, False)) if isinstance(bias, str) else bias

    scale = (
        given.get("query_pre_attn_scalar", 256) ** -0.5 if family.gemma else given.get("attention_multiplier")
    )
    experts = family.routing.experts(given, index) if family.routing else None
    rope = _rope(name, given, index, bool(window))
    turned = rope is not None and rope.kind != "none"
    return LayerSpec(
        heads=heads,
        kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        intermediate=family.routing.beside(given, experts) if family.routing else given["intermediate_size"],
        rope=rope,
        window=window,
        chunk=(given["attention_chunk_size"] or 0) if name == "llama4_text" and turned else 0,
        attention_scale=None if scale is None else float(scale),
        softcap=float(given.get("attn_logit_softcapping") or 0.0) if name == "gemma2" else 0.0,
        qkv_bias=has(family.qkv_bias),
        out_bias=has(family.out_bias),
        mlp_bias=has(family.mlp_bias),
        qk_norm=_qk_norm(name, given, turned),
        norms=family.norms,
        activation=_activation(name, given),
        clamp=given["swiglu_limit"] if family.activation == CLAMPED else 0.0,
        sinks=family.sinks,
        experts=experts,
    )


def _qk_norm(name: str, given: Mapping[str, Any], turned: bool) -> str:
    """Llama 4 norms rotated heads without weights; before or after their rotation is the same."""
    found = FAMILIES[name].qk_norm
    if found != OPTIONAL_NORM:
        return found
    if not given.get(found):
        return ""
    return "head" if name != "llama4_text" else "unit" if turned else ""


def _activation(name: str, given: Mapping[str, Any]) -> str:
    if FAMILIES[name].activation == CLAMPED:
        return CLAMPED
    for key in ("hidden_activation", "hidden_act"):
        if found := given.get(key):
            if found not in ACTIVATIONS:
                raise UnsupportedModel(
                    f"this {name} model has {key} = {found!r:.60}; supported: {', '.join(ACTIVATIONS)}"
                )
            return ACTIVATIONS[found]
    return FAMILIES[name].activation


def _window(name: str, given: Mapping[str, Any], index: int) -> Any:
    family, kinds = FAMILIES[name], given.get("layer_types")
    window = given.get("sliding_window") if family.windows else None
    if not window or given.get("use_sliding_window", name != "smollm3") is False:
        return 0
    if kinds:
        if kinds[index] not in (SLIDING, FULL):
            raise UnsupportedModel(
                f"layer_types of this {name} model names {kinds[index]!r:.40}; supported: {SLIDING}, {FULL}"
            )
        return window if kinds[index] == SLIDING else 0
    if family.windows == "late":
        return window if index >= given.get("max_window_layers", 28) else 0
    if name == "smollm3":
        return 0 if _turns(given, index) else window
    every = given.get("sliding_window_pattern") or family.full_every
    return 0 if every and (index + 1) % every == 0 else window


def _turns(given: Mapping[str, Any], index: int) -> bool:
    """Whether a layer of SmolLM3 or Llama 4 has rotary positions."""
    if listed := given.get("no_rope_layers"):
        return bool(listed[index])
    return (index + 1) % given["no_rope_layer_interval"] != 0


def _rope(name: str, given: Mapping[str, Any], index: int, windowed: bool) -> Rope | None:
    if name in ("smollm3", "llama4_text") and not _turns(given, index):
        tuned = name == "llama4_text" and given["attn_temperature_tuning"]
        gain = (
            {QUERY_BETA: given["attn_scale"], TRAINED: given["floor_scale"], GAIN_FROM: 1} if tuned else None
        )
        return Rope(kind="none", scaling=gain) if gain else None
    family, kind = FAMILIES[name], SLIDING if windowed else FULL
    found = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    theta = given.get("rope_theta") or 10000.0
    if isinstance(found.get(kind), dict):
        found = dict(found[kind])
    elif SLIDING in found or FULL in found or (family.two_ropes and windowed):
        found = {}
    if family.two_ropes and windowed:
        theta = given.get("rope_local_base_freq") or theta
    rope = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    if name == "phi3" and rope in ("su", "yarn"):  # older names
        rope = "longrope"
    if rope not in ROPE_KINDS:
        raise UnsupportedModel(
            f"rope scaling {rope!r:.60} of this {name} model is not one of {', '.join(ROPE_KINDS)}"
        )
    if given.get(TRAINED) and (rope != "default" or name != "phi3"):
        found.setdefault(TRAINED, given[TRAINED])
    if (part := found.pop(PARTIAL, None) or given.get(PARTIAL)) and part != 1:
        found[PARTIAL] = part
    if rope == "longrope" and not found.get("factor"):
        found["factor"] = given.get("max_position_embeddings", 4096) / found[TRAINED]
    return Rope(float(found.pop("rope_theta", None) or theta), rope, found)
