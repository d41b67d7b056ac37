"""The C kernels against their torch twins, piece by piece; and each piece's rows, bit by bit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft.eagle_head import kept_layer
from outrider.model.decoder import make_kernels
from outrider.model.kernels.native import NativeKernels
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.weights import LayerTensors, layer_tensors
from outrider.types import Batch, Draft
from outrider.verify.filters import filter_logits, masses
from outrider.verify.noise import draw
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.families import CASES, NEEDS_COMPILER, ours, tensors_of

pytestmark = NEEDS_COMPILER
TOLERANCE = 5e-6
TWIN_TOLERANCE = 2e-5  # large scores: against float64 the twin was seen 5.3e-6 off, the C kernel 1.5e-6
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33]
TREE = Draft((5, 6, 7, 8, 9, 10, 11), (-1, 0, 0, -1, 2, 4, 5))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair(kernel_folder: Path) -> tuple[NativeKernels, ReferenceKernels]:
    return ours("llama", "c", kernel_folder).kernels, ours("llama", "torch", kernel_folder).kernels


@pytest.mark.parametrize("outputs", [1, 16, 17, 49])
@pytest.mark.parametrize("inputs", [1, 2, 64, 66, 115])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(pair: Any, outputs: int, inputs: int, biased: bool) -> None:
    weight, bias = noise(outputs, inputs), noise(outputs, seed=1) if biased else None
    native, twin = (kernels.pack_linear(weight, bias) for kernels in pair)
    rows = noise(max(COUNTS), inputs, seed=2)
    alone = torch.cat([pair[0].linear(native, rows[r : r + 1]) for r in range(len(rows))])
    for count in COUNTS:
        together = pair[0].linear(native, rows[:count])
        assert torch.equal(together, alone[:count]), count
        assert furthest(together, pair[1].linear(twin, rows[:count])) < TOLERANCE
    assert pair[0].linear(native, rows[:0]).shape == (0, outputs)


def test_half_precision_weights_and_biases_are_widened(pair: Any) -> None:
    weight, bias, x = noise(17, 32).half(), noise(17, seed=1).half(), noise(3, 32, seed=2)
    packed = pair[0].pack_linear(weight, bias)
    assert furthest(pair[0].linear(packed, x), x @ weight.float().T + bias.float()) < TOLERANCE


def test_embed_reads_rows_of_a_packed_matrix(pair: Any) -> None:
    weight, ids = noise(49, 64), torch.tensor([0, 48, 15, 16, 17, 48])
    for kernels in pair:
        assert torch.equal(kernels.embed(kernels.pack_linear(weight), ids), weight[ids])


@pytest.mark.parametrize("outputs", [1, 16, 17, 49])
@pytest.mark.parametrize("inputs", [2, 64, 66, 115])
def test_bfloat16_weights_lose_nothing(pair: Any, outputs: int, inputs: int) -> None:
    """And take half the memory, unless there is one without a neighbour."""
    weight, bias = noise(outputs, inputs).bfloat16().float(), noise(outputs, seed=1)
    whole, half = (pair[0].pack_linear(each, bias) for each in (weight, weight.bfloat16()))
    assert half.parts[0].packed.nbytes * (1 if inputs % 2 else 2) == whole.parts[0].packed.nbytes
    rows, ids = noise(max(COUNTS), inputs, seed=2), torch.tensor([0, outputs - 1, outputs // 2])
    for count in COUNTS:
        assert torch.equal(pair[0].linear(half, rows[:count]), pair[0].linear(whole, rows[:count])), count
    assert torch.equal(pair[0].embed(half, ids), weight[ids])
    assert torch.equal(pair[1].embed(pair[1].pack_linear(weight.bfloat16()), ids), weight[ids])


@pytest.mark.parametrize("case", ["llama", "llama-biases"])
def test_a_layer_in_bfloat16(case: str, kernel_folder: Path) -> None:
    """Of weights that were rounded before, it is the layer in float32, to the last bit."""
    model, tensors = ours(case, "c", kernel_folder), tensors_of(case)
    c = model.config
    rounded = layer_tensors(lambda name: tensors[name].bfloat16().float(), c, 2)
    out = []
    kernels = make_kernels(c, 64, 2, kernel_folder, "c")
    for layer in (rounded, kept_layer(rounded, "bfloat16")):
        reader, x = Reader(c, longest=16), noise(6 + len(TREE), c.hidden)
        batch = reader.batch(Part(0, [1] * 6, TREE))
        keys, values = reader.store.keys[2].zero_(), reader.store.values[2].zero_()
        kernels.layer(kernels.pack_layer(layer), x, batch, keys, values)
        out.append(torch.cat([x.flatten(), keys.flatten(), values.flatten()]))
    assert torch.equal(*out)


@pytest.mark.parametrize("width", [16, 49, 84, 576])
def test_norm(pair: Any, width: int) -> None:
    x, weight = noise(33, width) * 4, noise(width, seed=1)
    native, twin = (kernels.norm(x, weight) for kernels in pair)
    assert furthest(native, twin) < TOLERANCE
    for kernels, result in zip(pair, (native, twin), strict=True):
        for count in COUNTS:
            assert torch.equal(kernels.norm(x[:count], weight), result[:count])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 272])
@pytest.mark.parametrize("window", [0, 1, 3, 9])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention(pair: Any, heads: int, kv_heads: int, head_dim: int, window: int, sinks: bool) -> None:
    config = pair[0].config.reshaped(1, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    reader = Reader(config, texts=2, longest=32)
    keys = reader.store.keys[0].copy_(noise(*reader.store.keys[0].shape, seed=1))
    values = reader.store.values[0].copy_(noise(*keys.shape, seed=2))
    reader.lengths = [6, 0]
    batch = reader.batch(Part(0, [1, 2], TREE), Part(1, [3] * 5))
    q = noise(batch.rows, heads, head_dim)
    own = noise(heads, seed=4) * 3 if sinks else None
    native, twin = (kernels.attention(q, batch, keys, values, window, 0.3, sinks=own) for kernels in pair)
    assert furthest(native, twin) < TWIN_TOLERANCE
    assert furthest(native, plain_attention(q, batch, keys, values, window, own)) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (5, 1, 16)])
@pytest.mark.parametrize("window", [0, 50])
def test_rows_that_share_blocks_of_keys_have_the_bits_of_each_alone(
    pair: Any, heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    """Rows of two texts with trees behind them, more than a block of keys long, in tiles of every height."""
    config = pair[0].config.reshaped(1, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    reader = Reader(config, texts=2, longest=160)
    keys = reader.store.keys[0].copy_(noise(*reader.store.keys[0].shape, seed=1))
    values = reader.store.values[0].copy_(noise(*keys.shape, seed=2))
    reader.lengths = [66, 127]
    batch = reader.batch(Part(0, [1] * 5, TREE), Part(1, [3] * 20, TREE))
    q, sinks = noise(batch.rows, heads, head_dim), noise(heads, seed=4) * 3 if window else None
    alone = torch.cat(
        [
            pair[0].attention(q[r : r + 1], part_of(batch, r, r + 1), keys, values, window, 0.3, sinks=sinks)
            for r in range(len(q))
        ]
    )
    for count in (4, 7, 12, 20, len(q)):
        some = part_of(batch, 0, count)
        together = pair[0].attention(q[:count], some, keys, values, window, 0.3, sinks=sinks)
        assert torch.equal(together, alone[:count]), count
    assert furthest(alone, plain_attention(q, batch, keys, values, window, sinks)) < TOLERANCE


def part_of(batch: Batch, first: int, last: int) -> Batch:
    names = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors")
    return replace(
        batch,
        **{name: getattr(batch, name)[first:last].contiguous() for name in names},
        logit_rows=torch.arange(last - first),
    )


def plain_attention(
    q: Tensor, batch: Any, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None = None
) -> Tensor:
    """Written from the words of types.Batch, sharing nothing with either kernel set."""
    out = torch.empty_like(q)
    for r in range(len(q)):
        position, prefix, mask = int(batch.positions[r]), int(batch.prefix[r]), int(batch.ancestors[r])
        entries = list(range(prefix)) + [prefix + i for i in range(63) if mask & 1 << i]
        if window:
            entries = [e for age, e in enumerate(reversed(entries)) if age < window][::-1]
        assert not window or len(entries) == min(window, position + 1)
        slots = batch.table[int(batch.table_rows[r]), entries].long()
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // keys.shape[1])
            scores = 0.3 * keys[slots, kv].double() @ q[r, h].double()
            weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[h].double().exp()))
            out[r, h] = (weights @ values[slots, kv].double()).float()
    return out


@pytest.mark.parametrize("case", CASES)
def test_layer(case: str, kernel_folder: Path) -> None:
    """One layer over a prompt and a tree, and the keys and values it leaves behind."""
    results = []
    for kernels in ("c", "torch"):
        model = ours(case, kernels, kernel_folder)
        tensors = tensors_of(case)
        packed = model.kernels.pack_layer(layer_tensors(lambda name, t=tensors: t[name], model.config, 2))
        reader, x = Reader(model.config, longest=16), noise(6 + len(TREE), model.config.hidden)
        batch = reader.batch(Part(0, [1] * 6, TREE))
        keys, values = reader.store.keys[2].zero_(), reader.store.values[2].zero_()
        model.kernels.layer(packed, x, batch, keys, values)
        results.append((x, keys, values))
    for native, twin in zip(*results, strict=True):
        assert furthest(native, twin) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_layer_from_inputs_of_another_width(case: str, kernel_folder: Path) -> None:
    """As a head's first layer has them; and of its own normed input it is the layer."""
    results = []
    for kernels in ("c", "torch"):
        model, tensors = ours(case, kernels, kernel_folder), tensors_of(case)
        hidden, found = model.config.hidden, []
        for wide in (False, True):
            layer = layer_tensors(lambda name, t=tensors: t[name], model.config, 2)
            reader, x = Reader(model.config, longest=16), noise(6 + len(TREE), hidden)
            batch = reader.batch(Part(0, [1] * 6, TREE))
            inputs = x.clone()
            if layer.attn_norm is not None:
                inputs = model.kernels.norm(x, layer.attn_norm.float())
            if wide:
                layer = replace(layer, qkv=noise(len(layer.qkv), 2 * hidden, seed=3) * 0.1)
                inputs = torch.cat([noise(len(x), hidden, seed=4), inputs], dim=1)
            keys, values = reader.store.keys[2].zero_(), reader.store.values[2].zero_()
            packed = model.kernels.pack_layer(layer)
            model.kernels.layer_from(packed, inputs, x, batch, keys, values)
            found += [x, keys, values]
            if not wide:
                whole = noise(len(x), hidden)
                model.kernels.layer(packed, whole, batch, keys, values)
                assert torch.equal(whole, x)
        results.append(found)
    for native, twin in zip(*results, strict=True):
        assert furthest(native, twin) < TOLERANCE


def test_layer_weights_may_be_half_precision(kernel_folder: Path) -> None:
    model = ours("llama-biases", "c", kernel_folder)
    tensors = tensors_of("llama-biases")
    whole = layer_tensors(lambda name: tensors[name].half().float(), model.config, 0)
    half = LayerTensors(**{f.name: _half(getattr(whole, f.name)) for f in fields(whole)})
    out = []
    for weights in (whole, half):
        reader, x = Reader(model.config, longest=16), noise(4, model.config.hidden)
        packed = model.kernels.pack_layer(weights)
        model.kernels.layer(
            packed, x, reader.batch(Part(0, [1] * 4)), reader.store.keys[0], reader.store.values[0]
        )
        out.append(x)
    assert torch.equal(*out)


def _half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) else value


# ------------------------------------------------------------------------------------------------------ draw


def both_draws(pair: Any, logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    native = pair[0].draw(logits, sampled, seeds, positions)
    assert torch.equal(native, draw(logits, sampled, seeds, positions))
    assert torch.equal(native, pair[1].draw(logits, sampled, seeds, positions))
    return native


def rows_of(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Every other row sampled; seeds of both signs; positions from the start on."""
    sampled = torch.arange(count) % 2 == 0
    seeds = torch.tensor(random_ids(2**62, count, seed)) * torch.where(torch.arange(count) % 3 == 0, -1, 1)
    return sampled, seeds, torch.arange(count) * 17


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 17, 63, 64, 65, 97, 1001, 50257])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_draw_equals_the_law(pair: Any, vocab: int, spread: float) -> None:
    count = 33 if vocab < 2000 else 7
    logits = noise(count, vocab, seed=vocab) * spread
    sampled, seeds, positions = rows_of(count, vocab)
    tokens = both_draws(pair, logits, sampled, seeds, positions)
    for r in range(count):
        one = slice(r, r + 1)
        assert torch.equal(pair[0].draw(logits[one], sampled[one], seeds[one], positions[one]), tokens[one])


def test_ties_go_to_the_lowest_id(pair: Any) -> None:
    logits = torch.zeros(4, 103)
    logits[0, [100, 40, 41]] = 1.0
    logits[1, [102]] = 1.0
    logits[3] = -5.0
    tokens = both_draws(
        pair, logits, torch.zeros(4, dtype=torch.bool), torch.zeros(4).long(), torch.zeros(4).long()
    )
    assert tokens.tolist() == [40, 102, 0, 0]


@pytest.mark.parametrize("allowed", [[0], [1], [52], [102], [3, 99], list(range(50, 103))])
def test_banned_tokens_are_never_drawn(pair: Any, allowed: list[int]) -> None:
    logits = torch.full((20, 103), -torch.inf)
    logits[:, allowed] = noise(20, len(allowed))
    tokens = both_draws(pair, logits, *rows_of(20))
    assert set(tokens.tolist()) <= set(allowed)


def test_flat_logits_reach_every_token(pair: Any) -> None:
    """Sampling that always found the same few would be a generator gone wrong."""
    count = 600
    tokens = both_draws(
        pair, torch.zeros(count, 37), torch.ones(count).bool(), torch.full((count,), 5), torch.arange(count)
    )
    assert len(set(tokens.tolist())) == 37


# ------------------------------------------------------------------------------------------------------ filter_logits


@pytest.mark.parametrize("vocab", [1, 2, 96, 513, 4097, 49152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 10.0, 100.0])
def test_sift_equals_its_definition(pair: Any, vocab: int, spread: float) -> None:
    """Counts, shares and floors of every kind; ties, banned tokens, rows with nothing left; in any company."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 12
    logits = noise(rows, vocab, seed=vocab) * spread
    logits[:4] = logits[:4].round()
    logits[3:8][torch.rand(5, vocab, generator=generator) < 0.3] = -torch.inf
    logits[8] = -torch.inf
    top_k = torch.randint(0, vocab + 3, (rows,), generator=generator) * (torch.arange(rows) % 2)
    top_p = torch.rand(rows, generator=generator)
    top_p[::4], top_p[1], top_p[2] = 1.0, 1e-9, 1 - 2.0**-24
    log_min_p = torch.where(
        torch.arange(rows) % 3 == 0, torch.rand(rows, generator=generator).log(), -torch.inf
    )
    expected = logits.clone()
    filter_logits(expected, top_k, top_p, log_min_p)
    for kernels in pair:
        got = logits.clone()
        kernels.filter_logits(got, top_k, top_p, log_min_p)
        assert torch.equal(got, expected)
    for r in range(rows):
        one = slice(r, r + 1)
        alone = logits[one].clone()
        pair[0].filter_logits(alone, top_k[one], top_p[one], log_min_p[one])
        assert torch.equal(alone, expected[one])


def test_sift_weighs_to_the_last_bit(pair: Any) -> None:
    """Two tokens, and a share that the first has or lacks by a hair's breadth."""
    count = 50_000
    logits = torch.stack([torch.zeros(count), -noise(count).abs()], dim=1)
    total = masses(logits, torch.zeros(count, 1)).sum(-1)
    asked = torch.zeros(count).long(), (2.0**43 / total.double()).float(), torch.full((count,), -torch.inf)
    expected = logits.clone()
    filter_logits(expected, *asked)
    pair[0].filter_logits(logits, *asked)
    assert torch.equal(logits, expected)
    assert 0.3 < expected[:, 1].isinf().float().mean() < 0.7


def test_tensors_must_be_contiguous(pair: Any) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pair[0].linear(pair[0].pack_linear(noise(16, 8)), noise(8, 5).T)
