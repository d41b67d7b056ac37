"""Staged rows share a pass with resident ones: all have the bits of passes of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.control.trees import tree_nodes
from outrider.device.buckets import staged_shape
from outrider.device.ops import TreeLayout
from outrider.device.ops_gpu import GpuStepOps
from outrider.device.state import SequenceState
from outrider.model.decoder import Decoder, make_store
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.rope import rope_tables
from outrider.model.staged import StagedRows
from outrider.types import Batch, Draft
from tests.model.batches import Part, Reader, random_ids
from tests.model.gpu.test_kernels import HALF
from tests.sweep import sweep
from tests.tiny import VOCAB, random_tensors, tiny_config

TREE = Draft((3, 4, 5, 6, 7), (-1, -1, 0, 0, 2))
WIDTH, TEXTS = 191, 5


class World:
    """A model, and texts of which the first two are resident and the others are staged."""

    def __init__(self, device: str, lengths: list[int], **changes) -> None:
        self.config = tiny_config(layers=1, **changes)
        kernels = GpuKernels(self.config, rope_tables(self.config, 256), device, HALF)
        self.model = DeviceDecoder(Decoder(self.config, random_tensors(self.config), kernels))
        self.reader = Reader(self.config, TEXTS, 128)
        self.slots = self.reader.table.numel()
        self.store = make_store(self.model, self.slots)
        self.state = SequenceState(TEXTS, WIDTH, torch.device(device))
        self.state.table[:-1], self.state.table[-1] = self.reader.table.to(device), self.slots
        self.reader.lengths = list(lengths)
        self.state.lengths[:-1] = torch.tensor(lengths)
        generator = torch.Generator().manual_seed(3)
        self.state.tokens.copy_(torch.randint(VOCAB, self.state.tokens.shape, generator=generator))
        for past in (*self.store.keys, *self.store.values):
            past.copy_(torch.randn(past.shape, generator=generator))

    def resident(self, shape: tuple[int, int], rows: list[int]) -> Batch:
        ops = GpuStepOps(self.state, self.model)
        owners = torch.tensor(rows, device=self.state.device)
        drafted = torch.tensor([random_ids(VOCAB, max(shape[1], 1), seed=9 + row) for row in rows])
        layout = TreeLayout(tree_nodes(shape)).layout
        return ops.build_batch(owners, self.state.lengths[owners], layout, drafted.to(self.state.device))

    def stage(self, *parts: Part, wanted: list[int]) -> StagedRows:
        batch = replace(self.reader.batch(*parts), logit_rows=torch.tensor(wanted))
        entries = [
            self.reader.lengths[p.text] + i for p in parts for i in range(len(p.tokens) + len(p.draft))
        ]
        branching = 16 if any(len(part.draft) for part in parts) else 0
        room = len(entries) + -len(entries) % 8
        shape = staged_shape(room + branching // 2, room, branching, self.config)
        staged = StagedRows(shape, self.state.table, self.slots, TEXTS)
        staged.fill(batch, torch.tensor(entries, dtype=torch.int32))
        return staged


def copied(world: World) -> list[Tensor]:
    return [tensor.clone() for tensor in (*world.store.keys, *world.store.values)]


CHUNKS = [Part(2, random_ids(VOCAB, 4, seed=1)), Part(4, random_ids(VOCAB, 17, seed=2))]
MIXED = [Part(3, [5], TREE), Part(2, random_ids(VOCAB, 9, seed=3)), Part(4, [8, 9], Draft.chain([1, 2]))]
ROWS = 19  # of the mixed ones
FEW = [Part(3, [5], TREE), Part(2, random_ids(VOCAB, 3, seed=3)), Part(4, [8], Draft.chain([1]))]
CASES = [
    ((2, 3), FEW),
    ((2, 6), MIXED),
    ((0, 0), CHUNKS),
    ((3, 15), CHUNKS),
    ((4, 4), MIXED),
    ((0, 0), MIXED),
]


@pytest.mark.parametrize(("shape", "parts"), sweep(CASES, quick=CASES[:1]))
@pytest.mark.parametrize("heads", sweep([{}, {"heads": 6, "windows": (5,)}], quick=[{}]))
def test_a_joint_pass_has_the_bits_of_two(device: str, shape, parts: list[Part], heads: dict) -> None:
    lengths, context = [40, 66, 0, 63, 50], 192
    rows = sum(len(part.tokens) + len(part.draft) for part in parts)
    wanted = [0, rows - 1, rows // 2]
    results = []
    for joint in (True, False):
        world = World(device, lengths, **heads)
        run, tree = DevicePass(world.model, world.store), TreeLayout(tree_nodes(shape))
        batch = world.resident(shape, [1, 0, TEXTS])  # the last one is padding
        staged = world.stage(*parts, wanted=wanted)
        together = len(tree) + 1
        if joint:
            logits = run(staged.join(batch), together, context, tree.branches, staged)
        else:
            nothing = replace(batch, **{name: getattr(batch, name)[:0] for name in NAMES})
            alone = run(batch, together, context, tree.branches)
            logits = torch.cat([alone, run(staged.join(nothing), together, context, False, staged)])
        real = torch.ones(len(logits), dtype=torch.bool)
        real[2 * together : 3 * together] = False
        real[3 * together + len(wanted) :] = False  # padding too
        results.append((logits.cpu()[real], copied(world)))
        assert bool(torch.isfinite(logits).all())
    (ours, kept), (theirs, expected) = results
    assert torch.equal(ours, theirs)
    # Padding's slot is written by several at once.
    assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(kept, expected, strict=True))
    assert all(bool(torch.isfinite(a).all()) for a in kept)


NAMES = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors", "logit_rows")


@pytest.mark.parametrize("parts", sweep([FEW, MIXED], quick=[FEW]), ids=len)
def test_staged_rows_have_the_bits_of_a_packed_pass(device: str, parts: list[Part]) -> None:
    """Padded to a bucket, in groups of their own: as `forward` gives them."""
    world, again = World(device, [0, 0, 0, 63, 50]), World(device, [0, 0, 0, 63, 50])
    packed = again.reader.batch(*parts)
    staged = world.stage(*parts, wanted=[*range(packed.rows)])
    nothing = replace(staged.batch, **{name: getattr(staged.batch, name)[:0] for name in NAMES})
    logits = DevicePass(world.model, world.store)(staged.join(nothing), 1, 192, False, staged)
    expected = again.model.forward(packed.to(torch.device(device)), again.store)
    assert torch.equal(logits[: packed.rows], expected)


def test_what_was_staged_before_is_gone(device: str) -> None:
    world = World(device, [0, 0, 0, 63, 50])
    staged = world.stage(*MIXED, wanted=[*range(ROWS)])
    staged.clear()
    assert bool((staged.batch.slots == world.slots).all()) and bool((staged.batch.table_rows == TEXTS).all())
    for part in staged.parts:  # padding computes, too: its numbers are read by padding
        rows = [row for first, count, _ in part.groups.tolist() for row in range(first, first + count)]
        assert rows == list(range(part.batch.rows))


def test_more_than_there_is_room_for_is_refused(device: str) -> None:
    world = World(device, [0, 0, 0, 63, 50])
    staged = world.stage(*CHUNKS, wanted=[0])
    with pytest.raises(ValueError, match="are more than"):
        staged.fill(world.reader.batch(*CHUNKS, *MIXED), torch.zeros(40, dtype=torch.int32))
