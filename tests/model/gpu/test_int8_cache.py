"""Keys and values in 8 bits: the bits of attention over the numbers that they stand for, and what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.cache.formats import FORMATS, stored, widened
from tests.model.batches import Part, Reader
from tests.model.gpu.test_kernels import HALF, TREE, Past, noise, to_device
from tests.sweep import sweep
from tests.tiny import tiny_config

at: Any = pytest.importorskip("outrider.model.kernels.gpu.attention")
rows: Any = pytest.importorskip("outrider.model.kernels.gpu.rows")


@pytest.mark.parametrize(
    ("heads", "window", "whole"),
    sweep(
        [((2, 2, 16), 0, None), ((4, 1, 64), 70, None), ((3, 1, 80), 9, True), ((2, 1, 16), 0, True)],
        quick=[((4, 1, 64), 70, None), ((2, 1, 16), 0, True)],
    ),
)
def test_attention_has_the_bits_of_the_numbers_that_int8_stands_for(
    device: str, heads: tuple[int, int, int], window: int, whole: bool | None
) -> None:
    past = Past(device, *heads, [63, 0], room=140, sinks=True)
    draft = () if whole else (TREE,)
    batch = past.batch(Part(0, [1, 2], *draft), Part(1, [3] * 70))
    q = past.queries(batch)
    packed = [stored(numbers, torch.int8) for numbers in (past.keys, past.values)]
    past.keys, past.values = (widened(numbers).to(HALF) for numbers in packed)
    expected = past.attend(q, batch, window, whole)
    assert expected.isfinite().all()
    past.keys, past.values = packed
    assert torch.equal(past.attend(q, batch, window, whole), expected)
    assert torch.allclose(past.twin(q, batch, window).float(), expected, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 128)])
def test_a_row_has_the_bits_that_it_has_in_taller_programs(device: str, heads: tuple[int, int, int]) -> None:
    """Which other instructions compute; what they are given must lie in the same order (test_compile.py)."""
    past = Past(device, *heads, [300], room=400)
    batch = past.batch(Part(0, [1] * 64))
    q = past.queries(batch)
    past.keys, past.values = (stored(numbers, torch.int8) for numbers in (past.keys, past.values))
    expected = past.attend(q, batch, tile=16)
    for tile in (32, 64):
        assert torch.equal(past.attend(q, batch, tile=tile), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 16)])
@pytest.mark.parametrize("single", [False, True])
def test_a_pass_leaves_its_keys_and_values_rounded(
    device: str, heads: int, kv_heads: int, dim: int, single: bool
) -> None:
    """Also where each row is the only one of its text, which otherwise turns its own key."""
    reader = Reader(tiny_config(kv_heads=kv_heads, heads=heads, head_dim=dim), longest=16)
    batch = to_device(reader.batch(Part(0, [1]) if single else Part(0, [1] * 4, TREE)), device)
    parts = noise(2, batch.rows, (heads + 2 * kv_heads) * dim).to(device)
    angles = noise(64, dim // 2, seed=3)
    tables = angles.cos().to(device), angles.sin().to(device)
    slots, written = batch.slots.long(), {}
    for kept in (HALF, torch.int8):
        keys = stored(torch.zeros(len(reader.store.keys[0]), kv_heads, dim, device=device), kept)
        values, out = keys.clone(), torch.empty(batch.rows, heads, dim, dtype=HALF, device=device)
        attention = at.plan_attention(batch, heads, kv_heads, dim)
        assert attention.single == single
        at.attend(at.Fresh(parts, tables, None), batch, keys, values, 0, 0.3, attention, out)
        written[kept] = keys[slots], values[slots], out
    for whole, packed in zip(written[HALF][:2], written[torch.int8][:2], strict=True):
        expected = stored(whole, torch.int8)
        exact = whole.double() / whole.double().abs().amax(-1, keepdim=True) * 127
        assert ((packed[..., :-4].double() - exact).abs() <= 0.5 + 1e-4).all()  # a nearest number
        # A device divides in its own way, so a number half-way between two may become either.
        clear = ((exact - exact.floor()) - 0.5).abs() > 1e-4
        assert clear.sum() > 0.9 * clear.numel()
        assert torch.equal(packed[..., :-4][clear], expected[..., :-4][clear])
        scales, wanted = (one[..., -4:].contiguous().view(torch.float32) for one in (packed, expected))
        assert torch.allclose(scales, wanted, rtol=1e-6)
        assert packed[..., :-4].abs().amax() == 127
    assert (written[torch.int8][2] - written[HALF][2]).abs().mean() < 2e-2


def test_an_empty_slot_reads_as_zeros() -> None:
    """A GPU loads masked slots with weight 0: they must hold finite numbers."""
    for dtype in FORMATS.values():
        assert not widened(torch.zeros(2, 3, 20, dtype=dtype)).any()
