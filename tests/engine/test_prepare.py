"""What a CPU measures before anybody asks."""

from __future__ import annotations

import pytest

from outrider.engine import runner
from outrider.types import Bet
from tests.tiny import Always, finish, prompt_of, request, tiny_engine, tiny_model, tokens_of


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_passes_are_measured_by_rows_and_nothing_is_changed(model) -> None:
    """Also while somebody is answered: rows of nobody lie where nobody looks."""
    planner = tiny_engine(model).planner
    engine, alone = tiny_engine(model, planner), tiny_engine(model)
    alone.add(request("a", prompt_of(9), max_tokens=40))
    engine.add(request("a", prompt_of(9), max_tokens=40))
    found: list[int] = []
    for _ in engine.prepare(4):
        found += [token for result in engine.step() for event in result.events for token in event.token_ids]
        engine.table.check()
        assert engine.answerable
    rows = [n for n in runner.MEASURED_ROWS if n <= 4 * runner.MEASURED_ROWS_EACH]
    assert list(planner.costs.curve) == rows and min(planner.costs.curve.values()) > 0
    assert found + tokens_of(finish(engine)["a", 0]) == tokens_of(finish(alone)["a", 0])


def test_slow_passes_are_not_measured_any_further(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LONGEST_MEASURED", 0.0)
    engine = tiny_engine(model, Always(Bet("none", 0, 0)))
    assert len(list(engine.runner.measure_rows(64, {}))) == 1


def test_what_is_known_is_not_measured_again(model) -> None:
    own = tiny_engine(model).runner
    assert [rows for rows, _ in own.measure_rows(1, {1: 0.01, 2: 0.01, 4: 0.01})] == [3, 5]
    assert not list(own.measure_rows(1, {1: 1.0}))  # nor anything beyond a slow one
