"""The suffix automaton against brute force: longest earlier ending, real continuations, bounded work."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.suffix import Automaton, Match, OwnMatch

texts = st.lists(st.integers(0, 2), max_size=60)


def longest_earlier(text: list[int]) -> int:
    """The length of the longest ending of `text` that also ends before its end."""
    for size in range(len(text) - 1, 0, -1):
        if any(text[end - size : end] == text[-size:] for end in range(size, len(text))):
            return size
    return 0


def longest_inside(text: list[int], stream: list[int]) -> int:
    for size in range(len(stream), 0, -1):
        if any(text[i : i + size] == stream[-size:] for i in range(len(text) - size + 1)):
            return size
    return 0


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_longest_ending_that_was_there_before(text):
    match = OwnMatch()
    for n, token in enumerate(text, 1):
        match.advance(token)
        read = text[:n]
        assert match.size == longest_earlier(read)
        ending = match.automaton.end[match.state]
        if match.size:
            assert ending < n and read[ending - match.size : ending] == read[-match.size :]
            assert match.continuation(5) == read[ending : ending + 5]
        else:
            assert match.continuation(5) == []


@settings(max_examples=300, deadline=None)
@given(texts, texts)
def test_the_longest_ending_of_a_stream_in_a_fixed_text(text, stream):
    match = Match(Automaton(text))
    for n, token in enumerate(stream, 1):
        match.advance(token)
        read = stream[:n]
        assert match.size == longest_inside(text, read)
        end = match.automaton.end[match.state]
        if match.size:
            assert text[end - match.size : end] == read[-match.size :]
            assert match.continuation(4) == text[end : end + 4]
        else:
            assert match.continuation(4) == []


@given(texts)
def test_no_more_states_than_there_must_be(text):
    """A state stands for texts up to its length; its link for the longest shorter ones. Two a token at most."""
    automaton = Automaton(text)
    assert automaton.length[automaton.last] == len(text)
    assert all(automaton.length[link] < automaton.length[s] for s, link in enumerate(automaton.link) if s)
    assert len(automaton.next) <= max(2, 2 * len(text))


@settings(max_examples=200, deadline=None)
@given(texts)
def test_every_substring_and_nothing_else(text):
    automaton = Automaton(text)

    def holds(part: list[int]) -> bool:
        state = 0
        for token in part:
            if token not in automaton.next[state]:
                return False
            state = automaton.next[state][token]
        return True

    for begin in range(0, len(text), 7):
        assert holds(text[begin:])
    dice = random.Random(len(text))
    for _ in range(20):
        part = [dice.randrange(3) for _ in range(dice.randrange(1, 6))]
        assert holds(part) == any(text[i : i + len(part)] == part for i in range(len(text)))


def test_of_several_places_the_latest():
    match = OwnMatch()
    for token in [1, 2, 30, 1, 2, 40, 1, 2]:
        match.advance(token)
    assert match.size == 2
    assert match.continuation(3) == [40, 1, 2]


def test_asking_changes_nothing():
    asked, silent = OwnMatch(), OwnMatch()
    dice = random.Random(4)
    for _ in range(500):
        token = dice.randrange(3)
        asked.advance(token)
        silent.advance(token)
        asked.continuation(4)
        assert asked.continuation(4) == silent.continuation(4)


class Counting(dict):
    """A state's moves that count how often they are looked at or copied."""

    looks = 0

    def __contains__(self, key) -> bool:
        Counting.looks += 1
        return super().__contains__(key)

    def get(self, key, default=None):
        Counting.looks += 1
        return super().get(key, default)


class CountingAutomaton(Automaton):
    def _state(self, length, moves, end) -> int:
        return super()._state(length, Counting(moves), end)


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


ADVERSARIAL = {
    "one token": [0] * 20_000,
    "fibonacci": fibonacci(20_000),
    "period broken at the end": [0, 1, 2] * 6_666 + [7, 8],
    "half and half": [0] * 10_000 + [1] * 10_000,
    "blocks": [t for n in range(1, 200) for t in [0] * n + [1]][:20_000],
    "random": [random.Random(5).randrange(2) for _ in range(20_000)],
}


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_work_is_bounded_by_the_length(kind):
    text = ADVERSARIAL[kind]
    match = OwnMatch()
    match.automaton = CountingAutomaton()
    Counting.looks = 0
    for token in text:
        match.advance(token)
        match.continuation(4)
    assert Counting.looks <= 6 * len(text)
    assert len(match.automaton.next) <= 2 * len(text)


def test_moving_a_match_is_bounded_by_the_length():
    automaton = CountingAutomaton([0] * 5_000 + [1] + [0] * 5_000)
    match = Match(automaton)
    Counting.looks = 0
    stream = ([0] * 400 + [2]) * 25 + ([0] * 300 + [1]) * 30
    for token in stream:
        match.advance(token)
    assert Counting.looks <= 6 * len(stream)
