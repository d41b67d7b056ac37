"""A mixture of experts through steps as a GPU runs them: the tokens of eager steps, and what each step read."""

from __future__ import annotations

from itertools import product

import pytest

from outrider.load.config import Experts
from outrider.model.decoder import Decoder
from outrider.types import StepRecord
from tests.engine.test_graph_runner import arriving, make_engine, run, shapes, some_requests
from tests.sweep import sweep
from tests.tiny import noised_model, prompt_of, request, tiny_model

EXPERTS = Experts(8, 2, 24, score="sigmoid", correction=True, groups=4, groups_kept=2)
SHAPE = {"experts": EXPERTS, "intermediate": 16}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(**SHAPE)


@pytest.fixture(scope="module")
def small() -> Decoder:
    return noised_model(0.15, **SHAPE)


@pytest.mark.parametrize(
    ("seed", "default"), sweep(product(range(4), ["lm", "lookup"]), quick=[(0, "lm"), (1, "lookup")])
)
def test_resident_steps_emit_what_eager_ones_do(
    model: Decoder, small: Decoder, seed: int, default: str
) -> None:
    """With drafts, in batches, and arriving one after the other."""
    requests = some_requests(seed)
    eager = run(make_engine(model, small, None, default), requests)
    assert run(make_engine(model, small, 1, default), requests) == eager
    engine = make_engine(model, small, 1, default)
    found = arriving(engine, requests, lambda step: step % 3 == 0)
    assert {(name, 0): tokens for name, tokens in found.items()} == eager
    assert shapes(engine)


@pytest.mark.parametrize("lag", [None, 1])
def test_a_step_says_how_many_experts_its_pass_read(model: Decoder, small: Decoder, lag: int | None) -> None:
    engine = make_engine(model, small, lag)
    for i in range(2):
        asked = {"drafter": "lm", "depth": 3} if i else False
        engine.add(request(f"r{i}", prompt_of(9 + i, i), max_tokens=25, speculation=asked))
    records: list[StepRecord] = []
    while not engine.idle:
        records += [result.record for result in engine.step()]
    assert len(records) > 8
    for record in records:
        # On a CPU padding of resident steps chooses experts, too.
        most = EXPERTS.count if lag else min(EXPERTS.count, record.rows * EXPERTS.per_token)
        assert EXPERTS.per_token <= record.experts <= most, record
