"""Every drafter, every law, every circumstance: tokens, text, reasons and logprobs are those of plain
decoding. Eagerly, and with resident sequences while the host is a step behind.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import load_eagle
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter
from outrider.types import NO_DRAFT_PLAN, Draft, DraftPlan, Request
from outrider.verify.grammar import GrammarCompiler
from tests.load.tiny import byte_level_backend
from tests.tiny import (
    VOCAB,
    Always,
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
)  # fmt: skip

ENDS = {1, 2}
LAWS = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "warm": {"temperature": 0.7, "logprobs": 0},
    "hot": {"temperature": 1.3, "logprobs": 3},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3, "logprobs": 1},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5},
    "bias": {"temperature": 0.8, "logit_bias": {3: 4.0, 5: -8.0}},
    "bad words": {"temperature": 0.8, "bad_word_ids": [(3,), (7, 9)]},
    "stop string": {"temperature": 0.8, "stop": ["A", "x1"]},
    "stop id": {"temperature": 0.8, "stop_token_ids": tuple(range(10, 22))},
    "choices": {"temperature": 0.8, "n": 3},
    "min tokens": {"temperature": 0.8, "min_tokens": 12, "stop_token_ids": tuple(range(10, 30))},
}


class Wild:
    """Guesses without a model: at random, always wrong, right, with ends inside, with every node twice."""

    def __init__(self, kind: str, answers: dict[tuple[str, int], list[int]]) -> None:
        self.kind, self.answers, self.dice = kind, answers, random.Random(3)

    def start(self, sequence) -> None: ...
    def accept(self, sequence, draft, verdict) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, draft_plans):
        return [self.guess(s, draft_plan) for s, draft_plan in zip(sequences, draft_plans, strict=True)]

    def guess(self, s, draft_plan) -> Draft:
        n, done = draft_plan.nodes, len(s.output)
        right = self.answers[s.request.id, s.choice][done : done + n]
        right = [*right, *(self.dice.randrange(VOCAB) for _ in range(n - len(right)))]
        if self.kind == "oracle":
            return Draft.chain(right)
        if self.kind == "wrong":
            return Draft.chain([(t + 1) % VOCAB for t in right])
        if self.kind == "ends":
            return Draft.chain(
                [t if self.dice.random() < 0.7 else self.dice.choice((1, 2, 10)) for t in right]
            )
        if self.kind == "duplicates":
            half = right[: n // 2]
            parents = [2 * i - 2 + k if i else -1 for i in range(len(half)) for k in (0, 1)]
            return Draft(tuple(t for t in half for _ in "ab"), tuple(parents))
        parents = [self.dice.randrange(-1, i) for i in range(n)]
        return Draft(tuple(self.dice.randrange(VOCAB) for _ in parents), tuple(parents))


WILD = ("random", "wrong", "oracle", "ends", "duplicates")
KINDS = ("lookup", "lm", "early_exit", "eagle", "lookup+lm", *WILD)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def draft_model():
    return noised_model()


@pytest.fixture(scope="module")
def head(tmp_path_factory, model):
    return write_eagle(tmp_path_factory.mktemp("head"), model.config, eagle_tensors(model.config, 60))


def make(law: str, i: int, drafter: str | None = None, mode: str = "coupled", predicted: bool = True):
    options = dict(LAWS[law])
    length = 5 + 5 * (i % 9)
    prompt = (prompt_of(7, i) * 9)[:length]  # repeats itself, so that lookup has something to find
    return request(f"{law}{i}", prompt, ENDS, owner=str(i % 3), max_tokens=16 + i % 7,
                   prediction=prompt_of(9, i) if predicted else (),
                   speculation={"drafter": drafter, "mode": mode}, **options)  # fmt: skip


def every_law(predicted: int = 0) -> list[Request]:
    """Every third one has a prediction, which the host must draft from."""
    return [make(law, i, predicted=i % 3 == predicted) for i, law in enumerate(LAWS)]


def outcome(events) -> dict:
    return {
        key: (
            tokens_of(each),
            "".join(e.text for e in each),
            each[-1].finish_reason,
            [lp for e in each for lp in e.logprobs or ()],
        )
        for key, each in events.items()
    }


def run(engine, requests, every: int = 0) -> dict:
    """All at once, or one in so many steps, so that prompts are read while others decode."""
    events: dict = {}
    for r in requests:
        engine.add(r)
        for _ in range(every):
            for event in (event for result in engine.step() for event in result.events):
                events.setdefault((event.request_id, event.choice), []).append(event)
    for key, rest in finish(engine).items():
        events.setdefault(key, []).extend(rest)
    return outcome(events)


def same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, (tokens, text, reason, logprobs) in expected.items():
        assert found[key][:3] == (tokens, text, reason), key
        assert len(found[key][3]) == len(logprobs)
        for a, b in zip(found[key][3], logprobs, strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [t for t, _ in a.alternatives] == [t for t, _ in b.alternatives]


@pytest.fixture(scope="module")
def plain(model):
    """Each law decoded alone and without guesses."""
    found = {}
    for i, law in enumerate(LAWS):
        found |= run(tiny_engine(model, prefix_reuse=False), [make(law, i, "none")])
    assert {"stop", "length"} == {reason for _, _, reason, _ in found.values()}
    return found


def armed(model, draft_model, head, answers, planner, lag, **settings):
    tokens = {key: value[0] for key, value in answers.items()}

    def drafters(cache):
        lookup, lm = LookupDrafter(), lm_drafter(draft_model, cache)
        eagle = EagleDrafter(load_eagle(head, model, cache.context), cache.store, cache.table)
        return {
            "lookup": lookup, "lm": lm, "eagle": eagle,
            "lookup+lm": MergedDrafter({"lookup": lookup, "lm": lm}, cache.table),
            "early_exit": EarlyExitDrafter(model, cache.store, cache.table, 1),
            **{kind: Wild(kind, tokens) for kind in WILD},
        }  # fmt: skip

    return tiny_engine(model, planner, drafters=drafters, lag=lag, **{"step_rows": 400, **settings})


def clean(engine) -> None:
    engine.table.prefix.clear()
    engine.table.check()
    assert engine.table.used == 0 and not engine.in_flight and not engine.drafters.faults
    assert not engine.drafters["lookup"].texts and not engine.drafters["lookup+lm"]._given


@pytest.mark.parametrize("kind", KINDS)
def test_one_drafter_for_every_law(model, draft_model, head, plain, kind, lag):
    for i, draft_plan in enumerate(
        (DraftPlan(kind, 4, 4), DraftPlan(kind, 9, 3)) if lag is None else (DraftPlan(kind, 15, 3),)
    ):
        engine = armed(model, draft_model, head, plain, Always(draft_plan), lag)
        same(run(engine, every_law(predicted=i), every=lag or 0), plain)
        clean(engine)


def test_alone(model, draft_model, head, plain, lag):
    for i, law in list(enumerate(LAWS))[:: 1 if lag is None else 2]:
        engine = armed(model, draft_model, head, plain, Always(DraftPlan(KINDS[i % len(KINDS)], 6, 4)), lag)
        found = run(engine, [make(law, i, predicted=i % 3 == 0)])
        same(found, {key: value for key, value in plain.items() if key in found})
        clean(engine)


class Restless(Always):
    """Every sequence, every step: another drafter, another draft plan, or none."""

    def __init__(self) -> None:
        super().__init__(NO_DRAFT_PLAN)
        self.dice = random.Random(5)

    def one(self, sequence) -> DraftPlan:
        if self.dice.random() < 0.3:
            return NO_DRAFT_PLAN
        depth = self.dice.randrange(1, 5)
        return DraftPlan(self.dice.choice(KINDS), self.dice.choice((depth, 2 * depth)), depth)


@pytest.mark.parametrize("room", [4000, 330])
def test_another_drafter_every_step_and_preempted(model, draft_model, head, plain, room, lag):
    engine = armed(
        model, draft_model, head, plain, Restless(), lag, cache_bytes=room * model.config.kv_bytes_per_token
    )
    same(run(engine, every_law()), plain)
    assert (engine.scheduler.preemptions > 2) == (room < 1000)
    clean(engine)


def test_other_modes_in_the_batch_disturb_nobody(model, draft_model, head, plain, lag):
    engine = armed(model, draft_model, head, plain, Always(DraftPlan("lm", 3, 3)), lag)
    others = [
        make(law, 40 + 2 * i + (mode == "lossy"), ("lm", "lookup", "lookup+lm")[i % 3], mode)
        for i, law in enumerate(["warm", "hot", "top_k", "penalties", "greedy"])
        for mode in ("rejection", "lossy")
    ]
    coupled = [make(law, i, KINDS[i % 5], predicted=i % 3 == 0) for i, law in enumerate(LAWS)]
    shuffled = [*coupled, *others]
    random.Random(1).shuffle(shuffled)
    found = run(engine, shuffled)
    same({key: found[key] for key in plain}, plain)
    assert len(found) > len(plain) + 5
    clean(engine)


def test_rejection_at_temperature_zero_is_plain(model, draft_model, head, plain, lag):
    engine = armed(model, draft_model, head, plain, Always(DraftPlan("lm", 3, 3)), lag)
    found = run(engine, [make("greedy", 0, "lm", "rejection")])
    same(found, {key: plain[key] for key in found})


GRAMMARS = {
    "regex": ({"regex": "[a-c]{3,9}(1|2)"}, r"[a-c]{3,9}[12]"),
    "choice": ({"choice": ["hello", "help me", "12"]}, r"hello|help me|12"),
    "schema": (
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["lm", "lookup", "early_exit", "wild"])
def test_grammars(kind, lag):
    backend = byte_level_backend()
    vocab = backend.get_vocab_size()
    model = tiny_model(vocab=vocab)
    compiler = GrammarCompiler(backend.to_str(), vocab, [0])

    def requests():
        for i, name in enumerate(GRAMMARS):
            for temperature in (0, 1.0):
                grammar = compiler.compile(GRAMMARS[name][0])
                yield request(f"{name}:{temperature}", range(60 + i, 75), {0}, grammar=grammar, max_tokens=30,
                              temperature=temperature)  # fmt: skip

    plain = run(tiny_engine(model), list(requests()))

    def drafters(cache):
        if kind == "lm":
            return {kind: LmDrafter(noised_model(vocab=vocab), cache.table, vocab, cache.context)}
        if kind == "early_exit":
            return {kind: EarlyExitDrafter(model, cache.store, cache.table, 1)}
        wild = Wild("ends", {k: v[0] for k, v in plain.items()})
        return {kind: LookupDrafter() if kind == "lookup" else wild}

    engine = tiny_engine(model, Always(DraftPlan(kind, 8, 4)), drafters=drafters, lag=lag)
    found = run(engine, list(requests()), every=1)
    same(found, plain)
    for (name, _), (tokens, _, reason, _) in found.items():
        text = backend.decode([t for t in tokens if t])
        pattern = GRAMMARS[name.split(":")[0]][1]
        if reason == "stop":
            assert re.fullmatch(pattern, text) if pattern else isinstance(json.loads(text)["a"], int)
    assert sum(reason == "stop" for _, _, reason, _ in found.values()) >= 3
