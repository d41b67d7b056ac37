"""One request as the command line sees it: submitted to the engine's driver, received event by event, timed.

There is no decoding here: `Answer.start` submits, `listen` waits for events of any number of answers.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from outrider.errors import stopped
from outrider.types import Event, FinishReason, Origin, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.load.tokenizer import TextStream

Received = queue.SimpleQueue[Event | BaseException]
Pieces = list[tuple[str, Origin]]  # text token by token, each with where it came from


class Origins:
    """Splits the text of one choice's events into tokens.

    A token's text may come later than the token, or never: what could begin a stop text is held back, and what
    belongs to one is left out. So tokens wait here, and an event's text takes as many characters as it has.
    """

    def __init__(self, stream: TextStream) -> None:
        self.pieces: Pieces = []
        self._stream, self._waiting = stream, deque[tuple[int, Origin]]()  # characters, and whose

    def split(self, text: str, tokens: Iterable[tuple[int, Origin]]) -> Pieces:
        self._waiting.extend((len(self._stream.feed(token)), origin) for token, origin in tokens)
        fresh: Pieces = []
        while text and self._waiting:
            count, origin = self._waiting.popleft()
            if count > len(text):
                self._waiting.appendleft((count - len(text), origin))
            fresh.append((text[:count], origin))
            text = text[count:]
        if text:
            fresh.append((text, "plain"))  # the end of a character that was cut off
        self.pieces += fresh
        return fresh


class Answer:
    """A running or finished request. Raises what the engine refuses it for."""

    def __init__(
        self, llm: LLM, prompt_ids: Sequence[int], params: SamplingParams, received: Received, owner: str = ""
    ) -> None:
        self.llm = llm
        self.request = llm.request(prompt_ids, params, owner)
        self.texts = [""] * params.n
        self.origins = [Origins(llm.tokenizer.text_stream()) for _ in self.texts]
        self.fresh: Pieces = []  # what the last event brought
        self._counts = [0] * params.n  # tokens received
        self.reasons: list[FinishReason | None] = [None] * params.n
        self.begun = time.perf_counter()
        self.first: float | None = None
        self.ended = self.begun
        self.sequences = tuple(llm.driver.submit([self.request], received.put)[0])

    def receive(self, event: Event) -> None:
        self.ended = time.perf_counter()
        if event.token_ids and self.first is None:
            self.first = self.ended
        sequence, before = self.sequences[event.choice], self._counts[event.choice]
        self._counts[event.choice] += len(event.token_ids)
        come = sequence.origins[before : self._counts[event.choice]]
        self.fresh = self.origins[event.choice].split(event.text, zip(event.token_ids, come, strict=True))
        self.texts[event.choice] += event.text
        self.reasons[event.choice] = event.finish_reason

    @property
    def done(self) -> bool:
        return all(self.reasons)

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def tokens(self) -> int:
        return sum(len(s.output) for s in self.sequences)

    @property
    def first_token_s(self) -> float:
        return (self.first or self.ended) - self.begun

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first step, which also read the prompt."""
        spent = self.ended - (self.first or self.ended)
        return (self.tokens - len(self.sequences)) / spent if spent > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        steps = sum(s.steps for s in self.sequences)
        return self.tokens / steps if steps else 0.0

    def stats_line(self) -> str:
        prompt, cached = len(self.request.prompt_ids), self.sequences[0].reused
        return (
            f"{self.tokens} tokens in {self.ended - self.begun:.2f} s | {self.tokens_per_s:.1f} tok/s | "
            f"first token after {self.first_token_s:.2f} s | {self.tokens_per_step:.2f} tokens per step | "
            f"prompt {prompt} tokens ({cached} cached) | seed {self.request.seed}"
        )

    def as_json(self) -> dict[str, Any]:
        """The first choice's fields, and all choices when there are several."""
        prompt, written = len(self.request.prompt_ids), self.tokens
        choices = [self._choice(i) for i in range(len(self.sequences))]
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "cached_tokens": self.sequences[0].reused,
        }
        times = {
            "seconds": round(self.ended - self.begun, 6),
            "first_token_s": round(self.first_token_s, 6),
            "tokens_per_s": round(self.tokens_per_s, 3),
        }
        whole = {**choices[0], "usage": usage, "stats": {**choices[0]["stats"], **times}}
        if self.request.params.prompt_logprobs is not None:
            scores = self.sequences[0].prompt_logprobs
            whole["prompt_logprobs"] = [None if e is None else self._logprob(e) for e in scores]
        return whole if len(choices) == 1 else {**whole, "choices": choices}

    def _choice(self, i: int) -> dict[str, Any]:
        s = self.sequences[i]
        stats = {
            "steps": s.steps,
            "drafted": s.drafted,
            "accepted": s.accepted,
            "tokens_per_step": round(len(s.output) / s.steps, 4) if s.steps else 0.0,
            "origins": list(s.origins),
        }
        choice: dict[str, Any] = {
            "text": self.texts[i],
            "token_ids": s.output,
            "finish_reason": self.reasons[i],
            "seed": s.seed & (2**64 - 1),
            "stats": stats,
        }
        if self.request.params.logprobs is not None:
            choice["logprobs"] = [self._logprob(entry) for entry in s.logprobs]
        return choice

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        others = [self._token(token, logprob) for token, logprob in entry.alternatives]
        return {**self._token(entry.token, entry.logprob), "alternatives": others}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.llm.tokenizer.token_bytes(token, special=True).decode(errors="replace")
        return {"token": token, "text": text, "logprob": round(logprob, 6)}


def listen(running: dict[str, Answer], received: Received) -> Generator[tuple[Answer, Event]]:
    """Events as they come, until no answer in `running` is left; finished ones are taken out of it.

    The caller may add answers while it listens. Leaving early, by an error or Ctrl-C, aborts what still runs.
    """
    try:
        while running:
            event = received.get()
            if isinstance(event, BaseException):
                raise stopped(event) from event
            answer = running.get(event.request_id)
            if answer is None:
                continue  # its abort came too late to matter
            answer.receive(event)
            if answer.done:
                del running[event.request_id]
            yield answer, event
    finally:
        for answer in running.values():
            answer.llm.abort(answer.request.id)
