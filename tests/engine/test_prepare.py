"""What a CPU measures before anybody asks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from outrider.draft.lookup import LookupDrafter
from outrider.engine import eager_runner
from tests.tiny import finish, prompt_of, request, tiny_engine, tiny_model, tokens_of


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
    rows = [n for n in eager_runner.MEASURED_ROWS if n <= 4 * eager_runner.ROWS_EACH]
    curve = planner.costs.eager.curve
    assert list(curve) == rows and min(curve.values()) > 0
    assert found + tokens_of(finish(engine)["a", 0]) == tokens_of(finish(alone)["a", 0])


def test_slow_passes_are_not_measured_any_further(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_runner, "LONGEST_MEASURED", 0.0)
    engine = tiny_engine(model)
    assert len(list(engine.runner.preparation.run(engine.planner, 64))) == 1


def test_what_is_known_is_not_measured_again(model) -> None:
    engine = tiny_engine(model)
    costs, preparation = engine.planner.costs.eager, engine.runner.preparation
    costs.curve = {1: 0.01, 2: 0.01, 4: 0.01}
    assert len(list(preparation.run(engine.planner, 1))) == 2 and costs.curve.keys() == {1, 2, 3, 4, 5}
    costs.curve = {1: 1.0}
    assert not list(preparation.run(engine.planner, 1))  # nor anything beyond a slow one


class Noted:
    """In the place of who compiles kernels ahead: what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.jobs: list[str] = []  # kernels that are not compiled yet

    @contextmanager
    def collecting(self):
        self.asked.append("collect")
        yield

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None: ...

    def drop(self) -> None: ...


def test_kernels_are_compiled_before_their_steps_and_never_beside_answers(model) -> None:
    ahead, engine = Noted(), tiny_engine(model, lag=1)
    engine.runner.ops.ahead = ahead
    engine.add(request("a", prompt_of(9), max_tokens=6))
    engine.step()
    first = len(ahead.asked)
    assert first > 1 and set(ahead.asked) == {"collect"}  # the prompt's step, and those that follow
    finish(engine)
    engine.add(request("b", prompt_of(9), max_tokens=6))
    finish(engine)
    assert ahead.asked.count("collect") <= first + 2  # each step's once
    for _ in engine.prepare(2):
        pass
    ahead.asked.clear()
    engine.add(request("c", prompt_of(9), max_tokens=6))
    finish(engine)
    assert set(ahead.asked) == {"pause"}


def test_requests_do_not_wait_for_kernels_of_drafts(model) -> None:
    """Nothing is captured until they are compiled: a launch would wait for them, and a request for the launch."""
    ahead, engine = Noted(), tiny_engine(model, drafter=LookupDrafter(), lag=1)
    engine.runner.ops.ahead, ahead.jobs = ahead, ["kernel of a draft"]
    pieces, preparation = engine.prepare(2), engine.runner.preparation
    while not engine.answerable:
        next(pieces)
    for _ in range(100):
        next(pieces)
    assert preparation.prepared and all(drafter == "none" for drafter, _ in preparation.prepared)
    engine.add(request("a", prompt_of(9), max_tokens=6))
    assert len(tokens_of(finish(engine)["a", 0])) == 6
    ahead.jobs.clear()
    for _ in pieces:
        pass
    assert any(drafter != "none" for drafter, _ in preparation.prepared)
