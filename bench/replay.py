"""Replays recorded answers of a real model through the planner, at given step costs of a CPU and without a clock.

    python -m bench.replay --record answers.json --tasks chat,code,rewrite --temperatures 0,0.7 --max-tokens 48
    python -m bench.replay answers.json --batches 1,4,16 [--why "summary T=0.7, batch 1"] [--set MARGIN=0.1]

Recording answers every prompt plainly, once. Replaying gives the same tokens to the real planner and the real lookup,
step by step, prompts included, and adds up the cost of each step by its rows. So a loss can be traced to steps and
their reasons, a change to the planner or to one of its tuned numbers (`--set`) shows in seconds, and a noisy machine
changes nothing. One planner serves all cells in turn, as in a server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider import LLM
from outrider.bench.answering import answer
from outrider.bench.prompts import LENGTHS
from outrider.bench.speculation import groups_of
from outrider.cli.tasks import task_ids, task_rows
from outrider.control import guards
from outrider.control.costs import EagerCosts
from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.draft.drafters import Drafters, Scores
from outrider.draft.lookup import LookupDrafter
from outrider.engine.eager_runner import LONGEST_MEASURED, packed_options
from outrider.engine.placement import PREFILL_SLOWDOWN, PREFILL_WAIT
from outrider.types import (
    NO_DRAFT,
    Draft,
    DraftPlan,
    Options,
    Outcome,
    Request,
    SamplingParams,
    Sequence,
    StepRecord,
    Work,
)

# ms of a pass of SmolLM2-135M by rows, on two quiet Neoverse-N1 cores
PASS = {
    1: 15.99, 2: 16.44, 3: 17.84, 4: 20.78, 5: 28.85, 6: 31.99, 8: 39.44, 9: 46.56, 12: 57.9, 13: 64.56, 16: 75.39,
    17: 82.57, 24: 112.85, 32: 147.22, 48: 218.47, 64: 291.21, 96: 435.95,
}  # fmt: skip
HOST = 1.0  # ms of a step outside its pass
PLANNING = 0.04  # ms more of a step, a sequence, where a planner looks for drafts
ROWS = 128  # of a step
GUARDS = Guards(prefill_slowdown=PREFILL_SLOWDOWN["cpu"], prefill_wait=PREFILL_WAIT["cpu"])
EVERY = "chat,code,json,rewrite,summary,creative,short,long"


def set_number(text: str) -> None:
    """Gives one of the planner's tuned numbers (control/guards.py) another value: NAME=VALUE."""
    name, value = text.split("=")
    assert hasattr(guards, name), f"{name} is no number of control/guards.py"
    for module in [m for path, m in sys.modules.items() if path.startswith("outrider.control.")]:
        if hasattr(module, name):
            setattr(module, name, type(getattr(guards, name))(float(value)))


def record(
    model: str, prompts: str | None, tasks: str, temperatures: list[float], tokens: int, each: int
) -> dict[str, Any]:
    llm = LLM(model)
    found: dict[str, Any] = {}
    try:
        ids = task_ids(llm, task_rows(prompts, None, tasks, each), tokens, 2 * tokens)
        for task, some in ids.items():
            for temperature in temperatures:
                most = max(1, round(tokens * LENGTHS.get(task, 1.0)))
                params = SamplingParams(temperature=temperature, max_tokens=most, seed=0, speculation=False)
                answers = answer(llm, some[:each], params).run.answers
                found[f"{task} T={temperature:g}"] = [
                    {"temperature": temperature, "prompt": p, "answer": a}
                    for p, a in zip(some, answers, strict=False)
                ]
                print(f"{task} T={temperature:g}: {len(answers)} answers", flush=True)
    finally:
        llm.driver.close()
    return found


@dataclass
class Replay:
    """One planner and one lookup, and the steps that they made of the answers."""

    method: Any  # speculation, as requests ask for it
    costs: EagerCosts = field(default_factory=EagerCosts)  # as they are; the planner learns its own
    planner: Planner = field(default_factory=lambda: Planner("lookup", choices=("lookup",), guards=GUARDS))
    drafters: Drafters = field(default_factory=lambda: Drafters({"lookup": LookupDrafter()}, vocab=1 << 30))
    number: int = 0

    def __post_init__(self) -> None:
        self.costs.curve = {rows: ms / 1e3 for rows, ms in PASS.items()}
        for rows, seconds in self.costs.curve.items():
            if seconds <= LONGEST_MEASURED:
                self.planner.costs.eager.learn_pass(rows, seconds)
        self.scores = Scores(self.drafters)

    def batch(self, group: list[dict[str, Any]]) -> Run:
        """All prompts of a group at once, until the last answer has ended."""
        scripts, run = {}, Run()
        for one in group:
            self.number += 1
            asked = SamplingParams(
                temperature=one["temperature"], max_tokens=len(one["answer"]), speculation=self.method
            )
            request = Request(f"r{self.number}", tuple(one["prompt"]), asked, 0, owner=str(self.number))
            sequence = Sequence(request, 0, 0, list(one["prompt"]))
            scripts[sequence] = [*one["prompt"], *one["answer"]]
            self.drafters.start(sequence)
        while scripts:
            run.add(self._step(scripts, run.now))
            for sequence in [s for s in scripts if s.finish_reason]:
                self.drafters.stop(sequence)
                self.scores.stop(sequence)
                self.planner.forget(sequence)
                del scripts[sequence]
        return run

    def _work(self, sequences: Iterable[Sequence], waited: float) -> list[Work]:
        """Every decoding sequence, and prompt rows in the order of arrival, as the scheduler has them."""
        work = [Work(s, 1) for s in sequences if s.pending == 1]
        room = ROWS - len(work)
        if work:
            room = min(room, self.planner.prompt_rows(len(work), waited))
        for sequence in sequences:
            if sequence.pending > 1 and room > 0:
                work.append(Work(sequence, min(sequence.pending, room)))
                room -= work[-1].known
        return work

    def _step(self, scripts: dict[Sequence, list[int]], now: float) -> StepRecord:
        work = self._work(scripts, now)
        plan = self.planner.kept(work, Options()) or self.planner.plan(
            work, Options(**packed_options(self.drafters, work, [one.emits for one in work]))
        )
        known, drafted, outcomes, verified = 0, 0, [], []
        for one, draft_plan in zip(work, plan.draft_plans, strict=True):
            sequence, known = one.sequence, known + one.known
            if not one.emits:
                continue
            draft, left = self._draft(sequence, draft_plan), scripts[sequence][len(sequence.tokens) :]
            right, top1_accepted = _accepted(draft, left)
            verified.append((sequence, left[: right + 1]))
            outcomes.append(Outcome(sequence, draft_plan, len(draft), _deepest(draft), right, top1_accepted))
            drafted += len(draft)
        rows = known + drafted
        took = self.costs.step(rows) + (HOST + PLANNING * len(outcomes) * (self.method is not False)) / 1e3
        held, emitted = sum(o.accepted for o in outcomes), sum(len(path) for _, path in verified)
        made = StepRecord(
            rows, len(work), known, drafted, held, emitted, 0, 0, took, 0, took, outcomes, plan.reasons
        )
        made.plan_cached = plan.cached
        made.prompt_rows = sum(one.prompt_rows for one in work)
        for one in work:
            one.sequence.cached += one.known
        for sequence, path in verified:
            sequence.tokens += path
            sequence.cached += len(path) - 1
            sequence.finish_reason = "length" if len(sequence.tokens) == len(scripts[sequence]) else None
        asked = [o.sequence for o in outcomes if self.method is not False and not o.drafted]
        scored = [self.scores.score("lookup", one) for one in asked if not one.finish_reason]
        made.shadow = [one for one in scored if one is not None]
        self.planner.observe(made)
        return made

    def _draft(self, sequence: Sequence, draft_plan: DraftPlan) -> Draft:
        return (
            self.drafters.propose(draft_plan.drafter, [sequence], [draft_plan])[0]
            if draft_plan.nodes
            else NO_DRAFT
        )


@dataclass
class Run:
    """A batch of answers by a clock that is only counted."""

    steps: list[StepRecord] = field(default_factory=list)
    now: float = 0.0
    # First and last token, tokens after the first.
    received: dict[Sequence, list[float]] = field(default_factory=dict)

    def add(self, step: StepRecord) -> None:
        self.steps.append(step)
        self.now += step.total_s
        for o in step.outcomes:
            mine = self.received.setdefault(o.sequence, [self.now, self.now, -1 - o.accepted])
            mine[1], mine[2] = self.now, mine[2] + 1 + o.accepted

    @property
    def rate(self) -> float:
        """Tokens a second of an answer, as `outrider bench` counts them: each from its first token to its last."""
        spent = sum(last - first for first, last, _ in self.received.values())
        return sum(tokens for *_, tokens in self.received.values()) / spent

    @property
    def waited(self) -> float:
        """For first tokens, all together."""
        return sum(first for first, *_ in self.received.values())

    @property
    def slowest(self) -> float:
        """Seconds a token."""
        return max((last - first) / tokens for first, last, tokens in self.received.values() if tokens)


def _accepted(draft: Draft, left: list[int]) -> tuple[int, int]:
    """How many of a draft's tokens come true, and how many of those were first choices."""
    node, top1_accepted, on, right = -1, 0, True, 0
    while right < len(left) - 1:
        children = [i for i, parent in enumerate(draft.parents) if parent == node]
        hit = next((i for i in children if draft.tokens[i] == left[right]), None)
        if hit is None:
            break
        on = on and hit == children[0]
        node, right, top1_accepted = hit, right + 1, top1_accepted + on
    return right, top1_accepted


def _deepest(draft: Draft) -> int:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", help="a file of them, instead of those that are built in")
    parser.add_argument("--tasks", default=EVERY)
    parser.add_argument("--temperatures", default="0,0.7,1.2")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--why", default="")
    parser.add_argument("--set", action="append", default=[], type=set_number, help="NAME=VALUE")
    given = parser.parse_args()
    if given.record:
        temperatures = [float(one) for one in given.temperatures.split(",")]
        found = record(given.model, given.prompts, given.tasks, temperatures, given.max_tokens, given.each)
        given.record.write_text(json.dumps(found))
        return
    show(
        json.loads(given.file.read_text()),
        [int(b) for b in given.batches.split(",")],
        given.rounds,
        given.why,
    )


def show(answers: dict[str, Any], batches: list[int], rounds: int, why: str) -> None:
    cells = []
    for batch in batches:
        auto, fixed, plain = (
            Replay("auto"),
            Replay({"drafter": "lookup", "depth": 4, "nodes": 4}),
            Replay(False),
        )
        for label, some in answers.items():
            ratios, others, tails, waits, whole, kinds = [], [], [], [], [], Counter[str]()
            for number in range(rounds):
                for place, group in enumerate(groups_of(some, batch, None)):
                    own, other, base = (method.batch(group) for method in (auto, fixed, plain))
                    ratios.append(own.rate / base.rate)
                    others.append(other.rate / base.rate)
                    tails.append(own.slowest / base.slowest)
                    waits.append(own.waited / base.waited)
                    whole.append(base.now / own.now)
                    kinds.update(reason.kind for step in own.steps for reason in step.reasons)
                    if why == f"{label}, batch {batch}":
                        explain(number, place, own, base)
            cells.append((statistics.median(ratios), statistics.median(whole)))
            said = ", ".join(f"{kind} {times}" for kind, times in kinds.most_common(4))
            print(
                f"{label:14} batch {batch:2} {statistics.median(ratios):5.3f}x first {ratios[0]:5.3f} lowest "
                f"{min(ratios):5.3f}, 4 deep {statistics.median(others):5.3f}x; slowest {max(tails):4.2f}, "
                f"first token {statistics.median(waits):4.2f}, all answers {cells[-1][1]:5.3f}x  {said}",
                flush=True,
            )
    rate, all_answers = map(statistics.geometric_mean, zip(*cells, strict=True))
    print(f"geometric mean {rate:.4f}x, lowest {min(cells)[0]:.3f}x; all answers {all_answers:.4f}x")


def explain(number: int, place: int, own: Run, base: Run) -> None:
    print(f"  round {number}, group {place}: {own.rate / base.rate:.3f}x")
    for at, step in enumerate(own.steps):
        if step.drafted:
            said = "; ".join(str(reason) for reason in step.reasons if reason.depth)
            counts = f"{step.sequences} sequences, {step.known} rows, {step.drafted} drafted, {step.accepted} accepted"
            print(f"    step {at}: {counts}, {1e3 * step.total_s:.1f} ms: {said}")


if __name__ == "__main__":
    main()
