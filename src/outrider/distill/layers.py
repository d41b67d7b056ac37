"""Decoder layers in torch with gradients, under Hugging Face's names: what a draft is made of while it is trained.

Serving has its own packed twins (model/kernels, draft/eagle_head.py); parity tests hold the two together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.distill.attention import Attend, Rotary
from outrider.load.config import PARTIAL, QUERY_BETA, LayerSpec, ModelConfig, Rope
from outrider.model.rope import rope_tables


def plain_of(target: ModelConfig, **changes: Any) -> ModelConfig:
    """A draft's config before its layers are chosen: the target's vocabulary, context and rotary positions, without its
    multipliers. Its MLP is as wide as all experts of a row together. Of several rotary tables it has the last; scaling
    that only a part of a Llama could have is left out.
    """
    turning = (spec.rope for spec in reversed(target.specs) if spec.rope and spec.rope.kind != "none")
    rope = next(turning, Rope())
    if rope.kind == "longrope" or PARTIAL in rope.scaling or QUERY_BETA in rope.scaling:
        rope = Rope(rope.theta)
    scales = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0, "softcap": 0.0}
    spec = LayerSpec(target.heads, target.kv_heads, target.head_dim, target.specs[-1].active_width, rope)
    return replace(target, specs=(spec,), raw={}, **{**scales, **changes})


SPREAD = 0.02  # standard deviation of fresh weights

Past = list[Tensor]  # keys and values of every unrolled step so far, in turn: [B, kv_heads, T, head_dim]


class RmsNorm(nn.Module):
    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape)), eps

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return F.rms_norm(x.float(), self.weight.shape[-1:], None, self.eps) * self.weight
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def fresh_linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(linear.weight, std=SPREAD)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        c = self.spec = config.specs[0]
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = fresh_linear(inputs, q, c.qkv_bias)
        self.k_proj = fresh_linear(inputs, kv, c.qkv_bias)
        self.v_proj = fresh_linear(inputs, kv, c.qkv_bias)
        self.o_proj = fresh_linear(q, config.hidden, c.out_bias)
        if c.qk_norm:
            self.q_norm = RmsNorm((c.head_dim,), config.norm_eps)
            self.k_norm = RmsNorm((c.head_dim,), config.norm_eps)

    def forward(self, x: Tensor, packed: Packed, rotary: Rotary, past: Past) -> Tensor:
        """x [B, T, inputs] of the step after those in `past`, which gets its keys and values."""
        c = self.spec
        qkv = packed.qkv(x).unflatten(-1, (-1, c.head_dim))
        if c.qk_norm:
            q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 2)
            qkv = torch.cat([self.q_norm(q).to(x.dtype), self.k_norm(k).to(x.dtype), v], 2)
        mixed, keys, values = Attend.apply(qkv, rotary, c.heads, c.window, *past)
        past += [keys, values]
        return packed.out(mixed)


def shift(x: Tensor, places: int) -> Tensor:
    """x [..., T, n] shifted to later places, with zeros before it."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :] if places else x


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden, config.specs[0].intermediate, config.specs[0].mlp_bias
        self.gate_proj = fresh_linear(hidden, inner, bias)
        self.up_proj = fresh_linear(hidden, inner, bias)
        self.down_proj = fresh_linear(inner, hidden, bias)


class Gated(torch.autograd.Function):
    """silu(gate) * up, of both side by side [..., 2 n] -> [..., n]."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        made = torch.empty_like(both)
        of_gate, of_up = made.chunk(2, -1)
        torch.mul(slope, F.silu(gate), out=of_up)
        of_gate.copy_(torch.ops.aten.silu_backward(slope * up, gate))
        return made


Multiply = functools.partial[Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    """A layer's matrices as its steps multiply by them: those that read the same together, in the dtype of matmuls."""

    dtype: torch.dtype
    qkv: Multiply
    out: Multiply
    gate_up: Multiply
    down: Multiply


def together(dtype: torch.dtype, *linears: nn.Linear) -> Multiply:
    """Several matrices as one. Made once for all steps of a pass."""
    weight = linears[0].weight if len(linears) == 1 else torch.cat([one.weight for one in linears])
    biases: list[Tensor] = [one.bias for one in linears if one.bias is not None]
    return functools.partial(
        F.linear, weight=weight.to(dtype), bias=torch.cat(biases).to(dtype) if biases else None
    )


class Layer(nn.Module):
    """An ordinary decoder layer. With `joined` its attention reads a normed embedding beside the hidden state, and
    with `normed_residual` it adds to that state as normed.
    """

    def __init__(self, c: ModelConfig, joined: bool = False, normed_residual: bool = False) -> None:
        super().__init__()
        self.normed_residual = normed_residual
        self.input_layernorm = RmsNorm((c.hidden,), c.norm_eps)
        if joined:
            self.hidden_norm = RmsNorm((c.hidden,), c.norm_eps)
        self.self_attn = Attention(c, 2 * c.hidden if joined else c.hidden)
        self.post_attention_layernorm = RmsNorm((c.hidden,), c.norm_eps)
        self.mlp = Mlp(c)

    def packed(self, dtype: torch.dtype) -> Packed:
        a, m = self.self_attn, self.mlp
        return Packed(
            dtype,
            together(dtype, a.q_proj, a.k_proj, a.v_proj),
            together(dtype, a.o_proj),
            together(dtype, m.gate_proj, m.up_proj),
            together(dtype, m.down_proj),
        )

    def forward(
        self, hidden: Tensor, packed: Packed, rotary: Rotary, past: Past, embedded: Tensor | None = None
    ) -> Tensor:
        """`embedded`: the embedding through input_layernorm, in the dtype of matmuls, for a layer that is joined."""
        dtype = packed.dtype
        if embedded is None:
            seen = self.input_layernorm(hidden).to(dtype)
        else:
            normed = self.hidden_norm(hidden)
            seen = torch.cat([embedded, normed.to(dtype)], -1)
            hidden = normed if self.normed_residual else hidden
        hidden = hidden + self.self_attn(seen, packed, rotary, past)
        inner = packed.gate_up(self.post_attention_layernorm(hidden).to(dtype))
        return hidden + packed.down(Gated.apply(inner))


class Turns:
    """Rotary tables where training is, made once."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._kept: dict[torch.device, Rotary] = {}

    def of(self, length: int, device: torch.device) -> Rotary:
        if device not in self._kept or len(self._kept[device][0]) < length:
            cos, sin = rope_tables(self.config, 1 << (length - 1).bit_length()).only
            wide = (torch.cat(pair, -1)[:, None] for pair in ((cos, cos), (-sin, sin)))
            self._kept[device] = next(wide).to(device), next(wide).to(device)
        cos, sin = self._kept[device]
        return cos[:length], sin[:length]
