"""Checks identity over HTTP: the same seeded requests with speculation on, off, and toggled request by request within
one loaded batch. Texts, tool calls and log-probabilities must agree.

    python -m bench.serve_identity smollm2-135m --prompts FILE.jsonl [--json OUT.json] [-- SERVER FLAGS]

Temperatures, samplers, forms, tools, choices and streaming are mixed; see `body_of`. Exits with 1 if anything differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.serving import Connection, Server, arguments, deliver, make_parser, read_prompts

CHAT = "/v1/chat/completions"
TOLERANCE = 1e-5  # of a log-probability
METHODS = ("off", "on", "toggled")  # everything is compared with the first

SIZE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue", "yellow"]},
        "sizes": {"type": "array", "items": SIZE, "maxItems": 3},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
]


def body_of(number: int, prompt: str, tokens: int) -> dict[str, Any]:
    """A request that is different for every number, and the same for the same one."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "seed": number,
        "temperature": (0, 0.7, 1)[number % 3],
        "max_tokens": tokens,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": number % 2 == 0,
    }
    if number % 4 == 1:
        body["prediction"] = {"type": "content", "content": prompt}
    if number % 10 == 4:
        body |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 4 * tokens}
    elif number % 7 == 3:
        schema = {"name": "painted", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if number % 6 == 2:
        body |= {"top_p": 0.9, "frequency_penalty": 0.4}
    if number % 11 == 5:
        body["n"] = 2
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


def speculation_of(number: int, method: str) -> Any:
    """Off, or on: by the planner, or with a fixed depth."""
    if method == "off" or (method == "toggled" and number % 3 == 0):
        return False
    return True if number % 2 else {"depth": 4, "nodes": 6}


@dataclass
class Said:
    """The answer of one choice, streamed or not."""

    text: str = ""
    reason: str | None = None
    calls: list[dict[str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, choice: dict[str, Any], message: dict[str, Any]) -> None:
        self.text += message.get("content") or ""
        self.reason = choice.get("finish_reason") or self.reason
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._take_call(call.get("index", place), call)
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            for one in (entry, *entry["top_logprobs"]):
                self.tokens.append(one["token"])
                self.logprobs.append(one["logprob"])

    def _take_call(self, place: int, call: dict[str, Any]) -> None:
        while len(self.calls) <= place:
            self.calls.append({"id": "", "name": "", "arguments": ""})
        own, function = self.calls[place], call.get("function", {})
        own["id"] += call.get("id") or ""
        own["name"] += function.get("name") or ""
        own["arguments"] += function.get("arguments") or ""


@dataclass
class Answer:
    choices: list[Said]
    written: int
    drafted: int
    accepted: int


async def answer_to(connection: Connection, body: dict[str, Any]) -> Answer:
    """Ask, and put the answer together."""
    connection.send("POST", CHAT, body)
    status = await connection.head()
    choices = [Said() for _ in range(body.get("n", 1))]
    last: dict[str, Any] = {}
    if status == 200 and body["stream"]:
        async for event in connection.events():
            for choice in event.get("choices", ()):
                choices[choice["index"]].take(choice, choice["delta"])
            last = event
    else:
        last = json.loads(b"".join([part async for part in connection.parts()]))
        for choice in last.get("choices", ()):
            choices[choice["index"]].take(choice, choice["message"])
    if "usage" not in last:
        raise RuntimeError(f"status {status}: {last}")
    timings = last["timings"]
    return Answer(
        choices, last["usage"]["completion_tokens"], timings["draft_n"], timings["draft_n_accepted"]
    )


async def answers_to(host: str, port: int, bodies: Sequence[dict[str, Any]], together: int) -> list[Answer]:
    """All of them, in order; `together` at a time, each client taking the next as soon as it is free."""
    answers: list[Answer | None] = [None] * len(bodies)
    left = iter(range(len(bodies)))

    async def client() -> None:
        connection = await Connection.open(host, port)
        with contextlib.closing(connection):
            for number in left:
                answers[number] = await answer_to(connection, bodies[number])

    async with asyncio.TaskGroup() as clients:
        for _ in range(together):
            clients.create_task(client())
    return [answer for answer in answers if answer is not None]


@dataclass
class Verdict:
    """How far two runs agree."""

    requests: int = 0
    tokens: int = 0
    scores: int = 0
    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    differing_texts: int = 0
    differing_calls: int = 0
    differing_logprobs: int = 0
    largest_gap: float = 0.0
    examples: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.differing_texts or self.differing_calls or self.differing_logprobs)


def compare(plain: Sequence[Answer], other: Sequence[Answer]) -> Verdict:
    found = Verdict(requests=len(plain))
    for number, (one, two) in enumerate(zip(plain, other, strict=True)):
        found.tokens += two.written
        found.drafted += two.drafted
        found.accepted += two.accepted
        for a, b in zip(one.choices, two.choices, strict=True):
            _compare_choices(found, number, a, b)
    return found


def _compare_choices(found: Verdict, number: int, a: Said, b: Said) -> None:
    found.calls += len(a.calls)
    found.scores += len(a.logprobs)
    if (a.text, a.reason) != (b.text, b.reason):
        found.differing_texts += 1
        found.examples.append(f"request {number}: {a.text!r} ({a.reason}) against {b.text!r} ({b.reason})")
    if a.calls != b.calls:
        found.differing_calls += 1
        found.examples.append(f"request {number}: {a.calls} against {b.calls}")
    gaps = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=False)]
    found.largest_gap = max(found.largest_gap, *gaps, 0.0)
    if a.tokens != b.tokens or any(not gap <= TOLERANCE for gap in gaps):
        found.differing_logprobs += 1
        found.examples.append(
            f"request {number}: log-probabilities differ, by up to {max(gaps, default=0):g}"
        )


async def measure(
    host: str, port: int, prompts: Sequence[str], tokens: int, together: int
) -> dict[str, Verdict]:
    """Runs each method in turn and compares it with the first."""
    bodies = [body_of(number, prompt, tokens) for number, prompt in enumerate(prompts)]
    runs: dict[str, list[Answer]] = {}
    for method in METHODS:
        asked = [
            {**body, "speculative_decoding": speculation_of(number, method)}
            for number, body in enumerate(bodies)
        ]
        begin = time.perf_counter()
        runs[method] = await answers_to(host, port, asked, together)
        took = time.perf_counter() - begin
        print(f"{method}: {len(asked)} requests in {took:.1f} s", file=sys.stderr, flush=True)
    return {method: compare(runs[METHODS[0]], runs[method]) for method in METHODS}


def show(verdicts: dict[str, Verdict]) -> None:
    names = [name for name in asdict(Verdict()) if name != "examples"]
    print(f"| method | {' | '.join(name.replace('_', ' ') for name in names)} |")
    print("|---" * (1 + len(names)) + "|")
    for method, verdict in verdicts.items():
        values = (getattr(verdict, name) for name in names)
        shown = [f"{v:.2g}" if isinstance(v, float) else str(v) for v in values]
        print(f"| {method} | {' | '.join(shown)} |")
    for example in itertools.islice((e for v in verdicts.values() for e in v.examples), 10):
        print(example)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--together", type=int, default=16)
    given = arguments(parser)
    prompts = read_prompts(given.prompts, given.limit)
    with Server(given.model, *given.flags) as server:
        verdicts = asyncio.run(measure(server.host, server.port, prompts, given.tokens, given.together))
    show(verdicts)
    methods = {name: {**asdict(verdict), "equal": verdict.equal} for name, verdict in verdicts.items()}
    deliver(given.json, "bench.serve_identity", {"methods": methods})
    return 0 if all(verdict.equal for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
