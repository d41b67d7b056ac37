"""What counts of a prediction, against a plain table that says the same slowly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serve.prediction import MANY, PredictionOverlap


def held(prediction: list[int], answer: list[int]) -> int:
    overlap = PredictionOverlap(prediction)
    overlap.feed(answer)
    return overlap.held


def held_by_table(prediction: list[int], answer: list[int]) -> int:
    """The longest common subsequence of tokens that have a neighbour in common; texts begin alike."""
    before = ([None, *prediction], [None, *answer])
    after = ([*prediction[1:], "end"], [*answer[1:], "other end"])
    best = [[0] * (len(answer) + 1) for _ in range(len(prediction) + 1)]
    for i, predicted in enumerate(prediction):
        for j, token in enumerate(answer):
            neighbour = before[0][i] == before[1][j] or after[0][i] == after[1][j]
            match = predicted == token and neighbour
            best[i + 1][j + 1] = max(best[i][j + 1], best[i + 1][j], best[i][j] + match)
    return best[-1][-1]


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], 4),  # more was said
        ([1, 2, 3, 4], [1, 2], 2),  # less was said
        ([1, 2, 3, 4, 5], [1, 9, 3, 4, 5], 4),  # one token is another
        ([1, 2, 3, 4], [1, 2, 9, 9, 3, 4], 4),  # something was added
        ([1, 2, 8, 8, 3, 4], [1, 2, 3, 4], 4),  # something is not said
        ([1, 2, 3, 4], [3, 4, 1, 2], 2),  # in another order
        ([1, 2, 3, 4], [9, 2, 9, 4], 0),  # single tokens are chance
        ([7], [7], 1),
        ([7], [8, 7], 0),
        ([], [1, 2], 0),
        ([1, 2], [], 0),
        ([5, 5, 5], [5] * 9, 3),  # each token of the prediction once
        ([5] * 9, [5, 5, 5], 3),
    ],
)
def test_tokens_that_came_true_are_counted(prediction: list[int], answer: list[int], expected: int) -> None:
    assert held(prediction, answer) == expected


def test_a_far_repetition_does_not_swallow_what_lies_between() -> None:
    """A line is added whose words also occur at the very end: what follows it was predicted all the same."""
    prediction = [*range(100, 200), 1, 2]
    assert held(prediction, [100, 1, 2, *prediction[1:]]) == len(prediction)


TEXTS = st.integers(1, 6).flatmap(lambda k: st.lists(st.integers(0, k), max_size=2 * MANY))


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 4), max_size=24))
def test_the_count_is_that_of_the_table(prediction: list[int], answer: list[int]) -> None:
    assert held(prediction, answer) == held_by_table(prediction, answer)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=6))
def test_it_does_not_matter_how_the_answer_was_cut_up(prediction: list[int], pieces: list[list[int]]) -> None:
    overlap, said = PredictionOverlap(prediction), []
    for piece in pieces:
        overlap.feed(piece)
        said += piece
        assert overlap.held == held(prediction, said)


@given(st.lists(st.integers(0, 9), max_size=50))
def test_a_text_foretells_itself(text: list[int]) -> None:
    assert held(text, text) == len(text)


def test_answers_are_counted_apart() -> None:
    first = PredictionOverlap([1, 2, 3])
    second = first.again()
    first.feed([1, 2, 3])
    second.feed([1, 2])
    assert (first.held, second.held) == (3, 2)
