"""The loop. One step: pick sequences, plan, draft, pack, run the target once, verify, commit, record.

Prefill, chunked prefill, plain decoding and speculation are this one path: a step gives every sequence some
known tokens and zero or more guessed ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import compress

import numpy as np
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.control.planner import Planner
from outrider.draft.drafter import Drafter
from outrider.engine.rounds import Flight, Rounds
from outrider.engine.runner import pack
from outrider.engine.scheduler import Scheduler
from outrider.engine.text import TokenText, Writer
from outrider.errors import InvalidRequest, suggest
from outrider.model.decoder import Model, kv_bytes, make_store
from outrider.settings import Settings
from outrider.types import (
    MAX_NODES,
    NO_BET,
    NO_DRAFT,
    Bet,
    Draft,
    Event,
    FinishReason,
    Options,
    Origin,
    Outcome,
    Request,
    Sequence,
    StepRecord,
    Verdict,
    Work,
)
from outrider.verify.judge import judge, score_prompts
from outrider.verify.noise import choice_seed

log = logging.getLogger(__name__)

LEAST_SLOTS = 16  # tokens the cache must hold; fewer answer nothing
MOST_FAULTS = 3  # of a drafter, before it is left alone


class Engine:
    """Owns the sequences and the cache. Not for two threads at once; driver.py gives it one of its own."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        text: Callable[[], TokenText],
    ) -> None:
        config = model.config
        self.model, self.settings, self.text = model, settings, text
        self.context = settings.context or config.context
        slots = settings.cache_bytes // kv_bytes(model)
        if slots < LEAST_SLOTS:
            raise InvalidRequest(
                f"cache_bytes ({settings.cache_bytes}) holds {slots} tokens of this model; at least "
                f"{LEAST_SLOTS * kv_bytes(model)} are needed for {LEAST_SLOTS}, and for a whole context "
                f"{self.context * kv_bytes(model)}",
                "cache_bytes",
            )
        slots = min(slots, (self.context + MAX_NODES) * settings.max_sequences)
        self.store = make_store(model, slots)
        width, pinned = self.context + MAX_NODES, model.device.type == "cuda"
        self.table = SlotTable(slots, settings.max_sequences, width, settings.prefix_reuse, pinned)
        self.scheduler = Scheduler(self.table, settings.step_rows)
        self.planner = Planner()
        self.drafters: dict[str, Drafter] = {}  # filled by use_drafters
        self.writers: dict[Sequence, Writer] = {}
        self.live: dict[str, list[Sequence]] = {}
        self.faults: dict[str, int] = {}  # of drafters
        self.rounds: Rounds | None = None  # where the device can run whole rounds
        self.flights: deque[Flight] = deque()
        self.landed = 0.0
        self.grounded: set[Sequence] = set()  # whose requests no round can take
        self.record: StepRecord | None = None  # of the last step

    def use_drafters(self, drafters: Mapping[str, Drafter], planner: Planner) -> None:
        """Who may guess, by name, and who decides. Before the first request."""
        self.drafters, self.planner = dict(drafters), planner

    def add(self, request: Request) -> list[Sequence]:
        """Take a request in, or refuse it by name. Its tokens come out of `step`."""
        self._refuse(request)
        choices = [
            Sequence(request, i, choice_seed(request.seed, i), list(request.prompt_ids))
            for i in range(request.params.n)
        ]
        for sequence in choices:
            sequence.grammar = request.grammar.copy() if request.grammar is not None else None
            sequence.arrived = time.perf_counter()
            if self.rounds is not None and not self.rounds.takes(sequence, self.planner.default):
                self.grounded.add(sequence)
            self.writers[sequence] = Writer(self.text(), request.params.stop, request.params.include_stop)
            for name, drafter in self.drafters.items():
                self._tell(name, drafter.start, sequence)
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
        return not self.live

    def step(self) -> list[Event]:
        """One pass of the target over everything that can move."""
        if self.rounds is not None and self._steady(self.rounds):
            return self._fly(self.rounds)
        return self._land(0) + self._pack_and_run()

    def _pack_and_run(self) -> list[Event]:
        """A step whose inputs the host packs and whose logits it judges: anything goes."""
        begin = time.perf_counter()
        picks = self.scheduler.pick()
        if not picks:
            return []
        emits = [pick.emits for pick in picks]
        emitting = [pick.sequence for pick in compress(picks, emits)]
        plan = self.planner.plan(picks, Options())
        planned = time.perf_counter()
        drafts, bets = self._propose(picks, plan.bets)
        drafted = time.perf_counter()
        batch = pack(picks, drafts, self.table)
        logits = self.model.forward(batch, self.store)
        ran = time.perf_counter()
        scored = sum(pick.scored for pick in picks)
        own = logits[: len(logits) - scored]
        verdicts = []
        if emitting:
            guessed = list(compress(drafts, emits))
            verdicts = judge(own, emitting, guessed, self.model.draw, self.model.sift)
        if scored:
            self._score(logits[len(own) :], picks)
        judged = time.perf_counter()
        times = (planned - begin, drafted - planned, ran - drafted, judged - ran)
        return self._settle(picks, drafts, bets, verdicts, plan.reasons, batch.rows, begin, times)

    def _settle(
        self,
        picks: list[Work],
        drafts: list[Draft],
        bets: list[Bet],
        verdicts: list[Verdict],
        reasons: tuple[str, ...],
        rows: int,
        begin: float,
        times: tuple[float, float, float, float],
        flight: Flight | None = None,
    ) -> list[Event]:
        """Commit what the target said, tell it, and record what it cost: of a round, until it landed, as the next one
        is running already.
        """
        outcomes = []
        if flight is None or flight.drafter != "none":
            emits = [pick.emits for pick in picks]
            outcomes = [
                _outcome(pick.sequence, bet, draft, verdict)
                for (pick, bet, draft), verdict in zip(
                    compress(zip(picks, bets, drafts, strict=True), emits), verdicts, strict=True
                )
            ]
        events = self._commit(picks, drafts, bets, iter(verdicts))
        plan_s, draft_s, target_s, verify_s = times
        self.record = StepRecord(
            rows=rows,
            sequences=len(picks),
            known=sum(pick.known for pick in picks),
            drafted=sum(map(len, drafts)),
            accepted=sum(len(v.accepted) for v in verdicts),
            emitted=sum(len(e.token_ids) for e in events),
            plan_s=plan_s,
            draft_s=draft_s,
            target_s=target_s,
            verify_s=verify_s,
            total_s=(self.landed if flight else time.perf_counter()) - begin,
            captured=flight.kind if flight else None,
            passes=flight.passes if flight else 1,
            outcomes=outcomes,
            reasons=reasons,
        )
        self.planner.observe(self.record)
        if self.settings.check_integrity:
            self.table.check()
        return events

    # ------------------------------------------------------------------------------------ rounds on the device

    def preparing(self, sequences: int) -> Iterator[None]:
        """Makes the rounds of up to so many sequences and measures them, so that no answer has to wait for it: piece by
        piece, while nobody is answered.
        """
        rounds, planner = self.rounds, self.planner
        if rounds is None:
            return
        for drafter in planner.choices or ("none",):
            for size in rounds.sizes_up_to(sequences):
                if (drafter, size) in planner.costs.measured:
                    continue
                self._land(0)  # of those who are gone
                costs = []
                for cost in rounds.measure(size, drafter):
                    costs.append(cost)
                    yield
                    self._land(0)
                planner.learn(drafter, size, costs)
                rounds.made.add(size)
            tokens, seconds = rounds.practise(drafter)
            if tokens:
                planner.learn_reading(drafter, tokens, seconds)
            yield

    def _steady(self, rounds: Rounds) -> bool:
        """Whether the next step can be a round on the device: everyone decodes, nobody waits who could come in,
        and there is room for all without anybody giving way.
        """
        running = self.scheduler.running
        if not running or (self.scheduler.waiting and self.table.rows_left):
            return False
        if not self.grounded.isdisjoint(running) or any(s.pending != 1 for s in running):
            return False
        return self.table.make_room(len(running) * (rounds.deepest + 1))

    def _fly(self, rounds: Rounds) -> list[Event]:
        """Start a round; tell of the one before, which has been running meanwhile."""
        sequences = list(self.scheduler.running)
        size = rounds.size_for(len(sequences))
        picks = [Work(sequence, 1) for sequence in sequences]
        trees = {name: rounds.forms(name, size) for name in rounds.drafters}
        behind = lambda name: sum(rounds.unread(sequences, name).values())  # noqa: E731
        options = Options(size, (True,) * len(picks), trees, behind, rounds.deepest)
        while (drafter := self.planner.unmeasured(picks, options)) != "none":
            if self.flights:
                return self._land(0)
            self.planner.learn(drafter, size, rounds.measure(size, drafter))
        plan = self.planner.plan(picks, options)
        bets = rounds.fitted(plan.bets)
        guessing = [s for s, bet in zip(sequences, bets, strict=True) if bet.nodes]
        drafter = next((bet.drafter for bet in bets if bet.nodes), "none")
        if unread := rounds.unread(guessing, drafter):
            if self.flights:  # what is on its way must be known first; then all is planned anew
                return self._land(0)
            self.planner.learn_reading(drafter, sum(unread.values()), rounds.catch_up(list(unread), drafter))
        left = self._most_left(sequences)
        if left <= 0:  # what is on its way ends them all
            return self._land(0)
        ahead = max(bet.nodes for bet in bets) or min(rounds.run_length(size), left) - 1
        fresh = self.table.extend_all(np.array([s.row for s in sequences]), ahead + 1)
        for pick in picks:
            pick.drafted = ahead
        self.flights.append(rounds.launch(picks, bets, plan.reasons, fresh, size))
        return self._land(rounds.lag)

    def _most_left(self, sequences: list[Sequence]) -> int:
        """Tokens that any of these may still emit, at most, once all that is on its way is there."""
        coming = sum(flight.passes for flight in self.flights)
        return max(s.request.params.max_tokens + s.prompt_len - len(s.tokens) for s in sequences) - coming

    def _land(self, still: int) -> list[Event]:
        """Settle rounds, oldest first, until no more than `still` are on their way."""
        events: list[Event] = []
        while len(self.flights) > still:
            flight = self.flights.popleft()
            before = time.perf_counter()
            drafts, verdicts = flight.land()
            now = time.perf_counter()
            begin = max(flight.begun, self.landed)
            alive = [i for i in range(len(flight.picks)) if flight.holds(i)]
            self.landed = now
            if not alive:
                continue
            for i in alive:
                flight.picks[i].sequence.drafted += len(drafts[i])
            events += self._settle(
                [flight.picks[i] for i in alive],
                [drafts[i] for i in alive],
                [flight.bets[i] for i in alive],
                [verdicts[i] for i in alive],
                flight.reasons,
                flight.rows_a_pass,
                begin,
                (0.0, 0.0, flight.seconds, 0.0),
                flight,
            )
            assert self.rounds is not None
            for i in alive:
                self.rounds.landed(flight, i, verdicts[i])
            self.rounds.pace(flight, now - before, time.perf_counter() - begin)
        return events

    def _refuse(self, request: Request) -> None:
        vocab, prompt, params = self.model.config.vocab, len(request.prompt_ids), request.params
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        if bad := [t for t in request.prompt_ids if not 0 <= t < vocab]:
            raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {vocab}", "prompt")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if bad := [t for t in ids if not 0 <= t < vocab]:
                raise InvalidRequest(f"{name}: token id {bad[0]} is outside the vocabulary of {vocab}", name)
        if prompt >= self.context:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; this model's maximum context length is {self.context} tokens",
                "prompt",
            )
        if prompt + params.max_tokens > self.context:
            raise InvalidRequest(
                f"max_tokens {params.max_tokens} and a prompt of {prompt} tokens together exceed this model's "
                f"maximum context length of {self.context} tokens; ask for at most {self.context - prompt}",
                "max_tokens",
            )
        if prompt + params.max_tokens > self.table.pool.total:
            raise InvalidRequest(
                f"the request may need {prompt + params.max_tokens} tokens of cache; there is room for "
                f"{self.table.pool.total}: raise cache_bytes or lower max_tokens",
                "max_tokens",
            )
        asked = params.speculation.drafter
        if asked not in (None, "none", *self.drafters):
            raise InvalidRequest(f"unknown drafter {asked!r}{suggest(str(asked), self.drafters)}", "drafter")
        if len(request.prediction_ids) > self.context:
            raise InvalidRequest(
                f"the prediction has {len(request.prediction_ids)} tokens; this model's maximum context length is "
                f"{self.context} tokens",
                "prediction",
            )
        if request.id in self.live:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", "id")

    def _propose(self, picks: list[Work], bets: Seq[Bet]) -> tuple[list[Draft], list[Bet]]:
        """Guesses for the sequences that are done reading, with slots for every node at the end of their
        row.
        """
        drafts = [NO_DRAFT] * len(picks)
        placed = [bet if pick.emits else NO_BET for pick, bet in zip(picks, bets, strict=True)]
        by_drafter: dict[str, list[int]] = {}
        for i, bet in enumerate(placed):
            if bet.nodes > 0:
                by_drafter.setdefault(bet.drafter, []).append(i)
        for name, asked in by_drafter.items():
            proposed = self._guess(name, [picks[i].sequence for i in asked], [placed[i] for i in asked])
            for i, draft in zip(asked, proposed, strict=True):
                sequence = picks[i].sequence
                try:
                    self.table.extend(sequence.row, len(draft))
                    drafts[i], picks[i].drafted = draft, len(draft)
                except CacheFull:  # a guess is never worth another sequence's place
                    continue
                sequence.drafted += len(draft)
        return drafts, placed

    def _guess(self, name: str, sequences: list[Sequence], bets: list[Bet]) -> Seq[Draft]:
        """Ask a drafter. One that fails costs its guesses, never an answer, and is not asked for ever."""
        nothing = [NO_DRAFT] * len(sequences)
        if self.faults.get(name, 0) >= MOST_FAULTS:
            return nothing
        try:
            drafts = self.drafters[name].propose(sequences, bets)
            vocab = self.model.config.vocab
            if len(drafts) != len(bets) or any(not 0 <= t < vocab for d in drafts for t in d.tokens):
                raise ValueError("it gave a wrong number of drafts, or a token outside the vocabulary")
            if any(_wrong_chances(draft, vocab) for draft in drafts):
                raise ValueError("it gave chances that are none")
            return drafts
        except Exception as error:  # a drafter may be anybody's code
            self._distrust(name, error)
            return nothing

    def _tell(self, name: str, verb: Callable[..., None], *news: object) -> None:
        """Let a drafter know something."""
        try:
            verb(*news)
        except Exception as error:
            self._distrust(name, error)

    def _distrust(self, name: str, error: Exception) -> None:
        self.faults[name] = self.faults.get(name, 0) + 1
        rest = "; it will not be asked again" if self.faults[name] >= MOST_FAULTS else ""
        if self.faults[name] <= MOST_FAULTS:
            log.warning("the drafter %s failed: %r%s", name, error, rest)

    def _score(self, logits: Tensor, picks: list[Work]) -> None:
        """Keep the log-probabilities of prompt tokens read in this pass, where they were asked for."""
        counts = [pick.scored for pick in picks]
        for sequence, scores in score_prompts(logits, [pick.sequence for pick in picks], counts):
            sequence.prompt_logprobs = [*(sequence.prompt_logprobs[: sequence.cached + 1] or [None]), *scores]

    def _commit(
        self, picks: list[Work], drafts: list[Draft], bets: list[Bet], verdicts: Iterator[Verdict]
    ) -> list[Event]:
        events = []
        for pick, draft, bet in zip(picks, drafts, bets, strict=True):
            sequence = pick.sequence
            before, emits = sequence.cached, pick.emits
            verdict = next(verdicts) if emits else None
            # Every token but the last has been fed: a guess that held, or one of several plain passes.
            fed = len(verdict.tokens) - 1 if verdict else 0
            path = verdict.accepted if verdict and verdict.accepted else range(fed)
            self.table.commit(sequence.row, before + pick.known, path, pick.drafted)
            sequence.cached = before + pick.known + fed
            if before < sequence.prompt_len <= sequence.cached:
                self.scheduler.prompt_read(sequence)
            if verdict:
                events.append(self._emit(sequence, draft, bet, verdict))
        return events

    def _emit(self, sequence: Sequence, draft: Draft, bet: Bet, verdict: Verdict) -> Event:
        """Append the verdict's tokens, up to where the request ends, and make the event."""
        text, taken = self._write(sequence, verdict.tokens)
        emitted, origins = verdict.tokens[:taken], _origins(draft, verdict)[:taken]
        sequence.tokens += emitted
        sequence.origins += origins
        sequence.steps += 1 if draft else taken
        sequence.ended = time.perf_counter()
        sequence.first = sequence.first or sequence.ended
        if draft:
            held = origins.count("accepted")
            sequence.accepted += held
            sequence.guesses.append((len(draft), held))
            sequence.deepest = max(sequence.deepest, _deepest(draft))
        logprobs = None
        if verdict.logprobs is not None:
            logprobs = tuple(verdict.logprobs[:taken])
            sequence.logprobs.extend(logprobs)
        if bet.nodes > 0:
            self._tell(bet.drafter, self.drafters[bet.drafter].accept, sequence, draft, verdict)
        if sequence.finish_reason:
            sequence.cached = min(sequence.cached, len(sequence.tokens))
            self._end(sequence)
        return Event(
            sequence.request.id, sequence.choice, tuple(emitted), text, sequence.finish_reason, logprobs
        )

    def _write(self, sequence: Sequence, tokens: list[int]) -> tuple[str, int]:
        """The text these tokens add, and how many of them the answer takes. Where it ends, so does the sequence."""
        params, writer = sequence.request.params, self.writers[sequence]
        written = len(sequence.tokens) - sequence.prompt_len
        room = params.max_tokens - written
        taken, spoken, reason = _ending(sequence, tokens[:room])
        text, stopped = writer.feed(tokens[:spoken], params.min_tokens - 1 - written)
        if stopped:
            sequence.finish_reason, sequence.stop = "stop", writer.matched
            return text, stopped
        sequence.finish_reason = reason or ("length" if taken == room else None)
        if reason == "error":
            sequence.problem = f"the grammar failed: {sequence.grammar.problem}"
        return text + writer.finish() if sequence.finish_reason else text, taken

    def _end(self, sequence: Sequence) -> None:
        for name, drafter in self.drafters.items():
            self._tell(name, drafter.stop, sequence)
        self.planner.forget(sequence)
        self.grounded.discard(sequence)
        self.scheduler.finish(sequence)
        del self.writers[sequence]
        siblings = self.live[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.live[sequence.request.id]


def _wrong_chances(draft: Draft, vocab: int) -> bool:
    """Whether the distributions its tokens are said to be drawn from cannot be any."""
    log_q = draft.log_q
    return log_q is not None and (log_q.shape != (len(draft), vocab) or bool(log_q.isnan().any()))


def _ending(sequence: Sequence, tokens: list[int]) -> tuple[int, int, FinishReason | None]:
    """How many of these tokens the answer takes, how many of those are text, and what ends it, if anything does."""
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


def _outcome(sequence: Sequence, bet: Bet, draft: Draft, verdict: Verdict) -> Outcome:
    accepted, straight = verdict.accepted, 0
    while straight < len(accepted) and draft.rank(accepted[straight]) == 0:
        straight += 1
    return Outcome(sequence, bet, len(draft), _deepest(draft), len(accepted), straight)


def _origins(draft: Draft, verdict: Verdict) -> list[Origin]:
    """Where each token came from: a guess that held, the target's correction, or its free token at the end."""
    if not draft:
        return ["plain"] * len(verdict.tokens)
    last = verdict.accepted[-1] if verdict.accepted else -1
    ending: Origin = "recovered" if last in draft.parents else "bonus"
    guessed: list[Origin] = ["accepted"] * len(verdict.accepted)
    return [*guessed, ending]
