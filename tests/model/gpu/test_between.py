"""Between the passes of a round: kernels leave and tell what the tensor operations of draft/state.py do."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.control.trees import CHAINS, TREES, tree_nodes
from outrider.draft.chains import Branches, chain_levels, known_rows
from outrider.draft.state import Between, Layout, State
from outrider.draft.state_device import DeviceBetween
from outrider.model.kernels.gpu import attention
from outrider.model.kernels.reference import ReferenceKernels
from outrider.types import Batch
from tests.model.batches import random_ids
from tests.sweep import sweep
from tests.tiny import tiny_config

ROWS, WIDTH, VOCAB = 5, 96, 9
TREE = Branches(tree_nodes((3, 15)))
LAYOUTS = [
    known_rows(4),
    known_rows(9, behind=1),
    TREE.layout,
    Branches(tree_nodes((4, 4))).layout,
    *(layout for layout, _ in TREE.levels),
    *(layout for layout, _ in chain_levels(3)),
]


class Law:
    """What is asked of a model: nothing but the law itself."""

    def __init__(self) -> None:
        kernels = ReferenceKernels(tiny_config(), torch.zeros(1), torch.zeros(1))
        self.draw, self.sift = kernels.draw, kernels.sift


def filled(device: str, between: Between, seed: int = 0) -> State:
    """A state in which every number is another, the same on every device."""
    torch.manual_seed(seed)
    state = State(ROWS, WIDTH, torch.device(device), between)
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


def twins(device: str, seed: int = 0) -> tuple[State, State]:
    return filled("cpu", Between(), seed), filled(device, DeviceBetween(), seed)


def same_state(one: State, other: State) -> bool:
    names = ("tokens", "table", "lengths")
    # Padding's own row is written by several at once.
    return all(torch.equal(getattr(one, n)[:-1], getattr(other, n)[:-1].cpu()) for n in names) and bool(
        other.lengths[-1] == 0
    )


def inputs_of(rows: list[int], wanted: list[int], fresh: int) -> Tensor:
    slots = torch.arange(len(rows) * fresh, dtype=torch.int32).view(-1, fresh) + 2000
    return torch.cat([torch.tensor([rows, wanted], dtype=torch.int32).T, slots], dim=1)


def test_take_off(device: str) -> None:
    one, other = twins(device)
    inputs = inputs_of([3, 0, 4, ROWS, ROWS], [4, 0, 1, 0, 0], 5)
    ours, theirs = other.between.take_off(other, inputs.to(device)), one.between.take_off(one, inputs)
    for field in fields(ours):
        assert torch.equal(getattr(ours, field.name).cpu(), getattr(theirs, field.name)), field.name
    assert same_state(one, other)
    assert theirs.guessing.tolist() == [3, ROWS, 4, ROWS, ROWS]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("guessed", [True, False])
def test_lay(device: str, layout: Layout, guessed: bool) -> None:
    one, other = twins(device)
    one.lengths[1] = other.lengths[1] = 0  # shorter than any window
    rows = torch.tensor([3, 1, ROWS])
    guesses = torch.randint(VOCAB, (3, 15)) if guessed else None
    laid = [
        s.between.lay(s, rows.to(s.device), s.lengths[rows.to(s.device)], layout, g)
        for s, g in ((one, guesses), (other, None if guesses is None else guesses.to(device)))
    ]
    for field in fields(Batch):
        if field.name in ("ids",) and not guessed:
            known = torch.tensor(layout.picks * 3) < 0  # others are nobody's
            assert torch.equal(laid[1].ids.cpu()[known], laid[0].ids[known])
            continue
        ours, theirs = (getattr(batch, field.name) for batch in reversed(laid))
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs), field.name


@pytest.mark.parametrize(
    ("vocab", "filtered", "level"),
    sweep(
        product([40, 9001], [False, True], [0, 1, 2]),
        quick=[*product([40], [False, True], [0, 1, 2]), (9001, True, 0)],
    ),
)
def test_draw(device: str, vocab: int, filtered: bool, level: int) -> None:
    one, other = twins(device)
    rows = torch.tensor([3, 0, 1, 4])
    layout, columns = TREE.levels[level]
    logits = torch.randn(4 * len(layout), vocab + 3) * 3
    logits[1] = 1.0  # greedy, all equal
    drawn = []
    for s in (one, other):
        s.filtered = filtered
        s.top_k[1], s.top_p[3], s.floor[4] = 30, 0.9, -4.0
        batch = s.between.lay(s, rows.to(s.device), s.lengths[rows.to(s.device)], layout)
        out = torch.full((4, 15), -7, device=s.device)
        law = Law() if s is one or s.device.type == "cpu" else OnDevice()
        s.between.draw(law, s, batch, logits.to(s.device)[:, :vocab], columns, out)
        drawn.append(out.cpu())
    assert torch.equal(*drawn)
    told = [column for own in columns for column in own if column >= 0]
    assert bool((drawn[0][:, told] >= 0).all()) and bool((drawn[0] == -7).sum() == 4 * (15 - len(told)))


@pytest.mark.parametrize(("vocab", "most"), [(3, 5), (97, 4), (9001, 7)])
def test_several_draws_are_those_of_banning_in_turn(device: str, vocab: int, most: int) -> None:
    one, other = twins(device)
    rows = torch.arange(ROWS)
    layout, columns = next(chain_levels(1))[0], (tuple(range(most)),)
    logits = torch.randn(ROWS, vocab) * 3
    logits[0] = 1.0  # greedy, all equal
    logits[4, 2:] = -torch.inf
    drawn = []
    for s in (one, other):
        batch = s.between.lay(s, rows.to(s.device), s.lengths[rows.to(s.device)], layout)
        drawn.append(torch.full((ROWS, most), -7, device=s.device))
        s.between.draw(Law(), s, batch, logits.to(s.device), columns, drawn[-1])
    expected, found = (out.cpu() for out in drawn)
    enough = min(most, vocab)
    assert torch.equal(found[:4, :enough], expected[:4, :enough])
    assert torch.equal(found[4, :2], expected[4, :2])  # nothing is left after that


class OnDevice:
    """The filters where the logits are."""

    def __init__(self) -> None:
        from outrider.model.kernels.gpu.sift import sift_rows

        self.sift = sift_rows


def test_the_position_foretold_counts(device: str) -> None:
    state = filled(device, DeviceBetween())
    rows = torch.tensor([1, 4], device=device)
    layout, columns = next(chain_levels(1))
    batch = state.between.lay(state, rows, state.lengths[rows], layout)
    logits, said = torch.zeros(2, 5000, device=device), []
    for ahead in (1, 2):
        out = torch.empty((2, 1), dtype=torch.int64, device=device)
        state.between.draw(Law(), state, batch, logits, columns, out, ahead)
        said.append(out.tolist())
    assert said[0] != said[1]


def test_keep(device: str) -> None:
    one, other = twins(device)
    rows, told = torch.tensor([3, 1, ROWS, ROWS]), torch.randint(VOCAB, (4, 3))
    inputs = inputs_of(rows.tolist(), [0] * 4, 3)
    for s in (one, other):
        s.between.keep(s, s.between.take_off(s, inputs.to(s.device)), told.to(s.device))
    assert same_state(one, other)
    assert one.tokens[3, one.lengths[3] - 2 :][:3].tolist() == told[0].tolist()


@settings(max_examples=30)
@given(data=st.data())
def test_commit(device: str, data: st.DataObject) -> None:
    """Guesses and choices of few tokens, so that many hold."""
    form = data.draw(st.sampled_from([*CHAINS, *TREES]))
    tree, seed = Branches(tree_nodes(form)), data.draw(st.integers(0, 1000))
    n, few = form[1], data.draw(st.integers(1, 3))
    one, other = twins(device, seed)
    wanted = data.draw(st.lists(st.integers(0, n), min_size=3, max_size=3))
    inputs = inputs_of([3, 0, 4, ROWS], [*wanted, 0], n + 1)
    guesses = torch.tensor(random_ids(few, 4 * n, seed)).view(4, n)
    chosen = torch.tensor(random_ids(few, 4 * (n + 1), seed + 1)).view(4, n + 1)
    counts = torch.tensor(random_ids(n + 1, 4, seed)) if data.draw(st.booleans()) else None
    told = []
    for s in (one, other):
        off = s.between.take_off(s, inputs.to(s.device))
        there = [None if t is None else t.to(s.device) for t in (guesses, counts, chosen)]
        result = s.between.commit(s, off, tree.shape.parents, tree.depth, *there)
        told.append(result.cpu())
    assert torch.equal(*told)
    assert same_state(one, other)
    for i, row in enumerate((3, 0, 4)):
        accepted, meant, *rest = told[0][i].tolist()
        path = rest[tree.depth + 1 : tree.depth + 1 + accepted]
        assert [-1, *path[:-1]] == [tree.shape.parents[node] for node in path] or not path
        assert all(node < meant for node in path)
        # Every guess on the path is what was chosen after the one before it, and nothing more would have held.
        said = [int(chosen[i, node + 1]) for node in (-1, *path)]
        assert [int(guesses[i, node]) for node in path] == said[: len(path)]
        last = path[-1] if path else -1
        more = [node for node, parent in enumerate(tree.shape.parents) if parent == last and node < meant]
        assert said[-1] not in [int(guesses[i, node]) for node in more]
        known = int(one.lengths[row])
        assert one.tokens[row, known - accepted : known + 1].tolist() == said


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_rows_of_a_pass_share(device: str, level: int) -> None:
    one, other = twins(device)
    rows = torch.tensor([3, 1, 4])
    layout = TREE.levels[level][0] if level else known_rows(4)
    readings = []
    for s, share in ((one, attention.share_entries_twin), (other, attention.share_entries)):
        batch = s.between.lay(s, rows.to(s.device), s.lengths[rows.to(s.device)], layout)
        each = len(layout)
        items = torch.tensor([[i * each, each, 0] for i in range(3)], dtype=torch.int32, device=s.device)
        readings.append(attention.make_reading(items, 3 * each, (4, 2, 16), 2, level > 0, 16))
        share(batch, readings[-1])
    assert torch.equal(readings[0].items, readings[1].items.cpu())
    assert torch.equal(readings[0].paths, readings[1].paths.cpu())
