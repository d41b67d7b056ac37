"""Steps in flight: none is waited for, nobody's step changes by what another asks for, and each is counted once."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.draft.drafters import MAX_FAULTS
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.types import Draft, DraftPlan, Request, Speculation
from tests.tiny import (
    VOCAB,
    Always,
    finish,
    lm_drafter,
    noised_model,
    packed,
    prompt_of,
    request,
    run_alone,
    tiny_engine,
    tiny_model,
    tokens_of,
)


class Guessing:
    """A drafter of somebody's own: the same tokens whatever the text."""

    def start(self, sequence) -> None: ...
    def accept(self, sequence, draft, verdict) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, draft_plans):
        return [Draft.chain([7, 8, 9, 10][: draft_plan.nodes]) for draft_plan in draft_plans]


class Even:
    """A grammar of even tokens."""

    problem, complete = None, False

    def copy(self) -> Even:
        return self

    def bits(self, path) -> np.ndarray:
        return packed(torch.arange(VOCAB) % 2 == 0)

    def advance(self, token: int) -> None:
        assert token % 2 == 0


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def small():
    return noised_model()


def make_engine(model, small, lag: int | None, draft_plan: DraftPlan, **settings) -> Engine:
    def drafters(cache):
        return {
            "lookup": LookupDrafter(),
            "lm": lm_drafter(small, cache),
            "early_exit": EarlyExitDrafter(model, cache.store, cache.table, 1),
            "own": Guessing(),
        }

    engine = tiny_engine(model, Always(draft_plan), drafters=drafters, lag=lag, **settings)
    if lag is not None:
        engine.runner.runs.observe = lambda *_: None  # several plain passes a step go by the clock
    return engine


class Watched:
    """An engine's steps: the work each was launched with, and what came of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.launch = engine, engine.runner.launch
        self.work: list[list] = []
        self.results: list = []
        self.tokens: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)  # step by step
        engine.runner.launch = self.launched

    def launched(self, work, plan):
        self.work.append(list(work))
        return self.launch(work, plan)

    def step(self) -> list:
        results = self.engine.step()
        self.results += results
        for event in (event for result in results for event in result.events):
            self.tokens[event.request_id].append(event.token_ids)
        return results


@pytest.mark.parametrize(
    "draft_plan",
    [DraftPlan(), DraftPlan("lm", 3, 3), DraftPlan("lookup", 4, 4)],
    ids=lambda draft_plan: draft_plan.drafter,
)
def test_nothing_waits_for_a_prompt_that_arrives(model, small, draft_plan) -> None:
    """While a long prompt is read chunk by chunk, whoever decodes moves in every step, and there is always one in
    flight.
    """
    watched = Watched(make_engine(model, small, 1, draft_plan, step_rows=32))
    engine = watched.engine
    decoding = [engine.add(request(f"d{i}", prompt_of(5, i), max_tokens=150))[0] for i in range(4)]
    for _ in range(4):
        watched.step()
    [late] = engine.add(request("late", prompt_of(150, 9), max_tokens=20))
    first = len(watched.work)
    while late.cached + late.launched < late.prompt_len:
        results = watched.step()
        assert len(results) == len(engine.in_flight) == 1
        assert set(decoding) <= {one.sequence for one in watched.work[-1]}
    chunks = [one for work in watched.work[first:] for one in work if one.sequence is late]
    assert len(chunks) > 4 and sum(one.known for one in chunks) == 150
    assert all(one.start == sum(other.known for other in chunks[:i]) for i, one in enumerate(chunks))
    for _ in range(6):  # nor when it joins them
        results = watched.step()
        assert len(results) == len(engine.in_flight) == 1
        assert set(decoding) <= {one.sequence for one in watched.work[-1]}
    assert {event.request_id for result in watched.results[5:] for event in result.events} >= {"d0", "late"}
    for result in watched.results[5:]:
        moved = {event.request_id for event in result.events}
        assert moved >= {s.request.id for s in decoding if not s.finish_reason}


ASKED = {
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": True},
    "penalties": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 4.0}},
    "bad words": {"bad_word_ids": [(3,), (7, 9)]},
    "min tokens": {"min_tokens": 20},
    "prediction": {"prediction": prompt_of(9, 3)},
    "own drafter": {"speculation": {"drafter": "own", "depth": 3}},
    "rejection": {"speculation": {"drafter": "lm", "mode": "rejection", "depth": 3}},
    "lossy": {"speculation": {"drafter": "lm", "mode": "lossy", "depth": 3}},
    "a tree": {"speculation": {"drafter": "lm", "tree": [2, 2]}},
    "very deep": {"speculation": {"drafter": "lm", "depth": 20}},
    "off": {"speculation": False},
    "filters": {"top_p": 0.7, "top_k": 20},
    "prompt logprobs": {"prompt_logprobs": 1},
}


def ask(name: str, **asked) -> Request:
    if asked.pop("grammar", False):
        asked["grammar"] = Even()
    return request(name, prompt_of(12, 7), max_tokens=25, temperature=0.8, seed=4, **asked)


def undrafted(one: Request) -> Request:
    return replace(one, params=replace(one.params, speculation=Speculation()))


def steps_of_others(engine: Engine, special: Request) -> tuple[dict, dict]:
    """What every step brought the plain sequences beside one, which arrives while they decode; and their drafts."""
    watched = Watched(engine)
    plain = [
        engine.add(request(f"p{i}", prompt_of(6, i) * 2, max_tokens=60, temperature=0.7, seed=i))[0]
        for i in range(3)
    ]
    for _ in range(3):
        watched.step()
    engine.add(special)
    while not engine.idle:
        watched.step()
    tokens = {s.request.id: watched.tokens[s.request.id] for s in plain}
    return tokens, {s.request.id: (s.draft_counts, s.steps) for s in plain}


@pytest.fixture(scope="module")
def undisturbed(model, small):
    return steps_of_others(make_engine(model, small, 1, DraftPlan("lm", 3, 3)), ask("plain"))


@pytest.mark.parametrize("kind", ASKED)
def test_what_a_request_asks_for_changes_its_own_rows_only(model, small, undisturbed, kind) -> None:
    """Step by step the others have the tokens and drafts that they have beside a plain one."""
    special = ask("special", **ASKED[kind])
    engine = make_engine(model, small, 1, DraftPlan("lm", 3, 3))
    assert steps_of_others(engine, special) == undisturbed
    assert all(tokens for tokens in undisturbed[0].values())
    assert sum(size for counts, _ in undisturbed[1].values() for size, _ in counts) > 30
    if kind not in ("rejection", "lossy"):
        engine = make_engine(model, small, 1, DraftPlan("lm", 3, 3))
        engine.add(special)
        assert tokens_of(finish(engine)["special", 0]) == run_alone(model, undrafted(special))


# ------------------------------------------------------------------------------------------------- each counted once


KINDS = [name for name in ASKED if name not in ("very deep", "off", "min tokens")]  # answers may be short


@settings(max_examples=8, suppress_health_check=list(HealthCheck))  # an example is long
@given(data=st.data())
def test_every_step_is_counted_once(model, small, data) -> None:
    """Under aborts and preemptions, however far the host is behind: as many results as steps, and the tokens of their
    records are those that were emitted.
    """
    lag = data.draw(st.sampled_from([None, 0, 1, 2]), "lag")
    dice = random.Random(data.draw(st.integers(0, 10**6), "seed"))
    room = data.draw(st.sampled_from([120, 4000]), "slots")
    draft_plan = data.draw(
        st.sampled_from(
            [DraftPlan(), DraftPlan("lm", 3, 3), DraftPlan("lookup", 4, 4), DraftPlan("own", 2, 2)]
        ),
        "draft_plan",
    )
    cache_bytes, size = room * model.config.kv_bytes_per_token, {"step_rows": 24, "max_sequences": 8}
    watched = Watched(make_engine(model, small, lag, draft_plan, cache_bytes=cache_bytes, **size))
    engine, sequences, aborted = watched.engine, [], set()
    waiting = [
        request(f"r{i}", prompt_of(dice.randint(1, 40), i), {1}, max_tokens=dice.randint(1, 25), temperature=0.8,
                n=dice.choice([1, 1, 2]), **plain_or(dice))
        for i in range(6)
    ]  # fmt: skip
    while waiting or not engine.idle:
        if waiting and (engine.idle or dice.random() < 0.4):
            sequences += engine.add(waiting.pop())
        for result in watched.step():
            record = result.record
            assert record.emitted == sum(len(event.token_ids) for event in result.events)
            assert record.sequences >= len(result.events) and record.accepted <= record.drafted
            assert record.known >= record.sequences
        if dice.random() < 0.08 and engine.live:
            gone = dice.choice(sorted(engine.live))
            aborted.add(gone)
            engine.abort(gone)
    assert len(watched.results) == len(watched.work) > 0
    emitted = sum(result.record.emitted for result in watched.results)
    assert emitted == sum(len(s.output) for s in sequences)
    assert emitted == sum(len(tokens) for some in watched.tokens.values() for tokens in some)
    assert {s.request.id for s in sequences if s.finish_reason == "abort"} <= aborted
    assert all(s.finish_reason and not s.launched for s in sequences if s.request.id not in aborted)
    engine.table.prefix.clear()
    assert engine.table.used == 0


def plain_or(dice: random.Random) -> dict:
    """What a request asks for beside tokens: nothing, more often than not."""
    asked = dict(ASKED[dice.choice(KINDS)]) if dice.random() < 0.5 else {}
    if asked.pop("grammar", False):
        asked["grammar"] = Even()
    return asked


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("verb", ["propose_resident", "catch_up"])
@pytest.mark.parametrize("times", [1, 10**9])
def test_a_drafter_that_fails_in_a_resident_step_costs_its_drafts(model, small, verb, times) -> None:
    """The step goes on without them. Who fails again and again is left alone; the others still draft."""
    requests = [
        request(f"r{i}", prompt_of(6, i) * 3, max_tokens=40, temperature=0.7, seed=i) for i in range(3)
    ]
    plain = {one.id: run_alone(model, one) for one in requests}
    engine = make_engine(model, small, 1, DraftPlan("lm", 3, 3))
    engine.planner.on = lambda sequence: len(sequence.output) > 5  # so that it has something to catch up on
    lm, calls = engine.drafters["lm"], []
    works = getattr(lm, verb)

    def fails(*given):
        calls.append(verb)
        if len(calls) <= times:
            raise RuntimeError("broken")
        return works(*given)

    setattr(lm, verb, fails)
    sequences = [engine.add(one)[0] for one in requests]
    finish(engine)
    assert {s.request.id: s.output for s in sequences} == plain
    engine.table.prefix.clear()
    assert engine.table.used == 0
    assert engine.drafters.faults == {"lm": min(times, MAX_FAULTS)}
    assert bool(sum(s.drafted for s in sequences)) == (times == 1)
    assert (engine.drafters.resident("lm") is None) == engine.drafters.left_alone("lm")
    [again] = engine.add(request("again", prompt_of(5) * 4, max_tokens=40, speculation={"drafter": "lookup"}))
    finish(engine)
    assert again.accepted > 0 and again.output == run_alone(model, undrafted(again.request))


def test_a_failing_drafter_is_measured_no_further(model, small) -> None:
    engine = make_engine(model, small, 1, DraftPlan("lm", 3, 3))
    engine.drafters["lm"].propose_resident = lambda *given: 1 / 0
    costs = list(engine.runner.preparation.steps(2, "lm"))
    assert [name for name, _, _ in costs] == ["none"] and engine.drafters.faults == {"lm": 1}
    assert 2 in engine.runner.sizes.made


def test_the_last_tokens_do_not_wait_for_what_is_in_flight(model, small) -> None:
    """A step was launched before anybody knew that the answer had ended: it is settled after its events were told."""
    engine, prompt = make_engine(model, small, 1, DraftPlan("none")), prompt_of(3, 9)
    answer = run_alone(model, request("a", prompt, max_tokens=6))
    engine.add(request("b", prompt, stop_ids=frozenset(answer[3:4])))
    ended = None
    while ended is None:
        ended = next((e for result in engine.step() for e in result.events if e.finish_reason), None)
    assert engine.in_flight and not engine.live and not engine.idle
    [left] = engine.step()
    assert engine.idle and not left.events and not left.record.sequences
    engine.table.check()


def test_who_waits_for_the_prompts_of_others_is_counted(model, small) -> None:
    """Somebody with a first token takes no part in the step that was launched before it was known."""
    engine = make_engine(model, small, 1, DraftPlan("none"), step_rows=64)
    for name in "ab":
        engine.add(request(name, prompt_of(60, ord(name)), max_tokens=8))
    waited, firsts = [], set()
    while not engine.idle:
        for result in engine.step():
            alive = {s.request.id for s in engine.scheduler.running}
            waited.append(
                (
                    result.record.waiting,
                    len(firsts & alive) - result.record.decoding,
                    result.record.prompt_rows,
                )
            )
            firsts |= {event.request_id for event in result.events}
    assert all(said == there for said, there, _ in waited if there >= 0)
    assert any(said and rows for said, _, rows in waited)
