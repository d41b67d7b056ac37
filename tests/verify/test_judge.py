"""Log-probabilities of prompts: every sequence has its own rows of a pass that several share."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.judge import score_prompts
from tests.tiny import sequence

V = 50


@pytest.mark.parametrize("first", [0, 2])
def test_prompts_of_one_pass_are_scored_by_their_own_rows(first: int) -> None:
    """Three in a pass: one whose rows come before, which nobody wants scored, and two to be told apart."""
    logits = torch.randn(first + 5, V, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    quiet = sequence(range(9))
    some = sequence(range(10, 20), cached=4, prompt_logprobs=0)
    others = sequence(range(30, 40), prompt_logprobs=2)
    scored = list(score_prompts(logits, [quiet, some, others], [first, 3, 2]))
    assert [who for who, _ in scored] == [some, others]
    places = [(first + i, 15 + i) for i in range(3)], [(first + 3 + i, 31 + i) for i in range(2)]
    for (_, entries), own in zip(scored, places, strict=True):
        assert [entry.token for entry in entries] == [token for _, token in own]
        assert [entry.logprob for entry in entries] == pytest.approx([float(expected[at]) for at in own])
    assert [len(entry.alternatives) for _, entries in scored for entry in entries] == [0, 0, 0, 2, 2]
