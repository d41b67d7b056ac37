"""Several drafters as one: shared nodes, bounds, and each told of its own nodes only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter, merge_drafts
from outrider.types import Bet, Draft, Verdict
from tests.draft.test_lm import naive_chain
from tests.tiny import lm_drafter, prompt_of, sequence, tiny_model


@st.composite
def drafts(draw):
    n = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    return Draft(tuple(draw(st.integers(0, 2)) for _ in parents), tuple(parents))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[k] for k in draft.path(n)) for n in range(len(draft))}


@settings(max_examples=300, deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=3), st.integers(0, 30))
def test_the_union_of_paths_each_once(several, nodes):
    merged, numbers = merge_drafts(several, nodes)
    assert len(merged) <= nodes
    every = set().union(*map(paths, several))
    assert paths(merged) <= every and len(paths(merged)) == len(merged)
    if nodes >= len(every):
        assert paths(merged) == every
    first = paths(several[0])
    assert len(paths(merged) & first) == min(nodes, len(first))  # the first drafter's nodes come first
    for draft, own in zip(several, numbers, strict=True):
        for there, here in own.items():
            assert [merged.tokens[n] for n in merged.path(there)] == [
                draft.tokens[n] for n in draft.path(here)
            ]


class Scripted:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.heard: list[tuple[Draft, list[int]]] = []

    def start(self, sequence) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, bets):
        return [self.draft for _ in sequences]

    def accept(self, sequence, draft, verdict) -> None:
        self.heard.append((draft, verdict.accepted))


def test_each_hears_of_its_own_nodes():
    a, b = Scripted(Draft.chain([1, 2, 3])), Scripted(Draft((9, 1, 2, 5), (-1, -1, 1, 2)))
    both, s = MergedDrafter([a, b]), sequence([0, 0])
    (draft,) = both.propose([s], [Bet("x", 10, 4)])
    assert draft == Draft((1, 2, 3, 9, 5), (-1, 0, 1, -1, 1))
    both.accept(s, draft, Verdict([1, 2, 5, 7], [0, 1, 4]))
    assert a.heard == [(a.draft, [0, 1])] and b.heard == [(b.draft, [1, 2, 3])]
    both.propose([s], [Bet("x", 2, 4)])
    both.accept(s, Draft(), Verdict([1], []))  # the engine found no room for it
    assert a.heard[1] == (a.draft, []) and b.heard[1] == (b.draft, [])
    both.propose([s], [Bet("x", 2, 4)])
    both.stop(s)
    assert not both._given


def test_the_model_inside_stays_right():
    small = tiny_model(seed=5)
    lm, lookup = lm_drafter(small), LookupDrafter()
    both = MergedDrafter([lookup, lm])
    s = sequence(prompt_of(6, 1) * 3)
    lookup.start(s)
    for accepted in (0, 3, 1, 2, 3, 0):
        (draft,) = both.propose([s], [Bet("x", 9, 3)])
        chain = naive_chain(small, s.tokens, 1)
        assert chain[0] in [draft.tokens[n] for n in range(len(draft)) if draft.parents[n] < 0]
        deepest = max(range(len(draft)), key=lambda n: draft.depths[n])
        path = draft.path(deepest)[:accepted]
        tokens = [*(draft.tokens[n] for n in path), accepted]
        s.tokens += tokens
        both.accept(s, draft, Verdict(tokens, path))
        lm.table.check()
    (alone,) = lm.propose([s], [Bet("x", 3, 3)])
    assert list(alone.tokens) == naive_chain(small, s.tokens, 3)
