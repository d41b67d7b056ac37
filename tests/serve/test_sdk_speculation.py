"""Speculation through OpenAI's Python SDK: asked for in `extra_body` or by a prediction, told in the answer,
and never seen in the text.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.serve.conftest import Served
from tests.serve.sdk import MODEL, async_client, chat, client, exactly, said, user


@pytest.fixture(scope="module")
def api(served: Served) -> OpenAI:
    return client(served)


def guessed(how: Any, **more: Any) -> dict[str, Any]:
    return {"speculative_decoding": how, **more}


def report_of(answer: Any) -> dict[str, Any]:
    """The report, once it is in the shape that benchmark tools insist on."""
    report = answer.metrics["speculative_decoding"]
    histogram = report["acceptance_histogram"]
    counts = [
        report[f"num_{name}"]
        for name in ("spec_steps", "accepted_draft_tokens", "draft_tokens", "spec_tokens")
    ]
    assert all(type(count) is int for count in (*histogram, *counts))
    steps, accepted, drafted, deepest = counts
    assert len(histogram) == deepest + 1
    assert sum(histogram) == steps
    assert sum(held * times for held, times in enumerate(histogram)) == accepted
    assert report["mean_acceptance_length"] == pytest.approx(1 + (accepted / steps if steps else 0))
    assert report["draft_acceptance_rate"] == pytest.approx(accepted / drafted if drafted else 0)
    assert (answer.timings["draft_n"], answer.timings["draft_n_accepted"]) == (drafted, accepted)
    return report


# ----------------------------------------------------------------------------------------- on, off, and how


# True leaves it to the planner, which may find that guessing does not pay here.
HOW = [True, {"depth": 4}, {"nodes": 8, "depth": 3}, {"tree": [2, 1, 1]}, {"drafter": "lookup", "depth": 6}]


@pytest.mark.parametrize("temperature", [0, 1])
def test_guessing_does_not_change_the_answer(api: OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 11, "max_tokens": 40, "logprobs": True}
    plain = chat(api, extra_body=guessed(False, ignore_eos=True), **options)
    assert report_of(plain)["num_draft_tokens"] == 0
    for how in HOW:  # from the second time on the answer is known, and guesses hold
        answer = chat(api, extra_body=guessed(how, ignore_eos=True), **options)
        assert report_of(answer)["num_accepted_draft_tokens"] > 0 or how is True, how
        assert said(answer) == said(plain), how
        scores = [[entry.logprob for entry in a.choices[0].logprobs.content] for a in (answer, plain)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5), how


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.7, "top_p": 0.8},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"logit_bias": {"40": 5, "41": 5}},
        {"n": 3},
        {"extra_body": {"repetition_penalty": 1.3, "min_p": 0.02, "top_k": 50, "min_tokens": 30}},
        {"extra_body": {"structured_outputs": {"regex": "[ab ]{40}"}}},
    ],
    ids=lambda option: "-".join(option.get("extra_body", option)),
)
def test_no_parameter_is_lost_to_guessing(api: OpenAI, option: dict[str, Any]) -> None:
    own = option.get("extra_body", {})
    rest = {"seed": 12, "max_tokens": 40, **{k: v for k, v in option.items() if k != "extra_body"}}
    plain = chat(api, extra_body=guessed(False, **own), **rest)
    fast = chat(api, extra_body=guessed({"depth": 4}, **own), **rest)
    assert fast.timings["draft_n_accepted"] > 0
    assert [choice.message.content for choice in fast.choices] == [
        choice.message.content for choice in plain.choices
    ]


def test_guessing_is_mixed_within_one_batch(served: Served, api: OpenAI) -> None:
    """Sixteen requests at once, some guessed and some not, say what each says alone."""
    hows = [False, {"depth": 4}, True, {"tree": [2, 2]}]
    alone = [chat(api, f"prompt {i}", seed=i, max_tokens=32, extra_body=guessed(False)) for i in range(4)]

    async def one(own: Any, i: int, how: Any) -> ChatCompletion:
        return await own.chat.completions.create(
            model=MODEL, messages=user(f"prompt {i}"), seed=i, max_tokens=32, extra_body=guessed(how)
        )

    async def everyone() -> list[ChatCompletion]:
        async with async_client(served) as own:
            return await asyncio.gather(*(one(own, i, how) for how in hows for i in range(4)))

    answers = asyncio.run(everyone())
    assert [said(answer) for answer in answers] == [said(answer) for answer in alone] * len(hows)
    for how, four in zip(hows, (answers[i : i + 4] for i in range(0, 16, 4)), strict=True):
        drafted = sum(report_of(answer)["num_draft_tokens"] for answer in four)
        assert how is True or (drafted > 0) == (how is not False)


def test_the_counters_that_tools_scrape_move(served: Served, api: OpenAI) -> None:
    names = [f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [served.metric(name) for name in names]
    positions = served.metric("spec_decode_num_accepted_tokens_per_pos_total")
    for _ in range(2):
        report = report_of(chat(api, "count", seed=1, max_tokens=30, extra_body=guessed({"depth": 4})))
    moved = [served.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert all(
        now >= own > 0
        for now, own in zip(
            moved,
            (report["num_spec_steps"], report["num_draft_tokens"], report["num_accepted_draft_tokens"]),
            strict=True,
        )
    )
    assert served.metric("spec_decode_num_accepted_tokens_per_pos_total") - positions == moved[2]


# ----------------------------------------------------------------------------------------------- the report


TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
    *("draft_n", "draft_n_accepted"),
}


def test_every_token_has_an_origin_when_asked(api: OpenAI) -> None:
    for _ in range(2):
        answer = chat(api, "whence", seed=2, max_tokens=30, extra_body=guessed({"depth": 4, "stats": True}))
    report, origins = report_of(answer), answer.choices[0].token_origins
    assert len(origins) == answer.usage.completion_tokens
    assert set(origins) <= {"plain", "accepted", "recovered", "bonus"}
    assert origins.count("accepted") == report["num_accepted_draft_tokens"] > 0
    assert len(origins) - origins.count("accepted") <= report["steps"]
    assert sum(report["per_step_accepted"]) == report["num_accepted_draft_tokens"]
    assert sum(report["per_step_drafted"]) == report["num_draft_tokens"]
    assert len(report["per_step_drafted"]) == len(report["per_step_accepted"]) == report["num_spec_steps"]


def test_single_steps_are_told_only_when_asked(api: OpenAI) -> None:
    answer = chat(api, max_tokens=4, extra_body=guessed({"depth": 4}))
    assert "per_step_accepted" not in report_of(answer)
    assert "token_origins" not in answer.choices[0].model_extra


def test_timings_and_metrics_are_numbers(api: OpenAI) -> None:
    answer = chat(api, "how long did it take?", max_tokens=12, extra_body={"ignore_eos": True})
    timings, metrics = answer.timings, answer.metrics
    assert set(timings) == TIMINGS
    assert timings["prompt_n"] + timings["cache_n"] == answer.usage.prompt_tokens
    assert timings["predicted_n"] == 12
    assert timings["predicted_per_second"] == pytest.approx(12000 / timings["predicted_ms"])
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["generation_time_ms"] == pytest.approx(timings["predicted_ms"])
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 11)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_a_stream_reports_at_its_end(api: OpenAI, options: dict[str, Any]) -> None:
    body = guessed({"depth": 4, "stats": True})
    for _ in range(2):
        chunks = list(chat(api, "whither", seed=3, max_tokens=30, stream=True, extra_body=body, **options))
    assert report_of(chunks[-1])["num_accepted_draft_tokens"] > 0
    assert all("metrics" not in chunk.model_extra for chunk in chunks[:-1])
    [last] = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert len(last.token_origins) == 30


def test_several_choices_have_no_single_report(api: OpenAI) -> None:
    answer = chat(api, n=2, max_tokens=4, extra_body=guessed({"depth": 4, "stats": True}))
    assert answer.metrics["speculative_decoding"] is None
    assert [len(choice.token_origins) for choice in answer.choices] == [
        answer.usage.completion_tokens - len(answer.choices[1].token_origins),
        len(answer.choices[1].token_origins),
    ]


def test_rejection_sampling_can_be_asked_for(api: OpenAI) -> None:
    answer = chat(api, max_tokens=8, extra_body=guessed({"depth": 4, "mode": "rejection"}))
    assert (report_of(answer)["mode"], answer.metrics["lossy"]) == ("rejection", False)


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_not_exact_says_so(api: OpenAI, n: int) -> None:
    words = "words that no random model would ever say"
    answer = chat(api, n=n, max_tokens=60, **exactly(words))
    assert said(answer).startswith(words)
    assert answer.metrics["lossy"] is True
    if n == 1:
        assert (report_of(answer)["mode"], report_of(answer)["lossy"]) == ("lossy", True)


# ---------------------------------------------------------------------------------------------- predictions

# A text of tokens that are single letters, so that what was written and what was predicted are cut up alike.
LETTERS = {"structured_outputs": {"regex": "[abcdf]{48}"}}


def foretell(api: OpenAI, content: Any, how: Any = None, **options: Any) -> ChatCompletion:
    prediction = {"type": "content", "content": content}
    how = {"depth": 4} if how is None else how
    options = {"seed": 4, "max_tokens": 60, **options}
    return chat(api, "letters", prediction=prediction, extra_body=guessed(how, **LETTERS), **options)


def counts(answer: Any) -> tuple[int, int]:
    details = answer.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.fixture(scope="module")
def letters(api: OpenAI) -> str:
    """What the model says without being told."""
    text = said(chat(api, "letters", seed=4, max_tokens=60, extra_body=guessed(False, **LETTERS)))
    assert len(text) == 48
    return text


def test_a_perfect_prediction_is_all_accepted(api: OpenAI, letters: str) -> None:
    answer = foretell(api, letters)
    assert said(answer) == letters
    assert counts(answer) == (48, 0)
    assert report_of(answer)["steps"] < 24


def test_a_prediction_may_come_in_parts(api: OpenAI, letters: str) -> None:
    parts = [{"type": "text", "text": letters[:20]}, {"type": "text", "text": letters[20:]}]
    assert counts(foretell(api, parts)) == (48, 0)


def test_of_a_prediction_partly_wrong_the_rest_is_accepted(api: OpenAI, letters: str) -> None:
    answer = foretell(api, letters[:20] + "xyz" + letters[23:])
    assert said(answer) == letters
    assert counts(answer) == (48 - 3, 3)


@pytest.mark.parametrize(
    ("change", "size", "held"),
    [(lambda text: text[:10] + "wxyz" + text[10:], 52, 48), (lambda text: text[:10] + text[16:], 42, 42)],
    ids=["too much", "too little"],
)
def test_a_prediction_of_another_length_is_taken_up_again(
    api: OpenAI, letters: str, change: Any, size: int, held: int
) -> None:
    answer = foretell(api, change(letters))
    assert said(answer) == letters
    assert counts(answer) == (held, size - held)


def test_a_prediction_wholly_wrong_costs_nothing_but_is_counted(api: OpenAI, letters: str) -> None:
    answer = foretell(api, "z" * 30)
    assert said(answer) == letters
    assert counts(answer) == (0, 30)
    assert answer.usage.completion_tokens == 48


def test_counts_do_not_depend_on_what_was_guessed(api: OpenAI, letters: str) -> None:
    """They are of the two texts: a server that is busy or guesses nothing bills the same."""
    wrong = letters[:20] + "xyz" + letters[23:]
    assert {counts(foretell(api, wrong, how)) for how in (False, True, {"depth": 1}, {"depth": 8})} == {
        (45, 3)
    }


def test_a_prediction_goes_with_choices_and_logprobs(api: OpenAI, letters: str) -> None:
    """OpenAI's own server refuses both together with a prediction."""
    answer = foretell(api, letters, n=2, logprobs=True, top_logprobs=1)
    assert said(answer) == letters != said(answer, 1)
    accepted, rejected = counts(answer)
    assert accepted + rejected == 2 * 48
    assert 48 <= accepted < 96
    assert [len(choice.logprobs.content) for choice in answer.choices] == [48, 48]


def test_a_streamed_prediction_is_counted(api: OpenAI, letters: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    running = [counts(chunk) for chunk in foretell(api, letters, **options)]
    assert running[-1] == (48, 0)
    assert running == sorted(running)  # of what has come true so far


def test_no_prediction_counts_nothing(api: OpenAI) -> None:
    assert counts(chat(api, max_tokens=4)) == (0, 0)


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("how", "param", "words"),
    [
        ({"drafter": "looup"}, "speculative_decoding.drafter", "did you mean 'lookup'"),
        ({"mode": "fast"}, "speculative_decoding.mode", "unknown mode 'fast'"),
        ({"mode": "lossy", "rule": "luck"}, "speculative_decoding.rule", "unknown rule"),
        ({"dpeth": 3}, "speculative_decoding", "did you mean 'depth'"),
        ({"depth": 64}, "speculative_decoding.depth", "between 0 and 63"),
        ({"depth": -1}, "speculative_decoding.depth", ">= 0"),
        ({"tree": [9, 9]}, "speculative_decoding.tree", "more than 63 nodes"),
        ({"threshold": 2}, "speculative_decoding.threshold", "threshold must be in"),
        ("yes", "speculative_decoding", "auto, off, a number"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(api: OpenAI, how: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        chat(api, extra_body=guessed(how))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "outline", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
        ({"type": "content"}, "prediction.content"),
    ],
)
def test_a_wrong_prediction_is_refused_by_name(api: OpenAI, prediction: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(api, prediction=prediction)
    assert refused.value.param == param


# ------------------------------------------------------------------------------------------------ for real


@pytest.mark.slow  # every run has the same without HTTP: engine/test_builtin_model.py
@pytest.mark.model
def test_a_real_edit_is_mostly_predicted(served_real: Served) -> None:
    """What predictions are for: a text sent back with a small change."""
    api = client(served_real)
    code = "def area(radius):\n    return 3.14 * radius * radius\n"
    options: dict[str, Any] = {
        "model": "smollm2-135m",
        "messages": user(f"Repeat this text exactly: {code}"),
        "temperature": 0,
        "max_tokens": 24,
    }
    plain = api.chat.completions.create(extra_body=guessed(False), **options)
    fast = api.chat.completions.create(
        prediction={"type": "content", "content": code}, extra_body=guessed({"depth": 4}), **options
    )
    assert said(fast) == said(plain)
    assert counts(fast)[0] > 8
    assert report_of(fast)["steps"] < fast.usage.completion_tokens
