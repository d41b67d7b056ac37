"""Plain completions through OpenAI's Python SDK: every kind of prompt, echo, scores, streams."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from tests.serve.conftest import Served
from tests.serve.sdk import MODEL, async_client, client, ids_of

TEXTS = ["hello 12", "once upon a time"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def api(served: Served) -> OpenAI:
    return client(served)


def complete(api: OpenAI, prompt: Any = TEXTS[0], **options: Any) -> Completion:
    return api.completions.create(model=MODEL, prompt=prompt, **options)


def texts(answer: Completion) -> list[str]:
    return [choice.text for choice in answer.choices]


def test_a_text_is_continued(api: OpenAI) -> None:
    answer = complete(api, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


def test_sixteen_tokens_unless_told(api: OpenAI) -> None:
    assert complete(api, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


def test_every_kind_of_prompt_gives_the_same(served: Served, api: OpenAI) -> None:
    alone = [texts(complete(api, text, **GREEDY))[0] for text in TEXTS]
    as_ids = [ids_of(served, text) for text in TEXTS]
    assert texts(complete(api, as_ids[0], **GREEDY)) == alone[:1]
    assert texts(complete(api, TEXTS, **GREEDY)) == alone
    assert texts(complete(api, as_ids, **GREEDY)) == alone


def test_each_prompt_has_its_choices_in_order(api: OpenAI) -> None:
    answer = complete(api, TEXTS, n=2, seed=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    each = [text for prompt in TEXTS for text in texts(complete(api, prompt, n=2, seed=3, max_tokens=8))]
    assert texts(answer) == each
    assert answer.usage.completion_tokens == 32


def test_without_a_seed_prompts_differ_and_each_tells_its_own(api: OpenAI) -> None:
    answer = complete(api, TEXTS[:1] * 2, max_tokens=12)
    first, second = answer.choices
    assert first.text != second.text
    for choice in (first, second):
        assert texts(complete(api, seed=choice.seed, max_tokens=12)) == [choice.text]


def test_echo_gives_the_prompt_back(api: OpenAI) -> None:
    assert texts(complete(api, echo=True, **GREEDY)) == [TEXTS[0] + texts(complete(api, **GREEDY))[0]]


def test_echoed_tokens_are_scored_but_the_first(api: OpenAI) -> None:
    answer = complete(api, echo=True, logprobs=2, temperature=0, max_tokens=2)
    scores, text = answer.choices[0].logprobs, answer.choices[0].text
    assert scores.tokens[:3] == ["hello", " ", "12"]
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 5
    assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
    assert all(score < 0 for score in scores.token_logprobs[1:])
    assert all(len(rivals) == 2 for rivals in scores.top_logprobs[1:])
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token


def test_a_text_is_scored_without_being_continued(api: OpenAI) -> None:
    """What evaluation tools do: the likelihood of a given answer."""
    whole = complete(api, TEXTS, echo=True, logprobs=1, temperature=0, max_tokens=3)
    scored = complete(api, TEXTS, echo=True, logprobs=1, max_tokens=0)
    assert texts(scored) == TEXTS
    assert scored.usage.completion_tokens == 0
    for short, long in zip(scored.choices, whole.choices, strict=True):
        size = len(short.logprobs.tokens)
        assert short.logprobs.tokens == long.logprobs.tokens[:size]
        assert short.logprobs.token_logprobs[1:] == pytest.approx(
            long.logprobs.token_logprobs[1:size], abs=1e-5
        )


def test_a_prompt_of_one_token_is_scored(api: OpenAI) -> None:
    scores = complete(api, "a", echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    assert (scores.tokens, scores.token_logprobs) == (["a"], [None])


def test_scores_do_not_depend_on_the_cache(api: OpenAI) -> None:
    text = "a prompt that is long enough for a part of it to be found in the cache again"
    first, second = (
        complete(api, text, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs.token_logprobs
        for _ in range(2)
    )
    assert first[1:] == pytest.approx(second[1:], abs=1e-5)
    assert len(first) == len(ids_of_text(api, text))


def ids_of_text(api: OpenAI, text: str) -> list[str]:
    return complete(api, text, echo=True, logprobs=0, max_tokens=1).choices[0].logprobs.tokens[:-1]


def test_a_stream_gives_the_same(api: OpenAI) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 5, "max_tokens": 10, "logprobs": 0, "echo": True}
    whole = complete(api, TEXTS, **options)
    text, tokens, reasons = [""] * 4, [[], [], [], []], [[], [], [], []]
    for event in complete(api, TEXTS, stream=True, **options):
        [choice] = event.choices
        text[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
        reasons[choice.index].append(choice.finish_reason)
    assert text == texts(whole)
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert all(own == [None] * (len(own) - 1) + ["length"] for own in reasons)


def test_a_stream_can_end_with_usage(api: OpenAI) -> None:
    events = list(complete(api, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], 8)


def test_the_async_client_completes(served: Served, api: OpenAI) -> None:
    async def both() -> list[Completion]:
        async with async_client(served) as own:
            asked = (own.completions.create(model=MODEL, prompt=text, **GREEDY) for text in TEXTS)
            return await asyncio.gather(*asked)

    assert [texts(answer)[0] for answer in asyncio.run(both())] == texts(complete(api, TEXTS, **GREEDY))


def test_forms_and_stops_hold_here_too(api: OpenAI) -> None:
    form = {"structured_outputs": {"regex": "[ab]{6}c"}}
    answer = complete(api, max_tokens=20, extra_body=form)
    assert len(texts(answer)[0]) == 7
    cut = complete(api, max_tokens=20, stop="c", extra_body=form)
    assert (len(texts(cut)[0]), cut.choices[0].finish_reason) == (6, "stop")


@pytest.mark.parametrize(
    ("prompt", "options", "param", "words"),
    [
        ("", {}, "prompt", "empty"),
        ([], {}, "prompt", "empty"),
        ([9999], {}, "prompt[0]", "outside the vocabulary"),
        (["a", 5], {}, "prompt[1]", "not a mixture"),
        (["a"] * 257, {}, "prompt", "at most 256"),
        ("a", {"max_tokens": 0}, "max_tokens", "0 together with echo"),
        ("a", {"logprobs": 21}, "logprobs", "20"),
        ("a", {"suffix": "b"}, "suffix", "not supported"),
        ("a", {"best_of": 2}, "best_of", "use n"),
        ("a" * 3000, {}, "prompt", "maximum context length"),
    ],
)
def test_a_wrong_prompt_is_a_bad_request(
    api: OpenAI, prompt: Any, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        complete(api, prompt, **options)
    assert refused.value.param == param
