"""Log-probabilities of prompts: every sequence has its own rows of a pass that several share."""

from __future__ import annotations

import pytest
import torch

from outrider.types import Work
from outrider.verify.batch import score_prompts
from tests.tiny import sequence

V = 50


@pytest.mark.parametrize("first", [0, 2])
def test_prompts_of_one_pass_are_scored_by_their_own_rows(first: int) -> None:
    """Four in a pass: one whose rows nobody wants scored, one that may have rows before, and two to tell apart."""
    logits = torch.randn(first + 5, V, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    quiet = sequence(range(9))
    some = sequence(range(10, 20), cached=4, prompt_logprobs=0)
    others = sequence(range(30, 40), prompt_logprobs=2)
    before = sequence(range(40, 49), prompt_logprobs=1)
    work = [Work(quiet, 4), *([Work(before, first)] if first else []), Work(some, 3), Work(others, 2)]
    scored = list(score_prompts(logits, work))[-2:]
    assert [one.sequence for one, _ in scored] == [some, others]
    places = [(first + i, 15 + i) for i in range(3)], [(first + 3 + i, 31 + i) for i in range(2)]
    for (_, entries), own in zip(scored, places, strict=True):
        assert [entry.token for entry in entries] == [token for _, token in own]
        assert [entry.logprob for entry in entries] == pytest.approx([float(expected[at]) for at in own])
    assert [len(entry.alternatives) for _, entries in scored for entry in entries] == [0, 0, 0, 2, 2]
