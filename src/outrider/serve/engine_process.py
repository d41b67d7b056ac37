"""The engine process: `python -m outrider.serve.engine_process FD`, started by backend.py.

Two threads. The main one takes messages from the socket and turns requests into what the engine wants; the engine's
own (driver.py) does the steps and sends what comes of them; a third sends only what the socket has no room for
(outbox.py). Grammars are compiled in a small pool, so that a slow one holds up neither a step nor another request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from outrider.cache.prefix import BLOCK, PrefixWatch
from outrider.engine.build import Watch
from outrider.engine.live_draft import DraftState
from outrider.engine.llm import LLM
from outrider.engine.memory import runs_on_gpu
from outrider.errors import InvalidRequest, OutriderError, show_cause
from outrider.load.child import become_child
from outrider.model.decoder import kv_bytes
from outrider.serve import link
from outrider.serve.log import set_up_logging
from outrider.serve.outbox import Outbox
from outrider.settings import Settings
from outrider.types import Event, Request, Sequence, StepDetail, StepRecord, TokenLogprob

log = logging.getLogger(__name__)

CHECK_SECONDS = 60  # between two counts of the cache, when idle
LEAVE_SECONDS = 5  # for the step in hand, once the API process hung up
# For steps that the first answers may do without: with compiled kernels on disk they take less.
CAPTURE_SECONDS = 30.0
# Fields that a step's message takes from its record as they are.
SAME = (
    *("rows", "sequences", "known", "answering", "drafted", "accepted", "emitted", "passes"),
    *(
        "plan_s",
        "draft_s",
        "target_s",
        "verify_s",
        "total_s",
        "plain_s",
        "graphs_captured",
        "kernels_compiled",
    ),
)
PROGRESS_PARTS = 50  # of the weights: a message for each
SAY_SECONDS = 1.0  # between steps whose reasons are put into words
# Threshold of the garbage collector's youngest generation. A step of 128 sequences spends 0.30 ms in it with Python's
# 700, 0.10 with 5,000, and 0.04 with this (log/121).
YOUNG_OBJECTS = 20_000
SWITCH_SECONDS = 0.0005  # until a thread gives the interpreter to another that waits for it; 5 ms by default


class EngineProcess:
    def __init__(self, sock: socket.socket, llm: LLM) -> None:
        self.sock, self.llm = sock, llm
        self.choices: dict[str, dict[int, Sequence]] = {}  # by request, those that have not ended
        self.waiting: dict[str, Sequence] = {}  # first choices that have not moved yet
        self.pieces: list[link.Piece] = []  # since the last step; touched by the engine's thread only
        self.prefix = Counter[str]()
        self.lock = threading.Lock()  # of the next two
        self.building: set[str] = set()  # requests whose grammar is being compiled, or their words tokenized
        self.given_up: set[str] = set()  # of those, the ones aborted meanwhile
        self.compilers = ThreadPoolExecutor(link.COMPILERS, thread_name_prefix="grammar")
        self.swaps = ThreadPoolExecutor(1, thread_name_prefix="draft")  # reads weights, beside the steps
        self.outbox = Outbox(sock)
        self.next_check = self.next_words = 0.0
        self.over = False  # the API process hung up

    def run(self) -> None:
        self.llm.driver.observer = self._after_step
        self.llm.driver.on_failure = _die  # an idle engine has no listener
        self.outbox.put(self._ready())
        self.llm.driver.post(self._watch_preparation)
        self.compilers.submit(lambda: self.llm.compiler)  # it reads the vocabulary; better now than later
        while (message := link.receive(self.sock)) is not None:
            if isinstance(message, link.Submit):
                self._submit(message)
            elif isinstance(message, link.Abort):
                self._abort(message.id)
            elif isinstance(message, link.Swap):
                self.swaps.submit(self._swap, message)
            elif isinstance(message, link.Ping):
                self.outbox.put(link.Pong())
        self.over = True
        self.outbox.close()

    def _watch_preparation(self) -> None:
        """On the engine's thread: reports when preparation ends."""
        driver = self.llm.driver

        def reported(work: Iterator[None]) -> Iterator[None]:
            yield from work
            self.outbox.put(link.Prepared())

        driver.idle_work = reported(driver.idle_work or iter(()))

    def _submit(self, message: link.Submit) -> None:
        params = message.params
        if params.grammar is None and not params.prediction and not params.bad_words:
            self._build(message)
            return
        with self.lock:
            self.building.add(message.id)
        self.compilers.submit(self._build, message)

    def _build(self, message: link.Submit) -> None:
        """Make the request and hand it to the engine. Whatever goes wrong is this request's problem alone."""
        if message.id in self.given_up:  # its grammar must not take time from others
            self._was_given_up(message.id)
            return
        try:
            request = self.llm.request(
                message.prompt, message.params, message.owner, message.id, message.background
            )
        except BaseException as error:
            self._refuse(message.id, error)
            return
        if message.params.grammar is not None:
            self.outbox.put(link.Compiled(message.id))
        try:
            self.llm.driver.post(lambda: self._add(request))
        except OutriderError as dead:
            if not self.over:
                _die(dead)

    def _add(self, request: Request) -> None:
        """On the engine's thread, between steps."""
        if self._was_given_up(request.id):
            return
        try:
            [choices] = self.llm.driver.add([request], self._on_event)
        except BaseException as error:
            self._refuse(request.id, error)
            return
        self.choices[request.id] = dict(enumerate(choices))
        self.waiting[request.id] = choices[0]
        self.outbox.put(link.Accepted(request.id, request.seed))

    def _refuse(self, request_id: str, error: BaseException) -> None:
        self._was_given_up(request_id)
        if isinstance(error, InvalidRequest):
            self.outbox.put(link.Refused(request_id, str(error), error.param))
        elif isinstance(error, OutriderError):
            self.outbox.put(link.Refused(request_id, str(error), None, fault=True))
        else:
            log.exception("a request could not be started", exc_info=error)
            self.outbox.put(link.Refused(request_id, "the request could not be started", None, fault=True))

    def _abort(self, request_id: str) -> None:
        with self.lock:
            if request_id in self.building:
                self.given_up.add(request_id)
        with contextlib.suppress(OutriderError):  # a dead engine holds nothing
            self.llm.driver.abort(request_id)
            self.llm.driver.post(lambda: self._report([], None))

    def _swap(self, message: link.Swap) -> None:
        """Exchange the draft's weights. Requests go on meanwhile, and do not notice."""
        live, driver = self.llm.live_draft, self.llm.driver
        try:
            state = live.roll_back(driver) if message.path is None else live.swap(driver, Path(message.path))
            answer = link.Swapped(message.number, _served_draft(state))
        except OutriderError as error:
            answer = link.Swapped(message.number, None, str(error))
        except Exception as error:
            log.exception("the draft could not be swapped", exc_info=error)
            answer = link.Swapped(message.number, None, "the draft could not be swapped", fault=True)
        self.outbox.put(answer)

    def _was_given_up(self, request_id: str) -> bool:
        with self.lock:
            self.building.discard(request_id)
            known = request_id in self.given_up
            self.given_up.discard(request_id)
        return known

    def _on_event(self, event: Event | BaseException) -> None:
        """On the engine's thread: gather; one message a step goes out."""
        if isinstance(event, BaseException):
            _die(event)
        own = self.choices[event.request_id]
        sequence = own[event.choice]
        done = event.finish_reason is not None
        self.pieces.append(
            link.Piece(
                event.request_id,
                event.choice,
                list(event.token_ids),
                event.text,
                event.finish_reason,
                None if event.logprobs is None else [_score(entry) for entry in event.logprobs],
                _end(sequence) if done else None,
                _prompt_scores(sequence),
                None if event.detail is None else _detail(event.detail),
            )
        )
        if done:
            del own[event.choice]  # one by one: several may end in the same step
        if not own:
            del self.choices[event.request_id]
        if event.finish_reason == "abort":
            self.waiting.pop(event.request_id, None)  # others start before they end: `_after_step` reports

    def _after_step(self, record: StepRecord) -> None:
        started = [name for name, sequence in self.waiting.items() if sequence.started]
        for name in started:
            sequence = self.waiting.pop(name)
            self.prefix["queried"] += sequence.prompt_len
            self.prefix["found"] += sequence.reused
        step = self._step(record)
        if (now := time.monotonic()) > self.next_words:
            step.said = {reason.kind: str(reason) for reason in record.reasons}
            self.next_words = now + SAY_SECONDS
        self._report(started, step)
        if self.llm.engine.idle and time.monotonic() > self.next_check:
            self._check_cache()
            self.next_check = time.monotonic() + CHECK_SECONDS

    def _check_cache(self) -> None:
        try:
            self.llm.engine.table.check()
        except AssertionError as wrong:
            _die(wrong)  # better than wrong tokens

    def _report(self, started: list[str], step: link.Step | None) -> None:
        pieces, self.pieces = self.pieces, []
        self.outbox.put(link.Progress(pieces, started, step, self._gauges()))

    def _step(self, record: StepRecord) -> link.Step:
        drafting = [o for o in record.outcomes if o.drafted]
        deepest = max((o.accepted for o in drafting), default=0)
        lossy = (o for o in drafting if o.sequence.request.params.speculation.mode == "lossy")
        return link.Step(
            **{name: getattr(record, name) for name in SAME},
            drafts=len(drafting),
            positions=sum(o.deepest for o in drafting),
            accepted_at=[sum(o.accepted > depth for o in drafting) for depth in range(deepest)],
            lossy=sum(o.accepted for o in lossy),
            reasons=dict(Counter(reason.kind for reason in record.reasons)),
            drafters=_by_drafter(record),
        )

    def _gauges(self) -> link.Gauges:
        engine = self.llm.engine
        return link.Gauges(
            running=len(engine.scheduler.running),
            cache_used=min(1.0, engine.table.held / engine.table.pool.total),
            preemptions=engine.scheduler.preemptions,
            prefix_queried=self.prefix["queried"],
            prefix_found=self.prefix["found"],
            unpaid=engine.planner.returns.unprofitable,
        )

    def _ready(self) -> link.Ready:
        llm, engine, config = self.llm, self.llm.engine, self.llm.model.config
        tokenizer, settings = llm.tokenizer, llm.settings
        slots = engine.table.pool.total
        return link.Ready(
            tokenizer=tokenizer.to_json(),
            bos_id=tokenizer.bos_id,
            eos_ids=list(tokenizer.eos_ids),
            add_bos=tokenizer.add_bos,
            template=None if llm.template is None else llm.template.source,
            special_tokens_in_text=settings.special_tokens_in_text,
            family=config.family,
            vocab=config.vocab,
            context=engine.context,
            cache_tokens=slots,
            cache_block=BLOCK,
            drafter=llm.drafter,
            drafters=list(engine.drafters.names),
            sampling=dict(llm.sampling.values),
            drafts=[_served_draft(state) for state in llm.live_draft.states.values()],
            plan={
                "pair": None if llm.pair is None else llm.pair.name,
                "device": settings.device,
                "weights": llm.weight_formats,
                "threads": settings.threads,
                "parameters": config.parameters,
                "weight_bytes": llm.model.weight_bytes(),
                "cache_bytes": slots * kv_bytes(llm.model),
                "cache_tokens": slots,
                "max_sequences": settings.max_sequences,
                "memory": None if llm.memory is None else dataclasses.asdict(llm.memory),
            },
        )


def _die(why: BaseException) -> NoReturn:
    """The API process sees the socket close, tells its clients, and starts another."""
    log.critical("the engine stopped", exc_info=why)
    logging.shutdown()  # writes the line
    os._exit(1)


def _by_drafter(record: StepRecord) -> dict[str, link.Drafted]:
    found: dict[str, link.Drafted] = {}
    for outcome in record.outcomes:
        if outcome.drafted:
            drafted = found.setdefault(outcome.draft_plan.drafter, link.Drafted())
            drafted.drafts += 1
            _count_levels(drafted.reached, outcome.deepest)
            _count_levels(drafted.accepted, outcome.accepted)
            drafted.first_accepted += outcome.top1_accepted > 0
    for name, tokens, probability in record.predicted:
        drafted = found.setdefault(name, link.Drafted())
        drafted.predicted += tokens
        drafted.probability += probability
    return found


def _count_levels(levels: list[int], depth: int) -> None:
    levels.extend([0] * (depth - len(levels)))
    for level in range(depth):
        levels[level] += 1


def _served_draft(state: DraftState) -> link.ServedDraft:
    previous = None if state.previous is None else str(state.previous)
    return link.ServedDraft(state.drafter, str(state.path), state.since, previous)


def _score(entry: TokenLogprob) -> link.Score:
    return link.Score(entry.token, entry.logprob, entry.alternatives)


def _prompt_scores(s: Sequence) -> list[link.Score | None] | None:
    if s.request.params.prompt_logprobs is None or s.choice or s.steps != 1:
        return None
    return [None if e is None else _score(e) for e in s.prompt_logprobs] or [None]


def _detail(step: StepDetail) -> link.Detail:
    reason = step.reason
    facts = [[fact if isinstance(fact, str) else float(fact) for fact in facts] for facts in reason.facts]
    return link.Detail(
        step.drafter, list(step.tokens), list(step.parents), list(step.accepted), list(step.origins),
        str(reason), reason.kind, reason.depth, facts,
    )  # fmt: skip


def _end(s: Sequence) -> link.End:
    return link.End(
        seed=s.request.seed,
        cached=s.reused,
        steps=s.steps,
        drafted=s.drafted,
        accepted=s.accepted,
        deepest=s.deepest,
        draft_counts=s.draft_counts,
        origins=list(s.origins),
        queue_s=max(0.0, s.started - s.arrived) if s.started else 0.0,
        prompt_s=max(0.0, s.first - s.started) if s.first else 0.0,
        decode_s=max(0.0, s.ended - s.first),
        problem=s.problem,
        stop=s.stop,
    )


def keep_up() -> None:
    """Keeps other work from delaying the thread that runs the steps.

    A full garbage collection of what is loaded would stop every thread for a tenth of a second, so it is frozen, and
    new objects are collected less often. Other threads give the interpreter back soon after the engine's thread asks
    for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    sys.setswitchinterval(SWITCH_SECONDS)


def prepare(llm: LLM, seconds: float) -> None:
    """Captures the steps of plain answers, then others for `seconds`. The rest follows while the engine is idle, and
    now and then between steps; a request that comes meanwhile waits for the step being captured.
    """
    llm.prepare(wait="plain")
    until = time.monotonic() + seconds
    while time.monotonic() < until and llm.driver.run(lambda: llm.driver.idle_work is not None):
        time.sleep(0.01)


def reporting(sock: socket.socket) -> Watch:
    """Tells the API process how much of the weights is read. Nothing else is sent before the model is loaded."""

    def begin(text: str, total: int) -> Callable[[int], None]:
        sent = -1

        def update(done: int) -> None:
            nonlocal sent
            if (part := PROGRESS_PARTS * done // max(1, total)) > sent:
                sent = part
                sock.sendall(link.pack(link.Loading(min(done, total), total)))

        return update

    return begin


def event_publisher(start: link.Start) -> PrefixWatch | None:
    if start.events is None:
        return None
    from outrider.serve.kv_events import EventPublisher  # pyzmq comes with it

    return EventPublisher(start.events, start.model)


def main(descriptor: int) -> int:
    become_child()
    with socket.socket(fileno=descriptor) as sock:
        start = link.receive(sock)
        if not isinstance(start, link.Start):
            return 1
        set_up_logging(*start.logging)
        try:
            settings = Settings.of(start.settings)
            if runs_on_gpu(settings):
                from outrider.model.kernels.gpu.compiling import watch_compiling  # Triton comes with it

                watch_compiling(
                    lambda: log.info("compiling kernels for this GPU: later starts find them on disk")
                )
            publisher = event_publisher(start)  # a taken port is known before anything is loaded
            llm = LLM(start.model, draft=start.draft, settings=settings, watch=reporting(sock))
            llm.engine.table.prefix.watch = publisher
            prepare(llm, CAPTURE_SECONDS if runs_on_gpu(settings) else 0.0)
        except OutriderError as error:
            show_cause(error)
            sock.sendall(link.pack(link.Failed(str(error))))
            return 1
        keep_up()
        EngineProcess(sock, llm).run()
        signal.alarm(LEAVE_SECONDS)
        llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
