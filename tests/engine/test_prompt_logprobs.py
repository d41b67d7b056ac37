"""Log-probabilities of the prompt's own tokens: the same however the prompt was read."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from tests.tiny import finish, prompt_of, request, run_alone, tiny_engine, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def scores(model, n: int, **settings):
    engine = tiny_engine(model, **settings)
    if settings.get("lag"):  # beside others that decode: the prompt's rows are staged
        engine.add(request("b", prompt_of(5), max_tokens=30))
        engine.step()
    [sequence] = engine.add(request("a", prompt_of(n), max_tokens=3, prompt_logprobs=2))
    finish(engine)
    return sequence.prompt_logprobs


def test_every_token_but_the_first_has_one(model, lag) -> None:
    found = scores(model, 20, lag=lag)
    assert len(found) == 20
    assert found[0] is None
    assert [entry.token for entry in found[1:]] == list(prompt_of(20))[1:]
    assert all(entry.logprob <= 0 and len(entry.alternatives) == 2 for entry in found[1:])


def test_a_prompt_read_in_chunks_scores_the_same(model, lag) -> None:
    whole = scores(model, 60, step_rows=64)
    chunked = scores(model, 60, step_rows=7, max_sequences=4, lag=lag)
    assert whole == chunked


def test_they_are_what_generation_reports(model, lag) -> None:
    """Generate, then score prompt and answer as one prompt: the same numbers, bit for bit."""
    engine = tiny_engine(model, lag=lag)
    [first] = engine.add(request("a", prompt_of(9), max_tokens=12, temperature=0, logprobs=0))
    finish(engine)
    [again] = engine.add(request("b", first.tokens, max_tokens=1, prompt_logprobs=0))
    finish(engine)
    assert [e.logprob for e in again.prompt_logprobs[9:]] == [e.logprob for e in first.logprobs]


def test_a_remembered_prefix_is_read_again_for_them(model, lag) -> None:
    engine = tiny_engine(model, lag=lag)
    for name in "ab":
        [sequence] = engine.add(request(name, prompt_of(30), max_tokens=2, prompt_logprobs=0))
        finish(engine)
    assert sequence.reused == 0
    assert len(sequence.prompt_logprobs) == 30


def test_beside_requests_that_want_none(model, lag) -> None:
    engine = tiny_engine(model, lag=lag)
    [scored] = engine.add(request("a", prompt_of(30), max_tokens=8, prompt_logprobs=1))
    [plain] = engine.add(request("b", prompt_of(17), max_tokens=8, temperature=0.8, seed=3))
    finish(engine)
    assert len(scored.prompt_logprobs) == 30
    assert plain.prompt_logprobs == []
    alone = run_alone(model, request("b", prompt_of(17), max_tokens=8, temperature=0.8, seed=3))
    assert plain.output == alone


def test_the_front_door_gives_them(llm) -> None:
    [out] = llm.generate("The capital of France is Paris", SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(out.prompt_ids)
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].prompt_logprobs is None
