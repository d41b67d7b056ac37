"""The law of sampling: its noise, its distribution, and verification as the same law at every node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.types import NO_DRAFT, Draft, Request, SamplingParams, Sequence
from outrider.verify.batch import verify_rows
from outrider.verify.noise import choice_seed, draw, gumbel, gumbel_at, philox

ALPHA_QUANTILE = 3.719  # normal quantile of 1 - 1e-4, for the chi-square approximation below


def chi_square_holds(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's test at alpha 1e-4, by the Wilson-Hilferty approximation of the chi-square quantile."""
    used = expected > 5
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + ALPHA_QUANTILE * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic < bound


def sequence(tokens=(0, 1, 2), seed=5, **params) -> Sequence:
    made = SamplingParams(**{"temperature": 1.0, "seed": seed, **params})
    return Sequence(Request("r", (0, 1, 2), made, seed), 0, seed, list(tokens))


def test_philox_gives_the_published_words():
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    words = [int(w) for w in philox([zero] * 4, [zero] * 2)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = [int(w) for w in philox([ones] * 4, [ones] * 2)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_noise_for_chosen_tokens_is_the_same_noise():
    seeds, positions = torch.tensor([3, -(2**62)]), torch.tensor([0, 7000])
    tokens = torch.tensor([[0, 5, 998], [3, 2, 1]])
    assert torch.equal(gumbel(seeds, positions, 1001).gather(1, tokens), gumbel_at(seeds, positions, tokens))


@pytest.mark.parametrize("change", ["seed", "position"])
def test_noise_differs_by_seed_and_by_position(change):
    a = gumbel(torch.tensor([1]), torch.tensor([1]), 64)
    b = gumbel(torch.tensor([1 + (change == "seed")]), torch.tensor([1 + (change == "position")]), 64)
    assert not torch.isclose(a, b).any()


def test_the_law_draws_from_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 3.0, -20.0, 0.5])
    draws = 100_000
    for how in ("positions", "seeds"):
        at = torch.arange(draws)
        fixed = torch.full((draws,), 11)
        seeds, positions = (at, fixed) if how == "seeds" else (fixed, at)
        tokens = draw(logits.expand(draws, -1), torch.ones(draws, dtype=torch.bool), seeds, positions)
        counts = np.bincount(tokens.numpy(), minlength=7)
        expected = logits.softmax(-1).numpy() * draws
        assert chi_square_holds(counts, expected), how
        assert not chi_square_holds(counts, np.roll(expected, 1))


def test_neighbouring_positions_and_choices_are_independent():
    logits = torch.zeros(4)
    at = torch.arange(60_000)
    yes = torch.ones(len(at), dtype=torch.bool)
    tokens = draw(logits.expand(len(at), -1), yes, torch.full_like(at, 9), at).numpy()
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert chi_square_holds(pairs, np.full(16, (len(at) - 1) / 16))
    seeds = torch.tensor([[choice_seed(int(s), c) for c in (0, 1)] for s in at[:20_000]])
    first, second = (
        draw(
            logits.expand(20_000, -1), yes[:20_000], seeds[:, c], torch.zeros(20_000, dtype=torch.int64)
        ).numpy()
        for c in (0, 1)
    )
    assert chi_square_holds(np.bincount(first * 4 + second, minlength=16), np.full(16, 20_000 / 16))


def test_choice_zero_is_the_request_itself():
    assert choice_seed(7, 0) == 7
    assert choice_seed(2**63 + 5, 0) == -(2**63) + 5
    assert len({choice_seed(7, i) for i in range(100)}) == 100


def test_ties_go_to_the_lowest_id_at_temperature_zero():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    assert verify_rows(logits, [sequence(temperature=0)], [NO_DRAFT])[0].tokens == [1]


@st.composite
def trees(draw_, vocab: int = 3):
    nodes = draw_(st.integers(0, 12))
    parents = tuple(draw_(st.integers(-1, i - 1)) for i in range(nodes))
    return Draft(tuple(draw_(st.integers(0, vocab - 1)) for _ in range(nodes)), parents)


def table_logits(text: list[int], vocab: int = 3) -> torch.Tensor:
    """A target without a model: logits that are a function of the text alone."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    return torch.randn(vocab, generator=generator) * 2


PARAMS = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "logit_bias": {0: 3.0, 2: -3.0}},
]


@settings(max_examples=150, deadline=None)
@given(
    drafts=st.lists(trees(), min_size=1, max_size=4),
    picks=st.lists(st.sampled_from(PARAMS), min_size=4, max_size=4),
)
def test_verification_emits_what_plain_decoding_would(drafts, picks):
    """Every tree, mixed parameters, several sequences at once: tokens equal one-at-a-time decoding."""
    sequences = [sequence(seed=40 + i, **picks[i]) for i in range(len(drafts))]
    rows = []
    for s, draft in zip(sequences, drafts, strict=True):
        rows.append(table_logits(s.tokens))
        paths = ([draft.tokens[i] for i in draft.path(node)] for node in range(len(draft)))
        rows += [table_logits(s.tokens + path) for path in paths]
    verdicts = verify_rows(torch.stack(rows), sequences, drafts)
    for s, draft, verdict in zip(sequences, drafts, verdicts, strict=True):
        text = list(s.tokens)
        for token in verdict.tokens:
            s.tokens = list(text)
            assert verify_rows(table_logits(text)[None], [s], [NO_DRAFT])[0].tokens == [token]
            text.append(token)
        s.tokens = text[: -len(verdict.tokens)]
        assert [draft.tokens[i] for i in verdict.accepted] == verdict.tokens[:-1]
        children = {
            draft.tokens[i] for i, p in enumerate(draft.parents) if p == (verdict.accepted or [-1])[-1]
        }
        assert verdict.tokens[-1] not in children  # it stopped only where no guess matched


def test_logprobs_are_the_targets_own():
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    s = sequence(temperature=0.5, top_k=1, logit_bias={2: -50.0}, logprobs=2)
    verdict = verify_rows(logits, [s], [Draft.chain([1])])[0]
    assert verdict.tokens == [1, 1]
    assert verdict.logprobs is not None
    for row, entry in zip(logits, verdict.logprobs, strict=True):
        expected = row.log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[1]))
        assert [t for t, _ in entry.alternatives] == expected.topk(2).indices.tolist()
