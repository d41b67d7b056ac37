"""More sequences than steps were prepared for: what is missing is captured between steps, and tokens stay the same.

A stand-in for graphs replays a step's operations into the same memory, as in test_prompts_beside.py.
"""

from __future__ import annotations

import queue
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.device.buckets import ALONE, BEYOND, MOST_TOGETHER, SIZES, chunk_sizes, size_of, sizes_up_to
from outrider.device.capture import StepShape
from outrider.engine import driver as driver_module
from outrider.engine.driver import Driver
from outrider.engine.engine import Engine
from outrider.engine.graph_shapes import usual_shape
from outrider.types import NO_TREE, CapturedShape, TreeShape
from tests.engine.test_prompts_beside import arriving, bounded, make_engine, prepared
from tests.tiny import finish, noised_model, prompt_of, request, run_alone, tiny_model

MANY = 8
PLAIN = StepShape(8, NO_TREE, (), 1024, False, edited=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(context=1600)


@pytest.fixture(scope="module")
def small():
    return noised_model(0.15, context=1600)


def many(count: int = MANY, tokens: int = 60) -> list:
    return [
        request(f"r{i}", prompt_of(5 + i, i), max_tokens=tokens, seed=i, temperature=0.8 * (i % 2))
        for i in range(count)
    ]


def launches(engine: Engine) -> list[tuple[StepShape, bool, int]]:
    """Of the steps launched from now on: their shape, whether it was captured, and how many were captured meanwhile."""
    found, send = [], engine.runner._send

    def counted(step, *rest):
        before = len(engine.captures)
        launched = send(step, *rest)
        found.append((step.shape, not step.record.uncaptured, len(engine.captures) - before))
        return launched

    engine.runner._send = counted
    return found


@pytest.mark.parametrize("default", ["none", "lm"])
def test_a_batch_larger_than_what_was_prepared_is_soon_captured(model, small, default) -> None:
    requests = many()
    alone = {one.id: run_alone(model, one, step_rows=600) for one in requests}
    engine = prepared(make_engine(model, small, bounded(default)), 2)
    steps = launches(engine)
    for one in requests:
        engine.add(one)
    found = finish(engine)
    assert {name: [t for e in events for t in e.token_ids] for (name, _), events in found.items()} == alone
    missing = [shape for shape, captured, _ in steps if not captured and not shape.staged]
    assert missing and len(missing) == len(set(missing))  # each was launched one by one once
    assert max(count for _, _, count in steps) == 1


def test_few_sequences_do_not_stay_in_steps_of_many(model, small) -> None:
    """Sizes in between were not prepared when many came."""
    requests = [
        *many(2 * MANY, 20),
        *(request(f"late{i}", prompt_of(7, i), max_tokens=400, seed=i) for i in range(5)),
    ]
    alone = {one.id: run_alone(model, one, step_rows=600) for one in requests}
    engine = prepared(make_engine(model, small, bounded(), max_sequences=2 * MANY), 2)
    for one in requests[: 2 * MANY]:
        engine.add(one)
    found = finish(engine)
    steps = launches(engine)
    for one in requests[2 * MANY :]:
        engine.add(one)
    found |= finish(engine)
    assert {name: [t for e in events for t in e.token_ids] for (name, _), events in found.items()} == alone
    sizes = [shape.size for shape, _, _ in steps if shape.size > 2]
    assert sizes[0] == 2 * MANY and sizes[-1] == MANY and sum(not captured for _, captured, _ in steps) == 1


def test_the_planner_learns_what_such_a_step_takes(model, small) -> None:
    """Not from the launch that was not captured: it says nothing of those to come."""
    engine = prepared(make_engine(model, small, bounded()), 2)
    costs, plain = engine.planner.costs.captured, CapturedShape("none", NO_TREE, MANY)
    for one in many():
        engine.add(one)
    uncaptured = 0
    while not engine.idle:
        for result in engine.step():
            uncaptured += result.record.uncaptured and result.record.decodes_only
            assert plain not in costs.device or not result.record.uncaptured
    assert uncaptured == 1 and plain in costs.device and costs.plain(MANY) is not None
    assert plain in costs.ahead and MANY in engine.runner.sizes.made


def test_prompts_beside_more_sequences_are_read_in_steps_that_others_can_use(model, small) -> None:
    """Chunks come in every length: their steps are launched with the room that preparing gives them."""
    requests = [request(f"r{i}", prompt_of(30 + 11 * i, i), max_tokens=40, seed=i) for i in range(2 * MANY)]
    alone = {one.id: run_alone(model, one, step_rows=600) for one in requests}
    engine = prepared(make_engine(model, small, bounded()), 2)
    steps = launches(engine)
    assert arriving(engine, requests, every=3) == alone
    beside = [(shape, captured) for shape, captured, _ in steps if shape.staged and shape.size > 2]
    assert beside and {(one.staged, one.wanted) for one, _ in beside} <= set(chunk_sizes(MANY))
    missing = [shape for shape, captured in beside if not captured]
    assert len(missing) == len(set(missing))
    assert {rows for size, rows in engine.planner.costs.captured.with_prompts if size > 2}


def test_prompts_beside_others_fill_a_captured_step_and_no_more(model, small) -> None:
    """Nothing else bounds them here."""
    requests = [request(f"r{i}", prompt_of(1500, i), max_tokens=9, seed=i) for i in range(5)]
    engine = prepared(make_engine(model, small, bounded(), step_rows=8192), 2)
    engine.add(request("stream", prompt_of(9), max_tokens=30))
    for _ in range(4):
        engine.step()
    steps = launches(engine)
    for one in requests:
        engine.add(one)
    finish(engine)
    beside = [shape for shape, _, _ in steps if shape.staged and shape.size]
    assert len(beside) > 3 and {shape.staged for shape in beside} <= {rows for rows, _ in chunk_sizes(MANY)}
    assert max(shape.size + shape.staged for shape in beside) <= MOST_TOGETHER


def test_what_is_usual() -> None:
    """Without staged rows every shape; with them, those of the rooms that steps are prepared with."""
    assert usual_shape(PLAIN, 8) == PLAIN
    alone = replace(PLAIN, size=0, staged=200, wanted=3)
    assert usual_shape(alone, 0) == replace(alone, staged=256, wanted=dict(ALONE)[256], filtered=True)
    beside = usual_shape(replace(PLAIN, size=9, staged=70, wanted=17), 16)
    assert beside is not None and (beside.size, beside.staged, beside.wanted) == (16, 512, 64)
    drafts = replace(PLAIN, tree=TreeShape(4, 4), drafters=("lm",), staged=30, wanted=2)
    assert usual_shape(drafts, 8).staged == 128
    for odd in (
        dict(wanted=65, staged=512),
        dict(staged=5000, wanted=1),
        dict(staged=64, wanted=9, branching=16),
    ):
        assert usual_shape(replace(PLAIN, **odd), 8) is None
    for shape in (alone, drafts, replace(PLAIN, staged=600, wanted=40)):
        usual = usual_shape(shape, shape.size)
        assert usual.has_room_for(shape) and usual_shape(usual, shape.size) == usual


@pytest.mark.parametrize("count", [1, 512, 513, 1000, 1024, 1025, 1300, 3000])
def test_every_number_of_sequences_has_one_of_few_sizes(count: int) -> None:
    size = size_of(count)
    assert size >= count and (size in SIZES or size % BEYOND == 0)
    assert sizes_up_to(count)[-1] == size and sizes_up_to(count) == sorted(set(sizes_up_to(count)))


class Answering:
    """Keeps a driver's engine busy: the next request comes when one ends."""

    def __init__(self, driver: Driver, count: int) -> None:
        self.driver, self.received, self.number = driver, queue.SimpleQueue(), 0
        self.found: dict[str, list[int]] = {}
        for _ in range(count):
            self.ask()

    def ask(self) -> None:
        one = request(f"s{self.number}", prompt_of(6, self.number), max_tokens=20, seed=self.number)
        self.number += 1
        self.found[one.id] = []
        self.driver.submit([one], self.received.put)

    def until(self, over, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.driver.run(over):
            assert time.monotonic() < end
            event = self.received.get(timeout=30)
            assert not isinstance(event, BaseException), event
            self.found[event.request_id] += event.token_ids
            if event.finish_reason:
                self.ask()


def test_preparing_goes_on_under_steady_load(model, small, monkeypatch) -> None:
    """In single pieces between steps, with steps between them: no step waits for two."""
    monkeypatch.setattr(driver_module, "PATIENCE", 0.0)
    monkeypatch.setattr(driver_module, "BUSY_SHARE", 0.5)
    monkeypatch.setattr(driver_module, "QUIET", 1e6)
    driver = Driver(lambda: make_engine(model, small, bounded("lm")))
    engine, order = driver.engine, []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (order.append("step"), step())[1])

    def pieces():
        for _ in engine.prepare(4):
            order.append("piece" if not engine.idle else "idle")
            yield

    try:
        load = Answering(driver, 3)
        load.until(lambda: load.number > 3)
        driver.run(lambda: setattr(driver, "idle_work", pieces()))
        load.until(lambda: driver.idle_work is None)
        done = order[: max(i for i, one in enumerate(order) if one != "step")]
        assert done.count("piece") > 20 and "idle" not in done
        assert not [1 for pair in pairwise(done) if pair == ("piece", "piece")]
        assert engine.runner.preparation.prepared >= {("none", 4), ("lm", 4), ("lookup", 4)}
    finally:
        driver.close()
    for name, tokens in load.found.items():
        number = int(name[1:])
        one = request(name, prompt_of(6, number), max_tokens=20, seed=number)
        assert tokens == run_alone(model, one, step_rows=600)[: len(tokens)]


def test_beside_requests_a_piece_takes_its_share_and_no_more(model, small, monkeypatch) -> None:
    monkeypatch.setattr(driver_module, "PATIENCE", 0.0)
    monkeypatch.setattr(driver_module, "BUSY_SHARE", 0.2)
    monkeypatch.setattr(driver_module, "QUIET", 1e6)
    driver = Driver(lambda: make_engine(model, small, bounded()))
    spans: list[tuple[float, float]] = []

    def work():
        while True:
            begun = time.monotonic()
            time.sleep(0.01)
            spans.append((begun, time.monotonic()))
            yield

    try:
        driver.engine.runner.preparation.on_demand = False
        load = Answering(driver, 1)
        load.until(lambda: load.number > 1)
        driver.run(lambda: setattr(driver, "idle_work", work()))
        load.until(lambda: len(spans) >= 5)
        for (begun, ended), (after, _) in pairwise(spans):
            assert after - ended >= 3.9 * (ended - begun)
    finally:
        driver.close()


def test_more_sequences_than_were_prepared_for_are_prepared_for(model, small, monkeypatch) -> None:
    """Also their drafts and their prompts, bit by bit."""
    monkeypatch.setattr(driver_module, "PATIENCE", 0.0)
    monkeypatch.setattr(driver_module, "BUSY_SHARE", 0.9)
    engine = prepared(make_engine(model, small, bounded("lm")), 2)
    driver = Driver(lambda: engine)
    try:
        assert engine.prepare_more() is None
        load = Answering(driver, 7)
        load.until(lambda: ("lm", 8) in engine.runner.preparation.prepared)
        assert engine.runner.preparation.sequences == 8
    finally:
        driver.close()
    assert make_engine(model, small, bounded()).prepare_more() is None  # on demand, nothing is prepared ahead


def test_what_is_needed_now_is_prepared_first(model, small) -> None:
    engine = make_engine(model, small, bounded("lm"))
    preparation, order = engine.runner.preparation, []
    steps = preparation.steps
    preparation.steps = lambda size, drafter: (order.append((drafter, size)), steps(size, drafter))[1]
    pieces = engine.prepare(8)
    next(pieces)
    for one in many(8, 400):
        engine.add(one)
    while not engine.idle:
        engine.step()
        if ("lm", 8) in preparation.prepared:
            break
        next(pieces)
    plain, drafted = ([size for name, size in order if (name == "none") is kind] for kind in (True, False))
    assert plain[-1] in (1, 8) and drafted[0] == 8


class Compiling:
    """In the place of who compiles kernels ahead: kernels are done when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[int] = []
        self.collected = 0

    @contextmanager
    def collecting(self):
        yield
        self.collected += 1
        self.jobs.append(self.collected)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def test_beside_requests_nothing_waits_for_kernels(model, small) -> None:
    """Those of a few steps are compiled at a time, and those steps are captured once they are done."""
    engine = prepared(make_engine(model, small, bounded("lm")), 1)
    ahead = engine.runner.ops.ahead = Compiling()
    for one in many(2, 400):
        engine.add(one)
    engine.step()
    pieces, captures, collected = engine.prepare(2), len(engine.captures), 0
    while not engine.idle and next(pieces, "done") != "done":
        engine.step()
        if ahead.collected == collected and ahead.jobs:  # it waits for them
            assert len(engine.captures) == captures and len(ahead.jobs) <= 12
            ahead.jobs.clear()
        captures, collected = len(engine.captures), ahead.collected
    assert not engine.idle and engine.runner.preparation.prepared >= {("none", 2), ("lm", 2)}


@pytest.mark.parametrize("prompts", [3, 40])
def test_prompts_that_fill_a_step_do_not_wait_for_others(model, small, prompts) -> None:
    """Waiting for one step gathers nothing then."""
    engine = prepared(make_engine(model, small, bounded(), max_sequences=64, cache_bytes=1 << 25), 4)
    engine.planner.costs.pause.pays = lambda decoding, waiting: True
    engine.planner.prompt_rows = lambda *given: 600
    engine.add(request("stream", prompt_of(9), max_tokens=60))
    for _ in range(4):
        engine.step()
    rows = []
    for i in range(prompts):
        engine.add(request(f"r{i}", prompt_of(50, i), max_tokens=4))
    for _ in range(3):
        engine.step()
        engine.add(request(f"late{len(rows)}", prompt_of(50), max_tokens=4))
        rows.append(sum(work.prompt_rows for work in engine.in_flight[-1].packed.work))
    assert [one > 0 for one in rows] == ([True, False, True] if prompts == 3 else [True, True, True])
