"""A model's shape in one frozen word: one specification a layer, and what is around the layers. No weights here.

families.py reads it from config.json, gguf_config.py from GGUF metadata. CPU and GPU kernels, EAGLE heads, early exits
and `--as-if` all work from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import BadCheckpoint, UnsupportedModel

MAX_EXPERTS = 4_096  # in a layer
MAX_ALL_EXPERTS = 65_536  # in all layers: each has names of its own; the largest models have a quarter of it
MAX_LAYERS = 10_000  # checked before anything is made per layer; the deepest models have a few hundred
TRAINED = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
QUERY_BETA = "llama_4_scaling_beta"
# Kinds of rotary positions, and the numbers that each needs.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    "yarn": ("factor",),
    "longrope": (TRAINED,),
    "none": (TRAINED,),  # no rotation, only the gain of queries
}
GAIN_FROM = "query_gain_from"  # positions are counted from here for the gain of queries: 0 or 1
ROPE_OPTIONS = (
    TRAINED,
    GAIN_FROM,
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    PARTIAL,
)
ROPE_LISTS = ("short_factor", "long_factor")  # of longrope: a divisor for each frequency


def _sound(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or 1e-9 <= value <= 1e12)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is one of ROPE_KINDS; `scaling` holds its numbers."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = (*ROPE_OPTIONS, QUERY_BETA)
        given = {name: self.scaling[name] for name in options if self.scaling.get(name) is not None}
        needed = {name: self.scaling.get(name) for name in ROPE_KINDS[self.kind]}
        for name, value in {"theta": self.theta, **given, **needed}.items():
            if not _sound(value) or (value == 0 and name in needed) or (name == "theta" and value <= 1):
                raise BadCheckpoint(
                    f"the model's rotary positions have {name} = {value!r:.60}, which cannot be right"
                )
        if not 0 < self.scaling.get(PARTIAL, 1.0) <= 1:
            raise BadCheckpoint(
                f"the model's rotary positions have {PARTIAL} = {self.scaling[PARTIAL]}, which cannot be right"
            )
        for name in ROPE_LISTS if self.kind == "longrope" else ():
            factors = self.scaling.get(name)
            if not isinstance(factors, list) or not all(_sound(f) and f for f in factors):
                raise BadCheckpoint(
                    f"the model's rotary positions have {name} = {factors!r:.60}, which cannot be right"
                )

    def turned(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.scaling.get(PARTIAL, 1.0))


SCORES = ("softmax", "sigmoid")  # of the router's logits


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and how a row chooses among them: `route` in model/kernels/reference_experts.py."""

    count: int
    per_token: int
    width: int  # inner size of an expert
    score: str = "softmax"  # one of SCORES
    normalise: bool = True  # weights are divided by their sum
    floor: float = 0.0  # is added to that sum
    scale: float = 1.0  # of the weights, at the end
    groups: int = 1  # of neighbouring experts
    groups_kept: int = 1  # a row chooses within so many of them
    correction: bool = False  # a number an expert is added to scores for the choice, not for the weights
    router_bias: bool = False
    bias: bool = False  # of the experts' matrices
    weighs_input: bool = False  # the weight multiplies what an expert reads, not what it gives
    shared_gate: bool = False  # the sigmoid of one more product multiplies what the shared MLP gives

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width", "groups", "groups_kept"):
            check_size(f"the experts' {name}", getattr(self, name))
        if self.count > MAX_EXPERTS:
            raise BadCheckpoint(f"the model's config gives {self.count} experts; {MAX_EXPERTS} are supported")
        if self.score not in SCORES:
            raise UnsupportedModel(f"the router's score {self.score!r:.60} is not one of {', '.join(SCORES)}")
        if self.count % self.groups:
            raise BadCheckpoint(f"{self.count} experts do not divide into {self.groups} groups")
        if self.groups_kept > self.groups:
            raise BadCheckpoint(f"{self.groups_kept} of {self.groups} groups cannot be used")
        if self.per_token > self.count // self.groups * self.groups_kept:
            raise BadCheckpoint(
                f"{self.per_token} experts a token are more than the {self.count // self.groups * self.groups_kept} "
                "to choose from"
            )
        if self.groups > 1 and self.count // self.groups < 2:
            raise BadCheckpoint(f"{self.count} experts in {self.groups} groups leave groups of one")
        if not _sound(self.scale) or self.scale == 0:
            raise BadCheckpoint(f"the router's scale is {self.scale!r:.60}, which cannot be right")

    @property
    def parameters(self) -> int:
        """Numbers in matrices, by number of the hidden size; with the router."""
        return self.count * (3 * self.width + 1)

    @property
    def plain_choice(self) -> bool:
        """Whether the largest logits are chosen, whatever the score."""
        return not self.correction and self.groups == 1


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. weight_map.py says which tensors it has."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # inner size of the MLP that all rows share; 0: none, beside experts
    rope: Rope | None = field(default_factory=Rope)  # None: no positions
    window: int = 0  # tokens it sees; 0: all
    chunk: int = 0  # a token sees those of its own chunk of so many positions; 0: all
    attention_scale: float | None = None  # of scores; None: one over the root of the head size
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = (
        ""  # RMS norm of queries and keys: "head" by head, "unit" so without weights, "whole" over all heads
    )
    norms: str = "before"  # where attention and MLP have theirs: "before", "after" or "both"
    activation: str = "silu"  # of the gate: one of ACTIVATIONS
    clamp: float = (
        0.0  # of the activation "clamped": the largest gate, and the largest other factor of either sign
    )
    sinks: bool = False  # each head has a logit that joins the sum under its weights, and has no value
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "intermediate"):
            if name != "intermediate" or self.experts is None or self.intermediate != 0:
                check_size(name, getattr(self, name))
        for name in ("window", "chunk"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise BadCheckpoint(f"the model's config gives a {name} of {getattr(self, name)!r:.60}")
        if self.heads % self.kv_heads:
            raise BadCheckpoint(f"{self.heads} heads do not divide over {self.kv_heads} key-value heads")
        if self.head_dim % 2 or (self.rope and self.rope.turned(self.head_dim) % 2):
            raise BadCheckpoint(f"rotary positions need an even head size, got {self.head_dim}")
        if self.activation == CLAMPED and not (_sound(self.clamp) and self.clamp):
            raise BadCheckpoint(
                f"the model's config gives swiglu_limit = {self.clamp!r:.60}, which cannot be right"
            )
        for name in ("scale", "softcap"):
            if not _sound(getattr(self, name)):
                raise BadCheckpoint(
                    f"the model's config gives attention a {name} of {getattr(self, name)!r:.60}"
                )

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def norm_before(self) -> bool:
        return self.norms != "after"

    @property
    def norm_after(self) -> bool:
        return self.norms != "before"

    @property
    def parameters(self) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.intermediate + (self.experts.parameters if self.experts else 0)

    @property
    def active_width(self) -> int:
        """Inner size of all that one row goes through: of the MLP and of its experts."""
        return self.intermediate + (self.experts.per_token * self.experts.width if self.experts else 0)

    @property
    def active(self) -> int:
        """Of these, those that one row multiplies with."""
        e = self.experts
        return self.parameters - (3 * e.width * (e.count - e.per_token) if e else 0)


CLAMPED = "clamped"  # gpt-oss's: (u + 1) g sigmoid(1.702 g), of clamped products g and u
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or not 0 < value <= 1 << 28:
        raise BadCheckpoint(f"the model's config gives {name} = {value!r:.60}, which cannot be right")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab: int
    hidden: int
    specs: tuple[LayerSpec, ...]
    context: int
    norm_eps: float
    tied: bool  # the head is the embedding
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_divisor: float = 1.0
    softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: they stay
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)  # config.json as it was, for model/hf.py

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "context"):
            check_size(name, getattr(self, name))
        if (every := sum(spec.experts.count for spec in self.specs if spec.experts)) > MAX_ALL_EXPERTS:
            raise BadCheckpoint(
                f"the model's config gives {every} experts in all layers, which cannot be right"
            )
        if not 0 <= self.norm_eps < math.inf:
            raise BadCheckpoint(f"the model's config gives norm_eps = {self.norm_eps}, which cannot be right")
        for name in ("embedding_scale", "residual_scale", "logit_divisor", "softcap"):
            value = getattr(self, name)
            if not _sound(value) or (value == 0 and name != "softcap"):
                raise BadCheckpoint(f"the model's config gives {name} = {value!r:.60}, which cannot be right")

    def _shared(self, name: str) -> Any:
        """A field that all layers agree on."""
        first, *others = (getattr(spec, name) for spec in self.specs)
        if any(other != first for other in others):
            raise UnsupportedModel(f"layers of this {self.family} model differ in {name}")
        return first

    layers = property(lambda self: len(self.specs))
    windows = property(lambda self: tuple(spec.window for spec in self.specs))

    @property
    def heads(self) -> int:
        return int(self._shared("heads"))

    @property
    def kv_heads(self) -> int:
        return int(self._shared("kv_heads"))

    @property
    def head_dim(self) -> int:
        return int(self._shared("head_dim"))

    @property
    def intermediate(self) -> int:
        return int(self._shared("intermediate"))

    @property
    def rope(self) -> Rope:
        found: Rope | None = self._shared("rope")
        if found is None:
            raise UnsupportedModel(f"this {self.family} model has no rotary positions")
        return found

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Of a token's keys in each layer: heads, and numbers of a head."""
        return tuple((spec.kv_heads, spec.head_dim) for spec in self.specs)

    @property
    def kv_numbers(self) -> int:
        """Numbers of a token's keys and values."""
        return 2 * sum(heads * size for heads, size in self.kv_shapes)

    @property
    def kv_bytes_per_token(self) -> int:
        """In float32."""
        return 4 * self.kv_numbers

    @property
    def parameters(self) -> int:
        """Numbers in the weight matrices; norms and biases are too few to count."""
        ends = self.vocab * (1 if self.tied else 2)
        return self.hidden * (ends + sum(spec.parameters for spec in self.specs))

    @property
    def active_parameters(self) -> int:
        """Of these, those that one row multiplies with."""
        return self.parameters - self.hidden * sum(spec.parameters - spec.active for spec in self.specs)

    @property
    def plain(self) -> bool:
        """Whether it is a Llama but for biases, head norms, windows and rotary scaling."""
        scales = (self.embedding_scale, self.residual_scale, self.logit_divisor, self.softcap)
        usual = LayerSpec(2, 2, 2, 2)
        fields = ("attention_scale", "softcap", "norms", "activation", "chunk", "sinks", "experts")
        return scales == (1, 1, 1, 0) and all(
            spec.qk_norm in ("", "head") and spec.rope is not None and spec.rope == self.specs[0].rope
            and all(getattr(spec, name) == getattr(usual, name) for name in fields)
            for spec in self.specs
        )  # fmt: skip

    def reshaped(self, layers: int | None = None, **changes: Any) -> ModelConfig:
        """With other numbers in all layers (fields of LayerSpec), and perhaps with more or fewer layers."""
        specs = tuple(replace(spec, **changes) for spec in self.specs)
        return replace(self, specs=specs if layers is None else (specs + specs[-1:] * layers)[:layers])


def check_layers(layers: int) -> None:
    if not 0 < layers <= MAX_LAYERS:
        raise BadCheckpoint(f"the model's config gives layers = {layers!r:.60}, which cannot be right")


def end_ids(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids that end a text: config.json's and generation_config.json's together."""
    ids: list[int] = []
    for source in (raw, generation or {}):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int))
