"""One answer as it streams in: when each event with tokens was read, how many tokens it held, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LONGEST_SAID = 200  # characters of an error that are kept


@dataclass(slots=True)
class Sample:
    """A request that was made. Times are seconds: `due` and `start` from the beginning of its round, `times` and
    `end` from `start`.
    """

    number: int  # of the request, or of its conversation
    due: float = 0.0
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # of events that brought tokens
    counts: list[int] | None = None  # tokens of each of them, where the server says so
    prompt_tokens: int = 0
    tokens: int = 0
    counted: bool = True  # by the server; else every event counts as one token
    error: str = ""  # its kind; empty: there was none
    said: str = ""  # the server's words about it
    turn: int = 0  # of its conversation
    cached: int | None = None  # tokens of the prompt found in the prefix cache; None: the server does not say

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first."""
        return (
            (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 and self.times else None
        )


class Stream:
    """Reads the events of one answer into a sample."""

    def __init__(self, sample: Sample, begin: float) -> None:
        self.sample, self.begin = sample, begin  # `begin` is the clock's, when it was asked
        self.status = 0
        self.kind = ""  # of content
        self.whole = False  # the server said that it was all
        self.text = ""  # of the answer, reasoning left out
        self._rest = b""
        self._counts: list[int] = []
        self._counting = True  # every event so far said how many tokens it had
        self._so_far = 0  # tokens, by the running usage
        self._usage: Mapping[str, Any] | None = None

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.kind = status, headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def streams(self) -> bool:
        return self.status == 200 and self.kind == "text/event-stream"

    def body(self, data: bytes, now: float) -> None:
        self._rest += data
        if not self.streams:
            self._rest = self._rest[: 1 << 16]
            return
        if b"\r" in self._rest:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.whole = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._failed("event that is no JSON", data.decode("utf-8", "replace"))
            return
        if problem := event.get("error"):
            self._failed("error in the stream", said_in({"error": problem}))
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        for choice in event.get("choices") or ():
            self._choice(choice, usage, now)

    def _choice(self, choice: dict[str, Any], usage: Any, now: float) -> None:
        self.whole = self.whole or choice.get("finish_reason") is not None
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = delta.get("content")
            self.text += text or ""
            text = text or delta.get("reasoning_content") or delta.get("reasoning")
            text = text or delta.get("tool_calls")
        count = self._count(choice.get("token_ids"), usage)
        if text or count:
            self.sample.times.append(now - self.begin)
            self._counting = self._counting and bool(count)
            self._counts.append(count)

    def _count(self, ids: Any, usage: Any) -> int:
        """Tokens of this event, if it says so: by its token ids or by usage that runs along. What lists all ids
        of an answer at its end is no count of an event.
        """
        if not self._counting:
            return 0
        if isinstance(usage, dict) and isinstance(so_far := usage.get("completion_tokens"), int):
            count, self._so_far = so_far - self._so_far, so_far
            return max(0, count)
        return len(ids) if isinstance(ids, list) else 0

    def finish(self, end: float) -> None:
        """The answer is whole, or what there is of it."""
        sample = self.sample
        sample.end = end - self.begin
        usage = self._usage or {}
        tokens = usage.get("completion_tokens")
        sample.counted = isinstance(tokens, int)
        sample.tokens = tokens if isinstance(tokens, int) else sum(self._counts) or len(sample.times)
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if self._counting and sum(self._counts) == sample.tokens:
            sample.counts = self._counts
        self._classify()

    def _classify(self) -> None:
        if self.sample.error:
            return
        if self.status != 200:
            self._failed(
                f"HTTP {self.status}", said_in(_parsed(self._rest)) or self._rest.decode("utf-8", "replace")
            )
        elif not self.streams:
            self._failed("no stream", f"it answered in one piece, as {self.kind or 'no stated type'}")
        elif not self.whole:
            self._failed("broke off", "the stream ended before the answer did")
        elif not self.sample.times:
            self._failed("empty answer", "no event had text")

    def _failed(self, kind: str, said: str) -> None:
        if not self.sample.error:
            self.sample.error, self.sample.said = kind, " ".join(said.split())[:LONGEST_SAID]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def said_in(body: Any) -> str:
    """What an error's body says, in whichever of the usual places."""
    if not isinstance(body, dict):
        return ""
    problem = body.get("error") or body.get("detail") or body.get("message") or ""
    if isinstance(problem, dict):
        problem = problem.get("message") or problem.get("code") or json.dumps(problem)
    return str(problem)
