"""Scores of drafters that take no pass: what they would have got, on what was verified."""

from __future__ import annotations

import random

from outrider.draft.drafter import ResidentDrafter
from outrider.draft.drafters import MAX_FAULTS, SCORED_DEPTH, Drafters, Scores
from outrider.draft.lookup import LookupDrafter
from outrider.types import DraftPlan
from tests.tiny import VOCAB, sequence


class Foresees(ResidentDrafter):
    """A drafter that has a proposal for each place of a text."""

    max_depth, trees, model_free = 4, False, True

    def __init__(self, proposals: dict[int, list[int]]) -> None:
        self.proposals, self.asked = proposals, list[int]()

    def propose(self, sequences, draft_plans): ...
    def propose_resident(self, ops, rows, lengths, tree, context): ...
    def shadow_propose(self, sequence, end, n):
        assert not self.asked or end >= self.asked[-1]
        self.asked.append(end)
        return self.proposals[end][:n]


def scored(
    proposals: dict[int, list[int]], steps: list[list[int]], patience: int = 0
) -> list[tuple[int, int] | None]:
    """Drafted and accepted, step by step, of a prompt of two tokens."""
    scores, s = Scores(Drafters({"test": Foresees(proposals)}, VOCAB)), sequence([1, 2])
    found = []
    for tokens in steps:
        s.tokens += tokens
        outcome = scores.score("test", s, patience)
        found.append(outcome and (outcome.deepest, outcome.accepted))
    scores.stop(s)
    assert not scores.due and not scores.wrong
    return found


def test_a_proposal_is_followed_until_it_fails_or_ends():
    assert scored({2: [5, 6, 7]}, [[5, 6, 7, 8]]) == [(3, 3)]  # all of it, and a bonus token
    assert scored({2: [5, 6, 7]}, [[5, 6, 9]]) == [(3, 2)]
    assert scored({2: [5, 6, 7]}, [[9]]) == [(3, 0)]
    assert scored({2: [5, 6, 7], 6: [1]}, [[5], [6], [7], [1], [1]]) == [None, None, (3, 3), None, (1, 1)]
    assert scored({2: [5, 6, 7], 4: [9], 5: [1]}, [[5], [9], [9], [2]]) == [None, (3, 1), (1, 1), None]
    assert scored({2: [], 3: []}, [[5], [6]]) == [(0, 0), (0, 0)]


def test_what_nobody_looked_at_is_left_out():
    """After a step of many passes, or where it was others' turn: one near the end is judged at once, right or wrong, or
    only those that fail would be known.
    """
    right = {2: [5], 10: [3, 4, 5, 6]}
    assert scored(right, [[5], [0] * 7 + [3, 4, 5, 6]]) == [(1, 1), (4, 4)]
    assert scored({2: [5], 10: [3, 4, 9, 6]}, [[5], [0] * 7 + [3, 4, 5, 6]]) == [(1, 1), (4, 2)]


def test_the_more_proposals_were_wrong_the_more_tokens_are_passed_over():
    """One after the first, two after the second and no more than the patience; none after one that was right."""
    wrong: dict[int, list[int]] = {n: [9] for n in range(2, 20)}
    each, no = (1, 0), None
    steps = [[5]] * 10
    assert scored(wrong, steps) == [each] * 10
    assert scored(wrong, steps, 2) == [each, no, each, no, no, each, no, no, each, no]
    assert scored({**wrong, 4: [5]}, steps, 2) == [each, no, (1, 1), no, each, no, each, no, no, each]


def test_a_drafter_that_is_right_is_scored_beside_one_that_is_wrong():
    wrong, right = Foresees({n: [9] for n in range(2, 20)}), Foresees({n: [5] for n in range(2, 20)})
    scores, s = Scores(Drafters({"wrong": wrong, "right": right}, VOCAB)), sequence([1, 2])
    for _ in range(8):
        s.tokens += [5, 5]
        for name in ("wrong", "right"):
            scores.score(name, s, 4)
    assert len(right.asked) == 8 and len(wrong.asked) < 6


def test_it_scores_lookup_as_steps_propose():
    """Of a text that copies now and then, proposal by proposal."""
    dice, text = random.Random(5), [3, 1, 4, 1, 5, 9, 2, 6] * 2
    while len(text) < 900:
        at = dice.randrange(len(text) - 12)
        text += text[at : at + dice.randrange(4, 12)] if dice.random() < 0.5 else dice.choices(range(60), k=4)
    s, lookup = sequence(text[:100]), LookupDrafter()
    lookup.start(s)
    scores, found, right, due = Scores(Drafters({"lookup": lookup}, VOCAB)), [], [], 100
    for end in range(100, 890):
        if end == due:
            [draft] = lookup.propose([s], [DraftPlan("lookup", SCORED_DEPTH, SCORED_DEPTH)])
            wrong = (n for n, token in enumerate(draft.tokens) if token != text[end + n])
            right.append(next(wrong, len(draft)))
            due += right[-1] + 1
        s.tokens.append(text[end])
        outcome = scores.score("lookup", s)
        found += [] if outcome is None else [outcome.accepted]
    assert found == right[: len(found)] and len(right) - len(found) <= 1
    assert 0.1 * len(right) < sum(n > 1 for n in right) < 0.9 * len(right)


def test_one_that_fails_is_left_alone():
    drafters, s = Drafters({"test": Foresees({})}, VOCAB), sequence([1, 2])
    scores = Scores(drafters)
    assert drafters.model_free == ("test",)
    for _ in range(MAX_FAULTS):
        s.tokens.append(3)
        outcome = scores.score("test", s)
        assert outcome is not None and outcome.deepest == 0
    assert drafters.model_free == ()
