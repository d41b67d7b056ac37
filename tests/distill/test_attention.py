"""Attention of unrolled steps against one written out entry by entry, with torch's own gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.distill import attention
from outrider.distill.attention import Attend, Dense, Flash, flash_works
from outrider.distill.layers import Gated, Turns
from outrider.model.kernels.reference import rotate
from outrider.model.rope import rope_tables
from tests.tiny import tiny_config

HEADS, SHARED, DIM, LENGTH, STEPS = 6, 2, 16, 9, 4
CONFIG = tiny_config(head_dim=DIM)


def written_out(qkvs: list[Tensor], window: int) -> list[Tensor]:
    """Position i of step k sees step 0 up to i - k, and step m at i - k + m."""
    cos, sin = (table[:, None] for table in rope_tables(CONFIG, LENGTH).only)
    made, keys, values = [], [], []
    for k, qkv in enumerate(qkvs):
        q, key, value = qkv.split([HEADS, SHARED, SHARED], 2)
        q = rotate(q, cos, sin)
        keys.append(rotate(key, cos, sin).repeat_interleave(HEADS // SHARED, 2))
        values.append(value.repeat_interleave(HEADS // SHARED, 2))
        rows = [torch.zeros_like(q[:, 0])] * k
        for i in range(k, LENGTH):
            seen = [(0, j) for j in range(i - k + 1) if not window or i - j < window]
            seen += [(m, i - k + m) for m in range(1, k + 1)]
            some = [torch.stack([kept[m][:, j] for m, j in seen], 1) for kept in (keys, values)]
            weights = (torch.einsum("bhd,bjhd->bhj", q[:, i], some[0]) * DIM**-0.5).softmax(-1)
            rows.append(torch.einsum("bhj,bjhd->bhd", weights, some[1]))
        made.append(torch.stack(rows, 1).flatten(2))
    return made


def unrolled(qkvs: list[Tensor], window: int) -> list[Tensor]:
    turn, past, made = Turns(CONFIG).of(LENGTH, torch.device("cpu")), [], []
    for qkv in qkvs:
        mixed, *entries = Attend.apply(qkv, turn, HEADS, window, *past)
        made.append(mixed)
        past += entries
    return made


def with_gradients(run: Callable[..., list[Tensor]], qkvs: list[Tensor], window: int) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in qkvs]
    made = run(leaves, window)
    slopes = torch.randn(len(made), *made[0].shape, generator=torch.Generator().manual_seed(1))
    return [*made, *torch.autograd.grad(made, leaves, list(slopes))]


class OfTheHost(Flash):
    """The twin of a device's kernel that torch has for the host: called alike, with fewer numbers around it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        wide = (one.repeat_interleave(HEADS // SHARED, 1) for one in (k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, *wide, 0.0, True)

    def backward(self, slope, q, k, v, out, logs):
        wide = (one.repeat_interleave(HEADS // SHARED, 1) for one in (k, v))
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        of_q, *rest = run(slope, q, *wide, out, logs, 0.0, True)
        return of_q, *(one.unflatten(1, (SHARED, -1)).sum(2) for one in rest)


@pytest.mark.parametrize(("window", "kernel"), [(0, Dense), (4, Dense), (0, OfTheHost)])
def test_it_sees_what_serving_would_and_passes_gradients_on(window: int, kernel, monkeypatch) -> None:
    if kernel is OfTheHost:
        monkeypatch.setattr(attention, "causal_for", lambda *_: OfTheHost())
    random = torch.Generator().manual_seed(0)
    qkvs = [torch.randn(2, LENGTH, HEADS + 2 * SHARED, DIM, generator=random) for _ in range(STEPS)]
    for ours, known in zip(
        with_gradients(unrolled, qkvs, window), with_gradients(written_out, qkvs, window), strict=True
    ):
        torch.testing.assert_close(ours, known, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_is_not_there_is_not_used() -> None:
    assert not flash_works(torch.device("cpu"))  # it is called as a GPU's is


def test_a_gated_product_passes_gradients_on() -> None:
    both = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(Gated.apply(both), torch.nn.functional.silu(gate) * up)
    assert torch.autograd.gradcheck(Gated.apply, (both,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_has_a_kernel_of_its_own() -> None:
    assert flash_works(torch.device("cuda"))
