"""Prompts among answers with captured steps: a stand-in for graphs replays a step's operations into the same memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control import prefill
from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.device.buckets import CHUNK_SIZES, MAX_BESIDE, MAX_LOGITS, chunk_sizes
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.warm_up import GraphPreparation
from outrider.types import NO_TREE, CapturedShape, DraftPlan, Request, Speculation
from tests.tiny import (
    Always,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    run_alone,
    tiny_engine,
    tiny_model,
    tokens_of,
)


class Replayed:
    """What a CUDA graph does: the operations once more, results where they were when it was captured."""

    def __init__(self, work, result) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        for there, new in zip(self.result, self.work(), strict=True):
            if there is not None and there is not new:
                there.copy_(new)


def record(log: list):
    def capture(work):
        result = work()
        log.append(work)
        return Replayed(work, result), result

    return capture


@pytest.fixture(scope="module")
def model():
    return tiny_model(context=1600)


@pytest.fixture(scope="module")
def small():
    return noised_model(0.15, context=1600)


def make_engine(model, small, planner, captured: bool = True, **options) -> Engine:
    """With the log of what was captured, as `captures`."""

    def drafters(cache):
        return {"lookup": LookupDrafter(), "lm": lm_drafter(small, cache)}

    options = {"step_rows": 600, "max_sequences": 8, "cache_bytes": 1 << 24, **options}
    engine = tiny_engine(model, planner, drafters=drafters, lag=1, **options)
    engine.captures = []
    if captured:
        made = engine.runner
        engine.runner = GraphRunner(
            made.model,
            engine.cache,
            engine.drafters,
            made.ops,
            made.run,
            record(engine.captures),
            1,
            made.default,
        )
    return engine


def bounded(default: str = "none", **guards) -> Planner:
    return Planner(default, choices=(default, "lookup") if default != "none" else (), guards=Guards(**guards))


def prepared(engine: Engine, sequences: int = 8) -> Engine:
    for _ in engine.prepare(sequences):
        pass
    return engine


def step_shapes(engine: Engine) -> list:
    """Of the steps launched from now on."""
    found, send = [], engine.runner._send

    def seen(step, *rest):
        found.append((step.shape, engine.runner.graphs.captured(step.shape)))
        return send(step, *rest)

    engine.runner._send = seen
    return found


def arriving(engine: Engine, requests: list[Request], every: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    waiting, steps = list(requests), 0
    while waiting or not engine.idle:
        if waiting and steps % every == 0:
            engine.add(waiting.pop(0))
        for event in (event for result in engine.step() for event in result.events):
            found[event.request_id] += event.token_ids
        steps += 1
    engine.table.check()
    return found


def some_requests(count: int, seed: int = 0, **asked) -> list[Request]:
    dice = random.Random(seed)
    return [
        request(
            f"r{i}", prompt_of(dice.choice([3, 40, 90, 200, 400]), i + seed), max_tokens=dice.randint(5, 40),
            temperature=dice.choice([0, 0.8]), top_p=dice.choice([1.0, 0.8]), seed=i, **asked,
        )
        for i in range(count)
    ]  # fmt: skip


def test_long_prompts_alone_are_read_in_captured_steps(model, small) -> None:
    """With little padding."""
    engine = prepared(make_engine(model, small, bounded(), step_rows=2048), 2)
    for length in (520, 700, 1000, 1200, 1500):
        shapes, one = step_shapes(engine), request("r", prompt_of(length, length), max_tokens=2)
        engine.add(one)
        assert tokens_of(finish(engine)["r", 0]) == run_alone(model, one, step_rows=2048)
        shape, captured = shapes[0]
        assert captured and length <= shape.staged <= 4 / 3 * length + 64, shape


def test_many_short_prompts_at_once_are_read_in_captured_steps(model, small) -> None:
    """No step is captured with logits for all of them."""
    requests = [request(f"r{i}", prompt_of(4, i), max_tokens=3, seed=i) for i in range(MAX_LOGITS + 9)]
    engine = prepared(make_engine(model, small, bounded(), max_sequences=128), 128)
    steps = step_shapes(engine)
    for one in requests:
        engine.add(one)
    found = finish(engine)
    assert [captured for _, captured in steps] == [True] * len(steps)
    assert tokens_of(found["r0", 0]) == run_alone(model, requests[0], step_rows=600)
    assert len(found) == len(requests)


@pytest.mark.parametrize("default", ["none", "lm", "lookup"])
def test_prompts_that_arrive_are_read_in_captured_steps(model, small, default) -> None:
    """Beside answers and their drafts, and nothing is captured for it once everything is prepared."""
    requests = some_requests(6)
    alone = {one.id: run_alone(model, one, step_rows=600) for one in requests}
    engine = prepared(make_engine(model, small, bounded(default, prefill_slowdown=0.4), max_sequences=4), 4)
    captures, steps = len(engine.captures), step_shapes(engine)
    assert arriving(engine, requests, every=7) == alone
    assert len(engine.captures) == captures > 0
    beside = [(shape, captured) for shape, captured in steps if shape.staged and shape.size]
    assert beside and not [shape for shape, captured in steps if not captured]
    assert {(shape.staged, shape.wanted) for shape, _ in beside} <= set(chunk_sizes(2))


def test_drafts_go_on_beside_prompts(model, small) -> None:
    """Chains that there are captured steps for, whatever is drafted otherwise."""
    planner = Always(DraftPlan("lm", 15, 4))
    planner.choices = ("lm",)
    planner.prompt_rows = lambda decoding, waited, waiting, pending: 100
    engine = prepared(make_engine(model, small, planner), 2)
    steps = step_shapes(engine)
    [stream] = engine.add(request("stream", prompt_of(9), max_tokens=80, temperature=0.7))
    for _ in range(4):
        engine.step()
    engine.add(request("late", prompt_of(400, 1), max_tokens=3, speculation=False))
    finish(engine)
    beside = [shape for shape, captured in steps if shape.staged and shape.size and captured]
    assert len(beside) >= 4 and {shape.tree for shape in beside} == {(MAX_BESIDE, MAX_BESIDE)}
    assert (4, 15) in {shape.tree for shape, _ in steps}
    assert stream.output == run_alone(model, request("stream", prompt_of(9), max_tokens=80, temperature=0.7))


def test_a_last_chunk_of_one_token_is_not_drafted_for_by_the_host(model, small, monkeypatch) -> None:
    """The chunk before it is in flight, so it cannot join the persistent batch; a draft by the host would hold up all
    others.
    """
    late = request("late", prompt_of(101, 1), max_tokens=3)
    engine = prepared(make_engine(model, small, bounded("lm")), 2)
    engine.planner.prompt_rows = lambda decoding, waited, waiting, pending: 50
    called, propose = [], type(engine.drafters["lm"]).propose
    monkeypatch.setattr(
        type(engine.drafters["lm"]),
        "propose",
        lambda self, *given: called.append(given) or propose(self, *given),
    )
    engine.add(request("stream", prompt_of(9), max_tokens=60))
    for _ in range(6):
        engine.step()
    engine.add(late)
    rows = [result.record.prompt_rows for result in all_steps(engine)]
    assert rows.count(50) == 2 and rows.count(1) == 1 and not called


def test_until_steps_are_prepared_they_are_captured_when_first_needed(model, small) -> None:
    engine = make_engine(model, small, bounded())
    [one] = engine.add(request("a", prompt_of(5), max_tokens=20))
    finish(engine)
    assert engine.captures and one.output == run_alone(model, one.request)


@pytest.mark.parametrize("steps", [0, 2])
def test_prompts_that_come_together_are_read_in_one_captured_step(model, small, steps, monkeypatch) -> None:
    """Beside an answer, which pauses once; without that they take a chunk each."""
    monkeypatch.setattr(prefill, "BURST_STEPS", steps)
    guards = dict(prefill_slowdown=0.01, prefill_wait=1e9)
    engine = prepared(make_engine(model, small, bounded(**guards), step_rows=2048))
    engine.planner.costs.captured.with_prompts = {
        (size, rows): float(rows) for size in (1, 2, 4, 8) for rows, _ in chunk_sizes(size)
    }
    requests = [request(f"r{i}", prompt_of(300, i), max_tokens=6, seed=i, temperature=0.8) for i in range(4)]
    engine.add(request("stream", prompt_of(9), max_tokens=40))
    for _ in range(4):
        engine.step()
    captures, shapes = len(engine.captures), step_shapes(engine)
    for one in requests:
        engine.add(one)
    found = finish(engine)
    for one in requests:
        assert tokens_of(found[one.id, 0]) == run_alone(model, one, step_rows=2048)
    assert len(engine.captures) == captures and all(captured for _, captured in shapes)
    beside = [shape.staged for shape, _ in shapes if shape.staged and shape.size]
    assert beside[0] == (chunk_sizes(1)[-1][0] if steps else CHUNK_SIZES[0][0])


@pytest.mark.parametrize("ready", [False, True])
def test_prompt_rows_are_bounded_once_steps_are_prepared(model, small, ready) -> None:
    engine = make_engine(model, small, bounded(prefill_slowdown=0.01, prefill_wait=1e9))
    if ready:
        costs = prepared(engine, 2).planner.costs.captured
        costs.device |= {CapturedShape("none", NO_TREE, size): 1.0 for size in (1, 2)}
        costs.with_prompts |= {(size, rows): float(rows) for size in (1, 2) for rows, _ in chunk_sizes(size)}
    engine.add(request("stream", prompt_of(9), max_tokens=40))
    for _ in range(4):
        engine.step()
    engine.add(request("late", prompt_of(400, 1), max_tokens=3))
    most = max(result.record.prompt_rows for result in all_steps(engine))
    assert most == (CHUNK_SIZES[0][0] if ready else 400)


@pytest.mark.parametrize("pays", [False, True])
def test_after_a_step_with_prompt_rows_new_prompts_may_wait_for_one_step(
    model, small, pays, monkeypatch
) -> None:
    engine = prepared(make_engine(model, small, bounded()))
    monkeypatch.setattr(engine.planner.costs.pause, "pays", lambda decoding, waiting: pays)
    requests = [request(f"r{i}", prompt_of(20, i), max_tokens=12, seed=i) for i in range(5)]
    rows, results = [], []
    for one in requests:  # one arrives before every step
        engine.add(one)
        results += engine.step()
        rows.append(any(work.prompt_rows for work in engine.in_flight[-1].packed.work))
    # Nothing decodes in the first two: the first prompt is in flight then.
    assert rows == ([True, True, False, True, False] if pays else [True] * 5)
    events = [event for result in [*results, *all_steps(engine)] for event in result.events]
    for one in requests:
        said = [token for event in events if event.request_id == one.id for token in event.token_ids]
        assert said == run_alone(model, one)


def test_a_step_counts_what_was_made_while_somebody_waited(model, small, monkeypatch) -> None:
    engine = make_engine(model, small, bounded())
    monkeypatch.setattr(GraphPreparation, "counts", property(lambda self: (len(engine.captures), 0)))
    engine.counts = 0, 0
    prepared(engine, 1)
    assert engine.captures
    engine.add(request("a", prompt_of(5), max_tokens=20))
    assert sum(result.record.graphs_captured for result in all_steps(engine)) == 0
    other = make_engine(model, small, bounded())
    monkeypatch.setattr(GraphPreparation, "counts", property(lambda self: (len(other.captures), 0)))
    other.counts = 0, 0
    other.add(request("a", prompt_of(5), max_tokens=20))
    assert sum(result.record.graphs_captured for result in all_steps(other)) == len(other.captures) > 0


def undrafted(one: Request) -> Request:
    return replace(one, params=replace(one.params, speculation=Speculation.of(False)))


def all_steps(engine: Engine) -> list:
    results = []
    while not engine.idle:
        results += engine.step()
    return results


@settings(max_examples=6)
@given(st.data())
def test_any_arrivals(model, small, data) -> None:
    """With filters, penalties, log-probabilities and drafts of their own among them, and room for few."""
    kinds: list[dict] = [
        {}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"speculation": {"drafter": "lm", "depth": 3}},
        {"min_tokens": 4}, {"speculation": False}, {"speculation": {"drafter": "lookup", "mode": "rejection"}},
    ]  # fmt: skip
    requests = [
        request(
            f"r{i}", prompt_of(data.draw(st.integers(1, 300)), i), max_tokens=data.draw(st.integers(4, 25)),
            temperature=0.0, seed=i, **data.draw(st.sampled_from(kinds)),
        )
        for i in range(data.draw(st.integers(2, 6)))
    ]  # fmt: skip
    alone = {one.id: run_alone(model, undrafted(one), step_rows=600) for one in requests}
    engine = engines(model, small)
    assert arriving(engine, requests, every=data.draw(st.integers(1, 9))) == alone


MADE: list[Engine] = []


def engines(model, small) -> Engine:
    """One for all: preparing takes most of the time."""
    if not MADE:
        MADE.append(
            prepared(make_engine(model, small, bounded("lm", prefill_slowdown=0.4), max_sequences=4), 4)
        )
    return MADE[0]


def test_plain_passes_in_a_row_need_a_captured_step(model, small) -> None:
    engine = prepared(make_engine(model, small, bounded()), 1)
    engine.runner.runs.passes[1] = 8
    engine.runner.runs.observe = lambda *_: None
    steps = step_shapes(engine)
    [one] = engine.add(request("a", prompt_of(5), max_tokens=30))
    finish(engine)
    assert all(captured for _, captured in steps) and one.output == run_alone(model, one.request)
    for shape in [shape for shape in engine.runner.graphs.steps if shape.passes > 1]:
        del engine.runner.graphs.steps[shape]
    engine.runner.graphs._serving.clear()
    del steps[:]
    engine.add(request("b", prompt_of(5), max_tokens=30))
    finish(engine)
    assert {shape.passes for shape, _ in steps} == {1} and all(shape.tree == NO_TREE for shape, _ in steps)


def test_nobody_reads_all_at_once(model, small) -> None:
    planner = Always(DraftPlan("lm", 2, 2))
    engine = make_engine(model, small, planner, captured=False, step_rows=2048)
    requests = [request(f"r{i}", prompt_of(350, i), max_tokens=12, seed=i) for i in range(4)]
    sequences = [engine.add(one)[0] for one in requests]
    found = [result.record.drafter_prefill for result in all_steps(engine)]
    read = [one.tokens for one in found if one]
    assert len(read) >= 4 and max(read) <= 512
    assert [s.output for s in sequences] == [run_alone(model, one, step_rows=600) for one in requests]
