"""`lookup`: the text itself, the prediction, and past answers of the same owner and of nobody else."""

from __future__ import annotations

import pytest

from outrider.draft.lookup import GRAM, LookupDrafter
from outrider.types import NO_DRAFT, Draft, DraftPlan
from tests.tiny import sequence

BET = DraftPlan("lookup", 8, 4)


def guess(drafter: LookupDrafter, s, draft_plan: DraftPlan = BET) -> Draft:
    (draft,) = drafter.propose([s], [draft_plan])
    return draft


def paths(draft: Draft) -> set[tuple[int, ...]]:
    leaves = set(range(len(draft))) - set(draft.parents)
    return {tuple(draft.tokens[n] for n in draft.path(leaf)) for leaf in leaves}


def started(drafter: LookupDrafter, tokens, **options):
    s = sequence(tokens, **options)
    drafter.start(s)
    return s


def ended(drafter: LookupDrafter, answer, owner: str = "") -> None:
    """A sequence of one prompt token that wrote `answer`."""
    s = started(drafter, [0, *answer], prompt=1, owner=owner)
    drafter.stop(s)


def test_what_followed_in_the_text():
    drafter = LookupDrafter()
    s = started(drafter, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert guess(drafter, s) == Draft.chain([4, 5, 6, 9])
    s.tokens += [4, 5]
    assert guess(drafter, s) == Draft.chain([6, 9, 1, 2])
    s.tokens += [77]
    assert guess(drafter, s) == NO_DRAFT  # one token that never occurred


def test_a_single_token_is_not_believed():
    drafter = LookupDrafter()
    assert guess(drafter, started(drafter, [1, 2, 3, 1])) == NO_DRAFT


def test_the_same_guess_however_the_text_arrived():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 4, 9, 1, 2]
    drafter = LookupDrafter()
    slowly = started(drafter, text[:1], prompt=1)
    for n in range(1, len(text)):
        slowly.tokens = text[:n]
        guess(drafter, slowly)
    slowly.tokens = list(text)
    at_once = started(drafter, text)
    assert guess(drafter, slowly) == guess(drafter, at_once)


def test_the_beginning_of_the_prediction():
    drafter = LookupDrafter()
    s = started(drafter, [1, 2, 3], prediction=[10, 11, 12, 13, 14])
    assert guess(drafter, s) == Draft.chain([10, 11, 12, 13])
    s.tokens += [10, 11]
    assert guess(drafter, s) == Draft.chain([12, 13, 14])


def test_the_prediction_is_found_again_after_a_deviation():
    drafter = LookupDrafter()
    s = started(drafter, [1, 2, 3], prediction=[10, 11, 12, 13, 14, 15, 16])
    s.tokens += [10, 11, 90]
    assert guess(drafter, s) == NO_DRAFT
    s.tokens += [13]
    assert guess(drafter, s) == Draft.chain([14, 15, 16])


def test_the_prompt_does_not_move_the_prediction():
    drafter = LookupDrafter()
    s = started(drafter, [10, 11, 12], prediction=[20, 10, 11, 12, 30])
    assert guess(drafter, s) == Draft.chain([20, 10, 11, 12])


def test_past_answers_of_the_same_owner_only():
    drafter = LookupDrafter()
    ended(drafter, [50, 51, 52, 53, 54, 55], owner="a")
    mine = started(drafter, [50, 51, 52, 53], owner="a")
    theirs = started(drafter, [50, 51, 52, 53], owner="b")
    nobodys = started(drafter, [50, 51, 52, 53])
    assert guess(drafter, mine) == Draft.chain([54, 55])
    assert guess(drafter, theirs) == guess(drafter, nobodys) == NO_DRAFT


def test_past_answers_are_known_to_their_last_token():
    drafter = LookupDrafter()
    ended(drafter, range(50, 50 + GRAM + 1), owner="a")
    assert guess(drafter, started(drafter, range(50, 50 + GRAM), owner="a")) == Draft.chain([50 + GRAM])
    assert drafter.past["a"].continuation(range(51, 51 + GRAM), 3) == (GRAM, [])


def test_prompts_are_not_remembered():
    drafter = LookupDrafter()
    s = started(drafter, [50, 51, 52, 53, 54, 55], owner="a")
    drafter.stop(s)
    assert guess(drafter, started(drafter, [50, 51, 52, 53], owner="a")) == NO_DRAFT


@pytest.mark.parametrize("asked", [False, True])
def test_the_oldest_answers_are_forgotten(asked):
    """Whether they have been read by then or not."""
    drafter = LookupDrafter(tokens_per_owner=20)
    for start in (0, 10, 20, 30):
        ended(drafter, range(start, start + 8), owner="a")
        past = drafter.past["a"]
        if asked:
            assert past.continuation(range(start, start + 4), 2) == (4, [start + 4, start + 5])
        assert len(past.unread) == (0 if asked else len(past.answers))
        assert past.size == sum(map(len, past.answers)) <= 20
        assert all(any(answer is held for held in past.answers) for answer, _ in past.grams.values())
    assert guess(drafter, started(drafter, [0, 1, 2, 3], owner="a")) == NO_DRAFT
    assert guess(drafter, started(drafter, [30, 31, 32, 33], owner="a")).tokens == (34, 35, 36, 37)


def test_answers_are_read_a_few_at_a_time_and_all_in_the_end():
    drafter = LookupDrafter()
    for start in range(0, 90, 10):
        ended(drafter, range(start, start + 8), owner="a")
    found = [drafter.past["a"].continuation([80, 81, 82, 83], 1)[0] for _ in range(3)]
    assert found == [0, 0, 4]


def test_a_repeated_answer_outlives_its_first_copy():
    drafter = LookupDrafter(tokens_per_owner=16)
    for _ in range(3):
        ended(drafter, range(8), owner="a")
    assert guess(drafter, started(drafter, [0, 1, 2, 3], owner="a")).tokens == (4, 5, 6, 7)


def test_an_answer_longer_than_the_room_leaves_nothing():
    drafter = LookupDrafter(tokens_per_owner=6)
    ended(drafter, range(9), owner="a")
    assert drafter.past["a"].size == 0 and not drafter.past["a"].grams


def test_the_owner_longest_unused_is_forgotten():
    drafter = LookupDrafter(owners=2)
    for owner in ("a", "b", "a", "c"):
        ended(drafter, range(8), owner=owner)
    assert set(drafter.past) == {"a", "c"}


def test_continuations_share_nodes_where_they_agree():
    drafter = LookupDrafter()
    ended(drafter, [7, 8, 1, 2, 3, 4, 60, 61], owner="a")
    s = started(drafter, [1, 2, 3, 4, 60, 70, 9, 1, 2, 3, 4], owner="a")
    draft = guess(drafter, s)
    assert paths(draft) == {(60, 70, 9, 1), (60, 61)}
    assert len(draft) == 5  # 60 once


def test_bets_bound_depth_and_nodes():
    drafter = LookupDrafter()
    ended(drafter, [7, 8, 1, 2, 3, 4, 60, 61, 62, 63], owner="a")
    s = started(drafter, [1, 2, 3, 4, 50, 51, 52, 53, 1, 2, 3, 4], owner="a", prediction=[1, 2, 3, 4, 40, 41])
    for nodes in range(1, 9):
        for depth in range(1, 5):
            draft = guess(drafter, s, DraftPlan("lookup", nodes, depth))
            assert 0 < len(draft) <= nodes and max(draft.depths) <= depth
            assert len({(p, t) for p, t in zip(draft.parents, draft.tokens, strict=True)}) == len(draft)


def test_nothing_is_kept_of_sequences_that_ended():
    drafter = LookupDrafter()
    for n in range(20):
        ended(drafter, range(GRAM - n % 2), owner=str(n))
    assert not drafter.states and not drafter.past
