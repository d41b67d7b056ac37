"""An answer that is listened to: times and counts, and what happens when the listener leaves."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.answer import Answer, Origins, Received, listen
from outrider.errors import OutriderError


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, draft="none") as llm:
        yield llm


def ask(llm: LLM, received: Received, **params) -> Answer:
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    return Answer(llm, [5, 6, 7], SamplingParams(**{**options, **params}), received)


def test_answers_are_heard_to_their_end(tiny: LLM) -> None:
    received: Received = queue.SimpleQueue()
    answers = [ask(tiny, received), ask(tiny, received, n=2, temperature=1, seed=3, max_tokens=5)]
    events = list(listen({answer.request.id: answer for answer in answers}, received))
    assert all(answer.done for answer in answers)
    assert [answer.tokens for answer in answers] == [8, 10]
    assert [len(events_of) for events_of in ([e for a, e in events if a is x] for x in answers)] == [8, 10]
    expected = tiny.generate([5, 6, 7], temperature=0, ignore_eos=True, max_tokens=8)[0]
    assert answers[0].text == expected.text and answers[0].tokens_per_step == 1.0
    assert 0 < answers[0].first_token_s < answers[0].ended - answers[0].begun
    after_first = answers[0].ended - answers[0].begun - answers[0].first_token_s
    assert answers[0].tokens_per_s == pytest.approx(7 / after_first)


def test_leaving_early_aborts(tiny: LLM) -> None:
    received: Received = queue.SimpleQueue()
    answer = ask(tiny, received, max_tokens=120)
    events = listen({answer.request.id: answer}, received)
    next(events)
    events.close()
    deadline = time.monotonic() + 5
    while not tiny.engine.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tiny.engine.idle and answer.sequences[0].finish_reason == "abort"
    assert len(answer.sequences[0].output) < 120


def test_an_engine_that_dies_is_told(tiny: LLM) -> None:
    received: Received = queue.SimpleQueue()
    answer = ask(tiny, received)
    received.put(RuntimeError("out of paper"))
    with pytest.raises(OutriderError, match="out of paper"):
        list(listen({answer.request.id: answer}, received))


class Words:
    """Token text without a tokenizer: each token is as many letters as its number says."""

    def feed(self, token: int) -> str:
        return "x" * token


def test_text_is_split_by_origin_however_late_it_comes() -> None:
    origins = Origins(Words())  # type: ignore[arg-type]
    assert origins.split("ab", [(2, "accepted"), (3, "bonus")]) == [
        ("ab", "accepted")
    ]  # the rest is held back
    assert origins.split("c", []) == [("c", "bonus")]
    assert origins.split("def", [(1, "recovered")]) == [("de", "bonus"), ("f", "recovered")]
    assert origins.split("?", []) == [("?", "plain")]  # the end of a character that was cut off
    assert "".join(text for text, _ in origins.pieces) == "abcdef?"


def test_what_belongs_to_a_stop_text_is_not_shown(tiny_folder: Path) -> None:
    with LLM(tiny_folder) as llm:
        whole = llm.generate("hello", temperature=0, max_tokens=8)[0].text
        params = SamplingParams(temperature=0, max_tokens=8, stop=whole[3:5])
        received: Received = queue.SimpleQueue()
        answer = Answer(llm, llm.tokenizer.encode("hello"), params, received)
        for _ in listen({answer.request.id: answer}, received):
            pass
    assert (
        "".join(text for text, _ in answer.origins[0].pieces)
        == answer.text
        == whole[: whole.index(whole[3:5])]
    )
