"""Drafts of resident steps, over a state of the test's own: what a drafter would propose from scratch, wherever eager
and resident steps take turns.
"""

from __future__ import annotations

import random

import pytest
import torch

from outrider.control.trees import tree_nodes
from outrider.device.ops import StepOps, TreeLayout
from outrider.device.state import SequenceState
from outrider.draft.lookup import LookupDrafter
from outrider.types import MAX_NODES, Draft, DraftPlan
from tests.draft.rows import Rows
from tests.draft.test_lm import lm, logits_after, naive_chain
from tests.tiny import VOCAB, prompt_of, tiny_model

CONTEXT = 256


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=5, layers=1, windows=(0,))


class Resident:
    """The state of some rows, and drafts from it."""

    def __init__(self, rows: Rows, model) -> None:
        self.rows = rows
        count = len(rows.table.lengths)
        self.ops = StepOps(SequenceState(count, CONTEXT + MAX_NODES, torch.device("cpu")), model)
        self.ops.state.table[-1] = rows.table.pool.total  # where padding writes

    def propose(self, drafter, sequences, shape: tuple[int, int]) -> list[Draft]:
        behind = [s for s in sequences if drafter.tokens_behind(s)]
        state, nodes = self.ops.state, tree_nodes(shape)
        for one in sequences:
            self.rows.table.extend(one.row, len(nodes))
            entries = self.rows.table.entries[one.row]
            state.upload(one, entries)
            end = len(one.tokens) + len(nodes)
            state.table[one.row, :end] = torch.from_numpy(entries[:end].copy())
        drafter.catch_up(self.ops, behind)
        assert not any(drafter.tokens_behind(s) for s in sequences)
        at = torch.tensor([s.row for s in sequences])
        drafted, counts = drafter.propose_resident(
            self.ops, at, state.lengths[at], TreeLayout(nodes), CONTEXT
        )
        proposed = [shape[1]] * len(sequences) if counts is None else counts.tolist()
        return [
            Draft(tuple(row[:n]), nodes.parents[:n])
            for row, n in zip(drafted.tolist(), proposed, strict=True)
        ]


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_drafts_eagerly_and_resident_by_turns(small, seed):
    dice = random.Random(seed)
    drafter, rows = lm(small)
    resident = Resident(rows, small)
    for numbers in (*drafter.store.keys, *drafter.store.values):
        numbers.fill_(1e3)  # what was never written must not matter
    some = [rows.add(prompt_of(5 + 20 * i, i)) for i in range(3)]
    for turn in range(12):
        depth, moving = dice.choice([1, 2, 4]), dice.sample(some, dice.randint(1, 3))
        if dice.random() < 0.5:
            drafts = resident.propose(drafter, moving, (depth, depth))
        else:
            drafts = rows.propose(drafter, moving, [DraftPlan("lm", depth, depth)] * len(moving))
        for s, draft in zip(moving, drafts, strict=True):
            assert list(draft.tokens) == naive_chain(small, s.tokens, depth)
            rows.settle(drafter, s, draft, list(range(dice.randint(0, depth))), turn)


@pytest.mark.parametrize("shape", [(2, 6), (3, 15)])
def test_resident_trees_are_the_likeliest_of_each_node(small, shape):
    drafter, rows = lm(small)
    resident = Resident(rows, small)
    s = rows.add(prompt_of(20, 2))
    for turn in range(3):
        (draft,) = resident.propose(drafter, [s], shape)
        for node in range(-1, len(draft)):
            path = [draft.tokens[n] for n in draft.path(node)]
            children = [draft.tokens[n] for n in range(len(draft)) if draft.parents[n] == node]
            best = (
                logits_after(small, s.tokens + path).topk(len(children)).indices.tolist() if children else []
            )
            assert children == best
        deepest = max(range(len(draft)), key=lambda n: draft.depths[n])
        rows.settle(drafter, s, draft, draft.path(deepest), turn)
        assert drafter.progress.of(s) == len(s.tokens) - 2  # the leaf and what follows it were never fed


@pytest.mark.parametrize("smaller", [{"vocab": 48}, {"context": 24}])
def test_a_model_with_a_smaller_vocabulary_or_context_stays_inside_them(smaller):
    """Where the target goes beyond them, drafts are worth nothing and must not break anything."""
    shorter = tiny_model(
        "torch", seed=5, **smaller
    )  # whose tables of embeddings and angles end where they end
    drafter, rows = lm(shorter)
    resident = Resident(rows, tiny_model())
    inside = rows.add([t % 48 for t in prompt_of(10, 1)])
    (draft,) = resident.propose(drafter, [inside], (4, 4))
    assert list(draft.tokens) == naive_chain(shorter, inside.tokens, 4)
    beyond = [rows.add(prompt_of(20, 1)), rows.add(prompt_of(120, 1))]
    assert max(beyond[0].tokens) >= 48
    for draft in resident.propose(drafter, beyond, (4, 4)):
        assert len(draft) == 4 and max(draft.tokens) < VOCAB


def test_warming_up_leaves_no_trace(small):
    drafter, rows = lm(small)
    resident = Resident(rows, small)
    s = rows.add(prompt_of(30, 1))
    rows.propose(drafter, [s], [DraftPlan("lm", 3, 3)])
    rows.settle(drafter, s, Draft(), [], 1)
    held = [numbers[:-1].clone() for numbers in (*drafter.store.keys, *drafter.store.values)]
    assert drafter.warm_up(resident.ops) > 0
    after = [numbers[:-1] for numbers in (*drafter.store.keys, *drafter.store.values)]
    used = rows.table.entries[s.row, : len(s.tokens) - 1]
    assert all(torch.equal(a[used], b[used]) for a, b in zip(held, after, strict=True))
    assert drafter.progress.of(s) == 30


def test_what_followed_in_the_text():
    rows, drafter = Rows(), LookupDrafter()
    resident = Resident(rows, tiny_model())
    some = [rows.add([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]), rows.add([1, 2, 3, 4, 5])]
    drafts = resident.propose(drafter, some, (4, 4))
    assert drafts == [Draft.chain([4, 5, 6, 9]), Draft()]
