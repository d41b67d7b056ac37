"""Chat through OpenAI's Python SDK: every parameter does what it says, and says so in the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from outrider.serve.keys import digest_of
from tests.serve.conftest import Served, start_server, wait_for
from tests.serve.sdk import MODEL, async_client, chat, client, ids_of, said, user


@pytest.fixture(scope="module")
def api(served: Served) -> OpenAI:
    return client(served)


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
WITH_IDS = {"return_token_ids": True}


def token_ids(answer: Any) -> list[int]:
    return answer.choices[0].token_ids


def test_an_answer_is_complete(api: OpenAI) -> None:
    answer = chat(api, max_tokens=5, seed=1)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.logprobs is None
    usage = answer.usage
    assert usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5


def test_prompt_tokens_are_those_of_the_rendered_conversation(served: Served, api: OpenAI) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *user("hello")]
    answer = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    rendered = served.post("/tokenize", {"messages": messages}).json()
    assert answer.usage.prompt_tokens == rendered["count"]
    assert rendered["tokens"] == ids_of(served, "[system]Be kind.[user]hello[assistant]")


def test_text_parts_read_as_one_text(api: OpenAI) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    whole = chat(api, "one\ntwo", **GREEDY)
    in_parts = api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], **GREEDY
    )
    assert said(in_parts) == said(whole)


def test_a_developer_message_is_a_system_message(served: Served, api: OpenAI) -> None:
    """Templates know `system`; many leave out roles that they do not know."""
    messages = [{"role": "developer", "content": "Be brief."}, *user("hello")]
    read = served.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert read == ids_of(served, "[system]Be brief.[user]hello[assistant]")
    answer = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len(read)


def test_an_image_is_refused_by_its_place(api: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [image]}])
    assert refused.value.param == "messages[0].content[0]"


# ------------------------------------------------------------------------------------------ choices and seeds


def test_several_choices_differ_and_the_first_is_the_one_alone(api: OpenAI) -> None:
    many = chat(api, n=3, seed=5, max_tokens=12)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({said(many, i) for i in range(3)}) == 3
    assert many.usage.completion_tokens == 36
    assert said(many) == said(chat(api, seed=5, max_tokens=12))


def test_the_seed_used_is_reported_and_repeats_the_answer(api: OpenAI) -> None:
    first = chat(api, max_tokens=16)
    again = chat(api, max_tokens=16, seed=first.seed)
    other = chat(api, max_tokens=16, seed=first.seed + 1)
    assert again.seed == first.seed
    assert said(again) == said(first) != said(other)


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1])
def test_seeds_have_64_bits(api: OpenAI, seed: int) -> None:
    assert chat(api, max_tokens=2, seed=seed).seed == seed


def test_greedy_answers_are_equal_whatever_the_seed(api: OpenAI) -> None:
    assert said(chat(api, seed=1, **GREEDY)) == said(chat(api, seed=2, **GREEDY))


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"min_p": 1.0}])
def test_cutting_off_all_but_the_likeliest_is_greedy(api: OpenAI, only_the_best: dict[str, Any]) -> None:
    cut = chat(api, temperature=1.0, max_tokens=24, extra_body=only_the_best)
    assert said(cut) == said(chat(api, **GREEDY))


def test_top_p_near_zero_is_greedy(api: OpenAI) -> None:
    assert said(chat(api, top_p=1e-6, max_tokens=24)) == said(chat(api, **GREEDY))


# ------------------------------------------------------------------------------------------------- the end


@pytest.fixture(scope="module")
def stop_word(api: OpenAI) -> str:
    """Two letters from within the greedy answer."""
    text = said(chat(api, **GREEDY))
    return next(text[i : i + 2] for i in range(4, len(text) - 2) if text[i : i + 2].isprintable())


@pytest.mark.parametrize("as_list", [False, True])
def test_the_answer_ends_before_a_stop_string(api: OpenAI, stop_word: str, as_list: bool) -> None:
    whole = said(chat(api, **GREEDY))
    answer = chat(api, stop=["never said", stop_word] if as_list else stop_word, **GREEDY)
    assert said(answer) == whole[: whole.index(stop_word)]
    assert answer.choices[0].finish_reason == "stop"


def test_the_stop_string_can_be_kept(api: OpenAI, stop_word: str) -> None:
    whole = said(chat(api, **GREEDY))
    answer = chat(api, stop=stop_word, extra_body={"include_stop_str_in_output": True}, **GREEDY)
    assert said(answer) == whole[: whole.index(stop_word) + len(stop_word)]


def test_of_two_lengths_the_later_name_counts(api: OpenAI) -> None:
    answer = chat(api, max_tokens=20, max_completion_tokens=3, seed=1)
    assert answer.usage.completion_tokens == 3


END = {"0": 100}  # the end of the text, made likelier than anything


def test_the_end_ends_unless_ignored(api: OpenAI) -> None:
    ended = chat(api, max_tokens=8, logit_bias=END)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens, said(ended)) == ("stop", 1, "")
    ignored = chat(api, max_tokens=8, logit_bias=END, extra_body={"ignore_eos": True})
    assert (ignored.choices[0].finish_reason, ignored.usage.completion_tokens) == ("length", 8)


def test_the_end_waits_for_the_least_length(api: OpenAI) -> None:
    answer = chat(api, max_tokens=20, logit_bias=END, seed=1, extra_body={"min_tokens": 5, **WITH_IDS})
    assert answer.choices[0].finish_reason == "stop"
    assert 0 not in token_ids(answer)[:5]
    assert token_ids(answer)[5:] == [0]


def test_a_token_id_can_be_a_stop(served: Served, api: OpenAI) -> None:
    [x] = ids_of(served, "x")
    answer = chat(api, max_tokens=8, logit_bias={str(x): 100}, extra_body={"stop_token_ids": [x]})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)


# ------------------------------------------------------------------------------------------------ the logits


def test_a_bias_decides(served: Served, api: OpenAI) -> None:
    [x] = ids_of(served, "x")
    assert said(chat(api, max_tokens=6, logit_bias={str(x): 100})) == "xxxxxx"


def test_a_bias_forbids(api: OpenAI) -> None:
    first = token_ids(chat(api, extra_body=WITH_IDS, **GREEDY))[0]
    other = chat(api, logit_bias={str(first): -100}, extra_body=WITH_IDS, **GREEDY)
    assert first not in token_ids(other)


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 100}, {"presence_penalty": 100}, {"repetition_penalty": 50}]
)
def test_a_strong_penalty_leaves_no_token_twice(api: OpenAI, penalty: dict[str, float]) -> None:
    length = {"temperature": 0, "max_tokens": 60}
    plain = token_ids(chat(api, "aaaa", extra_body=WITH_IDS, **length))
    assert len(set(plain)) < len(plain)
    penalised = token_ids(chat(api, "aaaa", extra_body={**WITH_IDS, **penalty}, **length))
    assert len(set(penalised)) == len(penalised)


def test_words_can_be_forbidden(api: OpenAI) -> None:
    letters = {"structured_outputs": {"regex": "[ab]{12}"}}
    assert "a" in said(chat(api, temperature=0, max_tokens=20, extra_body=letters))
    without = chat(api, temperature=0, max_tokens=20, extra_body={**letters, "bad_words": ["a"]})
    assert said(without) == "b" * 12


def test_logprobs_are_of_the_chosen_token_and_the_likeliest(api: OpenAI) -> None:
    answer = chat(api, logprobs=True, top_logprobs=3, **GREEDY)
    scored = answer.choices[0].logprobs.content
    assert len(scored) == answer.usage.completion_tokens
    assert bytes(b for entry in scored for b in entry.bytes).decode("utf-8", "replace") == said(answer)
    for entry in scored:
        best = [rival.logprob for rival in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert (len(best), best[0]) == (3, entry.logprob)


def test_logprobs_are_those_that_scoring_the_text_gives(served: Served, api: OpenAI) -> None:
    """The same tokens, once written and once read, have the same probabilities under the target."""
    answer = chat(api, logprobs=True, seed=3, max_tokens=20, extra_body=WITH_IDS)
    prompt = served.post("/tokenize", {"messages": user("hello there")}).json()["tokens"]
    text = [*prompt, *token_ids(answer)]
    read = api.completions.create(model=MODEL, prompt=text, echo=True, max_tokens=0, logprobs=0)
    written = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert read.choices[0].logprobs.token_logprobs[len(prompt) :] == pytest.approx(written, abs=1e-4)


def test_only_the_chosen_token_is_scored_unless_more_is_asked(api: OpenAI) -> None:
    answer = chat(api, logprobs=True, max_tokens=3)
    scored = answer.choices[0].logprobs.content
    assert 0 < len(scored) == answer.usage.completion_tokens  # a random model may end earlier
    assert not any(entry.top_logprobs for entry in scored)


# ----------------------------------------------------------------------------------------------- its form


class Person(BaseModel, extra="forbid"):
    name: Literal["Ada", "Alan"]
    old: bool


def test_a_json_object_is_one(served: Served, api: OpenAI) -> None:
    [closing] = ids_of(served, "}")
    likely = {str(closing): 50}  # a random model would go on for ever
    answer = chat(api, response_format={"type": "json_object"}, logit_bias=likely, seed=1, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(said(answer)), dict)


def test_a_schema_holds_whatever_the_model(api: OpenAI) -> None:
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    for seed in range(3):
        answer = chat(
            api,
            response_format={"type": "json_schema", "json_schema": schema},
            seed=seed,
            max_tokens=300,
        )
        Person.model_validate_json(said(answer))


def test_the_sdk_parses_into_a_class(api: OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL, messages=user("who?"), response_format=Person, seed=1, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_sdk_parses_a_stream_into_a_class(api: OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL, messages=user("who?"), response_format=Person, seed=1, max_tokens=300
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    whole = api.chat.completions.parse(
        model=MODEL, messages=user("who?"), response_format=Person, seed=1, max_tokens=300
    )
    assert answer.choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"regex": "[ab]{3}"}, {x + y + z for x in "ab" for y in "ab" for z in "ab"}),
        ({"choice": ["yes", "no", "perhaps"]}, {"yes", "no", "perhaps"}),
        ({"grammar": 'start: "left" | "right"'}, {"left", "right"}),
        ({"grammar": 'root ::= "left" | "right"'}, {"left", "right"}),
        ({"json": {"type": "boolean"}}, {"true", "false"}),
    ],
    ids=["regex", "choice", "lark", "gbnf", "json"],
)
def test_an_answer_can_have_other_forms(api: OpenAI, form: dict[str, Any], allowed: set[str]) -> None:
    answer = chat(api, extra_body={"structured_outputs": form}, seed=1, max_tokens=40)
    assert said(answer) in allowed
    assert answer.choices[0].finish_reason == "stop"


# ------------------------------------------------------------------------------------------------ streaming


def test_a_stream_says_what_the_whole_answer_says(api: OpenAI) -> None:
    whole = chat(api, seed=4, max_tokens=30)
    chunks = list(chat(api, seed=4, max_tokens=30, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said(whole)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].seed == 4


def test_choices_of_a_stream_are_told_apart(api: OpenAI) -> None:
    whole = chat(api, seed=4, n=3, max_tokens=12)
    texts = ["", "", ""]
    for chunk in chat(api, seed=4, n=3, max_tokens=12, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [said(whole, i) for i in range(3)]


def test_streamed_logprobs_are_all_there(served: Served, api: OpenAI) -> None:
    """Also those of tokens whose text is held back, here as they are the first third of a character."""
    third = ids_of(served, "日")[0]
    options: dict[str, Any] = {"max_tokens": 6, "logprobs": True, "logit_bias": {str(third): 100}}
    chunks = list(chat(api, stream=True, extra_body={"speculative_decoding": False}, **options))
    scored = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert sum(len(entries) for entries in scored) == 6
    assert len(scored) < 6
    assert [entry.bytes for entries in scored for entry in entries] == [[0xE6]] * 6


def test_usage_comes_last_and_only_there(api: OpenAI) -> None:
    endless = {"ignore_eos": True}
    asked = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": endless}
    chunks = list(chat(api, max_tokens=8, **asked))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


def test_the_async_client_streams_many_at_once(served: Served, api: OpenAI) -> None:
    async def one(seed: int) -> str:
        async with async_client(served) as own:
            stream = await own.chat.completions.create(
                model=MODEL, messages=user("hello there"), seed=seed, max_tokens=20, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everyone() -> list[str]:
        return await asyncio.gather(*(one(seed) for seed in range(6)))

    assert asyncio.run(everyone()) == [said(chat(api, seed=seed, max_tokens=20)) for seed in range(6)]


LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True, "speculative_decoding": False}}


def test_leaving_a_stream_aborts_it(served: Served, api: OpenAI) -> None:
    before, left = served.metric("generation_tokens_total"), served.metric("client_disconnects_total")
    with chat(api, stream=True, **LONG) as stream:
        next(iter(stream))
        wait_for(lambda: served.metric("num_requests_running") > 0)
    served.wait_idle(5)
    assert served.metric("client_disconnects_total") == left + 1
    assert served.metric("generation_tokens_total") - before < 1900


def test_a_client_that_gives_up_waiting_aborts_its_request(served: Served, api: OpenAI) -> None:
    before, left = served.metric("generation_tokens_total"), served.metric("client_disconnects_total")
    with pytest.raises(openai.APITimeoutError):
        chat(api.with_options(timeout=0.15), **LONG)
    wait_for(lambda: served.metric("client_disconnects_total") == left + 1, 5)
    served.wait_idle(5)
    assert served.metric("generation_tokens_total") - before < 1900


# ---------------------------------------------------------------------------------------- models and reports


def test_models_are_listed_and_found(api: OpenAI) -> None:
    [model] = api.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "outrider")
    assert api.models.retrieve(MODEL) == model
    assert model.max_model_len == 2048


def test_another_model_is_not_found(api: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.models.retrieve("gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; 'tiny' is") as missing:
        api.chat.completions.create(model="gpt-5", messages=user("hello"))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_a_prompt_seen_before_is_read_from_the_cache(api: OpenAI) -> None:
    text = "This prompt is seen for the first time here, and then a second time. " * 2
    first, second = (chat(api, text, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < 16  # what every prompt begins with
    cached = second.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens - 16 <= cached < second.prompt_tokens


def test_a_salt_keeps_a_prompt_apart(api: OpenAI) -> None:
    text = "Nobody who does not know the salt can tell that this was asked before. " * 2
    for salt, found in (("a", False), ("b", False), ("a", True)):
        usage = chat(api, text, max_tokens=1, extra_body={"cache_salt": salt}).usage
        assert (usage.prompt_tokens_details.cached_tokens > 0) == found


def test_text_survives_tokens(served: Served) -> None:
    text = "hello 12, naïve 日本 <|end|>"
    read = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert read["count"] == len(read["tokens"]) == len(read["token_strs"])
    assert served.post("/detokenize", {"tokens": read["tokens"]}).json()["prompt"] == text


def test_the_request_id_is_the_clients_own(api: OpenAI) -> None:
    answer = chat(api, max_tokens=1, extra_headers={"X-Request-Id": "my-request-7"})
    assert answer._request_id == "my-request-7"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(api, temperature=-1, extra_headers={"X-Request-Id": "my-request-8"})
    assert refused.value.request_id == "my-request-8"
    fresh = {chat(api, max_tokens=1)._request_id for _ in range(2)}
    assert len(fresh) == 2
    assert all(fresh)


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "temperature must be in"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"top_p": 0}, "top_p", "top_p must be in"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 1000}, "n", "at most 32"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "empty"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format", "does not compile"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "does not compile"),
        ({"extra_body": {"structured_outputs": {"regx": "a"}}}, "structured_outputs", "did you mean 'regex'"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 3}, "min_tokens", "between 0 and 3"),
        ({"extra_body": {"best_of": 3}}, "best_of", "not supported"),
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions", "use tools"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_a_bad_request_that_names_it(
    api: OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        chat(api, **options)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("text", "options", "param"),
    [
        ("x" * 3000, {}, "messages"),
        ("x", {"max_tokens": 2048}, "max_tokens"),
        ("x", {"max_completion_tokens": 2048}, "max_completion_tokens"),
    ],
)
def test_too_long_is_said_as_clients_know_it(
    api: OpenAI, text: str, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as refused:
        chat(api, text, **options)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
    assert "-" not in refused.value.body["message"]  # of counts that went below zero


# ------------------------------------------------------------------------- errors of a server with keys

TEAM, SLOW = "team-key-0123456789", "slow-key-0123456789"


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a free key and one of two requests a minute."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    lines = [f'[[key]]\nname = "team"\nhash = "sha256:{digest_of(TEAM).hex()}"\n']
    lines.append(
        f'[[key]]\nname = "slow"\nhash = "sha256:{digest_of(SLOW).hex()}"\nrequests_per_minute = 2\n'
    )
    file.write_text("".join(lines))
    server = start_server(tiny_folder, "--key-file", str(file), ready=False)
    yield server
    server.stop()


def test_while_loading_requests_are_told_when_to_come_back(tiny_folder: Path) -> None:
    server = start_server(tiny_folder, ready=False)
    try:
        api = client(server, TEAM)
        with pytest.raises(openai.InternalServerError) as loading:
            chat(api)
        assert (loading.value.status_code, loading.value.code) == (503, "loading")
        assert float(loading.value.response.headers["retry-after-ms"]) > 0
        assert [model.id for model in api.models.list()]  # known from the start
    finally:
        server.stop()


def test_a_wrong_key_is_an_authentication_error(guarded: Served) -> None:
    guarded.wait_ready()
    for key in ("wrong-key-0123456789", TEAM[:-1], TEAM + "0"):
        with pytest.raises(openai.AuthenticationError) as refused:
            chat(client(guarded, key))
        assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)


def test_a_key_over_its_limit_is_a_rate_limit_error(guarded: Served) -> None:
    guarded.wait_ready()
    for _ in range(2):
        chat(client(guarded, SLOW), max_tokens=1)
    with pytest.raises(openai.RateLimitError, match="2 requests a minute") as refused:
        chat(client(guarded, SLOW), max_tokens=1)
    assert refused.value.code == "rate_limit_exceeded"
    assert 0 < float(refused.value.response.headers["retry-after"]) <= 60
    chat(client(guarded, TEAM), max_tokens=1)  # others are not held up


def test_an_engine_lost_in_the_middle_of_a_stream_is_an_error(guarded: Served) -> None:
    guarded.wait_ready()
    with (
        pytest.raises(openai.APIError, match="the engine stopped") as lost,
        chat(client(guarded, TEAM), stream=True, **LONG) as stream,
    ):
        for i, _ in enumerate(stream):
            if i == 2:
                guarded.engine().kill()
    assert lost.value.code == "engine_lost"
