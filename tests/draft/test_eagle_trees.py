"""Draft trees of an EAGLE head in resident steps, over the torch operations of a step."""

from __future__ import annotations

import pytest
import torch

from outrider.control.trees import TREES, tree_nodes
from outrider.device.ops import TreeLayout
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import load_eagle
from outrider.types import NO_DRAFT_PLAN, Draft, DraftPlan
from tests.tiny import (
    VOCAB,
    Always,
    eagle_tensors,
    finish,
    prompt_of,
    request,
    tiny_engine,
    tiny_model,
    tokens_of,
    write_eagle,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    tensors = eagle_tensors(model.config, VOCAB)
    return write_eagle(tmp_path_factory.mktemp("eagle"), model.config, tensors)


def make_engine(model, folder, planner, lag: int | None):
    def drafters(cache):
        return {"eagle": EagleDrafter(load_eagle(folder, model, 256), cache.store, cache.table)}

    return tiny_engine(model, planner, drafters=drafters, lag=lag, max_sequences=4)


ASKED = [
    request(f"r{i}", prompt_of(5 + 6 * i, i), max_tokens=40, temperature=0.7 * (i > 0), seed=i)
    for i in range(3)
]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("tree", TREES)
def test_trees_change_no_answer(model, folder, lag, tree) -> None:
    answers = []
    for planner, behind in (
        (Always(DraftPlan("eagle", tree[1], tree[0])), lag),
        (Always(NO_DRAFT_PLAN), None),
    ):
        engine = make_engine(model, folder, planner, behind)
        sequences = [engine.add(one)[0] for one in ASKED]
        found = finish(engine)
        answers.append({key: tokens_of(events) for key, events in found.items()})
        if lag == behind:
            assert {size for s in sequences for size, _ in s.draft_counts} == {tree[1]}
            assert tree in {shape.tree for shape in engine.runner.graphs.steps}
    assert answers[0] == answers[1]


class Recorded:
    """Logits that the drafter draws from, pass by pass; tokens are given instead of drawn where there are some."""

    def __init__(self, ops, monkeypatch, given: torch.Tensor | None = None) -> None:
        self.logits: list[torch.Tensor] = []
        draw = ops.draw

        def recorded(batch, logits, columns, out, **how) -> None:
            self.logits.append(logits.clone())
            draw(batch, logits, columns, out, **how)
            column = columns[0][0]
            if given is not None and column < given.shape[1]:
                out[:, column] = given[:, column]

        monkeypatch.setattr(ops, "draw", recorded)


@pytest.mark.parametrize("shape", TREES)
def test_every_node_is_drafted_as_the_end_of_a_chain_of_its_own(model, folder, monkeypatch, shape) -> None:
    """A node's children come of the head's hidden states along its own path, whatever lies beside it."""
    engine = make_engine(model, folder, Always(DraftPlan("eagle", 2, 2)), 0)
    for one in ASKED:
        engine.add(one)
    for _ in range(12):
        engine.step()
    drafter, ops = engine.drafters["eagle"], engine.runner.ops
    state, nodes = ops.state, tree_nodes(shape)
    rows = torch.tensor([s.row for s in engine.scheduler.running])
    lengths = state.lengths[rows]
    free = engine.table.pool.total - 1 - torch.arange(len(rows) * len(nodes)).view(len(rows), -1)
    at = lengths[:, None] + 1 + torch.arange(len(nodes))
    state.table[rows[:, None], at] = free.int()
    tree = TreeLayout(nodes)
    with monkeypatch.context() as patch:
        seen = Recorded(ops, patch)
        drafted, _ = drafter.propose_resident(ops, rows, lengths, tree, 200)
    assert len(seen.logits) == shape[0]
    for node in range(len(nodes)):
        path = nodes.path(node)
        if node not in nodes.parents:
            continue
        chain = TreeLayout(Draft.chain([0] * (len(path) + 1)))
        with monkeypatch.context() as patch:
            alone = Recorded(ops, patch, drafted[:, path])
            alone_drafted, _ = drafter.propose_resident(ops, rows, lengths, chain, 200)
        level, _ = tree.levels[len(path)]
        of_node = seen.logits[len(path)].view(len(rows), len(level), -1)[:, level.nodes.index(node)]
        assert torch.allclose(of_node, alone.logits[-1], atol=1e-5), path
        first = next(child for child, parent in enumerate(nodes.parents) if parent == node)
        assert torch.equal(drafted[:, first], alone_drafted[:, -1])
    siblings = [child for child, parent in enumerate(nodes.parents) if parent == -1]
    assert all(len(set(row)) == len(siblings) for row in drafted[:, siblings].tolist())
