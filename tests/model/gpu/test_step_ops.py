"""What a step does around its passes: kernels leave and return what the torch operations of device/ops.py do."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.control.trees import CHAINS, TREES, tree_nodes
from outrider.device.ops import SLOTS, Layout, StepOps, TreeLayout, chain_levels, known_rows
from outrider.device.ops_gpu import GpuStepOps
from outrider.device.state import SequenceState
from outrider.model.kernels.gpu import attention
from outrider.model.kernels.gpu.filter import filter_rows
from outrider.model.kernels.reference import ReferenceKernels
from outrider.types import Batch
from tests.model.batches import random_ids
from tests.sweep import sweep
from tests.tiny import tiny_config

ROWS, WIDTH, VOCAB = 5, 96, 9
TREE = TreeLayout(tree_nodes((3, 15)))
LAYOUTS = [
    known_rows(4),
    known_rows(9, behind=1),
    TREE.layout,
    TreeLayout(tree_nodes((4, 4))).layout,
    *(layout for layout, _ in TREE.levels),
    *(layout for layout, _ in chain_levels(3)),
    TREE.levels[-1][0].put_behind(1),
]


class Law:
    """What is asked of a model: nothing but the law itself."""

    def __init__(self) -> None:
        kernels = ReferenceKernels(tiny_config(), torch.zeros(1))
        self.draw, self.filter_logits = kernels.draw, kernels.filter_logits


def filled(device: str, seed: int = 0) -> SequenceState:
    """A state in which every number is another, the same on every device."""
    torch.manual_seed(seed)
    state = SequenceState(ROWS, WIDTH, torch.device(device))
    for tensor, top in (
        (state.tokens, VOCAB),
        (state.table, 1000),
        (state.lengths, 40),
        (state.seeds, 2**40),
    ):
        tensor.copy_(torch.randint(top, tensor.shape).to(tensor.dtype))
    state.lengths[-1] = 0
    state.temperature.copy_(torch.tensor([0.0, 0.7, 1.0, 1e-3, 1.6, 0.0]))
    return state


def twins(device: str, seed: int = 0) -> tuple[StepOps, StepOps]:
    """The torch operations, and the kernels, over states of their own."""
    return StepOps(filled("cpu", seed), Law()), GpuStepOps(filled(device, seed), law_on(device))


def same_state(one: SequenceState, other: SequenceState) -> bool:
    names = ("tokens", "table", "lengths")
    # Padding's own row is written by several at once.
    return all(torch.equal(getattr(one, n)[:-1], getattr(other, n)[:-1].cpu()) for n in names) and bool(
        other.lengths[-1] == 0
    )


def inputs_of(rows: list[int], wanted: list[int], fresh: int, commits: list[int] | None = None) -> Tensor:
    slots = torch.arange(len(rows) * fresh, dtype=torch.int32).view(-1, fresh) + 2000
    columns = [rows, wanted, commits or [1] * len(rows)]
    assert len(columns) == SLOTS
    return torch.cat([torch.tensor(columns, dtype=torch.int32).T, slots], dim=1)


def law_on(device: str) -> Any:
    """What samples there: kernels filter on a GPU."""
    law = Law()
    if device != "cpu":
        law.filter_logits = filter_rows
    return law


def start_of(ops: StepOps, rows: Tensor, layout: Layout, drafted: Tensor | None = None) -> Batch:
    there = rows.to(ops.state.device)
    nodes = None if drafted is None else drafted.to(ops.state.device)
    return ops.build_batch(there, ops.state.lengths[there], layout, nodes)


def test_begin_step(device: str) -> None:
    one, other = twins(device)
    inputs = inputs_of([3, 0, 4, ROWS, ROWS], [4, 0, 1, 0, 0], 5)
    ours, theirs = other.begin_step(inputs.to(device)), one.begin_step(inputs)
    for field in fields(ours):
        assert torch.equal(getattr(ours, field.name).cpu(), getattr(theirs, field.name)), field.name
    assert same_state(one.state, other.state)
    assert theirs.drafting.tolist() == [3, ROWS, 4, ROWS, ROWS]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafting", [True, False])
def test_build_batch(device: str, layout: Layout, drafting: bool) -> None:
    one, other = twins(device)
    one.state.lengths[1] = other.state.lengths[1] = 0  # shorter than any window
    rows = torch.tensor([3, 1, ROWS])
    drafted = torch.randint(VOCAB, (3, 15)) if drafting else None
    theirs, ours = (start_of(ops, rows, layout, drafted) for ops in (one, other))
    for field in fields(Batch):
        mine, wanted = getattr(ours, field.name).cpu(), getattr(theirs, field.name)
        if field.name == "ids" and not drafting:
            known = torch.tensor(layout.nodes * 3) < 0  # others are nobody's
            mine, wanted = mine[known], wanted[known]
        assert mine.dtype == wanted.dtype and torch.equal(mine, wanted), field.name


@pytest.mark.parametrize(
    ("vocab", "filtered", "level"),
    sweep(
        product([40, 9001], [False, True], [0, 1, 2]),
        quick=[*product([40], [False, True], [0, 1, 2]), (9001, True, 0)],
    ),
)
def test_draw(device: str, vocab: int, filtered: bool, level: int) -> None:
    rows = torch.tensor([3, 0, 1, 4])
    layout, columns = TREE.levels[level]
    logits = torch.randn(4 * len(layout), vocab + 3) * 3
    logits[1] = 1.0  # greedy, all equal
    drawn = []
    for ops in twins(device):
        s, ops.filtered = ops.state, filtered
        s.top_k[1], s.top_p[3], s.log_min_p[4] = 30, 0.9, -4.0
        out = torch.full((4, 15), -7, device=s.device)
        ops.draw(start_of(ops, rows, layout), logits.to(s.device)[:, :vocab], columns, out)
        drawn.append(out.cpu())
    assert torch.equal(*drawn)
    chosen = [column for own in columns for column in own if column >= 0]
    assert bool((drawn[0][:, chosen] >= 0).all()) and bool((drawn[0] == -7).sum() == 4 * (15 - len(chosen)))


@pytest.mark.parametrize(("vocab", "most"), [(3, 5), (97, 4), (9001, 7)])
def test_several_draws_are_those_of_banning_in_turn(device: str, vocab: int, most: int) -> None:
    rows = torch.arange(ROWS)
    layout, columns = next(chain_levels(1))[0], (tuple(range(most)),)
    logits = torch.randn(ROWS, vocab) * 3
    logits[0] = 1.0  # greedy, all equal
    logits[4, 2:] = -torch.inf
    drawn = []
    for ops in twins(device):
        drawn.append(torch.full((ROWS, most), -7, device=ops.state.device))
        ops.draw(start_of(ops, rows, layout), logits.to(ops.state.device), columns, drawn[-1])
    expected, found = (out.cpu() for out in drawn)
    enough = min(most, vocab)
    assert torch.equal(found[:4, :enough], expected[:4, :enough])
    assert torch.equal(found[4, :2], expected[4, :2])  # nothing is left after that


def test_the_position_sampled_for_counts(device: str) -> None:
    _, ops = twins(device)
    layout, columns = next(chain_levels(1))
    batch = start_of(ops, torch.tensor([1, 4]), layout)
    logits, sampled = torch.zeros(2, 5000, device=device), []
    for ahead in (1, 2):
        out = torch.empty((2, 1), dtype=torch.int64, device=device)
        ops.draw(batch, logits, columns, out, ahead)
        sampled.append(out.tolist())
    assert sampled[0] != sampled[1]


def test_append_tokens(device: str) -> None:
    """Neither padding nor whoever the host verifies (row 1) grows."""
    one, other = twins(device)
    before = one.state.lengths.tolist()
    rows, emitted = torch.tensor([3, 1, ROWS, ROWS]), torch.randint(VOCAB, (4, 3))
    inputs = inputs_of(rows.tolist(), [0] * 4, 3, commits=[3, 2, 1, 0])  # the second bit: another drafter's
    for ops in (one, other):
        ops.append_tokens(ops.begin_step(inputs.to(ops.state.device)), emitted.to(ops.state.device))
    assert same_state(one.state, other.state)
    after = one.state.lengths.tolist()
    assert after[3] == before[3] + 3 and after[1] == before[1] and after[ROWS] == 0
    assert one.state.tokens[3, after[3] - 2 :][:3].tolist() == emitted[0].tolist()


@settings(max_examples=30)
@given(data=st.data())
def test_commit(device: str, data: st.DataObject) -> None:
    """Drafts and samples of few tokens, so that many are accepted."""
    shape = data.draw(st.sampled_from([*CHAINS, *TREES]))
    tree, seed = TreeLayout(tree_nodes(shape)), data.draw(st.integers(0, 1000))
    n, few = shape[1], data.draw(st.integers(1, 3))
    one, other = twins(device, seed)
    before = one.state.lengths.tolist()
    wanted = data.draw(st.lists(st.integers(0, n), min_size=3, max_size=3))
    commits = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    inputs = inputs_of([3, 0, 4, ROWS], [*wanted, 0], n + 1, [*commits, 0])
    drafted = torch.tensor(random_ids(few, 4 * n, seed)).view(4, n)
    chosen = torch.tensor(random_ids(few, 4 * (n + 1), seed + 1)).view(4, n + 1)
    counts = torch.tensor(random_ids(n + 1, 4, seed)) if data.draw(st.booleans()) else None
    results = []
    for ops in (one, other):
        step = ops.begin_step(inputs.to(ops.state.device))
        there = [None if t is None else t.to(ops.state.device) for t in (drafted, counts, chosen)]
        results.append(ops.commit(step, tree.shape.parents, tree.depth, *there).cpu())
    assert torch.equal(*results)
    assert same_state(one.state, other.state)
    for i, row in enumerate((3, 0, 4)):
        accepted, proposed, *rest = results[0][i].tolist()
        path = rest[tree.depth + 1 : tree.depth + 1 + accepted]
        assert [-1, *path[:-1]] == [tree.shape.parents[node] for node in path] or not path
        assert all(node < proposed for node in path)
        # Every node on the path is what was sampled after the one before it, and no other would have been accepted.
        sampled = [int(chosen[i, node + 1]) for node in (-1, *path)]
        assert [int(drafted[i, node]) for node in path] == sampled[: len(path)]
        last = path[-1] if path else -1
        more = [node for node, parent in enumerate(tree.shape.parents) if parent == last and node < proposed]
        assert sampled[-1] not in [int(drafted[i, node]) for node in more]
        grown = before[row] + (commits[i] & 1) * (accepted + 1)
        assert int(one.state.lengths[row]) == grown
        if commits[i] & 1:
            assert one.state.tokens[row, grown - accepted : grown + 1].tolist() == sampled


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_rows_of_a_pass_share(device: str, level: int) -> None:
    rows = torch.tensor([3, 1, 4])
    layout = TREE.levels[level][0] if level else known_rows(4)
    plans = []
    for ops, share in zip(
        twins(device), (attention.share_entries_twin, attention.share_entries), strict=True
    ):
        batch, each = start_of(ops, rows, layout), len(layout)
        items = [[i * each, each, 0] for i in range(3)]
        items = torch.tensor(items, dtype=torch.int32, device=ops.state.device)
        plans.append(attention.make_attention_plan(items, 3 * each, (4, 2, 16), 2, level > 0, 16))
        share(batch, plans[-1])
    assert torch.equal(plans[0].items, plans[1].items.cpu())
    assert torch.equal(plans[0].paths, plans[1].paths.cpu())
