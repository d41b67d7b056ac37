"""A worse draft and other content both lower acceptance. How predictable the target finds its text says which it is."""

from __future__ import annotations

from math import exp

import pytest

from outrider.model.decoder import Decoder, make_kernels
from outrider.settings import cache_folder
from outrider.types import DraftPlan
from tests.tiny import (
    Always,
    finish,
    lm_drafter,
    noised,
    prompt_of,
    random_tensors,
    request,
    tiny_config,
    tiny_engine,
)

DEPTH, TOKENS = 3, 40


def sure_model(noise: float = 0.0):
    """A random model, and the same with noise on its weights, with larger logits: a flat one finds nothing likely."""
    config = tiny_config()
    read = noised(config, 0, noise) if noise else random_tensors(config)
    kernels = make_kernels(config, config.context + 64, 1, cache_folder() / "kernels", "auto")
    return Decoder(config, lambda name: read(name) * (3 if name == "model.norm.weight" else 1), kernels)


@pytest.fixture(scope="module")
def model():
    return sure_model()


@pytest.fixture(scope="module")
def drafts():
    return {"good": sure_model(0.03), "bad": sure_model(0.1)}


@pytest.fixture(scope="module")
def contents(model):
    """Prompts by how predictable the target finds what it writes after them: the least, and the most."""
    engine = tiny_engine(model)
    for i in range(32):
        engine.add(request(f"{i}", prompt_of(8, i), max_tokens=TOKENS, logprobs=0))
    said = {
        name: [p.logprob for e in events for p in e.logprobs] for (name, _), events in finish(engine).items()
    }
    ranked = sorted(said, key=lambda name: sum(map(exp, said[name])))
    return {"hard": [int(name) for name in ranked[:8]], "easy": [int(name) for name in ranked[-8:]]}


def measured(model, draft, prompts: list[int]) -> tuple[float, float]:
    """First draft tokens accepted, and the mean probability of the tokens that were looked at."""
    engine = tiny_engine(
        model, Always(DraftPlan("lm", DEPTH, DEPTH)), drafters=lambda cache: {"lm": lm_drafter(draft, cache)}
    )
    engine.runner.packer.sample_interval = 1
    drafts = accepted = tokens = 0
    probability = 0.0
    for pair in zip(prompts[::2], prompts[1::2], strict=True):
        for i in pair:
            engine.add(request(f"{i}", prompt_of(8, i), max_tokens=TOKENS))
        while not engine.idle:
            for result in engine.step():
                for outcome in result.record.outcomes:
                    drafts += outcome.drafted > 0
                    accepted += outcome.top1_accepted > 0
                for drafter, count, total in result.record.predicted:
                    assert drafter == "lm"
                    tokens, probability = tokens + count, probability + total
    assert tokens > 3 * TOKENS
    return accepted / drafts, probability / tokens


def test_a_worse_draft_is_distinguished_from_other_content(model, drafts, contents):
    acceptance, probability = measured(model, drafts["good"], contents["easy"])
    worse, same = measured(model, drafts["bad"], contents["easy"])
    assert worse < acceptance - 0.2 and abs(same - probability) < 0.05
    other, less = measured(model, drafts["good"], contents["hard"])
    assert other < acceptance - 0.05 and less < probability - 0.1


@pytest.mark.parametrize("lag", [None, 0, 1])
def test_the_probabilities_are_the_targets_own(model, drafts, lag):
    engine = tiny_engine(
        model,
        Always(DraftPlan("lm", DEPTH, DEPTH)),
        drafters=lambda c: {"lm": lm_drafter(drafts["good"], c)},
        lag=lag,
    )
    engine.runner.packer.sample_interval = 1
    engine.add(request("a", prompt_of(7, 1), max_tokens=30, temperature=0.8, logprobs=0))
    looked = []
    events = []
    while not engine.idle:
        for result in engine.step():
            looked += result.record.predicted
            events += [event for event in result.events if len(result.record.predicted)]
    said = [entry.logprob for event in events for entry in event.logprobs]
    assert sum(count for _, count, _ in looked) >= len(said) > 20  # the last step may say more than is wanted
    whole = [
        (total, event)
        for (_, count, total), event in zip(looked, events, strict=True)
        if count == len(event.token_ids)
    ]
    assert len(whole) > 5
    for total, event in whole:
        assert total == pytest.approx(sum(exp(entry.logprob) for entry in event.logprobs), rel=1e-4)


def test_what_was_launched_past_an_end_is_not_looked_at(model, drafts):
    engine = tiny_engine(
        model,
        Always(DraftPlan("lm", DEPTH, DEPTH)),
        drafters=lambda c: {"lm": lm_drafter(drafts["good"], c)},
        lag=1,
    )
    engine.runner.packer.sample_interval = 1
    past = 0
    for length in range(10, 18):
        engine.add(request(f"{length}", prompt_of(7, 1), max_tokens=length))
        while not engine.idle:
            for result in engine.step():
                past += not result.record.sequences
                assert not result.record.predicted or result.events
    assert past


def test_most_steps_are_not_looked_at(model, drafts):
    engine = tiny_engine(
        model, Always(DraftPlan("lm", 1, 1)), drafters=lambda cache: {"lm": lm_drafter(drafts["bad"], cache)}
    )
    chosen = [engine.runner.packer.sample([4, 7]) for _ in range(64)]
    assert [one for one in chosen if one is not None] == [7, 4, 7, 4]
    assert engine.runner.packer.sample([]) is None
    finish(engine)
