"""Measures acceptance by depth on the user's prompts and step costs on this machine, from which drafters are advised.

Acceptance comes from the real engine, one prompt at a time, at a few depths; a depth in between is read off the next
deeper run. For larger batches the pass is timed alone and the host's time by rows is added. Costs that there was no
time to measure are extrapolated and marked.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from outrider.bench.answering import Answers, answer
from outrider.bench.draft_facts import CandidateFacts, facts_of_draft
from outrider.bench.speed import pass_seconds
from outrider.bench.tally import acceptance_by_depth
from outrider.control.costs import EagerCosts
from outrider.control.expected import (
    CapturedChains,
    Drafts,
    EagerChains,
    Outcome,
    StepCosts,
    interval,
    predict,
    rate_for,
)
from outrider.engine.llm import LLM
from outrider.types import SamplingParams, Speculation, StepRecord

DEPTHS = (2, 4, 8)
ENOUGH = 3  # steps of a kind for a median
REPEATS = 3  # passes of a kind over many rows
LEVELS = (0, 1, 2, 4, 8)  # draft tokens a sequence whose rows are timed
FEWEST, WANTED = (
    4,
    8,
)  # prompts: with fewer than the first nothing is advised; the time is planned for the second
SHORTEST, USUAL = 16, 4  # tokens of an answer, and the one depth, where there is little time
LATE = 2.0  # of the time: after that, fewer prompts than FEWEST must do
SURE, BEHIND = 2, 0.8  # prompts after which a depth below this share of the best one is dropped
CHEAP = 0.02  # of a plain step: drafting below this share needs no pass, and its time grows with the batch
SHORT, FEW = 16, 6  # prompt and answer where only drafting is timed
HOT = 1.0  # temperature
TRIAL_SHARE, ROWS_SHARE, DRAFT_SHARE, OTHER_SHARE = 0.65, 0.15, 0.1, 0.1  # of the time
UNMEASURED = 0.1  # standard error of times that were extrapolated

Tell = Callable[[str, float], None]
Asked = Seq[tuple[str, list[int], SamplingParams]]  # task, prompt, how it is asked


@dataclass(slots=True)
class Trial:
    """A drafter asked for drafts of one depth."""

    # One a step, by task and prompt.
    outcomes: dict[str, list[list[Outcome]]] = field(default_factory=lambda: defaultdict(list))
    draft_s: list[float] = field(default_factory=list)
    # Speed-ups over plain, by task and prompt.
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # Outcomes of all steps, also where an answer's end cut them off.
    verdicts: list[Outcome] = field(default_factory=list)

    def prompts(self, task: str | None = None) -> list[list[Outcome]]:
        some = self.outcomes.values() if task is None else [self.outcomes[task]]
        return [steps for own in some for steps in own if steps]


@dataclass(slots=True)
class Trials:
    """Everything that was measured of one drafter, one sequence at a time."""

    by_depth: dict[int, Trial]
    rows: dict[int, list[float]]  # seconds of steps without drafting, by rows
    host: dict[int, list[float]]  # of them, what is not the target's pass
    plain: list[float]  # median seconds of plain steps, prompt by prompt
    context: list[int]  # tokens, at the end of answers

    def at(self, depth: int) -> Trial:
        """The trial of this depth, or of the next deeper."""
        return self.by_depth[min(d for d in self.by_depth if d >= depth)]

    @property
    def noise(self) -> float:
        """Standard error of a plain step's time."""
        if len(self.plain) < 2:
            return 0.05
        return max(0.01, statistics.stdev(self.plain) / statistics.mean(self.plain) / len(self.plain) ** 0.5)


def in_turn(tasks: Mapping[str, Seq[list[int]]], how: Callable[[str], SamplingParams]) -> Asked:
    """One prompt of each task, then the next of each: whenever time is up, all of them were measured."""
    rounds = zip_longest(*([(task, ids, how(task)) for ids in some] for task, some in tasks.items()))
    return [one for turn in rounds for one in turn if one is not None]


def _drafting(params: SamplingParams, drafter: str, depth: int) -> SamplingParams:
    return replace(params, speculation=replace(params.speculation, drafter=drafter, depth=depth, nodes=depth))


def try_drafter(llm: LLM, drafter: str, asked: Asked, depths: Seq[int], until: float, tell: Tell) -> Trials:
    """Answers every prompt plainly and at every depth in turn until the time is up, or a little longer for the fewest
    prompts that an advice needs. A depth that falls behind is dropped, and plain decoding is dropped once its steps
    are known: prompts differ more than steps do, so the time goes to more prompts.
    """
    began, total = time.monotonic(), len(asked)
    depths, longest = _affordable(llm, drafter, asked, depths, until)
    found = Trials({d: Trial() for d in depths}, defaultdict(list), defaultdict(list), [], [])
    for number, (task, ids, whole) in enumerate(asked):
        params = replace(whole, max_tokens=min(longest, whole.max_tokens), min_tokens=0)
        share = max(number / total, (time.monotonic() - began) / max(until - began, 1e-3))
        tell(f"{drafter}: prompt {number + 1} of {total}, {task}", min(share, 1.0))
        if number < SURE or drafter == "synthetic":  # which copies answers that were given before
            plain = answer(llm, [ids], replace(params, speculation=Speculation(drafter="none")))
            _note_steps(found, plain)
            found.plain.append(statistics.median(_decoding_times(plain.records) or [plain.run.total_s]))
        for depth in depths:
            done = answer(llm, [ids], _drafting(params, drafter, depth))
            _note_trial(found, depth, task, done)
        found.context.append(len(ids) + done.tokens)
        if number + 1 >= SURE:
            depths = _still_good(found, depths)
        late = until if number + 1 >= FEWEST else began + LATE * (until - began)
        if time.monotonic() > late:
            break
    found.by_depth = {depth: found.by_depth[depth] for depth in depths}
    return found


def _affordable(llm: LLM, drafter: str, asked: Asked, depths: Seq[int], until: float) -> tuple[Seq[int], int]:
    """Depths to try and the longest answer, so that there is time for as many prompts as are wanted. The first answers,
    which pay for set-up, say how fast it goes.
    """
    _, ids, params = asked[0]
    short = replace(params, max_tokens=min(FEW, params.max_tokens), min_tokens=0)
    for depth in depths:
        answer(llm, [ids], _drafting(short, drafter, depth))
    begin = time.monotonic()
    done = answer(llm, [ids], replace(short, speculation=Speculation(drafter="none")))
    seconds = (time.monotonic() - begin) / max(1, done.tokens)  # a token
    prompts = min(WANTED, len(asked))

    def length(tried: int) -> float:
        """Tokens of an answer that there is time for when `tried` depths are tried."""
        return (until - time.monotonic()) / seconds / (prompts * tried + min(SURE, prompts))

    if length(len(depths)) < 2 * SHORTEST and USUAL in depths:
        depths = [USUAL]
    return depths, max(SHORTEST, int(length(len(depths))))


def _still_good(found: Trials, depths: Seq[int]) -> list[int]:
    means = {
        d: statistics.mean(r for some in found.by_depth[d].ratios.values() for r in some) for d in depths
    }
    return [d for d in depths if means[d] >= BEHIND * max(means.values())]


def _decoding(records: Seq[StepRecord]) -> list[StepRecord]:
    return [r for r in records if r.decodes_only and r.drafter_prefill is None]


def _decoding_times(records: Seq[StepRecord]) -> list[float]:
    return [r.total_s / r.passes for r in _decoding(records)]


def _note_steps(found: Trials, done: Answers) -> None:
    for record in _decoding(done.records):
        seconds = (record.total_s - record.draft_s) / record.passes
        found.rows[record.rows].append(seconds)
        found.host[record.rows].append(seconds - record.target_s / record.passes)


def _note_trial(found: Trials, depth: int, task: str, done: Answers) -> None:
    trial, outcomes = found.by_depth[depth], []
    for record in _decoding(done.records):
        trial.draft_s.append(record.draft_s)
        trial.verdicts += step_outcomes(record, last=False)
        outcomes += step_outcomes(record, last=record is done.records[-1])
    trial.outcomes[task].append(outcomes)
    trial.ratios[task].append(done.run.decode_rate * statistics.median(found.plain))
    _note_steps(found, done)


def step_outcomes(record: StepRecord, last: bool) -> list[Outcome]:
    """Depth and accepted tokens of every draft that was asked for; of an answer's last step, what was emitted."""
    return [
        (o.deepest, min(o.accepted, record.emitted - 1) if last else o.accepted)
        for o in record.outcomes
        if o.draft_plan.nodes > 0
    ]


# ---------------------------------------------------------------------------------------------------- costs


@dataclass(slots=True)
class RowCosts:
    """The target's steps by batch and rows, and the batches for which some were extrapolated."""

    by_batch: dict[int, EagerCosts] = field(default_factory=dict)
    unmeasured: set[int] = field(default_factory=set)


def row_costs(
    llm: LLM, trials: Trials, batches: Seq[int], deepest: int, until: float, tell: Tell
) -> RowCosts:
    """From the steps taken one sequence at a time, and from passes over the rows of larger batches."""
    costs, host, context = RowCosts(), _host_by_rows(trials), int(statistics.median(trials.context))
    seen = {rows: statistics.median(times) for rows, times in trials.rows.items() if len(times) >= ENOUGH}
    every = {1: statistics.median(trials.rows[1] or trials.plain)} | seen  # of any batch
    levels = [d for d in LEVELS if d <= deepest]
    for number, batch in enumerate(sorted({1, *batches})):
        known = costs.by_batch.setdefault(batch, EagerCosts()).by_rows
        known.update(every if batch == 1 else {})
        for rows in (batch * (1 + level) for level in levels):
            if rows in known:
                continue
            tell(f"a pass over {rows} rows", number / (1 + len(batches)))
            if time.monotonic() < until:
                (alone,) = pass_seconds(llm, [(batch, rows)], context, REPEATS)
                known[rows] = every[rows] = alone + host(rows)
            else:
                known[rows] = every[rows] if rows in every else _continued(every, rows)
                costs.unmeasured.add(batch)
    return costs


def _host_by_rows(trials: Trials) -> Callable[[int], float]:
    """Seconds of a step outside the pass: a linear fit through the fewest and the most rows that were measured."""
    seen = {rows: statistics.median(times) for rows, times in trials.host.items() if len(times) >= ENOUGH}
    if not seen:
        return lambda rows: 0.0
    few, many = min(seen), max(seen)
    slope = max(0.0, (seen[many] - seen[few]) / (many - few)) if many > few else 0.0
    return lambda rows: seen[few] + slope * (rows - few)


def _continued(known: Mapping[int, float], rows: int) -> float:
    a, b = sorted(known)[-2:] if len(known) > 1 else (0, max(known))
    slope = (known[b] - known.get(a, 0.0)) / (b - a)
    return known[b] + max(slope, 0.0) * (rows - b)


def draft_seconds(
    llm: LLM, drafter: str, trials: Trials, asked: Asked, batches: Seq[int], until: float
) -> Callable[[int, int], float]:
    """Seconds of drafting by batch and depth."""
    alone = {
        depth: statistics.mean(trial.draft_s) for depth, trial in trials.by_depth.items() if trial.draft_s
    }
    factors = {1: 1.0}
    if alone and max(s / d for d, s in alone.items()) > CHEAP * statistics.median(trials.plain):
        depth = min(alone)
        for batch in batches:
            if batch > 1 and time.monotonic() < until:
                _, ids, params = asked[0]
                one = replace(params, max_tokens=FEW * (depth + 1), min_tokens=0, ignore_eos=True)
                done = _decoding(answer(llm, [ids[-SHORT:]] * batch, _drafting(one, drafter, depth)).records)
                whole = [r.draft_s for r in done if r.sequences == batch and r.drafted == batch * depth]
                if whole:
                    factors[batch] = max(1.0, statistics.median(whole) / alone[depth])

    def seconds(batch: int, depth: int) -> float:
        if not alone:
            return 0.0
        near = min((d for d in alone if d >= depth), default=max(alone))
        largest = max(b for b in factors if b <= batch)
        return alone[near] * depth / near * factors[largest] * batch / largest

    return seconds


def captured_costs(llm: LLM, drafter: str, batches: Seq[int]) -> CapturedChains | None:
    """Where steps are captured, they are measured as a whole before anything is planned; None where not."""
    if llm.model.device.type != "cuda" or llm.engine.drafters.resident(drafter) is None:
        return None
    llm.prepare(max(batches))
    costs = llm.engine.planner.costs
    if not costs.captured.sizes(drafter):
        return None
    return CapturedChains(costs.captured, drafter)


# ----------------------------------------------------------------------------------------------- predictions


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drafter is expected to bring at one batch, at its best depth."""

    batch: int
    depth: int
    speedup: float
    low: float
    high: float
    tokens_per_step: float
    acceptance: float  # equal at every depth, that would bring as many tokens
    break_even: float | None
    p99: float  # of steps, against a plain one
    tokens_per_second: float
    plain_tokens_per_second: float
    measured: bool  # False: extrapolated from smaller batches
    by_depth: dict[int, float]  # speed-up

    @property
    def pays(self) -> bool:
        return self.low > 1.0


def expected(trials: Trials, batch: int, costs: StepCosts, measured: bool) -> Expected:
    """At the depth with the most tokens per second."""
    deepest = max(trials.by_depth)
    depths = list(range(1, deepest + 1))
    if isinstance(costs, CapturedChains):
        depths = [d for d in costs.depths(batch) if d <= deepest] or [min(trials.by_depth)]
    drafts = {}
    for depth in depths:
        steps = [one for prompt in trials.at(depth).prompts() for one in prompt]
        drafts[depth] = Drafts.of_outcomes(steps or [(0, 0)], depth)
    predictions = {d: predict(some, batch, costs) for d, some in drafts.items()}
    best = max(predictions.values(), key=lambda one: one.speedup)
    noise = trials.noise if measured else UNMEASURED
    groups = trials.at(best.depth).prompts() or [[(0, 0)]]
    low, high = interval(groups, best.depth, batch, costs, noise)
    rate = rate_for(best.tokens, best.depth) or 0.0
    return Expected(
        batch, best.depth, best.speedup, low, high, best.tokens, rate, best.break_even, best.slowdown,
        best.tokens_per_second, batch / best.plain_seconds, measured,
        {d: one.speedup for d, one in predictions.items()},
    )  # fmt: skip


def by_task(trials: Trials, depth: int, costs: StepCosts, batch: int = 1) -> dict[str, dict[str, float]]:
    """At this depth. What the same run saw is of one sequence at a time."""
    found = {}
    for task in trials.at(depth).outcomes:
        steps = [one for prompt in trials.at(depth).prompts(task) for one in prompt]
        if steps:
            one = predict(Drafts.of_outcomes(steps, depth), batch, costs)
            found[task] = {"tokens_per_step": one.tokens, "speedup": one.speedup, "steps": float(len(steps))}
            if batch == 1 and depth in trials.by_depth:
                found[task]["seen"] = statistics.median(trials.by_depth[depth].ratios[task])
    return found


# -------------------------------------------------------------------------------------------------- drafters


@dataclass(slots=True)
class Measured:
    """One candidate: what it is and what it is expected to bring."""

    draft: str  # as the user wrote it
    facts: CandidateFacts
    expected: list[Expected]
    tasks: dict[str, dict[str, float]]
    tasks_by_batch: dict[int, dict[str, dict[str, float]]]  # each at its best depth
    acceptance: list[dict[str, float]]
    draft_ratio: float  # time of a draft token against a plain step
    # One sequence at a time, by depth and task: speed-up as predicted, and as the same run saw it.
    check: dict[int, dict[str, dict[str, float]]]
    prompts: tuple[int, int]  # measured, and given
    # Tokens per step at the temperature asked for and at another one.
    other_temperature: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["expected"] = [{**asdict(one), "pays": one.pays} for one in self.expected]
        return found


@dataclass(slots=True)
class Session:
    """Candidates of one target, one after the other; its costs by rows are measured once."""

    batches: Seq[int]
    depths: Seq[int] = DEPTHS
    seconds: float = 60.0
    candidates: int = 1  # in all, to share the time among
    rows: RowCosts | None = None

    def measure(self, llm: LLM, draft: str, drafter: str, asked: Asked, tell: Tell) -> Measured:
        # First: where steps are captured, none must be while answers are timed.
        costs: StepCosts | None = captured_costs(llm, drafter, self.batches)
        share, begun = self.seconds / self.candidates, time.monotonic()
        until = begun + TRIAL_SHARE * share
        trials = try_drafter(llm, drafter, asked, self.depths, until, _part(tell, 0.0, TRIAL_SHARE))
        unmeasured: set[int] = set()
        if costs is None:
            if self.rows is None:
                limit = time.monotonic() + ROWS_SHARE * self.seconds
                say = _part(tell, TRIAL_SHARE, ROWS_SHARE)
                self.rows = row_costs(llm, trials, self.batches, max(self.depths), limit, say)
            until = time.monotonic() + DRAFT_SHARE * share
            draft_s = draft_seconds(llm, drafter, trials, asked, self.batches, until)
            own = self._rows_with(trials)
            costs, unmeasured = EagerChains(own[1], draft_s, own), self.rows.unmeasured
        known = [expected(trials, b, costs, b not in unmeasured) for b in self.batches]
        first = known[0]
        found = Measured(
            draft,
            facts_of_draft(llm, draft),
            known,
            by_task(trials, first.depth, costs),
            {one.batch: by_task(trials, one.depth, costs, one.batch) for one in known},
            acceptance_by_depth(trials.by_depth[max(trials.by_depth)].verdicts),
            _draft_ratio(trials, first.depth, costs),
            {depth: by_task(trials, depth, costs) for depth in trials.by_depth},
            (len(trials.context), len(asked)),
        )
        if any(one.pays for one in known):
            say = _part(tell, 1 - OTHER_SHARE, OTHER_SHARE)
            until = time.monotonic() + OTHER_SHARE * share
            found.other_temperature = self._at_other_temperature(llm, drafter, asked, first, until, say)
        return found

    def _rows_with(self, trials: Trials) -> dict[int, EagerCosts]:
        """Costs by batch, as this candidate's own run saw them: machines are not always as fast."""
        assert self.rows is not None
        own = {rows: statistics.median(t) for rows, t in trials.rows.items() if len(t) >= ENOUGH}
        pace = own[1] / self.rows.by_batch[1].by_rows[1] if 1 in own else 1.0
        found = {}
        for batch, model in self.rows.by_batch.items():
            found[batch] = EagerCosts()
            found[batch].by_rows.update({rows: pace * seconds for rows, seconds in model.by_rows.items()})
        found[1].by_rows.update(own)
        return found

    def _at_other_temperature(
        self, llm: LLM, drafter: str, asked: Asked, here: Expected, until: float, tell: Tell
    ) -> dict[str, float]:
        """The same drafts at a temperature far from the one asked for."""
        usual = statistics.median(params.temperature for *_, params in asked)
        other = HOT if usual < HOT / 2 else 0.0
        again = [(task, ids, replace(params, temperature=other)) for task, ids, params in asked]
        trial = try_drafter(llm, drafter, again, (here.depth,), until, tell).by_depth[here.depth]
        steps = [one for prompt in trial.prompts() for one in prompt] or [(0, 0)]
        there = Drafts.of_outcomes(steps, here.depth).tokens
        return {"temperature": usual, "tokens_per_step": here.tokens_per_step, "other": other, "there": there}


def _part(tell: Tell, begin: float, share: float) -> Tell:
    return lambda what, done: tell(what, begin + share * done)


def _draft_ratio(trials: Trials, depth: int, costs: StepCosts) -> float:
    """A draft token's time against a plain step. Captured steps tell no drafting apart: there it is what each token
    makes them longer, verified as well.
    """
    if isinstance(costs, CapturedChains):
        return (costs.step(1, depth, depth) / costs.plain(1) - 1) / depth
    near = min(d for d in trials.by_depth if d >= depth)
    return statistics.mean(trials.by_depth[near].draft_s or [0.0]) / near / statistics.median(trials.plain)
