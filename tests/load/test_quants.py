"""Every number format equals the gguf package's own reading, bit for bit, on any bytes at all."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from outrider.load import quants
from outrider.load.quants import FORMATS, OTHER_FORMATS, dequantize, quantize


@pytest.mark.parametrize("number", FORMATS, ids=[form.name for form in FORMATS.values()])
@pytest.mark.parametrize("blocks", [1, 3, 69])
def test_equals_gguf_bit_for_bit(number: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quants, "CHUNK_BLOCKS", 64
    )  # the last case spans several chunks, the last one cut short
    form = FORMATS[number]
    kind = gguf.GGMLQuantizationType(number)
    assert (form.values, form.bytes) == gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(number).integers(0, 256, blocks * form.bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.copy(), kind).astype(np.float32)
    found = dequantize(torch.from_numpy(raw), form).numpy()
    assert found.dtype == np.float32
    assert found.shape == (blocks * form.values,)
    same = (found.view(np.uint32) == expected.reshape(-1).view(np.uint32)) | np.isnan(found) & np.isnan(
        expected
    )
    if form.name == "MXFP4":  # its 255 is no number; gguf reads it as 2^128
        nothing = np.repeat(raw[:: form.bytes] == 255, form.values)
        assert np.isnan(found[nothing]).all()
        same |= nothing
    assert same.all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", FORMATS, ids=[form.name for form in FORMATS.values()])
def test_a_device_unpacks_the_same_bits(number: int) -> None:
    form = FORMATS[number]
    raw = torch.from_numpy(np.random.default_rng(number).integers(0, 256, 70 * form.bytes, dtype=np.uint8))
    here, there = dequantize(raw, form), dequantize(raw.cuda(), form)
    assert there.is_cuda
    assert torch.equal(here.view(torch.int32), there.cpu().view(torch.int32)) or torch.equal(
        here.nan_to_num(), there.cpu().nan_to_num()
    )


def test_names_are_ggufs_names() -> None:
    for number, name in {**{n: f.name for n, f in FORMATS.items()}, **OTHER_FORMATS}.items():
        assert gguf.GGMLQuantizationType(number).name == name
    assert not set(FORMATS) & set(OTHER_FORMATS)


@pytest.mark.parametrize("columns", [32, 70, 256])
def test_int8_is_the_nearest_of_255_steps(columns: int) -> None:
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    made = quantize(weight, "int8")
    assert (made.form.name, made.shape) == ("Q8_0", (5, columns))
    step = (
        torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in weight.split(32, 1)], 1) / 127
    )
    assert ((made.float() - weight).abs() <= 0.501 * step + 1e-7).all()


@pytest.mark.parametrize("columns", [32, 70, 256])
def test_int4_fits_better_than_the_scale_of_the_largest(columns: int) -> None:
    weight = torch.randn(64, columns, generator=torch.Generator().manual_seed(2))
    weight[2] = 0
    made = quantize(weight, "int4")
    assert (made.form.name, made.shape) == ("Q4_0", (64, columns))
    padded = torch.nn.functional.pad(weight, (0, -columns % 32)).numpy()
    kind = gguf.GGMLQuantizationType.Q4_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(padded, kind), kind))[:, :columns]
    assert (made.float() - weight).square().mean() < 0.97 * (theirs - weight).square().mean()
    assert torch.equal(made.float()[2], weight[2])


def test_rows_are_rounded_alike_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    whole = {kind: quantize(weight, kind).raw for kind in ("int8", "int4")}
    monkeypatch.setattr(quants, "CHUNK_BLOCKS", 4)
    for kind, raw in whole.items():
        assert torch.equal(quantize(weight, kind).raw, raw)
