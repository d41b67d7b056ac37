"""Filters as one bound a row: against their definition, token by token, and what is drawn through them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.types import SamplingParams
from outrider.verify import filters
from outrider.verify.filters import BANNED, OFF, bounds, filter_logits, masses, wanted
from outrider.verify.noise import draw
from tests.verify.test_law import chi_square_holds

NEARLY_ONE = 1 - 2.0**-24


def by_definition(row: Tensor, top_k: int, top_p: float, log_min_p: float) -> set[int]:
    """Which tokens are kept, from the likeliest down, with masses that are summed one by one."""
    mass = masses(row[None], row.max()[None, None])[0].tolist()
    order = sorted(range(len(row)), key=lambda token: -row[token])
    left = order
    if 0 < top_k < len(row):
        left = [token for token in order if row[token] >= row[order[top_k - 1]]]
    if top_p < 1:
        need, reached, last = int(np.float64(np.float32(top_p)) * float(sum(mass[t] for t in left))), 0, 0
        while (reached := reached + mass[left[last]]) < max(need, 1):
            last += 1
        left = [token for token in order if row[token] >= row[left[last]]]
    least = row.max() + torch.tensor(log_min_p)
    return {token for token in left if row[token] >= least and row[token] > BANNED}


def columns(*rows: tuple[int, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    top_k, top_p, log_min_p = zip(*rows, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p), torch.tensor(log_min_p)


def kept(row: Tensor) -> set[int]:
    return set((row > BANNED).nonzero()[:, 0].tolist())


a_logit = st.one_of(st.integers(-6, 6).map(float), st.floats(-80, 80, width=32), st.just(BANNED))
a_filter = st.tuples(
    st.one_of(st.just(0), st.integers(1, 14)),
    st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.5, 0.9, 0.999, NEARLY_ONE]), st.floats(0.01, 0.99)),
    st.one_of(st.just(BANNED), st.floats(1e-6, 1.0).map(math.log)),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(a_logit, min_size=12, max_size=12).filter(lambda r: max(r) > BANNED), a_filter),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_kept_is_what_the_definition_keeps(rows) -> None:
    logits = torch.tensor([row for row, _ in rows])
    given_ = logits.clone()
    filter_logits(logits, *columns(*(asked for _, asked in rows)))
    for row, filtered_rows, (_, asked) in zip(given_, logits, rows, strict=True):
        assert kept(filtered_rows) == by_definition(row, *asked)
        assert torch.equal(filtered_rows[filtered_rows > BANNED], row[filtered_rows > BANNED])


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 60.0])
def test_looking_at_the_likeliest_first_changes_nothing(spread, monkeypatch) -> None:
    """What a GPU's form and the host's short cut must agree on."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 3001, generator=generator) * spread
    top_k = torch.randint(0, 3005, (40,), generator=generator)
    top_k[::3] = 0
    top_p = torch.rand(40, generator=generator)
    top_p[1::4] = 1.0
    log_min_p = torch.full((40,), BANNED)
    some = bounds(logits, top_k, top_p, log_min_p)
    monkeypatch.setattr(filters, "_WIDTH", 3001)
    assert torch.equal(some, bounds(logits, top_k, top_p, log_min_p))
    alone = [
        bounds(logits[r : r + 1], top_k[r : r + 1], top_p[r : r + 1], log_min_p[r : r + 1]) for r in range(40)
    ]
    assert torch.equal(some, torch.cat(alone))


def test_a_mass_is_the_exponential() -> None:
    below = torch.linspace(0, 60, 100_001)
    mass = masses(-below[None], torch.zeros(1, 1))[0].double() * 2.0**-43
    exact = (-below.double()).exp()
    rounding = 1.5e-7 * (1 + below.double())  # of the distance in float32, as in any exponential of one
    assert ((mass - exact).abs() <= rounding * exact + 2.0**-42).all()
    assert mass[0] == 1.0
    assert masses(torch.tensor([[BANNED]]), torch.zeros(1, 1)).item() == 0


def test_a_row_with_nothing_allowed_stays_as_it_is() -> None:
    logits = torch.full((3, 9), BANNED)
    filter_logits(logits, *columns((2, 1.0, BANNED), (0, 0.5, BANNED), (3, 0.5, -0.1)))
    assert (logits == BANNED).all()


def test_filters_are_for_what_is_sampled() -> None:
    asked = dict(top_k=3, top_p=0.9, min_p=0.5)
    assert wanted(SamplingParams(temperature=0, **asked)) == OFF
    assert wanted(SamplingParams(temperature=0.7)) == OFF
    assert wanted(SamplingParams(temperature=0.7, **asked)) == (3, 0.9, math.log(0.5))


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ((3, 1.0, BANNED), [4, 3, 0]),
        ((0, 0.8, BANNED), [4, 0]),
        ((0, 1.0, math.log(0.1)), [4, 3, 0]),
        ((4, 0.93, BANNED), [4, 3, 0]),  # of all seven 0.93 would be four
        (OFF, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_filtered_draws_come_from_what_is_left(asked, left) -> None:
    logits = torch.tensor([2.0, -0.5, -1.0, 1.0, 3.0, -2.0, 0.5])
    draws = 60_000
    filtered_rows = logits.repeat(draws, 1)
    filter_logits(filtered_rows[:1], *columns(asked))
    filtered_rows = filtered_rows[:1].expand(draws, -1)
    at = torch.arange(draws)
    tokens = draw(filtered_rows, torch.ones(draws, dtype=torch.bool), torch.full((draws,), 3), at)
    expected = torch.zeros(7)
    expected[left] = logits[left].softmax(-1)
    counts = np.bincount(tokens.numpy(), minlength=7)
    assert not counts[expected.numpy() == 0].any()
    assert chi_square_holds(counts, expected.numpy() * draws)
    assert not chi_square_holds(counts, logits.softmax(-1).roll(1).numpy() * draws)


def test_a_share_that_is_reached_exactly_needs_no_more():
    """One token of mass 1 and two of one half each: half of it all is the first alone."""
    half = next(
        x
        for x in (torch.tensor(math.log(2)) + 1e-7 * i for i in range(-4, 5))
        if int(masses(-x[None], torch.zeros(1))) == 2**42
    )
    logits = torch.stack([torch.tensor(0.0), -half, -half])[None]
    off = torch.zeros(1, dtype=torch.int64), torch.tensor([0.5]), torch.tensor([-torch.inf])
    assert bounds(logits, *off).tolist() == [0.0]
