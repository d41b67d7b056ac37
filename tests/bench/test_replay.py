"""Answers that are replayed: the same tokens whatever is drafted, at costs that are given."""

from __future__ import annotations

import pytest
from bench.replay import HOST, PASS, PLANNING, Replay, _accepted

from outrider.types import Draft

NOVEL = [{"temperature": 0.0, "prompt": list(range(40)), "answer": list(range(100, 140))}]
COPY = [{"temperature": 0.0, "prompt": list(range(60)), "answer": list(range(5, 45))}]


def test_new_text_costs_what_plain_decoding_costs_and_the_planning() -> None:
    own, base = Replay("auto").batch(NOVEL), Replay(False).batch(NOVEL)
    assert own.rate / base.rate == pytest.approx((PASS[1] + HOST) / (PASS[1] + HOST + PLANNING))
    assert not any(step.drafted for step in own.steps)


def test_copied_text_takes_fewer_steps() -> None:
    own, base = Replay("auto").batch(COPY * 2), Replay(False).batch(COPY * 2)
    assert own.rate > 1.3 * base.rate and own.slowest < base.slowest
    for run in (own, base):
        assert sum(step.emitted for step in run.steps) == 2 * len(COPY[0]["answer"])
        assert sum(step.known for step in run.steps) >= 2 * len(COPY[0]["prompt"])


def test_a_tree_is_walked_as_far_as_it_comes_true() -> None:
    tree = Draft((7, 8, 9, 9), (-1, -1, 0, 1))
    assert _accepted(tree, [8, 9, 1, 2]) == (2, 0)  # not by first choices
    assert _accepted(tree, [7, 9, 1]) == (2, 2)
    assert _accepted(tree, [7]) == (0, 0)  # the last token is nobody's draft
