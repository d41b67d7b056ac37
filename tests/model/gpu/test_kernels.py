"""Each Triton kernel against its torch twin, and its rows against themselves in other company, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from outrider.device.buckets import staged_shape
from outrider.draft.lookup import GRAM, REACH, SHORTEST, find_copies
from outrider.model import staged
from outrider.model.device import AttentionPlans
from outrider.model.kernels.gpu import attention as at
from outrider.model.kernels.gpu import copies, matmul, rows
from outrider.model.kernels.gpu import draw as law
from outrider.model.kernels.gpu import filter as filters
from outrider.types import MAX_NODES, Batch, Draft
from outrider.verify.filters import bounds, filter_logits, masses
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.sweep import sweep
from tests.tiny import tiny_config

# The interpreter multiplies float16 but not bfloat16; on a device it is bfloat16 that counts.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
TREE = Draft((5, 6, 7, 8, 9, 10, 11), (-1, 0, 0, -1, 2, 4, 5))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def to_device(batch: Batch, device: str) -> Batch:
    return Batch(**{name: getattr(batch, name).to(device) for name in Batch.__slots__})


# ---------------------------------------------------------------------------------------------------- matmul


@pytest.mark.parametrize("inputs", [64, 96, 256])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(device: str, inputs: int, biased: bool) -> None:
    weight = matmul.pack(noise(80, inputs).to(HALF).to(device))
    bias = noise(80, seed=1).to(device) if biased else None
    x = noise(20, inputs, seed=2).to(HALF).to(device)
    alone = torch.cat([matmul.linear(x[r : r + 1], weight, bias) for r in range(3)])
    together = matmul.linear(x, weight, bias)
    assert furthest(together, matmul.linear_twin(x, weight, bias)) < 1e-5
    assert torch.equal(together[:3], alone)
    assert matmul.linear(x[:0], weight, bias).shape == (0, 80)


@pytest.mark.parametrize("biased", [False, True])
def test_gated_linear(device: str, biased: bool) -> None:
    weight = matmul.pack(*noise(160, 64).to(HALF).to(device).chunk(2))
    x = noise(20, 64, seed=2).to(HALF).to(device)
    bias = noise(160, seed=1).to(device) if biased else None
    got, expected = matmul.gated_linear(x, weight, bias), matmul.gated_twin(x, weight, bias)
    assert furthest(got.float(), expected.float()) < 1e-2
    assert torch.equal(got[:1], matmul.gated_linear(x[:1], weight, bias))


@pytest.mark.parametrize("pieces", [2, 3])
def test_segments_give_the_same_bits_spread_or_in_one_block(device: str, pieces: int) -> None:
    weight, x = matmul.pack(noise(64, 700).to(HALF).to(device)), noise(5, 700, seed=2).to(HALF).to(device)
    results = []
    for spread in (True, False):
        out = torch.full((pieces if spread else 1, 5, 64), torch.nan, device=device)
        tile = matmul.Tile(16, 64, 64, 4, 2, spread)
        matmul.launch_multiply(x, weight, None, out, pieces, tile)
        results.append(matmul.add_parts(out))
    assert torch.equal(*results)
    assert furthest(results[0], matmul.linear_twin(x, weight)) < 1e-5


@pytest.mark.parametrize(("inputs", "pieces", "ahead"), [(1024, 2, 256), (1024, 2, 512), (576, 1, 512)])
def test_weights_read_ahead_give_the_same_bits(device: str, inputs: int, pieces: int, ahead: int) -> None:
    weight, x = (
        matmul.pack(noise(64, inputs).to(HALF).to(device)),
        noise(5, inputs, seed=2).to(HALF).to(device),
    )
    results = []
    for early in (0, ahead):
        out = torch.full((pieces, 5, 64), torch.nan, device=device)
        tile = matmul.Tile(16, 64, 64, 4, 2, pieces > 1, early)
        matmul.launch_multiply(x, weight, None, out, pieces, tile)
        results.append(out)
    assert furthest(*results) < 1e-5
    if device == "cuda":  # numpy, behind the interpreter, has an order of its own for each shape
        assert torch.equal(*results)


@pytest.mark.parametrize("gated", [False, True])
def test_weights_read_by_descriptor_give_the_same_bits(device: str, gated: bool) -> None:
    halves = noise(320, 256).to(HALF).to(device).chunk(2 if gated else 1)
    weight, x = matmul.pack(*halves), noise(20, 256, seed=2).to(HALF).to(device)
    results = []
    for described in (False, True):
        out = torch.full((1, 20, weight.outputs), torch.nan, device=device, dtype=HALF if gated else None)
        tile = matmul.Tile(32, 64, 128, 4, 2, described=described)
        matmul.launch_multiply(x, weight, None, out, 1, tile)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("inputs", "pieces", "ahead"), [(192, 1, 0), (700, 2, 0), (704, 2, 64), (448, 1, 64)]
)
@pytest.mark.parametrize("described", [False, True])
def test_the_last_step_may_go_on_after_its_segment(
    device: str, inputs: int, pieces: int, ahead: int, described: bool
) -> None:
    """There it has zeros, whatever lies behind: other rows' weights, or nothing."""
    x = noise(5, inputs, seed=2).to(HALF).to(device)
    weight = matmul.pack(noise(64, inputs).to(HALF).to(device))
    results = []
    for depth, early, how in ((64, 0, False), (128, 0 if described else ahead, described)):
        out = torch.full((pieces, 5, 64), torch.nan, device=device)
        tile = matmul.Tile(16, 64, depth, 4, 2, pieces > 1, early, described=how)
        matmul.launch_multiply(x, weight, None, out, pieces, tile)
        results.append(out)
    assert furthest(*results) < 1e-5
    if device == "cuda":  # numpy, behind the interpreter, has an order of its own for each shape
        assert torch.equal(*results)


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(2880, 4096), (5120, 2880), (3840, 4096), (4096, 4096)])
def test_all_blocks_of_few_rows_start_at_once(
    count: int, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "chained", lambda: {"CHAIN": True})
    weight = matmul.room_for(1, outputs, inputs, "bfloat16", HALF, "meta")
    assert matmul.all_start(weight, matmul.choose_tile(weight, count))


@pytest.mark.parametrize("outputs", [32, 64, 128])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_gate_and_its_up_in_one_tile_give_the_same_bits(device: str, outputs: int, kind: str) -> None:
    weight = matmul.pack(*noise(2 * 200, 256).to(HALF).to(device).chunk(2), kind=kind)
    x, bias = noise(20, 256, seed=2).to(HALF).to(device), noise(400, seed=1).to(device)
    results = []
    for paired in (False, True):
        out = torch.full((1, 20, 200), torch.nan, device=device, dtype=HALF)
        tile = matmul.Tile(32, outputs, 128, 4, 2, paired=paired)
        matmul.launch_multiply(x, weight, bias, out, 1, tile)
        results.append(out)
    assert furthest(*(one.float() for one in results)) < 1e-2
    if device == "cuda":
        assert torch.equal(*results)


def test_tiles_that_a_kernel_cannot_have_are_refused(device: str) -> None:
    weight, fewer = matmul.pack(noise(64, 256).to(HALF)), matmul.pack(noise(64, 256), kind="int8")
    x, out = noise(1, 256).to(HALF), torch.empty(1, 1, 64)
    for one, tile in (
        (weight, matmul.Tile(16, 64, 128, 4, 2, ahead=128, described=True)),
        (weight, matmul.Tile(16, 128, 128, 4, 2, described=True)),
        (fewer, matmul.Tile(16, 64, 128, 4, 2, described=True)),
    ):
        with pytest.raises(ValueError, match="descriptor"):
            matmul.launch_multiply(x, one, None, out, 1, tile)
    with pytest.raises(ValueError, match="gate"):
        matmul.launch_multiply(x, weight, None, out, 1, matmul.Tile(16, 64, 128, 4, 2, paired=True))


@pytest.mark.parametrize(("outputs", "depth"), [(64, 64), (128, 128), (128, 64)])
def test_tiles_of_any_shape_give_the_same_bits(device: str, outputs: int, depth: int) -> None:
    weight, x = matmul.pack(noise(192, 256).to(HALF).to(device)), noise(5, 256, seed=2).to(HALF).to(device)
    out = torch.full((1, 5, 192), torch.nan, device=device)
    matmul.launch_multiply(x, weight, None, out, 1, matmul.Tile(16, outputs, depth, 4, 2))
    assert furthest(out[0], matmul.linear_twin(x, weight)) < 1e-5
    if device == "cuda":  # numpy, behind the interpreter, has an order of its own for each shape
        assert torch.equal(out[0], matmul.linear(x, weight))


@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(80, 96, False), (128, 256, False), (96, 64, True)])
def test_packing_loses_nothing(outputs: int, inputs: int, gated: bool) -> None:
    weight = noise(2 * outputs if gated else outputs, inputs)
    packed = matmul.pack(*weight.chunk(2 if gated else 1))
    assert torch.equal(packed.unpacked(), weight)


# ------------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(("outputs", "inputs"), [(80, 96), (128, 256), (70, 40)])
def test_embedding_is_the_rows_as_they_were(device: str, outputs: int, inputs: int) -> None:
    weight, ids = noise(outputs, inputs).to(HALF), torch.tensor([0, outputs - 1, 17, 64, outputs - 1])
    packed = matmul.pack(weight.to(device))
    found = rows.embed(ids.to(device), packed)
    assert torch.equal(found.cpu(), weight[ids].float())
    assert torch.equal(found, rows.embed_twin(ids.to(device), packed))


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("normed", [True, False])
def test_add_and_norm(device: str, parts: int, normed: bool) -> None:
    x = (noise(5, 96) * 3).to(device)
    pending = noise(parts, 5, 96, seed=1).to(device) if parts else None
    weight = noise(96, seed=2).to(device) if normed else None
    outs = [torch.full((5, 96), torch.nan, dtype=HALF, device=device) for _ in range(2)]
    slots = torch.tensor([3, 0, 6, 1, 4], dtype=torch.int32, device=device)
    taps = [torch.zeros(8, 2, 96, dtype=HALF, device=device)[:, 1] for _ in range(2)]
    ours, theirs = x.clone(), x.clone()
    rows.add_and_norm(ours, pending, weight, 1e-5, outs[0] if normed else None, tap=(taps[0], slots))
    rows.add_and_norm_twin(theirs, pending, weight, 1e-5, outs[1] if normed else None, tap=(taps[1], slots))
    assert torch.equal(ours, theirs) and torch.equal(*taps)
    if normed:
        assert furthest(outs[0].float(), outs[1].float()) < 1e-2


def test_parts_may_have_room_between_them(device: str) -> None:
    x, padded = noise(5, 96).to(device), noise(3, 8, 96, seed=1).to(device)
    ours, theirs = x.clone(), x.clone()
    rows.add_and_norm(ours, padded[:, :5], None, 1e-5, None)
    rows.add_and_norm(theirs, padded[:, :5].contiguous(), None, 1e-5, None)
    assert torch.equal(ours, theirs)


def test_norm_of_picked_rows_leaves_the_rest(device: str) -> None:
    x, pending = noise(5, 96).to(device), noise(2, 5, 96, seed=1).to(device)
    weight, picked = noise(96, seed=2).to(device), torch.tensor([4, 0, 0], device=device)
    before, out = x.clone(), torch.empty(3, 96, dtype=HALF, device=device)
    expected = torch.empty_like(out)
    rows.add_and_norm(x, pending, weight, 1e-5, out, picked)
    rows.add_and_norm_twin(before.clone(), pending, weight, 1e-5, expected, picked)
    assert torch.equal(x, before)
    assert furthest(out.float(), expected.float()) < 1e-2 and torch.equal(out[1], out[2])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 16), (3, 1, 48)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_write(device: str, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    reader = Reader(tiny_config(kv_heads=kv_heads, heads=heads, head_dim=dim), longest=16)
    batch = to_device(reader.batch(Part(0, [1] * 4, TREE)), device)
    parts = noise(2, batch.rows, (heads + 2 * kv_heads) * dim).to(device)
    angles = noise(64, dim // 2, seed=3)
    tables = angles.cos().to(device), angles.sin().to(device)
    norms = (noise(dim, seed=4).to(device), noise(dim, seed=5).to(device), 1e-5) if normed else None
    results = []
    for function in (rows.rope_and_write, rows.rope_and_write_twin):
        q = torch.full((batch.rows, heads, dim), torch.nan, dtype=HALF, device=device)
        keys = torch.zeros((len(reader.store.keys[0]), kv_heads, dim), dtype=HALF, device=device)
        values = torch.zeros_like(keys)
        function(parts, tables, batch, norms, q, keys, values)
        results.append((q, keys, values))
    for ours, theirs in zip(*results, strict=True):
        assert furthest(ours.float(), theirs.float()) < 1e-2


# ------------------------------------------------------------------------------------------------- attention


class Past:
    """Texts with random keys and values behind them, on the device."""

    def __init__(
        self,
        device: str,
        heads: int,
        kv_heads: int,
        dim: int,
        lengths: list[int],
        room: int,
        sinks: bool = False,
    ) -> None:
        config = tiny_config(heads=heads, kv_heads=kv_heads, head_dim=dim, layers=1, windows=(0,))
        self.reader = Reader(config, texts=len(lengths), longest=room)
        self.reader.lengths = list(lengths)
        shape = self.reader.store.keys[0].shape
        self.keys = noise(*shape, seed=1).to(HALF).to(device)
        self.values = noise(*shape, seed=2).to(HALF).to(device)
        self.device, self.heads, self.kv_heads, self.dim = device, heads, kv_heads, dim
        self.sinks = noise(heads, seed=3).to(device) * 2 if sinks else None

    def batch(self, *parts: Part) -> Batch:
        return to_device(self.reader.batch(*parts), self.device)

    def attend(
        self,
        q: Tensor,
        batch: Batch,
        window: int = 0,
        whole: bool | None = None,
        tile: int | None = None,
    ) -> Tensor:
        out = torch.full_like(q, torch.nan, dtype=torch.float32)  # more sensitive than what layers read
        attention = at.plan_attention(batch, self.heads, self.kv_heads, self.dim)
        if tile is not None:
            attention.tile = tile
            together = tile // at.padded_group(self.heads, self.kv_heads)
            groups = at.group_rows(to_device(batch, "cpu"), together)
            attention.items = torch.tensor(groups, dtype=torch.int32, device=self.device)
        if whole is not None and whole != attention.whole:
            attention.whole = whole
            room = batch.rows * self.heads * (attention.splits + at.TAILS)
            attention.sums = torch.full((room * self.dim,), torch.nan, device=self.device)
            attention.stats = torch.full((room * 2,), torch.nan, device=self.device)
        at.attend(q, batch, self.keys, self.values, window, 0.3, attention, out, self.sinks)
        return out

    def twin(self, q: Tensor, batch: Batch, window: int = 0) -> Tensor:
        out = torch.empty_like(q)
        at.attend_twin(q, batch, self.keys, self.values, window, 0.3, None, out, self.sinks)
        return out

    def queries(self, batch: Batch, seed: int = 0) -> Tensor:
        return noise(batch.rows, self.heads, self.dim, seed=seed).to(HALF).to(self.device)


@pytest.mark.parametrize(
    ("heads", "window"),
    sweep(
        product([(2, 2, 16), (4, 1, 64), (3, 1, 80)], [0, 1, 9, 70]),
        quick=[((2, 2, 16), 0), ((2, 2, 16), 1), ((4, 1, 64), 70), ((3, 1, 80), 9)],
    ),
)
def test_attention(device: str, heads: tuple[int, int, int], window: int) -> None:
    past = Past(device, *heads, [63, 0], room=90)
    batch = past.batch(Part(0, [1, 2], TREE), Part(1, [3] * 5))
    q = past.queries(batch)
    assert furthest(past.attend(q, batch, window).float(), past.twin(q, batch, window).float()) < 2e-2


def test_attention_over_several_splits(device: str) -> None:
    past = Past(device, 2, 1, 16, [300], room=400, sinks=True)
    batch = past.batch(Part(0, [1] * 3, TREE))
    q = past.queries(batch)
    assert furthest(past.attend(q, batch).float(), past.twin(q, batch).float()) < 2e-2


def test_folding_in_registers_gives_the_same_bits(device: str) -> None:
    past = Past(device, 2, 1, 16, [290, 7], room=400, sinks=True)
    batch = past.batch(Part(0, [1] * 5), Part(1, [2] * 3))
    q = past.queries(batch)
    whole = past.attend(q, batch, whole=True)
    assert torch.equal(whole, past.attend(q, batch, whole=False))
    assert furthest(whole.float(), past.twin(q, batch).float()) < 2e-2


@pytest.mark.parametrize("length", sweep([3, 62, 127, 130], quick=[62]))
def test_a_node_equals_the_same_token_as_known_text(device: str, length: int) -> None:
    """The heart of identity with trees: a path scattered over the draft has the bits of a chain."""
    past = Past(device, 2, 1, 16, [length], room=260, sinks=True)
    draft = Draft(tuple(range(9)), (-1, 0, 0, -1, 2, 4, 5, 3, 6))
    batch = past.batch(Part(0, [1], draft))
    q = past.queries(batch)
    together = past.attend(q, batch)
    slots = past.reader.table[0].to(device).long()
    for node in range(len(draft)):
        path = draft.path(node)
        row = 1 + node
        chain = past.batch(Part(0, [1] * (1 + len(path))))
        keys, values = past.keys.clone(), past.values.clone()
        for depth, i in enumerate(path):  # as if the path had been fed as text
            keys[slots[length + 1 + depth]] = past.keys[slots[length + 1 + i]]
            values[slots[length + 1 + depth]] = past.values[slots[length + 1 + i]]
        kept = past.keys, past.values
        past.keys, past.values = keys, values
        alone = past.attend(q[row].expand(chain.rows, -1, -1).contiguous(), chain)
        past.keys, past.values = kept
        assert torch.equal(together[row], alone[-1]), node


def test_a_row_does_not_depend_on_its_company(device: str) -> None:
    past = Past(device, 2, 1, 16, [140, 3, 66], room=260, sinks=True)
    parts = [Part(0, [1], TREE), Part(1, [2] * 20), Part(2, [1] * 3)]
    batch = past.batch(*parts)
    q = past.queries(batch)
    together, at_row = past.attend(q, batch), 0
    for part in parts:
        alone = past.batch(part)
        mine = q[at_row : at_row + alone.rows].contiguous()
        assert torch.equal(past.attend(mine, alone), together[at_row : at_row + alone.rows])
        at_row += alone.rows


@pytest.mark.parametrize("rows", sweep([[0, 1, 62, 63], list(range(64))], quick=[[0, 1, 62, 63]]), ids=len)
def test_a_chain_of_63(device: str, rows: Sequence[int]) -> None:
    past = Past(device, 2, 1, 16, [60], room=260)
    batches = past.batch(Part(0, [1], Draft.chain([1] * MAX_NODES))), past.batch(Part(0, [1] * 64))
    q = past.queries(batches[0])[list(rows)]
    drafted, known = (past.attend(q, picked(batch, rows)) for batch in batches)
    assert torch.equal(drafted, known)


def picked(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a pass, as if they were all of it."""
    names = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors")
    return replace(batch, **{name: getattr(batch, name)[list(rows)] for name in names})


# Lengths of texts near where splits of another length begin.
EDGES = [120, 505, 2040, 8185]


@pytest.mark.parametrize("length", sweep(EDGES, quick=[505]))
def test_programs_of_any_height_give_the_same_bits_at_the_edges(device: str, length: int) -> None:
    past = Past(device, 2, 1, 16, [length], room=length + 70, sinks=True)
    batch = past.batch(Part(0, [1] * 63))
    q = past.queries(batch)
    expected = past.attend(q, batch, whole=True, tile=at.TALL)
    assert furthest(expected[-1:].float(), past.twin(q[-1:], picked(batch, [62])).float()) < 2e-2
    for tile, whole in ((16, False), (64, True), (at.TALL, False)):
        assert torch.equal(past.attend(q, batch, whole=whole, tile=tile), expected), (tile, whole)
    for row in (0, 9, 62):
        assert torch.equal(past.attend(q[row : row + 1], picked(batch, [row]))[0], expected[row]), row


@pytest.mark.parametrize("length", sweep([*EDGES, 448, 2047, 8191], quick=[505, 2047]))
@pytest.mark.parametrize("window", [0, 100])
def test_a_chain_across_an_edge(device: str, length: int, window: int) -> None:
    """A node has the bits of a known token, wherever the draft begins."""
    past = Past(device, 2, 1, 16, [length], room=length + 70)
    batches = past.batch(Part(0, [1], Draft.chain([1] * MAX_NODES))), past.batch(Part(0, [1] * 64))
    rows = [0, 1, 7, 8, 40, 62, 63]
    q = past.queries(batches[0])[rows]
    drafted, known = (past.attend(q, picked(batch, rows), window) for batch in batches)
    assert torch.equal(drafted, known)


@pytest.mark.parametrize("window", [0, 90])
def test_a_prompt_in_pieces_has_the_same_bits(device: str, window: int) -> None:
    past = Past(device, 1, 1, 16, [0], room=280)
    whole = past.batch(Part(0, [1] * 200))
    q = past.queries(whole)
    expected, at_row = past.attend(q, whole, window), 0
    for count in (1, 62, 65, 72):
        piece = past.batch(Part(0, [1] * count))
        got = past.attend(q[at_row : at_row + count].contiguous(), piece, window)
        assert torch.equal(got, expected[at_row : at_row + count]), at_row
        past.reader.lengths[0] += count
        at_row += count
    assert at_row == len(q)


@pytest.mark.parametrize("context", [2048, 32_768, 131_072])
def test_long_prompts_have_tall_programs(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are planned: by the host, staged in a captured step, or from rows on the device."""
    for module in (at, staged):
        monkeypatch.setattr(module, "is_hopper", lambda: True)
    config = tiny_config(heads=32, kv_heads=8, head_dim=at.TALL_DIM, layers=1, windows=(0,))
    one, rows = (32, 8, at.TALL_DIM), 2048
    texts = torch.zeros(rows, dtype=torch.int32)
    ends = torch.arange(context - rows + 1, context + 1, dtype=torch.int32)
    batch = Batch(
        ids=texts.long(), positions=ends - 1, slots=texts, table_rows=texts, prefix=ends,
        ancestors=texts.long(), table=torch.zeros((2, context), dtype=torch.int32), logit_rows=texts[:1].long(),
    )  # fmt: skip
    shape = staged_shape(rows, 16, 0, config)
    buffers = staged.StagedRows(shape, batch.table, 0, 1)
    buffers.fill(batch, ends - 1)
    made = AttentionPlans(config, torch.device("cpu"))._make(rows, rows, context, False)
    plans = [at.plan_attention(batch, *one), at.plan_staged(buffers.parts[0], one, context), made]
    for plan in plans:
        assert (plan.tile, plan.whole, plan.sums.numel()) == (at.TALL, True, 0)
        assert sorted(plan.items[:64, 0].tolist()) == list(range(0, rows, 32))
        assert plan.items[0, 0] == rows - 32  # what reads the most begins first
    assert plans[1].items[0, 2] == context and not plans[1].items[64:, 1].any()
    assert at.plan_attention(picked(batch, range(256)), *one).tile == at.TALLEST


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 2), (12, 2), (2, 2), (16, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_programs_of_long_prompts_give_the_same_bits(
    device: str, shape: tuple[int, int], sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that are waited for later, against those that are waited for at once."""
    lengths = [0, 1, 63, 500, 2000, 8150, 30_000]
    past = Past(device, *shape, 128, lengths, room=30_300, sinks=sinks)
    batch = past.batch(*(Part(i, [1] * (200 + i)) for i in range(len(lengths))))
    q = past.queries(batch)
    tall = past.attend(q, batch, whole=True, tile=at.TALL)
    assert torch.equal(tall, past.attend(q, batch, whole=True, tile=at.TALLEST))
    monkeypatch.setattr(at, "is_hopper", lambda: False)
    assert torch.equal(tall, past.attend(q, batch, whole=True, tile=at.TALL))


@pytest.mark.slow
def test_programs_of_any_height_give_the_same_bits(device: str) -> None:
    past = Past(device, 4, 1, 64, [130], room=260)
    batch = past.batch(Part(0, [1] * 3, TREE))
    q = past.queries(batch)
    low, middle, high = (past.attend(q, batch, tile=tile) for tile in at.TILES)
    assert torch.equal(low, middle) and torch.equal(low, high)


@pytest.mark.gpu
def test_fewer_warps_give_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past(device, 6, 2, 64, [130, 700, 3], room=800)
    batch = past.batch(Part(0, [1]), Part(1, [2]), Part(2, [3]))
    q = past.queries(batch)
    results = []
    for crowded in (1, 1000):
        monkeypatch.setattr(at, "CROWDED", crowded)
        results.append(past.attend(q, batch, whole=True))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("shape", "whole"),
    sweep(
        product([(4, 2, 64, 0), (4, 2, 64, 66), (3, 1, 48, 9)], [False, True]),
        quick=[((4, 2, 64, 66), True), ((3, 1, 48, 9), False)],
    ),
)
def test_turning_inside_attention_gives_the_same_bits(
    device: str, shape: tuple[int, int, int, int], whole: bool
) -> None:
    heads, kv_heads, dim, window = shape
    past = Past(device, heads, kv_heads, dim, [70, 0, 63], room=90)
    batch = past.batch(*(Part(text, [1]) for text in range(3)))
    parts = noise(2, 3, (heads + 2 * kv_heads) * dim).to(device)
    angles = noise(90, dim // 2, seed=3)
    tables = angles.cos().to(device), angles.sin().to(device)
    results = []
    for single in (True, False):
        attention = at.plan_attention(batch, heads, kv_heads, dim)
        assert attention.single
        attention.single, attention.whole = single, whole
        room = 3 * heads * (attention.splits + at.TAILS)
        attention.sums = torch.full((room * dim,), torch.nan, device=device)
        attention.stats = torch.full((room * 2,), torch.nan, device=device)
        keys, values = past.keys.clone(), past.values.clone()
        keys[batch.slots.long()], values[batch.slots.long()] = torch.nan, torch.nan
        out = torch.full((3, heads, dim), torch.nan, dtype=HALF, device=device)
        at.attend(at.Fresh(parts, tables, None), batch, keys, values, window, 0.3, attention, out)
        results.append((out, keys, values))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


split_start, split_of = at._split_start, at._split_of


@triton.jit
def _splits_kernel(starts, owners, count: tl.constexpr, longest: tl.constexpr):
    s, p = tl.arange(0, count), tl.arange(0, longest)
    tl.store(starts + s, split_start(s))
    tl.store(owners + p, split_of(p))


def test_splits_are_where_the_kernels_have_them(device: str) -> None:
    longest = 16_384
    starts = torch.empty(64, dtype=torch.int32, device=device)
    owners = torch.empty(longest, dtype=torch.int32, device=device)
    _splits_kernel[(1,)](starts, owners, count=64, longest=longest)
    expected = torch.tensor(at.split_starts(longest))
    count = len(expected)
    assert torch.equal(starts[:count].cpu().long(), expected)
    assert torch.equal(
        owners.cpu().long(), torch.searchsorted(expected, torch.arange(longest), right=True) - 1
    )


def test_splits_agree_with_their_count() -> None:
    for context in (1, 127, 128, 129, 1024, 1025, 4096, 4097, 9000):
        assert len(at.split_starts(context)) == at.split_count(context)
        assert at.split_starts(at.split_end(at.split_count(context)) + 1)[-1] == at.split_end(
            at.split_count(context)
        )


# ------------------------------------------------------------------------------------------------------ draw


def rows_of(count: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    sampled = torch.arange(count) % 2 == 0
    seeds = torch.tensor(random_ids(2**62, count, seed)) * torch.where(torch.arange(count) % 3 == 0, -1, 1)
    return sampled.to(device), seeds.to(device), (torch.arange(count) * 17).to(device)


@pytest.mark.parametrize(
    ("vocab", "spread"),
    sweep(
        product([1, 3, 64, 97, 5001], [0.0, 1.0, 30.0]),
        quick=[(1, 0.0), (3, 30.0), (64, 1.0), (97, 0.0), (97, 1.0), (5001, 1.0)],
    ),
)
def test_draw_equals_the_law(device: str, vocab: int, spread: float) -> None:
    logits = (noise(7, vocab, seed=vocab) * spread).to(device)
    given = rows_of(7, vocab, device)
    assert torch.equal(law.draw_rows(logits, *given), law.draw_rows_twin(logits, *given))


def test_ties_go_to_the_lowest_id(device: str) -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [8000, 4500, 4501]] = 1.0
    logits[1, 8999] = 1.0
    greedy = torch.zeros(3, dtype=torch.bool, device=device)
    zero = torch.zeros(3, dtype=torch.int64, device=device)
    assert law.draw_rows(logits.to(device), greedy, zero, zero).tolist() == [4500, 8999, 0]


def test_banned_tokens_are_never_drawn(device: str) -> None:
    logits = torch.full((8, 103), -torch.inf)
    logits[:, [3, 99]] = noise(8, 2)
    tokens = law.draw_rows(logits.to(device), *rows_of(8, 1, device))
    assert set(tokens.tolist()) <= {3, 99}


# ------------------------------------------------------------------------------------------- how it is spread


@pytest.mark.parametrize("window", sweep([0, 9, 700], quick=[700]))
def test_how_work_is_spread_changes_no_bit(device: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split a program, several, or all of them; buffers for longer texts than these."""
    past = Past(device, 2, 1, 16, [62, 2200, 1100], room=3400)
    batch = past.batch(Part(0, [1] * 4), Part(1, [2] * 3), Part(2, [3]))
    q = noise(batch.rows, 2, 16, seed=7).to(device, HALF)
    outs = []
    for many, whole in ((1 << 20, False), (1, False), (1, True)):
        monkeypatch.setattr(at, "MANY", many)
        read = at.plan_attention(batch, 2, 1, 16)
        attention = at.make_attention_plan(
            read.items, batch.rows, (2, 1, 16), read.splits + 3, False, read.tile
        )
        attention.whole = whole
        attention.sums.fill_(torch.nan)
        attention.stats.fill_(torch.nan)
        outs.append(torch.full((batch.rows, 2, 16), torch.nan, dtype=HALF, device=device))
        at.attend(q, batch, past.keys, past.values, window, 0.3, attention, outs[-1])
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


# ---------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("context", [64, 1500])
def test_copies_are_found_where_torch_finds_them(
    device: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of few different tokens, with stale ones behind their ends; some too short to hold anything."""
    if context < 100:
        monkeypatch.setattr(copies, "PLACES", 16)
    random = torch.Generator().manual_seed(context)
    tokens = torch.randint(0, 3, (14, context + 9), generator=random)
    tokens[:4] = torch.arange(context + 9) % 37  # the same again and again
    tokens[4] = torch.arange(context + 9)  # nothing twice
    limits = REACH, SHORTEST, GRAM
    rows = torch.tensor([3, 0, 4, *range(5, 14), 13, 13])
    lengths = torch.tensor([0, 40, 50, *torch.randint(1, context - 10, (9,), generator=random), 1, 2])
    references = torch.randint(0, 3, (14, 40), generator=random, dtype=torch.int32)
    references[:, [9, 19]] = -1
    before = torch.randint(0, 2, (14,), generator=random) * torch.randint(1, 41, (14,), generator=random)
    references[torch.arange(14), before - 1] = -1
    answers = torch.minimum(
        before, torch.tensor([0, 10, 20, 40])[torch.randint(0, 4, (14,), generator=random)]
    )
    spans = torch.stack((answers, before, torch.randint(0, context, (14,), generator=random)), 1)
    for n in (5,) if context < 100 else (1, 5):
        texts = tokens, references, spans, rows, lengths
        found = copies.find_copies(*(one.to(device) for one in texts), n, context, limits)
        expected = find_copies(*texts, n, context, limits)
        assert int(found[0].min()) >= 0
        assert torch.equal(found[1].cpu(), expected[1])
        meant = torch.arange(n) < expected[1][:, None]
        assert torch.equal(found[0].cpu()[meant], expected[0][meant])
        assert 3 < (expected[1] > 0).sum() < len(rows)


# ------------------------------------------------------------------------------------------------------ filter_logits

OFF = -torch.inf
NEARLY_ONE = 1 - 2.0**-24


def filtered_rows(logits: Tensor, asked: list[tuple[int, float, float]], device: str) -> Tensor:
    """What the kernel leaves, once it is known to equal its twin, a row for each of `asked`."""
    columns = [torch.tensor(column, device=device) for column in zip(*asked, strict=True)]
    got, expected = logits.to(device, copy=True), logits.to(device, copy=True)
    filters.filter_rows(got, *columns)
    filter_logits(expected, *columns)
    assert torch.equal(got, expected)
    return got


@triton.jit
def _weigh(logits, out, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(out + at, filters._mass(tl.load(logits + at), 0.0))


def test_masses_equal_their_twins_to_the_last_bit(device: str) -> None:
    logits = torch.cat([-torch.linspace(0, 50, 8191), torch.tensor([OFF])]).to(device)
    out = torch.empty(8192, dtype=torch.int64, device=device)
    _weigh[(1,)](logits, out, BLOCK=8192)
    assert torch.equal(out, masses(logits, torch.zeros(1, device=device)))


@pytest.mark.parametrize("vocab", sweep([1, 97, 9001], quick=[97]))
def test_sift_equals_its_twin(device: str, vocab: int) -> None:
    some = [(0, 0.9, OFF), (40, 1.0, OFF), (vocab // 2 + 1, 0.8, OFF), (0, 1.0, -2.0), (3, 0.5, -0.5)]
    logits = noise(5, vocab, seed=vocab) * torch.tensor([0.3, 30.0, 1.0, 1.0, 3.0])[:, None]
    together = filtered_rows(logits, some, device)
    assert torch.equal(together[2:3], filtered_rows(logits[2:3], some[2:3], device))


@pytest.mark.parametrize("top_p", sweep([1e-9, 0.7, NEARLY_ONE], quick=[NEARLY_ONE]))
def test_sift_of_ties_bans_and_lonely_tokens(device: str, top_p: float) -> None:
    logits = noise(4, 2001, seed=1) * 3
    logits[0] = logits[0].round()
    logits[1, ::3] = OFF
    logits[2, 1999] = 1000.0
    logits[3, 1:] = OFF
    filtered_rows(logits, [(900, top_p, OFF), (0, top_p, OFF), (5, top_p, OFF), (3, top_p, -1.0)], device)


def test_sift_of_counts_at_their_limits(device: str) -> None:
    limits = [1, 2000, 2001, 60_000]
    left = filtered_rows(noise(4, 2001, seed=1), [(k, 1.0, OFF) for k in limits], device)
    assert (left > OFF).sum(-1).tolist() == [1, 2000, 2001, 2001]


@pytest.mark.slow
def test_sift_of_rows_with_nothing_to_tell_apart(device: str) -> None:
    logits = torch.zeros(3, 9000)
    logits[1], logits[2, 4500:] = OFF, -1.0
    left = filtered_rows(logits, [(7, 1.0, OFF), (5, 0.5, -1.0), (0, 0.4, OFF)], device)
    assert (left > OFF).sum(-1).tolist() == [9000, 0, 4500]


def test_sift_of_a_range_too_full_to_gather(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the whole row is searched, for the same bound."""
    monkeypatch.setattr(filters, "FOUND", 2)
    filtered_rows(noise(3, 3001), [(300, 1.0, OFF), (0, 0.9, OFF), (300, 0.9, OFF)], device)


WHOLE = [(49_152, (50, 0.95, -4.0)), (128_256, (0, 0.9, OFF))]


@pytest.mark.parametrize(("vocab", "asked"), sweep(WHOLE, quick=WHOLE[:1]))
def test_sift_of_whole_vocabularies(device: str, vocab: int, asked: tuple[int, float, float]) -> None:
    assert 1 < (filtered_rows(noise(1, vocab, seed=2) * 2.5, [asked], device) > OFF).sum() < 0.6 * vocab


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    sweep([(0, 0.9), (0, 0.99), (0, 0.2), (50, 1.0), (50, 0.9)], quick=[(0, 0.9)]),
)
def test_sift_finds_where_to_look(device: str, top_k: int, top_p: float) -> None:
    """A bound outside of what was gathered would be found all the same, but slowly."""
    logits = noise(3, 20_000, seed=3) * torch.tensor([1.0, 3.0, 30.0])[:, None]
    logits[1, 77] = 14.0
    columns = [torch.tensor([column] * 3, device=device) for column in (top_k, top_p, OFF)]
    seen = filters.gather(logits.to(device), *columns)
    found = bounds(logits.to(device), *columns)
    low, high = seen.edges.unbind(1)
    assert ((low <= found) & (found < high)).all()
    assert (seen.counts < 3000).all()
    for row, got, a, b, count in zip(logits, seen.found.cpu(), low, high, seen.counts.tolist(), strict=True):
        inside = row[(row >= a.cpu()) & (row < b.cpu())]
        assert torch.equal(got[:count].sort().values, inside.sort().values)


def test_sift_leaves_everyone_else_alone(device: str) -> None:
    """A part of wider rows, some of which ask for nothing."""
    wide = noise(3, 600).to(device)
    before = wide.clone()
    columns = torch.tensor([0, 5, 0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([OFF, OFF, OFF])
    filters.filter_rows(wide[:, :500], *(column.to(device) for column in columns))
    assert torch.equal(wide[[0, 2]], before[[0, 2]])
    assert torch.equal(wide[:, 500:], before[:, 500:])
    assert (wide[1, :500] > OFF).sum() == 5
    filters.filter_rows(wide[:0], *(column[:0].to(device) for column in columns))
