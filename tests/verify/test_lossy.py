"""`lossy`: its two rules as they are defined, and that nobody gets them unasked."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.types import Draft, SamplingParams
from outrider.verify import batch as module
from outrider.verify.batch import verify_rows
from tests.verify.test_law import sequence

V = 6


def stands(p: torch.Tensor, token: int, rule: str, threshold: float, delta: float) -> bool:
    entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
    bound = threshold if rule == "threshold" else min(threshold, delta * math.exp(-entropy))
    return float(p[token]) > 0 and float(p[token]) >= bound


def random_tree(dice: random.Random) -> Draft:
    n = dice.randrange(1, 12)
    return Draft(tuple(dice.randrange(V) for _ in range(n)), tuple(dice.randrange(-1, i) for i in range(n)))


@settings(max_examples=75, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from(["typical", "threshold"]), st.sampled_from([0.0, 0.1, 0.3, 0.9]),
    st.sampled_from([0.0, 0.09, 0.5]), st.sampled_from([0, 0.8]),
)  # fmt: skip
def test_the_longest_path_that_stands(seed, rule, threshold, delta, temperature):
    dice = random.Random(seed)
    draft = random_tree(dice)
    logits = torch.randn(1 + len(draft), V, generator=torch.Generator().manual_seed(seed)) * 2
    how = {"mode": "lossy", "rule": rule, "threshold": threshold, "delta": delta}
    lossy = sequence(seed=seed, temperature=temperature, speculation=how)
    exact = sequence(seed=seed, temperature=temperature)
    (verdict,) = verify_rows(logits, [lossy], [draft])
    (coupled,) = verify_rows(logits, [exact], [draft])
    assert len(verdict.accepted) >= len(coupled.accepted)

    # At every node: by the rule, or because the law itself chose it.
    def law(node: int) -> int:
        path = [draft.tokens[n] for n in draft.path(node)]
        alone = sequence((0, 1, 2, *path), seed=seed, temperature=temperature)
        return verify_rows(logits[[node + 1]], [alone], [Draft()])[0].tokens[0]

    p = (logits / (temperature or 1)).softmax(-1)
    good = []
    for node, parent in enumerate(draft.parents):
        above = parent < 0 or good[parent]
        ruled = stands(p[parent + 1], draft.tokens[node], rule, threshold, delta)
        good.append(above and (ruled or law(parent) == draft.tokens[node]))
    deepest = max((d for d, ok in zip(draft.depths, good, strict=True) if ok), default=0)
    assert len(verdict.accepted) == deepest
    last = verdict.accepted[-1] if verdict.accepted else -1
    assert verdict.accepted == draft.path(last) and all(good[n] for n in verdict.accepted)
    assert verdict.tokens == [*(draft.tokens[n] for n in verdict.accepted), law(last)]


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_what_is_banned_never_stands(rule):
    how = {"mode": "lossy", "rule": rule, "threshold": 0.0, "delta": 0.0}
    s = sequence(temperature=1.0, speculation=how, top_k=2)
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0, 0.0, 0.0]]).repeat(2, 1)
    assert verify_rows(logits, [s], [Draft.chain([3])])[0].accepted == []
    assert verify_rows(logits, [s], [Draft.chain([1])])[0].accepted == [0]


def test_never_unless_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("lossy was used")

    monkeypatch.setitem(module.VERIFY, "lossy", refuse)
    assert SamplingParams().speculation.mode == "coupled"
    logits = torch.randn(3, V)
    for mode in ("coupled", "rejection"):
        verify_rows(logits, [sequence(speculation={"mode": mode})], [Draft.chain([1, 2])])
    with pytest.raises(AssertionError, match="lossy was used"):
        verify_rows(logits, [sequence(speculation={"mode": "lossy"})], [Draft.chain([1, 2])])
