"""Attention of a draft that is unrolled, with its gradient in closed form.

In step k, position i is the end of a draft of k tokens after the known entries up to i - k. It attends to the known
entries as step 0 made them, and to its draft's entry of step m at position i - k + m. So queries from position k on,
shifted back by k, are causal over the keys of step 0, and have k more keys each. The two parts are joined by the logs
of their sums. A kernel's gradient of the first part is correct if it is given the output and the log of the sum of
both parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CLOSE = 0.03  # how far a device's kernel in bfloat16 may be from float32, of values around one

Rotary = tuple[Tensor, Tensor]  # cos and sin, [T, 1, head_dim]


class Causal(Protocol):
    """Causal attention over q [B, heads, T, head_dim] and k, v [B, kv_heads, T, head_dim]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What it comes to, as q, and the logs of the sums [B, heads, T], float32."""
        ...

    def backward(self, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor) -> Tensors:
        """Gradients of q, k, v. `out` and `logs` may be of more keys than these."""
        ...


Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Dense:
    """Score by score, on any device. Keys `window` places back and further, counted `behind` more, are not seen."""

    window: int = 0
    behind: int = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k)
        logs = scores.logsumexp(-1)
        weights = (scores - logs[..., None]).exp().to(v.dtype)
        return (weights.flatten(2, 3) @ v).view_as(q), logs.flatten(1, 2)

    def backward(self, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor) -> Tensors:
        grouped, sloped = _grouped(q, k), _grouped(slope, k)
        weights = (self._scores(q, k) - _grouped(logs, k)[..., None]).exp()
        fall = (sloped.float() * _grouped(out, k)).sum(-1, keepdim=True)
        of_weights = (sloped.flatten(2, 3) @ v.transpose(-1, -2)).view_as(weights).float()
        of_scores = (weights * (of_weights - fall) * q.shape[-1] ** -0.5).to(q.dtype)
        of_q = (of_scores.flatten(2, 3) @ k).view_as(q)
        of_k = of_scores.flatten(2, 3).transpose(-1, -2) @ grouped.flatten(2, 3)
        of_v = weights.to(v.dtype).flatten(2, 3).transpose(-1, -2) @ sloped.flatten(2, 3)
        return of_q, of_k, of_v

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, kv_heads, group, T, T] float32."""
        grouped = _grouped(q, k)
        scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, grouped.shape[2:4])
        at = torch.arange(k.shape[2], device=k.device)
        back = at[:, None] - at
        hidden = back < 0 if not self.window else (back < 0) | (back + self.behind >= self.window)
        return (scores.float() * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))


class Flash:
    """The device's own kernel, in 16 bits."""

    def __init__(self) -> None:
        self._rest: Sequence[Any] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        run = torch.ops.aten._scaled_dot_product_flash_attention.default
        wide = (one.repeat_interleave(group, 1) for one in (k, v))
        out, logs, *self._rest = run(q, *wide, 0.0, True, False, scale=q.shape[-1] ** -0.5)
        return out, logs

    def backward(self, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor) -> Tensors:
        group = q.shape[1] // k.shape[1]
        run = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        of_queries, of_keys, longest, most, seed, offset, *_ = self._rest
        wide = (one.repeat_interleave(group, 1) for one in (k, v))
        before = torch.are_deterministic_algorithms_enabled()
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        # Else its sums come in any order, and no run is like another.
        torch.use_deterministic_algorithms(True)
        try:
            of_q, of_k, of_v = run(
                slope, q, *wide, out, logs, of_queries, of_keys, longest, most, 0.0, True, seed, offset,
                scale=q.shape[-1] ** -0.5,
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)
        return of_q, _grouped(of_k, k).sum(2), _grouped(of_v, v).sum(2)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, heads, ...] -> [B, kv_heads, group, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def causal_for(values: Tensor, window: int, behind: int) -> Causal:
    half = values.dtype in (torch.bfloat16, torch.float16)
    if values.is_cuda and half and not window and flash_works(values.device):
        return Flash()
    return Dense(window, behind)


@functools.cache
def flash_works(device: torch.device) -> bool:
    """Whether the device's kernel is there and gives what it should: how it is called is not promised by torch."""
    random = torch.Generator(device).manual_seed(0)
    q = torch.randn(2, 4, 37, 64, generator=random, device=device)
    k, v = (torch.randn(2, 2, 37, 64, generator=random, device=device) for _ in range(2))
    slope = torch.randn(2, 4, 37, 64, generator=random, device=device)
    found: list[list[Tensor]] = []
    for kernel, dtype in ((Dense(), torch.float32), (Flash(), torch.bfloat16)):
        a, b, c, d = (one.to(dtype) for one in (q, k, v, slope))
        try:
            out, logs = kernel.forward(a, b, c)
            more = logs + 0.5  # as if there were other keys
            found.append([out, *kernel.backward(d, a, b, c, out, more)])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False
    return all(bool((b - a).abs().mean() < CLOSE * a.abs().mean()) for a, b in zip(*found, strict=True))


def rotated(x: Tensor, turn: Rotary, back: bool = False) -> Tensor:
    """The halves (a, b) of x [B, T, heads, head_dim] -> (a cos - b sin, b cos + a sin), or back from there."""
    cos, sin = turn
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin, value=-1.0 if back else 1.0).to(x.dtype)


class Attend(torch.autograd.Function):
    """One unrolled step: qkv [B, T, heads + 2 kv_heads, head_dim] and the keys and values [B, kv_heads, T, head_dim]
    of the steps before it -> [B, T, heads * head_dim], and its own keys and values. Before position k of step k there
    is nothing to see, and zeros come out.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Rotary, heads: int, window: int, *past: Tensor) -> Tensors:
        k, shared = len(past) // 2, (qkv.shape[2] - heads) // 2
        turned = rotated(qkv[:, :, : heads + shared], turn)
        q = turned[:, k:, :heads].transpose(1, 2)
        key = turned[:, :, heads:].transpose(1, 2)
        value = qkv[:, :, heads + shared :].transpose(1, 2).contiguous()
        keys, values = [*past[::2], key], [*past[1::2], value]
        causal = causal_for(value, window, k)
        n = qkv.shape[1] - k
        out, logs = causal.forward(q, keys[0][:, :, :n], values[0][:, :, :n])
        weights = own_keys = own_values = None
        if k:
            own_keys, own_values = _own(keys, n), _own(values, n)
            out, logs, weights = _joined(q, out, logs, own_keys, own_values)
        ctx.save_for_backward(q, keys[0], values[0], own_keys, own_values, weights, out, logs)
        ctx.turn, ctx.causal, ctx.steps, ctx.length = turn, causal, k, qkv.shape[1]
        return F.pad(out.transpose(1, 2).flatten(2), (0, 0, k, 0)), key, value

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, own_keys, own_values, weights, out, logs = ctx.saved_tensors
        k, n = ctx.steps, ctx.length - ctx.steps
        slope = slopes[0][:, k:].unflatten(2, (q.shape[1], -1)).transpose(1, 2)
        of_q, *of_known = ctx.causal.backward(slope, q, key[:, :, :n], value[:, :, :n], out, logs)
        of_keys, of_values = ([F.pad(one, (0, 0, 0, k))] for one in of_known)
        if k:
            more, of_own_keys, of_own_values = _joined_back(slope, q, own_keys, own_values, weights, out)
            of_q = of_q + more
            for m in range(1, k + 1):  # the entry of step m, from its place m on
                place = (0, 0, m, k - m)
                of_keys.append(F.pad(of_own_keys[..., m - 1, :], place))
                of_values.append(F.pad(of_own_values[..., m - 1, :], place))
        of_q = F.pad(of_q, (0, 0, k, 0))
        of_turned = torch.cat([of_q, slopes[1] + of_keys.pop()], 1).transpose(1, 2)
        of_value = (slopes[2] + of_values.pop()).transpose(1, 2)
        of_qkv = torch.cat([rotated(of_turned, ctx.turn, back=True), of_value], 2)
        of_past = [one for pair in zip(of_keys, of_values, strict=True) for one in pair]
        return of_qkv, None, None, None, *of_past


def _own(entries: Sequence[Tensor], n: int) -> Tensor:
    """[B, kv_heads, 1, n, k, head_dim]: for each position of n, the entries of its own draft."""
    return torch.stack([one[:, :, m : m + n] for m, one in enumerate(entries) if m], 3).unsqueeze(2)


def _joined(q: Tensor, out: Tensor, logs: Tensor, keys: Tensor, values: Tensor) -> Tensors:
    """The known part joined with the k entries of the draft: the output, the logs of the sums, and the weights of both
    [B, kv_heads, group, n, 1 + k], float32.
    """
    grouped = _grouped(q, keys)[..., None, :]
    scores = (grouped * keys).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5
    both = torch.cat([_grouped(logs, keys)[..., None], scores], -1)
    joined = both.logsumexp(-1, keepdim=True)
    weights = (both - joined).exp()
    own = (weights[..., 1:, None].to(q.dtype) * values).sum(-2, dtype=torch.float32)
    whole = torch.addcmul(own, weights[..., :1], _grouped(out, keys).float())
    return whole.flatten(1, 2).to(q.dtype), joined.flatten(1, 2).squeeze(-1), weights


def _joined_back(
    slope: Tensor, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor, out: Tensor
) -> Tensors:
    """Gradients by the own part: of q, and of the own keys and values [B, kv_heads, n, k, head_dim]."""
    sloped, own = _grouped(slope, keys)[..., None, :], weights[..., 1:]
    fall = (slope.float() * out).sum(-1)
    of_weights = (sloped * values).sum(-1, dtype=torch.float32)
    of_scores = own * (of_weights - _grouped(fall, keys)[..., None]) * q.shape[-1] ** -0.5
    of_scores, own = (one[..., None].to(q.dtype) for one in (of_scores, own))
    of_q = (of_scores * keys).sum(-2).flatten(1, 2)
    return of_q, (of_scores * _grouped(q, keys)[..., None, :]).sum(2), (own * sloped).sum(2)
