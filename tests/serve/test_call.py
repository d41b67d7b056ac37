"""One call while it is answered: what it adds up, and the reports it makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serve.call import AnswerOptions, Call, parts_of
from outrider.serve.errors import ApiError
from outrider.serve.link import Detail, End, Piece, Score
from outrider.serve.metrics import Metrics
from outrider.serve.prediction import PredictionOverlap
from outrider.serve.tool_text import CallArguments, CallBegin, CallEnd, Text, ToolReader
from outrider.serve.tools import HERMES, check_tools
from outrider.types import SamplingParams

MODEL: Any = SimpleNamespace(token_text=lambda token: (chr(token), [token]))


def end_of(**facts: Any) -> End:
    usual: dict[str, Any] = dict(
        seed=7, cached=0, steps=1, drafted=0, accepted=0, deepest=0, draft_counts=[], origins=[],
        queue_s=0.25, prompt_s=0.5, decode_s=2.0, problem=None,
    )  # fmt: skip
    return End(**usual | facts)


def piece(text: str, choice: int = 0, reason: str | None = None, **facts: Any) -> Piece:
    """Tokens are characters here."""
    end = end_of(**facts) if reason else None
    return Piece("r", choice, [ord(c) for c in text], text, reason, None, end)


def call_of(
    *prompts: int, options: AnswerOptions | None = None, metrics: Metrics | None = None, **params: Any
) -> Call:
    """A call with prompts of so many tokens."""
    jobs: Any = [
        SimpleNamespace(prompt=[1] * size, params=SamplingParams(**params), seed=7 + i)
        for i, size in enumerate(prompts)
    ]
    call = Call("id", MODEL, "shown", jobs, options or AnswerOptions(), metrics or Metrics(), 0.0)
    if text := jobs[0].params.prediction:
        call.compare_with(PredictionOverlap([ord(c) for c in text]))
    return call


def test_pieces_add_up_to_choices() -> None:
    call = call_of(3, n=2)
    call.take(0, piece("ab"))
    call.take(0, piece("xy", choice=1))
    call.take(0, piece("c", reason="stop"))
    first, second = call.flat
    assert ("".join(first.text), first.token_ids, first.finish_reason) == ("abc", [97, 98, 99], "stop")
    assert ("".join(second.text), second.finish_reason) == ("xy", None)


def test_choices_of_several_prompts_are_numbered_through() -> None:
    call = call_of(3, 4, n=2)
    assert [choice.index for choice in call.flat] == [0, 1, 2, 3]
    assert call.take(1, piece("a", choice=1)).index == 3


def test_usage_counts_prompts_once_and_choices_each() -> None:
    call = call_of(3, 4, n=2)
    for prompt in (0, 1):
        for choice in (
            0,
            1,
        ):  # the second choice shares the first one's prompt, which is no find in the cache
            call.take(prompt, piece("abc", choice, "stop", cached=2 + 9 * choice))
    usage = call.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 12, 19)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize(
    ("prediction", "accepted", "rejected"), [("abcdef", 6, 0), ("abXdef", 5, 1), ("zzz", 0, 3), (None, 0, 0)]
)
def test_usage_counts_what_came_true(prediction: str | None, accepted: int, rejected: int) -> None:
    call = call_of(3, prediction=prediction)
    call.take(0, piece("abc"))
    call.take(0, piece("def", reason="stop"))
    details = call.usage()["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (
        accepted,
        rejected,
    )


def test_predictions_count_for_every_choice() -> None:
    call = call_of(3, n=2, prediction="abcd")
    call.take(0, piece("abcd", reason="stop"))
    call.take(0, piece("ab", choice=1, reason="stop"))
    details = call.usage()["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 2)


@pytest.mark.parametrize(
    ("reason", "problem", "status", "words"),
    [("error", "the grammar failed: x", 400, "the grammar failed: x"), ("abort", None, 503, "aborted")],
)
def test_a_choice_that_ended_badly_is_an_error(reason: str, problem: Any, status: int, words: str) -> None:
    with pytest.raises(ApiError, match=words) as ended:
        call_of(3).take(0, piece("", reason=reason, problem=problem))
    assert ended.value.status == status


GUESSED: dict[str, Any] = dict(
    steps=4, drafted=9, accepted=5, deepest=4, draft_counts=[(4, 4), (4, 1), (1, 0)], origins=["accepted"] * 5
)


def test_the_report_is_in_the_shape_that_tools_read() -> None:
    call = call_of(3)
    call.take(0, piece("abcdefgh", reason="stop", **GUESSED))
    report = call.extras()["metrics"]["speculative_decoding"]
    assert report == {
        "mean_acceptance_length": 1 + 5 / 3,
        "draft_acceptance_rate": 5 / 9,
        "acceptance_histogram": [1, 1, 0, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
        "num_spec_tokens": 4,
        "steps": 4,
        "mode": "coupled",
        "lossy": False,
    }


def test_single_steps_are_told_when_asked() -> None:
    call = call_of(3, options=AnswerOptions(stats=True, token_ids=True))
    choice = call.take(0, piece("abc", reason="stop", **GUESSED))
    report = call.extras()["metrics"]["speculative_decoding"]
    assert (report["per_step_accepted"], report["per_step_drafted"]) == ([4, 1, 0], [4, 4, 1])
    assert "per_step_reasons" not in report
    assert call.choice_extras(choice) == {"token_ids": [97, 98, 99], "token_origins": ["accepted"] * 3}


def test_nothing_is_told_of_single_tokens_unless_asked() -> None:
    call = call_of(3)
    assert call.choice_extras(call.take(0, piece("abc", reason="stop"))) == {}


def test_each_of_several_prompts_tells_its_seed() -> None:
    call = call_of(3, 3, n=2)
    assert [call.choice_extras(choice)["seed"] for choice in call.flat] == [7, 7, 8, 8]


@pytest.mark.parametrize("n", [1, 2])
def test_lossy_is_said_for_any_number_of_choices(n: int) -> None:
    call = call_of(3, n=n, speculation={"mode": "lossy"})
    for choice in range(n):
        call.take(0, piece("a", choice, "stop"))
    assert call.extras()["metrics"]["lossy"] is True


def test_timings_follow_from_the_times_measured() -> None:
    call = call_of(10)
    call.take(0, piece("abcdefgh", reason="stop", cached=6, **GUESSED))
    timings = call.extras()["timings"]
    assert timings == {
        "cache_n": 6,
        "prompt_n": 4,
        "prompt_ms": 500,
        "prompt_per_token_ms": 125,
        "prompt_per_second": 8,
        "predicted_n": 8,
        "predicted_ms": 2000,
        "predicted_per_token_ms": 250,
        "predicted_per_second": 4,
        "draft_n": 9,
        "draft_n_accepted": 5,
    }


def test_an_answer_of_one_step_divides_by_nothing() -> None:
    call = call_of(3)
    call.take(0, piece("a", reason="stop", prompt_s=0.0, decode_s=0.0))
    extras = call.extras()
    assert extras["timings"]["predicted_per_second"] == extras["metrics"]["tokens_per_second"] == 0


def test_times_are_counted_once_a_request() -> None:
    metrics = Metrics()
    call = call_of(3, n=2, metrics=metrics)
    call.take(0, piece("ab"))
    call.take(0, piece("cd", reason="stop"))
    call.take(0, piece("x", choice=1, reason="length"))
    counts = {name: sum(histogram.counts) for name, histogram in metrics.histograms.items()}
    assert counts["time_to_first_token_seconds"] == 1
    assert counts["inter_token_latency_seconds"] == 2  # of the second piece's tokens
    assert counts["e2e_request_latency_seconds"] == 1
    assert counts["request_decode_time_seconds"] == 2
    assert metrics.counters["request_success"] == {
        (("finished_reason", "stop"),): 1,
        (("finished_reason", "length"),): 1,
    }


def test_scores_are_shown_with_text_and_bytes() -> None:
    [shown] = call_of(3).scored_tokens([Score(97, -0.5, [(97, -0.5), (98, float("-inf"))])])
    rivals = [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "b", "logprob": -9999.0, "bytes": [98]},  # JSON has no infinity
    ]
    assert shown == {**rivals[0], "top_logprobs": rivals}


def test_parts_without_tools_are_the_text() -> None:
    assert parts_of(piece("abc"), None) == [Text("abc")]
    assert parts_of(piece("", reason="stop"), None) == []


def test_parts_with_tools_are_text_and_calls() -> None:
    tools = check_tools([{"type": "function", "function": {"name": "f"}}])
    reader = ToolReader(HERMES, tools)
    said = 'ok <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> <tool'
    assert parts_of(piece(said), reader) == [
        Text("ok "),
        CallBegin(0, "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]
    [rest] = parts_of(piece("", reason="length"), reader)  # what might have become a call was none
    assert rest == Text(" <tool")


def test_reasons_where_they_were_asked_for() -> None:
    call = call_of(3)
    for text, ends, why in (("a", None, "off: prefill"), ("b", "stop", "off: batch 23 > 16")):
        one = piece(text, reason=ends)
        one.detail = Detail("none", [], [], [], ["plain"], why, "batch", 0, [])
        call.take(0, one)
    report = call.extras()["metrics"]["speculative_decoding"]
    assert report["per_step_reasons"] == ["off: prefill", "off: batch 23 > 16"]
