"""Steps over resident state emit what plain decoding by the host's law emits, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.control.trees import tree_nodes
from outrider.device.capture import CapturedStep, StepShape
from outrider.device.ops import StepOps, TreeLayout, run_levels
from outrider.model.kernels.reference import ReferenceKernels
from outrider.types import NO_DRAFT, Batch, Sequence, TreeShape
from outrider.verify.batch import verify_rows
from tests.device.sequences import padding_slot, sequence, state_of
from tests.tiny import tiny_config

VOCAB = 60
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.7, "repetition_penalty": 1.5, "top_p": 0.9},
    {"temperature": 1.0},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 1.3, "logit_bias": {5: 3.0, 6: -100.0}, "presence_penalty": 1.0, "top_k": 20},
]


class Bigrams:
    """A model whose logits depend on the row's token alone, and its law."""

    def __init__(self, seed: int) -> None:
        kernels = ReferenceKernels(tiny_config(), torch.zeros(1))
        self.draw, self.filter_logits, self.config = kernels.draw, kernels.filter_logits, tiny_config()
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    def __call__(self, batch: Batch, *_: Any) -> Tensor:
        return self.table[batch.ids[batch.logit_rows]]


def some_sequences() -> list[Sequence]:
    return [sequence(row, [1, 2, 3 + row], [5 + row], **asked) for row, asked in enumerate(ASKED)]


def plain(model: Bigrams, count: int) -> list[list[int]]:
    """So many tokens of each sequence, one after the other, by the host."""
    sequences = some_sequences()
    for _ in range(count):
        logits = torch.stack([model.table[one.tokens[-1]] for one in sequences])
        verdicts = verify_rows(logits, sequences, [NO_DRAFT] * len(sequences))
        for one, verdict in zip(sequences, verdicts, strict=True):
            one.tokens.extend(verdict.tokens)
    return [one.output[1:] for one in sequences]


def drafter(model: Bigrams) -> Any:
    def propose(ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int) -> Any:
        return run_levels(model, ops, rows, lengths, tree.levels, len(tree), context), None

    return propose


def emitted(result: list[int], depth: int, nodes: int) -> list[int]:
    return result[2 : 3 + result[0]] if nodes else result


@pytest.mark.parametrize("shape", [(0, 0), (2, 2), (4, 4), (3, 15)])
@pytest.mark.parametrize(("passes", "several"), [(1, False), (3, False), (1, True)])
def test_steps_emit_what_plain_decoding_emits(shape: tuple[int, int], passes: int, several: bool) -> None:
    """With one drafter or several, with plain passes one after the other."""
    if shape != (0, 0) and passes > 1:
        pytest.skip("only plain passes follow each other")
    target, sequences, (depth, nodes) = Bigrams(1), some_sequences(), shape
    close = Bigrams(1)
    close.table = target.table + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) / 2
    ops = StepOps(state_of(sequences, VOCAB), target)
    wanted = StepShape(8, TreeShape(*shape), ("close",), 64, filtered=True, passes=passes, edited=True)
    propose = [drafter(close), drafter(Bigrams(3))][: 1 + several] if nodes else []
    step = CapturedStep(ops, target, wanted, tree_nodes(shape), propose, padding_slot())
    answers: list[list[int]] = [[] for _ in sequences]
    expected = plain(target, 40)
    for turn in range(6):
        fresh = np.arange(4 * (wanted.nodes + 1), dtype=np.int32).reshape(4, -1) + 1000 * turn
        # The second is the host's to commit: it moves when the host says so.
        step.fill([0, 1, 2, 3], [nodes] * 4, [True, False, True, True], fresh, [0, several, several, 0])
        result = step.launch().result
        for row, own in enumerate(answers):
            new = emitted(result[row].tolist(), depth, nodes)
            if row == 1:
                before = [*sequences[1].output[1:]]
                assert new == expected[1][len(before) : len(before) + len(new)]
                sequences[1].tokens.append(new[0])
                sequences[1].cached += 1
                ops.state.upload(sequences[1], np.arange(64, dtype=np.int32)[: sequences[1].cached])
                new = new[:1]
            own.extend(new)
    assert answers == [own[: len(given)] for own, given in zip(expected, answers, strict=True)]
    assert all(len(own) >= 6 for own in answers)
    for one, own in zip(some_sequences(), answers, strict=True):
        assert int(ops.state.lengths[one.row]) == len(one.tokens) - 1 + len(own)


def test_staged_rows_share_the_pass() -> None:
    """They change nothing for resident rows; their logits come as they were asked for, and their slots are kept."""
    target, results = Bigrams(1), []
    for staged in (0, 32):
        sequences = some_sequences()
        ops = StepOps(state_of(sequences, VOCAB), target)
        shape = StepShape(
            4, TreeShape(2, 2), ("close",), 64, True, staged=staged, wanted=staged, branching=staged // 2
        )
        step = CapturedStep(
            ops,
            target,
            replace(shape, edited=True),
            tree_nodes(TreeShape(2, 2)),
            [drafter(target)],
            padding_slot(),
        )
        step.fill([0, 1, 2, 3], [2] * 4, [True] * 4, np.arange(12, dtype=np.int32).reshape(4, 3))
        if step.staged:
            step.staged.fill(*staged_batch())
        results.append((step.launch(), ops.state))
    (alone, state), (beside, other) = results
    assert torch.equal(alone.result, beside.result) and torch.equal(state.lengths, other.lengths)
    assert beside.logits is not None and torch.equal(beside.logits[12:15], target.table[[9, 7, 8]])
    assert other.table[4, :2].tolist() == [700, 701] and other.table[5, 3:6].tolist() == [710, 711, 712]
    assert torch.equal(other.table[-1], state.table[-1])


def staged_batch() -> tuple[Batch, Tensor]:
    """The last token of one sequence with two draft nodes, and two tokens of another's prompt."""
    rows = {"ids": [6, 7, 5, 9, 8], "ancestors": [0, 1, 2, 0, 0], "logit_rows": [3, 1, 4]}
    narrow = {
        "positions": [3, 4, 4, 0, 1],
        "slots": [710, 711, 712, 700, 701],
        "table_rows": [5, 5, 5, 4, 4],
        "prefix": [4, 4, 4, 1, 2],
        "table": [],
    }
    columns = {name: torch.tensor(values) for name, values in rows.items()}
    columns |= {name: torch.tensor(values, dtype=torch.int32) for name, values in narrow.items()}
    return Batch(**columns), torch.tensor([3, 4, 5, 0, 1], dtype=torch.int32)
