"""Drafts of resident steps are those of eager ones, whatever was accepted, whoever joined, left or was preempted
meanwhile, and whichever drafter proposed in between. The runner lags as on a GPU; here it runs on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from outrider.draft import tree
from outrider.draft.drafter import ResidentDrafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import load_eagle
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KvCache
from outrider.types import NO_DRAFT, NO_DRAFT_PLAN, DraftPlan, Plan, Request
from tests.tiny import (
    VOCAB,
    Always,
    Watched,
    eagle_tensors,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    tiny_engine,
    tiny_model,
    tokens_of,
    write_eagle,
)

SHAPE = {"layers": 4, "windows": (0,) * 4}
EXIT = 2
NAMES = ("eagle", "early_exit", "lm")
DEPTH = 4


@pytest.fixture(scope="module", autouse=True)
def every_token_takes_part() -> Iterator[None]:
    """Eager steps draw among the likeliest tokens only, resident ones among all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "CANDIDATES", VOCAB)
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_model(**SHAPE)


@pytest.fixture(scope="module")
def small():
    return noised_model(0.15, **SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    tensors = eagle_tensors(model.config, VOCAB)
    return write_eagle(tmp_path_factory.mktemp("eagle"), model.config, tensors)


class Silent(Watched):
    """Remembers what it would have proposed and proposes nothing: asked after every token."""

    def propose(self, sequences, draft_plans):
        super().propose(sequences, draft_plans)
        return [NO_DRAFT] * len(sequences)


class Erratic(Always):
    """A planner that changes its mind in every step: which drafter, how deep, and for whom."""

    def __init__(self, seed: int, names: tuple[str, ...]) -> None:
        super().__init__(NO_DRAFT_PLAN)
        self.random, self.names, self.chosen = random.Random(seed), names, names[seed % len(names)]

    def kept(self, work, members) -> None:
        return None

    def plan(self, work, options) -> Plan:
        if self.random.random() < 0.3:
            self.chosen = self.random.choice(self.names)
        return super().plan(work, options)

    def one(self, sequence) -> DraftPlan:
        depth = self.random.randint(1, DEPTH)
        return (
            NO_DRAFT_PLAN
            if self.chosen == "none" or self.random.random() < 0.2
            else DraftPlan(self.chosen, depth, depth)
        )


class Noted(Watched):
    """A drafter whose resident drafts are noted by request and known length. With `answers`, parts of the answer itself
    are given in their stead, so that any number of nodes is accepted; the drafter inside is none the wiser.
    """

    def __init__(self, inner: ResidentDrafter, answers: dict | None = None, seed: int = 0) -> None:
        super().__init__(inner)
        self.max_depth, self.trees, self.model_free = inner.max_depth, inner.trees, inner.model_free
        self.tokens_behind, self.catch_up, self.warm_up = inner.tokens_behind, inner.catch_up, inner.warm_up
        self.shadow_propose, self.usual_depth, self.window = (
            inner.shadow_propose,
            inner.usual_depth,
            inner.window,
        )
        self.answers, self.random = answers, random.Random(seed)
        self.running: list = []  # sequences of the engine
        self.resident: dict[tuple[str, int], tuple[int, ...]] = {}

    def propose_resident(self, ops, rows, lengths, tree, context):
        drafted, counts = self.inner.propose_resident(ops, rows, lengths, tree, context)
        owners = {s.row: s for s in self.running}
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            if row == ops.state.rows:
                continue
            sequence = owners[row]
            key = sequence.request.id, length + 1
            assert key not in self.resident
            self.resident[key] = tuple(drafted[i].tolist())
            if self.answers is not None:
                start = length + 1 - sequence.prompt_len
                truth = self.answers[key[0]][start : start + self.random.randint(0, len(tree))]
                drafted[i, : len(truth)] = torch.tensor(truth, dtype=torch.int64)
        return drafted, counts


def make_drafters(cache: KvCache, model, small, folder) -> dict:
    made = {
        "lookup": LookupDrafter(),
        "lm": lm_drafter(small, cache),
        "early_exit": EarlyExitDrafter(model, cache.store, cache.table, EXIT),
        "eagle": EagleDrafter(load_eagle(folder, model, 256), cache.store, cache.table, window=DEPTH + 1),
    }
    for name in ("lm", "eagle"):
        for numbers in (*made[name].store.keys, *made[name].store.values):
            numbers.fill_(1e3)  # what was never written must not matter
    return made


def noted_engine(
    model, small, folder, planner, lag: int, answers: dict, seed: int | None, **settings
) -> tuple[Engine, dict[str, Noted]]:
    """An engine whose runner lags, and its drafters."""

    def make(cache: KvCache) -> dict:
        drafters = make_drafters(cache, model, small, folder)
        for name in NAMES:  # `lm` counts on its own drafts
            drafters[name] = Noted(
                drafters[name], None if seed is None or name == "lm" else answers, seed or 0
            )
        return drafters

    engine = tiny_engine(model, planner, drafters=make, lag=lag, **settings)
    engine.runner.runs.observe = lambda *_: None  # plain passes go by the clock otherwise
    noted = {name: engine.drafters[name] for name in NAMES}
    for one in noted.values():
        one.running = engine.scheduler.running
    return engine, noted


def some_requests(seed: int) -> list[Request]:
    """Prompts that begin alike, and alone."""
    rnd = random.Random(seed)
    shared = prompt_of(rnd.randint(1, 20), seed)
    return [
        request(
            f"r{i}",
            [*(shared if rnd.random() < 0.6 else []), *prompt_of(rnd.randint(1, 12), seed * 100 + i)],
            max_tokens=rnd.randint(10, 40),
            temperature=rnd.choice([0, 0.7, 1.0]),
            seed=seed * 10 + i,
        )
        for i in range(rnd.randint(2, 5))
    ]


def eager_drafts(
    model, small, folder, requests: list[Request], names: tuple[str, ...]
) -> tuple[dict[str, dict], dict[str, list[int]]]:
    """What each drafter would propose after every token, and the answers."""
    drafts, answers = {}, {}
    for name in names:
        engine = tiny_engine(
            model,
            Always(DraftPlan(name, DEPTH, DEPTH)),
            drafters=lambda cache, name=name: {
                name: Silent(make_drafters(cache, model, small, folder)[name])
            },
        )
        for one in requests:
            engine.add(one)
        answers = {key[0]: tokens_of(events) for key, events in finish(engine).items()}
        assert not engine.drafters.faults
        drafts[name] = {key: tokens for key, (tokens, _) in engine.drafters[name].seen.items()}
    return drafts, answers


def run_noted(engine: Engine, requests: list[Request], seed: int) -> tuple[dict[str, list[int]], str]:
    """Requests join one after the other; one leaves early. What was emitted, and who left."""
    rnd, waiting, emitted = random.Random(seed), list(requests), {one.id: [] for one in requests}
    leaver = rnd.choice(list(emitted))
    for step in range(20_000):
        if waiting and rnd.random() < 0.4:
            engine.add(waiting.pop(0))
        if step == 30:
            engine.abort(leaver)
        if engine.idle and not waiting:
            break
        for result in engine.step():
            for event in result.events:
                emitted[event.request_id] += event.token_ids
    engine.table.check()
    return emitted, leaver


def agreeing(noted: dict[str, Noted], drafts: dict[str, dict]) -> dict[str, int]:
    """How many resident drafts of each drafter there were to compare; all must be those of eager steps."""
    compared = dict.fromkeys(noted, 0)
    for name, one in noted.items():
        eager = {key: tokens for key, (tokens, _) in one.seen.items()}
        for seen in (eager, one.resident):
            known = {key: tokens for key, tokens in seen.items() if drafts.get(name, {}).get(key)}
            for key, tokens in known.items():
                assert tokens == drafts[name][key][: len(tokens)], (name, key)
            compared[name] = len(known)
    return compared


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_those_of_eager_steps(model, small, folder, seed) -> None:
    requests, lag = some_requests(seed), 0 if seed == 5 else 1
    drafts, answers = eager_drafts(model, small, folder, requests, NAMES)
    planner = Erratic(seed, (*NAMES, *NAMES, "lookup", "none"))
    engine, noted = noted_engine(model, small, folder, planner, lag, answers, seed)
    emitted, leaver = run_noted(engine, requests, seed)
    assert answers[leaver][: len(emitted[leaver])] == emitted[leaver]
    assert emitted == answers | {leaver: emitted[leaver]}
    assert not engine.drafters.faults
    compared = agreeing(noted, drafts)
    assert sum(compared.values()) > 5, compared


@pytest.mark.parametrize("name", NAMES)
def test_drafts_after_a_preemption(model, small, folder, name) -> None:
    requests = [request(f"r{i}", prompt_of(30, i), max_tokens=30, temperature=0.7) for i in range(5)]
    drafts, answers = eager_drafts(model, small, folder, requests, (name,))
    slots = {"cache_bytes": 150 * model.config.kv_bytes_per_token}
    engine, noted = noted_engine(model, small, folder, Erratic(1, (name,)), 1, answers, 5, **slots)
    for one in requests:
        engine.add(one)
    assert {key[0]: tokens_of(events) for key, events in finish(engine).items()} == answers
    assert engine.scheduler.preemptions > 1
    assert agreeing(noted, drafts)[name] > 10


@pytest.mark.parametrize("name", NAMES)
def test_the_same_row_again_has_other_slots(model, small, folder, name) -> None:
    """Preempted by hand; when it comes back to its row, its slots are taken."""
    asked = request("a", prompt_of(25), max_tokens=60, temperature=0.7)
    drafts, answers = eager_drafts(model, small, folder, [asked], (name,))
    settings = {"prefix_reuse": False}
    engine, noted = noted_engine(
        model, small, folder, Always(DraftPlan(name, 3, 3)), 1, answers, None, **settings
    )
    engine.check_integrity = False  # slots are taken by hand below
    [one] = engine.add(asked)
    for _ in range(8):
        engine.step()
    while engine.in_flight:
        engine._settle(engine.in_flight.popleft())
    row = one.row
    engine.scheduler._preempt(one)
    engine.table.pool.take(10)
    engine.step()
    assert one.row == row
    finish(engine)
    assert one.output == answers["a"]
    assert agreeing(noted, drafts)[name] > 10


@pytest.mark.parametrize("name", ["early_exit", "eagle"])
def test_who_wants_no_draft_loses_nothing(model, small, folder, name) -> None:
    """A drafter runs for all rows of a step; those that want nothing must keep what they share with others."""
    prompt = prompt_of(20, 4)
    ask = {"max_tokens": 40, "temperature": 0.7}
    requests = [
        request("a", prompt, speculation=True, **ask),
        request("b", prompt, seed=5, speculation=False, **ask),
        request("c", prompt, seed=6, speculation=True, **ask),
    ]
    drafts, answers = eager_drafts(model, small, folder, [requests[0], requests[2]], (name,))
    engine, noted = noted_engine(model, small, folder, Always(DraftPlan(name, 4, 4)), 1, answers, 3)
    emitted: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        engine.add(one)
        for _ in range(4):
            for result in engine.step():
                for event in result.events:
                    emitted[event.request_id] += event.token_ids
    for key, events in finish(engine).items():
        emitted[key[0]] += tokens_of(events)
    assert {key: emitted[key] for key in answers} == answers
    assert agreeing(noted, drafts)[name] > 15
