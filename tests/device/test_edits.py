"""Penalties and logit_bias of resident sequences have the bits that the host's processing gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.control.trees import tree_nodes
from outrider.device import state as device_state
from outrider.device.ops import StepOps, TreeLayout
from outrider.types import NO_DRAFT, Draft, Sequence
from outrider.verify.process import process
from outrider.verify.rows import lay_out
from tests.device.sequences import sequence, slots_of, state_of

VOCAB = 50
ASKED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"logit_bias": {3: 1.5, 4: -100.0}},
    {"repetition_penalty": 0.9, "frequency_penalty": 1.1, "presence_penalty": 0.2, "logit_bias": {7: 0.1}},
]


def some_sequences() -> list[Sequence]:
    return [
        sequence(row, [1, 2, 3 + row], [5, 5, 6 + row, 7][: 1 + row], **asked)
        for row, asked in enumerate(ASKED)
    ]


def processed(logits: torch.Tensor, sequences: list[Sequence], drafts: list[Draft]) -> torch.Tensor:
    return process(logits, lay_out(sequences, drafts))


@pytest.mark.parametrize("shape", [(0, 0), (3, 3), (3, 15), (4, 15)])
def test_edited_logits_are_the_hosts(shape: tuple[int, int]) -> None:
    sequences, generator = some_sequences(), torch.Generator().manual_seed(1)
    tree = TreeLayout(tree_nodes(shape))
    ops, n = StepOps(state_of(sequences, VOCAB), None), shape[1]
    drafted = torch.randint(
        9, (len(sequences), max(n, 1)), generator=generator
    )  # few tokens: many are counted
    rows = torch.arange(len(sequences))
    batch = ops.build_batch(rows, ops.state.lengths[rows], tree.layout, drafted)
    logits = torch.randn(len(rows) * (n + 1), VOCAB, generator=generator) * 3
    drafts = [Draft(tuple(own), tree.shape.parents) if n else NO_DRAFT for own in drafted.tolist()]
    edited = ops.edit(batch, logits, drafted, 1)
    assert torch.equal(edited, processed(logits, sequences, drafts))
    assert not torch.equal(edited, logits)


def test_levels_of_a_tree_are_edited_as_its_rows() -> None:
    """A drafter samples level by level, and sees the path that leads there."""
    sequences, generator = some_sequences(), torch.Generator().manual_seed(2)
    tree = TreeLayout(tree_nodes((3, 15)))
    ops = StepOps(state_of(sequences, VOCAB), None)
    drafted, rows = torch.randint(9, (len(sequences), 15), generator=generator), torch.arange(len(sequences))
    lengths = ops.state.lengths[rows]
    whole = torch.randn(len(rows), 16, VOCAB, generator=generator)
    expected = ops.edit(ops.build_batch(rows, lengths, tree.layout, drafted), whole.flatten(0, 1), drafted, 1)
    for layout, _ in tree.levels:
        at = [node + 1 for node in layout.nodes]
        batch = ops.build_batch(rows, lengths, layout, drafted)
        edited = ops.edit(batch, whole[:, at].flatten(0, 1), drafted, 1)
        assert torch.equal(edited, expected.view(len(rows), 16, VOCAB)[:, at].flatten(0, 1))


def test_rows_are_few_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "MAX_EDITED", 2)
    first, second, third = (sequence(row, [1, 2], [3], presence_penalty=0.5) for row in range(3))
    state = state_of([first, second, third], VOCAB)
    assert state.can_edit(first) and state.can_edit(second) and not state.can_edit(third)
    assert state.can_edit(sequence(3, [1], [2], temperature=0.7))  # has nothing to edit
    second.finish_reason = "stop"
    state.upload(third, slots_of(third, 2))
    assert state.can_edit(third) and not state.can_edit(second)
    assert state.edits_any([1, 2]) and not state.edits_any([1])
    state.upload(sequence(0, [1, 2], [3]), slots_of(first, 2))  # another sequence has this row now
    assert not state.can_edit(first)
    assert state.edits.of_row.tolist()[:3] == [-1, -1, state.edits.held[2][1]]
    fourth = sequence(4, [1, 2], [3], logit_bias={1: 1.0})
    state.upload(fourth, slots_of(fourth, 2))
    assert state.can_edit(fourth) and state.can_edit(third)


def test_a_state_without_a_vocabulary_edits_nothing() -> None:
    one = sequence(0, [1], [2], logit_bias={1: 2.0})
    assert not state_of([one], 0).can_edit(one)
