"""Streams as they are on the wire, byte by byte: what a client without an SDK reads."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import UNENCRYPTED, Served, start_server
from tests.serve.sdk import exactly, user

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"


def transcript(served: Served, path: str, body: dict[str, Any]) -> tuple[httpx.Response, str]:
    with httpx.stream(
        "POST", served.url + path, json={**body, "stream": True}, timeout=60, verify=UNENCRYPTED
    ) as reply:
        return reply, reply.read().decode()


def chat(served: Served, **options: Any) -> str:
    reply, text = transcript(served, CHAT, {"messages": user("hello"), "max_tokens": 8, "seed": 1, **options})
    assert reply.status_code == 200, text
    return text


def lines_of(text: str) -> list[str]:
    """The data of each event, once the whole is nothing but `data:` lines with blank lines between."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks_of(text: str) -> list[dict[str, Any]]:
    *events, done = lines_of(text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_the_headers_keep_proxies_from_waiting(served: Served) -> None:
    reply, _ = transcript(served, CHAT, {"messages": user("hello"), "max_tokens": 1})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers


def test_a_chat_transcript(served: Served) -> None:
    """Made to say known words, the model writes a stream that is known to the letter."""
    text = chat(served, stop="!", **flat(exactly("Hi there!")))
    first, *middle, last = chunks_of(text)
    head = {name: first[name] for name in ("id", "object", "created", "model", "system_fingerprint")}
    assert head["object"] == "chat.completion.chunk"
    assert head["id"].startswith("chatcmpl-")
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first == {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]}
    assert middle == [{**head, "choices": [{**choice, "delta": {"content": "Hi there"}}]}]
    assert last["choices"] == [{**choice, "delta": {}, "finish_reason": "stop"}]
    assert set(last) - set(first) == {"seed", "timings", "metrics"}


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """As the SDK would send it."""
    return {"prediction": options["prediction"], **options["extra_body"]}


def test_each_choice_begins_with_its_role_and_ends_with_its_reason(served: Served) -> None:
    chunks = chunks_of(chat(served, n=3))
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_all_events_of_a_stream_have_one_head(served: Served) -> None:
    chunks = chunks_of(chat(served, stream_options={"include_usage": True}))
    for name in ("id", "object", "created", "model", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1


def test_usage_is_null_until_the_end(served: Served) -> None:
    *events, last = chunks_of(chat(served, stream_options={"include_usage": True}))
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert {"seed", "timings", "metrics"} <= set(last)
    assert "metrics" not in events[-1]


def test_without_asking_usage_is_not_mentioned(served: Served) -> None:
    assert all("usage" not in event for event in chunks_of(chat(served)))


def test_usage_can_run_along(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks_of(chat(served, stream_options=options, speculative_decoding=False))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 8)
    assert {event["usage"]["prompt_tokens"] for event in events} == {events[0]["usage"]["prompt_tokens"]}


def test_padded_events_all_have_round_sizes(served: Served) -> None:
    body = {"messages": user("hello"), "max_tokens": 24, "seed": 1}
    _, plain = transcript(served, CHAT, body)
    asked = {**body, "stream_options": {"include_obfuscation": True}}
    fillings = []
    for _ in range(2):
        _, padded = transcript(served, CHAT, asked)
        *events, _ = lines_of(padded)
        assert {len(event.encode()) % 256 for event in events} == {0}
        assert content(padded) == content(plain)
        fillings.append("".join(json.loads(event)["obfuscation"] for event in events))
    assert len({len(event.encode()) % 256 for event in lines_of(plain)[:-1]}) > 1
    # Random, so that compression does not undo it; single ones are short.
    assert min(map(len, fillings)) > 32 and fillings[0] != fillings[1] and len(set(fillings[0])) > 8


def content(text: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(text))


def test_a_completion_transcript(served: Served) -> None:
    body = {"prompt": "hello 12", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 0}
    _, text = transcript(served, COMPLETIONS, {**body, "speculative_decoding": False})
    chunks = chunks_of(text)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["text"].startswith("hello 12")
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    assert len(offsets) == 6
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


def test_a_responses_transcript_names_its_events(served: Served) -> None:
    reply, text = transcript(served, RESPONSES, {"input": "hello", "max_output_tokens": 4, "temperature": 0})
    assert reply.status_code == 200
    events = text.removesuffix("\n\n").split("\n\n")
    numbers = []
    for event in events:
        name, data = event.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        numbers.append(parsed["sequence_number"])
    assert numbers == list(range(len(events)))
    assert "[DONE]" not in text
    assert events[-1].startswith("event: response.incomplete\n")


def events_of(text: str) -> list[dict[str, Any]]:
    """Events that are named after their type."""
    parsed = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def test_a_messages_transcript(served: Served) -> None:
    """Made to say known words, the model writes a stream that is known to the letter."""
    body = {"messages": user("hello"), "max_tokens": 20, "seed": 1, "stop_sequences": ["!"]}
    reply, text = transcript(served, MESSAGES, {**body, **flat(exactly("Hi there!"))})
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    begun, *blocks, last, stop = events_of(text)
    message = {"type": "message", "role": "assistant", "model": "tiny", "content": []}
    message |= {"id": begun["message"]["id"], "stop_reason": None, "stop_sequence": None}
    prompt = served.post("/tokenize", {"messages": user("hello")}).json()["count"]
    usage = {"input_tokens": prompt, "output_tokens": 0}
    assert begun == {"type": "message_start", "message": {**message, "usage": usage}}
    assert message["id"].startswith("msg_")
    assert blocks == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi there"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "!"}
    assert {"usage", "seed", "timings", "metrics"} <= set(last)
    assert stop == {"type": "message_stop"}


def test_half_characters_are_not_sent(served: Served) -> None:
    """A character of several tokens comes whole, with the token that completes it."""
    word = "日本語"
    chunks = chunks_of(chat(served, max_tokens=9, logprobs=True, **flat(exactly(word))))
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert "".join(text or "" for text in texts) == word
    assert not any("\ufffd" in (text or "") for text in texts)


def test_a_wrong_request_for_a_stream_is_a_plain_error(served: Served) -> None:
    reply, text = transcript(served, CHAT, {"messages": user("hello"), "temperature": -1})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert json.loads(text)["error"]["param"] == "temperature"


def test_small_writes_are_not_held_back(served: Served) -> None:
    """Headers and body go out in two writes; a kernel left to gather small ones waits 40 ms for the second."""
    took = []
    with httpx.Client(timeout=20, verify=UNENCRYPTED) as kept:
        for _ in range(40):  # the quickest counts: other work on the machine is not the server's
            begin = time.perf_counter()
            kept.get(f"{served.url}/health")
            took.append(time.perf_counter() - begin)
    assert min(took[1:]) < 0.03


# ----------------------------------------------------------------------------- a server with flags of its own


@pytest.fixture(scope="module")
def strict(tiny_folder: Path) -> Iterator[Served]:
    """It pads, shows signs of life very often, and has little patience."""
    server = start_server(
        tiny_folder, "--stream-padding", "--ping-seconds", "0.005", "--request-timeout", "1.5"
    )
    yield server
    assert server.stop() == 0


PING = ": ping\n\n"


def test_padding_can_be_the_servers_choice_and_refused_by_a_request(strict: Served) -> None:
    for options, padded in ((None, True), ({"include_obfuscation": False}, False)):
        events = chunks_of(chat(strict, stream_options=options).replace(PING, ""))
        assert all(("obfuscation" in event) == padded for event in events)


def test_a_silent_stream_shows_signs_of_life(strict: Served) -> None:
    """Comments, which clients skip, while a long prompt is read."""
    text = chat(strict, messages=user("a long prompt " * 120), max_tokens=1)
    begun, _, rest = text.partition("\n\n")
    assert '"role":"assistant"' in begun
    assert rest.startswith(PING)
    assert len(chunks_of(text.replace(PING, ""))) >= 2


@pytest.mark.parametrize("padding", [False, True])
def test_an_error_in_the_middle_is_the_last_event(strict: Served, padding: bool) -> None:
    options = {"max_tokens": 1900, "n": 8, "ignore_eos": True, "speculative_decoding": False}
    text = chat(strict, stream_options={"include_obfuscation": padding}, **options)
    *events, last = lines_of(text.replace(PING, ""))
    assert all("choices" in json.loads(event) for event in events)
    assert len(events) > 8
    message = "the request took too long"
    error = {"message": message, "type": "timeout_error", "param": None, "code": "timeout"}
    assert json.loads(last)["error"] == error
    assert ("obfuscation" in json.loads(last)) == padding
    strict.wait_idle(5)


def test_messages_has_signs_of_life_of_its_own(strict: Served) -> None:
    body = {"messages": user("one not read before " * 85), "max_tokens": 1}
    _, text = transcript(strict, MESSAGES, body)
    kinds = [event["type"] for event in events_of(text)]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-1] == "message_stop"


def test_an_error_in_the_middle_of_a_message_is_an_event(strict: Served) -> None:
    body = {"messages": user("hello"), "max_tokens": 1900, "ignore_eos": True, "speculative_decoding": False}
    asked = {**body, "stream_options": {"include_obfuscation": False}}
    *_, last = events_of(transcript(strict, MESSAGES, asked)[1])
    error = {
        "message": "the request took too long",
        "type": "timeout_error",
        "param": None,
        "code": "timeout",
    }
    assert last == {"type": "error", "error": error}
    strict.wait_idle(5)


def test_a_client_of_http_1_0_gets_the_same_events_without_chunks(served: Served) -> None:
    body = json.dumps({"messages": user("hello"), "max_tokens": 6, "seed": 1, "stream": True}).encode()
    lines = (f"POST {CHAT} HTTP/1.0", "host: localhost", "content-type: application/json")
    head = "\r\n".join((*lines, f"content-length: {len(body)}", "", ""))
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 20) as sock:
        sock.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    headers, _, text = answer.partition(b"\r\n\r\n")
    assert b" 200 " in headers and b"chunked" not in headers.lower()
    said = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks_of(text.decode()))
    again = chunks_of(chat(served, max_tokens=6))
    assert said == "".join(one["choices"][0]["delta"].get("content", "") for one in again)
