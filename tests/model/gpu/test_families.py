"""What families have beside Llama's layers, on a GPU: logits of the torch decoder, bits of rows that were alone, and
experts in MXFP4 with the bits of the dequantised model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from outrider.errors import KernelUnavailable
from outrider.load.config import CLAMPED, GAIN_FROM, QUERY_BETA, TRAINED, Experts, LayerSpec, Rope
from outrider.load.families import FAMILIES as TABLE
from outrider.load.families import config_from_json, sample_config
from outrider.load.quants import FORMATS, Blocks
from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.gpu_limits import gpu_obstacle
from outrider.model.kernels.gpu import matmul, mxfp4, rows
from outrider.model.kernels.gpu.experts import choose_tile, expert_parts, gated_experts
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.matmul import Packed
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.rope import rope_tables
from outrider.types import Draft
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.families import CASES, tensors_of
from tests.model.families import theirs as transformers_model
from tests.model.gpu.test_decoder import HalfReader, check_tree_bits, decoders
from tests.model.gpu.test_experts import schedule_of, some_choice
from tests.model.gpu.test_kernels import HALF, TREE, noise
from tests.sweep import sweep
from tests.tiny import VOCAB, random_tensors, tiny_config

LAYER = LayerSpec(4, 2, 16, 48)
LOCAL = Rope(100.0)
GEMMA = replace(LAYER, norms="both", activation="gelu_tanh", qk_norm="head", attention_scale=0.2)
OLMO = replace(LAYER, norms="after", qk_norm="whole")
GPT_OSS = replace(
    LAYER, intermediate=0, qkv_bias=True, out_bias=True, activation=CLAMPED, clamp=1.2, sinks=True,
    rope=Rope(1000.0, "yarn", {"factor": 4.0, TRAINED: 32, "truncate": False}),
    experts=Experts(4, 2, 32, router_bias=True, bias=True),
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"specs": (replace(GEMMA, window=3, rope=LOCAL), GEMMA), "embedding_scale": 5.7, "softcap": 2.0},
    "olmo": {"specs": (replace(OLMO, window=3), OLMO), "hidden": 48},
    "olmoe": {"specs": (replace(OLMO, norms="before", experts=Experts(6, 2, 24), intermediate=0),)},
    "glm4": {
        "specs": (replace(LAYER, norms="both", qkv_bias=True, rope=Rope(scaling={"partial_rotary_factor": 0.5})),),
        "residual_scale": 0.7,
    },
    "gpt_oss": {"specs": (replace(GPT_OSS, window=4), GPT_OSS), "hidden": 64},
    "a mixture that norms what it adds": {
        "specs": (replace(GEMMA, experts=Experts(4, 2, 24, shared_gate=True), activation="silu"),),
    },
    "scaled queries": {
        "specs": (replace(LAYER, rope=Rope(kind="none", scaling={QUERY_BETA: 0.4, TRAINED: 3, GAIN_FROM: 1})),),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_references(device: str, name: str) -> None:
    ours, reference = decoders(device, **FAMILIES[name])
    ids = random_ids(VOCAB, 7)
    mine = HalfReader(ours, device).feed(ours, Part(0, ids, TREE))
    theirs = Reader(reference.config).feed(reference, Part(0, ids, TREE))
    assert furthest(mine.cpu(), theirs) < 2.5e-2


def _first_cases() -> dict[str, str]:
    """A tiny model of transformers for each family of the table."""
    found = {"llama4_text": "llama4", "gemma3_text": "gemma3"}
    return {
        family: found.get(family) or next(c for c in CASES if c.partition("-")[0] == family)
        for family in TABLE
    }


@pytest.mark.parametrize(
    "family", sweep(TABLE, quick=["granite", "ministral3", "seed_oss", "glm4_moe", "llama4_text"])
)
def test_what_the_table_says_of_a_family(family: str, device: str) -> None:
    """Its config runs on these kernels, or is refused by the name that `outrider models families` shows."""
    case = _first_cases()[family]
    config, stored = (
        config_from_json(json.loads(json.dumps(transformers_model(case).config.to_dict()))),
        tensors_of(case),
    )
    assert config.family == family and gpu_obstacle(config) == gpu_obstacle(sample_config(family))
    tables = rope_tables(config, 192)
    if gpu_obstacle(config):
        with pytest.raises(KernelUnavailable, match="does not run on a GPU"):
            GpuKernels(config, tables, device, HALF)
        return

    def read(name: str) -> Tensor:
        return stored[name].to(HALF).float()

    ours = Decoder(config, read, GpuKernels(config, tables, device, HALF))
    reference = Decoder(config, read, ReferenceKernels(config, tables))
    parts = Part(0, random_ids(97, 7))
    mine = HalfReader(ours, device).feed(ours, parts)
    assert furthest(mine.cpu(), Reader(config).feed(reference, parts)) < 4e-2


@pytest.mark.parametrize("name", sweep(FAMILIES, quick=["gemma", "olmo", "gpt_oss"]))
def test_a_tree_has_the_bits_of_plain_decoding(device: str, name: str) -> None:
    model, _ = decoders(device, **{**FAMILIES[name], "softcap": 0.0})
    check_tree_bits(model, device, node=6)


@pytest.mark.parametrize("name", ["gemma", "olmo"])
def test_layer_by_layer_equals_all_layers(device: str, name: str) -> None:
    """What a layer adds is normed with its own weight, whether the next one adds it or the layer itself."""
    model, _ = decoders(device, **FAMILIES[name])
    reader, again = HalfReader(model, device), HalfReader(model, device)
    batch = reader.batch(Part(0, random_ids(VOCAB, 2), Draft((5, 6), (-1, -1))))
    x = model.embed(batch.ids)
    model.kernels.layers(model.layers, x, batch, again.store.keys, again.store.values)
    expected = model.kernels.finish(x, None, batch.logit_rows, model.norm, model.head)
    got = DeviceDecoder(model).forward(batch, reader.store)
    assert torch.equal(got, expected)


# ------------------------------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_added_is_normed_first(device: str, picked: bool, normed: bool) -> None:
    count, width = 3, 80
    pending = rows.Normed(noise(2, count, width, seed=1).to(device), noise(width, seed=2).to(device))
    weight = noise(width, seed=3).to(device) if normed else None
    chosen = torch.tensor([2, 0], device=device) if picked else None
    results = []
    for add in (rows.add_and_norm, rows.add_and_norm_twin):
        x, out = (
            noise(count, width).to(device),
            torch.empty(2 if picked else count, width, dtype=HALF, device=device),
        )
        add(x.clone() if picked else x, pending, weight, 1e-5, out, chosen, 0.7)
        results.append((x, out.float()))
    (x, out), (expected, expected_out) = results
    assert furthest(x, expected) < 1e-6 and furthest(out, expected_out) < 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (4, 1, 24)])
def test_heads_normed_together_and_scaled_queries(device: str, heads: int, kv_heads: int, dim: int) -> None:
    model, _ = decoders(device, specs=(replace(LAYER, heads=heads, kv_heads=kv_heads, head_dim=dim),))
    batch = HalfReader(model, device).batch(Part(0, random_ids(VOCAB, 3)))
    table = model.kernels._tables(model.config.specs[0])
    parts = noise(2, batch.rows, (heads + 2 * kv_heads) * dim, seed=1).to(device)
    norms = noise(heads * dim, seed=2).to(device), noise(kv_heads * dim, seed=3).to(device), 1e-5
    gains, results = 1 + noise(256, seed=4).abs().to(device), []
    for function in (rows.rope_and_write, rows.rope_and_write_twin):
        q = torch.zeros((batch.rows, heads, dim), dtype=HALF, device=device)
        keys, values = (torch.zeros((300, kv_heads, dim), dtype=HALF, device=device) for _ in "kv")
        function(parts, table, batch, norms, q, keys, values, gains)
        results.append((q, keys, values))
    for ours, theirs in zip(*results, strict=True):
        assert furthest(ours.float(), theirs.float()) < 1e-2


ACTIVATIONS = [("gelu_tanh", 0.0), (CLAMPED, 0.5), (CLAMPED, 7.0)]


@pytest.mark.parametrize(("activation", "clamp"), ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_gates(device: str, activation: str, clamp: float, biased: bool) -> None:
    """Of one kernel and of the two that the library's products need, to the bit; and as torch has them."""
    weight = matmul.pack(*(noise(160, 64) / 4).to(HALF).to(device).chunk(2))
    weight.activation, weight.clamp = activation, clamp
    bias = noise(160, seed=3).to(device) if biased else None
    x = noise(5, 64, seed=2).to(HALF).to(device)
    got = matmul.gated_linear(x, weight, bias)
    assert furthest(got.float(), matmul.gated_twin(x, weight, bias).float()) < 1e-2
    made = matmul.linear_twin(x, weight).to(torch.float32 if biased else HALF)[None]

    def product(x: Tensor, rows: Tensor, out: Tensor) -> None:
        out.copy_(made)

    out = got.new_empty((1, 5, 80))
    whole = matmul.Library(weight.unpacked(), frozenset(), product)
    whole.multiply_gated(x, bias, out, activation, clamp)
    assert furthest(out[0].float(), got.float()) < 1e-2


# ------------------------------------------------------------------------------------------------- MXFP4


def some_blocks(outputs: int, inputs: int, seed: int) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(256, (outputs, -(-inputs // 32), 17), generator=generator, dtype=torch.uint8)
    raw[..., 0] = torch.randint(120, 127, raw.shape[:2], generator=generator, dtype=torch.uint8)
    return Blocks("experts", FORMATS[39], raw.flatten(1), inputs)


def exact_and_plain(count: int, outputs: int, inputs: int, halves: int, device: str) -> tuple[Packed, Packed]:
    """In the interpreter the order of sums depends on a tile's shape: there both have tiles of 128 inputs."""
    experts = [[some_blocks(outputs, inputs, 7 * i + half) for half in range(halves)] for i in range(count)]
    padding = -inputs % 128 if device == "cpu" else 0
    wide = [[F.pad(blocks.float(), (0, padding)) for blocks in expert] for expert in experts]
    made = [
        matmul.pack_experts(given, count, kind, device, HALF)
        for given, kind in ((experts, mxfp4.KIND), (wide, "bfloat16"))
    ]
    return made[0], made[1]


@pytest.mark.parametrize("inputs", [32, 64, 96, 320])
def test_every_number_is_kept(inputs: int) -> None:
    exact, plain = exact_and_plain(2, 70, inputs, 2, "cpu")
    assert torch.equal(exact.of_expert(1).unpacked().to(HALF), plain.of_expert(1).unpacked()[:, :inputs])
    assert exact.nbytes * 3.5 < plain.nbytes


def test_scales_at_both_ends() -> None:
    raw = torch.zeros(64, 17, dtype=torch.uint8)
    raw[:, 1:] = torch.arange(16, dtype=torch.uint8) * 17
    raw[:, 0] = torch.tensor([0, 1, 127, mxfp4.LARGEST]).repeat(16)
    blocks = Blocks("ends", FORMATS[39], raw, 32)
    assert mxfp4.fits(blocks)
    assert torch.equal(mxfp4.dequantised(*mxfp4.repacked(raw, 128))[:, :32], blocks.float())
    raw[5, 0] = mxfp4.LARGEST + 1
    assert not mxfp4.fits(blocks) and not mxfp4.fits(raw)


SHAPES = [
    (96, 96, 2, True),
    (64, 1120, 1, True),
    (72, 64, 1, False),
    (64, 640, 2, False),
]  # outputs, inputs, halves, bias


@pytest.mark.parametrize(("outputs", "inputs", "halves", "biased"), SHAPES)
@pytest.mark.parametrize("count", sweep([1, 3, 17, 33, 64, 300], quick=[1, 17]))
def test_products_have_the_bits_of_the_dequantised_weight(
    device: str, count: int, outputs: int, inputs: int, halves: int, biased: bool
) -> None:
    """In steps of one tile and of more, also where a segment ends within a step."""
    experts, top = 4, 2
    plan = schedule_of(some_choice(count, Experts(experts, top, 32), device, seed=count), experts, device)
    exact, plain = exact_and_plain(experts, outputs, inputs, halves, device)
    for weight in (exact, plain):
        weight.activation, weight.clamp = CLAMPED, 1.5
    bias = noise(experts, halves * outputs, seed=4).to(device) if biased else None
    x = noise(count if halves == 2 else count * top, inputs, seed=5).to(HALF).to(device)

    assert matmul.segments(exact) == matmul.segments(plain)

    def product(weight: Packed, step: int) -> Tensor:
        tile = replace(choose_tile(weight, count, top), inputs=step, outputs=64)
        given = F.pad(x, (0, weight.inputs - inputs))
        if halves == 2:
            return gated_experts(given, weight, bias, plan, top, tile)
        return matmul.add_parts(expert_parts(given, weight, bias, plan, tile))

    expected = product(plain, plain.depth)
    for step in (128, 256):
        assert torch.equal(product(exact, step), expected)


def test_a_decoder_keeps_its_experts_in_four_bits(device: str) -> None:
    """With the logits of the dequantised model, in other kinds those of what it dequantises to, rounded."""
    config = tiny_config(**FAMILIES["gpt_oss"])
    tables, given = rope_tables(config, 192), random_tensors(config)
    numbers: dict[str, Blocks] = {}

    def stored(name: str) -> Tensor | Blocks:
        if ".experts." not in name or not name.endswith(".weight"):
            return given(name).to(HALF).float()
        return numbers.setdefault(name, some_blocks(*given(name).shape, len(numbers)))

    def plain(name: str) -> Tensor:
        found = stored(name)
        return found.float() * 1.0 if isinstance(found, Blocks) else found

    ids, results = random_ids(VOCAB, 3), {}
    for kind in ("bfloat16", "int8"):
        for read in (stored, plain):
            model = Decoder(config, read, GpuKernels(config, tables, device, HALF, kind))
            results[kind, read] = HalfReader(model, device).feed(model, Part(0, ids, TREE))
            kept = {layer.experts.down.weight.kind for layer in model.layers}
            assert kept == {mxfp4.KIND if (kind, read) == ("bfloat16", stored) else kind}
        assert torch.equal(results[kind, stored], results[kind, plain])
    reference = Decoder(config, plain, ReferenceKernels(config, tables))
    theirs = Reader(config).feed(reference, Part(0, ids, TREE))
    assert furthest(results["bfloat16", stored].cpu(), theirs) < 2.5e-2


@pytest.mark.parametrize("name", ["gemma", "gpt_oss"])
def test_steps_of_a_graph_have_the_bits_of_eager_ones(device: str, name: str) -> None:
    model = DeviceDecoder(decoders(device, **{**FAMILIES[name], "softcap": 0.0})[0])
    reader = HalfReader(model.decoder, device, texts=2)
    reader.feed(model, *(Part(text, random_ids(VOCAB, 5 + text, seed=text)) for text in range(2)))
    parts = [Part(text, [9 + text]) for text in range(2)]
    batch = reader.batch(*parts)
    expected = model.forward(batch, reader.store)
    assert torch.equal(DevicePass(model, reader.store)(batch, 1, 100), expected)
