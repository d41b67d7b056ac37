"""The library multiplies where it gives our bits, and nowhere else."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder, DevicePass, GraphedPass
from outrider.model.kernels.gpu import library, matmul, same_bits
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.rope import rope_tables
from tests.model.batches import Part, furthest, random_ids
from tests.model.gpu.conftest import DEVICE
from tests.model.gpu.test_decoder import HalfReader
from tests.model.gpu.test_kernels import HALF
from tests.tiny import VOCAB, random_tensors, tiny_config

COUNTS = (128, 192)


@pytest.fixture(autouse=True)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts and rows that the interpreter gets through; whole numbers have the same sum in any order."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(same_bits, "COUNTS", COUNTS)
    monkeypatch.setattr(same_bits, "SEEDS", (0,))
    monkeypatch.setattr(same_bits, "GATED_FROM", 0)
    monkeypatch.setattr(same_bits, "ONE_BY_ONE", 0)
    monkeypatch.setattr(same_bits, "WIDENED_FROM", 0)
    monkeypatch.setattr(same_bits, "trial_rows", lambda rows, weight, seed: whole(rows, weight.inputs))


def whole(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


class Product:
    """Stands for the library, with sums that are exact; is off by a little at some row counts."""

    def __init__(self, *off: int) -> None:
        self.off, self.asked = off, []

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.asked.append((len(x), x.shape[1]))
        out.copy_(x.float() @ weight.float().transpose(1, 2))
        if x.shape[1] in self.off:
            out[-1, -1, -1] += 0.5


def test_only_the_note_that_the_choice_is_experimental_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def choose(name: str) -> None:
        asked.append(name)
        os.write(
            2, b"[W Context.cpp:541] " + library.EXPERIMENTAL + b". If you see any error\nanother line\n"
        )

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", choose)
    library._choose_quietly.cache_clear()
    library._choose_quietly()
    library._choose_quietly()
    os.write(2, b"and more\n")
    assert capfd.readouterr().err == "another line\nand more\n" and asked == ["cublaslt"]
    library._choose_quietly.cache_clear()


def packed(outputs: int, inputs: int, halves: int = 1) -> matmul.Packed:
    return matmul.pack(*whole(halves * outputs, inputs, seed=1).chunk(halves))


def cut(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr(matmul, "segments", lambda weight: 1 if weight.gated else pieces)
    monkeypatch.setattr(same_bits, "segments", matmul.segments)
    monkeypatch.setattr(same_bits, "SHORTEST_SEGMENT", 256)


@pytest.mark.parametrize(
    ("rows", "room"),
    [(1, 1), (64, 64), (65, 128), (128, 128), (129, 192), (2047, 2048), (2048, 2048), (2049, 2049)],
)
def test_passes_are_padded_up_to_what_is_compared(rows: int, room: int) -> None:
    assert library.padded_rows(rows) == room
    assert room == rows or room in library.COUNTS


@pytest.mark.parametrize(("inputs", "pieces"), [(96, 1), (512, 2), (700, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_many_rows_are_the_librarys(
    inputs: int, pieces: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, pieces)
    weight, product = packed(70, inputs), Product()
    bias = whole(70, seed=2).float() if biased else None
    x = whole(192, inputs)
    expected = matmul.multiply_parts(x[:130], weight, bias)
    made = same_bits.adopt_library([(weight, bias)], product)
    assert not made.differing and weight.library is not None
    assert weight.library.counts == set(COUNTS)
    product.asked.clear()
    parts = matmul.multiply_parts(x, weight, bias, rows=130)
    assert parts.shape == (pieces, 130, 70)
    assert torch.equal(matmul.add_parts(parts), matmul.add_parts(expected))
    # Segments of one length in one call, which all see the padded rows.
    assert product.asked == ([(pieces, 192)] if inputs % pieces == 0 else [(1, 192)] * pieces)


@pytest.mark.parametrize("biased", [False, True])
def test_gated_products_of_many_rows(biased: bool) -> None:
    weight, product = packed(70, 64, halves=2), Product()
    bias = whole(140, seed=2).float() if biased else None
    x = whole(128, 64)
    expected = matmul.gated_linear(x[:100], weight, bias)
    same_bits.adopt_library([(weight, bias)], product)
    product.asked.clear()
    made = matmul.gated_linear(x, weight, bias, rows=100)
    assert made.shape == (128, 70) and torch.equal(made[:100], expected)
    assert product.asked == [(1, 128)]


def test_row_counts_with_other_bits_stay_with_our_kernels() -> None:
    weight, product = packed(70, 96), Product(192)
    made = same_bits.adopt_library([(weight, None)], product)
    assert weight.library is not None and weight.library.counts == {128}
    assert made.differing == ["70 x 96 at 1 of 2"] and "own kernels: 70 x 96" in made.describe()
    x = whole(192, 96)
    product.asked.clear()
    assert torch.equal(matmul.linear(x, weight, rows=140), x[:140].float() @ weight.unpacked().float().T)
    assert not product.asked
    matmul.linear(x, weight, rows=128)
    assert product.asked == [(1, 128)]


def test_rows_without_room_beside_them_stay_with_our_kernels() -> None:
    weight, product = packed(70, 96), Product()
    same_bits.adopt_library([(weight, None)], product)
    product.asked.clear()
    for x, rows in ((whole(100, 96), None), (whole(192, 96), 64)):
        assert len(matmul.linear(x, weight, rows=rows)) == rows or len(x)
    assert not product.asked


def test_a_library_that_always_differs_or_fails_is_not_used() -> None:
    def fails(x: Tensor, weight: Tensor, out: Tensor) -> None:
        raise RuntimeError("no such kernel")

    for product in (Product(*COUNTS), fails):
        weight = packed(70, 96)
        made = same_bits.adopt_library([(weight, None)], product)
        assert weight.library is None
        assert made.differing == ["70 x 96 at 2 of 2"]


def test_the_library_reads_the_weights_where_our_kernels_do() -> None:
    for halves, outputs, inputs in ((1, 64, 128), (1, 70, 96), (2, 70, 96)):
        weight = packed(outputs, inputs, halves)
        same_bits.adopt_library([(weight, None)], Product())
        assert weight.library is not None
        rows = weight.library.rows
        assert rows.data_ptr() == weight.data.data_ptr() and rows.shape[1] == inputs
        whole_halves = rows.unflatten(0, (halves, -1))[:, :outputs].flatten(0, 1)
        assert torch.equal(whole_halves, weight.unpacked())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_in_fewer_bits_are_written_out_for_the_library(kind: str) -> None:
    """Whichever of them had their room before."""
    made = []
    for outputs, inputs, halves in ((70, 256, 1), (70, 128, 2), (40, 128, 1)):
        numbers = whole(halves * outputs, inputs, seed=outputs).clamp(-7, 7).float()
        numbers[:, ::64] = {"int8": 127, "int4": -8}[kind]  # so that a scale is 1
        made.append(matmul.pack(*numbers.chunk(halves), kind=kind))
    expected = []
    for weight in made:
        times = matmul.gated_linear if weight.gated else matmul.linear
        expected.append(times(whole(100, weight.inputs), weight))
    product = Product()
    adopted = same_bits.adopt_library([(weight, None) for weight in made], product)
    assert not adopted.differing and len(adopted.shapes) == 3
    for weight, result in [*zip(made, expected, strict=True)] * 2:
        times = matmul.gated_linear if weight.gated else matmul.linear
        product.asked.clear()
        assert torch.equal(times(whole(128, weight.inputs), weight, rows=100)[:100], result)
        assert product.asked == [(1, 128)]


def test_short_segments_and_heads_in_fewer_bits_stay_with_our_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(monkeypatch, 2)
    monkeypatch.setattr(same_bits, "SHORTEST_SEGMENT", 512)
    short, head = packed(64, 512), matmul.room_for(1, 128_256, 1024, "int8", HALF, "meta")
    made = same_bits.adopt_library([(short, None), (head, None)], Product())
    assert made.refused.startswith("no weight") and short.library is None and head.library is None


def test_the_library_is_asked_where_it_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COUNTS", library.COUNTS), ("GATED_FROM", 192), ("ONE_BY_ONE", 64)):
        monkeypatch.setattr(same_bits, name, value)
    shapes = {
        (1, 128_256, 4096): (128, 1024),
        (2, 14_336, 4096): (192, 2048),
        (1, 4096, 14_336): (128, 2048),
        (1, 1536, 8960): (576, 2048),  # nine segments, the last of them shorter
    }
    for (halves, outputs, inputs), ends in shapes.items():
        counts = same_bits.counts_for(
            matmul.room_for(halves, outputs, inputs, "bfloat16", torch.bfloat16, "meta")
        )
        assert (min(counts), max(counts)) == ends


def test_a_torch_that_cannot_forbid_splits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "can_forbid_splits", lambda: False)
    assert "cannot forbid" in same_bits.adopt_library([(packed(64, 128), None)]).refused


@pytest.mark.gpu
def test_torch_gets_its_settings_back() -> None:
    assert library.can_forbid_splits()
    cuda = torch.backends.cuda

    def now() -> tuple:
        m = cuda.matmul
        split = m.allow_bf16_reduced_precision_reduction_split_k
        return cuda.preferred_blas_library(), m.allow_bf16_reduced_precision_reduction, split

    before = now()
    with library._unsplit():
        inside = now()
    assert now() == before
    assert inside[0] == torch._C._BlasBackend.Cublaslt and inside[1:] == (False, False)


# --------------------------------------------------------------------------------------------------- a decoder


def device_decoder(device: str, **changes) -> DeviceDecoder:
    config = tiny_config(**changes)
    kernels = GpuKernels(config, rope_tables(config, 192), device, HALF)
    return DeviceDecoder(Decoder(config, random_tensors(config), kernels))


def test_a_pass_by_the_library_is_the_pass(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the order of sums, which is the library's own here. Few rows, which count as many."""
    for name, value in (("FEWEST", 4), ("STEP", 8), ("COUNTS", (8, 16))):
        monkeypatch.setattr(library, name, value)
    monkeypatch.setattr(same_bits, "COUNTS", library.COUNTS)
    model = device_decoder(device, layers=1, windows=(0,))
    ids = random_ids(VOCAB, 9)
    own = HalfReader(model.decoder, device).feed(model.decoder, Part(0, ids))
    plain, product = model.weight_bytes(), Product()
    monkeypatch.setattr(same_bits.torch, "equal", lambda a, b: furthest(a.float(), b.float()) < 1e-2)
    by_product = partial(same_bits.adopt_library, product=product)
    monkeypatch.setattr("outrider.model.device.adopt_library", by_product)
    model.use_library()
    layer = model.decoder.layers[0]
    assert all(one.weight.library for one in (layer.qkv, layer.out, layer.gate_up, layer.down))
    assert model.weight_bytes() == plain and not model.library.differing
    product.asked.clear()
    made = HalfReader(model.decoder, device).feed(model.decoder, Part(0, ids))
    assert furthest(made.cpu(), own.cpu()) < 1e-2
    assert product.asked == [(1, 16)] * 5  # four of the layer, and the head


def test_a_difference_is_said(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = device_decoder(device, layers=1, windows=(0,))
    found = same_bits.Adopted(shapes={"64 x 96": (1, 2)})
    monkeypatch.setattr("outrider.model.device.adopt_library", lambda *given: found)
    with pytest.warns(UserWarning, match="own kernels: 64 x 96 at 1 of 2 row counts"):
        model.use_library()


# ------------------------------------------------------------------------------------------------------ a GPU

BIG = {
    "8b out": (4096, 4096, 1),
    "8b down": (4096, 14336, 1),
    "8b gate-up": (14336, 4096, 2),
    "135m": (576, 576, 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", BIG.values(), ids=BIG.keys())
@pytest.mark.parametrize("biased", [False, True])
def test_the_library_has_our_bits(device: str, shape: tuple[int, int, int], biased: bool) -> None:
    outputs, inputs, halves = shape
    made = (torch.randn(halves * outputs, inputs, device=device) * 0.02).to(HALF)
    weight = matmul.pack(*made.chunk(halves))
    bias = torch.randn(halves * outputs, device=device) if biased else None
    adopted = same_bits.adopt_library([(weight, bias)])
    assert weight.library is not None and not adopted.differing, adopted.describe()
    x = torch.randn(2048, inputs, device=device).to(HALF)
    times = matmul.gated_linear if halves == 2 else matmul.linear
    for rows in (97, 130, 512, 1000, 2048):
        by_library = times(x, weight, bias, rows)[:rows]
        kept, weight.library = weight.library, None
        assert torch.equal(by_library, times(x, weight, bias, rows)[:rows]), rows
        weight.library = kept


@pytest.mark.gpu
def test_a_pass_by_the_library_has_our_bits(device: str) -> None:
    model = device_decoder(device)
    ids = random_ids(VOCAB, 99)
    own = HalfReader(model.decoder, device, longest=120).feed(model.decoder, Part(0, ids))
    model.use_library()
    assert not model.library.refused, model.library.describe()
    assert torch.equal(HalfReader(model.decoder, device, longest=120).feed(model.decoder, Part(0, ids)), own)


@pytest.mark.gpu
def test_captured_passes_have_the_bits_of_eager_ones(device: str) -> None:
    model = device_decoder(device)
    model.use_library()
    reader = HalfReader(model.decoder, device, texts=3, longest=120)
    parts = [Part(t, random_ids(VOCAB, 40, seed=t)) for t in range(3)]
    batch = reader.batch(*parts)
    expected = model.decoder.forward(batch, reader.store)
    assert torch.equal(GraphedPass(DevicePass(model, reader.store))(batch, 40, 120), expected)
