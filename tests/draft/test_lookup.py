"""`lookup` searches the text itself, the prediction, and past answers of the same owner and of nobody else. The host
and the device find the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.device.state import MAX_REFERENCES, SequenceState
from outrider.draft.lookup import GRAM, REACH, SEPARATOR, SHORTEST, LookupDrafter, find_copies
from outrider.types import NO_DRAFT, Draft, DraftPlan
from tests.tiny import sequence

PLAN = DraftPlan("lookup", 8, 4)


def guess(drafter: LookupDrafter, s, draft_plan: DraftPlan = PLAN) -> Draft:
    (draft,) = drafter.propose([s], [draft_plan])
    return draft


def started(drafter: LookupDrafter, tokens, **options):
    s = sequence(tokens, **options)
    drafter.start(s)
    return s


def ended(drafter: LookupDrafter, answer, owner: str = "") -> None:
    """A sequence of one prompt token that wrote `answer`."""
    s = started(drafter, [0, *answer], prompt=1, owner=owner)
    drafter.stop(s)


# ------------------------------------------------------------------------------------------------ the three searches


def law(
    answers: list[list[int]], prediction: list[int], prompt: list[int], output: list[int], n: int
) -> list[int]:
    """The module's docstring, token by token."""
    own = prompt + output
    if prediction and not output:
        return prediction[:n]
    best, draft = (0, -1), []
    for number, text in enumerate((*answers, prediction, own)):
        needed = (*[GRAM] * len(answers), 1, SHORTEST)[number]
        for end in range(1, len(text)):
            size = 0
            while size < min(REACH, end, len(own)) and text[end - 1 - size] == own[-1 - size]:
                size += 1
            value = size + GRAM * (number == len(answers))
            if size >= needed and (value, number) >= best:
                best, draft = (value, number), text[end : end + n]
    return draft


class Device:
    """Sequences as rows of the device's state."""

    def __init__(self, rows: int = 4) -> None:
        self.state = SequenceState(rows, 96, torch.device("cpu"))

    def drafts(self, sequences, n: int) -> list[list[int]]:
        for row, one in enumerate(sequences):
            one.row, one.cached = row, len(one.tokens) - 1
            self.state.upload(one, np.zeros(len(one.tokens), np.int32))
        self.state.upload_references()
        state, rows = self.state, torch.arange(len(sequences))
        texts = state.tokens, state.references, state.spans
        found, counts = find_copies(*texts, rows, state.lengths[rows], n, 90, (REACH, SHORTEST, GRAM))
        assert int(found.min()) >= 0  # rows that are not drafted are fed, too
        return [tokens[:count] for tokens, count in zip(found.tolist(), counts.tolist(), strict=True)]


few = st.integers(0, 2)
texts = st.tuples(
    st.lists(st.lists(few, min_size=GRAM + 1, max_size=20), max_size=3),
    st.lists(few, max_size=20),
    st.lists(few, min_size=1, max_size=30),
    st.lists(few, max_size=30),
)


@settings(max_examples=75, deadline=None)
@given(st.lists(texts, min_size=1, max_size=3), st.integers(1, 9))
def test_the_host_and_the_device_find_what_the_law_says(several, n):
    drafter, device, some = LookupDrafter(), Device(), []
    for number, (answers, prediction, prompt, output) in enumerate(several):
        for answer in answers:
            ended(drafter, answer, owner=str(number))
        own = [*prompt, *output]
        some.append(started(drafter, own, prompt=len(prompt), prediction=prediction, owner=str(number)))
    expected = [law(*one, n) for one in several]
    assert [list(guess(drafter, s, DraftPlan("lookup", n, n)).tokens) for s in some] == expected
    assert [list(drafter.shadow_propose(s, len(s.tokens), n)) for s in some] == expected
    assert device.drafts(some, n) == expected


@settings(max_examples=50, deadline=None)
@given(texts)
def test_a_proposal_for_an_earlier_end_does_not_know_what_came_later(one):
    answers, prediction, prompt, output = one
    drafter = LookupDrafter()
    for answer in answers:
        ended(drafter, answer)
    s = started(drafter, [*prompt, *output], prompt=len(prompt), prediction=prediction)
    guess(drafter, s)
    for written in range(len(output)):
        expected = law(answers, prediction, prompt, output[:written], 4)
        assert drafter.shadow_propose(s, len(prompt) + written, 4) == expected


def test_a_row_keeps_no_references_of_the_sequence_before():
    drafter, device = LookupDrafter(), Device()
    first = started(drafter, [1, 2, 9], prompt=2, prediction=[9, 8, 7])
    assert device.drafts([first], 3) == [[8, 7]]
    assert device.drafts([started(drafter, [1, 2, 9], prompt=2)], 3) == [[]]
    assert device.drafts([started(drafter, [1, 2, 9], prompt=2, prediction=[9, 6])], 3) == [[6]]


# ------------------------------------------------------------------------------------------------ the text itself


def test_what_followed_in_the_text():
    drafter = LookupDrafter()
    s = started(drafter, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert guess(drafter, s) == Draft.chain([4, 5, 6, 9])
    s.tokens += [4, 5]
    assert guess(drafter, s) == Draft.chain([6, 9, 1, 2])
    s.tokens += [77]
    assert guess(drafter, s) == NO_DRAFT  # one token that never occurred


def test_the_latest_of_equally_long_endings_and_the_longest_of_all():
    drafter = LookupDrafter()
    assert guess(drafter, started(drafter, [1, 2, 3, 1, 2, 4, 1, 2])).tokens == (4, 1, 2)
    assert guess(drafter, started(drafter, [9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2])).tokens == (3, 8, 1, 2)


def test_fewer_tokens_than_the_shortest_are_not_believed():
    drafter, ending = LookupDrafter(), list(range(1, SHORTEST + 1))
    assert guess(drafter, started(drafter, [*ending, 8, 9, *ending])).tokens[:2] == (8, 9)
    assert guess(drafter, started(drafter, [0, *ending[1:], 8, 9, *ending])) == NO_DRAFT


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


# ------------------------------------------------------------------------------------------------ the prediction


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


def test_a_prediction_has_priority_over_past_answers():
    drafter, most = LookupDrafter(), MAX_REFERENCES
    ended(drafter, range(most), owner="a")
    for size, answers in ((10, most - 11), (most - 1, 0), (most, 0), (2 * most, 0)):
        given = started(drafter, [1], prediction=range(size), owner="a").references
        assert given.answers == answers and len(given.tokens) == most
        assert given.tokens[answers:].tolist() == [*range(min(size, most - 1)), SEPARATOR]
        assert given.tokens[:answers].tolist() == [*range(most - answers + 1, most), SEPARATOR][:answers]


# ------------------------------------------------------------------------------------------------ past answers


def test_past_answers_of_the_same_owner_only():
    drafter = LookupDrafter()
    ended(drafter, [50, 51, 52, 53, 54, 55], owner="a")
    mine = started(drafter, [50, 51, 52, 53], owner="a")
    theirs = started(drafter, [50, 51, 52, 53], owner="b")
    nobodys = started(drafter, [50, 51, 52, 53])
    assert guess(drafter, mine) == Draft.chain([54, 55])
    assert guess(drafter, theirs) == guess(drafter, nobodys) == NO_DRAFT


@pytest.mark.parametrize("drafted_before", [False, True])
def test_a_row_of_the_device_loses_the_references_of_its_last_sequence(drafted_before: bool):
    """Also those that no step needed, which were not uploaded yet."""
    drafter, device = LookupDrafter(), Device()
    ended(drafter, [50, 51, 52, 53, 54, 55], owner="a")
    mine = started(drafter, [50, 51, 52, 53], owner="a")
    if drafted_before:
        assert device.drafts([mine], 2) == [[54, 55]]
    else:
        mine.row, mine.cached = 0, len(mine.tokens) - 1
        device.state.upload(mine, np.zeros(len(mine.tokens), np.int32))
    assert device.drafts([started(drafter, [50, 51, 52, 53], owner="b")], 2) == [[]]


def test_past_answers_are_known_to_their_last_token_and_not_beyond():
    drafter = LookupDrafter()
    for first in (50, 60):
        ended(drafter, range(first, first + GRAM + 1), owner="a")
    assert guess(drafter, started(drafter, range(50, 50 + GRAM), owner="a")) == Draft.chain([50 + GRAM])
    assert guess(drafter, started(drafter, range(51, 51 + GRAM), owner="a")) == NO_DRAFT


def test_a_past_answer_needs_more_tokens_than_the_own_text():
    drafter, ending = LookupDrafter(), list(range(50, 50 + GRAM))
    ended(drafter, [*ending, 9], owner="a")
    assert guess(drafter, started(drafter, ending, owner="a")).tokens == (9,)
    assert guess(drafter, started(drafter, [0, *ending[1:]], owner="a")) == NO_DRAFT
    own = [*ending[-SHORTEST:], 7, 0, *ending[1:]]
    assert guess(drafter, started(drafter, own, owner="a")).tokens[0] == 7


def test_references_are_fixed_when_a_sequence_starts():
    drafter = LookupDrafter()
    early = started(drafter, [50, 51, 52, 53], owner="a")
    ended(drafter, [50, 51, 52, 53, 54, 55], owner="a")
    assert guess(drafter, early) == NO_DRAFT


def test_prompts_are_not_remembered():
    drafter = LookupDrafter()
    s = started(drafter, [50, 51, 52, 53, 54, 55], owner="a")
    drafter.stop(s)
    assert guess(drafter, started(drafter, [50, 51, 52, 53], owner="a")) == NO_DRAFT


def test_the_oldest_answers_are_forgotten():
    drafter, size = LookupDrafter(), MAX_REFERENCES // 2
    for start in (0, size, 2 * size):
        ended(drafter, range(start, start + size), owner="a")
    assert len(drafter.past["a"]) == MAX_REFERENCES
    assert guess(drafter, started(drafter, range(4), owner="a")) == NO_DRAFT
    for start in (size + 10, 2 * size):
        draft = guess(drafter, started(drafter, range(start, start + 4), owner="a"))
        assert draft.tokens == tuple(range(start + 4, start + 8))


def test_the_end_of_an_answer_longer_than_the_room_is_kept():
    drafter = LookupDrafter()
    ended(drafter, range(2 * MAX_REFERENCES), owner="a")
    assert drafter.past["a"].tolist() == [*range(MAX_REFERENCES + 1, 2 * MAX_REFERENCES), SEPARATOR]


def test_the_owner_longest_unused_is_forgotten():
    drafter = LookupDrafter(owners=2)
    for owner in ("a", "b", "a", "c"):
        ended(drafter, range(8), owner=owner)
    assert set(drafter.past) == {"a", "c"}


# ------------------------------------------------------------------------------------------------ plans and memory


@pytest.mark.parametrize("tree", [None, (2, 2, 1)])
def test_a_chain_within_what_the_plan_allows(tree):
    drafter = LookupDrafter()
    ended(drafter, [7, 8, 1, 2, 3, 4, 60, 61, 62, 63], owner="a")
    s = started(drafter, [1, 2, 3, 4, 50, 51, 52, 53, 1, 2, 3, 4], owner="a", prediction=[1, 2, 3, 4, 40, 41])
    s.tokens += [50]
    for nodes in range(9):
        for depth in range(5):
            draft = guess(drafter, s, DraftPlan("lookup", nodes, depth, tree))
            assert draft == Draft.chain([51, 52, 53, 1][: min(nodes, depth)])


def test_nothing_is_kept_of_sequences_that_ended():
    drafter = LookupDrafter()
    for n in range(20):
        s = started(drafter, [0, *range(GRAM - n % 2)], prompt=1, owner=str(n))
        guess(drafter, s)
        drafter.stop(s)
    assert not drafter.texts and not drafter.past
