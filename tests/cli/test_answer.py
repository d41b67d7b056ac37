"""An answer that is listened to: times and counts, and what happens when the listener leaves."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.answer import Answer, Heard, listen
from outrider.errors import OutriderError


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, draft="none", check_integrity=True) as llm:
        yield llm


def ask(llm: LLM, heard: Heard, **params) -> Answer:
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    return Answer(llm, [5, 6, 7], SamplingParams(**{**options, **params}), heard)


def test_answers_are_heard_to_their_end(tiny: LLM) -> None:
    heard: Heard = queue.SimpleQueue()
    answers = [ask(tiny, heard), ask(tiny, heard, n=2, temperature=1, seed=3, max_tokens=5)]
    events = list(listen({answer.request.id: answer for answer in answers}, heard))
    assert all(answer.done for answer in answers)
    assert [answer.tokens for answer in answers] == [8, 10]
    assert [len(events_of) for events_of in ([e for a, e in events if a is x] for x in answers)] == [8, 10]
    expected = tiny.generate([5, 6, 7], temperature=0, ignore_eos=True, max_tokens=8)[0]
    assert answers[0].text == expected.text and answers[0].tokens_per_step == 1.0
    assert 0 < answers[0].first_token_s < answers[0].ended - answers[0].begun
    after_first = answers[0].ended - answers[0].begun - answers[0].first_token_s
    assert answers[0].tokens_per_s == pytest.approx(7 / after_first)


def test_leaving_early_aborts(tiny: LLM) -> None:
    heard: Heard = queue.SimpleQueue()
    answer = ask(tiny, heard, max_tokens=120)
    events = listen({answer.request.id: answer}, heard)
    next(events)
    events.close()
    deadline = time.monotonic() + 5
    while not tiny.engine.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tiny.engine.idle and answer.sequences[0].finish_reason == "abort"
    assert len(answer.sequences[0].output) < 120


def test_an_engine_that_dies_is_told(tiny: LLM) -> None:
    heard: Heard = queue.SimpleQueue()
    answer = ask(tiny, heard)
    heard.put(RuntimeError("out of paper"))
    with pytest.raises(OutriderError, match="out of paper"):
        list(listen({answer.request.id: answer}, heard))
