"""Growing guesses from logits: shapes, bounds, what is kept, and the draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.tree import BEAM, BRANCH, CANDIDATES, Growth, grow
from outrider.types import MAX_NODES, DraftPlan
from outrider.verify.noise import draw, gumbel
from tests.tiny import sequence

WIDE = 200


REJECTION = {"mode": "rejection"}


def table(vocab: int, seed: int = 0) -> torch.Tensor:
    """Logits by the last token."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def grown(
    draft_plan: DraftPlan, logits: torch.Tensor, fed: list | None = None, **options
) -> tuple[Growth, list[int]]:
    options = {"temperature": 0, **options}
    s = sequence([3, 1, 4], **options)

    def expand(growths, places):
        if fed is not None:
            fed.extend(places)
        return logits[[growths[i].tokens[n] for i, n in places]]

    (growth,) = grow([s], [draft_plan], logits[[4]], expand)
    return growth, s.tokens


def check(growth: Growth, draft_plan: DraftPlan) -> None:
    draft, kept = growth.harvest()
    assert len(draft) <= min(draft_plan.nodes, MAX_NODES)
    assert max(draft.depths, default=0) <= draft_plan.depth
    survival = [growth.survival[n] for n in kept]
    for node, parent in enumerate(draft.parents):
        assert draft.tokens[node] == growth.tokens[kept[node]]
        if parent >= 0:
            assert kept[parent] == growth.parents[kept[node]]
            assert survival[node] <= survival[parent]
    dropped = [growth.survival[n] for n in range(len(growth.tokens)) if n not in kept]
    if draft_plan.tree is None and survival and dropped:
        assert max(dropped) <= min(survival)


def test_a_chain_is_greedy_at_temperature_zero():
    logits = table(50)
    growth, _ = grown(DraftPlan("x", 5, 5), logits)
    draft, _ = growth.harvest()
    assert draft.parents == (-1, 0, 1, 2, 3)
    last = 4
    for token in draft.tokens:
        assert token == int(logits[last].argmax())
        last = token


def test_a_fixed_shape():
    growth, _ = grown(DraftPlan("x", 3 + 6 + 6, 3, (3, 2, 1)), table(50))
    draft, _ = growth.harvest()
    assert [draft.depths.count(d) for d in (1, 2, 3)] == [3, 6, 6]
    children = [draft.parents.count(n) for n in range(-1, len(draft))]
    assert children == [3] + [2] * 3 + [1] * 6 + [0] * 6
    roots = [draft.tokens[n] for n in range(len(draft)) if draft.parents[n] < 0]
    assert roots == table(50)[4].topk(3).indices.tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, MAX_NODES), st.integers(1, MAX_NODES), st.integers(0, 5), st.sampled_from([0, 0.5, 1.3])
)
def test_best_first_keeps_what_is_likeliest_and_no_orphans(nodes, depth, seed, temperature):
    draft_plan = DraftPlan("x", nodes, depth)
    fed: list = []
    growth, _ = grown(draft_plan, table(30, seed), fed, temperature=temperature)
    check(growth, draft_plan)
    assert len(fed) <= MAX_NODES  # one bit each in a drafter's mask
    if nodes > depth:
        by_level = [sum(growth.depths[n] == d for _, n in fed) for d in range(1, depth + 1)]
        assert max(by_level) <= BEAM


def test_a_grown_tree_branches():
    growth, _ = grown(DraftPlan("x", 12, 4), table(50))
    draft, _ = growth.harvest()
    assert len(draft) == 12 and draft.parents.count(-1) > 1
    assert max(growth.parents.count(n) for n in range(-1, len(growth.tokens))) == BRANCH


@pytest.mark.parametrize("options", [{"frequency_penalty": 0.7}, {"min_tokens": 9, "stop_ids": [5]}])
def test_deep_trees_of_edited_logits(options):
    """Paths are followed also where a tree in the making has more nodes than a draft may have."""
    draft_plan = DraftPlan("x", 40, 8)
    growth, _ = grown(draft_plan, table(50), **options)
    assert len(growth.tokens) > MAX_NODES
    check(growth, draft_plan)


def test_penalties_count_the_path():
    logits = torch.zeros(20, 20)
    logits[:, 7], logits[:, 8] = 5.0, 4.0
    growth, _ = grown(DraftPlan("x", 4, 4), logits, frequency_penalty=2.0)
    assert growth.harvest()[0].tokens == (7, 8, 7, 8)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_coupled_draws_are_the_laws(temperature):
    logits = table(WIDE, 3)
    s = sequence([3, 1, 4], temperature=temperature)
    growth, _ = grown(DraftPlan("x", 5, 5), logits, temperature=temperature)
    tokens, last = growth.harvest()[0].tokens, 4
    inside = 0
    for i, token in enumerate(tokens):
        noise = gumbel(torch.tensor([s.seed]), torch.tensor([len(s.tokens) + i]), WIDE)[0]
        best = int((logits[last] / temperature + noise).argmax())
        if best in logits[last].topk(CANDIDATES).indices:
            inside += 1
            assert token == best
        last = token
    assert inside >= 3


def test_what_the_drafter_rules_out_is_not_guessed():
    logits = torch.full((20, 20), float("-inf"))
    logits[:, 3] = 1.0
    for mode in ("coupled", "rejection"):
        draft_plan = DraftPlan("x", 2 + 4, 2, (2, 2)) if mode == "rejection" else DraftPlan("x", 6, 2)
        growth, _ = grown(draft_plan, logits, temperature=1.0, speculation={"mode": mode})
        assert growth.harvest()[0].tokens == (3, 3)
    nothing = torch.full((20, 20), float("-inf"))
    assert len(grown(DraftPlan("x", 6, 2), nothing, temperature=1.0)[0].harvest()[0]) == 0


def test_more_children_than_tokens():
    growth, _ = grown(DraftPlan("x", 12, 2, (3, 3)), torch.randn(5, 2))
    assert len(growth.harvest()[0]) == 2 + 4


def test_rejection_draws_without_replacement_from_what_it_says():
    logits = table(30, 8)
    growth, _ = grown(DraftPlan("x", 3 + 6, 2, (3, 2)), logits, temperature=0.9, speculation=REJECTION)
    draft, _ = growth.harvest()
    assert draft.log_q is not None and draft.log_q.shape == (9, 30)
    by_parent: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        by_parent.setdefault(parent, []).append(node)
    for parent, siblings in by_parent.items():
        last = 4 if parent < 0 else draft.tokens[parent]
        expected = (logits[last] / 0.9).log_softmax(-1)
        assert len({draft.tokens[n] for n in siblings}) == len(siblings)
        for node in siblings:
            assert torch.allclose(draft.log_q[node], expected, atol=1e-5)


def test_rejection_draws_from_the_drafters_distribution():
    logits = torch.tensor([[0.3, 1.2, -0.5, 0.0]]).repeat(4, 1)
    draws = 5_000
    sequences = [sequence([1], temperature=1.0, seed=i, speculation=REJECTION) for i in range(draws)]
    draft_plans = [DraftPlan("x", 1, 1)] * draws
    growths = grow(sequences, draft_plans, logits[[0] * draws], lambda g, p: logits)
    counts = np.bincount([g.tokens[0] for g in growths], minlength=4)
    expected = logits[0].softmax(-1).numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1  # chi-square, 3 degrees, 1e-4


def test_rejection_at_temperature_zero_takes_the_likeliest():
    logits = table(30, 1)
    draft, _ = grown(DraftPlan("x", 3, 3), logits, speculation=REJECTION)[0].harvest()
    assert draft.tokens == grown(DraftPlan("x", 3, 3), logits)[0].harvest()[0].tokens and draft.log_q is None


def test_sequences_of_one_call_do_not_mix():
    logits = table(40, 5)
    draft_plans = [
        DraftPlan("x", 3, 3),
        DraftPlan("x", 8, 3),
        DraftPlan("x", 6, 2, (2, 2)),
        DraftPlan("x", 0, 0),
        DraftPlan("x", 2, 2),
    ]
    temperatures = [0, 0.8, 1.0, 0.5, 1.4]
    how = [REJECTION if t == 2 else {} for t in range(5)]
    sequences = [
        sequence([t + 1, t + 9], temperature=temperatures[t], seed=t, speculation=how[t]) for t in range(5)
    ]

    def run(which):
        def expand(growths, places):
            return logits[[growths[i].tokens[n] for i, n in places]]

        some = [sequences[i] for i in which]
        roots = logits[[s.tokens[-1] for s in some]]
        return [g.harvest()[0] for g in grow(some, [draft_plans[i] for i in which], roots, expand)]

    together = run(range(5))
    for i in range(5):
        (alone,) = run([i])
        assert alone == together[i]
        assert (alone.log_q is None) == (together[i].log_q is None)
        if alone.log_q is not None:
            assert torch.allclose(alone.log_q, together[i].log_q)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chain_is_drawn_by_the_law_over_all_words(temperature: float) -> None:
    """With a kernel for it, also where the word that wins is none of the likeliest; a tree is drawn as ever."""
    logits = torch.zeros(1, 4096)
    some = [sequence([1, 2, 3], temperature=temperature, seed=seed) for seed in range(40)]
    chosen: list[int] = []

    def counted(*given: torch.Tensor) -> torch.Tensor:
        tokens = draw(*given)
        chosen.extend(tokens.tolist())
        return tokens

    grown = grow(some, [DraftPlan("x", 1, 1)] * 40, logits.repeat(40, 1), lambda *_: logits, counted)
    wanted = draw(
        logits.repeat(40, 1) / (temperature or 1.0),
        torch.full((40,), temperature > 0),
        torch.tensor([s.seed for s in some]),
        torch.tensor([3] * 40),
    )
    assert [growth.tokens for growth in grown] == [[token] for token in wanted.tolist()] and len(chosen) == 40
    assert temperature == 0 or max(chosen) > 64  # equal logits: any word may win
    chosen.clear()
    grow(
        some[:1],
        [DraftPlan("x", 4, 2)],
        logits,
        lambda growths, places: logits.repeat(len(places), 1),
        counted,
    )
    assert not chosen
