"""The same tokens whatever else happens: company, chunking, preemption, reuse, and drafts right or wrong; eagerly and
with the host a step behind.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.draft.lookup import LookupDrafter
from outrider.model.decoder import kv_bytes
from outrider.types import Draft, DraftPlan
from outrider.verify.noise import choice_seed
from tests.sweep import sweep
from tests.tiny import (
    VOCAB,
    Always,
    finish,
    prompt_of,
    request,
    run_alone,
    tiny_engine,
    tiny_model,
    tokens_of,
)

LAWS = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8},
    "hot": {"temperature": 1.3},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5},
    "bias": {"temperature": 0.8, "logit_bias": {3: 4.0, 5: -8.0}},
    "bad words": {"temperature": 0.8},
    "min tokens": {"temperature": 0.8, "min_tokens": 10},
}


@pytest.fixture(scope="module", params=sweep(["c", "torch"], quick=["c"]))
def model(request):
    return tiny_model(kernels=request.param, threads=2)


def make(name: str, law: str, length: int = 20, **more):
    words = [(3,), (7, 9)] if law == "bad words" else ()
    return request(
        name, prompt_of(length, len(name) + length), {1, 2}, bad_word_ids=words, **{**LAWS[law], **more}
    )


@pytest.fixture(scope="module")
def requests():
    laws = [*LAWS, "greedy", "warm", "top_p", "penalties", "hot"]
    return [make(f"{law}{i}", law, length=5 + 7 * i, max_tokens=10 + 3 * i) for i, law in enumerate(laws)]


@pytest.fixture(scope="module")
def alone(model, requests):
    return {r.id: run_alone(model, r, prefix_reuse=False) for r in requests}


def answers(engine, requests) -> dict[str, list[int]]:
    for r in requests:
        engine.add(r)
    events = finish(engine)
    return {r.id: tokens_of(events[r.id, 0]) for r in requests}


def test_sixteen_mixed_requests_share_their_steps(model, requests, alone, lag):
    assert len(requests) == 16
    assert answers(tiny_engine(model, lag=lag), requests) == alone


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_a_model_in_fewer_bits_does_too(requests, weights):
    """In batches its weights are widened once for many rows, alone for every row."""
    model = tiny_model(weights=weights)
    plain = {r.id: run_alone(model, r, prefix_reuse=False) for r in requests}
    engine = tiny_engine(model, Always(DraftPlan("test", 4, 4)), LookupDrafter())
    assert answers(engine, requests) == plain


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8])
def test_a_cache_in_fewer_bits_does_too(requests, alone, kept):
    """Also where requests wait, are read again and find prefixes."""
    model = tiny_model()
    model.kept = kept
    plain = {r.id: run_alone(model, r, prefix_reuse=False) for r in requests}
    assert plain != alone  # it does round
    room = 230 * kv_bytes(model)
    engine = tiny_engine(model, Always(DraftPlan("test", 4, 4)), LookupDrafter(), cache_bytes=room)
    assert engine.table.pool.total == 230
    for _ in range(2):
        assert answers(engine, requests) == plain
    assert engine.scheduler.preemptions > 2


@pytest.mark.parametrize("step_rows", sweep([32, 33, 47, 500], quick=[33, 500]))
def test_any_prefill_chunk(model, requests, alone, step_rows, lag):
    assert answers(tiny_engine(model, step_rows=step_rows, lag=lag), requests) == alone


def test_preempted_and_resumed(model, requests, alone, lag):
    engine = tiny_engine(model, cache_bytes=230 * model.config.kv_bytes_per_token, lag=lag)
    assert answers(engine, requests) == alone
    assert engine.scheduler.preemptions > 2


@pytest.mark.parametrize("law", ["greedy", "warm"])
def test_prefix_reuse(model, law, lag):
    one = make("first", law, length=70)
    plain = run_alone(model, one, prefix_reuse=False)
    engine = tiny_engine(model, lag=lag)
    engine.add(one)
    assert tokens_of(finish(engine)["first", 0]) == plain
    again = request("again", one.prompt_ids, {1, 2}, **{**LAWS[law], "seed": one.params.seed})
    (sequence,) = engine.add(again)
    assert tokens_of(finish(engine)["again", 0]) == plain
    assert sequence.reused == 64


def test_choices_equal_requests_with_their_seeds(model, lag):
    engine = tiny_engine(model, lag=lag)
    engine.add(make("many", "warm", n=5, seed=11))
    events = finish(engine)
    texts = [tokens_of(events["many", c]) for c in range(5)]
    assert len(set(map(tuple, texts))) == 5
    for c in range(5):
        one = request("many", prompt_of(20, 24), {1, 2}, **{**LAWS["warm"], "seed": choice_seed(11, c)})
        assert run_alone(model, one) == texts[c]


class Fixed(Always):
    """Plans the same number of nodes for everyone, or whatever a dice says."""

    def __init__(self, nodes: int, toggle: bool = False) -> None:
        dice = random.Random(1)
        super().__init__(DraftPlan("test", nodes, nodes), lambda sequence: not toggle or dice.random() < 0.5)


class Oracle:
    """Knows the answers. Errs with a given chance; guesses chains, or trees with wrong branches beside the
    right.
    """

    def __init__(self, answers: dict[str, list[int]], wrong: float, tree: bool) -> None:
        self.answers, self.wrong, self.tree, self.dice = answers, wrong, tree, random.Random(2)

    def start(self, sequence) -> None: ...
    def accept(self, sequence, draft, verdict) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, draft_plans):
        return [self.guess(s, draft_plan.nodes) for s, draft_plan in zip(sequences, draft_plans, strict=True)]

    def guess(self, s, nodes) -> Draft:
        done = len(s.output)
        right = self.answers[s.request.id][done : done + nodes]
        right += [self.dice.randrange(VOCAB) for _ in range(nodes - len(right))]  # past the end: anything
        tokens = [t if self.dice.random() >= self.wrong else self.dice.randrange(VOCAB) for t in right]
        if not self.tree:
            return Draft.chain(tokens)
        return self.grow(tokens, nodes)

    def grow(self, trunk, nodes) -> Draft:
        """The trunk, scattered among random branches and duplicates of itself."""
        tokens: list[int] = []
        parents: list[int] = []
        tip, at = -1, 0
        while len(tokens) < nodes:
            if self.dice.random() < 0.5 and at < len(trunk):
                tokens.append(trunk[at])
                parents.append(tip)
                tip, at = len(tokens) - 1, at + 1
            else:
                token = (
                    trunk[at] if self.dice.random() < 0.3 and at < len(trunk) else self.dice.randrange(VOCAB)
                )
                parents.append(self.dice.randrange(-1, len(tokens)))
                tokens.append(token)
        return Draft(tuple(tokens), tuple(parents))


@pytest.mark.parametrize(
    ("wrong", "tree"),
    sweep(product([0.0, 0.3, 1.0], [False, True]), quick=[(0.0, False), (0.3, True), (1.0, True)]),
)
def test_guesses_right_or_wrong(model, requests, alone, wrong, tree, lag):
    drafter = Oracle(alone, wrong, tree)
    engine = tiny_engine(model, Fixed(7), drafter, step_rows=500, lag=lag)
    for r in requests:
        engine.add(r)
    events = finish(engine)
    assert {r.id: tokens_of(events[r.id, 0]) for r in requests} == alone
    if wrong == 0.0 and not tree:
        steps = max(len(e) for e in events.values())
        assert steps <= max(map(len, alone.values())) // 8 + 2  # seven guesses and one more a step


@pytest.mark.parametrize("tree", [False, True])
def test_guessing_toggled_with_preemption(model, requests, alone, tree, lag):
    engine = tiny_engine(
        model,
        Fixed(5, toggle=True),
        Oracle(alone, 0.3, tree),
        cache_bytes=300 * model.config.kv_bytes_per_token,
        lag=lag,
    )
    assert answers(engine, requests) == alone
    engine.table.prefix.clear()
    assert engine.table.pool.free == engine.table.pool.total


@settings(max_examples=6, suppress_health_check=list(HealthCheck))  # an example is long
@given(data=st.data())
def test_anything_may_be_aborted_at_any_time(model, lag, data):
    """By custom drafters or by lookup, whose sequences are resident where there is a lag."""
    cache_bytes = 300 * model.config.kv_bytes_per_token
    drafters = {"test": Oracle({f"r{i}": [] for i in range(8)}, 1.0, True), "lookup": LookupDrafter()}
    planner = Always(DraftPlan(data.draw(st.sampled_from(list(drafters))), 5, 5))
    engine = tiny_engine(model, planner, drafters=lambda _: drafters, lag=lag, cache_bytes=cache_bytes)
    keep = make("r0", "warm", length=9, max_tokens=40)
    expected = run_alone(model, keep)
    received: list[int] = []
    for i in range(8):
        engine.add(keep if i == 0 else make(f"r{i}", "warm", length=9 + 20 * i, max_tokens=40, n=1 + i % 3))
    while not engine.idle:
        for event in (event for result in engine.step() for event in result.events):
            received += event.token_ids if event.request_id == "r0" else ()
        if data.draw(st.booleans()):
            engine.abort(f"r{data.draw(st.integers(1, 7))}")
            engine.table.check()
    assert received == expected
    engine.table.prefix.clear()
    assert engine.table.pool.free == engine.table.pool.total
