"""Measures what speculation buys: the same batches of prompts answered in several ways in turn, by kind of task.

A way is plain decoding, a drafter asked for a fixed number of draft tokens, or what the planner makes of it (`auto`).
All ways of a batch follow each other within one run, so that a noisy machine is equally noisy for all; what
travels are their ratios. Rates count from the moment everyone has a first token. Every answer is compared,
token by token, with the plain one.
"""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from outrider.bench.compare import cut
from outrider.bench.peers import Run
from outrider.bench.speed import pass_seconds
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest, OutriderError, suggest
from outrider.model.kernels.gpu.recording import Recorded
from outrider.types import Event, Request, SamplingParams, Speculation, StepRecord

DEPTH = 4  # draft tokens in a row, for ways that fix it, unless the request says otherwise
TASK_TEMPERATURES = {"rewrite": 0.0}  # of tasks that call for their own; the others get the next
TEMPERATURE = 0.7

Way = Speculation


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


@dataclass(slots=True)
class Meter:
    """Listens to a batch of requests on the engine's thread, step by step."""

    requests: int
    timed: list[TimedStep] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    tokens: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None

    def heard(self, event: Event | BaseException) -> None:
        if isinstance(event, BaseException):
            self.failure = event
            self.done.set()
            return
        self.tokens += len(event.token_ids)
        self.begun.add(event.request_id)
        self.requests -= event.finish_reason is not None

    def stepped(self, record: StepRecord) -> None:
        now, r = time.perf_counter(), record
        seconds = r.total_s / r.passes
        self.records.append(r)
        self.timed.append(TimedStep(now, self.tokens, len(self.begun), r.sequences, r.known, r.rows, seconds))
        self.tokens = 0
        if not self.requests:
            self.done.set()

    def run(self, began: float, answers: list[list[int]]) -> Run:
        """As a run: its decoding begins with the first step after which everyone has a token."""
        first = next(i for i, done in enumerate(self.timed) if done.begun == len(answers))
        there = sum(done.tokens for done in self.timed[: first + 1])
        return Run(answers, self.timed[first].ended - began, self.timed[-1].ended - began, there)


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

    @property
    def tokens(self) -> int:
        return sum(map(len, self.run.answers))


def answer(llm: LLM, prompts: Seq[list[int]], params: SamplingParams) -> Answers:
    """Answer prompts together, each with a seed of its own, and an owner of its own: what one wrote must not be
    there for another to look up.
    """
    requests = [_request(llm, i, ids, params) for i, ids in enumerate(prompts)]
    meter = Meter(len(requests))
    before, llm.driver.observer = llm.driver.observer, meter.stepped
    made = Recorded.seconds
    try:
        began = time.perf_counter()
        sequences = [s for own in llm.driver.submit(requests, meter.heard) for s in own]
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
    )


def _request(llm: LLM, number: int, ids: list[int], params: SamplingParams) -> Request:
    one = replace(params, n=1, seed=(params.seed or 0) + number)
    return llm.request(ids, one, owner=secrets.token_hex(8))


# ----------------------------------------------------------------------------------------------------- ways


def ways_of(llm: LLM, params: SamplingParams, names: Seq[str] | None = None) -> dict[str, Way]:
    """`plain`; a drafter by name, with as many draft tokens as asked for; a drafter and `:auto`, as the planner finds
    best; `auto`, the same with the drafter the model was opened with. By default plain, every drafter, and auto.
    """
    drafters = [name for name in llm.engine.drafters.names if name != "none"]
    asked = params.speculation
    opened = replace(asked, drafter=None, depth=None, nodes=None, tree=None)
    known = {"plain": Speculation(drafter="none"), "auto": opened}
    for name in drafters:
        known[name] = asked_of(name, asked)
        known[f"{name}:auto"] = replace(opened, drafter=name)
    for name in names or ():
        if name not in known:
            raise InvalidRequest(f"unknown way {name!r}{suggest(name, known)}", "ways")
    chosen = names or ["plain", *drafters, "auto"]
    return {name: known[name] for name in ("plain", *(n for n in chosen if n != "plain"))}


def asked_of(drafter: str, asked: Speculation) -> Way:
    """This drafter, with as many draft tokens as asked for, or a chain of a few: the planner has no say."""
    if asked.depth or asked.nodes or asked.tree:
        return replace(asked, drafter=drafter)
    return replace(asked, drafter=drafter, depth=DEPTH, nodes=DEPTH)


def temperature_of(task: str, given: Mapping[str, float]) -> float:
    """As given for the task or for all (""), else the task's own."""
    return given.get(task, given.get("", TASK_TEMPERATURES.get(task, TEMPERATURE)))


# -------------------------------------------------------------------------------------------------- compare


def compare(
    llm: LLM,
    tasks: Mapping[str, list[list[int]]],
    params: SamplingParams,
    ways: Mapping[str, Way],
    temperatures: Mapping[str, float],
    batches: Seq[int] = (1,),
    most: int | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> dict[str, Any]:
    """By task and batch: what each way did. `most` bounds the groups of prompts that are run for each; `tell` hears
    all results so far whenever a task's batch is done, `progress` what comes next and the share that is done.
    """
    if max(batches) > llm.settings.max_sequences:
        raise InvalidRequest(f"batches of {max(batches)} need --max-sequences {max(batches)}", "batches")
    report: dict[str, Any] = {}
    for number, (task, prompts) in enumerate(tasks.items()):
        one = replace(params, temperature=temperature_of(task, temperatures))
        found: dict[str, Any] = {}
        report[task] = {"temperature": one.temperature, "max_tokens": one.max_tokens, "batches": found}
        for place, batch in enumerate(batches):
            before, share = (number + place / len(batches)) / len(tasks), 1 / len(tasks) / len(batches)

            def said(
                what: str, done: float, task: str = task, at: tuple[float, float] = (before, share)
            ) -> None:
                progress(f"{task}: {what}", at[0] + done * at[1])

            found[str(batch)] = _compare_batch(llm, groups_of(prompts, batch, most), one, ways, said)
            tell(report)
    return report


def group_count(prompts: int, batch: int, most: int | None) -> int:
    whole = max(1, prompts // batch)
    return whole if most is None else min(whole, most)


def groups_of(prompts: Seq[list[int]], batch: int, most: int | None) -> list[list[list[int]]]:
    """Prompts in groups of `batch`, at most so many; if they are too few for one, they come again with other seeds."""
    count = group_count(len(prompts), batch, most)
    return [[prompts[(g * batch + i) % len(prompts)] for i in range(batch)] for g in range(count)]


def _compare_batch(
    llm: LLM,
    groups: list[list[list[int]]],
    params: SamplingParams,
    ways: Mapping[str, Way],
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    said = {name: replace(params, speculation=way) for name, way in ways.items()}
    # The first answers pay for set-up: on a GPU for graphs, of which every number and length of texts has its own.
    progress("getting ready", 0.0)
    gpu = llm.model.device.type == "cuda"
    llm.prepare(max(map(len, groups)))
    for group in groups if gpu else groups[:1]:
        for one in said.values():
            answer(llm, group, one if gpu else replace(one, max_tokens=min(16, one.max_tokens), min_tokens=0))
    if "synthetic" in llm.engine.drafters.names:  # it copies answers that were given before
        for group in groups:
            answer(llm, group, said["plain"])
    runs: dict[str, list[Answers]] = {name: [] for name in ways}
    for number, group in enumerate(groups):
        for turn, name in enumerate(_turned(list(ways), number)):
            progress(
                f"{name}, group {number + 1} of {len(groups)}", (number + turn / len(ways)) / len(groups)
            )
            runs[name].append(answer(llm, group, said[name]))
    longest = max(len(ids) for group in groups for ids in group)
    context = min(longest + params.max_tokens // 2, llm.engine.context - DEPTH)
    return {
        "groups": len(groups),
        "prompts": len({tuple(ids) for group in groups for ids in group}),
        "ways": {name: _summary(llm, runs[name], runs["plain"], context) for name in ways},
    }


def _turned(names: list[str], by: int) -> list[str]:
    """So that nobody is always the first."""
    by %= len(names)
    return names[by:] + names[:by]


def _summary(llm: LLM, runs: list[Answers], plain: list[Answers], context: int) -> dict[str, Any]:
    both = [(done.run, base.run) for done, base in zip(runs, plain, strict=True)]
    ratios = [run.decode_rate / base.decode_rate for run, base in both]
    tokens, drafted = sum(done.tokens for done in runs), sum(done.drafted for done in runs)
    return {
        "tok_s": statistics.median(run.decode_rate for run, _ in both),
        "ratio": statistics.median(ratios),
        "worst": min(ratios),
        "tokens_per_step": tokens / max(1, sum(done.steps for done in runs)),
        "drafted": drafted,
        "held": sum(done.accepted for done in runs) / drafted if drafted else None,
        "compared": tokens,
        "differing": sum(run.differing(base) for run, base in both),
        "longest_step_ms": 1e3 * max(done.longest for done in runs),
        "making_graphs_s": sum(done.making for done in runs),
        **_decode_step(llm, [one for done in runs for one in done.decoding], context),
    }


def _decode_step(llm: LLM, decoding: list[TimedStep], context: int) -> dict[str, Any]:
    """The commonest decode step: its rows, its time, and what of that is not the target's pass over those rows.

    What is left is host, sampling and commit, and the drafter's own passes where it has any.
    """
    if not decoding:
        return {}
    ((rows, _),) = Counter(done.rows for done in decoding).most_common(1)
    seconds = statistics.median(done.seconds for done in decoding if done.rows == rows)
    sequences = decoding[0].sequences
    [alone] = pass_seconds(llm, [(sequences, rows)], context)
    return {
        "round_rows": rows,
        "round_ms": 1e3 * seconds,
        "pass_ms": 1e3 * alone,
        "outside_pass": 1 - alone / seconds,
    }


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """All results for people, within 80 columns."""
    wide = min(12, max(map(len, ("task", *report))))
    names = f"{'task':{wide}} {'batch':>5} {'answered by':16} {'tok/s':>8} {'speed-up':>8}"
    yield f"{names} {'lowest':>6} {'accepted':>8} {'tok/step':>8}"
    differing = compared = 0
    for task, size, name, way in _rows(report):
        rate = "" if way["held"] is None else f"{100 * way['held']:.0f} %"
        speed = f"{way['ratio']:7.2f}x {way['worst']:5.2f}x" if name != "plain" else f"{'':8} {'':6}"
        whose = f"{cut(task, wide):{wide}} {size:>5} {cut(name, 16):16}"
        yield f"{whose} {way['tok_s']:8.1f} {speed} {rate:>8} {way['tokens_per_step']:8.2f}"
        differing, compared = differing + way["differing"], compared + way["compared"]
    verdict = "identical" if not differing else f"{differing} DIFFER"
    yield "speed-up: against plain decoding in the same run, median and lowest of groups"
    yield "accepted: the share of drafted tokens; tok/step: tokens a pass of the target"
    yield f"{compared} tokens compared with plain decoding's: {verdict}"


def spread(report: Mapping[str, Any]) -> float:
    """How far the lowest speed-up lies below the median, at most."""
    return max(
        (1 - way["worst"] / way["ratio"] for *_, name, way in _rows(report) if name != "plain"), default=0.0
    )


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    for task, found in report.items():
        for size, batch in found["batches"].items():
            for name, way in batch["ways"].items():
                yield task, size, name, way
