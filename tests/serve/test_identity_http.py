"""Speculation changes nothing a client can see but the time: on, off, and toggled within one loaded batch."""

from __future__ import annotations

import asyncio
import random

import pytest
from bench.serve_identity import METHODS, Answer, Said, Verdict, compare, measure

from tests.serve.conftest import Served

WORDS = ("hello", "12", "the", "tool", "<tool>", "x = 1", "ünï", "and", "so", "on")


def prompts(count: int) -> list[str]:
    """Short texts that repeat themselves, so that there is something to guess from."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(1, 6))) for _ in range(count)]
    return [text if number % 2 else f"{text} {text}" for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def verdicts(served: Served) -> dict[str, Verdict]:
    """A hundred requests three times over, 16 at a time."""
    host, port = served.url.removeprefix("http://").split(":")
    return asyncio.run(measure(host, int(port), prompts(100), tokens=24, together=16))


@pytest.mark.parametrize("method", METHODS[1:])
def test_speculation_changes_no_text_no_call_and_no_logprob(
    verdicts: dict[str, Verdict], method: str
) -> None:
    found = verdicts[method]
    assert found.equal, found.examples[:5]
    assert found.requests == 100


def test_what_was_compared_was_worth_comparing(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["off"].drafted == 0
    assert verdicts["on"].drafted > verdicts["toggled"].drafted > 0
    assert verdicts["on"].accepted > 50
    assert verdicts["on"].calls >= 5
    assert verdicts["on"].scores > 4 * 1000


def one(**changes: object) -> list[Answer]:
    said = {"text": "a", "reason": "stop", "calls": [{"id": "1"}], "tokens": ["a"], "logprobs": [-0.5]}
    return [Answer([Said(**{**said, **changes})], 1, 0, 0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "b"},
        {"reason": "length"},
        {"calls": []},
        {"logprobs": [-0.5001]},
        {"logprobs": [float("nan")]},
        {"tokens": ["b"]},
        {"tokens": ["a", "b"], "logprobs": [-0.5, -1.0]},
    ],
)
def test_a_difference_is_seen(changes: dict[str, object]) -> None:
    assert compare(one(), one()).equal
    assert not compare(one(), one(**changes)).equal
