"""Several drafters as one: shared nodes, bounds, and each learns of its own nodes only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter, merge_drafts
from outrider.types import Draft, DraftPlan, Verdict
from tests.draft.rows import Rows
from tests.draft.test_lm import lm, naive_chain
from tests.tiny import prompt_of, sequence, tiny_model


@st.composite
def drafts(draw):
    n = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    return Draft(tuple(draw(st.integers(0, 2)) for _ in parents), tuple(parents))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[k] for k in draft.path(n)) for n in range(len(draft))}


@settings(max_examples=150, deadline=None)
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
        self.received: list[tuple[Draft, list[int]]] = []

    def start(self, sequence) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, draft_plans):
        return [self.draft for _ in sequences]

    def accept(self, sequence, draft, verdict) -> None:
        self.received.append((draft, verdict.accepted))


def test_each_hears_of_its_own_nodes():
    a, b = Scripted(Draft.chain([1, 2, 3])), Scripted(Draft((9, 1, 2, 5), (-1, -1, 1, 2)))
    both, s = MergedDrafter({"a": a, "b": b}, Rows().table), sequence([0, 0])
    (draft,) = both.propose([s], [DraftPlan("x", 10, 4)])
    assert draft == Draft((1, 2, 3, 9, 5), (-1, 0, 1, -1, 1))
    both.accept(s, draft, Verdict([1, 2, 5, 7], [0, 1, 4]))
    assert a.received == [(a.draft, [0, 1])] and b.received == [(b.draft, [1, 2, 3])]
    both.propose([s], [DraftPlan("x", 2, 4)])
    both.accept(s, Draft(), Verdict([1], []))  # the engine found no room for it
    assert a.received[1] == (a.draft, []) and b.received[1] == (b.draft, [])
    both.propose([s], [DraftPlan("x", 2, 4)])
    both.stop(s)
    assert not both._given


@pytest.mark.parametrize("first", ["lookup", "lm"])
def test_the_model_inside_stays_right(first):
    """Its drafts, and what it has read: the slots of its nodes stay with them wherever they are in the tree."""
    small = tiny_model(seed=5)
    model, rows = lm(small)
    lookup = LookupDrafter()
    named = {"lookup": lookup, "lm": model}
    both = MergedDrafter({name: named[name] for name in sorted(named, key=lambda n: n != first)}, rows.table)
    s = rows.add(prompt_of(6, 1) * 3)
    lookup.start(s)
    for accepted in (0, 3, 1, 2, 3, 0):
        (draft,) = rows.propose(both, [s], [DraftPlan("x", 9, 3)])
        chain = naive_chain(small, s.tokens, 1)
        assert chain[0] in [draft.tokens[n] for n in range(len(draft)) if draft.parents[n] < 0]
        deepest = max(range(len(draft)), key=lambda n: (draft.depths[n], n))
        known = len(s.tokens)
        rows.settle(both, s, draft, draft.path(deepest)[:accepted], accepted)
        assert known <= model.progress.of(s) <= known + accepted
    (alone,) = rows.propose(model, [s], [DraftPlan("x", 3, 3)])
    assert list(alone.tokens) == naive_chain(small, s.tokens, 3)


def test_accepted_nodes_of_the_model_are_not_read_again():
    model, rows = lm(tiny_model(seed=5))
    both = MergedDrafter({"a": Scripted(Draft((9, 8), (-1, -1))), "lm": model}, rows.table)
    s = rows.add(prompt_of(20, 1))
    (draft,) = rows.propose(both, [s], [DraftPlan("x", 9, 3, (1, 1, 1))])
    chain = draft.path(len(draft) - 1)
    assert len(chain) == 3 and chain[0] >= 0
    rows.settle(both, s, draft, chain, 1)
    assert model.progress.of(s) == 20 + 2
    (after,) = rows.propose(model, [s], [DraftPlan("x", 3, 3)])
    assert list(after.tokens) == naive_chain(model.model, s.tokens, 3)


class Leaving(Scripted):
    """Leaves a slot for each of its nodes."""

    def __init__(self, draft: Draft, table) -> None:
        super().__init__(draft)
        self.table = table

    def propose(self, sequences, draft_plans):
        (self.slots,) = [self.table.extend(s.row, len(self.draft)) for s in sequences]
        return super().propose(sequences, draft_plans)


def test_slots_that_several_leave_stay_with_their_nodes():
    rows = Rows()
    s = rows.add([0, 0])
    a, b = Leaving(Draft.chain([1, 2]), rows.table), Leaving(Draft((9, 1, 5), (-1, -1, 1)), rows.table)
    (draft,) = rows.propose(MergedDrafter({"a": a, "b": b}, rows.table), [s], [DraftPlan("x", 10, 4)])
    assert draft == Draft((1, 2, 9, 5), (-1, 0, -1, 0))
    assert rows.table.entries[s.row, 2:6].tolist() == [*a.slots, b.slots[0], b.slots[2]]


def test_one_that_fails_takes_no_slots_with_it():
    class Failing(Scripted):
        def propose(self, sequences, draft_plans):
            raise RuntimeError

    model, rows = lm(tiny_model(seed=5))
    s = rows.add(prompt_of(20, 1))
    with pytest.raises(RuntimeError):
        MergedDrafter({"lm": model, "a": Failing(Draft())}, rows.table).propose([s], [DraftPlan("x", 9, 3)])
    rows.table.check()
    assert rows.table.lengths[s.row] == 20


def test_no_room_for_the_whole_tree_is_no_draft():
    model, rows = lm(tiny_model(seed=5), slots=23)
    both = MergedDrafter({"a": Scripted(Draft((9, 8), (-1, 0))), "lm": model}, rows.table)
    s = rows.add(prompt_of(20, 1))
    (draft,) = both.propose([s], [DraftPlan("x", 9, 3, (1, 1, 1))])
    assert len(draft) == 0 and rows.table.lengths[s.row] == 20
    rows.settle(both, s, draft, [], 1)
