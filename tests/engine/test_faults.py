"""What may break without anybody's answer suffering: drafters, one request's grammar, whoever listens."""

from __future__ import annotations

import logging
import queue
import random
from typing import Any

import numpy as np
import pytest
import torch

from outrider.draft.drafters import MAX_FAULTS
from outrider.draft.lookup import LookupDrafter
from outrider.engine.driver import Driver
from outrider.engine.engine import Engine
from outrider.types import Draft, DraftPlan, Request
from outrider.verify.grammar import GrammarState
from tests.tiny import (
    VOCAB,
    Always,
    finish,
    lm_drafter,
    packed,
    prompt_of,
    request,
    run_alone,
    tiny_engine,
    tiny_model,
    tokens_of,
)

BET = DraftPlan("test", 4, 4)
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8, "logprobs": 1},
    "edited": {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.7, "logit_bias": {3: 2.0}},
    "choices": {"temperature": 0.8, "n": 3},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        request(law, prompt_of(9 + 4 * i, i), {1, 2}, max_tokens=20, **LAWS[law])
        for i, law in enumerate(LAWS)
    ]


@pytest.fixture(scope="module")
def plain(model, requests) -> dict[tuple[str, int], list[int]]:
    return answers(tiny_engine(model), requests)


def answers(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    for one in requests:
        engine.add(one)
    return {key: tokens_of(events) for key, events in finish(engine).items()}


class Broken:
    """A drafter that guesses at random, until `fault` says what it does instead."""

    def __init__(self, fault: str = "", until: int = 10**9) -> None:
        self.fault, self.until, self.dice = fault, until, random.Random(1)
        self.asked = 0

    def start(self, sequence) -> None:
        self._trip("start")

    def accept(self, sequence, draft, verdict) -> None:
        self._trip("accept")

    def stop(self, sequence) -> None:
        self._trip("stop")

    def _trip(self, verb: str) -> None:
        if self.fault == verb:
            raise RuntimeError(f"broken in {verb}")

    def propose(self, sequences, draft_plans) -> Any:
        self.asked += 1
        drafts = [
            Draft.chain([self.dice.randrange(VOCAB) for _ in range(draft_plan.nodes)])
            for draft_plan in draft_plans
        ]
        if self.asked > self.until:
            return drafts
        self._trip("propose")
        return self._wrong(drafts)

    def _wrong(self, drafts: list[Draft]) -> Any:
        first, rest = drafts[0], drafts[1:]
        if self.fault == "dies":
            raise MemoryError
        wrong: dict[str, Any] = {
            "too few": rest,
            "too many": [*drafts, first],
            "nothing": None,
            "no drafts": [1] * len(drafts),
            "past the vocabulary": [Draft.chain([5, VOCAB]), *rest],
            "far past it": [Draft.chain([2**31]), *rest],
            "below it": [Draft.chain([5, -1]), *rest],
            "no tokens": [Draft(("a",), (-1,)), *rest],  # type: ignore[arg-type]
            "no chances": [chances(draft, float("nan"), VOCAB) for draft in drafts],
            "chances of fewer": [chances(draft, -4.0, VOCAB - 1) for draft in drafts],
        }
        return wrong.get(self.fault, drafts)


def chances(draft: Draft, value: float, vocab: int) -> Draft:
    return Draft(draft.tokens, draft.parents, torch.full((len(draft), vocab), value))


VERBS = ("start", "propose", "accept", "stop")
WRONG = (
    "dies",
    "too few",
    "too many",
    "nothing",
    "no drafts",
    "past the vocabulary",
    "far past it",
    "below it",
)
MORE = ("no tokens", "no chances", "chances of fewer")


@pytest.mark.parametrize("fault", ["", *VERBS, *WRONG, *MORE])
def test_a_drafter_that_breaks_costs_no_answer(model, requests, plain, fault, lag):
    engine = tiny_engine(model, Always(BET), Broken(fault), lag=lag)
    assert answers(engine, requests) == plain
    assert (engine.drafters.faults.get("test", 0) >= MAX_FAULTS) == bool(fault)
    engine.table.prefix.clear()
    assert engine.table.used == 0 and not engine.writers and engine.scheduler.idle


@pytest.mark.parametrize("fault", ["propose", "no chances", "past the vocabulary"])
@pytest.mark.parametrize("block", [True, False])
def test_under_the_ratio_test_a_broken_drafter_is_no_drafter(model, fault, block):
    """Its guesses are worth nothing, so that what is drawn is what would be drawn without any."""
    how = {"mode": "rejection", "block": block}
    one = request("r", prompt_of(12), {1}, temperature=0.8, max_tokens=30, speculation=how)
    alone = tiny_engine(model, Always(DraftPlan()))
    alone.add(one)
    engine = tiny_engine(model, Always(DraftPlan("test", 4, 4)), Broken(fault))
    engine.add(one)
    assert tokens_of(finish(engine)["r", 0]) == tokens_of(finish(alone)["r", 0])


def test_three_times_and_it_is_left_alone(model, requests, plain, caplog):
    drafter = Broken("propose")
    engine = tiny_engine(model, Always(BET), drafter)
    with caplog.at_level(logging.WARNING):
        assert answers(engine, requests) == plain
    assert drafter.asked == MAX_FAULTS
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == MAX_FAULTS and ["not be asked" in w for w in warnings] == [False, False, True]


def test_twice_is_forgiven(model, requests, plain):
    drafter = Broken("propose", until=MAX_FAULTS - 1)
    engine = tiny_engine(model, Always(BET), drafter)
    assert answers(engine, requests) == plain
    assert drafter.asked > MAX_FAULTS


def test_one_that_is_left_alone_takes_no_other_with_it(model):
    """The other drafter still guesses, and still for the same answers."""
    drafters = {"test": Broken("propose"), "lookup": LookupDrafter()}
    engine = tiny_engine(model, Always(BET), drafters=lambda cache: drafters)
    prompt = prompt_of(5) * 4
    asked = [
        request(name, prompt, max_tokens=40, speculation={"drafter": name}) for name in ("test", "lookup")
    ]
    found = answers(engine, asked)
    assert found["lookup", 0] == found["test", 0] == run_alone(model, request("plain", prompt, max_tokens=40))
    engine.add(request("again", prompt, max_tokens=40, speculation={"drafter": "lookup"}))
    [again] = engine.live["again"]
    finish(engine)
    assert again.drafted > 0 and again.accepted > 0


def test_a_cache_that_is_full_costs_a_drafter_nothing_but_its_guess(model, requests, plain, lag):
    def drafters(cache):
        return {"test": lm_drafter(tiny_model(seed=1), cache)}

    engine = tiny_engine(
        model, Always(BET), drafters=drafters, cache_bytes=60 * model.config.kv_bytes_per_token, lag=lag
    )
    assert answers(engine, requests) == plain
    assert engine.scheduler.preemptions and not engine.drafters.faults


# ------------------------------------------------------------------------------------------------- grammars


class Fragile:
    """A grammar that allows everything and breaks after so many tokens, in the way that `how` says."""

    def __init__(self, how: str, left: int) -> None:
        self.how, self.left = how, left
        self.problem: str | None = None

    def copy(self) -> Fragile:
        return Fragile(self.how, self.left)

    def bits(self, path) -> np.ndarray | None:
        if self.how == "mask" and self.left <= 0:
            self.problem = "too many items"
            return packed(torch.zeros(VOCAB, dtype=torch.bool))
        return packed(torch.ones(VOCAB, dtype=torch.bool))

    def advance(self, token: int) -> None:
        self.left -= 1
        if self.how == "advance" and self.left < 0:
            self.problem = f"token {token} does not fit"

    @property
    def complete(self) -> bool:
        return self.problem is not None


@pytest.mark.parametrize("how", ["mask", "advance"])
@pytest.mark.parametrize("guessing", [True, False])
def test_a_grammar_that_breaks_in_use_ends_its_own_request_only(model, requests, plain, how, guessing, lag):
    engine = tiny_engine(model, Always(BET if guessing else DraftPlan()), Broken(), lag=lag)
    for one in requests:
        engine.add(one)
    [sequence] = engine.add(request("fragile", prompt_of(11), grammar=Fragile(how, 5)))
    events = finish(engine)
    last = events["fragile", 0][-1]
    assert last.finish_reason == "error"
    assert sequence.problem == f"the grammar failed: {sequence.grammar.problem}"
    assert len(sequence.output) == 6  # five that were fine and the one that was not
    assert {key: tokens_of(e) for key, e in events.items() if key[0] != "fragile"} == plain
    engine.table.check()


def test_an_end_that_the_grammar_does_not_allow_is_an_error_and_no_end(model, lag):
    """When nothing is left to choose from, whatever the draw picks must not pass for an answer."""
    engine = tiny_engine(model, lag=lag)
    for good, reason in ((0, "error"), (1, "stop")):
        ends = frozenset(range(VOCAB))
        engine.add(request(reason, prompt_of(7), stop_ids=ends, grammar=Fragile("advance", good)))
        assert finish(engine)[reason, 0][-1].finish_reason == reason


class Exploding:
    """A matcher in place of llguidance's, every call of which fails from some point on."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == "deep_copy":
                return self
            if name == "compute_bitmask":
                self.calls += 1
                if self.calls > 2:
                    raise ValueError("no such state")
                return b"\xff" * (VOCAB // 8)
            return name == "consume_token"

        return call


def test_a_matcher_that_raises_ends_its_own_request_only(model, requests, plain, lag):
    engine = tiny_engine(model, lag=lag)
    for one in requests:
        engine.add(one)
    [sequence] = engine.add(request("bad", prompt_of(6), grammar=GrammarState(Exploding(), VOCAB)))
    events = finish(engine)
    assert events["bad", 0][-1].finish_reason == "error" and "no such state" in (sequence.problem or "")
    assert {key: tokens_of(e) for key, e in events.items() if key[0] != "bad"} == plain


# ------------------------------------------------------------------------------------------------ listeners


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyError("r"), MemoryError()])
@pytest.mark.parametrize("when", [1, 5])
def test_a_listener_that_raises_loses_its_own_request_only(model, error, when, lag):
    driver = Driver(lambda: tiny_engine(tiny_model(), lag=lag))
    try:
        received: queue.SimpleQueue = queue.SimpleQueue()
        calls: list[Any] = []

        def gone(event) -> None:
            calls.append(event)
            if len(calls) == when:
                raise error

        good = request("good", prompt_of(9), max_tokens=40)
        driver.submit([request("bad", prompt_of(12), max_tokens=200)], gone)
        driver.submit([good], received.put)
        tokens: list[int] = []
        while True:
            event = received.get(timeout=30)
            tokens += event.token_ids
            if event.finish_reason:
                break
        assert tokens == run_alone(model, good)
        driver.run(lambda: driver.engine.table.check())
        assert len(calls) == when and "bad" not in driver.engine.live
    finally:
        driver.close()
