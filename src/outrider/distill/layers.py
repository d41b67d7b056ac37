"""Decoder layers in torch with gradients, under Hugging Face's names: what a draft is made of while it is trained.

Serving has its own packed twins (model/kernels, draft/eagle_head.py); parity tests hold the two together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.load.config import ModelConfig
from outrider.model.kernels.reference import rotate
from outrider.model.rope import rope_tables

SPREAD = 0.02  # standard deviation of fresh weights

Rotary = tuple[Tensor, Tensor]  # cos and sin, [T, head_dim / 2]
Past = list[tuple[Tensor, Tensor]]  # keys and values [B, kv_heads, T, head_dim] of every unrolled step so far


class RmsNorm(nn.Module):
    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def fresh_linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(linear.weight, std=SPREAD)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, inputs: int, window: int = 0) -> None:
        super().__init__()
        self.config, self.window = c, window
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = fresh_linear(inputs, q, c.qkv_bias)
        self.k_proj = fresh_linear(inputs, kv, c.qkv_bias)
        self.v_proj = fresh_linear(inputs, kv, c.qkv_bias)
        self.o_proj = fresh_linear(q, c.hidden, c.out_bias)
        if c.qk_norm:
            self.q_norm = RmsNorm((c.head_dim,), c.norm_eps)
            self.k_norm = RmsNorm((c.head_dim,), c.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, past: Past) -> Tensor:
        """x [B, T, inputs] of the step after those in `past`, which gets its keys and values."""
        c = self.config
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        past.append((rotate(k, *rotary).to(v.dtype), v))
        mixed = attend(rotate(q, *rotary).to(v.dtype), past, self.window)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


def attend(q: Tensor, past: Past, window: int = 0) -> Tensor:
    """What serving would see in the last unrolled step: q [B, heads, T, head_dim] -> the same shape.

    In step k, position i is the end of a draft of k tokens behind the known entries up to i - k. It sees these as
    step 0 made them, and of its own draft the entry of step m at i - k + m.
    """
    k, (keys, values) = len(past) - 1, past[0]
    length = q.shape[2]
    grouped = q.unflatten(1, (keys.shape[1], -1)) * q.shape[-1] ** -0.5  # [B, kv_heads, group, T, head_dim]
    known = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (-1, length))
    at = torch.arange(length, device=q.device)
    behind = at[:, None] - at
    hidden = behind < k if not window else (behind < k) | (behind >= window)
    scores = [known.masked_fill(hidden, float("-inf"))]
    own = [(shift(a, k - m)[:, :, None], shift(b, k - m)[:, :, None]) for m, (a, b) in enumerate(past) if m]
    scores += [(grouped * key).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat(scores, -1).float().softmax(-1).to(values.dtype)
    mixed = (weights[..., :length].flatten(2, 3) @ values).unflatten(2, (-1, length))
    for column, (_, value) in enumerate(own, length):
        mixed = mixed + weights[..., column, None] * value
    return mixed.flatten(1, 2)


def shift(x: Tensor, places: int) -> Tensor:
    """x [..., T, n] with everything so many places later; zeros come in."""
    return F.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :] if places else x


class Mlp(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = fresh_linear(c.hidden, c.intermediate, c.mlp_bias)
        self.up_proj = fresh_linear(c.hidden, c.intermediate, c.mlp_bias)
        self.down_proj = fresh_linear(c.intermediate, c.hidden, c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """An ordinary decoder layer. With `joined` its attention reads a normed embedding beside the hidden state, and
    with `normed_residual` it adds to that state as normed.
    """

    def __init__(
        self, c: ModelConfig, joined: bool = False, normed_residual: bool = False, window: int = 0
    ) -> None:
        super().__init__()
        self.normed_residual = normed_residual
        self.input_layernorm = RmsNorm((c.hidden,), c.norm_eps)
        if joined:
            self.hidden_norm = RmsNorm((c.hidden,), c.norm_eps)
        self.self_attn = Attention(c, 2 * c.hidden if joined else c.hidden, window)
        self.post_attention_layernorm = RmsNorm((c.hidden,), c.norm_eps)
        self.mlp = Mlp(c)

    def forward(self, hidden: Tensor, rotary: Rotary, past: Past, embedded: Tensor | None = None) -> Tensor:
        if embedded is None:
            seen = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            seen = torch.cat([self.input_layernorm(embedded), normed], -1)
            hidden = normed if self.normed_residual else hidden
        hidden = hidden + self.self_attn(seen, rotary, past).float()
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden)).float()
        return out


def rotary(config: ModelConfig, length: int, device: torch.device) -> Rotary:
    cos, sin = rope_tables(config, length)
    return cos.to(device), sin.to(device)
