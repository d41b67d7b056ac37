"""What families call their experts: fields of config.json, names of tensors, and which layers have them.

A `Routing` is one row: it makes `Experts` of a config.json and finds the tensors. config.py says what each field means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.config import Experts

Given = Mapping[str, Any]
GATING = {1: "softmax", 2: "sigmoid"}  # scores by GGUF's numbers
PARTS = ("gate_proj", "up_proj", "down_proj")
BLOCKS = "_blocks"  # what MXFP4 in safetensors adds to the name of a stack, beside its scales


def _every_so_many(given: Given, index: int) -> bool:
    step = given.get("decoder_sparse_step", 1)
    return index not in (given.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def _after_the_first(given: Given, index: int) -> bool:
    return bool(index >= given.get("first_k_dense_replace", 1))


def _listed(given: Given, index: int) -> bool:
    listed, step = given.get("moe_layers"), given.get("interleave_moe_layer_step", 1)
    return bool((index + 1) % step == 0 if listed is None else index in listed)


@dataclass(frozen=True, slots=True)
class Routing:
    """A field that is a text is a name in config.json; a pair is a name and what holds where it is left out."""

    has_experts: Callable[[Given, int], bool] = _every_so_many
    count: tuple[str, ...] = ("num_experts", "num_local_experts")  # the first that is there
    width: str = "moe_intermediate_size"
    normalise: bool | tuple[str, bool] = ("norm_topk_prob", False)
    score: str = "softmax"
    method: str = "greedy"  # of the choice, as DeepSeek's kind of config.json calls it
    floor: float = 0.0
    scale: tuple[str, float] = ("", 1.0)
    grouped: bool = False  # `n_group` and `topk_group`
    correction: bool = False
    weighs_input: bool = False
    shared: str = ""  # how many experts' width the shared MLP has; "1": one
    dense_width: str = "intermediate_size"  # of layers without experts
    # Names of tensors behind the layer's prefix, in the order in which they are looked for.
    router: tuple[str, ...] = ("mlp.gate",)
    single: tuple[Mapping[str, str], ...] = (
        {part: f"mlp.experts.{{}}.{part}" for part in PARTS},
    )  # {}: a number
    stacked: str = "mlp.experts"  # its `gate_up_proj` and `down_proj` have the matrices of all experts
    turned: bool = False  # stacked matrices are [experts, inputs, outputs]
    shared_at: str = "mlp.shared_experts"
    interleaved: bool = False  # rows of gate and up alternate in a stack
    biases: bool = False  # of the router and of the experts' matrices
    gguf_normalise: bool = True  # where a GGUF file does not say it

    def places(self, part: str, kind: str) -> Iterator[tuple[str, int | None]]:
        """Where a tensor of a layer with experts may be: its name in the file and, if that is a stack, the expert."""
        if part == "mlp.gate":
            yield from ((f"{router}.{kind}", None) for router in self.router)
        elif part.startswith("mlp.experts."):
            number, matrix = part.removeprefix("mlp.experts.").split(".")
            for names in self.single:
                yield f"{names[matrix].format(number)}.{kind}", None
            fused = "down_proj" if matrix == "down_proj" else "gate_up_proj"
            if kind == "weight":
                yield f"{self.stacked}.{fused}{BLOCKS}", int(number)
            yield f"{self.stacked}.{fused}" + ("_bias" if kind == "bias" else ""), int(number)
        elif part.removeprefix("mlp.") in PARTS:
            yield f"{self.shared_at}.{part.removeprefix('mlp.')}.{kind}", None

    def experts(self, given: Given, index: int) -> Experts | None:
        if not self.has_experts(given, index):
            return None
        family = given.get("model_type")
        for field, only in (("scoring_func", self.score), ("topk_method", self.method)):
            if (found := given.get(field) or only) != only:
                raise UnsupportedModel(f"{field} = {found!r:.60} of this {family} model; supported: {only}")
        try:
            return self._experts(given)
        except BadCheckpoint as wrong:
            named = (*self.count, "num_experts_per_tok", self.width, "n_group", "topk_group", self.scale[0])
            fields = ", ".join(f"{name} = {given[name]!r:.40}" for name in named if name in given)
            raise BadCheckpoint(f"experts of this {family} model: {wrong}; its config has {fields}") from None

    def _experts(self, given: Given) -> Experts:
        normalise = self.normalise
        return Experts(
            count=next((given[name] for name in self.count if name in given), None) or given[self.count[0]],
            per_token=given["num_experts_per_tok"],
            width=given[self.width],
            score=self.score,
            normalise=normalise if isinstance(normalise, bool) else bool(given.get(*normalise)),
            floor=self.floor,
            scale=float(given.get(*self.scale)),
            groups=given.get("n_group", 1) if self.grouped else 1,
            groups_kept=given.get("topk_group", 1) if self.grouped else 1,
            correction=self.correction,
            weighs_input=self.weighs_input,
            router_bias=self.biases,
            bias=self.biases,
        )

    def given_by_gguf(self, whole: Callable[..., int], number: Callable[..., float]) -> Given:
        """The metadata of a GGUF file, of which `whole` and `number` read an entry, as config.json has it."""
        normalise = self.normalise if isinstance(self.normalise, tuple) else ("", False)
        gating = whole("expert_gating_func", 0)  # 0: not said
        given = {
            "model_type": "GGUF",
            "scoring_func": GATING.get(gating, f"number {gating}") if gating else None,
            self.dense_width: whole("feed_forward_length"),
            self.count[0]: whole("expert_count"),
            "num_experts_per_tok": whole("expert_used_count"),
            self.width: whole("expert_feed_forward_length", whole("feed_forward_length")),
            normalise[0]: bool(whole("expert_weights_norm", self.gguf_normalise)),
            self.scale[0]: number("expert_weights_scale", 0.0) or 1.0,
            "n_group": whole("expert_group_count", 1),
            "topk_group": whole("expert_group_used_count", 1),
            self.shared: whole("expert_shared_count", 0),
            "first_k_dense_replace": whole("leading_dense_block_count", 0),
        }
        given.pop("", None)
        return given

    def beside(self, given: Given, experts: Experts | None) -> Any:
        """Width of the MLP that all rows share."""
        if experts is None:
            return given[self.dense_width]
        return experts.width * (1 if self.shared == "1" else given.get(self.shared, 1) if self.shared else 0)


SOFTMAX_ROUTING = Routing()
OLMOE_ROUTING = Routing(width="intermediate_size", gguf_normalise=False)
MIXTRAL_ROUTING = Routing(
    has_experts=lambda *_: True, count=("num_local_experts",), width="intermediate_size", normalise=True,
    router=("mlp.gate", "block_sparse_moe.gate"),
    single=({part: f"block_sparse_moe.experts.{{}}.{w}" for part, w in zip(PARTS, ("w1", "w3", "w2"), strict=True)},),
)  # fmt: skip
GLM_ROUTING = Routing(
    has_experts=_after_the_first, count=("n_routed_experts",), normalise=("norm_topk_prob", True), score="sigmoid",
    method="noaux_tc", floor=1e-20, scale=("routed_scaling_factor", 1.0), grouped=True, correction=True,
    shared="n_shared_experts",
)  # fmt: skip
GPT_OSS_ROUTING = Routing(
    has_experts=lambda *_: True, count=("num_local_experts", "num_experts"), width="intermediate_size", normalise=True,
    router=("mlp.router",), turned=True, interleaved=True, biases=True,
)  # fmt: skip
LLAMA4_ROUTING = Routing(
    has_experts=_listed, count=("num_local_experts",), width="intermediate_size", normalise=False, score="sigmoid",
    weighs_input=True, shared="1", dense_width="intermediate_size_mlp", router=("feed_forward.router",),
    stacked="feed_forward.experts", turned=True, shared_at="feed_forward.shared_expert",
)  # fmt: skip
