"""Answers a batch of prompts through the engine and listens, step by step: what benchmarks and advice are made of."""

from __future__ import annotations

import gc
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from outrider.bench.peers import Run
from outrider.engine.llm import LLM
from outrider.errors import OutriderError
from outrider.model.kernels.gpu.recording import Recorded
from outrider.types import Event, Request, SamplingParams, StepRecord


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and when it ended."""

    ended: float
    tokens: int
    begun: int  # sequences that have a token by now
    sequences: int
    known: int
    rows: int  # of one pass
    seconds: float  # a pass and what goes with it


Own = tuple[int, float]  # of one answer: tokens after the first ones, and seconds from those to the last
Received = tuple[int, float, int]  # the step that brought a request tokens, when they came, and how many


@dataclass(slots=True)
class Meter:
    """Listens to a batch of requests on the engine's thread, step by step."""

    requests: int
    timed: list[TimedStep] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    received_at: dict[str, list[Received]] = field(default_factory=lambda: defaultdict(list))  # by request
    logprobs: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )  # if they were asked for
    tokens: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def received(self, event: Event | BaseException) -> None:
        if isinstance(event, BaseException):
            self.failure = event
            self.done.set()
            return
        self.tokens += len(event.token_ids)
        self.received_at[event.request_id].append(
            (len(self.timed), time.perf_counter(), len(event.token_ids))
        )
        self.logprobs[event.request_id] += [one.logprob for one in event.logprobs or ()]
        self.requests -= event.finish_reason is not None

    def stepped(self, record: StepRecord) -> None:
        now, r = time.perf_counter(), record
        seconds = r.total_s / r.passes
        self.records.append(r)
        begun = len(self.received_at)
        self.timed.append(TimedStep(now, self.tokens, begun, r.sequences, r.known, r.rows, seconds))
        self.tokens = 0
        if not self.requests:
            self.done.set()

    def run(self, began: float, answers: list[list[int]]) -> Run:
        """As a run: its decoding begins with the first step after which every request has a token."""
        first = self._first(len(answers))
        there = sum(done.tokens for done in self.timed[: first + 1])
        return Run(answers, self.timed[first].ended - began, self.timed[-1].ended - began, there)

    def _first(self, requests: int) -> int:
        return next(i for i, done in enumerate(self.timed) if done.begun == requests)

    def gaps(self) -> list[float]:
        """Between two events with tokens, once every request has one: before that, prompts were read."""
        first = self._first(len(self.received_at))
        every = (pair for own in self.received_at.values() for pair in pairwise(own))
        return [after - before for (step, before, _), (_, after, _) in every if step >= first]

    def own(self) -> list[Own]:
        return [
            (sum(tokens for *_, tokens in received[1:]), received[-1][1] - received[0][1])
            for received in self.received_at.values()
        ]


@dataclass(slots=True)
class Answers:
    """A batch of prompts answered."""

    run: Run
    steps: int
    drafted: int
    accepted: int
    decoding: list[TimedStep]  # in which all of them only decoded
    longest: float  # seconds from one step's end to the next's
    making: float  # seconds in which graphs were made meanwhile
    records: list[StepRecord]
    firsts: list[float]  # seconds to the first token, of each
    own: list[Own]
    gaps: list[float]  # seconds between two events with tokens, once every request has one
    logprobs: list[list[float]] = field(
        default_factory=list
    )  # of each answer's tokens, if they were asked for

    @property
    def tokens(self) -> int:
        return sum(map(len, self.run.answers))

    @property
    def rate(self) -> float:
        """Tokens per second of all answers, each counted from its own first token to its own last.

        One window for all would begin when the last prompt is read. Drafts bring the other answers tokens before that,
        and the slow answers would be over-represented.
        """
        tokens, seconds = (sum(column) for column in zip(*self.own, strict=True))
        return len(self.own) * tokens / seconds if tokens and seconds > 0 else self.run.decode_rate


@contextmanager
def out_of_the_collectors_sight() -> Iterator[None]:
    """Freezes existing objects, as collecting them would stop one run in many for a tenth of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def answer(llm: LLM, prompts: Seq[list[int]], params: SamplingParams) -> Answers:
    """Answers prompts together. Each has its own seed and its own owner, so that none can look up another's answer."""
    requests = [_request(llm, i, ids, params) for i, ids in enumerate(prompts)]
    meter = Meter(len(requests))
    before, llm.driver.observer = llm.driver.observer, meter.stepped
    made = Recorded.seconds
    try:
        began = time.perf_counter()
        sequences = [s for own in llm.driver.submit(requests, meter.received) for s in own]
        meter.done.wait()
    finally:
        llm.driver.observer = before
    if meter.failure is not None:
        raise OutriderError("the engine stopped") from meter.failure
    return Answers(
        run=meter.run(began, [s.output for s in sequences]),
        steps=sum(s.steps for s in sequences),
        drafted=sum(s.drafted for s in sequences),
        accepted=sum(s.accepted for s in sequences),
        decoding=[r for r in meter.timed if r.sequences == r.known == len(prompts)],
        longest=max((b.ended - a.ended for a, b in pairwise(meter.timed)), default=0.0),
        making=Recorded.seconds - made,
        records=meter.records,
        firsts=[own[0][1] - began for own in meter.received_at.values()],
        own=meter.own(),
        gaps=meter.gaps(),
        logprobs=[some for some in meter.logprobs.values() if some],
    )


def _request(llm: LLM, number: int, ids: list[int], params: SamplingParams) -> Request:
    one = replace(params, n=1, seed=(params.seed or 0) + number)
    return llm.request(ids, one, owner=secrets.token_hex(8))
