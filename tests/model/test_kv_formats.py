"""Keys and values that a CPU keeps in fewer bits: the bits of attention over the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.cache.formats import stored, widened
from outrider.cache.store import KeyValueStore
from outrider.model.decoder import make_kernels
from outrider.types import Draft
from tests.model.batches import Part, Reader, random_ids
from tests.model.families import NEEDS_COMPILER
from tests.tiny import VOCAB, tiny_config, tiny_model

FEWER = (torch.bfloat16, torch.int8)
TREE = Draft((5, 6, 7, 8, 9, 10, 11), (-1, 0, 0, -1, 2, 4, 5))


@NEEDS_COMPILER
@pytest.mark.parametrize("kept", FEWER)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 1, 64), (5, 1, 80), (2, 2, 272)])
@pytest.mark.parametrize("window", [0, 70])
def test_attention(
    kept: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int, kernel_folder: Path
) -> None:
    """Alone and in rows that share blocks, over more than one block, with draft nodes."""
    config = tiny_config(heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=1, windows=(window,))
    kernels = make_kernels(config, 400, 2, kernel_folder, "c")
    reader = Reader(config, texts=2, longest=300)
    reader.lengths = [150, 63]
    batch = reader.batch(Part(0, [1] * 40, TREE), Part(1, [2] * 3))
    made = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, len(reader.store.keys[0]), kv_heads, head_dim, generator=made)
    q = torch.randn(batch.rows, heads, head_dim, generator=made)
    packed = [stored(one, kept) for one in numbers]
    expected = kernels.attention(q, batch, *(widened(one) for one in packed), window, 0.3)
    assert torch.equal(kernels.attention(q, batch, *packed, window, 0.3), expected)
    twin = make_kernels(config, 400, 1, kernel_folder, "torch").attention(q, batch, *packed, window, 0.3)
    assert torch.allclose(twin, expected, atol=1e-4)


@pytest.mark.parametrize("kept", FEWER)
@pytest.mark.parametrize("kernels", [pytest.param("c", marks=NEEDS_COMPILER), "torch"])
def test_a_pass_keeps_the_nearest_numbers(kept: torch.dtype, kernels: str) -> None:
    """Those of its first layer, which read nothing that was rounded; and it reads what it has kept."""
    model = tiny_model(kernels=kernels)
    reader = Reader(model.config, longest=100)
    batch = reader.batch(Part(0, random_ids(VOCAB, 70)))
    whole = reader.store
    packed = KeyValueStore(model.config.kv_shapes, whole.slots, kept=kept)
    exact, rounded = model.forward(batch, whole), model.forward(batch, packed)
    for there, numbers in ((packed.keys[0], whole.keys[0]), (packed.values[0], whole.values[0])):
        assert torch.equal(there[batch.slots], stored(numbers[batch.slots], kept))
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().mean() < 0.05 * exact.std()
    again = model.forward(batch, KeyValueStore(model.config.kv_shapes, whole.slots))
    assert torch.equal(again, exact)  # the model is as it was


def test_the_same_model_reads_stores_of_different_formats_in_turn() -> None:
    model = tiny_model()
    reader = Reader(model.config, longest=40)
    batch = reader.batch(Part(0, random_ids(VOCAB, 30)))
    stores = [
        KeyValueStore(model.config.kv_shapes, reader.store.slots, kept=kept) for kept in (*FEWER, *FEWER)
    ]
    one, two, *others = [model.forward(batch, store) for store in stores]
    assert not torch.equal(one, two)
    assert torch.equal(others[0], one) and torch.equal(others[1], two)
