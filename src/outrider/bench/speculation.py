"""Measures what speculation buys: the same batches of prompts are answered by several methods in turn, by workload.

A method is plain decoding, a drafter with a fixed number of draft tokens, or the planner's choice (`auto`). The methods
take turns within one run, so that a noisy machine is equally noisy for all, and their ratios are reported. That is
repeated until the ratios are known well enough or the time is up. Rates count from each answer's own first token to
its last. Every answer is compared, token by token, with the plain one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.bench.answering import answer, out_of_the_collectors_sight
from outrider.bench.fidelity import measure_fidelity
from outrider.bench.speed import pass_seconds
from outrider.bench.tally import Tally, noise
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest, suggest
from outrider.types import SamplingParams, Speculation

DEPTH = 4  # of chains of a drafter that is named, unless the request says otherwise
TASK_TEMPERATURES = {"rewrite": 0.0, "json": 0.0}  # of tasks that call for their own; the others get the next
TEMPERATURE = 0.7

Tell = Callable[[str, float], None]  # what runs next, and the share that is done


# -------------------------------------------------------------------------------------------------- methods


def methods_of(llm: LLM, params: SamplingParams, names: Seq[str] | None = None) -> dict[str, Speculation]:
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
            raise InvalidRequest(f"unknown method {name!r}{suggest(name, known)}", "methods")
    chosen = names or ["plain", *drafters, "auto"]
    return {name: known[name] for name in ("plain", *(n for n in chosen if n != "plain"))}


def asked_of(drafter: str, asked: Speculation) -> Speculation:
    """This drafter, with as many draft tokens as asked for, or a chain of a few: the planner has no say."""
    if asked.depth or asked.nodes or asked.tree:
        return replace(asked, drafter=drafter)
    return replace(asked, drafter=drafter, depth=DEPTH, nodes=DEPTH)


def temperatures_of(task: str, given: Mapping[str, Seq[float]]) -> Seq[float]:
    """As given for the task or for all (""), else the task's own."""
    return given.get(task) or given.get("") or [TASK_TEMPERATURES.get(task, TEMPERATURE)]


# ----------------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True, slots=True)
class Cell:
    """A task at one temperature and batch: what is measured by itself."""

    label: str
    task: str
    batch: int
    groups: list[list[list[int]]]  # of prompts, as token ids
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is measured, and for how long."""

    tasks: Mapping[str, list[list[int]]]
    params: SamplingParams
    methods: Mapping[str, Speculation]
    temperatures: Mapping[str, Seq[float]] = field(default_factory=dict)  # by task; "" is all of them
    batches: Seq[int] = (1,)
    most: int | None = None  # groups of prompts of a cell
    lengths: Mapping[str, float] = field(
        default_factory=dict
    )  # of a task's answers, as multiples of max_tokens
    seconds: float = 0.0  # for repetitions: everything is measured once, unless the time is
    bounded: bool = False  # and cells that were not begun by then are left out
    within: float = 0.0  # of a speed-up, how well it is to be known
    fidelity: bool = False  # whether fidelity to plain decoding is measured, too

    def cells(self) -> list[Cell]:
        found = []
        for task, prompts in self.tasks.items():
            tokens = max(1, round(self.params.max_tokens * self.lengths.get(task, 1.0)))
            curve = temperatures_of(task, self.temperatures)
            for temperature in curve:
                label = task if len(curve) == 1 else f"{task} T={temperature:g}"
                one = replace(self.params, temperature=temperature, max_tokens=tokens)
                found += [Cell(label, task, b, groups_of(prompts, b, self.most), one) for b in self.batches]
        return found


def group_count(prompts: int, batch: int, most: int | None) -> int:
    whole = max(1, prompts // batch)
    return whole if most is None else min(whole, most)


def groups_of(prompts: Seq[list[int]], batch: int, most: int | None) -> list[list[list[int]]]:
    """At most `most` groups of `batch` prompts; too few prompts for one group are repeated with other seeds."""
    count = group_count(len(prompts), batch, most)
    return [[prompts[(g * batch + i) % len(prompts)] for i in range(batch)] for g in range(count)]


# -------------------------------------------------------------------------------------------------- compare


def compare(
    llm: LLM,
    asked: Comparison,
    found: dict[str, Any] | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
    progress: Tell = lambda *_: None,
) -> dict[str, Any]:
    """By label and batch: the figures of each method. Cells that are in `found` are not measured again. `tell` gets all
    results whenever a cell is done, `progress` what comes next and the share that is done.
    """
    if max(asked.batches) > llm.settings.max_sequences:
        most = max(asked.batches)
        raise InvalidRequest(f"batches of {most} need --max-sequences {most}", "batches")
    report = {} if found is None else found
    left = [cell for cell in asked.cells() if not _is_done(report, cell)]
    end = time.monotonic() + asked.seconds
    for number, cell in enumerate(left):
        now = time.monotonic()
        if asked.bounded and number and now >= end:
            break
        until = now + max(0.0, end - now) / (len(left) - number)

        def said(what: str, done: float, cell: Cell = cell, before: int = number) -> None:
            progress(f"{cell.label}, batch {cell.batch}: {what}", (before + done) / len(left))

        measured = _Measuring(llm, cell, asked.methods, asked.within, asked.fidelity).until(until, said)
        p = cell.params
        about = {"task": cell.task, "temperature": p.temperature, "max_tokens": p.max_tokens, "batches": {}}
        report.setdefault(cell.label, about)["batches"][str(cell.batch)] = measured
        tell(report)
    return report


def _is_done(report: Mapping[str, Any], cell: Cell) -> bool:
    return str(cell.batch) in report.get(cell.label, {"batches": ()})["batches"]


def left_out(report: Mapping[str, Any], asked: Comparison) -> list[str]:
    """Cells there was no time for."""
    return [f"{cell.label}, batch {cell.batch}" for cell in asked.cells() if not _is_done(report, cell)]


@dataclass(slots=True)
class _Measuring:
    """One cell."""

    llm: LLM
    cell: Cell
    methods: Mapping[str, Speculation]
    within: float
    fidelity: bool
    tallies: dict[str, Tally] = field(default_factory=dict)
    rounds: int = 0
    begun: float = 0.0

    def until(self, end: float, progress: Tell) -> dict[str, Any]:
        progress("getting ready", 0.0)
        self.begun = time.monotonic()
        self._get_ready()
        self.tallies = {name: Tally() for name in self.methods}
        with out_of_the_collectors_sight():
            while True:
                began = time.monotonic()
                self._round(end, progress)
                self.rounds += 1
                now = time.monotonic()
                if self._known() or now + (now - began) > end:
                    return self._found()

    def _said(self) -> Iterator[tuple[str, SamplingParams]]:
        for name, method in self.methods.items():
            yield name, replace(self.cell.params, speculation=method)

    def _get_ready(self) -> None:
        """The first answers pay for set-up: on a GPU for graphs, of which every number and length of texts has its
        own.
        """
        llm, groups, gpu = self.llm, self.cell.groups, self.llm.model.device.type == "cuda"
        llm.prepare(max(map(len, groups)))
        for group in groups if gpu else groups[:1]:
            for _, one in self._said():
                short = replace(one, max_tokens=min(16, one.max_tokens), min_tokens=0)
                answer(llm, group, one if gpu else short)
        if "synthetic" in llm.engine.drafters.names:  # it copies answers that were given before
            for group in groups:
                answer(llm, group, dict(self._said())["plain"])

    def _round(self, end: float, progress: Tell) -> None:
        """Every group once by every method in turn. The first method rotates."""
        groups, names = self.cell.groups, list(self.methods)
        said = dict(self._said())
        for number, group in enumerate(groups):
            by = (number + self.rounds) % len(names)
            runs = {}
            for turn, name in enumerate(names[by:] + names[:by]):
                done = (number + turn / len(names)) / len(groups)
                if end > self.begun:  # there is time for more rounds than one
                    done = min(1.0, (time.monotonic() - self.begun) / (end - self.begun))
                what = f"{name}, group {number + 1} of {len(groups)}"
                progress(what + (f", round {self.rounds + 1}" if self.rounds else ""), done)
                runs[name] = answer(self.llm, group, said[name])
            for name, run in runs.items():
                self.tallies[name].add(number, run, runs["plain"].run)

    def _known(self) -> bool:
        plain = self.tallies["plain"]
        found = [tally.within(plain) for name, tally in self.tallies.items() if name != "plain"]
        return all(one is not None and one <= self.within for one in found)

    def _found(self) -> dict[str, Any]:
        groups, plain = self.cell.groups, self.tallies["plain"]
        known = measure_fidelity(self.llm, groups, dict(self._said())) if self.fidelity else {}
        return {
            "groups": len(groups),
            "rounds": self.rounds,
            "prompts": len({tuple(ids) for group in groups for ids in group}),
            "noise": noise(self.tallies.values(), self.cell.batch),
            "methods": {
                name: {
                    **tally.figures(plain),
                    **self._decode_step(tally),
                    **({"fidelity": known[name]} if known else {}),
                    "exact": self.methods[name].mode == "coupled",
                }
                for name, tally in self.tallies.items()
            },
        }

    def _decode_step(self, tally: Tally) -> dict[str, Any]:
        """The commonest decode step: its rows, its time, and what of that is not the target's pass over those rows.

        What is left is host, sampling and commit, and the drafter's own passes where it has any.
        """
        rows, llm = tally.usual_rows, self.llm
        if rows is None:
            return {}
        longest = max(len(ids) for group in self.cell.groups for ids in group)
        context = min(longest + self.cell.params.max_tokens // 2, llm.engine.context - DEPTH)
        seconds = statistics.median(tally.by_rows[rows])
        [alone] = pass_seconds(llm, [(self.cell.batch, rows)], context)
        return {
            "round_rows": rows,
            "round_ms": 1e3 * seconds,
            "pass_ms": 1e3 * alone,
            "outside_pass": 1 - alone / seconds,
        }
