"""Steps over resident sequences, run here on the CPU: the same tokens as eager steps, with the host behind or not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.planner import Planner
from outrider.control.trees import TREES
from outrider.device.buckets import RUN_SECONDS
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Plan, Request
from tests.sweep import sweep
from tests.tiny import (
    VOCAB,
    Always,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
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


def make_engine(model, small, lag: int | None, planner="lm", **settings) -> Engine:
    """`planner` may be a default drafter's name."""
    if isinstance(planner, str):
        planner = Planner(planner)

    def drafters(cache):
        return {"lookup": LookupDrafter(), "lm": lm_drafter(small, cache)}

    return tiny_engine(model, planner, drafters=drafters, lag=lag, **settings)


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
    found = {key: tokens_of(events) for key, events in finish(engine).items()}
    assert not engine.in_flight
    engine.table.check()
    return found


def arriving(engine: Engine, requests: list[Request], comes, leaves=lambda step: None) -> dict:
    """One after the other, when `comes` says so; `leaves` names who is aborted."""
    found: dict[str, list[int]] = {one.id: [] for one in requests}
    waiting, steps = list(requests), 0
    while waiting or not engine.idle:
        if waiting and (engine.idle or comes(steps)):
            engine.add(waiting.pop(0))
        if gone := leaves(steps):
            engine.abort(gone)
        for event in (event for result in engine.step() for event in result.events):
            found[event.request_id] += event.token_ids
        steps += 1
    engine.table.check()
    return found


def shapes(engine: Engine) -> list:
    """Of steps with resident rows."""
    return [shape for shape in engine.runner.graphs.steps if shape.size]


@pytest.mark.parametrize("default", ["lm", "lookup"])
@pytest.mark.parametrize("seed", sweep(range(8), quick=range(2)))
def test_resident_steps_emit_what_eager_ones_do(model, small, default, seed) -> None:
    requests = some_requests(seed)
    eager = run(make_engine(model, small, None, default), requests)
    for lag in (0, 1, 2):
        assert run(make_engine(model, small, lag, default), requests) == eager


def test_drafts_of_resident_steps_are_accepted(model, small) -> None:
    engine = make_engine(model, small, 1)
    how = {"drafter": "lm", "depth": 4}
    [one] = engine.add(request("a", prompt_of(20), max_tokens=120, temperature=0.7, speculation=how))
    finish(engine)
    assert ((1, (4, 4), "lm")) in [(shape.size, shape.tree, shape.drafters[0]) for shape in shapes(engine)]
    eager = make_engine(model, small, None)
    [other] = eager.add(request("a", prompt_of(20), max_tokens=120, temperature=0.7, speculation=how))
    finish(eager)
    assert one.tokens == other.tokens
    assert abs(one.accepted - other.accepted) <= 4  # the last step may be cut elsewhere
    assert one.steps < len(one.output)


def test_a_sequence_that_joins_and_one_that_leaves(model, small) -> None:
    requests = [
        request(f"r{i}", prompt_of(10 + i, i), max_tokens=30 + 7 * i, temperature=0.7) for i in range(5)
    ]
    alone = {one.id: run(make_engine(model, small, None), [one])[one.id, 0] for one in requests}
    engine = make_engine(model, small, 1)
    leaves = {12: "r1"}
    found = arriving(engine, requests, lambda step: step % 5 == 0, leaves.get)
    assert alone["r1"][: len(found["r1"])] == found["r1"]
    assert found == alone | {"r1": found["r1"]}


FILTERS = [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.8, "min_p": 0.01}]


@pytest.mark.parametrize(
    ("drafter", "filters"),
    sweep(
        product(["lm", "lookup", "none"], FILTERS),
        quick=[("lm", FILTERS[3]), ("lm", FILTERS[1]), ("lookup", FILTERS[0]), ("none", FILTERS[2])],
    ),
)
def test_requests_with_filters_are_resident(model, small, filters, drafter) -> None:
    how = {"drafter": drafter, "depth": 4} if drafter != "none" else False
    asked = request("a", prompt_of(6) * 4, max_tokens=80, temperature=1.3, seed=3, speculation=how, **filters)
    engine = make_engine(model, model, 1)  # a draft that would say the same
    [one] = engine.add(asked)
    records = []
    while not engine.idle:
        records += [result.record for result in engine.step()]
    assert [record.captured is None for record in records].count(True) == 1  # the one that read the prompt
    assert shapes(engine) and all(shape.filtered for shape in shapes(engine))
    assert [one.output] == list(run(make_engine(model, small, None), [asked]).values())
    if drafter == "lm":  # it drafts by the same filters; only a last step may be cut short
        assert one.drafted - one.accepted <= 4
    unfiltered = request("a", prompt_of(6) * 4, max_tokens=80, temperature=1.3, seed=3, speculation=how)
    assert [one.output] != list(run(make_engine(model, small, None), [unfiltered]).values())


def test_nothing_is_filtered_where_nobody_asks(model, small) -> None:
    engine = make_engine(model, small, 1)
    greedy = request("a", prompt_of(5), max_tokens=30, temperature=0, top_p=0.5, speculation=False)
    warm = request("b", prompt_of(7), max_tokens=30, temperature=0.7, speculation=False)
    run(engine, [greedy, warm])
    assert shapes(engine) and not any(shape.filtered or shape.edited for shape in shapes(engine))


def test_a_row_forgets_the_filters_of_who_had_it_before(model, small) -> None:
    """One after the other on the same row, beside one who filters all along."""
    long = request("long", prompt_of(5), max_tokens=120, temperature=1.2, top_p=0.5, speculation=False)
    heirs = [
        request(f"r{i}", prompt_of(6, i), max_tokens=8, temperature=1.2, seed=i, speculation=False, **how)
        for i, how in enumerate([{"top_k": 2}, {}, {"min_p": 0.7}, {"logit_bias": {3: 8.0}}, {}])
    ]
    alone = {one.id: run(make_engine(model, small, None), [one])[one.id, 0] for one in (long, *heirs)}
    engine = make_engine(model, small, 1, max_sequences=2)
    engine.runner.runs.observe = lambda *_: None  # several plain passes a step go by the clock
    assert {key: tokens for (key, _), tokens in run(engine, [long, *heirs]).items()} == alone
    assert all(shape.filtered for shape in shapes(engine))
    assert run(engine, heirs[1:2])["r1", 0] == alone["r1"]
    assert not all(shape.filtered for shape in shapes(engine))  # on a row that knew filters


@settings(max_examples=6)
@given(data=st.data())
def test_filters_hold_whoever_comes_and_goes(model, small, data) -> None:
    """Any mix of filters, joining and leaving in any order, speculating or not: as each would be answered alone."""
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
    found = arriving(engine, requests, lambda step: data.draw(st.integers(0, 3)) == 0)
    for one in requests:
        assert found[one.id] == run(make_engine(model, small, None), [one])[one.id, 0]


def test_measuring_leaves_what_is_in_flight_alone(model, small) -> None:
    """Steps over padding are launched while others of the same shape are on their way to the host."""
    requests = [request(f"r{i}", prompt_of(12, i), max_tokens=10, speculation={"depth": 2}) for i in range(2)]
    engine, found = make_engine(model, small, 1), {one.id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while not engine.idle:
        for event in (event for result in engine.step() for event in result.events):
            found[event.request_id] += event.token_ids
        engine.runner.preparation.measure(engine.planner, "lm", 2)
    eager = run(make_engine(model, small, None), requests)
    assert found == {key: tokens for (key, _), tokens in eager.items()}


def test_a_larger_shape_that_serves_counts_for_the_size_that_was_planned(model, small) -> None:
    """So that a plain step is a baseline for those it was taken for, whatever it ran in."""
    engine = make_engine(model, small, 0)
    find = engine.runner.graphs.find
    engine.runner.graphs.find = lambda shape: replace(find(shape), size=8) if shape.size else find(shape)
    engine.planner.costs.captured.baselines.since[2] = 1000
    for i in range(2):
        engine.add(request(f"r{i}", prompt_of(9, i), max_tokens=20))
    records = [result.record for _ in range(6) for result in engine.step()]
    sizes = [record.captured.size for record in records if record.captured]
    assert sizes and set(sizes) <= {1, 2} and 2 in sizes
    assert all(step.shape.size in (0, 8) for step in engine.runner.graphs.steps.values() if step.launches)
    assert engine.planner.costs.captured.baselines.since[2] < 1000


def test_a_full_cache_preempts_resident_sequences(model, small) -> None:
    requests = [request(f"r{i}", prompt_of(30, i), max_tokens=50, temperature=0.7) for i in range(6)]
    eager = run(make_engine(model, small, None), requests)
    tight = make_engine(model, small, 1, cache_bytes=200 * model.config.kv_bytes_per_token)
    assert run(tight, requests) == eager
    assert tight.scheduler.preemptions


def test_a_full_prefix_cache_leaves_room_for_drafts(model, small, monkeypatch) -> None:
    """Cached prefixes are evicted for all draft trees of a step, not for one token of each sequence."""
    engine = make_engine(model, small, 1, cache_bytes=700 * model.config.kv_bytes_per_token)
    run(engine, [request(f"old {i}", prompt_of(60, i), max_tokens=9) for i in range(14)])
    assert engine.table.pool.free < engine.table.pool.total // 4
    offered, options = [], engine.runner.options
    monkeypatch.setattr(
        engine.runner, "options", lambda *given: offered.append(options(*given)) or offered[-1]
    )
    run(engine, [request(f"new {i}", prompt_of(20, 50 + i), max_tokens=20 + i) for i in range(4)])
    found = {one.size: one.trees["lm"] for one in offered if all(one.resident)}
    assert len(found) > 1 and found == {size: engine.runner.shapes.trees("lm", size) for size in found}


def records_of(engine: Engine, asked: Request) -> tuple[list, list[int]]:
    """Of all steps of a request, and its answer."""
    [one], records = engine.add(asked), []
    while not engine.idle:
        records += [result.record for result in engine.step()]
    return records, one.output


def test_a_prediction_is_followed_on_the_device(model, small) -> None:
    """Where the prompt is in the cache, from its beginning: then the first step is a resident one."""
    [answer] = run(make_engine(model, small, None), [request("a", prompt_of(17), max_tokens=40)]).values()
    engine = make_engine(model, small, 1, Always(DraftPlan("lookup", 4, 4)))
    for name, staged in (("a", 1), ("b", 0)):
        asked = request(name, prompt_of(17), max_tokens=40, prediction=answer, owner="mine")
        records, said = records_of(engine, asked)
        assert said == answer and [record.captured is None for record in records].count(True) == staged
        assert records[0].accepted == (0 if staged else 4)
        assert sum(record.accepted for record in records) >= 30
        engine.drafters["lookup"].past.clear()


def test_past_answers_draft_in_resident_steps(model, small) -> None:
    """For the owner whose answer it was, and for nobody else."""
    engine = make_engine(model, small, 1, Always(DraftPlan("lookup", 4, 4)))
    accepted, answers = [], []
    for name, owner in (("a", "mine"), ("b", "mine"), ("c", "theirs")):
        asked = request(name, prompt_of(12), max_tokens=60, temperature=1.0, seed=3, owner=owner)
        records, said = records_of(engine, asked)
        accepted.append(sum(record.accepted for record in records if record.captured))
        answers.append(said)
    assert answers[0] == answers[1] == answers[2]
    assert accepted[1] > accepted[0] + 30 and accepted[2] == accepted[0]


def test_a_default_drafter_that_cannot_be_resident_drafts_on_the_host(model, small) -> None:
    class Repeats:
        def start(self, sequence) -> None: ...
        def accept(self, sequence, draft, verdict) -> None: ...
        def stop(self, sequence) -> None: ...

        def propose(self, sequences, draft_plans):
            return LookupDrafter.propose(lookup, sequences, draft_plans)

    lookup = LookupDrafter()
    asked = request("a", prompt_of(5) * 3, max_tokens=60)
    engine = tiny_engine(model, Always(DraftPlan("test", 3, 3)), Repeats(), lag=1)
    [one] = engine.add(asked)
    lookup.start(one)
    finish(engine)
    assert one.drafted > 10 and [one.output] == list(run(tiny_engine(model), [asked]).values())


def test_what_draft_trees_there_are(model, small) -> None:
    trees = make_engine(model, small, 1).runner.shapes.trees
    assert trees("lm", 4) == ((1, 1), (2, 2), (4, 4), *TREES)
    assert trees("lm", 8) == ((1, 1), (2, 2), (4, 4))  # no rows to spare
    assert trees("none", 8) == ()
    assert trees("lookup", 32)[-1] == (15, 15) and trees("lookup", 64)[-1] == (4, 4)
    assert trees("lookup", 512) == ()
    assert not set(TREES) & set(trees("lookup", 1))


# ----------------------------------------------------------------------------------- several plain passes a step


class Busy:
    """A device that waits for the host, `late` times as long as it works: runs grow, or shrink if that is nothing."""

    device = 1e-4  # seconds of a pass there

    def __init__(self, engine: Engine, late: float) -> None:
        self.observe, self.passes, self.late = engine.runner.runs.observe, [], late
        engine.runner.runs.observe = self.watch

    def watch(self, size: int, passes: int, spent: float, device: float) -> None:
        self.passes.append(passes)
        self.observe(size, passes, (1 + self.late) * self.device * passes, self.device * passes)


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
    busy = Busy(engines[1], late=1.0)
    found = []
    for engine in engines:
        sequences = [s for one in requests for s in engine.add(one)]
        events = finish(engine)
        engine.table.check()
        texts = {key: "".join(event.text for event in some) for key, some in events.items()}
        found.append((texts, [(s.output, s.finish_reason, s.steps, s.origins) for s in sequences]))
    assert found[0] == found[1]
    assert all(steps == len(output) for output, _, steps, _ in found[1][1])
    assert max(busy.passes) > 1


def test_runs_grow_while_the_device_waits_for_the_host_and_shrink_again(model, small) -> None:
    engine = make_engine(model, small, 1)
    busy = Busy(engine, late=1.0)
    engine.add(request("a", prompt_of(5), max_tokens=100, speculation=False))
    finish(engine)
    assert busy.passes[:10] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 8] and max(busy.passes) == 8
    busy.late = 0.0
    for number in range(12):  # what was known of shorter ones fades
        engine.add(request(f"b{number}", prompt_of(5), max_tokens=100, speculation=False))
        finish(engine)
    assert busy.passes[-1] == 1


def test_runs_are_short_enough_for_a_stream(model, small) -> None:
    """However far behind the host is: the tokens of a run reach a client all at once."""
    engine = make_engine(model, small, 1)
    busy = Busy(engine, late=1.0)
    busy.device = RUN_SECONDS / 1.5
    engine.runner.runs.passes[1] = 8
    engine.add(request("a", prompt_of(5), max_tokens=60, speculation=False))
    finish(engine)
    assert busy.passes[:2] == [8, 8] and set(busy.passes[2:]) == {1}


def test_no_step_is_launched_for_what_is_known_to_be_over(model, small) -> None:
    """The length is known beforehand: neither a step too many nor a pass."""
    engine = make_engine(model, small, 1)
    busy = Busy(engine, late=0.0)
    engine.runner.runs.passes[1] = 4
    engine.runner.runs.idle.update({(1, 1): 1.0, (1, 2): 1.0})
    engine.add(request("a", prompt_of(5), max_tokens=12, speculation=False))
    finish(engine)
    assert busy.passes == [4, 4, 2, 1]  # the first token came with the prompt
    assert not engine.in_flight


# --------------------------------------------------------------------------------------------------- preparation


def test_steps_are_prepared(model, small) -> None:
    engine = make_engine(model, small, 1, Planner("lm", choices=("lm", "lookup")))
    state = {key: value.clone() for key, value in vars(engine.runner.state).items() if torch.is_tensor(value)}
    stores = engine.cache.store, engine.drafters["lm"].store
    for store in stores:
        for keys in (*store.keys, *store.values):
            keys.fill_(7.0)
    for _ in engine.prepare(5):
        pass
    for store in stores:  # the last slot is nobody's
        assert all((keys[:-1] == 7.0).all() for keys in (*store.keys, *store.values))
    assert engine.runner.sizes.made == {1, 2, 4, 8}
    costs = engine.planner.costs.captured
    assert costs.measured == {(name, size) for name in ("none", "lm", "lookup") for size in (1, 2, 4, 8)}
    assert costs.plain(8) is not None and costs.per_token.keys() == {"lm"}
    for key, value in state.items():  # the last row is padding's
        assert torch.equal(getattr(engine.runner.state, key)[:-1], value[:-1]), key
    requests = some_requests(3)
    assert run(engine, requests) == run(make_engine(model, small, None), requests)
    eager = make_engine(model, small, None)
    for _ in eager.prepare(5):
        pass
    costs = eager.planner.costs
    assert not costs.captured.ahead and max(costs.eager.curve) == 24  # rows are all it measures


def test_answers_may_come_in_between_while_steps_are_prepared(model, small) -> None:
    engine = make_engine(model, small, 1, Planner("lm", choices=("lm", "lookup")))
    eager = make_engine(model, small, None)
    for i, _ in enumerate(engine.prepare(2)):
        if i % 8:
            continue
        requests = some_requests(i // 8 % 3)
        assert run(engine, requests) == run(eager, requests)
    assert {("lm", 1), ("lm", 2), ("lookup", 1), ("lookup", 2)} <= engine.planner.costs.captured.measured


def test_steps_that_somebody_needed_first_are_prepared_like_any_other(model, small) -> None:
    """An answer before preparing makes its size; what is captured and measured for that must not be less."""
    engine = make_engine(model, small, 1, Planner("lm", choices=("lm", "lookup")))
    run(engine, some_requests(2)[:2])
    assert engine.runner.sizes.made
    assert not engine.runner.preparation.prepared & {("none", 1), ("none", 2)}
    for _ in engine.prepare(5):
        pass
    expected = {(name, size) for name in ("none", "lm", "lookup") for size in (1, 2, 4, 8)}
    assert engine.planner.costs.captured.measured == expected == engine.runner.preparation.prepared


def test_plain_steps_are_prepared_where_nobody_drafts(model, small) -> None:
    engine = make_engine(model, small, 1, "none")
    for _ in engine.prepare(2):
        pass
    assert engine.runner.sizes.made == {1, 2} and engine.planner.costs.captured.plain(2) is not None


# --------------------------------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("tree", TREES)
def test_trees_change_nothing_and_more_of_them_is_accepted(model, small, lag, tree) -> None:
    asked = [
        request(f"r{i}", prompt_of(4 + 7 * i, i), max_tokens=50, temperature=0.7, seed=i) for i in range(3)
    ]
    plain = run(make_engine(model, small, None, "none"), asked)
    accepted = {}
    for depth, nodes in (tree, (tree[0], tree[0])):
        engine = make_engine(model, small, lag, Always(DraftPlan("lm", nodes, depth)))
        sequences = [engine.add(one)[0] for one in asked]
        finish(engine)
        assert {(s.request.id, 0): s.output for s in sequences} == plain
        assert {size for s in sequences for size, _ in s.draft_counts} == {nodes}
        accepted[nodes] = sum(s.accepted for s in sequences) / sum(s.steps for s in sequences)
    assert accepted[tree[1]] > accepted[tree[0]]


class Pausing(Always):
    """Drafts in one step and rests in the next."""

    rests = True

    def plan(self, work, options) -> Plan:
        self.rests = not self.rests
        return Plan((NO_DRAFT_PLAN,) * len(work)) if self.rests else super().plan(work, options)


@pytest.mark.parametrize("planner", [Always, Pausing])
def test_a_draft_knows_what_it_has_read_of_a_tree(model, small, monkeypatch, planner) -> None:
    """Its drafts are those of a drafter that reads everything again before every step."""
    asked = request("r", prompt_of(9, 3), max_tokens=120, temperature=0.7, seed=3)
    seen = []
    for forgets in (False, True):
        engine = make_engine(model, small, 0, planner(DraftPlan("lm", 15, 3)))
        engine.runner.runs.observe = lambda *_: None  # plain passes go by the clock otherwise
        lm, drafts = engine.drafters["lm"], []
        propose = lm.propose_resident

        def noted(*given, propose=propose, drafts=drafts):
            tokens, counts = propose(*given)
            drafts.append(tokens.tolist())
            return tokens, counts

        monkeypatch.setattr(lm, "propose_resident", noted)
        engine.add(asked)
        while not engine.idle:
            engine.step()
            if forgets:
                lm.progress.clear()
        seen.append(drafts)
    assert seen[0] == seen[1] and len(seen[0]) > 5
