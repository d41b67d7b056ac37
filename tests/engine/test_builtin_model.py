"""The promises on the built-in model: the same tokens in any company, with any guesses, and transformers'
own.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.adversaries import adversaries
from outrider.bench.peers import Transformers
from tests.sweep import sweep

pytestmark = pytest.mark.model
TREES = {"nodes": 12, "depth": 4}

TEXTS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Explain why the sky is blue in simple words.",
    "Count from one to twenty in words.",
    "def fibonacci(n):",
    "Translate to French: Good morning, how are you?",
    "List three fruits and three vegetables.",
]
LAWS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0, "logit_bias": {28: -5.0, 198: 2.0}},
    {"temperature": 0.8, "bad_words": ("the",), "min_tokens": 12},
    {"temperature": 0.9, "stop": ("\n", "."), "logprobs": 3},
]


def requests(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Eight, no two alike."""
    prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text in TEXTS]
    return prompts, [SamplingParams(seed=100 + i, max_tokens=12 + i, **law) for i, law in enumerate(LAWS)]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    prompts, params = requests(llm)
    return [
        llm.generate([p], s, owner=f"alone{i}", speculation=False)[0].token_ids
        for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]


def test_eight_at_once(llm: LLM, plain):
    outs = llm.generate(*requests(llm), owner="together", speculation=False)
    assert [o.token_ids for o in outs] == plain


@pytest.mark.parametrize("speculation", sweep([True, TREES], quick=[True]), ids=str)
def test_guessing_by_lookup(llm: LLM, plain, speculation):
    prompts, params = requests(llm)
    outs = llm.generate(prompts, params, owner=f"guess{speculation}", speculation=speculation)
    assert [o.token_ids for o in outs] == plain


def test_guessing_by_adversaries(llm: LLM, plain):
    prompts, params = requests(llm)
    answers = {tuple(p): t for p, t in zip(prompts, plain, strict=True)}
    hostile = adversaries(llm.model.config.vocab, llm.model.config.eos_ids, answers)
    drafters = llm.engine.drafters
    drafters.add(hostile)
    try:
        each = [(name, i) for name in hostile for i in range(2)]  # all in one batch
        asked = [
            replace(params[i], speculation={"drafter": name, "depth": 3, "nodes": 5}) for name, i in each
        ]
        outs = llm.generate([prompts[i] for _, i in each], asked, owner="hostile")
        for (name, i), out in zip(each, outs, strict=True):
            assert out.token_ids == plain[i] and out.stats.drafted > 5, name
    finally:
        drafters.remove(hostile)


def test_small_cache_chunks_and_reuse(llm: LLM, plain):
    prompts, params = (some[-3:] for some in requests(llm))
    settings = {
        "cache_bytes": 88 * llm.model.config.kv_bytes_per_token,
        "step_rows": 16,
        "prefill_slowdown": 1e6,  # else the clock says how many prompts are read at once
    }
    with LLM("smollm2-135m", max_sequences=8, **settings) as small:
        outs = small.generate(prompts, params)
        assert [o.token_ids for o in outs] == plain[-3:]
        assert small.engine.scheduler.preemptions > 0
    again = llm.generate(prompts, params, owner="alone5")
    assert [o.token_ids for o in again] == plain[-3:]
    assert again[0].cached_tokens > 0


@pytest.mark.slow  # every family is held against transformers at a tiny size in tests/model
def test_transformers_says_the_same(llm: LLM):
    peer = Transformers.open(llm.checkpoint.path, llm.settings.threads)
    for text in TEXTS[:1]:
        prompt = llm.chat_ids([{"role": "user", "content": text}])
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        ours, theirs = llm.generate([prompt], params)[0].token_ids, peer.greedy(prompt, 16).tokens
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            assert peer.top_two_gap(prompt + theirs[:at]) < 1e-4


def test_structured_output_under_guessing(llm: LLM):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    ask = [{"role": "user", "content": "Describe a person as JSON with name and age."}]
    for temperature in (0, 0.9):
        params = SamplingParams(
            temperature=temperature, seed=4, max_tokens=60, grammar={"json_schema": schema}, logprobs=0
        )
        one = llm.chat(ask, params, owner="g1", speculation=False)[0]
        two = llm.chat(ask, params, owner="g2", speculation={"depth": 4, "nodes": 8})[0]
        assert one.token_ids == two.token_ids
        found = json.loads(one.text)
        assert set(found) == {"name", "age"}
        assert isinstance(found["age"], int)
    out = llm.chat(ask, temperature=1.0, seed=1, grammar={"choice": ["yes", "no"]})[0]
    assert out.text in ("yes", "no")


def test_stream_equals_generate_and_leaving_it_aborts(llm: LLM):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, stop=("\n",))
    whole = llm.generate(["Once upon a time"], params)[0]

    async def run() -> tuple[str, list[int]]:
        text, ids = "", []
        async for event in llm.stream("Once upon a time", params):
            text += event.text
            ids += event.token_ids
        async for _ in llm.stream("Once upon a time", temperature=0, max_tokens=400, ignore_eos=True):
            break  # the request must not go on without a listener
        return text, ids

    text, ids = asyncio.run(run())
    assert (text, ids) == (whole.text, whole.token_ids)
    llm.generate(["wait for the abort to be carried out"], max_tokens=1)
    assert not llm.engine.live


def test_choices_and_seeds(llm: LLM):
    out = llm.generate(["The weather today is"], temperature=1.0, n=3, seed=8, max_tokens=12)[0]
    assert len({tuple(c.token_ids) for c in out.choices}) == 3
    for choice in out.choices[1:]:
        same = llm.generate(["The weather today is"], temperature=1.0, seed=choice.seed, max_tokens=12)[0]
        assert same.token_ids == choice.token_ids
    drawn = llm.generate(["The weather today is"], temperature=1.0, max_tokens=12)[0]
    again = llm.generate(["The weather today is"], temperature=1.0, max_tokens=12, seed=drawn.seed)[0]
    assert again.token_ids == drawn.token_ids


def test_a_prediction_is_followed(llm: LLM):
    ask = [{"role": "user", "content": "Say the months of the year in order."}]
    plain = llm.chat(ask, temperature=0, max_tokens=40, speculation=False, owner="p1")[0]
    params = SamplingParams(temperature=0, max_tokens=40, prediction=plain.text, speculation={"depth": 6})
    out = llm.chat(ask, params, owner="p2")[0]
    assert out.token_ids == plain.token_ids
    assert out.stats.tokens_per_step > 4
