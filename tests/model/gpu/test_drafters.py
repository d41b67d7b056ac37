"""Drafters that live off the target, with Triton: the head against its twin, resident steps against eager ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from outrider.device.ops_gpu import GpuStepOps
from outrider.device.state import SequenceState
from outrider.draft import tree
from outrider.draft.drafters import Drafters
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import EagleHead, load_eagle
from outrider.draft.eagle_head_gpu import GpuEagleHead
from outrider.draft.early_exit import EarlyExitDrafter, exit_agreement
from outrider.engine.eager_runner import EagerRunner
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.kv_cache import make_kv_cache
from outrider.load.heads import HeadConfig, write_head
from outrider.model.decoder import Decoder, make_store
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import Batch, DraftPlan
from tests.engine.test_resident_drafts import Noted, Silent
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.gpu.test_kernels import HALF, to_device
from tests.sweep import sweep
from tests.tiny import (
    VOCAB,
    Always,
    Letters,
    eagle_tensors,
    finish,
    head_tensors,
    prompt_of,
    random_tensors,
    request,
    tiny_config,
    tokens_of,
    write_eagle,
)

CONFIG = tiny_config()
POSITIONS = 192


@pytest.fixture(scope="module")
def target(device: str) -> DeviceDecoder:
    tables = rope_tables(CONFIG, POSITIONS)
    return DeviceDecoder(Decoder(CONFIG, random_tensors(CONFIG), GpuKernels(CONFIG, tables, device, HALF)))


@pytest.fixture(scope="module")
def twin() -> Decoder:
    return Decoder(CONFIG, random_tensors(CONFIG), ReferenceKernels(CONFIG, rope_tables(CONFIG, POSITIONS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_eagle(tmp_path_factory.mktemp("eagle"), CONFIG, eagle_tensors(CONFIG, VOCAB))


@pytest.fixture(scope="module")
def heads(target, twin, folder) -> tuple[EagleHead, EagleHead]:
    return load_eagle(folder, target, 100, GpuEagleHead), load_eagle(folder, twin, 100)


LAYER = replace(CONFIG.reshaped(1, heads=2, kv_heads=1, intermediate=40), norm_eps=0.05)
KINDS = {
    "tap norms": HeadConfig(LAYER, 50, (0, 2), 2, tap_norms=True, norm_output=True, shared_head=True),
    "joint norm": HeadConfig(LAYER, VOCAB, (1, 2), shared_head=True, joint_norm=True, normed_residual=True),
}


@pytest.mark.parametrize("kind", ["published", *KINDS])
def test_the_head_is_its_twin(target, twin, heads, tmp_path, kind: str, device: str) -> None:
    ours, theirs = heads
    if kind in KINDS:
        write_head(tmp_path, KINDS[kind], head_tensors(KINDS[kind]))
        ours, theirs = load_eagle(tmp_path, target, 100, GpuEagleHead), load_eagle(tmp_path, twin, 100)
    taps = len(ours.config.taps)
    features = torch.randn(6, taps, CONFIG.hidden, generator=torch.Generator().manual_seed(1))
    reader = Reader(CONFIG)
    batch = reader.batch(Part(0, random_ids(VOCAB, 6)))
    stores = ours.make_store(reader.table.numel()), theirs.make_store(reader.table.numel())
    mine = ours.forward(ours.fused(features.to(device, HALF)), batch, stores[0])
    wanted = theirs.forward(theirs.fused(features.to(HALF).float()), batch, stores[1])
    assert furthest(mine.cpu(), wanted) < 3e-2
    logits, expected = ours.logits(mine).cpu(), theirs.logits(wanted)
    known = ~expected.isinf()
    assert torch.equal(~logits.isinf(), known)
    assert furthest(logits[known], expected[known]) < 3e-2


def test_a_window_of_rows_has_the_bits_of_single_rows(heads, device: str) -> None:
    head, _ = heads
    features = torch.randn(5, 3, CONFIG.hidden, generator=torch.Generator().manual_seed(1)).to(device)
    reader = Reader(CONFIG)
    batch = to_device(reader.batch(Part(0, random_ids(VOCAB, 5))), device)
    wide = torch.cat([torch.zeros_like(batch.table[:, :1]), batch.table], dim=1)
    batch = replace(batch, table=wide[:, 1:])  # as a chain sees it: from the second column on
    runs = [head.make_pass(head.make_store(reader.table.numel())) for _ in range(2)]
    together = runs[0](head.fused(features), batch, 5, 64)
    for i in range(5):
        fields = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors")
        row = replace(batch, **{name: getattr(batch, name)[i : i + 1] for name in fields})
        alone = runs[1](head.fused(features[i : i + 1]), row, 1, 64)
        assert torch.equal(alone[0], together[i])
    eager = head.forward(head.fused(features), batch, head.make_store(reader.table.numel()))
    assert torch.equal(eager, together)


def test_hidden_states_land_in_their_slots(target, twin, device: str) -> None:
    ids, kept = random_ids(VOCAB, 6), []
    for model in (target, twin):
        reader = Reader(CONFIG)
        store = make_store(model, reader.table.numel())
        store.tap((0, 1, 1, 2), CONFIG.hidden)  # the last one leaves the last layer
        store.features.zero_()  # a CPU's begin as anything
        batch = reader.batch(Part(0, ids)).to(model.device)
        if model is target:
            DevicePass(target, store)(batch, 6, 64)
        else:
            twin.forward(batch, store)
        slots = batch.slots.long()
        kept.append(store.features[slots].float().cpu())
        assert not store.features.index_fill(0, slots, 0).any()  # nothing anywhere else
    assert furthest(*kept) < 3e-2
    assert (kept[1].abs().sum((0, 2)) > 0).all()


def test_first_layers(target, device: str) -> None:
    """The pass of a round, and a packed one, that end early give the logits of a model that ends there."""
    batch = Reader(CONFIG).batch(Part(0, random_ids(VOCAB, 5))).to(target.device)
    short = DeviceDecoder(_cut(target.decoder, 1))
    expected = short.forward(batch, make_store(short, 500))
    assert torch.equal(DevicePass(target, make_store(target, 500), 1)(batch, 5, 64), expected)
    assert torch.equal(target.exit_logits(batch, make_store(target, 500), 1), expected.cpu())
    assert not torch.equal(target.forward(batch, make_store(target, 500)), expected)


def test_a_level_of_a_tree_has_the_bits_of_its_nodes_alone(target, heads, device) -> None:
    """Two siblings after five known tokens, and a child of the second: each sees its own path only, in a table that
    begins one column later.
    """
    head = heads[0]
    features = torch.randn(5, 3, CONFIG.hidden, generator=torch.Generator().manual_seed(1)).to(device)
    ids, slots = random_ids(VOCAB, 8), torch.arange(8, dtype=torch.int32)
    table = torch.cat([torch.zeros(1, dtype=torch.int32), slots])[None]

    def rows(nodes: list[int], prefix: int, masks: list[int], positions: list[int]) -> Batch:
        """Of entries of the text or, past the first five, of draft nodes."""
        at = torch.tensor(nodes)
        made = Batch(
            ids=torch.tensor(ids)[at], positions=torch.tensor(positions, dtype=torch.int32), slots=slots[at],
            table_rows=torch.zeros(len(at), dtype=torch.int32),
            prefix=torch.full((len(at),), prefix, dtype=torch.int32), ancestors=torch.tensor(masks),
            table=table[:, 1:], logit_rows=torch.arange(len(at)),
        )  # fmt: skip
        return replace(to_device(made, device), table=table.to(device)[:, 1:])

    known = rows([0, 1, 2, 3, 4], 0, [0] * 5, [0, 1, 2, 3, 4])
    known = replace(known, prefix=known.positions + 1)
    found = []
    for chosen in ((0, 1), (1,)):  # both of the first level, then the second alone
        run = head.make_pass(head.make_store(8))
        last = run(head.fused(features), known, 5, 64)[-1:]
        level = rows([5 + i for i in chosen], 5, [1 << i for i in chosen], [5] * len(chosen))
        first = run(last.repeat(len(chosen), 1), level, len(chosen), 64, True)
        child = rows([7], 5, [0b110], [6])
        found.append((first[-1], run(first[-1:].clone(), child, 1, 64, True)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _cut(whole: Decoder, layers: int) -> Decoder:
    short = Decoder.__new__(Decoder)
    short.__dict__ |= whole.__dict__
    short.layers, short.config = whole.layers[:layers], whole.config.reshaped(layers)
    return short


def test_the_exit_is_searched_on_the_device(target, twin) -> None:
    samples = [prompt_of(12, 1)]
    ours, theirs = exit_agreement(target, samples), exit_agreement(twin, samples)
    assert set(ours) == set(theirs) == {1}
    assert all(abs(ours[layers] - theirs[layers]) <= 2 / 12 for layers in ours)


def make_engine(target: DeviceDecoder, folder, name: str, device: str, answers: dict | None = None) -> Engine:
    """Whose drafter is silent in eager steps or, where the answers are given, drafts in resident ones."""
    settings = Settings(max_sequences=4, step_rows=32, cache_bytes=1 << 18)
    cache = make_kv_cache(target, settings)
    if name == "eagle":
        head = load_eagle(folder, target, cache.context, GpuEagleHead)
        drafter = EagleDrafter(head, cache.store, cache.table)
    else:
        drafter = EarlyExitDrafter(target, cache.store, cache.table, 1)
    drafters = Drafters({name: Silent(drafter) if answers is None else Noted(drafter, answers, 1)}, VOCAB)
    if answers is None:
        runner = EagerRunner(target, cache, drafters)
    else:
        rows, width = cache.table.tensor.shape
        ops = GpuStepOps(SequenceState(rows, width, torch.device(device)), target)
        # Nothing is captured: what is noted must be looked at.
        runner = GraphRunner(target, cache, drafters, ops, target.make_pass(cache.store))
    return Engine(target, cache, drafters, Always(DraftPlan(name, 2, 2)), runner, settings, Letters)


@pytest.mark.parametrize("name", sweep(["eagle", "early_exit"], quick=["eagle"]))
def test_resident_steps_draft_and_emit_what_eager_ones_do(target, folder, device, name, monkeypatch) -> None:
    monkeypatch.setattr(tree, "CANDIDATES", VOCAB)  # on the device every token takes part
    one = request("a", prompt_of(5, 1), max_tokens=3, temperature=0.7)
    eager = make_engine(target, folder, name, device)
    eager.add(one)
    answers = {key[0]: tokens_of(events) for key, events in finish(eager).items()}
    drafts = {key: tokens for key, (tokens, _) in eager.drafters[name].seen.items()}
    engine = make_engine(target, folder, name, device, answers)
    noted = engine.drafters[name]
    noted.running = engine.scheduler.running
    engine.add(one)
    assert {key[0]: tokens_of(events) for key, events in finish(engine).items()} == answers
    assert not engine.drafters.faults
    compared = {key: tokens for key, tokens in noted.resident.items() if drafts.get(key)}
    assert len(compared) >= 2
    for key, tokens in compared.items():
        assert tokens == drafts[key], key
