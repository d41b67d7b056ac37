"""Kernels for penalties and logit_bias against the torch operations of device/ops.py, to the last bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.control.trees import tree_nodes
from outrider.device.ops import Layout, StepOps, TreeLayout, known_rows
from outrider.device.ops_gpu import GpuStepOps
from outrider.types import Draft
from outrider.verify.process import process
from outrider.verify.rows import lay_out
from tests.device.sequences import state_of
from tests.device.test_edits import some_sequences
from tests.model.gpu.test_step_ops import Law, law_on
from tests.sweep import sweep

TREE = TreeLayout(tree_nodes((3, 15)))
LAYOUTS = {"tree": TREE.layout, "level": TREE.levels[1][0], "known": known_rows(4)}
LAYOUTS["chain"] = TreeLayout(tree_nodes((4, 4))).layout


def twins(device: str, vocab: int) -> tuple[StepOps, StepOps]:
    return StepOps(state_of(some_sequences(), vocab), None), GpuStepOps(
        state_of(some_sequences(), vocab, device), None
    )


def edited(ops: StepOps, layout: Layout, logits: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    there = ops.state.device
    rows = torch.tensor([4, 0, 1, 2, 3, ops.state.rows], device=there)
    batch = ops.build_batch(rows, ops.state.lengths[rows], layout, drafted.to(there))
    return ops.edit(batch, logits.to(there)[:, :-3], drafted.to(there), 1).cpu()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("vocab", sweep([50, 4999], quick=[50]))
def test_edit(device: str, name: str, vocab: int) -> None:
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(3)
    drafted = torch.randint(9, (6, 15), generator=generator)
    count = 6 * (1 if layout.last else len(layout))
    logits = torch.randn(count, vocab + 3, generator=generator) * 3
    one, other = (edited(ops, layout, logits, drafted) for ops in twins(device, vocab))
    assert torch.equal(one, other) and not torch.equal(one, logits[:, :-3])


@pytest.mark.parametrize("filtered", [False, True])
def test_draws_heed_edits(device: str, filtered: bool) -> None:
    """Also of rows beside which nothing is edited, and which are not copied."""
    generator, tree = torch.Generator().manual_seed(6), TreeLayout(tree_nodes((2, 6)))
    drafted = torch.randint(9, (6, 6), generator=generator)
    logits = torch.randn(6 * 7, 50, generator=generator)
    drawn = []
    for ops in twins(device, 50):
        there = ops.state.device
        ops.model = law_on(device) if isinstance(ops, GpuStepOps) else Law()
        for edited in (True, False):
            ops.filtered, ops.edited = filtered, edited
            rows = torch.tensor([4, 0, 1, 2, 3, ops.state.rows], device=there)
            batch = ops.build_batch(rows, ops.state.lengths[rows], tree.layout, drafted.to(there))
            out = torch.zeros((6, 7), dtype=torch.int64, device=there)
            ops.draw(batch, logits.to(there), tree.columns, out, drafted=drafted.to(there))
            drawn.append(out.cpu())
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0][1], drawn[1][1])  # has nothing to edit


@pytest.mark.parametrize("shape", [(4, 4), (3, 15)])
def test_edited_logits_are_the_hosts(device: str, shape: tuple[int, int]) -> None:
    """Where the logits are: the host may verify one step of a sequence, and the device the next."""
    sequences, generator, nodes = some_sequences(), torch.Generator().manual_seed(5), tree_nodes(shape)
    drafted = torch.randint(9, (len(sequences), shape[1]), generator=generator)
    logits = (torch.randn(len(sequences) * (shape[1] + 1), 50, generator=generator) * 3).to(device)
    ops = GpuStepOps(state_of(sequences, 50, device), None)
    rows, there = torch.arange(len(sequences), device=device), drafted.to(device)
    batch = ops.build_batch(rows, ops.state.lengths[rows], TreeLayout(nodes).layout, there)
    drafts = [Draft(tuple(own), nodes.parents) for own in drafted.tolist()]
    assert torch.equal(ops.edit(batch, logits, there, 1), process(logits, lay_out(sequences, drafts)))


@pytest.mark.parametrize("shape", [(0, 0), (4, 4), (3, 15)])
def test_emitted_tokens_are_counted(device: str, shape: tuple[int, int]) -> None:
    """But not of whom the host verifies, of padding, or of who has no penalties."""
    (depth, n), tree = shape, tree_nodes(shape)
    rows, commits = [4, 0, 1, 2, 6, 6], [1, 1, 2, 3, 0, 1]
    slots = torch.arange(len(rows) * (n + 1), dtype=torch.int32).view(len(rows), -1)
    columns = torch.tensor([rows, [n] * 6, commits], dtype=torch.int32).T
    generator = torch.Generator().manual_seed(4)
    drafted = torch.randint(2, (6, n), generator=generator)
    chosen = torch.randint(2, (6, max(n, 2) + 1), generator=generator)
    counts = []
    for ops in twins(device, 50):
        ops.edited, there = True, ops.state.device
        step = ops.begin_step(torch.cat([columns, slots], dim=1).to(there))
        if n:
            given = drafted.to(there), None, chosen.to(there)
            ops.commit(step, tree.parents, depth, *given)
        else:
            ops.append_tokens(step, chosen.to(there))
        counts.append(ops.state.edits.counts.cpu())
    assert torch.equal(*counts)
    held = {row: at for row, (_, at) in ops.state.edits.held.items()}
    before = twins(device, 50)[0].state.edits.counts
    grown = (counts[0] - before).sum(1)
    assert grown[held[1]] == 0 and grown[held[4]] > 0 and grown[held[2]] > 0
