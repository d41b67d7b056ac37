"""Drafters on the device that have something to remember: their guesses are those of the packed path, whatever was
accepted, whoever joined, left or was preempted meanwhile, and whoever guessed in between. Run here on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from outrider.draft import tree
from outrider.draft.chains import ChainDrafter, LmChain, LookupChain
from outrider.draft.eagle import EagleDrafter, load_eagle
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.target_chains import EagleChain, EarlyExitChain
from outrider.engine.engine import Engine
from outrider.engine.rounds import Rounds
from outrider.model.decoder import make_store
from outrider.types import NO_BET, NO_DRAFT, Bet, Plan, Request
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
DEEPEST = 4


@pytest.fixture(scope="module", autouse=True)
def every_token_takes_part() -> Iterator[None]:
    """The packed path draws among the likeliest tokens only, the device among all."""
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
    """Remembers what it would have guessed and says nothing: asked after every token."""

    def propose(self, sequences, bets):
        super().propose(sequences, bets)
        return [NO_DRAFT] * len(sequences)


class Steady(Always):
    """The same bet in every step and every round."""

    def __init__(self, bet: Bet) -> None:
        super().__init__(bet)
        self.default = bet.drafter

    def unmeasured(self, work, options) -> str:
        return "none"

    def learn_reading(self, drafter: str, tokens: int, seconds: float) -> None: ...


class Erratic:
    """A planner that changes its mind in every step: who guesses, how deep, and for whom."""

    default = "none"

    def __init__(self, seed: int, names: tuple[str, ...]) -> None:
        self.random, self.names, self.chosen = random.Random(seed), names, names[seed % len(names)]

    def plan(self, work, options) -> Plan:
        if self.random.random() < 0.3:
            self.chosen = self.random.choice(self.names)
        return Plan(tuple(self.one(self.chosen) for _ in work))

    def unmeasured(self, work, options) -> str:
        return "none"

    def learn_reading(self, drafter: str, tokens: int, seconds: float) -> None: ...

    def one(self, who: str) -> Bet:
        depth = self.random.randint(1, DEEPEST)
        return NO_BET if who == "none" or self.random.random() < 0.2 else Bet(who, depth, depth)

    def observe(self, record) -> None: ...
    def forget(self, sequence) -> None: ...


class Noted:
    """A chain whose guesses are noted by request and known length. Where told to, the answer itself is given in
    their stead, so that any number of guesses holds; the chain is none the wiser.
    """

    def __init__(self, inner: ChainDrafter, engine: Engine, answers: dict, seed: int | None) -> None:
        self.inner, self.engine, self.answers = inner, engine, answers
        self.unread, self.catch_up, self.landed = inner.unread, inner.catch_up, inner.landed
        self.deepest = inner.deepest
        self.random = None if seed is None else random.Random(seed)
        self.seen: dict[tuple[str, int], tuple[int, ...]] = {}

    def chain(self, state, rows, lengths, n, context):
        guesses, count = self.inner.chain(state, rows, lengths, n, context)
        owners = {s.row: s for s in self.engine.scheduler.running}
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            if row == state.rows:
                continue
            sequence = owners[row]
            assert (sequence.request.id, length + 1) not in self.seen
            self.seen[sequence.request.id, length + 1] = tuple(guesses[i].tolist())
            if self.random is not None:
                start = length + 1 - sequence.prompt_len
                truth = self.answers[sequence.request.id][start : start + self.random.randint(0, n)]
                guesses[i, : len(truth)] = torch.tensor(truth, dtype=torch.int64)
        return guesses, count


def make_drafters(engine: Engine, small, folder) -> dict:
    head = load_eagle(folder, engine.model, 256)
    return {
        "lookup": LookupDrafter(),
        "lm": lm_drafter(small),
        "early_exit": EarlyExitDrafter(engine.model, engine.store, engine.table, EXIT),
        "eagle": EagleDrafter(head, engine.store, engine.table, 4000, 256),
    }


def fly(engine: Engine, small, lag: int, answers: dict, seed: int | None) -> dict[str, Noted]:
    """Give an engine rounds, and chains whose guesses are noted."""
    model, store, slots = engine.model, engine.store, engine.store.slots
    run = lambda batch, *_: model.forward(batch, store)  # noqa: E731
    rounds = Rounds(model, store, engine.table, torch.device("cpu"), run, lag)
    rounds.deepest = DEEPEST
    head, keys = engine.drafters["eagle"].head, make_store(small, slots)
    entries = head.make_store(slots)
    for number in (*entries.keys, *entries.values, *keys.keys, *keys.values):
        number.fill_(1e3)  # what was never written must not matter

    def run_head(hidden, batch, *_):
        assert int(batch.positions.min()) >= 0
        return head.forward(hidden, batch, entries)

    eagle = EagleChain(head, model, store, entries, run_head, DEEPEST + 1)
    early = EarlyExitChain(model, lambda batch, *_: model.exit_logits(batch, store, EXIT))
    lm = LmChain(small, lambda batch, *_: small.forward(batch, keys), VOCAB)
    noted = {
        "eagle": Noted(eagle, engine, answers, seed),
        "early_exit": Noted(early, engine, answers, seed),
        "lm": Noted(lm, engine, answers, None),  # it counts on its own guesses
    }
    rounds.drafters = {"lookup": LookupChain(), **noted}
    engine.rounds = rounds
    return noted


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


def packed_guesses(
    model, small, folder, requests: list[Request], names: tuple[str, ...]
) -> tuple[dict[str, dict], dict[str, list[int]]]:
    """What each drafter would guess after every token, and the answers."""
    guesses, answers = {}, {}
    for name in names:
        engine = tiny_engine(model)
        silent = Silent(make_drafters(engine, small, folder)[name])
        engine.use_drafters({name: silent}, Always(Bet(name, DEEPEST, DEEPEST)))
        for one in requests:
            engine.add(one)
        answers = {key[0]: tokens_of(events) for key, events in finish(engine).items()}
        guesses[name] = {key: tokens for key, (tokens, _) in silent.seen.items()}
    return guesses, answers


def run_noted(engine: Engine, requests: list[Request], seed: int) -> tuple[dict[str, list[int]], str]:
    """Requests join one after the other; one leaves early. What was told, and who left."""
    rnd, waiting, told = random.Random(seed), list(requests), {one.id: [] for one in requests}
    leaver = rnd.choice(list(told))
    for step in range(20_000):
        if waiting and rnd.random() < 0.4:
            engine.add(waiting.pop(0))
        if step == 30:
            engine.abort(leaver)
        if engine.idle and not waiting:
            break
        for event in engine.step():
            told[event.request_id] += event.token_ids
    engine._land(0)
    engine.table.check()
    return told, leaver


def agreeing(noted: dict[str, Noted], guesses: dict[str, dict]) -> dict[str, int]:
    """How many guesses of each drafter there were to compare; all of them must be the packed path's."""
    compared = {}
    for name, one in noted.items():
        known = {key: tokens for key, tokens in one.seen.items() if guesses.get(name, {}).get(key)}
        for key, tokens in known.items():
            assert tokens == guesses[name][key][: len(tokens)], (name, key)
        compared[name] = len(known)
    return compared


@pytest.mark.parametrize("seed", range(6))
def test_guesses_are_the_packed_paths(model, small, folder, seed) -> None:
    requests, lag = some_requests(seed), 0 if seed == 5 else 1
    guesses, answers = packed_guesses(model, small, folder, requests, NAMES)
    engine = tiny_engine(model)
    engine.use_drafters(make_drafters(engine, small, folder), Erratic(seed, (*NAMES, "lookup", "none")))
    noted = fly(engine, small, lag, answers, seed)
    told, leaver = run_noted(engine, requests, seed)
    assert answers[leaver][: len(told[leaver])] == told[leaver]
    assert told == answers | {leaver: told[leaver]}
    compared = agreeing(noted, guesses)
    assert sum(compared.values()) > 10, compared


@pytest.mark.parametrize("name", NAMES)
def test_guesses_after_a_preemption_are_the_packed_paths(model, small, folder, name) -> None:
    requests = [request(f"r{i}", prompt_of(30, i), max_tokens=30, temperature=0.7) for i in range(5)]
    guesses, answers = packed_guesses(model, small, folder, requests, (name,))
    engine = tiny_engine(model, cache_bytes=150 * model.config.kv_bytes_per_token)
    engine.use_drafters(make_drafters(engine, small, folder), Erratic(1, (name,)))
    noted = fly(engine, small, 1, answers, 5)
    for one in requests:
        engine.add(one)
    told = {key[0]: tokens_of(events) for key, events in finish(engine).items()}
    assert told == answers
    assert engine.scheduler.preemptions > 1
    assert agreeing(noted, guesses)[name] > 10


@pytest.mark.parametrize("name", NAMES)
def test_the_same_row_again_has_other_slots(model, small, folder, name) -> None:
    """Preempted by hand; when it comes back to its row, its slots are taken."""
    asked = request("a", prompt_of(25), max_tokens=60, temperature=0.7)
    guesses, answers = packed_guesses(model, small, folder, [asked], (name,))
    engine = tiny_engine(model, prefix_reuse=False, check_integrity=False)
    engine.use_drafters(make_drafters(engine, small, folder), Steady(Bet(name, 3, 3)))
    noted = fly(engine, small, 1, answers, None)
    [one] = engine.add(asked)
    for _ in range(8):
        engine.step()
    engine._land(0)
    row = one.row
    engine.scheduler._preempt(one)
    engine.table.pool.take(10)
    engine.step()
    assert one.row == row
    finish(engine)
    assert one.output == answers["a"]
    assert agreeing(noted, guesses)[name] > 10


@pytest.mark.parametrize("name", ["early_exit", "eagle"])
def test_who_wants_no_guess_loses_nothing(model, small, folder, name) -> None:
    """A drafter runs for all rows of a round; those that want nothing must keep what they share with others."""
    prompt = prompt_of(20, 4)
    ask = {"max_tokens": 40, "temperature": 0.7}
    requests = [
        request("a", prompt, speculation=True, **ask),
        request("b", prompt, seed=5, speculation=False, **ask),
        request("c", prompt, seed=6, speculation=True, **ask),
    ]
    guesses, answers = packed_guesses(model, small, folder, [requests[0], requests[2]], (name,))
    engine = tiny_engine(model)
    engine.use_drafters(make_drafters(engine, small, folder), Steady(Bet(name, 4, 4)))
    noted = fly(engine, small, 1, answers, 3)
    told: dict[str, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        engine.add(one)
        for _ in range(4):
            for event in engine.step():
                told[event.request_id] += event.token_ids
    for key, events in finish(engine).items():
        told[key[0]] += tokens_of(events)
    assert {key: told[key] for key in answers} == answers
    assert agreeing(noted, guesses)[name] > 15
