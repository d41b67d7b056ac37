"""The loop. One step: pick sequences, plan, draft, pack, run the target once, verify, commit, record.

Prefill, chunked prefill, plain decoding and speculation are this one path: a step gives every sequence some
known tokens and zero or more guessed ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import compress

from outrider.cache.pool import CacheFull
from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.control.planner import Planner
from outrider.draft.drafter import Drafter
from outrider.engine.runner import pack
from outrider.engine.scheduler import Pick, Scheduler
from outrider.engine.text import TokenText, Writer
from outrider.errors import InvalidRequest, suggest
from outrider.model.decoder import Model
from outrider.settings import Settings
from outrider.types import (
    MAX_NODES,
    NO_BET,
    NO_DRAFT,
    Bet,
    Draft,
    Event,
    FinishReason,
    Origin,
    Outcome,
    Request,
    Sequence,
    StepRecord,
    Verdict,
)
from outrider.verify.judge import judge
from outrider.verify.noise import choice_seed


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
        slots = max(1, settings.cache_bytes // config.kv_bytes_per_token)
        slots = min(slots, (self.context + MAX_NODES) * settings.max_sequences)
        self.store = KeyValueStore(config.layers, slots, config.kv_heads, config.head_dim)
        self.table = SlotTable(slots, settings.max_sequences, self.context + MAX_NODES, settings.prefix_reuse)
        self.scheduler = Scheduler(self.table, settings.step_rows)
        self.planner = Planner()
        self.drafters: dict[str, Drafter] = {}  # filled by use_drafters
        self.writers: dict[Sequence, Writer] = {}
        self.live: dict[str, list[Sequence]] = {}
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
            self.writers[sequence] = Writer(self.text(), request.params.stop, request.params.include_stop)
            for drafter in self.drafters.values():
                drafter.start(sequence)
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
        begin = time.perf_counter()
        picks = self.scheduler.pick()
        if not picks:
            return []
        emits = [pick.emits for pick in picks]
        plan = self.planner.plan([pick.sequence for pick in compress(picks, emits)], len(picks))
        planned = time.perf_counter()
        drafts, bets = self._propose(picks, iter(plan.bets))
        drafted = time.perf_counter()
        batch = pack(picks, drafts, self.table)
        logits = self.model.forward(batch, self.store)
        ran = time.perf_counter()
        emitting = [pick.sequence for pick in compress(picks, emits)]
        guesses = list(compress(drafts, emits))
        verdicts = judge(logits, emitting, guesses, self.model.draw) if emitting else []
        judged = time.perf_counter()
        outcomes = [
            Outcome(s, bet, len(draft), max(draft.depths, default=0), len(verdict.accepted))
            for s, bet, draft, verdict in zip(emitting, plan.bets, guesses, verdicts, strict=True)
        ]
        events = self._commit(picks, drafts, bets, iter(verdicts))
        self.record = StepRecord(
            rows=batch.rows,
            sequences=len(picks),
            known=sum(pick.known for pick in picks),
            drafted=sum(map(len, drafts)),
            accepted=sum(len(v.accepted) for v in verdicts),
            emitted=sum(len(e.token_ids) for e in events),
            plan_s=planned - begin,
            draft_s=drafted - planned,
            target_s=ran - drafted,
            verify_s=judged - ran,
            total_s=time.perf_counter() - begin,
            outcomes=outcomes,
            reasons=plan.reasons,
        )
        self.planner.observe(self.record)
        if self.settings.check_integrity:
            self.table.check()
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

    def _propose(self, picks: list[Pick], bets: Iterator[Bet]) -> tuple[list[Draft], list[Bet]]:
        """Guesses for the sequences that are done reading, with slots for every node at the end of their
        row.
        """
        drafts = [NO_DRAFT] * len(picks)
        placed = [next(bets) if pick.emits else NO_BET for pick in picks]
        by_drafter: dict[str, list[int]] = {}
        for i, bet in enumerate(placed):
            if bet.nodes > 0:
                by_drafter.setdefault(bet.drafter, []).append(i)
        for name, asked in by_drafter.items():
            proposed = self.drafters[name].propose(
                [picks[i].sequence for i in asked], [placed[i] for i in asked]
            )
            for i, draft in zip(asked, proposed, strict=True):
                sequence = picks[i].sequence
                try:
                    self.table.extend(sequence.row, len(draft))
                    drafts[i] = draft
                except CacheFull:  # a guess is never worth another sequence's place
                    continue
                sequence.drafted += len(draft)
        return drafts, placed

    def _commit(
        self, picks: list[Pick], drafts: list[Draft], bets: list[Bet], verdicts: Iterator[Verdict]
    ) -> list[Event]:
        events = []
        for pick, draft, bet in zip(picks, drafts, bets, strict=True):
            sequence = pick.sequence
            before, emits = sequence.cached, pick.emits
            verdict = next(verdicts) if emits else None
            accepted = verdict.accepted if verdict else []
            self.table.commit(sequence.row, before + pick.known, accepted)
            sequence.cached = before + pick.known + len(accepted)
            if before < sequence.prompt_len <= sequence.cached:
                self.scheduler.prompt_read(sequence)
            if verdict:
                events.append(self._emit(sequence, draft, bet, verdict))
        return events

    def _emit(self, sequence: Sequence, draft: Draft, bet: Bet, verdict: Verdict) -> Event:
        """Append the verdict's tokens one by one, stopping where the request says, and make the event."""
        writer, shown, taken = self.writers[sequence], "", 0
        origins = _origins(draft, verdict)
        for token, origin in zip(verdict.tokens, origins, strict=True):
            sequence.tokens.append(token)
            sequence.origins.append(origin)
            taken += 1
            text, reason = self._write(sequence, writer, token)
            shown += text
            if reason:
                sequence.finish_reason = reason
                break
        sequence.steps += 1
        sequence.accepted += sum(origin == "accepted" for origin in origins[:taken])
        logprobs = None
        if verdict.logprobs is not None:
            logprobs = tuple(verdict.logprobs[:taken])
            sequence.logprobs.extend(logprobs)
        if bet.nodes > 0:
            self.drafters[bet.drafter].accept(sequence, draft, verdict)
        if sequence.finish_reason:
            sequence.cached = min(sequence.cached, len(sequence.tokens))
            self._end(sequence)
        emitted = tuple(sequence.tokens[len(sequence.tokens) - taken :])
        return Event(sequence.request.id, sequence.choice, emitted, shown, sequence.finish_reason, logprobs)

    def _write(self, sequence: Sequence, writer: Writer, token: int) -> tuple[str, FinishReason | None]:
        """The text a token adds, and why it is the last, if it is."""
        request = sequence.request
        written = len(sequence.tokens) - sequence.prompt_len
        if token in request.stop_ids:
            return writer.finish(), "stop"
        text, stopped = writer.feed(token, armed=written >= request.params.min_tokens)
        if stopped:
            return text, "stop"
        if sequence.grammar is not None:
            sequence.grammar.advance(token)
            if sequence.grammar.complete:
                return text + writer.finish(), "stop"
        if written >= request.params.max_tokens:
            return text + writer.finish(), "length"
        return text, None

    def _end(self, sequence: Sequence) -> None:
        for drafter in self.drafters.values():
            drafter.stop(sequence)
        self.planner.forget(sequence)
        self.scheduler.finish(sequence)
        del self.writers[sequence]
        siblings = self.live[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.live[sequence.request.id]


def _origins(draft: Draft, verdict: Verdict) -> list[Origin]:
    """Where each token came from: a guess that held, the target's correction, or its free token at the end."""
    if not draft:
        return ["plain"]
    last = verdict.accepted[-1] if verdict.accepted else -1
    ending: Origin = "recovered" if last in draft.parents else "bonus"
    guessed: list[Origin] = ["accepted"] * len(verdict.accepted)
    return [*guessed, ending]
