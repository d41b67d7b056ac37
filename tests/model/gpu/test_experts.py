"""Experts on a GPU: choices against torch, and a row's bits against those of a dense model with that expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.control.trees import tree_nodes
from outrider.device.capture import CapturedStep, StepShape
from outrider.device.ops_gpu import GpuStepOps
from outrider.device.state import SequenceState
from outrider.load.config import Experts
from outrider.model.decoder import make_store
from outrider.model.device import DeviceDecoder, DevicePass, GraphedPass
from outrider.model.kernels.gpu import matmul
from outrider.model.kernels.gpu.experts import (
    choose_tile,
    expert_parts,
    experts_twin,
    gated_experts,
    most_tiles,
    multiply_experts,
)
from outrider.model.kernels.gpu.matmul import Packed, Tile
from outrider.model.kernels.gpu.routing import (
    NO_EXPERT,
    Choice,
    Schedule,
    choose,
    choose_twin,
    schedule,
    schedule_one,
    schedule_twin,
)
from outrider.model.kernels.gpu.rows import ExpertParts, add_and_norm, add_and_norm_twin
from outrider.model.kernels.reference_experts import route
from outrider.types import NO_TREE
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.gpu.test_decoder import HalfReader, check_tree_bits, decoders
from tests.model.gpu.test_kernels import HALF, TREE, noise
from tests.sweep import sweep
from tests.tiny import VOCAB

PADDING = 1 << 20  # the slot of rows that are not there

ROUTERS = {
    "softmax": Experts(12, 3, 32, normalise=False),
    "normalised": Experts(8, 2, 32),
    "top one": Experts(16, 1, 32, score="sigmoid", normalise=False),
    "corrected": Experts(6, 4, 32, score="sigmoid", correction=True, floor=1e-20, scale=1.8),
    "groups": Experts(24, 4, 32, score="sigmoid", correction=True, groups=4, groups_kept=2, scale=2.5),
    "softmax groups": Experts(16, 3, 32, groups=4, groups_kept=1, scale=1.5),
    "all": Experts(4, 4, 32),
}


def slots_of(rows: int, device: str, padding: tuple[int, ...] = ()) -> Tensor:
    slots = torch.arange(rows, dtype=torch.int32)
    slots[list(padding)] = PADDING
    return slots.to(device)


def off(device: str) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def schedule_of(choice: Choice, count: int, device: str) -> Schedule:
    return schedule(choice, count, off(device))


@pytest.mark.parametrize("name", ROUTERS)
def test_rows_choose_what_torch_says(device: str, name: str) -> None:
    how, rows = ROUTERS[name], 6
    logits = noise(2, rows, how.count, seed=1).to(device) * 2
    correction = noise(how.count, seed=2).to(device) * 0.3 if how.correction else None
    slots = slots_of(rows, device, (1, 5))
    ours, theirs = (f(logits, correction, how, slots, PADDING, off(device)) for f in (choose, choose_twin))
    assert torch.equal(ours.experts, theirs.experts)
    assert furthest(ours.weights, theirs.weights) < 1e-6
    assert (ours.experts[[1, 5]] == NO_EXPERT).all() and not ours.weights[[1, 5]].any()
    assert (ours.experts.diff(dim=1)[[0, 2, 3, 4]] > 0).all()
    alone = choose(logits[:, 3:4].contiguous(), correction, how, slots[3:4], PADDING, off(device))
    assert torch.equal(alone.experts[0], ours.experts[3]) and torch.equal(alone.weights[0], ours.weights[3])


def test_rows_are_spread_over_so_many_experts_for_a_measurement(device: str) -> None:
    """Padding, too; and each row has as many different ones as ever."""
    how, spread = Experts(8, 3, 32), torch.full((1,), 5, dtype=torch.int32, device=device)
    given = noise(1, 4, 8).to(device), None, how, slots_of(4, device, (0, 2)), PADDING, spread
    ours, theirs = choose(*given), choose_twin(*given)
    assert torch.equal(ours.experts, theirs.experts)
    assert int((schedule_of(ours, 8, device).counts > 0).sum()) == 5
    assert all(len(set(row)) == 3 for row in ours.experts.tolist())


@pytest.mark.parametrize("name", ["normalised", "groups", "softmax groups"])
def test_equal_experts_go_to_the_lower_number(device: str, name: str) -> None:
    how = ROUTERS[name]
    logits = torch.zeros(1, 2, how.count)
    logits[0, 1, [how.count - 1, how.count - 2]] = 1.0
    given = logits.to(device), torch.zeros(how.count, device=device) if how.correction else None
    found = choose(*given, how, slots_of(2, device), PADDING, off(device)).experts.tolist()
    assert found[0] == list(range(how.per_token))
    assert found[1] == choose_twin(*given, how, slots_of(2, device), PADDING, off(device)).experts[1].tolist()
    assert found[1][-2:] == [how.count - 2, how.count - 1]


def test_rows_of_nothing_but_nan_choose_something(device: str) -> None:
    """A schedule must never name a row or an expert that is not there."""
    how = ROUTERS["normalised"]
    found = choose(
        torch.full((1, 1, 8), torch.nan, device=device), None, how, slots_of(1, device), PADDING, off(device)
    )
    assert found.experts.tolist() == [[0, 1]]


def some_choice(rows: int, how: Experts, device: str, seed: int = 0, padding: tuple[int, ...] = ()) -> Choice:
    """Torch's: in the interpreter a row takes the kernel 30 ms."""
    slots = slots_of(rows, device, padding)
    return choose_twin(
        noise(1, rows, how.count, seed=seed).to(device), None, how, slots, PADDING, off(device)
    )


@pytest.mark.parametrize(
    ("rows", "count", "top"), sweep([(1, 8, 2), (7, 5, 5), (64, 8, 2), (300, 6, 3), (2500, 4, 1)],
    quick=[(1, 8, 2), (7, 5, 5), (2500, 4, 1)]),
)  # fmt: skip
def test_a_schedule_has_every_pair_once_and_in_order(device: str, rows: int, count: int, top: int) -> None:
    how = Experts(count, top, 32)
    choice = some_choice(rows, how, device, padding=(rows // 2,) if rows > 1 else ())
    touched = [torch.full((1,), 5, dtype=torch.int32, device=device) for _ in range(2)]
    ours, theirs = schedule(choice, count, touched[0]), schedule_twin(choice, count, touched[1])
    assert torch.equal(ours.counts, theirs.counts) and torch.equal(*touched)
    for expert, number in enumerate(ours.counts.tolist()):
        assert torch.equal(ours.pairs[expert, :number], theirs.pairs[expert, :number])
    assert int(touched[0]) == 5 + int((ours.counts > 0).sum())


def test_there_is_a_tile_for_every_choice() -> None:
    """However rows choose; and no more than that by much."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 15, 16, 17, 64, 300):
        for count, top in ((8, 2), (128, 8), (4, 4), (16, 1)):
            for tall in (16, 64):
                room = most_tiles(count, rows, top, tall)
                even = torch.rand(rows, count, generator=generator).argsort(1)[:, :top]
                for chosen in (even, even[:1].expand(rows, -1)):
                    counts = chosen.flatten().bincount(minlength=count)
                    assert int((-(-counts // tall)).sum()) <= room
                assert room <= min(count, rows * top) + rows * top // tall


# ----------------------------------------------------------------------------------------------- products


def packed_experts(
    count: int, outputs: int, inputs: int, halves: int, device: str, kind: str = "bfloat16"
) -> Packed:
    weights = noise(count, halves, outputs, inputs, seed=3).to(HALF) / inputs**0.5
    return matmul.pack_experts(weights.to(device), count, kind, dtype=HALF)


def dense_row(x: Tensor, weight: Packed, bias: Tensor | None, tile: Tile) -> Tensor:
    """A dense product with the tile of the experts', as the interpreter's order of sums depends on its shape."""
    pieces = matmul.segments(weight)
    out = x.new_empty(
        (pieces if tile.spread else 1, len(x), weight.outputs),
        dtype=x.dtype if weight.gated else torch.float32,
    )
    matmul.launch_multiply(x, weight, bias, out, pieces, tile)
    return out[0] if weight.gated else matmul.add_parts(out)


SHAPES = [  # outputs, inputs, halves, bias
    (48, 64, 2, False),
    (96, 80, 2, True),
    (64, 1100, 1, True),
    (72, 48, 1, False),
]


@pytest.mark.parametrize(("outputs", "inputs", "halves", "biased"), sweep(SHAPES, quick=SHAPES[1:3]))
@pytest.mark.parametrize("rows", sweep([1, 2, 3, 16, 17, 33, 64, 300], quick=[1, 17]))
def test_a_row_has_the_bits_of_a_dense_model_with_its_expert(
    device: str, rows: int, outputs: int, inputs: int, halves: int, biased: bool
) -> None:
    count, top = 6, 2
    choice = some_choice(rows, Experts(count, top, 32), device, seed=rows, padding=(2,) if rows > 2 else ())
    plan = schedule_of(choice, count, device)
    weight = packed_experts(count, outputs, inputs, halves, device)
    bias = noise(count, halves * outputs, seed=4).to(device) if biased else None
    x = noise(rows if halves == 2 else rows * top, inputs, seed=5).to(HALF).to(device)
    tile = replace(choose_tile(weight, rows, top), outputs=64, inputs=64)
    if halves == 2:
        got = gated_experts(x, weight, bias, plan, top, tile)
    else:
        got = matmul.add_parts(expert_parts(x, weight, bias, plan, tile))
    twin = torch.zeros(1, rows * top, outputs, device=device, dtype=got.dtype)
    experts_twin(x, weight, bias, plan, top if halves == 2 else 1, twin)
    for expert, number in enumerate(plan.counts.tolist()):
        pairs = plan.pairs[expert, :number].long()
        if number:
            own = x[pairs // top if halves == 2 else pairs]
            alone = dense_row(own, weight.of_expert(expert), None if bias is None else bias[expert], tile)
            assert torch.equal(got[pairs], alone)
            assert furthest(got[pairs].float(), twin[0, pairs].float()) < 1e-2
    assert int(plan.counts.sum()) == top * (rows - (rows > 2))


def routed(chosen: list[list[int]], device: str) -> Choice:
    experts = torch.tensor(chosen, dtype=torch.int32, device=device)
    return Choice(experts, torch.ones(experts.shape, device=device))


@pytest.mark.parametrize("others", ["same", "none", "one more"])
def test_a_needle_among_63_others(device: str, others: str) -> None:
    """Whether they go to the same experts, to others, or share one."""
    count, top, rows, needle = 8, 2, 64, 41
    weights = packed_experts(count, 64, 64, 2, device), packed_experts(count, 64, 64, 1, device)
    x = noise(rows, 64, seed=6).to(HALF).to(device)
    company = {"same": [2, 5], "none": [0, 7], "one more": [2, 7]}[others]
    chosen = [[2, 5] if row == needle else company for row in range(rows)]
    tile = Tile(16, 64, 64, 4, 2)

    def down(x: Tensor, choice: Choice) -> Tensor:
        plan = schedule_of(choice, count, device)
        act = gated_experts(x, weights[0], None, plan, top, tile)
        return expert_parts(act, weights[1], None, plan, tile)[0].unflatten(0, (-1, top))

    together = down(x, routed(chosen, device))
    alone = down(x[needle : needle + 1], routed([[2, 5]], device))
    assert torch.equal(together[needle], alone[0])
    for tall in (32, 64):  # tiles of other heights, where that is not the interpreter's business
        if device == "cuda":
            tile = Tile(tall, 64, 64, 4, 2)
            assert torch.equal(down(x, routed(chosen, device))[needle], alone[0])


@pytest.mark.parametrize("paired", [False, True])
def test_a_row_alone_needs_no_schedule(device: str, paired: bool) -> None:
    """Its choice has all that one says, and the count of its experts; a row of padding goes nowhere."""
    how = Experts(8, 3, 32)
    weights = packed_experts(8, 64, 64, 2, device), packed_experts(8, 64, 64, 1, device)
    for padding in ((), (0,)):
        touched = [off(device) for _ in range(2)]
        given = noise(1, 1, 8).to(device), None, how, slots_of(1, device, padding), PADDING, off(device)
        choice = choose(*given, touched[0])
        plans = schedule_one(choice), schedule(choice, 8, touched[1])
        assert torch.equal(*touched)
        made = []
        for plan in plans:
            act = gated_experts(
                noise(1, 64, seed=6).to(HALF).to(device), weights[0], None, plan, 3,
                Tile(16, 64, 64, 4, 2, paired=paired),
            )  # fmt: skip
            out = torch.zeros((1, 3, 64), device=device)
            multiply_experts(act, weights[1], None, plan, 1, out, Tile(16, 64, 64, 4, 2))
            made.append(out)
        assert torch.equal(*made) and bool(made[0].any()) == (not padding)
    with pytest.raises(ValueError, match="schedule"):
        choose(noise(1, 2, 8), None, how, slots_of(2, "cpu"), PADDING, off("cpu"), off("cpu"))


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_experts_in_fewer_bits(device: str, kind: str) -> None:
    count, top, rows = 4, 2, 5
    plan = schedule_of(some_choice(rows, Experts(count, top, 32), device), count, device)
    x = noise(rows, 128, seed=5).to(HALF).to(device)
    for halves in (2, 1):
        weight = packed_experts(count, 64, 128, halves, device, kind)
        given = x if halves == 2 else x.repeat_interleave(top, 0)
        tile = Tile(16, 64, weight.depth, 4, 2)
        got = (
            gated_experts(given, weight, None, plan, top, tile)
            if halves == 2
            else expert_parts(given, weight, None, plan, tile)[0]
        )
        for expert, number in enumerate(plan.counts.tolist()):
            pairs = plan.pairs[expert, :number].long()
            if number:
                own = given[pairs // top if halves == 2 else pairs]
                assert torch.equal(got[pairs], dense_row(own, weight.of_expert(expert), None, tile))


# ----------------------------------------------------------------------------------------- in a decoder


@pytest.mark.parametrize(("parts", "shared", "gates"), [(1, 0, 0), (2, 3, 0), (1, 1, 2)])
def test_experts_are_added_in_order_then_the_shared_one(
    device: str, parts: int, shared: int, gates: int
) -> None:
    rows, top, width = 3, 3, 96
    choice = routed([[0, 2, 5], [NO_EXPERT] * top, [1, 2, 3]], device)
    choice.weights.copy_(noise(rows, top, seed=1))
    given = noise(parts, rows * top, width, seed=2).to(device)
    given[:, top : 2 * top] = torch.nan  # nothing was written there
    more = noise(shared, rows, width, seed=3).to(device) if shared else None
    gate = noise(gates, rows, 1, seed=4).to(device) if gates else None
    weight = noise(width, seed=5).to(device)
    pending = ExpertParts(given, choice.experts, choice.weights, more, gate)
    results = []
    for add in (add_and_norm, add_and_norm_twin):
        x, out = noise(rows, width).to(device), torch.empty(rows, width, dtype=HALF, device=device)
        add(x, pending, weight, 1e-5, out, gain=0.7)
        results.append((x, out))
    (x, out), (expected, expected_out) = results
    assert furthest(x, expected) < 1e-6 and furthest(out.float(), expected_out.float()) < 1e-2
    alone = noise(rows, width).to(device)[2:].contiguous()
    last = [one if one is None else one[:, 2:] for one in (more, gate)]
    mine = ExpertParts(given[:, 2 * top :], choice.experts[2:], choice.weights[2:], *last)
    add_and_norm(alone, mine, None, 0.0, None, gain=0.7)
    assert torch.equal(alone[0], x[2])


MIXTURES = {
    "plain": {"experts": Experts(6, 2, 24), "intermediate": 0},
    "shared": {
        "experts": Experts(
            8, 3, 24, score="sigmoid", correction=True, groups=4, groups_kept=2, scale=1.8, shared_gate=True
        ),
        "residual_scale": 0.6, "windows": (0, 5),
    },
    "biased": {"experts": Experts(4, 2, 24, router_bias=True, bias=True), "intermediate": 0},
    "weighed input": {"experts": Experts(4, 1, 24, score="sigmoid", normalise=False, weighs_input=True)},
}  # fmt: skip


@pytest.mark.parametrize("name", sweep(MIXTURES, quick=["shared", "biased"]))
def test_logits_are_the_references(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that choose alike: of nearly equal experts bfloat16 may choose another than float32."""
    ours, reference = decoders(device, layers=1, **MIXTURES[name])
    ids, chosen = random_ids(VOCAB, 3), dict[str, list[Tensor]](choose=[], route=[])

    def choosing(*given: Any) -> Choice:
        chosen["choose"].append((made := choose(*given)).experts.cpu().long())
        return made

    def routing(*given: Any) -> tuple[Tensor, Tensor]:
        made = route(*given)
        chosen["route"].append(made[0])
        return made

    monkeypatch.setattr("outrider.model.kernels.gpu.kernels.choose", choosing)
    monkeypatch.setattr("outrider.model.kernels.reference.route", routing)
    mine = HalfReader(ours, device).feed(ours, Part(0, ids, TREE))
    theirs = Reader(reference.config).feed(reference, Part(0, ids, TREE))
    alike = (torch.stack(chosen["choose"]) == torch.stack(chosen["route"])).all(-1).all(0)
    assert alike.float().mean() > 0.8
    assert furthest(mine.cpu()[alike], theirs[alike]) < 2.5e-2


def test_a_tree_has_the_bits_of_plain_decoding(device: str) -> None:
    model, _ = decoders(device, layers=1, **MIXTURES["plain"])
    check_tree_bits(model, device, node=6)


def test_a_step_counts_the_experts_of_its_rows_and_not_of_padding(device: str) -> None:
    """Unless padding is told to read as many as so many rows, to be timed."""
    how = Experts(6, 2, 24)
    model = DeviceDecoder(decoders(device, layers=1, windows=(0,), experts=how, intermediate=0)[0])
    store, state = make_store(model, 16), SequenceState(4, 40, torch.device(device), VOCAB)
    state.table[-1] = store.slots
    step = CapturedStep(
        GpuStepOps(state, model), model.make_pass(store), StepShape(2, NO_TREE, (), 40, False),
        tree_nodes(NO_TREE), padding=store.slots,
    )  # fmt: skip
    step.fill([1], [0], [True], np.array([[3]], np.int32))
    assert int(step.launch().experts) == how.per_token
    for rows, expected in ((1, 2), (2, 3), (9, 6), (0, 0)):
        step.ops.spread_rows(rows)
        step.launch_padding()
        assert int(step.read) == min(expected, 2 * how.per_token), rows


@pytest.mark.gpu
def test_captured_steps_have_the_bits_of_eager_ones_in_any_company(device: str) -> None:
    """Layers of Qwen3-30B-A3B: rows 1 to 64 alone and together, and from a graph captured with other tokens."""
    shape = {"hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "intermediate": 0}
    experts = Experts(128, 8, 768)
    model = DeviceDecoder(decoders(device, layers=2, windows=(0, 0), experts=experts, **shape)[0])
    reader = HalfReader(model.decoder, device, texts=64)
    alone = HalfReader(model.decoder, device, texts=64)
    texts = [random_ids(VOCAB, 3 + text % 5, seed=text) for text in range(64)]
    for one in (reader, alone):
        one.feed(model, *(Part(text, ids) for text, ids in enumerate(texts)))
    graphed = GraphedPass(DevicePass(model, reader.store))
    for count in (1, 2, 3, 8, 16, 17, 33, 64):
        for token in (5, 6):
            batch = reader.batch(*(Part(text, [token + text]) for text in range(count)))
            expected = model.forward(batch, reader.store)
            assert torch.equal(graphed(batch, 1, 100), expected)
            for text in {0, count // 2, count - 1}:
                mine = model.forward(alone.batch(Part(text, [token + text])), alone.store)
                assert torch.equal(mine[0], expected[text]), (count, text)
