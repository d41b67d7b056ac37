"""The engine's thread: what it is asked between steps, and who may not bring it down."""

from __future__ import annotations

import queue
import threading

import pytest

from outrider.engine import driver as driver_module
from outrider.engine.driver import Driver
from outrider.errors import InvalidRequest, OutriderError, UnsupportedModel
from tests.tiny import prompt_of, request, tiny_engine, tiny_model


@pytest.fixture
def driver(lag):
    made = Driver(lambda: tiny_engine(tiny_model(), lag=lag))
    yield made
    made.close()


def answers(driver: Driver, *requests) -> dict[str, list[int]]:
    received: queue.SimpleQueue = queue.SimpleQueue()
    for one in requests:
        driver.submit([one], received.put)
    tokens: dict[str, list[int]] = {one.id: [] for one in requests}
    left = len(requests)
    while left:
        event = received.get(timeout=30)
        assert not isinstance(event, BaseException), event
        tokens[event.request_id] += event.token_ids
        left -= event.finish_reason is not None
    return tokens


def test_a_listener_that_fails_loses_its_request_and_nothing_else(driver):
    def gone(event):
        raise RuntimeError("Event loop is closed")

    good = request("good", prompt_of(9))
    alone = answers(driver, good)
    driver.submit([request("bad", prompt_of(12), max_tokens=200)], gone)
    assert answers(driver, good) == alone
    driver.run(lambda: None)
    assert "bad" not in driver.engine.live
    assert driver.run(lambda: driver.engine.table.check()) is None


def test_a_refused_request_is_told_to_who_asked(driver):
    with pytest.raises(InvalidRequest, match="empty"):
        driver.submit([request("empty", [])], lambda event: None)
    assert answers(driver, request("next", prompt_of(5)))["next"]


def test_an_abort_is_heard(driver):
    received: queue.SimpleQueue = queue.SimpleQueue()
    driver.submit([request("long", prompt_of(9), max_tokens=200)], received.put)
    driver.abort("long")
    reasons = [None]
    while reasons[-1] is None:
        reasons.append(received.get(timeout=30).finish_reason)
    assert reasons[-1] == "abort"


def test_work_is_done_on_the_engines_own_thread(driver):
    assert driver.run(threading.current_thread).name == "outrider-engine"
    with pytest.raises(ZeroDivisionError):
        driver.run(lambda: 1 // 0)
    assert driver.run(lambda: 5) == 5


def test_what_fails_while_building_is_raised():
    def build():
        raise UnsupportedModel("no such thing")

    with pytest.raises(UnsupportedModel, match="no such thing"):
        Driver(build)


def test_building_may_be_waited_for_later():
    go, engine = threading.Event(), tiny_engine(tiny_model())

    def build():
        go.wait(30)
        return engine

    made = Driver(build, wait=False)
    assert not hasattr(made, "engine")
    go.set()
    assert made.wait_until_built() is engine is made.engine
    made.close()


def test_a_step_that_fails_ends_every_request_with_the_reason(driver):
    received: queue.SimpleQueue = queue.SimpleQueue()

    def broken():
        raise FloatingPointError("broken")

    driver.engine.step = broken
    driver.submit([request("r", prompt_of(5))], received.put)
    assert isinstance(received.get(timeout=30), FloatingPointError)
    with pytest.raises(OutriderError, match="the engine stopped"):
        driver.submit([request("s", prompt_of(5))], received.put)


def test_nothing_is_taken_after_closing():
    made = Driver(lambda: tiny_engine(tiny_model()))
    made.close()
    with pytest.raises(OutriderError, match="closed"):
        made.submit([request("r", prompt_of(5))], lambda event: None)


def test_requests_start_together_or_not_at_all(driver) -> None:
    received: queue.SimpleQueue = queue.SimpleQueue()
    good, bad = request("good", prompt_of(9), max_tokens=4), request("bad", [])
    with pytest.raises(InvalidRequest):
        driver.submit([good, bad], received.put)
    assert driver.run(lambda: driver.engine.idle)
    [choices] = driver.submit([good], received.put)  # its name is free again
    while received.get().finish_reason is None:
        pass
    assert len(choices[0].output) == 4


def test_spare_work_is_done_while_nobody_is_answered_and_gives_way(driver) -> None:
    pieces: list[bool] = []

    def work():
        while True:
            pieces.append(driver.engine.idle)
            yield

    alone = answers(driver, request("a", prompt_of(9), max_tokens=30))
    driver.run(lambda: setattr(driver, "idle_work", work()))
    again = answers(driver, request("a", prompt_of(9), max_tokens=30))
    assert again == alone
    while len(pieces) < 5:
        driver.run(lambda: None)
    assert all(pieces)
    driver.close()  # it does not wait for the end of it


def test_spare_work_waits_until_it_has_been_quiet_for_a_while(driver, monkeypatch) -> None:
    """Who asks right after an answer does not wait for a piece of it; before the first answer it begins at once."""
    pieces: list[int] = []

    def work():
        while True:
            pieces.append(1)
            yield

    monkeypatch.setattr(driver_module, "QUIET", 1e6)
    driver.run(lambda: setattr(driver, "idle_work", work()))
    while not pieces:
        driver.run(lambda: None)
    answers(driver, request("a", prompt_of(9), max_tokens=4))
    done = len(pieces)
    for _ in range(50):
        driver.run(lambda: None)
    assert len(pieces) == done
    monkeypatch.setattr(driver_module, "QUIET", 0.0)
    while len(pieces) == done:
        driver.run(lambda: None)


def test_spare_work_ends(driver) -> None:
    done = threading.Event()

    def work():
        yield
        done.set()

    driver.run(lambda: setattr(driver, "idle_work", work()))
    assert done.wait(10)
    driver.run(lambda: None)
    assert driver.run(lambda: driver.idle_work) is None
