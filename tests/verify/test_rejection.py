"""`rejection` against enumerated probabilities: every shape and kind of draft, and verifiers that are wrong on purpose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from outrider.types import NO_DRAFT, Bet, Draft, Request, SamplingParams, Sequence, Speculation
from outrider.draft.tree import grow
from outrider.verify import rejection as module
from outrider.verify.judge import judge
from outrider.verify.noise import DRAFT
from tests.verify.test_law import chi_square_holds

V, LENGTH, DRAWS = 3, 3, 100_000
generator = torch.Generator().manual_seed(7)
TARGET = torch.randn(V + 1, V + 1, V, generator=generator) * 1.3  # logits by the last two tokens; V = none yet
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


def fresh(count: int, seed: int, **speculation) -> list[Sequence]:
    params = SamplingParams(temperature=1.0, speculation=Speculation(mode="rejection", **speculation))
    return [Sequence(Request(str(i), (0,), params, i), 0, seed * 10**9 + i, [0]) for i in range(count)]


def sampled_tree(sequences: list[Sequence], shape: tuple[int, ...]) -> list[Draft]:
    """As a model drafter draws: through grow, with this drafter's table for a model."""

    def rows(places, growths=None):
        out = []
        for i, node in places:
            text = sequences[i].tokens[1:]
            if node >= 0:
                g = growths[i]
                path = []
                while node >= 0:
                    path.append(g.tokens[node])
                    node = g.parents[node]
                text = text + path[::-1]
            out.append(logits_after(DRAFTER, text))
        return torch.stack(out)

    nodes = sum(int(np.prod(shape[: i + 1])) for i in range(len(shape)))
    bet = Bet("x", nodes, len(shape), shape, "rejection")
    roots = rows([(i, -1) for i in range(len(sequences))])
    growths = grow(sequences, [bet] * len(sequences), roots, lambda g, places: rows(places, g))
    return [growth.harvest()[0] for growth in growths]


def fixed(draft: Draft):
    return lambda sequences: [draft] * len(sequences)


DRAFTERS = {
    "chain": lambda s: sampled_tree(s, (1, 1)),
    "long chain": lambda s: sampled_tree(s, (1, 1, 1, 1)),
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
            rows = []
            for s, d in zip(live, drafts, strict=True):
                paths = [[], *([d.tokens[i] for i in d.path(n)] for n in range(len(d)))]
                rows += [logits_after(TARGET, s.tokens[1:] + p) for p in paths]
            for s, verdict in zip(live, judge(torch.stack(rows), live, drafts), strict=True):
                s.tokens += verdict.tokens
                s.steps += 1
        texts = np.array([s.tokens[1 : 1 + LENGTH] for s in sequences])
        np.add.at(counts, np.ravel_multi_index(texts.T, (V,) * LENGTH), 1)
    return counts


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_joint_distribution_is_the_targets(kind):
    assert chi_square_holds(joint_counts(DRAFTERS[kind], seed=1), enumerated() * DRAWS)


@pytest.mark.parametrize("kind", ["chain", "long chain"])
def test_token_by_token_on_a_chain(kind):
    assert chi_square_holds(joint_counts(DRAFTERS[kind], seed=2, block=False), enumerated() * DRAWS)


def test_blocks_accept_no_less_than_tokens():
    def accepted(block: bool) -> float:
        sequences = fresh(20_000, 5, block=block)
        drafts = sampled_tree(sequences, (1, 1, 1))
        rows = []
        for d in drafts:
            rows += [logits_after(TARGET, list(d.tokens[:i])) for i in range(len(d) + 1)]
        return float(np.mean([len(v.accepted) for v in judge(torch.stack(rows), sequences, drafts)]))

    assert accepted(block=True) > accepted(block=False) > 0.5


def test_shared_randomness_is_caught(monkeypatch):
    """A verifier whose residuals reuse the draft's own noise is biased, and the test above says so."""
    monkeypatch.setattr(module, "RESIDUAL", DRAFT)
    assert not chi_square_holds(joint_counts(DRAFTERS["chain"], seed=3, block=False), enumerated() * DRAWS)


def test_a_missing_residual_is_caught(monkeypatch):
    """A verifier that draws from p itself after a rejection counts the draft's mass twice."""

    def careless(p, coins, rows, group):
        here, _ = honest(p, coins, rows, group)
        return here, p[here]

    honest = module._one_by_one
    monkeypatch.setattr(module, "_one_by_one", careless)
    assert not chi_square_holds(joint_counts(DRAFTERS["chain"], seed=4, block=False), enumerated() * DRAWS)
