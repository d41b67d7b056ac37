"""Acceptance rates: what is learned from drafts, and what is expected of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.control.acceptance import LEAST, AcceptanceRate, AcceptanceRates, caution
from outrider.control.guards import (
    CAUTION,
    DRAFTER_MEMORY,
    FIRST,
    NEXT,
    PRIOR_WEIGHT,
    SECOND,
    SEQUENCE_MEMORY,
)
from outrider.types import TreeShape
from tests.control.build import decoding


def test_what_a_chain_and_a_tree_bring() -> None:
    rate = AcceptanceRate(0.5, 0.8)
    assert rate.accepted(TreeShape(3, 3)) == pytest.approx(0.5 + 0.4 + 0.32)
    assert AcceptanceRate(0.5, 1.0).accepted(TreeShape(4, 4)) == 2.0
    wide = 0.5 + 0.5 * SECOND + 0.5 * SECOND**2  # three choices for the first token
    two = 0.5 * (0.8 + 0.2 * SECOND) + 0.5 * SECOND * 0.8
    assert rate.accepted(TreeShape(2, 6)) == pytest.approx(wide + two)


def test_the_first_token_is_learned_apart_from_the_next() -> None:
    rate = AcceptanceRate(0.5, 0.5)
    for i in range(400):
        rate.observe(4, 4 if i % 2 else 0, DRAFTER_MEMORY)
    assert abs(rate.first - 0.5) < 0.05 and rate.next > 0.95


def test_a_starting_point_counts_for_a_few_steps_and_old_steps_fade() -> None:
    rate = AcceptanceRate(0.0, 0.0)
    rate.observe(1, 1, SEQUENCE_MEMORY)
    assert rate.first == pytest.approx(1 / (PRIOR_WEIGHT + 1))
    for _ in range(1000):
        rate.observe(1, 1, SEQUENCE_MEMORY)
    rate.observe(1, 0, SEQUENCE_MEMORY)
    assert rate.first == pytest.approx(1 - 1 / (SEQUENCE_MEMORY + 1))


def test_next_follows_first_until_it_is_known_and_recovers_where_nothing_deeper_is_tried() -> None:
    new, known = AcceptanceRate(0.6, 0.7), AcceptanceRate(0.6, 0.7)
    for _ in range(6):
        known.observe(3, 3, SEQUENCE_MEMORY)
    before = known.next
    for rate in (new, known):
        for _ in range(4):
            rate.observe(2, 0, SEQUENCE_MEMORY)
    assert new.next == pytest.approx(0.7 * new.first / 0.6) and known.next > 0.9 * before
    low = AcceptanceRate(0.5, 0.1)
    for _ in range(200):
        low.observe(1, 1, SEQUENCE_MEMORY)
    assert 0.9 * NEXT < low.next <= NEXT


def test_levels_are_earned_by_accepted_tokens_and_halved_by_a_rejected_draft() -> None:
    rate, earned = AcceptanceRate(0.5, 0.5), []
    for accepted in (1, 2, 0, 0, 0, 3):
        rate.observe(3, accepted, SEQUENCE_MEMORY)
        earned.append(rate.earned)
    assert earned == [1, 3, 1, 0, 0, 3] and rate.proven


def test_priors_are_by_drafter_and_temperature() -> None:
    rates, warm, hot = AcceptanceRates(), decoding(temperature=0.6), decoding(temperature=1.1)
    assert rates.of(decoding(), "lm").first == FIRST
    assert FIRST > rates.of(warm, "lm").first > rates.of(hot, "lm").first > 0.5
    for _ in range(100):
        rates.observe(warm, "lm", 4, 0)
    assert rates.of(decoding(temperature=0.7), "lm").first < 0.1  # the same band
    assert rates.of(decoding(temperature=1.0), "lm").first > 0.5
    assert rates.of(decoding(temperature=0.7), "lookup").first > 0.5 and rates.tried == {"lm"}
    rates.expect("eagle", 0.7, 0.4, 0.3)
    scored = rates.of(decoding(temperature=0.6), "eagle")
    assert (scored.first, scored.next) == (0.4, 0.3) and rates.of(decoding(), "eagle").first == FIRST


def test_a_sequence_that_ended_still_teaches_the_next() -> None:
    rates, one = AcceptanceRates(), decoding()
    one.finish_reason = "stop"
    rates.observe(one, "lm", 4, 0)
    assert not rates.by_sequence and rates.of(decoding(), "lm").first < FIRST


def test_a_model_free_drafter_is_expected_by_its_last_draft() -> None:
    """Eight drafts right, eight wrong, and so on: one right draft promises another."""
    rates = AcceptanceRates()
    rates.model_free = ("lookup",)
    copying, other = decoding(), decoding()
    for i in range(160):
        rates.observe(copying, "lookup", 1, int(i // 8 % 2 == 0))
        rates.observe(other, "lm", 1, int(i // 8 % 2 == 0))
        after = rates.of(copying, "lookup").first
        if i > 80 and i % 8 in (0, 6):
            assert after > 0.7 if i // 8 % 2 == 0 else after < 0.3
    assert rates.of(other, "lm").after is None and 0.3 < rates.of(copying, "lookup").whole < 0.7
    new = rates.of(decoding(), "lookup")  # starts from what others taught
    assert new.after is not None and new.after[True][0] > 0.7 and new.after[False][0] < 0.3


def test_the_first_draft_of_a_sequence_is_expected_by_the_first_drafts_of_others() -> None:
    """A text copies once it has begun to, and none begins with it."""
    rates = AcceptanceRates()
    rates.model_free = ("lookup",)
    for _ in range(40):
        one = decoding()
        assert rates.of(one, "lookup").first <= FIRST
        for i in range(20):
            rates.observe(one, "lookup", 1, int(i > 3))
        rates.forget(one)
        one.finish_reason = "stop"
        rates.observe(one, "lookup", 1, 1)  # no first draft
    new = rates.of(decoding(), "lookup")
    assert new.after is not None
    assert new.first < 0.1 and new.after[True][0] > 0.9 and new.after[False][0] < 0.4
    new.observe(1, 1, SEQUENCE_MEMORY)
    assert new.first > 0.9


def test_caution_is_the_spread_of_sequences_and_of_what_is_known_of_them() -> None:
    def of(accepted, first=(0.5, 0.5), weight=1e9, counted=(1, 1), whole=None):
        numbers = np.array(accepted), np.array(first), np.array(first if whole is None else whole)
        return float(caution(*numbers, np.full(len(accepted), weight), np.array(counted))) / CAUTION

    assert of([1.0, 1.0]) == pytest.approx(0.0, abs=1e-4)
    assert of([0.0, 2.0]) == pytest.approx(1.0, abs=1e-4)
    assert of([1.0, 1.0], weight=0.0) == pytest.approx(1.0)
    assert of([1.0, 1.0], (0.0, 0.0), 0.0) == of([1.0, 1.0], (LEAST, LEAST), 0.0)
    assert of([0.0, 2.0, 9.0], (0.5,) * 3, counted=(1, 1, 0)) == pytest.approx(1.0, abs=1e-4)
    assert of([1.0, 9.0], counted=(1, 0)) == 0.0
    # One copies now and the other will: their answers are alike.
    assert of([0.5, 1.5], (0.25, 0.75), whole=(0.5, 0.5)) == pytest.approx(0.0, abs=1e-4)


def test_drafters_with_other_weights_start_anew() -> None:
    rates, one = AcceptanceRates(), decoding()
    for _ in range(20):
        for name in ("eagle", "merged", "lookup"):
            rates.observe(one, name, 4, 0)
    rates.forget_drafters(["eagle", "merged"])
    fresh = AcceptanceRates()
    for name in ("eagle", "merged"):
        assert rates.of(one, name) == fresh.of(one, name)
    assert rates.of(one, "lookup").first < 0.3 and rates.tried == {"lookup"}


def test_which_steps_other_drafters_leave() -> None:
    rates, one, new = AcceptanceRates(), decoding(), decoding()
    rates.of(one, "lm"), rates.of(one, "lookup")
    for drafting in ("lookup", "lookup", "none", "lookup"):
        rates.note(one, drafting)
        one.steps += 1
    assert list(rates.left_to([one, new], "lm")) == [0.25, 1.0] and list(rates.left_to([one], "lookup")) == [
        1.0
    ]
    assert rates.of(one, "lookup").idle == 0 and rates.of(one, "lm").idle == 5
    rates.forget(one)
    assert not rates.by_sequence


def finished(rates: AcceptanceRates, chance: float, dice: random.Random, drafts: int = 6) -> None:
    one = decoding()
    for _ in range(drafts):
        rates.observe(one, "lm", 1, int(dice.random() < chance))
    rates.forget(one)


@pytest.mark.parametrize(("apart", "low", "high"), [(0.0, 10.0, 12.0), (0.15, 4.0, 12.0), (0.4, 2.0, 2.5)])
def test_the_prior_counts_for_more_where_sequences_are_alike(apart: float, low: float, high: float) -> None:
    """Half of them are accepted more often than the mean, half less. With 0.15 a beta distribution has strength 10."""
    rates, dice = AcceptanceRates(), random.Random(3)
    assert rates.of(decoding(), "lm").weight == pytest.approx(PRIOR_WEIGHT)
    for number in range(120):
        finished(rates, 0.55 + apart * (-1) ** number, dice)
    assert low <= rates.of(decoding(), "lm").weight <= high
    rates.forget_drafters(["lm"])
    assert rates.of(decoding(), "lm").weight == pytest.approx(PRIOR_WEIGHT)


def test_drafters_that_every_step_scores_keep_their_prior() -> None:
    rates, dice = AcceptanceRates(), random.Random(3)
    rates.model_free = ("lm",)
    for _ in range(40):
        finished(rates, 0.5, dice)
    assert rates.of(decoding(), "lm").weight == PRIOR_WEIGHT and not rates.spreads
