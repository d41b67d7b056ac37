"""Weights in fewer bits: the kernels against dequantised weights, rows in other company bit by bit, whole models."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from outrider import Settings
from outrider.engine import build
from outrider.errors import KernelUnavailable
from outrider.load.checkpoint import open_checkpoint
from outrider.model import device as device_module
from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.kernels.gpu import kernels as gpu_kernels
from outrider.model.kernels.gpu import matmul
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.quantise import KINDS, dequantised, quantised
from outrider.model.kernels.gpu.same_bits import adopt_library
from outrider.model.rope import rope_tables
from tests.model.batches import Part, furthest, random_ids
from tests.model.gpu.test_decoder import HalfReader
from tests.model.gpu.test_kernels import HALF, TREE, noise
from tests.sweep import sweep
from tests.tiny import VOCAB, random_tensors, tiny_config

COUNTS, EDGES = (1, 3, 16, 17, 64, 65, 130), (1, 17, 65)
FEWER = pytest.mark.parametrize("kind", list(KINDS))


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


# ------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.105)])
@pytest.mark.parametrize("depth", [64, 128])
def test_rounding_errs_little(kind: str, most: float, depth: int) -> None:
    """Of numbers spread as trained weights are; int4's optimum for them is about a tenth."""
    rows = noise(64, 4 * depth) * 0.02
    stored, scales = quantised(rows, depth, kind)
    assert most / 4 < rms(dequantised(stored, scales, kind) - rows) / rms(rows) < most
    assert stored.nbytes == rows.numel() * (1 if kind != "int4" else 0.5)


@pytest.mark.parametrize(("kind", "numbers"), [("int8", range(-127, 128)), ("int4", range(-8, 8))])
def test_whole_numbers_are_kept_in_their_places(kind: str, numbers: range) -> None:
    """Rounding has nothing to do for them, so each must come back where it was."""
    rows = torch.tensor(list(numbers))[torch.randint(len(numbers), (64, 256))].float()
    rows[:, ::64] = min(numbers)  # in every tile, so that the scale is 1
    assert torch.equal(dequantised(*quantised(rows, 128, kind), kind), rows)


def test_every_fp8_number_is_kept_in_its_place() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    rows = torch.where(codes.isnan(), 448.0, codes).repeat(64, 1)
    assert torch.equal(dequantised(*quantised(rows, 128, "fp8"), "fp8"), rows)


@FEWER
def test_zeros_and_what_is_next_to_nothing_become_zero(kind: str) -> None:
    rows = torch.zeros(64, 128)
    rows[1] = 1e-38
    assert not dequantised(*quantised(rows, 128, kind), kind).any()


@FEWER
def test_scales_follow_their_outputs(kind: str) -> None:
    """A thousand times larger, a thousand times the numbers: no output rounds another."""
    rows = noise(64, 256)
    larger = rows * torch.where(torch.arange(64) % 2 == 0, 1024.0, 1.0)[:, None]
    one, other = (dequantised(*quantised(some, 128, kind), kind) for some in (rows, larger))
    assert torch.equal(one[1::2], other[1::2]) and torch.equal(one[::2] * 1024, other[::2])


@FEWER
@pytest.mark.parametrize("inputs", [96, 256])
def test_packing_in_pieces_is_packing_at_once(
    kind: str, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, up = noise(200, inputs), noise(200, inputs, seed=1)
    whole = matmul.pack(gate, up, kind=kind)
    monkeypatch.setattr(matmul, "AT_ONCE", 1)
    pieces = matmul.pack(gate, up, kind=kind)
    assert torch.equal(whole.data, pieces.data) and torch.equal(whole.unpacked(), pieces.unpacked())
    assert furthest(whole.unpacked(), torch.cat([gate, up])) < 0.2
    assert whole.nbytes < 2 * 256 * 256 * 1.2


# -------------------------------------------------------------------------------------------------- products


@FEWER
@pytest.mark.parametrize("inputs", [64, 96, 128, 256, 384])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(device: str, kind: str, inputs: int, biased: bool) -> None:
    weight = matmul.pack(noise(80, inputs).to(device), kind=kind)
    bias = noise(80, seed=1).to(device) if biased else None
    x = noise(20, inputs, seed=2).to(HALF).to(device)
    assert furthest(matmul.linear(x, weight, bias), matmul.linear_twin(x, weight, bias)) < 1e-5


@FEWER
@pytest.mark.parametrize(("inputs", "halves", "pieces"), [(96, 2, 1), (768, 1, 2)])
def test_products_have_the_bits_of_the_dequantised_weight(
    device: str, kind: str, inputs: int, halves: int, pieces: int
) -> None:
    """A scale is a bfloat16 and a product with it is rounded to one, also where it lies between two."""
    outputs = 80
    given = [noise(outputs, inputs, seed=i).to(device) * 3.0**i for i in range(halves)]
    weight = matmul.pack(*given, kind=kind)
    whole = weight.unpacked()
    assert torch.equal(whole.bfloat16().float(), whole)
    padding = matmul.pack(*F.pad(whole, (0, weight.width - inputs)).to(HALF).chunk(halves))
    x = noise(5, inputs, seed=9).to(HALF).to(device)
    results = []
    for one in (weight, padding):
        out = torch.empty((pieces, 5, outputs), device=device, dtype=HALF if halves == 2 else torch.float32)
        tile = matmul.Tile(16, 64, weight.depth, 4, 2, pieces > 1)
        matmul.launch_multiply(F.pad(x, (0, one.inputs - inputs)), one, None, out, pieces, tile)
        results.append(out)
    assert torch.equal(*results)


@FEWER
def test_a_weight_is_written_out_as_what_it_stands_for(device: str, kind: str) -> None:
    weight = matmul.pack(*noise(140, 320).to(device).chunk(2), kind=kind)
    out = torch.full((2 * 128, weight.width), torch.nan, dtype=torch.bfloat16, device=device)
    matmul.widen(weight, out)
    assert torch.equal(out.unflatten(0, (2, -1))[:, :70, :320].flatten(0, 1).float(), weight.unpacked())


@pytest.mark.gpu
@FEWER
@pytest.mark.parametrize("shape", [(4096, 4096, 1), (1536, 4096, 2), (4096, 14_336, 1)])
def test_every_tile_and_the_library_have_the_bits_of_the_dequantised_weight(
    device: str, kind: str, shape: tuple[int, int, int]
) -> None:
    outputs, inputs, halves = shape
    made = [noise(outputs, inputs, seed=i).to(device) * 0.02 for i in range(halves)]
    weight = matmul.pack(*made, kind=kind)
    plain, pieces = matmul.pack(*weight.unpacked().to(HALF).chunk(halves)), matmul.segments(weight)
    x = noise(1024, inputs, seed=9).to(HALF).to(device)
    out = torch.empty((pieces, 1024, outputs), device=device, dtype=HALF if halves == 2 else torch.float32)
    matmul.launch_multiply(x, plain, None, out, pieces, matmul.Tile(16, 64, 128, 4, 3, pieces > 1))
    expected = matmul.add_parts(out)
    run = matmul.gated_linear if halves == 2 else matmul.linear
    for rows in (1, 16, 17, 33, 64, 65, 130, 512):
        assert torch.equal(run(x[:rows], weight), expected[:rows]), rows
    adopted = adopt_library([(weight, None)])
    assert weight.library is not None and not adopted.differing, adopted.describe()
    for rows in (512, 1000):
        assert torch.equal(run(x, weight, rows=rows)[:rows], expected[:rows]), rows


NARROW = [("fp8", True, 128, EDGES), ("int8", True, 128, EDGES), ("int4", False, 128, EDGES)]
WIDE = [("int8", False, 768, EDGES), ("int4", True, 768, (1, 17))]


@pytest.mark.parametrize(
    ("kind", "gated", "inputs", "counts"),
    sweep(
        [*NARROW, *WIDE, *product(KINDS, [False, True], [128, 768], [COUNTS])],
        quick=[*NARROW, *WIDE],
    ),
)
def test_rows_do_not_depend_on_their_number(
    device: str, kind: str, gated: bool, inputs: int, counts: tuple[int, ...]
) -> None:
    halves = [0.1 * noise(80, inputs, seed=i).to(device) for i in range(2 if gated else 1)]
    weight, bias = matmul.pack(*halves, kind=kind), noise(80 * len(halves), seed=3).to(device)
    run, twin = (matmul.gated_linear, matmul.gated_twin) if gated else (matmul.linear, matmul.linear_twin)
    x = noise(max(counts), inputs, seed=2).to(HALF).to(device)
    whole = run(x, weight, bias)
    assert furthest(whole.float(), twin(x, weight, bias).float()) < (1e-2 if gated else 1e-5)
    for count in counts:
        assert torch.equal(run(x[:count], weight, bias), whole[:count]), count
        assert torch.equal(run(x[-count:], weight, bias), whole[-count:]), count


@FEWER
@pytest.mark.parametrize("pieces", [2, 3])
def test_segments_give_the_same_bits_spread_or_in_one_block(device: str, kind: str, pieces: int) -> None:
    weight, bias = matmul.pack(noise(64, 640).to(device), kind=kind), noise(64, seed=1).to(device)
    x = noise(5, 640, seed=2).to(HALF).to(device)
    results = []
    for spread in (True, False):
        out = torch.full((pieces if spread else 1, 5, 64), torch.nan, device=device)
        matmul.launch_multiply(x, weight, bias, out, pieces, matmul.Tile(16, 64, 128, 4, 2, spread))
        results.append(matmul.add_parts(out))
    assert torch.equal(*results)
    assert furthest(results[0], matmul.linear_twin(x, weight, bias)) < 1e-5


@FEWER
@pytest.mark.parametrize(("rows", "outputs", "step", "warps"), [(16, 64, 256, 4), (64, 128, 128, 8)])
def test_steps_of_any_length_give_the_same_bits(
    device: str, kind: str, rows: int, outputs: int, step: int, warps: int
) -> None:
    weight, x = matmul.pack(noise(192, 512).to(device), kind=kind), noise(5, 512, seed=2).to(HALF).to(device)
    results = []
    for tile in (matmul.Tile(rows, outputs, step, warps, 2), matmul.Tile(16, 64, 128, 4, 2)):
        out = torch.full((1, 5, 192), torch.nan, device=device)
        matmul.launch_multiply(x, weight, None, out, 1, tile)
        results.append(out)
    assert torch.equal(*results)


def test_a_step_that_cuts_a_tile_is_refused() -> None:
    weight, x, out = matmul.pack(noise(64, 384), kind="int8"), noise(1, 384).to(HALF), torch.empty(1, 1, 64)
    for step in (64, 256):
        with pytest.raises(ValueError, match="tiles of 128"):
            matmul.launch_multiply(x, weight, None, out, 1, matmul.Tile(16, 64, step, 4, 2))
    weight, x, out = matmul.pack(noise(64, 1536), kind="int8"), noise(1, 1536).to(HALF), torch.empty(2, 1, 64)
    with pytest.raises(
        ValueError, match="steps of 512"
    ):  # three in all, but a segment ends within the second
        matmul.launch_multiply(x, weight, None, out, 2, matmul.Tile(16, 64, 512, 4, 2, spread=True))


@FEWER
def test_every_tile_that_is_chosen_fits(kind: str) -> None:
    """Steps divide the weight, and rows decide nothing of the arithmetic."""
    for outputs, inputs, gated in (
        (4096, 4096, False),
        (14336, 4096, True),
        (4096, 14336, False),
        (49152, 576, False),
    ):
        weight = matmul.room_for(2 if gated else 1, outputs, inputs, kind, HALF, "meta")
        length = matmul.segment_length(weight.width, matmul.segments(weight))
        for rows in (1, 16, 17, 33, 64, 65, 256, 257, 2048):
            tile = matmul.choose_tile(weight, rows)
            assert (
                tile.inputs % weight.depth == 0
                and length % tile.inputs == 0
                and weight.width % tile.inputs == 0
            )


# --------------------------------------------------------------------------------------------- whole models


def model_of(device: str, weights: str, **changes) -> Decoder:
    config = tiny_config(**changes)
    kernels = GpuKernels(config, rope_tables(config, 192), device, HALF, weights)
    return Decoder(config, random_tensors(config), kernels)


@pytest.mark.parametrize(
    ("kind", "tied", "layers"),
    sweep(
        product(KINDS, [True, False], [1, 2]),
        quick=[("int4", False, 1)],
    ),
)
def test_a_tree_has_the_bits_of_plain_decoding(device: str, kind: str, tied: bool, layers: int) -> None:
    model = model_of(device, kind, tied=tied, layers=layers, windows=(0,) * layers)
    ids = random_ids(VOCAB, 5)
    together = HalfReader(model, device).feed(model, Part(0, ids, TREE))
    for node in (3, 6):
        reader = HalfReader(model, device)
        reader.feed(model, Part(0, ids))
        for token in (TREE.tokens[i] for i in TREE.path(node)):
            alone = reader.feed(model, Part(0, [token]))
        assert torch.equal(alone[-1], together[len(ids) + node])


# Measured: fp8 .11, int8 .03, int4 .44 of the spread; SmolLM2-135M over 500 tokens: .10, .04, .44.
@pytest.mark.parametrize(
    ("kind", "most"), sweep([("fp8", 0.16), ("int8", 0.045), ("int4", 0.6)], quick=[("int4", 0.6)])
)
def test_logits_stay_near_those_of_whole_weights(device: str, kind: str, most: float) -> None:
    shape = dict(hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32)
    whole, fewer = (model_of(device, weights, **shape) for weights in ("bfloat16", kind))
    ids = random_ids(VOCAB, 24)
    expected, got = (HalfReader(model, device).feed(model, Part(0, ids)) for model in (whole, fewer))
    error = rms(got - expected) / float(expected.std())
    print(f"{kind}: logits differ by {error:.4f} of their spread")
    assert most / 8 < error < most


def test_what_is_stored_as_what(device: str) -> None:
    """The embedding is looked up and stays as it is; int4's head has eight bits; plain ends that are one stay one."""
    for kind, head in (("bfloat16", "bfloat16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "int8")):
        for tied in (True, False):
            model = model_of(device, kind, tied=tied)
            assert (model.embedding.weight.kind, model.head.weight.kind) == ("bfloat16", head)
            assert (model.head is model.embedding) == (tied and kind == "bfloat16")
            layer = model.layers[0]
            assert {w.weight.kind for w in (layer.qkv, layer.out, layer.gate_up, layer.down)} == {kind}


def test_memory_is_counted_as_it_is_taken(device: str) -> None:
    shape = dict(hidden=256, intermediate=512, heads=8, kv_heads=8, head_dim=32, vocab=128, layers=1)
    sizes = {}
    for kind in ("bfloat16", "fp8", "int8", "int4"):
        sizes[kind] = DeviceDecoder(model_of(device, kind, **shape)).weight_bytes()
    layer, ends = 4 * 256 * 256 + 3 * 256 * 512, 128 * 256
    assert sizes["bfloat16"] == 2 * (layer + ends)
    scales = 4 * (3 * 256 + 256 + 2 * 512 + 256 + 128)
    assert sizes["fp8"] == sizes["int8"] == layer + ends + 2 * ends + scales
    assert sizes["int4"] == layer // 2 + 4 * layer // 128 + 3 * ends + 4 * 128


def test_fp8_needs_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    gpu_kernels.check_device("int8")
    with pytest.raises(KernelUnavailable, match="fp8"):
        gpu_kernels.check_device("fp8")


@pytest.mark.parametrize(("asked", "loaded"), [("auto", "bfloat16"), ("int4", "int4")])
def test_a_model_is_loaded_as_the_settings_say(
    asked: str, loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as can be seen without a device: with what the loader is called."""
    from tests.load.tiny import write_folder  # needs gguf, which not every machine with a card has

    seen, asked_library = [], []  # the second: a call for each target

    def load(*given):
        seen.append(given[-2])
        return SimpleNamespace(use_library=lambda: asked_library.append(given[-2]))

    monkeypatch.setattr(build, "runs_on_gpu", lambda settings: True)
    monkeypatch.setattr(device_module, "load_on_device", load)
    write_folder(tmp_path)
    build.load_model(open_checkpoint(tmp_path), Settings(weights=asked))
    build.load_model(open_checkpoint(tmp_path), Settings(weights=asked), "int8")  # a draft's
    assert seen == [loaded, "int8"]
    assert asked_library == [loaded]  # a draft has few passes of many rows


@pytest.mark.gpu
@FEWER
def test_rounds_have_the_bits_of_packed_passes(device: str, kind: str) -> None:
    model = DeviceDecoder(model_of(device, kind))
    reader, again = HalfReader(model.decoder, device), HalfReader(model.decoder, device)
    ids = random_ids(VOCAB, 9)
    packed = reader.feed(model, Part(0, ids))
    assert torch.equal(DevicePass(model, again.store)(again.batch(Part(0, ids)), len(ids), 64), packed)
