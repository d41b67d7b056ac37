"""Each processing step against its plain definition, and rows that do not look at their neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.types import NO_DRAFT, Draft, Request, SamplingParams, Sequence
from outrider.verify.process import process, unset_bits
from outrider.verify.rows import lay_out
from tests.tiny import packed

V = 1000


def sequence(prompt=(1, 2, 3), output=(), stop_ids=(), bad_word_ids=(), **params) -> Sequence:
    made = SamplingParams(**{"temperature": 1.0, **params})
    request = Request("r", tuple(prompt), made, 1, "", tuple(bad_word_ids), frozenset(stop_ids))
    return Sequence(request, 0, 1, [*prompt, *output])


def processed(logits: torch.Tensor, s: Sequence, draft: Draft = NO_DRAFT) -> torch.Tensor:
    return process(logits, lay_out([s], [draft]))


@pytest.fixture
def logits():
    return torch.randn(1, V, generator=torch.Generator().manual_seed(0)) * 3


def kept(row: torch.Tensor) -> set[int]:
    return set(torch.isfinite(row).nonzero()[:, 0].tolist())


def test_greedy_leaves_the_logits_alone(logits):
    assert processed(logits, sequence(temperature=0)) is logits


def test_temperature_divides(logits):
    assert torch.equal(processed(logits, sequence(temperature=0.5)), logits / 0.5)


def test_top_k_keeps_k_and_ties(logits):
    assert kept(processed(logits, sequence(top_k=7))[0]) == set(logits[0].topk(7).indices.tolist())
    tied = torch.zeros(1, V)
    tied[0, 5] = 1
    assert len(kept(processed(tied, sequence(top_k=3))[0])) == V
    assert len(kept(processed(logits, sequence(top_k=V + 5))[0])) == V


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999999])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p):
    order = logits[0].argsort(descending=True)
    chances = logits[0].double().softmax(-1)
    total, expected = 0.0, set()
    for token in order.tolist():
        expected.add(token)
        total += float(chances[token])
        if total >= np.float32(top_p):
            break
    got = kept(processed(logits, sequence(top_p=top_p))[0])
    assert len(got ^ expected) <= (1 if top_p > 0.9999 else 0)  # a mass is good to seven digits


def test_top_p_of_a_flat_row_looks_at_the_whole_vocabulary():
    flat = torch.linspace(0, 0.01, V)[None]
    assert 890 < len(kept(processed(flat, sequence(top_p=0.9))[0])) < 910


def test_top_p_comes_after_temperature_and_top_k(logits):
    hot = kept(processed(logits, sequence(temperature=3.0, top_p=0.5))[0])
    cold = kept(processed(logits, sequence(temperature=0.3, top_p=0.5))[0])
    assert len(cold) < len(hot)
    both = kept(processed(logits, sequence(temperature=3.0, top_k=4, top_p=0.99))[0])
    assert both <= set(logits[0].topk(4).indices.tolist())


def test_min_p_is_a_share_of_the_likeliest(logits):
    p = logits[0].softmax(-1)
    expected = set((p >= 0.1 * p.max()).nonzero()[:, 0].tolist())
    assert kept(processed(logits, sequence(min_p=0.1))[0]) == expected


def test_repetition_counts_prompt_and_output_others_output_only():
    row = torch.full((1, V), 2.0)
    row[0, 8] = -2.0
    s = sequence(
        prompt=(1, 8), output=(9, 9), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
    )
    got = processed(row, s)[0]
    assert got[1] == 1.0  # 2 / 2, prompt only
    assert got[8] == -4.0  # -2 * 2
    assert got[9] == 1.0 - 2 * 0.25 - 0.5
    assert got[10] == 2.0


def test_penalties_at_a_node_count_its_path():
    rows = torch.zeros(4, V)
    draft = Draft((5, 5, 6), (-1, 0, -1))
    got = processed(rows, sequence(prompt=(1,), frequency_penalty=1.0), draft)
    assert [float(got[r, 5]) for r in range(4)] == [0, -1, -2, 0]
    assert [float(got[r, 6]) for r in range(4)] == [0, 0, 0, -1]


def test_bias_is_added_before_temperature(logits):
    got = processed(logits, sequence(temperature=0.5, logit_bias={4: 10.0}))
    assert got[0, 4] == (logits[0, 4] + 10) / 0.5
    assert processed(logits, sequence(temperature=0, logit_bias={4: 100.0})).argmax() == 4


def test_bad_words_are_banned_where_they_would_be_completed(logits):
    s = sequence(prompt=(1,), output=(7,), bad_word_ids=[(7, 8), (3,), (6, 7, 9), (1, 7, 10)])
    banned = set(range(V)) - kept(processed(logits, s)[0])
    assert banned == {8, 3, 10}


def test_bad_words_look_along_the_path():
    s = sequence(prompt=(1,), bad_word_ids=[(7, 8)])
    got = processed(torch.zeros(3, V), s, Draft((7, 2), (-1, 0)))
    assert [bool(torch.isinf(got[r, 8])) for r in range(3)] == [False, True, False]


def test_end_ids_are_banned_before_the_minimum_length(logits):
    s = sequence(output=(9,), stop_ids=(0, 4), min_tokens=3)
    draft = Draft.chain([5, 5])
    got = processed(logits.repeat(3, 1), s, draft)
    assert [bool(torch.isinf(got[r, 4])) for r in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 0.6, "top_k": 50, "top_p": 0.95}],
)
def test_a_row_is_bitwise_the_same_among_others(params):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(17, 49152, generator=generator) * 2
    together = process(logits, lay_out([sequence(**params) for _ in range(17)], [NO_DRAFT] * 17))
    for r in range(17):
        assert torch.equal(together[r], processed(logits[r : r + 1], sequence(**params))[0])


class Only:
    """A grammar in which one token may follow."""

    def __init__(self, token: int) -> None:
        self.token = token

    def bits(self, path):
        allowed = torch.zeros(V, dtype=torch.bool)
        allowed[self.token] = True
        return packed(allowed)


@pytest.mark.parametrize("vocab", [1, 8, 49, 96])
def test_bits_are_the_same_wherever_they_are_spread(vocab):
    bits = np.random.default_rng(vocab).integers(0, 256, (3, -(-vocab // 8)), np.uint8)
    there = unset_bits(torch.from_numpy(bits), vocab)
    assert there.tolist() == (np.unpackbits(bits, 1, vocab, "little") == 0).tolist()


def test_a_grammar_masks_everything_else(logits):
    s = sequence()
    s.request = replace(s.request, grammar=object())
    s.grammar = Only(7)
    assert kept(processed(logits, s)[0]) == {7}


def test_a_complete_grammar_ends_whatever_the_minimum_length(logits):
    s = sequence(stop_ids=(4,), min_tokens=5)
    s.request = replace(s.request, grammar=object())
    s.grammar = Only(4)
    assert kept(processed(logits, s)[0]) == {4}
