"""A model's weights before a kernel packs them: the format they are kept in, and a decoder layer's under short names.

A matrix [outputs, inputs] is a tensor in float32 or bfloat16, or `Blocks` of few bits, or a `Stack` of these. Nothing
else says its format: kernels pack what they are given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.load.checkpoint import Checkpoint
from outrider.load.config import Experts, LayerSpec, ModelConfig
from outrider.load.quants import FORMATS, Blocks, quantize
from outrider.load.weight_map import CORRECTION, ROUTER, SHARED_GATE

# Blocks that kernels multiply with. Matrices in any other format are unpacked to float32.
KERNEL_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
# Bytes of a weight in each format that is kept in memory.
BYTES = {form.name: form.bytes / form.values for form in FORMATS.values() if form.name in KERNEL_FORMATS}
BYTES |= {"float32": 4.0, "bfloat16": 2.0, "int8": BYTES["Q8_0"], "int4": BYTES["Q4_0"]}


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of different formats, one above the other."""

    parts: tuple[Tensor | Blocks, ...]


Weight = Tensor | Blocks | Stack
Read = Callable[[str], Any]  # a vector is a float32 tensor, a matrix a Weight


def parts_of(weight: Weight) -> tuple[Tensor | Blocks, ...]:
    return weight.parts if isinstance(weight, Stack) else (weight,)


def format_of(part: Tensor | Blocks) -> str:
    return part.form.name if isinstance(part, Blocks) else str(part.dtype).removeprefix("torch.")


def stacked(parts: Sequence[Tensor | Blocks]) -> Weight:
    """One matrix of several, in one part if they have one format."""
    if len({format_of(part) for part in parts}) > 1:
        return Stack(tuple(parts))
    first = parts[0]
    if isinstance(first, Blocks):
        raw = torch.cat([part.raw for part in parts if isinstance(part, Blocks)])
        return replace(
            first, name=" and ".join(part.name for part in parts if isinstance(part, Blocks)), raw=raw
        )
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


ENDS = ("model.embed_tokens.weight", "lm_head.weight")


ROUTING = (f".{ROUTER}.weight", f".{SHARED_GATE}.weight")


def kind_of(name: str, kind: str) -> str:
    """The format of one tensor. Embedding and head of an `int4` model have eight bits, as on a GPU (log/087 has
    what four cost). Routers are float32: they are small, and a rounded one chooses other experts.
    """
    if name.endswith(ROUTING):
        return "float32"
    return "int8" if kind == "int4" and name in ENDS else kind


def kept_as(weight: Tensor | Blocks, kind: str, draft: bool = False) -> Tensor | Blocks:
    """A weight in the format `kind`, one of settings.WEIGHTS. Vectors are float32 always. The matrices of a draft that
    are stored in more than 16 bits are rounded to bfloat16.
    """
    if isinstance(weight, Tensor) and weight.dim() < 2:
        return weight.float()
    if kind in ("int8", "int4"):
        return quantize(weight.float(), kind)
    if kind == "stored" and (isinstance(weight, Tensor) or weight.form.name in KERNEL_FORMATS):
        return weight.bfloat16() if draft and isinstance(weight, Tensor) else weight
    return weight.float().bfloat16() if kind == "bfloat16" else weight.float()


def kept_formats(checkpoint: Checkpoint, kind: str, draft: bool = False) -> Counter[str]:
    """Bytes of a checkpoint's weights by the format that `kept_as` gives them, before anything is read."""
    found: Counter[str] = Counter()
    for name in checkpoint.names():
        shape, stored, own = checkpoint.shape(name), checkpoint.stored_format(name), kind_of(name, kind)
        kept = "float32" if len(shape) < 2 else stored if own == "stored" else own
        if kept == "float32" and draft and own == "stored" and len(shape) == 2:
            kept = "bfloat16"
        kept = kept if kept in BYTES else "float32"
        found[kept] += int(math.prod(shape) * BYTES[kept])
    return found


MATRICES = ("qkv", "out", "gate", "up", "down")


@dataclass(slots=True)
class ExpertTensors:
    """A layer's experts: a matrix each, by their numbers."""

    router: Tensor  # float32 [experts, hidden]
    router_bias: Tensor | None
    correction: Tensor | None
    shared_gate: Tensor | None  # float32 [1, hidden]
    gate: list[Weight]
    up: list[Weight]
    down: list[Weight]
    gate_bias: list[Tensor] | None
    up_bias: list[Tensor] | None
    down_bias: list[Tensor] | None


@dataclass(slots=True)
class LayerTensors:
    attn_norm: Tensor | None
    qkv: Weight  # queries, keys and values stacked: one matmul
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    mlp_norm: Tensor | None
    gate: Weight | None  # the MLP of all rows; layers of experts may have none
    up: Weight | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    spec: LayerSpec
    out_norm: Tensor | None = None  # of what attention adds
    down_norm: Tensor | None = None  # of what the MLP adds
    sinks: Tensor | None = None  # [heads]
    experts: ExpertTensors | None = None


def layer_tensors(read: Read, config: ModelConfig, index: int) -> LayerTensors:
    """Reads layer `index`."""
    prefix, spec = f"model.layers.{index}.", config.specs[index]

    def get(name: str, wanted: bool = True) -> Any:
        return read(prefix + name) if wanted else None

    def head_norm(name: str) -> Tensor | None:
        return torch.ones(spec.head_dim) if spec.qk_norm == "unit" else get(name, bool(spec.qk_norm))

    def need(name: str) -> Any:
        return read(prefix + name)

    qkv = [need(f"self_attn.{part}_proj.weight") for part in "qkv"]
    bias = [need(f"self_attn.{part}_proj.bias") for part in "qkv"] if spec.qkv_bias else None
    has_mlp = spec.intermediate > 0
    return LayerTensors(
        attn_norm=get("input_layernorm.weight", spec.norm_before),
        qkv=stacked(qkv),
        qkv_bias=torch.cat(bias) if bias else None,
        q_norm=head_norm("self_attn.q_norm.weight"),
        k_norm=head_norm("self_attn.k_norm.weight"),
        out=need("self_attn.o_proj.weight"),
        out_bias=get("self_attn.o_proj.bias", spec.out_bias),
        mlp_norm=get("post_attention_layernorm.weight", spec.norm_before),
        gate=get("mlp.gate_proj.weight", has_mlp),
        up=get("mlp.up_proj.weight", has_mlp),
        gate_bias=get("mlp.gate_proj.bias", has_mlp and spec.mlp_bias),
        up_bias=get("mlp.up_proj.bias", has_mlp and spec.mlp_bias),
        down=get("mlp.down_proj.weight", has_mlp),
        down_bias=get("mlp.down_proj.bias", has_mlp and spec.mlp_bias),
        spec=spec,
        out_norm=get("self_attn.post_norm.weight", spec.norm_after),
        down_norm=get("mlp.post_norm.weight", spec.norm_after),
        sinks=get("self_attn.sinks", spec.sinks),
        experts=_experts(read, prefix, spec.experts) if spec.experts else None,
    )


def _experts(read: Read, prefix: str, e: Experts) -> ExpertTensors:
    def every(part: str, wanted: bool = True) -> Any:
        return [read(f"{prefix}mlp.experts.{i}.{part}") for i in range(e.count)] if wanted else None

    def one(name: str, wanted: bool) -> Any:
        return read(prefix + name) if wanted else None

    return ExpertTensors(
        router=read(f"{prefix}{ROUTER}.weight").float(),
        router_bias=one(f"{ROUTER}.bias", e.router_bias),
        correction=one(f"{ROUTER}.{CORRECTION}", e.correction),
        shared_gate=one(f"{SHARED_GATE}.weight", e.shared_gate),
        gate=every("gate_proj.weight"),
        up=every("up_proj.weight"),
        down=every("down_proj.weight"),
        gate_bias=every("gate_proj.bias", e.bias),
        up_bias=every("up_proj.bias", e.bias),
        down_bias=every("down_proj.bias", e.bias),
    )


def read_ahead(read: Read, config: ModelConfig) -> Iterator[LayerTensors]:
    """All layers in order. While the caller packs one layer, a second thread reads the next.

    That thread runs torch on one core: two layers at a time take half the processor time of one layer on two cores.
    """
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        coming = pool.submit(layer_tensors, read, config, 0)
        for i in range(1, config.layers + 1):
            tensors = coming.result()
            if i < config.layers:
                coming = pool.submit(layer_tensors, read, config, i)
            yield tensors


# What a network refers to and does not own, or what follows from its shape alone.
OTHERS = frozenset({"target", "kernels", "group", "config", "tables", "spec", "whole"})


def named_tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of numbers that a network was packed into, by where it stands."""
    if isinstance(value, Tensor):
        yield name, value
        return
    inside: Iterator[tuple[str, object]] = iter(())
    if isinstance(value, (list, tuple)):
        inside = ((str(i), each) for i, each in enumerate(value))
    elif isinstance(value, dict):
        inside = iter(value.items())
    elif is_dataclass(value):
        inside = ((field.name, getattr(value, field.name)) for field in fields(value))
    elif type(value).__module__.startswith("outrider.") and hasattr(value, "__dict__"):
        inside = iter(vars(value).items())
    for key, each in inside:
        if key not in OTHERS and not key.startswith("_"):
            yield from named_tensors(f"{name}.{key}".lstrip("."), each)
