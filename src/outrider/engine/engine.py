"""The loop. One step: schedule, plan, launch (draft, one target pass, verify, commit), settle what is finished.

Prefill, chunked prefill, plain decoding and speculation are this one path: a step gives every sequence some known
tokens and zero or more draft tokens. How a step runs is the runner's business.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from outrider.control.guards import PROBE_SHARE
from outrider.control.planner import Planner
from outrider.control.prefill import background_rows
from outrider.draft.drafters import Drafters, Scores
from outrider.engine.admission import check_request
from outrider.engine.kept_costs import KeptCosts
from outrider.engine.kv_cache import KvCache
from outrider.engine.rows import Result
from outrider.engine.runner import InFlightStep, Runner
from outrider.engine.scheduler import BACKGROUND_SECONDS, Scheduler
from outrider.engine.text import TokenText, Writer
from outrider.errors import InvalidRequest
from outrider.model.decoder import Model
from outrider.settings import Settings
from outrider.types import (
    Draft,
    DraftPlan,
    Event,
    FinishReason,
    Origin,
    Outcome,
    Plan,
    Request,
    Sequence,
    StepDetail,
    StepRecord,
    StepResult,
    Verdict,
    Work,
)
from outrider.verify.noise import choice_seed

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PLAIN: list[Origin] = ["plain"]  # where a token comes from that nothing drafted
MAX_SCORED = 8  # sequences of a step with a shadow score


class Engine:
    """Owns the sequences and the KV cache. Not for two threads at once; driver.py gives it one of its own."""

    check_integrity = False  # check the KV cache's books after every step; the tests turn it on

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        drafters: Drafters,
        planner: Planner,
        runner: Runner,
        settings: Settings,
        text: Callable[[bool], TokenText],
        kept_costs: KeptCosts | None = None,  # where what steps take outlives this engine
    ) -> None:
        self.model, self.settings, self.text = model, settings, text
        self.cache, self.table, self.context = cache, cache.table, cache.context
        self.drafters, self.planner, self.runner = drafters, planner, runner
        self.scores, self.turn = Scores(drafters), 0
        self.patience = 0  # tokens that scores pass over at most, where no device hides their time
        self.scheduler = Scheduler(cache.table, settings.step_rows)
        self.writers: dict[Sequence, Writer] = {}
        self.live: dict[str, list[Sequence]] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.settled_at = 0.0
        self.counts = runner.preparation.counts  # graphs captured and kernels compiled
        self.answerable = False  # without drafts, from captured steps
        self.kept_costs = kept_costs

    def add(self, request: Request) -> list[Sequence]:
        """Take a request in, or refuse it by name. Its tokens come out of `step`."""
        vocab, slots = self.model.config.vocab, self.table.pool.total
        check_request(request, vocab, self.context, slots, self.drafters.names)
        if request.id in self.live:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", "id")
        choices = [
            Sequence(request, i, choice_seed(request.seed, i), list(request.prompt_ids))
            for i in range(request.params.n)
        ]
        for sequence in choices:
            sequence.grammar = request.grammar.copy() if request.grammar is not None else None
            sequence.arrived = time.perf_counter()
            text = self.text(request.params.mark_special)
            self.writers[sequence] = Writer(text, request.params.stop, request.params.include_stop)
            self.drafters.start(sequence)
        self.live[request.id] = list(choices)
        self.scheduler.add(choices)
        return choices

    def abort(self, request_id: str) -> list[Event]:
        """End a request now and free what it holds. Unknown or finished: nothing to do."""
        events = []
        self.scheduler.held.pop(request_id, None)
        for sequence in self.live.get(request_id, [])[:]:
            sequence.finish_reason = "abort"
            self._end(sequence)
            events.append(Event(request_id, sequence.choice, (), "", "abort"))
        return events

    @property
    def idle(self) -> bool:
        return not (self.live or self.in_flight)

    def step(self) -> list[StepResult]:
        """Launch a step for everything that can move, and settle those that are finished."""
        unprofitable = self.settings.release_draft and self.planner.returns.unprofitable
        results = self._release_unprofitable() if unprofitable else []
        begun = time.perf_counter()
        max_prompts = self.runner.preparation.max_prompts
        work = self.scheduler.schedule(self._prompt_rows, self._background_rows, max_prompts)
        if work:
            plan = self._plan(work)
            step = self.runner.launch(work, plan)
            step.record.plan_s, step.begun = step.begun - begun, begun
            self.in_flight.append(step)
        while len(self.in_flight) > (self.runner.lag if work else 0):
            results.append(self._settle(self.in_flight.popleft()))
            if not self.live:
                break  # steps still in flight have no sequence left, and the last tokens must not wait for them
        return results

    def _prompt_rows(self, decoding: int, waited: float, waiting: int, pending: int, begun: bool) -> int:
        """Before warm-up, steps are launched kernel by kernel, so a few large prefill steps cost less than many small
        ones.
        """
        preparation = self.runner.preparation
        if preparation.on_demand:
            return self.settings.step_rows
        rows = max(self.planner.prompt_rows(decoding, waited, waiting, pending), 1)
        rows = min(rows, preparation.most_prompt_rows(decoding))
        latest = self.in_flight[-1].packed.work if self.in_flight else []
        after_prompts = any(one.prompt_rows for one in latest)
        admitted = waiting * min(1.0, rows / max(pending, 1))
        # A step that is full anyway holds no more prompts for waiting.
        hold = after_prompts and not begun and pending < rows
        hold = hold and self.planner.costs.pause.pays(decoding, admitted)
        return 0 if hold else rows

    def _background_rows(self, decoding: int) -> int:
        return background_rows(self.planner.costs, decoding, BACKGROUND_SECONDS)

    def drain(self) -> list[StepResult]:
        """Settle everything that is in flight, and launch nothing."""
        return [self._settle(self.in_flight.popleft()) for _ in range(len(self.in_flight))]

    def _release_unprofitable(self) -> list[StepResult]:
        """Releases drafters that never paid for themselves and that no running request selects by name."""
        live = [sequence for some in self.live.values() for sequence in some]
        named = {sequence.request.params.speculation.drafter for sequence in live}
        results: list[StepResult] = []
        for name in self.planner.returns.unprofitable.keys() - named:
            results += self.drain()
            for sequence in live:
                if sequence.finish_reason is None:  # else that was done when it ended
                    self.drafters[name].stop(sequence)
            self.drafters.remove([name])
            self.planner.release([name])
            self.runner.release([name])
            log.warning("the draft %s was released", name)
        return results

    def replace_weights(self, drafter: str, weights: Mapping[str, Tensor]) -> None:
        """Has a drafter draft with other weights from the next step on. Requires that no step is in flight: otherwise
        drafts of the old weights would be counted as the new ones' progress.
        """
        assert not self.in_flight
        self.drafters.replace_weights(drafter, weights)
        self.planner.forget_drafters(self.drafters.including(drafter))

    def _plan(self, work: list[Work]) -> Plan:
        members = self.runner.members(work)
        if (kept := self.planner.kept(work, members)) is not None:
            return kept
        options = self.runner.options(work, members, len(self.scheduler.waiting))
        preparation = self.runner.preparation
        while preparation.on_demand and (drafter := self.planner.unmeasured(work, options)) != "none":
            preparation.measure(self.planner, drafter, options.size)
        return self.planner.plan(work, options)

    def prepare(self, sequences: int) -> Iterator[None]:
        """Captures and measures the steps of up to this many sequences, piece by piece: while the engine is idle, or
        between two steps. After the first piece, a step that is missing is captured when it is launched again.
        """
        preparation = self.runner.preparation
        preparation.on_demand, preparation.idle = False, self.idle
        for answerable in preparation.run(self.planner, sequences):
            self.answerable = answerable
            if preparation.idle:  # no request waited for it
                self.counts = preparation.counts
            yield
            preparation.idle = self.idle
        self.keep_costs(always=True)

    def prepare_more(self) -> Iterator[None] | None:
        """Prepares for more sequences, if more have come at once than steps are prepared for."""
        preparation = self.runner.preparation
        if preparation.on_demand or preparation.most <= preparation.sequences:
            return None
        return self.prepare(preparation.most)

    def keep_costs(self, always: bool = False) -> None:
        """Saves the measured step costs if they changed. Call only while the engine is idle."""
        if self.kept_costs is not None:
            self.kept_costs.keep(always)

    def _settle(self, step: InFlightStep) -> StepResult:
        """Commit what the target said, emit it, and record what it cost."""
        scores = self._scores_meanwhile(step) if step.record.captured else None
        results = self.runner.finish(step)
        begun, self.settled_at = max(step.begun, self.settled_at), time.perf_counter()
        alive = [i for i, one in enumerate(step.work) if one.alive]
        record = self._record(step, [results[i] for i in alive], alive)
        record.total_s = self.settled_at - begun
        waiting = sum(s.first > 0 and not s.request.background for s in self.scheduler.running)
        record.waiting = max(waiting - record.decoding, 0)
        (graphs, kernels), self.counts = self.counts, self.runner.preparation.counts
        record.graphs_captured, record.kernels_compiled = self.counts[0] - graphs, self.counts[1] - kernels
        if log.isEnabledFor(logging.DEBUG):
            _log_reasons(step, alive)
        committed = [self._commit(step, i, *results[i]) for i in alive]
        record.shadow = self._scores(step, results, alive) if scores is None else scores
        events = [event for event in committed if event is not None]
        record.emitted = sum(len(e.token_ids) for e in events)
        if alive:
            self.planner.observe(record)
        if self.check_integrity:
            self.table.check()
        return StepResult(events, record)

    def _record(self, step: InFlightStep, results: list[Result], alive: list[int]) -> StepRecord:
        """The step's record, with what came of the sequences that are alive."""
        record, captured = step.record, step.record.captured
        # In captured plain passes, and of prompts beside them, the planner had no choice.
        decoding = any(one.alive and not one.prompt_rows for one in step.packed.work)
        if captured is None or captured.drafter != "none" or decoding:
            record.outcomes = [
                _outcome_of(step.work[i].sequence, step.draft_plans[i], draft, verdict)
                for i, (draft, verdict) in zip(alive, results, strict=True)
                if verdict is not None
            ]
        record.sequences, record.known = len(alive), sum([step.work[i].known for i in alive])
        record.prompt_rows = sum(one.prompt_rows for one in step.packed.work if one.alive)
        record.drafted = sum([len(draft.tokens) for draft, _ in results])
        record.accepted = sum([len(verdict.accepted) for _, verdict in results if verdict is not None])
        record.predicted += step.packed.predicted
        return record

    def _scores_meanwhile(self, step: InFlightStep) -> list[Outcome]:
        """How model-free drafters would have done where they do not draft, for a few sequences in turn, while the host
        waits for this step. The planner learns them at once, as nothing else is to be done.
        """
        found, lead = list[Outcome](), step.record.captured.drafter if step.record.captured else ""
        for name in self.drafters.model_free:
            for _ in range(min(len(step.work), MAX_SCORED)):
                if step.done:
                    return found
                self.turn = (self.turn + 1) % len(step.work)
                one, plan = step.work[self.turn], step.draft_plans[self.turn]
                ran = name in (lead, plan.drafter if plan.nodes else "")
                if one.emits and one.alive and not ran and self._may_draft(name, one.sequence):
                    scored = self.scores.score(name, one.sequence)
                    if scored is not None:
                        self.planner.scored(scored)
                        found.append(scored)
        return found

    def _scores(self, step: InFlightStep, results: list[Result], alive: list[int]) -> list[Outcome]:
        """The same where no device hides it. It takes a small share of the time."""
        begun, found = time.perf_counter(), list[Outcome | None]()
        turns, self.turn = max(-(-len(alive) // MAX_SCORED), 1), self.turn + 1
        for name in self.drafters.model_free:
            for i in alive[self.turn % turns :: turns]:
                (draft, verdict), sequence = results[i], step.work[i].sequence
                ran = draft and step.draft_plans[i].drafter == name
                if verdict is not None and not ran and self._may_draft(name, sequence):
                    found.append(self.scores.score(name, sequence, self.patience))
        scored = [one for one in found if one is not None]
        if scored:
            each = (time.perf_counter() - begun) / len(scored)
            self.patience = int(each * len(alive) / (PROBE_SHARE * step.record.total_s))
        return scored

    def _may_draft(self, name: str, sequence: Sequence) -> bool:
        asked = sequence.request.params.speculation
        mine = asked.drafter == name or (asked.drafter is None and name in self.planner.choices)
        return mine and not asked.off and sequence.finish_reason is None

    def _commit(self, step: InFlightStep, i: int, draft: Draft, verdict: Verdict | None) -> Event | None:
        """Commit to the KV cache: keep the accepted path, drop the rest of the draft. Then emit."""
        one = step.work[i]
        one.settle()
        sequence, before = one.sequence, one.sequence.cached
        # Every token but the last has been fed: a draft token that was accepted, or one of several plain passes.
        fed = len(verdict.tokens) - 1 if verdict else 0
        if one.drafted != fed:  # else everything stays
            path = verdict.accepted if verdict and verdict.accepted else range(fed)
            self.table.commit(sequence.row, before + one.known, path, one.drafted)
        sequence.cached = before + one.known + fed
        if before < sequence.prompt_len <= sequence.cached:
            self.scheduler.prompt_read(sequence)
        return self._emit(sequence, step, i, draft, verdict) if verdict else None

    def _emit(self, sequence: Sequence, step: InFlightStep, i: int, draft: Draft, verdict: Verdict) -> Event:
        """Append the verdict's tokens, up to where the request ends, and make the event."""
        draft_plan, drafted = step.draft_plans[i], len(draft.tokens)
        text, taken = self._write(sequence, verdict.tokens)
        emitted = verdict.tokens[:taken]
        origins = _origins_of(draft, verdict)[:taken] if drafted else PLAIN * taken
        sequence.tokens += emitted
        sequence.origins += origins
        sequence.steps += 1 if drafted else taken
        sequence.ended = self.settled_at
        sequence.first = sequence.first or self.settled_at
        if drafted:
            held = origins.count("accepted")
            sequence.drafted += drafted
            sequence.accepted += held
            sequence.draft_counts.append((drafted, held))
            sequence.deepest = max(sequence.deepest, _deepest(draft))
        logprobs = detail = None
        if verdict.logprobs is not None:
            logprobs = tuple(verdict.logprobs[:taken])
            sequence.logprobs.extend(logprobs)
        if sequence.request.params.speculation.explain:
            drafter, accepted = draft_plan.drafter if drafted else "none", tuple(verdict.accepted)
            origin, why = tuple(origins), step.record.reasons[i]
            detail = StepDetail(drafter, draft.tokens, draft.parents, accepted, origin, why)
            sequence.details.append(detail)
        if draft_plan.nodes > 0:
            self.drafters.accept(draft_plan.drafter, sequence, draft, verdict)
        if sequence.finish_reason:
            sequence.cached = min(sequence.cached, len(sequence.tokens))
            self._end(sequence)
        end = sequence.finish_reason
        return Event(sequence.request.id, sequence.choice, tuple(emitted), text, end, logprobs, detail)

    def _write(self, sequence: Sequence, tokens: list[int]) -> tuple[str, int]:
        """The text these tokens add, and how many of them the answer takes. Where it ends, so does the sequence."""
        params, writer = sequence.request.params, self.writers[sequence]
        written = len(sequence.tokens) - sequence.prompt_len
        room = params.max_tokens - written
        ends, free = sequence.request.stop_ids, sequence.grammar is None and not writer.stops
        if free and len(tokens) < room and ends.isdisjoint(tokens):  # nothing ends here, as nearly always
            return writer.stream.feed(*tokens), len(tokens)
        taken, shown, reason = _ending(sequence, tokens[:room])
        text, stopped = writer.feed(tokens[:shown], params.min_tokens - 1 - written)
        if stopped:
            sequence.finish_reason, sequence.stop = "stop", writer.matched
            return text, stopped
        sequence.finish_reason = reason or ("length" if taken == room else None)
        if reason == "error":
            sequence.problem = f"the grammar failed: {sequence.grammar.problem}"
        return text + writer.finish() if sequence.finish_reason else text, taken

    def _end(self, sequence: Sequence) -> None:
        self.drafters.stop(sequence)
        self.scores.stop(sequence)
        self.planner.forget(sequence)
        self.scheduler.finish(sequence)
        del self.writers[sequence]
        siblings = self.live[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.live[sequence.request.id]


def _log_reasons(step: InFlightStep, alive: list[int]) -> None:
    for i in alive:
        sequence = step.work[i].sequence
        log.debug("%s, choice %d: %s", sequence.request.id, sequence.choice, step.record.reasons[i])


def _ending(sequence: Sequence, tokens: list[int]) -> tuple[int, int, FinishReason | None]:
    """Returns how many of the tokens belong to the answer, how many of these are text, and why the answer ends."""
    grammar, ends = sequence.grammar, sequence.request.stop_ids
    if grammar is None and ends.isdisjoint(tokens):
        return len(tokens), len(tokens), None
    for i, token in enumerate(tokens):
        if grammar is not None:
            grammar.advance(token)
            if grammar.problem:  # it broke, or nothing that it allows was left to choose from
                return i + 1, i, "error"
        if token in ends:
            return i + 1, i, "stop"
        if grammar is not None and grammar.complete:
            return i + 1, i + 1, "stop"
    return len(tokens), len(tokens), None


def _deepest(draft: Draft) -> int:
    return max(draft.depths) if draft else 0


def _outcome_of(sequence: Sequence, draft_plan: DraftPlan, draft: Draft, verdict: Verdict) -> Outcome:
    accepted, top1_accepted = verdict.accepted, 0
    while top1_accepted < len(accepted) and draft.rank(accepted[top1_accepted]) == 0:
        top1_accepted += 1
    return Outcome(sequence, draft_plan, len(draft), _deepest(draft), len(accepted), top1_accepted)


def _origins_of(draft: Draft, verdict: Verdict) -> list[Origin]:
    """Where each token came from: an accepted draft token, one recovered from the target, or its bonus at the end."""
    last = verdict.accepted[-1] if verdict.accepted else -1
    ending: Origin = "recovered" if last in draft.parents else "bonus"
    accepted: list[Origin] = ["accepted"] * len(verdict.accepted)
    return [*accepted, ending]
