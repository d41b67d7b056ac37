"""Where two answers part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.compare import differing, first_difference

ANSWERS = st.lists(st.integers(0, 2), max_size=6)


@given(ANSWERS, ANSWERS)
def test_all_before_it_is_equal_and_nothing_there_is(a: list[int], b: list[int]) -> None:
    at = first_difference(a, b)
    if at is None:
        assert a == b
        return
    assert a[:at] == b[:at]
    assert a[at : at + 1] != b[at : at + 1]
    assert differing(a, b) == max(len(a), len(b)) - at > 0


@given(ANSWERS)
def test_equal_answers_do_not_differ(a: list[int]) -> None:
    assert first_difference(a, list(a)) is None
    assert differing(a, list(a)) == 0
