"""Steps of an answer where they are asked for: the draft, its accepted path, the drafter and the reason."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from outrider.serve.link import Detail
from outrider.serve.steps import StepWriter
from tests.serve.conftest import Served

ASKED = {"drafter": "lookup", "depth": 4, "steps": True}
LIMITS: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "speculative_decoding": ASKED,
}
CHAT = {"messages": [{"role": "user", "content": "abcabcabcabc"}], **LIMITS}
COMPLETION = {"prompt": "abcabcabcabc", **LIMITS}


def writer(last: str = "?", prediction: str = "") -> StepWriter:
    """Tokens are characters here."""
    stream = SimpleNamespace(feed=chr)
    model: Any = SimpleNamespace(
        token_text=lambda token: (chr(token), [token]), tokenizer=SimpleNamespace(text_stream=lambda: stream)
    )
    made = StepWriter(model, ord(last))
    made.prediction = [*map(ord, prediction)]
    return made


def detail(draft: str, accepted: int, drafter: str = "lookup") -> Detail:
    """A chain, of which so many tokens were accepted."""
    origins = ["accepted"] * accepted + ["recovered"]
    tokens, parents = [*map(ord, draft)], list(range(-1, len(draft) - 1))
    facts: list[list[str | int | float]] = [["batch", 23.0, 16.0], ["acceptance", 0.5]]
    return Detail(
        drafter, tokens, parents, list(range(accepted)), origins, "depth 3: batch 23 > 16", "pays", 3, facts
    )


def predicted(made: StepWriter) -> list[bool]:
    return [token["predicted"] for token in made.steps[-1]["tokens"]]


def test_a_step_has_its_draft_and_what_became_of_it() -> None:
    made = writer()
    made.add([*map(ord, "abx")], detail("abc", 2))
    assert made.steps == [
        {
            "tokens": [
                {"id": 97, "text": "a", "origin": "accepted", "predicted": False},
                {"id": 98, "text": "b", "origin": "accepted", "predicted": False},
                {"id": 120, "text": "x", "origin": "recovered", "predicted": False},
            ],
            "drafter": "lookup",
            "draft": {"tokens": [97, 98, 99], "texts": ["a", "b", "c"], "parents": [-1, 0, 1]},
            "accepted": [0, 1],
            "reason": {
                "kind": "pays",
                "depth": 3,
                "text": "depth 3: batch 23 > 16",
                "facts": [
                    {"name": "batch", "value": 23.0, "bound": 16.0},
                    {"name": "acceptance", "value": 0.5},
                ],
            },
        }
    ]


def test_tokens_that_lookup_copied_from_the_prediction_are_marked() -> None:
    made = writer("?", "abcd efg")
    made.add([*map(ord, "abx")], detail("abc", 2))  # the answer begins as the prediction does
    assert predicted(made) == [True, True, False]
    made.add([*map(ord, "abx")], detail("abc", 2))  # behind an x: copied from elsewhere
    assert predicted(made) == [False, False, False]
    made.add([ord("e")], Detail("none", [], [], [], ["plain"], "off", "off", 0, []))
    made.add([*map(ord, "fgg?")], detail("fgg", 3))  # the prediction ends before the draft does
    assert predicted(made) == [True, True, False, False]


def test_only_lookup_copies_the_prediction() -> None:
    for drafter, copied in (("eagle", False), ("lookup+eagle", True)):
        made = writer("?", "abc")
        made.add([*map(ord, "abx")], detail("abc", 2, drafter))
        assert predicted(made)[0] is copied


def checked(steps: list[dict[str, Any]], text: str) -> None:
    """Steps that are whole, agree with the text, and have drafts of which some were accepted."""
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == text
    assert sum(len(step["tokens"]) for step in steps) == LIMITS["max_tokens"]
    assert any(step["accepted"] for step in steps)
    for step in steps:
        draft, count = step["draft"], len(step["accepted"])
        assert len(draft["tokens"]) == len(draft["parents"]) == len(draft["texts"]) <= 4
        assert (step["drafter"] == "lookup") is bool(draft["tokens"])
        assert step["reason"]["kind"] and step["reason"]["text"]
        if step is not steps[-1]:  # the answer may end within an accepted path
            assert count == sum(token["origin"] == "accepted" for token in step["tokens"])
        emitted = [token["id"] for token in step["tokens"]]
        assert emitted[:count] == [draft["tokens"][node] for node in step["accepted"]][: len(emitted)]


def second(served: Served, path: str, body: dict[str, Any]) -> Any:
    """The answer to what was asked before: lookup copies it from the first answer."""
    return [served.post(path, body) for _ in range(2)][1].json()


def events_of(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    with httpx.stream("POST", served.url + path, json={**body, "stream": True}, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_a_stream_brings_steps_as_they_are_taken(served: Served, path: str, body: dict[str, Any]) -> None:
    served.post(path, body)
    chosen = [event["choices"][0] for event in events_of(served, path, body)]
    steps = [step for choice in chosen for step in choice.get("steps", [])]
    checked(
        steps, "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in chosen)
    )
    assert sum(bool(choice.get("steps")) for choice in chosen) > 1


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_a_whole_answer_has_all_steps(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = second(served, path, body)
    [choice] = answer["choices"]
    checked(choice["steps"], choice.get("text") or choice["message"]["content"])
    told = answer["metrics"]["speculative_decoding"]["per_step_reasons"]
    assert told == [step["reason"]["text"] for step in choice["steps"]]


def test_other_dialects_have_all_steps_at_the_end(served: Served) -> None:
    message = second(served, "/v1/messages", CHAT)
    checked(message["steps"], message["content"][0]["text"])
    limits = {name: value for name, value in LIMITS.items() if name != "max_tokens"}
    body = {"input": "abcabcabcabc", "max_output_tokens": LIMITS["max_tokens"], **limits}
    response = second(served, "/v1/responses", body)
    checked(response["steps"], response["output"][0]["content"][0]["text"])


def test_a_prompt_that_is_only_read_has_no_steps(served: Served) -> None:
    [choice] = served.post("/v1/completions", {**COMPLETION, "max_tokens": 0, "echo": True}).json()["choices"]
    assert "steps" not in choice


def test_steps_come_only_where_asked_for(served: Served) -> None:
    body = {**CHAT, "speculative_decoding": {**ASKED, "steps": False, "explain": True}}
    answer = served.post("/v1/chat/completions", body).json()
    assert "steps" not in answer["choices"][0]
    assert answer["metrics"]["speculative_decoding"]["per_step_reasons"]
