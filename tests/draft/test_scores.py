"""Scores of drafters that take no pass: what they would have got, on what was verified."""

from __future__ import annotations

from outrider.draft.drafter import ResidentDrafter
from outrider.draft.drafters import MAX_FAULTS, Drafters
from outrider.draft.lookup import LookupDrafter
from outrider.draft.scores import DEPTH, Scores
from tests.tiny import VOCAB, sequence


class Foresees(ResidentDrafter):
    max_depth, trees, rides_along = 4, False, True

    def __init__(self, *proposals: list[int]) -> None:
        self.proposals = list(proposals)

    def propose(self, sequences, bets): ...
    def propose_resident(self, ops, rows, lengths, tree, context): ...
    def foresee(self, sequence, n):
        return self.proposals.pop(0)[:n]


def scored(proposals: list[list[int]], steps: list[list[int]]) -> list[tuple[int, int] | None]:
    """Drafted and accepted, step by step."""
    scores, s = Scores(Drafters({"test": Foresees(*proposals)}, VOCAB)), sequence([1, 2])
    found = []
    for tokens in steps:
        outcome = scores.score("test", s, tokens)
        s.tokens += tokens
        found.append(outcome and (outcome.deepest, outcome.accepted))
    scores.stop(s)
    assert not scores.open
    return found


def test_a_proposal_is_followed_until_it_fails_or_ends():
    assert scored([[5, 6, 7]], [[5, 6, 7, 8]]) == [(3, 3)]  # all of it, and a bonus token
    assert scored([[5, 6, 7]], [[5, 6, 9]]) == [(3, 2)]
    assert scored([[5, 6, 7]], [[9]]) == [(3, 0)]
    assert scored([[5, 6, 7], [1]], [[5], [6], [7], [1]]) == [None, None, (3, 3), (1, 1)]  # plain steps
    assert scored([[5, 6, 7], [1]], [[5], [9, 9], [2]]) == [None, (3, 1), (1, 0)]
    assert scored([[], []], [[5], [6]]) == [(0, 0), (0, 0)]


def test_a_proposal_is_dropped_where_nobody_looked():
    scores, s = Scores(Drafters({"test": Foresees([5, 6, 7], [9, 9])}, VOCAB)), sequence([1, 2])
    assert scores.score("test", s, [5]) is None
    s.tokens += [5, 6]
    found = scores.score("test", s, [7])
    assert found is not None and (found.deepest, found.accepted) == (2, 0)


def test_lookup_foresees_what_followed_the_last_two_tokens():
    lookup, text = LookupDrafter(), [1, 2, 3, 4, 5, 1, 2]
    for n in range(1, len(text) + 1):
        s = sequence(text[:n])
        lookup.start(s)
        assert list(lookup.foresee(s, 3)) == ([3, 4, 5] if n == 7 else [])
    s = sequence([1, 2, 3])
    lookup.start(s)
    for token, expected in ((1, []), (2, [3, 1, 2]), (4, []), (1, []), (2, [4, 1, 2])):  # the latest place
        s.tokens.append(token)
        assert list(lookup.foresee(s, 3)) == expected == list(lookup.foresee(s, 3))


def test_it_finds_where_lookup_itself_would():
    lookup, s = LookupDrafter(), sequence([n * n % 23 for n in range(200)])
    lookup.start(s)
    scores, right = Scores(Drafters({"lookup": lookup}, VOCAB)), 0
    for n in range(200, 260):
        outcome = scores.score("lookup", s, [n * n % 23])
        s.tokens.append(n * n % 23)
        right += outcome is not None and outcome.accepted == outcome.deepest == DEPTH
    assert right == 60 // DEPTH


def test_one_that_fails_is_left_alone():
    drafters, s = Drafters({"test": Foresees()}, VOCAB), sequence([1, 2])
    scores = Scores(drafters)
    assert drafters.riding == ("test",)
    for _ in range(MAX_FAULTS):
        assert scores.score("test", s, [3]).deepest == 0
        s.tokens.append(3)
    assert drafters.riding == ()
