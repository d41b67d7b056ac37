"""Rounds on the device, run here on the CPU: the same tokens as packed steps, one round behind or not."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.store import KeyValueStore
from outrider.control.planner import Planner
from outrider.control.trees import TREES
from outrider.draft.chains import LmChain, LookupChain
from outrider.draft.lookup import LookupDrafter
from outrider.draft.state import State
from outrider.engine.engine import Engine
from outrider.engine.rounds import MAKING, SAVED, Rounds
from outrider.types import NO_BET, Bet, Plan, Request
from tests.engine.test_target_chains import Steady
from tests.sweep import sweep
from tests.tiny import (
    VOCAB,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    sequence,
    tiny_engine,
    tiny_model,
    tokens_of,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def small():
    return noised_model(0.15)


def make_engine(model, small, lag: int | None, default: str = "lm", **settings) -> Engine:
    """`lag` None: packed steps only."""
    engine = tiny_engine(model, planner=Planner(default), **settings)
    engine.drafters = {"lookup": LookupDrafter(), "lm": lm_drafter(small)}
    if lag is not None:
        rounds = Rounds(
            model,
            engine.store,
            engine.table,
            torch.device("cpu"),
            lambda batch, *_: model.forward(batch, engine.store),
            lag,
        )
        c = small.config
        store = KeyValueStore(c.layers, engine.store.slots, c.kv_heads, c.head_dim)
        run = lambda batch, *_: small.forward(batch, store)  # noqa: E731
        rounds.drafters = {
            "lookup": LookupChain(),
            "lm": LmChain(small, run, VOCAB),
        }
        engine.rounds, engine.draft_store = rounds, store
    return engine


def some_requests(seed: int) -> list[Request]:
    rnd = random.Random(seed)
    how = [True, True, False, {"depth": 3}, {"depth": 4, "nodes": 4}, {"drafter": "lookup"}, {"depth": 2}]
    return [
        request(
            f"r{i}",
            prompt_of(rnd.randint(3, 40), i + seed),
            stop_ids=frozenset([rnd.randrange(VOCAB)]),
            max_tokens=rnd.randint(1, 60),
            temperature=rnd.choice([0, 0.7, 1.0, 1.6, 1e-38]),
            top_k=rnd.choice([0, 0, 3, 20, VOCAB, 500]),
            top_p=rnd.choice([1.0, 1.0, 0.9, 0.4, 0.999999]),
            min_p=rnd.choice([0.0, 0.0, 0.1, 0.6]),
            seed=seed * 10 + i,
            speculation=rnd.choice(how),
        )
        for i in range(rnd.randint(1, 7))
    ]


def run(engine: Engine, requests: list[Request]) -> dict:
    for one in requests:
        engine.add(one)
    told = {key: tokens_of(events) for key, events in finish(engine).items()}
    engine._land(0)
    engine.table.check()
    return told


@pytest.mark.parametrize("default", ["lm", "lookup"])
@pytest.mark.parametrize("seed", sweep(range(8), quick=range(3)))
def test_rounds_tell_what_packed_steps_tell(model, small, default, seed) -> None:
    requests = some_requests(seed)
    packed = run(make_engine(model, small, None, default), requests)
    assert run(make_engine(model, small, 0, default), requests) == packed
    assert run(make_engine(model, small, 1, default), requests) == packed


def test_rounds_are_flown_and_guesses_hold(model, small) -> None:
    engine = make_engine(model, small, 1)
    how = {"drafter": "lm", "depth": 4}
    [one] = engine.add(request("a", prompt_of(20), max_tokens=120, temperature=0.7, speculation=how))
    finish(engine)
    assert engine.rounds is not None
    assert any(key[:4] == (1, 4, (4, 4), "lm") for key in engine.rounds.shapes)
    packed = make_engine(model, small, None)
    [other] = packed.add(request("a", prompt_of(20), max_tokens=120, temperature=0.7, speculation=how))
    finish(packed)
    assert one.tokens == other.tokens
    assert abs(one.accepted - other.accepted) <= 4  # the last round may be cut elsewhere
    assert one.steps < len(one.output)


def test_a_sequence_that_joins_and_one_that_leaves(model, small) -> None:
    requests = [
        request(f"r{i}", prompt_of(10 + i, i), max_tokens=30 + 7 * i, temperature=0.7) for i in range(5)
    ]
    alone = {one.id: run(make_engine(model, small, None), [one])[one.id, 0] for one in requests}
    engine = make_engine(model, small, 1)
    told: dict[str, list[int]] = {one.id: [] for one in requests}
    waiting = list(requests)
    steps = 0
    while waiting or not engine.idle:
        if waiting and steps % 5 == 0:
            engine.add(waiting.pop(0))
        if steps == 12:
            engine.abort("r1")
        for event in engine.step():
            told[event.request_id] += event.token_ids
        steps += 1
    engine._land(0)
    engine.table.check()
    for one in requests:
        if one.id == "r1":
            assert alone["r1"][: len(told["r1"])] == told["r1"]
        else:
            assert told[one.id] == alone[one.id]


FILTERS = [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.8, "min_p": 0.01}]


@pytest.mark.parametrize(
    ("drafter", "filters"),
    sweep(
        product(["lm", "lookup", "none"], FILTERS),
        quick=[("lm", FILTERS[3]), ("lm", FILTERS[1]), ("lookup", FILTERS[0]), ("none", FILTERS[2])],
    ),
)
def test_requests_with_filters_fly(model, small, filters, drafter) -> None:
    how = {"drafter": drafter, "depth": 4} if drafter != "none" else False
    asked = request("a", prompt_of(6) * 4, max_tokens=80, temperature=1.3, seed=3, speculation=how, **filters)
    engine = make_engine(model, model, 1)  # a draft that would say the same
    [one] = engine.add(asked)
    packed, after_prompt = [], engine._pack_and_run
    engine._pack_and_run = lambda: packed.append(1) or after_prompt()  # type: ignore[method-assign]
    finish(engine)
    assert len(packed) == 1  # the step that read the prompt
    assert engine.rounds is not None
    assert engine.rounds.shapes and all(key[-1] for key in engine.rounds.shapes)
    assert [one.output] == list(run(make_engine(model, small, None), [asked]).values())
    if drafter == "lm":  # it guesses by the same filters; only a last round may be cut short
        assert one.drafted - one.accepted <= 4
    unfiltered = request("a", prompt_of(6) * 4, max_tokens=80, temperature=1.3, seed=3, speculation=how)
    assert [one.output] != list(run(make_engine(model, small, None), [unfiltered]).values())


def test_nobody_is_sifted_where_nobody_asks(model, small) -> None:
    engine = make_engine(model, small, 1)
    greedy = request("a", prompt_of(5), max_tokens=30, temperature=0, top_p=0.5, speculation=False)
    warm = request("b", prompt_of(7), max_tokens=30, temperature=0.7, speculation=False)
    run(engine, [greedy, warm])
    assert engine.rounds is not None
    assert engine.rounds.shapes and not any(key[-1] for key in engine.rounds.shapes)


def test_a_row_forgets_the_filters_of_who_had_it_before(model, small) -> None:
    """One after the other on the same row, beside one who filters all along."""
    long = request("long", prompt_of(5), max_tokens=120, temperature=1.2, top_p=0.5, speculation=False)
    heirs = [
        request(f"r{i}", prompt_of(6, i), max_tokens=8, temperature=1.2, seed=i, speculation=False, **filters)
        for i, filters in enumerate([{"top_k": 2}, {}, {"min_p": 0.7}, {}])
    ]
    alone = {one.id: run(make_engine(model, small, None), [one])[one.id, 0] for one in (long, *heirs)}
    engine = make_engine(model, small, 1, max_sequences=2)
    assert {key: told for (key, _), told in run(engine, [long, *heirs]).items()} == alone
    assert engine.rounds is not None and all(key[-1] for key in engine.rounds.shapes)
    assert run(engine, heirs[1:2])["r1", 0] == alone["r1"]
    assert not all(key[-1] for key in engine.rounds.shapes)  # on a row that knew filters


@settings(max_examples=12)
@given(data=st.data())
def test_filters_hold_whoever_comes_and_goes(model, small, data) -> None:
    """Any mix of filters, joining and leaving in any order, speculating or not: as each would be told alone."""
    requests = [
        request(
            f"r{i}", prompt_of(data.draw(st.integers(2, 20)), i), max_tokens=data.draw(st.integers(1, 30)),
            temperature=data.draw(st.sampled_from([0, 0.8, 1.5])), seed=i,
            top_k=data.draw(st.sampled_from([0, 1, 5, 40])), top_p=data.draw(st.sampled_from([1.0, 0.9, 0.3])),
            min_p=data.draw(st.sampled_from([0.0, 0.05, 0.5])),
            speculation=data.draw(st.sampled_from([False, True, {"drafter": "lookup", "depth": 3}, {"depth": 2}])),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]  # fmt: skip
    engine = make_engine(model, small, data.draw(st.sampled_from([0, 1])), max_sequences=3)
    told: dict[str, list[int]] = {one.id: [] for one in requests}
    waiting = list(requests)
    while waiting or not engine.idle:
        if waiting and (engine.idle or data.draw(st.integers(0, 3)) == 0):
            engine.add(waiting.pop(0))
        for event in engine.step():
            told[event.request_id] += event.token_ids
    for one in requests:
        assert told[one.id] == run(make_engine(model, small, None), [one])[one.id, 0]


def test_a_full_cache_takes_the_packed_way(model, small) -> None:
    requests = [request(f"r{i}", prompt_of(30, i), max_tokens=50, temperature=0.7) for i in range(6)]
    packed = run(make_engine(model, small, None), requests)
    tight = make_engine(model, small, 1, cache_bytes=200 * model.config.kv_bytes_per_token)
    assert run(tight, requests) == packed
    assert tight.scheduler.preemptions


def test_lookup_finds_the_longest_ending_and_of_those_the_latest() -> None:
    state = State(2, 64, torch.device("cpu"))
    text = [5, 6, 7, 8, 1, 2, 6, 7, 9, 3, 6, 7, 4, 5, 6, 7]
    one = sequence(text, row=0, cached=len(text) - 1)
    state.board(one, torch.arange(64).numpy().astype("int32"))
    rows = torch.tensor([0])
    guesses, count = LookupChain().chain(state, rows, state.lengths[rows], 3, 32)
    assert guesses[0].tolist() == [8, 1, 2]  # after 5 6 7, not after the later 6 7
    assert count.tolist() == [3]


def test_lookup_with_nothing_to_find_means_nothing() -> None:
    state = State(1, 32, torch.device("cpu"))
    state.board(sequence(list(range(9)), row=0, cached=8), torch.arange(32).numpy().astype("int32"))
    rows = torch.tensor([0])
    assert LookupChain().chain(state, rows, state.lengths[rows], 3, 32)[1].tolist() == [0]


def test_a_prediction_is_followed_on_the_host(model, small) -> None:
    answer = run(make_engine(model, small, None), [request("a", prompt_of(12), max_tokens=40)])["a", 0]
    engine = make_engine(model, small, 1, "lookup")
    [one] = engine.add(request("a", prompt_of(12), max_tokens=40, prediction=answer))
    finish(engine)
    assert one.output == answer
    assert one.accepted > 10
    assert engine.rounds is not None and not engine.rounds.shapes


def test_a_round_has_one_drafter(model, small) -> None:
    rounds = make_engine(model, small, 1).rounds
    assert rounds is not None
    bets = [Bet("lm", 6, 3), Bet("lookup", 4, 4), NO_BET, Bet("lm", 20, 20)]
    assert rounds.fitted(bets) == [Bet("lm", 3, 3), NO_BET, NO_BET, Bet("lm", 8, 8)]
    assert rounds.fitted([NO_BET, NO_BET]) == [NO_BET, NO_BET]


# --------------------------------------------------------------------------------- several plain passes a round


class Busy:
    """A device that is always done before the host looks, so that runs grow; or never, so that they shrink."""

    def __init__(self, engine: Engine, waited: float) -> None:
        assert engine.rounds is not None
        self.rounds, self.pace, self.flown = engine.rounds, engine.rounds.pace, []
        self.waited = waited
        engine.rounds.pace = self.watch  # type: ignore[method-assign]

    def watch(self, flight, waited: float, spent: float) -> None:
        self.flown.append(flight.passes)
        self.pace(flight, self.waited, 1.0)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", sweep(range(6), quick=range(3)))
def test_runs_of_plain_passes_end_where_single_ones_do(model, small, lag, seed) -> None:
    """Whatever ends an answer (an end id, a stop string, its length), wherever in a run."""
    rnd = random.Random(seed)
    requests = [
        request(
            f"r{i}", prompt_of(rnd.randint(3, 20), i + seed), stop_ids=frozenset(rnd.sample(range(VOCAB), 2)),
            max_tokens=rnd.randint(1, 50), temperature=rnd.choice([0, 0.7]), seed=i, speculation=False,
            stop=rnd.choice([(), ("A", "bc"), ("Q",)]),
        )
        for i in range(rnd.randint(1, 6))
    ]  # fmt: skip
    engines = [make_engine(model, small, None), make_engine(model, small, lag)]
    busy = Busy(engines[1], waited=0.0)
    told = []
    for engine in engines:
        sequences = [s for one in requests for s in engine.add(one)]
        events = finish(engine)
        engine._land(0)
        engine.table.check()
        texts = {key: "".join(event.text for event in some) for key, some in events.items()}
        told.append((texts, [(s.output, s.finish_reason, s.steps, s.origins) for s in sequences]))
    assert told[0] == told[1]
    assert all(steps == len(output) for output, _, steps, _ in told[1][1])
    assert max(busy.flown) > 1


def test_runs_grow_while_the_device_waits_for_the_host_and_shrink_again(model, small) -> None:
    engine = make_engine(model, small, 1)
    busy = Busy(engine, waited=0.0)
    engine.add(request("a", prompt_of(5), max_tokens=100, speculation=False))
    finish(engine)
    assert busy.flown[:5] == [1, 1, 4, 4, 8] and max(busy.flown) == 8
    busy.waited = 1.0
    engine.add(request("b", prompt_of(5), max_tokens=100, speculation=False))
    finish(engine)
    assert busy.flown[-1] == 1


def test_no_round_is_flown_for_what_is_known_to_be_over(model, small) -> None:
    """The length is known beforehand: neither a round too many nor a pass."""
    engine = make_engine(model, small, 1)
    busy = Busy(engine, waited=0.5)
    assert engine.rounds is not None
    engine.rounds.runs[1] = 4
    engine.add(request("a", prompt_of(5), max_tokens=12, speculation=False))
    finish(engine)
    assert busy.flown == [4, 4, 3]  # the first token came with the prompt
    assert not engine.flights


def test_a_size_is_made_once_it_is_worth_it(model, small) -> None:
    rounds = make_engine(model, small, 1).rounds
    assert [rounds.size_for(n) for n in (3, 2, 4)] == [4, 4, 4]  # what is there will do
    assert rounds.size_for(9) == 16  # what is there has no room
    wait = round(MAKING / SAVED)
    assert all(rounds.size_for(7) == 16 for _ in range(wait - 2))
    assert rounds.size_for(4) == 4 and rounds.size_for(5) == 16
    assert rounds.size_for(7) == rounds.size_for(5) == 8
    rounds.made = {64}
    assert all(rounds.size_for(1) == 64 for _ in range(wait // 63))  # the more is wasted, the sooner
    assert rounds.size_for(1) == 1


def test_rounds_are_prepared(model, small) -> None:
    engine = make_engine(model, small, 1)
    engine.planner.choices = ("lm", "lookup")
    before = {
        key: value.clone() for key, value in vars(engine.rounds.state).items() if torch.is_tensor(value)
    }
    stores = engine.store, engine.draft_store
    for store in stores:
        for keys in (*store.keys, *store.values):
            keys.fill_(7.0)
    for _ in engine.preparing(5):
        pass
    for store in stores:  # the last slot is nobody's
        assert all((keys[:-1] == 7.0).all() for keys in (*store.keys, *store.values))
    assert engine.rounds.made == {1, 2, 4, 8}
    assert engine.planner.costs.measured == {
        (name, size) for name in ("lm", "lookup") for size in (1, 2, 4, 8)
    }
    assert engine.planner.costs.plain(8) is not None
    assert engine.planner.costs.per_token.keys() == {"lm"}
    for key, value in before.items():
        assert torch.equal(getattr(engine.rounds.state, key)[:-1], value[:-1]), (
            key
        )  # the last row is padding's
    requests = some_requests(3)
    assert run(engine, requests) == run(make_engine(model, small, None), requests)
    assert list(make_engine(model, small, None).preparing(5)) == []  # nothing to prepare


def test_answers_may_come_in_between_while_rounds_are_prepared(model, small) -> None:
    engine = make_engine(model, small, 1)
    engine.planner.choices = ("lm", "lookup")
    packed = make_engine(model, small, None)
    for i, _ in enumerate(engine.preparing(2)):
        if i % 4:
            continue
        requests = some_requests(i // 4 % 3)
        assert run(engine, requests) == run(packed, requests)
    assert {("lm", 1), ("lm", 2), ("lookup", 1), ("lookup", 2)} <= engine.planner.costs.measured


def test_plain_rounds_are_prepared_where_nobody_guesses(model, small) -> None:
    engine = make_engine(model, small, 1, "none")
    for _ in engine.preparing(2):
        pass
    assert engine.rounds.made == {1, 2} and engine.planner.costs.plain(2) is not None


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("form", TREES)
def test_trees_in_rounds_change_nothing_and_hold_more(model, small, lag, form) -> None:
    asked = [
        request(f"r{i}", prompt_of(4 + 7 * i, i), max_tokens=50, temperature=0.7, seed=i) for i in range(3)
    ]
    plain = run(make_engine(model, small, None, "none"), asked)
    held = {}
    for depth, nodes in (form, (form[0], form[0])):
        engine = make_engine(model, small, lag, check_integrity=True)
        engine.planner = Steady(Bet("lm", nodes, depth))
        sequences = [engine.add(one)[0] for one in asked]
        while not engine.idle:
            engine.step()
        engine._land(0)
        engine.table.check()
        assert {(s.request.id, 0): s.output for s in sequences} == plain
        assert {size for s in sequences for size, _ in s.guesses} == {nodes}
        held[nodes] = sum(s.accepted for s in sequences) / sum(s.steps for s in sequences)
    assert held[form[1]] > held[form[0]]


class Pausing(Steady):
    """Guesses in one round and rests in the next."""

    def plan(self, work, options) -> Plan:
        plan = super().plan(work, options)
        if options.size:
            self.rests = not getattr(self, "rests", True)
        return Plan((NO_BET,) * len(work)) if options.size and self.rests else plan


@pytest.mark.parametrize("planner", [Steady, Pausing])
def test_a_draft_knows_what_it_has_read_of_a_tree(model, small, monkeypatch, planner) -> None:
    """Its guesses are those of a draft that reads everything again before every round."""
    asked = request("r", prompt_of(9, 3), max_tokens=120, temperature=0.7, seed=3)
    seen = []
    for forget in (False, True):
        engine = make_engine(model, small, 0)
        engine.planner = planner(Bet("lm", 15, 3))
        monkeypatch.setattr(engine.rounds, "pace", lambda *_: None)  # plain passes go by the clock otherwise
        lm, told = engine.rounds.drafters["lm"], []
        tree = lm.tree

        def noted(*given, tree=tree, told=told):
            guesses, count = tree(*given)
            told.append(guesses.tolist())
            return guesses, count

        monkeypatch.setattr(lm, "tree", noted)
        if forget:
            monkeypatch.setattr(lm.reads, "of", lambda sequence: 0)
        run(engine, [asked])
        seen.append(told)
    assert seen[0] == seen[1] and len(seen[0]) > 5


def test_what_guesses_may_look_like(model, small) -> None:
    rounds = make_engine(model, small, 1).rounds
    assert rounds.forms("lm", 4) == ((1, 1), (2, 2), (4, 4), *TREES)
    assert rounds.forms("lm", 8) == ((1, 1), (2, 2), (4, 4))  # no rows to spare
    assert rounds.forms("none", 8) == ()
    assert rounds.forms("lookup", 32)[-1] == (15, 15) and rounds.forms("lookup", 64)[-1] == (4, 4)
    assert rounds.forms("lookup", 512) == ()
    assert not set(TREES) & set(rounds.forms("lookup", 1))
    asked = [Bet("lm", *TREES[-1][::-1]), Bet("lm", 12, 12)]
    assert [(bet.depth, bet.nodes) for bet in rounds.fitted(asked)] == [TREES[-1], (8, 8)]
    rounds.deepest = 8  # as much room as a chain needs
    assert [(bet.depth, bet.nodes) for bet in rounds.fitted(asked)] == [(4, 4), (8, 8)]
