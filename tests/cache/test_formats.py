"""Number formats of the KV cache: what they keep, and how much memory they take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.formats import FORMATS, keep, stored, token_bytes, widened
from outrider.cache.store import KeyValueStore

SHAPES = ((3, 16), (1, 48))  # key heads and head size of two layers


@given(seed=st.integers(0, 2**16), power=st.integers(-40, 30), zeros=st.booleans())
def test_int8_is_within_half_a_step_of_each_heads_own_scale(seed: int, power: int, zeros: bool) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    x[2, 1, 4:9] *= 1000  # one token's head has larger numbers, and costs no other
    if zeros:
        x[1] = 0
    step = x.abs().amax(-1, keepdim=True) / 127
    step[step < 1e-32] = 2e-30  # so small that a head counts as zeros
    assert ((widened(stored(x, torch.int8)) - x).abs() <= 0.501 * step).all()


def test_bfloat16_rounds_and_float32_does_not() -> None:
    x = torch.randn(4, 2, 16)
    assert torch.equal(widened(stored(x, torch.float32)), x)
    assert torch.equal(widened(stored(x, torch.bfloat16)), x.bfloat16().float())


@pytest.mark.parametrize("name", FORMATS)
def test_a_store_takes_the_bytes_that_were_counted(name: str) -> None:
    dtype, slots = FORMATS[name], 63
    store = KeyValueStore(SHAPES, slots, kept=dtype)
    each = [tensor.nbytes for tensor in (*store.keys, *store.values)]
    assert sum(each) == (slots + 1) * token_bytes(SHAPES, dtype)
    assert token_bytes(SHAPES, dtype) == {"float32": 768, "bfloat16": 384, "int8": 224}[name]
    store.tap((1,), 24)
    assert (
        store.features is not None and store.features.dtype == torch.float32
    )  # hidden states are not rounded


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_kept_is_read_from_its_slots(name: str) -> None:
    store = KeyValueStore(SHAPES, 7, kept=FORMATS[name])
    x, slots = torch.randn(3, 3, 16), torch.tensor([6, 0, 3])
    keep(store.keys[0], slots, x)
    assert torch.equal(widened(store.keys[0][slots]), widened(stored(x, FORMATS[name])))
    assert torch.allclose(widened(store.keys[0][slots]), x, atol=0.05)
