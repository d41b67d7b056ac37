"""`rejection` against enumerated probabilities: every kind of draft, and verifiers that are wrong on
purpose.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from outrider.draft.tree import grow
from outrider.types import NO_DRAFT, Draft, DraftPlan, Request, SamplingParams, Sequence, Speculation
from outrider.verify import rejection as module
from outrider.verify.batch import verify_rows
from outrider.verify.noise import DRAFT
from tests.sweep import sweep
from tests.verify.test_law import chi_square_holds

V, LENGTH, DRAWS = 3, 3, 10_000
MANY = 4 * DRAWS  # a draft's noise used again is a small bias
generator = torch.Generator().manual_seed(7)
# logits by the last two tokens; V = none yet
TARGET = torch.randn(V + 1, V + 1, V, generator=generator) * 1.3
DRAFTER = TARGET + torch.randn(V + 1, V + 1, V, generator=generator) * 1.0


def logits_after(table: torch.Tensor, text: list[int]) -> torch.Tensor:
    before = [V, V, *text][-2:]
    return table[before[0], before[1]]


def enumerated() -> np.ndarray:
    """The joint probability of every text of LENGTH tokens."""
    joint = np.zeros((V,) * LENGTH)
    for text in itertools.product(range(V), repeat=LENGTH):
        joint[text] = np.prod(
            [float(logits_after(TARGET, list(text[:i])).softmax(-1)[text[i]]) for i in range(LENGTH)]
        )
    return joint.flatten()


@pytest.fixture(autouse=True, scope="module")
def no_collector() -> Iterator[None]:
    """Millions of small objects and no cycles: searching for cycles would take a quarter of the time."""
    gc.disable()
    yield
    gc.enable()


def fresh(count: int, seed: int, **speculation) -> list[Sequence]:
    params = SamplingParams(temperature=1.0, speculation=Speculation(mode="rejection", **speculation))
    request = Request("r", (0,), params, 0)
    return [Sequence(request, 0, seed * 10**9 + i, [0]) for i in range(count)]


def rows_after(table: torch.Tensor, endings: list[int]) -> torch.Tensor:
    return table.view(-1, V)[torch.from_numpy(np.array(endings))]


@cache
def all_endings(text: tuple[int, ...], draft_tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[int]:
    """`ending` at the root and at every node."""
    return [ending(text, draft_tokens, parents, node) for node in range(-1, len(parents))]


def ending(text, draft_tokens, parents, node: int) -> int:
    """The last two tokens at a node of a draft, as the row of a table; `text` starts with the prompt's one
    token, which does not count.
    """
    last: list[int] = []
    while node >= 0 and len(last) < 2:
        last.append(draft_tokens[node])
        node = parents[node]
    if len(last) < 2:
        last += text[:0:-1][: 2 - len(last)]
    last += [V] * (2 - len(last))
    return last[1] * (V + 1) + last[0]


def sampled_tree(sequences: list[Sequence], shape: tuple[int, ...]) -> list[Draft]:
    """As a model drafter draws: through grow, with this drafter's table for a model."""

    def expand(growths, places):
        trees = [
            (tuple(s.tokens), tuple(g.tokens), tuple(g.parents))
            for s, g in zip(sequences, growths, strict=True)
        ]
        return rows_after(DRAFTER, [all_endings(*trees[i])[1 + n] for i, n in places])

    nodes = sum(int(np.prod(shape[: i + 1])) for i in range(len(shape)))
    draft_plan = DraftPlan("x", nodes, len(shape), shape)
    roots = rows_after(DRAFTER, [all_endings(tuple(s.tokens), (), ())[0] for s in sequences])
    return [growth.harvest()[0] for growth in grow(sequences, [draft_plan] * len(sequences), roots, expand)]


def fixed(draft: Draft):
    return lambda sequences: [draft] * len(sequences)


DRAFTERS = {
    "chain": lambda s: sampled_tree(s, (1, 1)),
    "long chain": lambda s: sampled_tree(s, (1, 1, 1)),
    "tree": lambda s: sampled_tree(s, (2, 2)),
    "whole vocabulary": lambda s: sampled_tree(s, (3, 2)),
    "plain guess": fixed(Draft.chain([1, 2])),
    "plain tree": fixed(Draft((1, 2, 1, 0), (-1, -1, 0, 1))),
    "duplicates": fixed(Draft((1, 1, 2, 2), (-1, -1, 0, 1))),
    "nothing": fixed(NO_DRAFT),
    "mixed": lambda s: [
        d if i % 3 else NO_DRAFT for i, d in enumerate(sampled_tree(s, (1, 1)))
    ],
}  # fmt: skip


def joint_counts(propose, seed: int, draws: int = DRAWS, **speculation) -> np.ndarray:
    """Texts of LENGTH tokens, decoded step by step with fresh drafts, counted."""
    counts = np.zeros(V**LENGTH)
    for part in range(0, draws, 20_000):
        sequences = fresh(min(20_000, draws - part), seed + part, **speculation)
        live = sequences
        while live := [s for s in live if len(s.tokens) <= LENGTH]:
            drafts = propose(live)
            endings = [
                row
                for s, d in zip(live, drafts, strict=True)
                for row in all_endings(tuple(s.tokens), d.tokens, d.parents)
            ]
            for s, verdict in zip(live, verify_rows(rows_after(TARGET, endings), live, drafts), strict=True):
                s.tokens += verdict.tokens
                s.steps += 1
        texts = np.array([s.tokens[1 : 1 + LENGTH] for s in sequences])
        np.add.at(counts, np.ravel_multi_index(texts.T, (V,) * LENGTH), 1)
    return counts


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_joint_distribution_is_the_targets(kind):
    assert chi_square_holds(joint_counts(DRAFTERS[kind], seed=1), enumerated() * DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_joint_distribution_is_the_targets_in_many_draws(kind):
    draws = 20 * DRAWS
    assert chi_square_holds(joint_counts(DRAFTERS[kind], 6, draws), enumerated() * draws)


@pytest.mark.parametrize("kind", sweep(["chain", "long chain"], quick=["long chain"]))
def test_token_by_token_on_a_chain(kind):
    assert chi_square_holds(joint_counts(DRAFTERS[kind], 2, MANY, block=False), enumerated() * MANY)


def test_blocks_accept_no_less_than_tokens():
    def accepted(block: bool) -> float:
        sequences = fresh(DRAWS, 5, block=block)
        drafts = sampled_tree(sequences, (1, 1, 1))
        endings = [row for d in drafts for row in all_endings((0,), d.tokens, d.parents)]
        verdicts = verify_rows(rows_after(TARGET, endings), sequences, drafts)
        return float(np.mean([len(v.accepted) for v in verdicts]))

    assert accepted(block=True) > accepted(block=False) > 0.5


def test_shared_randomness_is_caught(monkeypatch):
    """A verifier whose residuals reuse the draft's own noise is biased, and the test above says so."""
    monkeypatch.setattr(module, "RESIDUAL", DRAFT)
    assert not chi_square_holds(joint_counts(DRAFTERS["chain"], 3, MANY, block=False), enumerated() * MANY)


def test_a_missing_residual_is_caught(monkeypatch):
    """A verifier that draws from p itself after a rejection counts the draft's mass twice."""

    def careless(p, drawn, coins, rows, group):
        here, _ = honest(p, drawn, coins, rows, group)
        return here, p[here]

    honest = module._one_by_one
    monkeypatch.setattr(module, "_one_by_one", careless)
    assert not chi_square_holds(joint_counts(DRAFTERS["chain"], 4, DRAWS, block=False), enumerated() * DRAWS)
