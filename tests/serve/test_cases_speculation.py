"""Defects that speculation has had in other servers, each as a test of its own, named after its case.

Where a case is about the engine it is shown there, with tiny models; where it is about what clients see, over HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from outrider.cache.prefix import BLOCK
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.build import load_model
from outrider.engine.engine import Engine
from outrider.errors import UnsupportedModel
from outrider.load.checkpoint import open_checkpoint
from outrider.load.tokenizer import Tokenizer
from outrider.settings import Settings
from outrider.types import MAX_NODES, NO_DRAFT_PLAN, Draft, DraftPlan, Request
from outrider.verify.grammar import GrammarCompiler
from tests.load.tiny import byte_level_backend
from tests.serve.conftest import Served
from tests.tiny import (
    VOCAB,
    Always,
    Watched,
    finish,
    noised_model,
    prompt_of,
    request,
    run_alone,
    sequence,
    tiny_engine,
    tiny_model,
    tokens_of,
)

CHAIN = DraftPlan("test", 5, 5)
ON, OFF = {"depth": 5}, False


class Oracle:
    """Knows what each request will be answered, and says it up to a point that `right` gives; then errs."""

    def __init__(
        self, answers: dict[str, list[int]], right: Callable[[int], int] = lambda written: 99
    ) -> None:
        self.answers, self.right = answers, right

    def start(self, sequence) -> None: ...
    def accept(self, sequence, draft, verdict) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, draft_plans) -> list[Draft]:
        return [self.guess(s, draft_plan) for s, draft_plan in zip(sequences, draft_plans, strict=True)]

    def guess(self, s, draft_plan: DraftPlan) -> Draft:
        written = len(s.output)
        true = [*self.answers[s.request.id][written:], *[0] * draft_plan.nodes][: draft_plan.nodes]
        good = self.right(written)
        return Draft.chain([t if i < good else (t + 1) % VOCAB for i, t in enumerate(true)])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    for one in requests:
        engine.add(one)
    return {name: tokens_of(events) for (name, _), events in finish(engine).items()}


def guessed(model, one: Request, right: Callable[[int], int] = lambda written: 99, **settings) -> Engine:
    """An engine whose guesses for a request are as right as said."""
    return tiny_engine(model, Always(CHAIN), Oracle({one.id: run_alone(model, one)}, right), **settings)


def drafted_by(
    draft, vocab: int = VOCAB, context: int | None = None, watched: bool = False
) -> Callable[..., dict]:
    """A model as the drafter "test" of a tiny engine."""

    def make(cache) -> dict:
        made = LmDrafter(draft, cache.table, vocab, context or cache.context, step_rows=64)
        return {"test": Watched(made) if watched else made}

    return make


# ------------------------------------------------------------------------------------------ indices and slots


@pytest.mark.parametrize(
    ("kernels", "vocab"), [("c", 33), ("c", 95), ("c", 97), ("c", 127), ("c", 129), ("torch", 97)]
)
@pytest.mark.parametrize("mode", ["coupled", "rejection", "lossy"])
def test_recovered_token_id_past_the_vocabulary(kernels: str, vocab: int, mode: str) -> None:
    """A kernel works in tiles, and a vocabulary need not fill the last: what lies beyond is nobody's token."""
    odd = tiny_model(kernels, vocab=vocab)
    engine = tiny_engine(odd, Always(DraftPlan("test", 4, 4)), Wrong(vocab))
    for i in range(4):
        how = {"mode": mode}
        law = {"temperature": 1.5, "logprobs": 2, "speculation": how, "max_tokens": 16}
        engine.add(request(f"r{i}", [t % vocab for t in prompt_of(8, i)], **law))
    for events in finish(engine).values():
        ids = tokens_of(events)
        assert len(ids) == 16 and all(0 <= token < vocab for token in ids)
        scores = [score for event in events for score in event.logprobs or ()]
        assert all(0 <= token < vocab for score in scores for token, _ in score.alternatives)


class Wrong(Oracle):
    """Guesses that hardly ever hold, so that nearly every token is one that was recovered."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def guess(self, s, draft_plan: DraftPlan) -> Draft:
        return Draft.chain([(7 * len(s.tokens) + i) % self.vocab for i in range(draft_plan.nodes)])


@pytest.mark.parametrize("nodes", [1, 16, MAX_NODES])
def test_unbounded_accepted_token_index(model, nodes: int) -> None:
    """Guesses that reach past the last token of the context, all of them right as far as there is something to be
    right about: nothing is written past the end of a row, and nothing is emitted past the end of the request."""
    room = model.config.context
    for left in (1, 2, 40):
        one = request(f"r{left}", prompt_of(room - left, 3), max_tokens=left)
        plain = run_alone(model, one)
        engine = tiny_engine(model, Always(DraftPlan("test", nodes, nodes)), Oracle({one.id: plain}))
        guard = engine.table.entries[1:].copy()
        assert run(engine, one)[one.id] == plain and len(plain) == left
        assert (engine.table.entries[1:] == guard).all()  # the rows of others
        engine.table.check()


def test_ngram_map_read_out_of_bounds_when_the_prompt_shrinks(model) -> None:
    """One owner's long text, then a short one with the same words: what was learnt of the first is used for the
    second only as far as that goes."""
    engine = tiny_engine(
        model, Always(DraftPlan("lookup", 8, 8)), drafters=lambda cache: {"lookup": LookupDrafter()}
    )
    words = prompt_of(6, 2)
    for i, times in enumerate((30, 3, 1, 12, 1)):
        one = request(f"r{i}", words * times, max_tokens=30)
        assert run(engine, one)[one.id] == run_alone(model, one)
    short = sequence([*words, *words[:3]])
    drafter = engine.drafters["lookup"]
    drafter.start(short)
    [draft] = drafter.propose([short], [DraftPlan("lookup", 60, 60)])
    assert len(draft) <= 60 and all(0 <= token < VOCAB for token in draft.tokens)


def test_slots_of_drafts_are_freed_and_committed_is_what_is_held(model) -> None:
    """After every step a row holds as many slots as tokens are cached, whatever was guessed; in the end none."""
    requests = [request(f"r{i}", prompt_of(10 + i, i), max_tokens=30) for i in range(5)]
    answers = {one.id: run_alone(model, one) for one in requests}
    engine = tiny_engine(model, Always(DraftPlan("test", 7, 7)), Oracle(answers, lambda written: written % 4))
    sequences = [s for one in requests for s in engine.add(one)]
    while not engine.idle:
        engine.step()
        for s in sequences:
            if s.row >= 0:
                assert engine.table.lengths[s.row] == s.cached
    engine.table.prefix.clear()
    assert engine.table.used == 0


@pytest.mark.parametrize("start", [BLOCK - 5, BLOCK - 3, BLOCK - 1, BLOCK])
def test_rewind_across_a_block_boundary(model, start: int) -> None:
    """Guesses that begin before a block's end and are rejected after it, at every place around one. What the block
    is remembered as must be the text: the next request starts from it."""
    one = request("first", prompt_of(start, 4), max_tokens=3 * BLOCK)
    plain = run_alone(model, one)
    for good in (0, 2, 4):
        engine = guessed(model, one, lambda written, good=good: good)
        assert run(engine, one)["first"] == plain
        longer = [*one.prompt_ids, *plain]
        again = request("again", longer, max_tokens=10)
        [reader] = engine.add(again)
        assert tokens_of(finish(engine)["again", 0]) == run_alone(model, again, prefix_reuse=False)
        assert reader.reused == (len(longer) - 1) // BLOCK * BLOCK


def test_draft_cache_on_a_prefix_hit(model) -> None:
    """The target finds the prompt in its cache and does not read it; the drafter must not take that for having read
    it itself. Its guesses are those it makes without a hit, and its chances are numbers."""

    def guesses(reuse: bool) -> tuple[list[int], dict, int]:
        drafters = drafted_by(noised_model(), watched=True)
        engine = tiny_engine(model, Always(CHAIN), drafters=drafters, prefix_reuse=reuse)
        watched = engine.drafters["test"]
        prompt = prompt_of(50, 5)
        run(engine, request("first", prompt, max_tokens=8))
        run(
            engine, request("other", prompt_of(60, 9), max_tokens=8)
        )  # and the drafter's slots hold its text now
        [s] = engine.add(request("second", prompt, temperature=0.8, max_tokens=30, logprobs=1))
        tokens = tokens_of(finish(engine)["second", 0])
        assert all(math.isfinite(score.logprob) for score in s.logprobs)
        return tokens, {at: draft for (name, at), draft in watched.seen.items() if name == "second"}, s.reused

    (tokens, drafts, found), (same, others, none) = guesses(True), guesses(False)
    assert found == 48 and none == 0
    assert tokens == same and drafts == others and any(draft for draft, _ in drafts.values())


def test_drafts_do_not_push_the_prefix_cache_out(model) -> None:
    """Many requests with one beginning, in a cache with little to spare: as much is reused with guesses as
    without."""
    shared = prompt_of(48, 6)

    def reused(draft_plan: DraftPlan) -> int:
        engine = tiny_engine(
            model, Always(draft_plan), Wrong(VOCAB), cache_bytes=160 * model.config.kv_bytes_per_token
        )
        found = 0
        for i in range(12):
            [s] = engine.add(request(f"r{i}", [*shared, *prompt_of(9, i)], max_tokens=20))
            finish(engine)
            found += s.reused
        return found

    assert reused(DraftPlan("test", 30, 30)) == reused(NO_DRAFT_PLAN) == 11 * 48


@pytest.mark.parametrize("slots", [270, 1000])
@pytest.mark.parametrize("lag", [None, 1])
def test_drafter_with_a_smaller_context_than_the_targets(model, slots: int, lag: int | None) -> None:
    """A drafter with a context of 64, under texts of up to 250 and with little room to borrow: it drafts while it
    can."""
    draft, room = noised_model(context=64), slots * model.config.kv_bytes_per_token
    engine = tiny_engine(model, Always(CHAIN), drafters=drafted_by(draft), lag=lag, cache_bytes=room)
    requests = [request(f"r{i}", prompt_of(8 + 60 * i, i), max_tokens=60) for i in range(4)]
    assert run(engine, *requests) == {one.id: run_alone(model, one) for one in requests}
    engine.table.prefix.clear()
    assert not engine.drafters.faults and engine.table.used == 0


def test_target_that_cannot_be_rewound_is_refused(tmp_path: Path) -> None:
    """A recurrent state has no place to go back to; speculation on it would quietly corrupt the text."""
    config = {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    save_file({"backbone.embeddings.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        load_model(open_checkpoint(tmp_path), Settings())


# ------------------------------------------------------------------------------------------------- same answers


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_probabilistic_drafting_with_many_sequences(model, mode: str) -> None:
    """More than two sequences, drawn guesses, temperature above zero: each is answered as it is alone, though the
    guesses of all are drawn, run and judged together."""
    draft_plan = DraftPlan("test", 3, 3)
    how = {"mode": mode}
    laws = [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20}]
    requests = [
        request(f"r{i}", prompt_of(6 + 3 * i, i), max_tokens=16, speculation=how, **laws[i % 3])
        for i in range(6)
    ]

    def engine() -> Engine:
        return tiny_engine(model, Always(draft_plan), drafters=drafted_by(noised_model()))

    together = run(engine(), *requests)
    assert together == {one.id: run(engine(), one)[one.id] for one in requests}


def test_seed_counts_under_speculation(model) -> None:
    def answer(seed: int, draft_plan: DraftPlan) -> list[int]:
        engine = tiny_engine(model, Always(draft_plan), drafters=drafted_by(noised_model()))
        return run(engine, request("r", prompt_of(9), temperature=1.0, seed=seed, max_tokens=30))["r"]

    assert (
        answer(1, CHAIN)
        == answer(1, CHAIN)
        == answer(1, NO_DRAFT_PLAN)
        != answer(2, CHAIN)
        == answer(2, NO_DRAFT_PLAN)
    )


def test_logprobs_are_the_targets_and_not_zero(model) -> None:
    """Of every token, accepted or not, and of the prompt, which is read with guesses going on beside it."""
    law = {"temperature": 0.9, "max_tokens": 30}
    one = request("r", prompt_of(20), logprobs=3, prompt_logprobs=2, **law)
    company = [request(f"c{i}", prompt_of(9, i), **law) for i in range(3)]

    def scores(engine: Engine) -> tuple[list[Any], list[Any]]:
        for other in company:
            engine.add(other)
        engine.step()
        [s] = engine.add(one)
        finish(engine)
        return s.logprobs, s.prompt_logprobs

    (plain, read), (fast, read_too) = (
        scores(tiny_engine(model)),
        scores(tiny_engine(model, Always(CHAIN), drafters=drafted_by(noised_model()))),
    )
    assert [s.token for s in fast] == [s.token for s in plain] and len(plain) == 30
    for a, b in zip([*fast, *read_too[1:]], [*plain, *read[1:]], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5) and b.logprob < 0 and math.isfinite(b.logprob)
        assert a.alternatives == [(t, pytest.approx(p, abs=1e-5)) for t, p in b.alternatives]
    assert read_too[0] is None and len(read_too) == 20


def test_penalties_grammar_and_speculation_together() -> None:
    """All at once: the grammar and the penalties see the text as it would be at each guess."""
    backend = byte_level_backend()
    vocab = backend.get_vocab_size()
    target, draft = tiny_model(vocab=vocab), noised_model(vocab=vocab)
    compiler = GrammarCompiler(backend.to_str(), vocab, [0])
    schema = {"type": "object", "properties": {"a": {"enum": ["xxyy", "xyxy"]}}, "required": ["a"]}
    law = {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {70: 3.0},
    }

    def requests() -> list[Request]:
        kinds: list[dict[str, Any]] = [{"regex": "([a-f]{2} ?){4,9}"}, {"json_schema": schema}]
        return [
            request(f"{i}-{t}", range(60, 80), {0}, grammar=compiler.compile(kind), temperature=t, **law)
            for i, kind in enumerate(kinds)
            for t in (0, 0.9)
        ]

    plain = run(tiny_engine(target), *requests())
    for draft_plan in (CHAIN, DraftPlan("test", 12, 3)):
        assert (
            run(tiny_engine(target, Always(draft_plan), drafters=drafted_by(draft, vocab)), *requests())
            == plain
        )


def test_acceptance_does_not_collapse() -> None:
    """A drafter that is the target itself is right at the end of a long text as at its beginning, and for the
    twentieth request as for the first, though some were aborted and some made to wait."""
    long = tiny_model(context=500, vocab=60)  # small enough for a drafter to draw from all of it
    engine = tiny_engine(long, Always(CHAIN), drafters=drafted_by(long, 60))
    words = [t % 60 for t in prompt_of(9)]
    [s] = engine.add(request("long", words, temperature=0.7, max_tokens=400))
    finish(engine)
    held = [accepted for _, accepted in s.draft_counts]
    assert min(held[:-1]) == 5 and len(held) <= 400 // 6 + 1
    for i in range(24):
        [s] = engine.add(request(f"r{i}", [*words, i], temperature=0.7, max_tokens=24))
        if i % 3 == 0:
            engine.step()
            engine.abort(f"r{i}")
            continue
        finish(engine)
        assert s.accepted == 20 and s.steps == 4


# ------------------------------------------------------------------------------------------------ as clients see it


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client(served: Served):
    with httpx.Client(base_url=served.url, timeout=30) as shared:
        yield shared


def answer(client: httpx.Client, path: str, **asked: Any) -> dict[str, Any]:
    reply = client.post(path, json={"temperature": 0, **asked})
    assert reply.status_code == 200, reply.text
    return reply.json()


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["hello", "help", "hell"]}, "times": {"type": "integer"}},
            "required": ["word", "times"],
        },
    },
}


@pytest.mark.parametrize("seed", range(2))
def test_tool_calls_under_ngram_guesses(client: httpx.Client, seed: int) -> None:
    """The prompt is full of what looks like the call, so that guesses abound."""
    text = '<tool_call>[{"name": "look_up", "arguments": {"word": "help", "times": 12}}]</tool_call> ' * 3
    asked = {
        "messages": [{"role": "user", "content": text}], "tools": [TOOL], "tool_choice": "required",
        "seed": seed, "temperature": 1.0, "max_tokens": 120,
    }  # fmt: skip
    found = [answer(client, CHAT, **asked, speculative_decoding=how) for how in (OFF, ON)]
    off, on = (body["choices"][0] for body in found)
    assert on == off
    assert found[1]["timings"]["draft_n_accepted"] > 20 and found[0]["timings"]["draft_n"] == 0
    for call in on["message"]["tool_calls"] if on["finish_reason"] == "tool_calls" else ():
        assert json.loads(call["function"]["arguments"]).keys() == {"word", "times"}


def test_stop_string_completed_within_a_block(client: httpx.Client) -> None:
    """A stop string in the middle of a run of accepted guesses: text, tokens, scores and usage all end there."""
    asked = {"prompt": "hello 12 hello", "max_tokens": 60, "seed": 3, "temperature": 1.0, "logprobs": 1,
             "ignore_eos": True, "return_token_ids": True, "speculative_decoding": OFF}  # fmt: skip
    whole = answer(client, PLAIN, **asked)["choices"][0]
    prediction = {"type": "content", "content": whole["text"]}
    pieces = [piece for piece in whole["logprobs"]["tokens"][5:40] if piece.isprintable() and piece.strip()]
    assert len(pieces) > 5
    for stop in pieces[:6]:
        plain = answer(client, PLAIN, **asked, stop=stop)
        fast = answer(
            client,
            PLAIN,
            **{**asked, "speculative_decoding": {"depth": 20}},
            stop=stop,
            prediction=prediction,
        )
        assert fast["choices"] == plain["choices"]
        choice = fast["choices"][0]
        assert choice["finish_reason"] == "stop" and stop not in choice["text"]
        count = len(choice["token_ids"])
        assert len(choice["logprobs"]["tokens"]) == fast["usage"]["completion_tokens"] == count < 60


def test_usage_ends_at_the_models_own_end(client: httpx.Client) -> None:
    """The end token comes in the middle of a right guess that goes on: nothing after it is counted or shown."""
    asked = {"prompt": "hello", "max_tokens": 80, "seed": 1, "logprobs": 0, "return_token_ids": True}
    bias = {"0": 3.0}
    plain = answer(client, PLAIN, **asked, temperature=1.0, logit_bias=bias, speculative_decoding=OFF)
    choice = plain["choices"][0]
    assert choice["finish_reason"] == "stop" and 3 < len(choice["token_ids"]) < 80
    fast = answer(
        client, PLAIN, **asked, temperature=1.0, logit_bias=bias, speculative_decoding={"depth": 30},
        prediction={"type": "content", "content": choice["text"] + " and on and on"},
    )  # fmt: skip
    assert fast["choices"] == plain["choices"]
    assert fast["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert fast["timings"]["draft_n_accepted"] <= len(choice["token_ids"])


@pytest.mark.parametrize("tail", [b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98"])
@pytest.mark.parametrize("how", [OFF, ON])
def test_prompt_that_ends_within_a_character_stays_out_of_the_answer(
    client: httpx.Client, tail: bytes, how: Any
) -> None:
    """Half a character at the prompt's end is the prompt's: what is told is the answer alone, from the first event
    on."""
    tokenizer = Tokenizer(byte_level_backend())
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    prompt = [of_byte[bytes([byte])] for byte in b"secret" + tail]
    asked = {"prompt": prompt, "max_tokens": 12, "seed": 2, "temperature": 1.0, "speculative_decoding": how}
    whole = answer(client, PLAIN, **asked, return_token_ids=True)["choices"][0]
    assert whole["text"] == tokenizer.decode(whole["token_ids"])
    with client.stream("POST", PLAIN, json={**asked, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(texts) == whole["text"] and "secret" not in whole["text"]
    assert whole["text"].startswith(texts[0]) and len(texts) > 1
