"""A widened model computes what the small one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.bench.as_if import WideCheckpoint
from outrider.bench.widen import Wide, named_layers, shape_of, spread_layers, widen
from outrider.errors import InvalidRequest, UnsupportedModel
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.families import config_from_json
from outrider.model.decoder import Decoder, make_kernels
from outrider.types import Draft
from tests.load.tiny import write_folder
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.tiny import VOCAB, random_tensors, tiny_config

SMALL = tiny_config(heads=6, kv_heads=2, hidden=96, layers=2, tied=True)
WIDE = Wide(hidden=256, layers=3, heads=16, kv_heads=4, intermediate=112, vocab=130)
MIXTURE = replace(WIDE, intermediate=20, experts=18, per_token=6)  # 3 experts hold the MLP of 48


def widened(kept: tuple[int, ...] | None = None, wide: Wide = WIDE) -> Decoder:
    config, read = widen(SMALL, random_tensors(SMALL), wide, kept=kept)
    return Decoder(config, read, make_kernels(config, 128, 1, Path(), "torch"))


@pytest.mark.parametrize("shape", [WIDE, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_small_models(tied: bool, shape: Wide) -> None:
    small = Decoder(SMALL, random_tensors(SMALL), make_kernels(SMALL, 128, 1, Path(), "torch"))
    ids, draft = random_ids(VOCAB, 12), Draft((1, 2, 3), (-1, 0, 0))
    wide = replace(shape, tied=tied)
    made, expected = (Reader(m.config).feed(m, Part(0, ids, draft)) for m in (widened(wide=wide), small))
    real = made[:, :VOCAB]
    assert furthest(real - real.mean(1, keepdim=True), expected - expected.mean(1, keepdim=True)) < 1e-5
    assert furthest(real, expected) < 1e-3  # a tied head lifts all real ids alike, a little
    assert made.shape[1] == 130
    assert (made[:, VOCAB:] < real.min() - 1000).all()


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
    wide = Decoder(config, wide_read, make_kernels(config, 128, 1, Path(), "torch"))
    ids = random_ids(VOCAB, 9)
    made, expected = (Reader(m.config).read(m, ids) for m in (wide, thin))
    assert furthest(made[:, :VOCAB], expected) < 1e-5


def test_what_does_not_fit_is_named() -> None:
    for wrong in ("8bb", "1:2:3:4", "640:30:12:3:0", "640:30:12:3:x", "640:30:12:3:96:8x", "8x2"):
        with pytest.raises(InvalidRequest, match="unknown shape"):
            shape_of(wrong)
    assert shape_of("640:30:12:3:1600") == Wide(640, 30, 12, 3, 1600, tied=True)
    assert shape_of("640:30:12:3:384:49408:16x8") == Wide(640, 30, 12, 3, 384, 49408, True, 16, 8)
    for experts, per_token in ((12, 5), (11, 6), (6, 9)):
        with pytest.raises(InvalidRequest, match="3 experts of 20 hold this model's MLP of 48"):
            widened(wide=replace(MIXTURE, experts=experts, per_token=per_token))
    with pytest.raises(InvalidRequest, match="larger than the model's 96"):
        widened(wide=Wide(96, 3, 16, 4, 112, 130))
    with pytest.raises(InvalidRequest, match="not whole"):
        widened(wide=Wide(256, 3, 16, 3, 112, 130))
    with pytest.raises(UnsupportedModel, match="ties"):
        widen(tiny_config(tied=False), random_tensors(SMALL), Wide(256, 3, 16, 4, 112, 130, tied=True))
    with pytest.raises(InvalidRequest, match="keep fewer"):
        widened(wide=Wide(256, 1, 16, 4, 112, 130))
    with pytest.raises(InvalidRequest, match="hidden"):
        widened(wide=Wide(64, 3, 16, 4, 112, 130))


def test_kept_layers_are_spread() -> None:
    assert spread_layers(30, 16)[0] == 0 and spread_layers(30, 16)[-1] == 29
    assert len(set(spread_layers(30, 16))) == 16
    assert spread_layers(3, 5) == (0, 1, 2)
    with pytest.raises(InvalidRequest, match="at least 2"):
        spread_layers(30, 1)


def test_layers_by_name() -> None:
    assert named_layers(30, "28") == spread_layers(30, 28)
    assert named_layers(9, "0-3,5,7-8") == (0, 1, 2, 3, 5, 7, 8)
    for wrong in ("", "x", "1-", "-3", "0-3,,5", "0-1x"):
        with pytest.raises(InvalidRequest, match="a number or ranges"):
            named_layers(9, wrong)
    for wrong in ("0-9", "3,2", "0-3,3-5", "0-0", "5-2"):
        with pytest.raises(InvalidRequest, match="each once, in order"):
            named_layers(9, wrong)


def test_the_constant_is_lost_in_rounding() -> None:
    """Beside an embedding, the smallest stream there is, its square is less than float32 can tell."""
    stream = widen(SMALL, random_tensors(SMALL), WIDE)[1]("model.embed_tokens.weight")[:VOCAB].double()
    constant = stream[:, SMALL.hidden].pow(2)
    assert (constant > 0).all()
    assert (constant / stream.pow(2).sum(1)).max() < torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", ["40:3:8:4:70", "40:3:8:4:35:300:8x4"])
def test_a_wide_checkpoint_is_a_checkpoint(shape: str, tmp_path: Path) -> None:
    """What it says of its tensors is what they are, and the same again after a round through a file."""
    write_folder(tmp_path)
    small = open_checkpoint(tmp_path)
    made = WideCheckpoint(small, shape_of(shape))
    check_shapes(made)
    assert all(tuple(made.tensor(name).shape) == made.shape(name) for name in made.names())
    assert made.total_bytes == sum(made.tensor(name).nbytes for name in made.names())
    assert config_from_json(made.raw_config, {}) == replace(made.config, raw=made.raw_config)
    assert made.tokenizer is small.tokenizer
