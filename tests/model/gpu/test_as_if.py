"""A widened model computes what the small one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.bench.as_if import AsIf, Wide, shape_of, spread_layers, widen
from outrider.errors import InvalidRequest
from outrider.model.decoder import Decoder, make_kernels
from outrider.types import Draft
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.tiny import VOCAB, random_tensors, tiny_config

SMALL = tiny_config(heads=6, kv_heads=2, hidden=96, layers=2, tied=True)
WIDE = Wide(hidden=256, layers=3, heads=16, kv_heads=4, intermediate=112, vocab=130)


def widened(kept: tuple[int, ...] | None = None, wide: Wide = WIDE) -> AsIf:
    config, read = widen(SMALL, random_tensors(SMALL), wide, kept=kept)
    return AsIf(config, read, make_kernels(config, 128, 1, Path(), "torch"), SMALL.vocab)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_small_models(tied: bool) -> None:
    small = Decoder(SMALL, random_tensors(SMALL), make_kernels(SMALL, 128, 1, Path(), "torch"))
    ids, draft = random_ids(VOCAB, 12), Draft((1, 2, 3), (-1, 0, 0))
    wide = Wide(256, 3, 16, 4, 112, 130, tied)
    results = [Reader(m.config).feed(m, Part(0, ids, draft)) for m in (widened(wide=wide), small)]
    assert results[0].shape == results[1].shape
    assert furthest(*results) < 1e-5


def test_pads_are_random_but_the_same_for_the_same_name() -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    first, again = (widen(SMALL, random_tensors(SMALL), WIDE)[1](name) for _ in range(2))
    assert torch.equal(first, again)
    assert (first != 0).all()
    assert not torch.equal(first, widen(SMALL, random_tensors(SMALL), WIDE)[1](name.replace("0", "2")))


def test_layers_can_be_left_out() -> None:
    read = random_tensors(SMALL)  # drawn as they are asked for: one reader for both
    thin = Decoder(
        tiny_config(heads=6, kv_heads=2, hidden=96, layers=1, windows=(0,)),
        lambda name: read(name.replace("layers.0.", "layers.1.")),
        make_kernels(SMALL, 128, 1, Path(), "torch"),
    )
    config, wide_read = widen(SMALL, read, WIDE, kept=(1,))
    wide = AsIf(config, wide_read, make_kernels(config, 128, 1, Path(), "torch"), SMALL.vocab)
    ids = random_ids(VOCAB, 9)
    assert furthest(*(Reader(m.config).read(m, ids) for m in (wide, thin))) < 1e-5


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InvalidRequest, match="8b"):
        shape_of("8bb")
    with pytest.raises(InvalidRequest, match="keep fewer"):
        widened(wide=Wide(256, 1, 16, 4, 112, 130))
    with pytest.raises(InvalidRequest, match="hidden"):
        widened(wide=Wide(64, 3, 16, 4, 112, 130))


def test_kept_layers_are_spread() -> None:
    assert spread_layers(30, 16)[0] == 0 and spread_layers(30, 16)[-1] == 29
    assert len(set(spread_layers(30, 16))) == 16
    assert spread_layers(3, 5) == (0, 1, 2)
