"""Proves identity under traffic: requests arrive while others decode, and every answer is compared with the one that
the same request gets alone and plainly.

Requests have logprobs, penalties, a bias, banned words, stop words, a minimum length, a prediction, a grammar, or none
of these. Each names a drafter with a chain or a tree, or leaves that to the planner. A set is answered alone once and
then together several times, each time with another order, other arrivals, other drafters and other requests aborted.
Arrivals and aborts are counted in tokens, not in seconds, so a seed gives the same traffic on every machine.
"""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from outrider.bench.adversaries import adversaries
from outrider.bench.audit import TREE, Divergence, Extent, borrowed, how, margin
from outrider.bench.compare import differing, first_difference
from outrider.engine.llm import LLM
from outrider.engine.output import Output
from outrider.errors import OutriderError, stopped
from outrider.types import Event, Request, SamplingParams, Sequence, TokenLogprob

SET = 30  # requests that are answered alone, and then in company; fewer for few prompts
SHARE = 32  # sequences that may run at once for which a set is that large; where more may, sets are larger
WIDEST = 4  # times that
RUNS = 12  # orders in which a set arrives: the answers alone are what takes longest
RUNS_ONCE = 3  # without a number of tokens to reach
ALONE = 0.25  # of the time, if it is bounded: a set is complete then, however few were answered alone
USUAL = "usual"
GRAMMARS = ("json schema", "regex")
KINDS = (
    *("logprobs", "prompt logprobs", "penalties", "bias", "bad words", "stop", "min_tokens", "prediction"),
    *GRAMMARS,
)
USUAL_EACH = 5  # usual requests for one of each other kind
TOGETHER = (16, 2, 32, 4, 24, 8)  # sequences that are to run at once, on average, by run
ABORTED = 0.15  # of the requests
BURST = 0.3  # of the requests arrive together with the one before
SHARED = 0.25  # of the requests may find their prompts in the cache
TOLERANCE = 1e-3  # of a log-probability
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "open": {"type": "boolean"},
    },
    "required": ["name", "tags", "count", "open"],
    "additionalProperties": False,
}
REGEX = "[A-Z][a-z]{2,9}(,? [a-z]{2,9}){8,40}[.]"


@dataclass(slots=True)
class Traffic:
    """What was compared, and what differed."""

    tokens: Counter[tuple[str, float]] = field(default_factory=Counter)  # compared, by kind and temperature
    requests: Counter[str] = field(default_factory=Counter)  # by kind
    methods: Counter[str] = field(default_factory=Counter)  # requests, by drafter
    aborted: int = 0  # requests
    together: int = 0  # requests that ran at once, at most
    left_out: dict[str, str] = field(default_factory=dict)  # kinds that cannot be had here, and why
    logprobs: int = 0  # compared
    differing_logprobs: int = 0
    differing: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        return sum(self.tokens.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "differing": self.differing,
            "by_kind_and_temperature": {f"{k} T={t:g}": n for (k, t), n in sorted(self.tokens.items())},
            "requests": dict(self.requests),
            "aborted": self.aborted,
            "together": self.together,
            "left_out": self.left_out,
            "logprobs": self.logprobs,
            "differing_logprobs": self.differing_logprobs,
            "methods": dict(self.methods),
            "drafted": dict(self.drafted),
            "accepted": dict(self.accepted),
            "divergences": [asdict(d) for d in self.divergences],
            "seconds": round(self.seconds, 1),
        }


@dataclass(slots=True)
class Case:
    """A request and what the model says to it alone, without speculation."""

    prompt: int  # its number
    ids: list[int]
    kind: str
    params: SamplingParams
    alone: Output


@dataclass(slots=True)
class Arrival:
    """A case on its way through the engine among others."""

    case: Case
    method: str
    request: Request
    at: int  # tokens emitted for all requests before it arrives
    until: int | None  # own tokens after which it is aborted
    sequence: Sequence | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: str | None = None


Tell = Callable[
    [Traffic, float, str], None
]  # what was found so far, the share that is done, what is going on


def audit_arrivals(
    llm: LLM,
    prompts: list[list[int]],
    hostile: bool,
    temperatures: list[float],
    params: SamplingParams,
    extent: Extent = Extent(),  # noqa: B008 (frozen)
    tell: Tell = lambda *_: None,
    reference: LLM | None = None,
) -> Traffic:
    """Compares as much as `extent` says, each answer when it ends. Plain answers come from `reference`, by default the
    audited engine itself.
    """
    found, begin, rnd = Traffic(), time.perf_counter(), random.Random(params.seed or 0)
    kinds = _kinds(llm, found)
    answers: dict[tuple[int, ...], list[int]] = {}
    enemies = adversaries(llm.model.config.vocab, llm.model.config.eos_ids, answers) if hostile else {}
    drafters = [name for name in llm.engine.drafters.names if name != "none"]
    ours = ["auto"] * 4 + ["plain", *drafters, *(TREE + name for name in drafters)]
    scale = min(max(llm.settings.max_sequences // SHARE, 1), WIDEST) if extent.repeats else 1
    size = SET * scale if extent.repeats else min(SET, max(len(prompts), len(kinds)))
    sets, runs = -(-len(prompts) // size), RUNS if extent.repeats else RUNS_ONCE

    def reached(once: float, what: str) -> bool:
        """Whether to stop; says how far it is."""
        found.seconds = time.perf_counter() - begin
        tell(found, extent.share(found.compared, found.seconds, once), what)
        return extent.reached(found.compared, found.seconds)

    with borrowed(llm.engine, enemies, llm.engine.planner):
        for number in count():
            cases, places = list[Case](), range(number * size, (number + 1) * size)
            begun = time.perf_counter()
            for case in _cases(llm, reference or llm, prompts, places, kinds, temperatures, params, rnd):
                cases.append(case)
                answers[tuple(case.ids)] = case.alone.token_ids
                if reached(number / sets, f"{len(cases)} of {size} requests answered alone"):
                    return found
                if extent.seconds is not None and time.perf_counter() - begun > ALONE * extent.seconds:
                    break
            for run in range(runs):
                methods = ours + (list(enemies) if run % 2 else [])
                arrivals = _traffic(llm, cases, methods, TOGETHER[run % len(TOGETHER)] * scale, rnd)
                with contextlib.closing(_run(llm, arrivals, found)) as ended:
                    for place, arrival in enumerate(ended, 1):
                        _compare(llm, found, arrival)
                        if reached((number + (run + place / len(cases)) / runs) / sets, ""):
                            return found
            answers.clear()
            if not extent.repeats and number + 1 >= sets:
                return found
    raise AssertionError("sets come without end")


# -------------------------------------------------------------------------------------------------- requests


def _kinds(llm: LLM, found: Traffic) -> list[str]:
    """All that can be had here, the usual one more often."""
    try:
        _ = llm.compiler
    except OutriderError as missing:
        found.left_out |= dict.fromkeys(GRAMMARS, str(missing))
    if "lookup" not in llm.engine.drafters:
        found.left_out["prediction"] = "no drafter here follows predictions"
    return [USUAL] * USUAL_EACH + [kind for kind in KINDS if kind not in found.left_out]


def _cases(
    llm: LLM, reference: LLM, prompts: list[list[int]], places: Seq[int], kinds: list[str], temperatures: list[float],
    params: SamplingParams, rnd: random.Random,
) -> Iterator[Case]:  # fmt: skip
    """A set, each answered alone and plainly."""
    for place in places:
        number = place % len(prompts)
        ids, kind = prompts[number], kinds[place % len(kinds)]
        asked = replace(
            params,
            temperature=temperatures[(place + place // len(kinds)) % len(temperatures)],
            seed=rnd.randrange(2**32),
            **_asked(llm, kind, ids, params, rnd),
        )
        alone = reference.generate([ids], replace(asked, speculation=False))[0]  # type: ignore[arg-type]
        if kind == "prediction":
            asked = replace(asked, prediction=_nearly(alone.text))
        yield Case(number, ids, kind, asked, alone)


def _asked(llm: LLM, kind: str, ids: list[int], params: SamplingParams, rnd: random.Random) -> dict[str, Any]:
    """What makes a request one of its kind. Words and ids are the prompt's: an answer is likely to want them."""
    words = sorted({word for token in ids if (word := llm.tokenizer.decode([token]).strip())}) or ["the"]
    if kind == "logprobs":
        return {"logprobs": 3}
    if kind == "prompt logprobs":
        return {"prompt_logprobs": 2}
    if kind == "penalties":
        return {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    if kind == "bias":
        return {"logit_bias": {token: rnd.choice((-8.0, -2.0, 1.5, 3.0)) for token in rnd.choices(ids, k=8)}}
    if kind == "bad words":
        return {"bad_words": tuple(rnd.choices(words, k=3))}
    if kind == "stop":
        return {"stop": (rnd.choice(words),), "min_tokens": min(4, params.max_tokens)}
    if kind == "min_tokens":
        return {"min_tokens": params.max_tokens * 3 // 4, "ignore_eos": False}
    if kind == "json schema":
        return {"grammar": {"json_schema": SCHEMA}}
    return {"grammar": {"regex": REGEX}} if kind == "regex" else {}


def _nearly(text: str) -> str:
    """A prediction that holds at both ends, but not in the middle; never empty."""
    middle = len(text) // 2
    return f"{text[:middle]}, or so,{text[middle + 3 :]}"


def _traffic(
    llm: LLM, cases: Seq[Case], methods: Seq[str], together: int, rnd: random.Random
) -> list[Arrival]:
    """The set in random order: the first arrivals make about `together` run at once, the others come among decodes."""
    order = rnd.sample(list(cases), len(cases))
    each = max(1, sum(len(case.alone.token_ids) for case in cases) // len(cases))
    arrivals, at = [], 0.0
    for place, case in enumerate(order):
        if place >= max(1, together // 2) and rnd.random() >= BURST:
            at += rnd.expovariate(1 / each) / (1 - BURST)
        owner = "shared" if rnd.random() < SHARED else f"alone {rnd.random()}"
        method = "auto" if case.kind == "prediction" else rnd.choice(methods)
        asked = replace(case.params, speculation=how(case.params, method))
        until = rnd.randrange(max(1, len(case.alone.token_ids))) if rnd.random() < ABORTED else None
        arrivals.append(Arrival(case, method, llm.request(case.ids, asked, owner), int(at), until))
    return arrivals


# --------------------------------------------------------------------------------------------------- running


class Admission:
    """Lets arrivals in as tokens are emitted. All of it runs on the engine's thread, between steps."""

    def __init__(self, llm: LLM, arrivals: Seq[Arrival]) -> None:
        self.llm, self.waiting = llm, deque(arrivals)
        self.emitted = self.inside = self.together = 0
        self.ended: queue.SimpleQueue[Arrival | BaseException] = queue.SimpleQueue()

    def let_in(self) -> None:
        """Starts the requests that are due, or the next one if none is running."""
        try:
            while self.waiting and (self.waiting[0].at <= self.emitted or not self.inside):
                self._begin(self.waiting.popleft())
        except BaseException as problem:
            self.ended.put(problem)

    def _begin(self, arrival: Arrival) -> None:
        request = arrival.request
        [[arrival.sequence]] = self.llm.driver.add([request], lambda event: self._on_event(arrival, event))
        self.inside += 1
        self.together = max(self.together, self.inside)
        if arrival.until == 0:
            self.llm.driver.abort(request.id)

    def _on_event(self, arrival: Arrival, event: Event | BaseException) -> None:
        if isinstance(event, BaseException):
            self.ended.put(event)
            return
        before = len(arrival.tokens)
        arrival.tokens += event.token_ids
        arrival.logprobs += event.logprobs or ()
        self.emitted += len(event.token_ids)
        if event.finish_reason:
            arrival.ended = event.finish_reason
            self.inside -= 1
            self.ended.put(arrival)
        elif arrival.until is not None and before < arrival.until <= len(arrival.tokens):
            self.llm.driver.abort(event.request_id)
        if self.waiting:
            self.llm.driver.post(self.let_in)


def _run(llm: LLM, arrivals: list[Arrival], found: Traffic) -> Generator[Arrival]:
    """Arrivals as they end. Closing this early has the others aborted."""
    admission = Admission(llm, arrivals)
    llm.driver.post(admission.let_in)
    left = len(arrivals)
    try:
        while left:
            try:
                one = admission.ended.get(timeout=0.5)
            except queue.Empty:
                llm.driver.check()
                continue
            if isinstance(one, BaseException):
                raise stopped(one) from one
            left -= 1
            found.together = max(found.together, admission.together)
            yield one
    finally:
        if left:
            with contextlib.suppress(OutriderError):  # an engine that is gone runs nothing
                llm.driver.run(admission.waiting.clear)
                for arrival in arrivals:
                    llm.driver.abort(arrival.request.id)
                llm.driver.run(lambda: None)  # they are gone


# -------------------------------------------------------------------------------------------------- comparing


def _compare(llm: LLM, found: Traffic, arrival: Arrival) -> None:
    case, got, sequence = arrival.case, arrival.tokens, arrival.sequence
    assert sequence is not None and arrival.ended is not None
    cut_short = arrival.ended == "abort"
    expected = case.alone.token_ids[: len(got)] if cut_short else case.alone.token_ids
    found.requests[case.kind] += 1
    found.methods[arrival.method] += 1
    found.aborted += cut_short
    found.tokens[case.kind, case.params.temperature] += max(len(expected), len(got))
    found.drafted[arrival.method] += sequence.drafted
    found.accepted[arrival.method] += sequence.accepted
    if (at := first_difference(expected, got)) is not None:
        found.differing += differing(expected, got)
        plain, other = ((tokens[at] if at < len(tokens) else -1) for tokens in (expected, got))
        apart = margin(llm, case.ids + expected[:at])
        method = f"{case.kind}, {arrival.method}"
        found.divergences.append(
            Divergence(method, case.params.temperature, case.prompt, at, plain, other, apart)
        )
        return
    pairs: list[tuple[TokenLogprob | None, TokenLogprob | None]] = []
    if case.alone.logprobs is not None:
        pairs += zip(case.alone.logprobs[: len(got)], arrival.logprobs, strict=True)
    if case.alone.prompt_logprobs is not None and not cut_short:
        pairs += zip(case.alone.prompt_logprobs[1:], sequence.prompt_logprobs[1:], strict=True)
    found.logprobs += len(pairs)
    found.differing_logprobs += sum(not _alike(a, b) for a, b in pairs)


def _alike(a: TokenLogprob | None, b: TokenLogprob | None) -> bool:
    if a is None or b is None:
        return a is b
    ours, others = ([e.logprob, *(value for _, value in e.alternatives)] for e in (a, b))
    return (
        a.token == b.token
        and len(ours) == len(others)
        and all(abs(x - y) <= TOLERANCE for x, y in zip(ours, others, strict=True))
    )
