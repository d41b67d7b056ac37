"""Acceptance rates: what is learned from drafts, and what is expected of them."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.control.acceptance import (
    CAUTION,
    DRAFTER_MEMORY,
    FIRST,
    MIN_RATE,
    NEXT,
    PRIOR_WEIGHT,
    SEQUENCE_MEMORY,
    AcceptanceRate,
    AcceptanceRates,
    risk,
)
from outrider.control.trees import LATER, SECOND
from tests.tiny import sequence


def test_what_a_tree_brings():
    rate = AcceptanceRate(0.5, 0.8)
    assert rate.accepted((2, 2)) == pytest.approx(0.5 + 0.4)
    wide = 0.5 + 0.5 * SECOND + 0.5 * (1 - SECOND) * LATER  # three choices for the first token
    assert rate.accepted((2, 6)) == pytest.approx(wide + 0.5 * (0.8 + 0.2 * SECOND) + 0.5 * SECOND * 0.8)


def test_a_chain_is_worth_the_survival_of_its_levels():
    rate = AcceptanceRate(0.5, 0.8)
    assert rate.survivals(3, 0.0) == pytest.approx((0.5, 0.4, 0.32)) and rate.survivals(9, 0.39) == (0.5, 0.4)
    assert rate.accepted((3, 3)) == pytest.approx(sum(rate.survivals(3, 0.0)))


def test_what_follows_is_doubted_with_the_first_token_until_it_is_known():
    new, known, copied = (AcceptanceRate(0.6, 0.7) for _ in range(3))
    for _ in range(6):
        known.observe(3, 3, SEQUENCE_MEMORY)
    before = known.next
    copied.other = 0.1, PRIOR_WEIGHT  # it differs by what the last draft was, and is told apart by that
    for rate in (new, known, copied):
        for _ in range(4):
            rate.observe(2, 0, SEQUENCE_MEMORY)
    assert new.next == pytest.approx(0.7 * new.first / 0.6)
    assert known.next > 0.9 * before and copied.next == 0.7
    low = new.next
    new.observe(1, 1, SEQUENCE_MEMORY)
    assert low < new.next <= NEXT


def test_levels_are_earned_by_right_tokens_and_lost_by_halves():
    rate, earned = AcceptanceRate(0.5, 0.5), []
    for accepted in (1, 2, 0, 0, 0, 3):
        rate.observe(3, accepted, SEQUENCE_MEMORY)
        earned.append(rate.earned)
    assert earned == [1, 3, 1, 0, 0, 3] and rate.proven


def test_the_first_token_is_told_from_the_next():
    rate = AcceptanceRate(0.5, 0.5)
    for i in range(400):
        rate.observe(4, 4 if i % 2 else 0, DRAFTER_MEMORY)
    assert abs(rate.first - 0.5) < 0.05 and rate.next > 0.95
    assert abs(rate.accepted((4, 4)) - 2.0) < 0.2


def test_the_rate_of_next_tokens_recovers_where_nothing_deeper_is_tried():
    rate = AcceptanceRate(0.5, 0.1)
    for _ in range(200):
        rate.observe(1, 1, SEQUENCE_MEMORY)
    assert 0.9 * NEXT < rate.next <= NEXT


def test_a_starting_point_counts_for_a_few_steps_and_old_steps_fade():
    rate = AcceptanceRate(0.0, 0.0)
    rate.observe(1, 1, SEQUENCE_MEMORY)
    assert rate.first == pytest.approx(1 / (PRIOR_WEIGHT + 1))
    for _ in range(1000):
        rate.observe(1, 1, SEQUENCE_MEMORY)
    rate.observe(1, 0, SEQUENCE_MEMORY)
    assert rate.first == pytest.approx(1 - 1 / (SEQUENCE_MEMORY + 1))


def test_priors_are_by_drafter_and_temperature():
    rates, cool, hot = AcceptanceRates(), sequence([1], temperature=0.6), sequence([1], temperature=1.1)
    assert rates.of(sequence([1], temperature=0), "lm").first == FIRST
    assert FIRST > rates.of(cool, "lm").first > rates.of(hot, "lm").first > 0.5
    for _ in range(100):
        rates.observe(cool, "lm", 4, 0)
    assert rates.of(sequence([1], temperature=0.7), "lm").first < 0.1  # like the others
    assert rates.of(sequence([1], temperature=1.0), "lm").first > 0.5
    assert rates.of(sequence([1], temperature=0.7), "lookup").first > 0.5
    assert rates.trials == {"lm": 100}


def test_a_sequence_that_ended_still_teaches_the_next():
    rates, one = AcceptanceRates(), sequence([1])
    one.finish_reason = "stop"
    rates.observe(one, "lm", 4, 0)
    assert not rates.by_sequence and rates.prior("lm", 0).first < FIRST


def test_the_risk_is_of_sequences_and_of_what_is_known_of_them():
    def of(accepted, first=(0.5, 0.5), weight=1e9, counted=True, whole=None):
        numbers = np.array(accepted), np.array(first), np.array(first if whole is None else whole)
        return float(risk(*numbers, np.full(len(accepted), weight), np.array(counted))) / CAUTION

    assert of([1.0, 1.0]) == pytest.approx(0.0, abs=1e-4)
    assert of([0.0, 2.0]) == pytest.approx(1.0, abs=1e-4)
    assert of([1.0, 1.0], weight=0.0) == pytest.approx(1.0)
    assert of([1.0, 1.0], (0.0, 0.0), 0.0) == of(
        [1.0, 1.0], (MIN_RATE, MIN_RATE), 0.0
    )  # no division by nothing
    assert of([0.0, 2.0, 9.0], (0.5,) * 3, counted=[True, True, False]) == pytest.approx(1.0, abs=1e-4)
    assert of([1.0, 9.0], counted=[True, False]) == 0.0  # of one alone nobody knows
    # One copies now and the other will: their answers are alike.
    assert of([0.5, 1.5], (0.25, 0.75), whole=(0.5, 0.5)) == pytest.approx(0.0, abs=1e-4)
    assert of([1.0, 1.0], (0.5, 0.5), whole=(0.25, 0.75)) == pytest.approx(0.5, abs=1e-4)


def test_an_answer_is_known_by_all_its_drafts() -> None:
    """What is expected next follows its stretches of copied and of new text, and what it is like does not."""
    rate, copied, new = AcceptanceRate(0.5, 0.5, other=(0.5, 4.0)), [], []
    for _ in range(10):
        for accepted, seen in ((2, copied), (0, new)):
            for _ in range(4):
                rate.observe(4, accepted, 12)
            seen.append((rate.first, rate.whole))
    assert copied[-1][0] > 0.7 and new[-1][0] < 0.3
    assert 0.35 < new[-1][1] < copied[-1][1] < 0.65 and rate.whole_weight == 12


def test_a_drafter_with_other_weights_starts_anew():
    rates = AcceptanceRates()
    one, two = sequence([1, 2, 3]), sequence([4, 5, 6])
    for _ in range(20):
        for name in ("eagle", "lookup+eagle", "lookup"):
            rates.observe(one, name, 4, 0)
    assert rates.of(two, "eagle").first < 0.3
    rates.forget_drafter("eagle")
    fresh = AcceptanceRates()
    for name in ("eagle", "lookup+eagle"):
        assert rates.of(one, name) == fresh.of(one, name) and not rates.trials[name]
    assert rates.of(one, "lookup").first < 0.3 and rates.trials["lookup"] == 20


def test_a_drafter_of_which_every_step_tells_is_taken_by_its_last_draft():
    """Eight drafts right, eight wrong, and so on: one right draft promises another."""
    rates = AcceptanceRates()
    rates.scored = ("lookup",)
    copying, other = sequence([1]), sequence([2])
    for i in range(160):
        rates.observe(copying, "lookup", 1, int(i // 8 % 2 == 0))
        rates.observe(other, "lm", 1, int(i // 8 % 2 == 0))
        after = rates.of(copying, "lookup").first
        if i > 80 and i % 8 in (0, 6):
            assert after > 0.7 if i // 8 % 2 == 0 else after < 0.3
    assert rates.of(other, "lm").other is None
    new = rates.of(sequence([3]), "lookup")  # starts from what others taught
    assert new.first > 0.7 and new.other is not None and new.other[0] < 0.3
