"""The engine as the API process sees it: another process, started here, watched here, started again if it dies.

`open` hands requests over and gives a `Stream` of what comes back. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence as Seq

from outrider.errors import InvalidRequest
from outrider.serve import link
from outrider.serve.draft_swaps import DraftSwaps
from outrider.serve.errors import ApiError, from_invalid
from outrider.serve.grammars import Grammars
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel
from outrider.serve.settings import ServeSettings
from outrider.serve.stream import Job, Stream, too_late
from outrider.serve.turns import Turns
from outrider.types import SamplingParams

log = logging.getLogger(__name__)

RESTART_WINDOW = 600.0  # seconds in which restarts are counted
STALLED = 60.0  # seconds without a step, while there is work, after which the engine is not well
SILENT = 10.0  # seconds without an answer to a ping, after which the engine is not well
PING_SECONDS = 2.0  # between two pings
START_TRIES = 60  # where the system has nothing left to start an engine with
START_DELAY = 1.0  # seconds between them
KILL_AFTER = 5.0  # seconds an engine has to leave once asked to


class Backend:
    engine_module = "outrider.serve.engine_process"  # what is run in the engine's process

    def __init__(self, start: link.Start, settings: ServeSettings, metrics: Metrics, name: str = "") -> None:
        """`name`: what clients call the model."""
        self.start, self.settings, self.metrics, self.name = start, settings, metrics, name or start.model
        self.state = "loading"  # ready, lost (being started again), failed, stopped
        self.problem = ""  # why it failed
        self.progress: float | None = None  # share of the weights that is read, while they are read
        self.model: ServedModel | None = None
        self.jobs: dict[str, Job] = {}
        self.queued = 0
        self.queued_tokens = 0
        self.ready = asyncio.Event()
        self.last_received = 0.0
        self.launched = 0.0
        self.finished: deque[float] = deque(maxlen=32)  # when requests ended: how fast the queue moves
        self.grammars: Grammars | None = None  # from the first engine on
        self.compiling = Turns(link.COMPILERS)  # of clients whose grammars the engine compiles
        self.swaps = DraftSwaps(self._send, metrics)
        self._present: set[int] = set()  # what requests were there when an engine died, by what they ask for
        self._names = itertools.count()
        self._salt = os.urandom(6).hex()
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._pinged: float | None = None  # when a ping was sent that has no answer yet
        self.last_life = False  # an engine that dies is not to be started again

    async def run(self) -> bool:
        """Keep an engine running until asked to stop. False: it cannot be kept running. May be called again after."""
        self.state, self.problem = "loading", ""
        try:
            return await self._lives()
        finally:
            self._stopping = False
            if self.grammars is not None:
                await self.grammars.close()
                self.grammars = None

    async def _lives(self) -> bool:
        deaths: deque[float] = deque()
        while not self._stopping:
            code = await self._one_life()
            if self._stopping or self.last_life:
                break
            if self.state == "failed":
                return False
            now = time.monotonic()
            deaths.append(now)
            while deaths and deaths[0] < now - RESTART_WINDOW:
                deaths.popleft()
            if len(deaths) > self.settings.engine_restarts:
                self.state, self.problem = "failed", f"the engine died {len(deaths)} times"
                log.critical("the engine keeps dying; giving up", extra={"facts": {"exit": code}})
                return False
            log.error("the engine died; starting it again", extra={"facts": {"exit": code}})
            self.metrics.count("engine_restarts")
            await asyncio.sleep(0.2 * len(deaths))
        self.state = "stopped"
        return True

    async def _one_life(self) -> int:
        """Start an engine and listen to it until it is gone."""
        self.metrics.engine_started()
        for attempt in range(1, START_TRIES + 1):
            try:
                reader = await self._started()
                break
            except OSError as problem:  # no descriptors, no memory, no processes left: that may pass
                facts = {"reason": problem.strerror, "attempt": attempt}
                log.error("the engine cannot be started; trying again", extra={"facts": facts})
                if attempt == START_TRIES:
                    self.state, self.problem = "failed", f"the engine cannot be started: {problem.strerror}"
                if attempt == START_TRIES or self._stopping:
                    return -1
                await asyncio.sleep(START_DELAY)
        assert self._process is not None and self._writer is not None
        if self._stopping:
            self.stop()  # there was nothing to stop before
        self._send(self.start)
        self._pinged, pings = None, asyncio.create_task(self._ping())
        try:
            while (message := await link.receive_event(reader)) is not None:
                await self._handle(message)
        finally:
            pings.cancel()
            self._lost()
            self._writer.close()
        return await self._leave(self._process)

    async def _started(self) -> asyncio.StreamReader:
        self.launched = time.monotonic()
        ours, theirs = socket.socketpair()
        try:
            # -P: what lies in the working directory, a downloaded model's torch.py say, is not ours to run.
            command = [sys.executable, "-P", "-m", self.engine_module, str(theirs.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        return reader

    async def _leave(self, process: asyncio.subprocess.Process) -> int:
        """Its socket is closed, so it ends by itself, or is killed."""
        try:
            return await asyncio.wait_for(process.wait(), KILL_AFTER)
        except TimeoutError:
            self._kill(process)
            return await process.wait()

    def stop(self) -> None:
        """Have the engine leave; `run` returns when it has."""
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and not self.ready.is_set():
            self._kill(self._process)  # while it loads it does not listen
        self.ready.clear()

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    @property
    def well(self) -> bool:
        """Takes requests, answers pings, and moves while it has requests."""
        now = time.monotonic()
        moving = not self.jobs or now - self.last_received < STALLED
        answering = self._pinged is None or now - self._pinged < SILENT
        return self.state == "ready" and moving and answering

    async def _ping(self) -> None:
        """Sends pings. A process that is stopped or waits for its disk does not answer."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self.state == "ready" and self._pinged is None:
                self._pinged = time.monotonic()
                self._send(link.Ping())

    def _lost(self) -> None:
        if self.state != "failed":
            self.state = "lost"
        self.ready.clear()
        self.progress = None
        self.swaps.lost()
        blamed = self._blamed()
        for job in blamed:
            job.fail(
                ApiError(
                    500, "the engine stopped, and this request may be why: change it", code="engine_lost"
                )
            )
        self.drop(blamed)
        self.fail_all(ApiError(503, "the engine stopped; try again", code="engine_lost", after=5))
        self.metrics.gauges.update(engine_up=0, prepared=0, num_requests_running=0, kv_cache_usage_perc=0)

    def _blamed(self) -> list[Job]:
        """Requests that may have killed the engine, whose clients must not try again: the only one, those it was
        compiling for, and those that an engine died of before.
        """
        sent = [job for job in self.jobs.values() if job.sent]
        marks = {job.id: hash((tuple(job.prompt), str(job.params))) for job in sent}
        compiling = [job for job in sent if job.params.grammar is not None and not job.compiled.is_set()]
        again = [job for job in sent if marks[job.id] in self._present and job not in compiling]
        self._present = set(marks.values())
        return sent if len(sent) == 1 else [*compiling, *again]

    def fail_all(self, error: ApiError) -> None:
        for job in list(self.jobs.values()):
            job.fail(error)
            self.drop([job])

    async def _handle(self, message: object) -> None:
        if isinstance(message, link.Pong):
            self._pinged = None
            return
        self.last_received = time.monotonic()
        if isinstance(message, link.Progress):
            self._progress(message)
        elif isinstance(message, link.Accepted):
            if (job := self.jobs.get(message.id)) and not job.accepted.done():
                job.accepted.set_result(message.seed)
        elif isinstance(message, link.Compiled):
            if job := self.jobs.get(message.id):
                job.compiled.set()
        elif isinstance(message, link.Refused):
            self._refused(message)
        elif isinstance(message, link.Swapped):
            self.swaps.received(message)
        elif isinstance(message, link.Ready):
            self.model = await asyncio.to_thread(ServedModel, self.name, message)
            self.progress = None
            self.model.plan["seconds"] = self._seconds()
            if self.grammars is None:
                self.grammars = Grammars(message, self.settings.grammar_timeout, self.metrics)
                self.grammars.warm_up()
            self.state = "ready"
            self.metrics.gauges["engine_up"] = 1
            self.metrics.cache_config(message.cache_block, message.cache_tokens // message.cache_block)
            if memory := message.plan.get("memory"):
                log.info("memory", extra={"facts": memory})
            self.swaps.started(message.drafts, self.settings.request_timeout)
            gc.freeze()  # what is there stays: a full look at it would hold up every stream for some ms
            self.ready.set()
        elif isinstance(message, link.Prepared):
            self.metrics.gauges["prepared"] = 1
            log.info("every step is prepared", extra={"facts": {"seconds": self._seconds()}})
        elif isinstance(message, link.Loading):
            self.progress = message.done / max(1, message.total)
        elif isinstance(message, link.Failed):
            self.state, self.problem = "failed", message.message

    def _seconds(self) -> float:
        """Since the engine was started."""
        return round(time.monotonic() - self.launched, 1)

    def _refused(self, message: link.Refused) -> None:
        if job := self.jobs.get(message.id):
            if message.fault:
                job.fail(ApiError(500, message.message))
            else:
                job.fail(from_invalid(InvalidRequest(message.message, message.param)))
            self._forget(job)

    def _progress(self, message: link.Progress) -> None:
        for name in message.started:
            if job := self.jobs.get(name):
                self._began(job)
                self.metrics.count("prompt_tokens", len(job.prompt))
        moved: dict[Stream, None] = {}
        for piece in message.pieces:
            if job := self.jobs.get(piece.id):
                job.receive(piece)
                moved[job.stream] = None
                if not job.left:
                    self._forget(job)
        for stream in moved:  # once each: several of its choices may have moved
            stream.deliver()
        if message.step is not None:
            self.metrics.step(message.step)
        self.metrics.fill(message.gauges)

    def _send(self, message: link.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(link.pack(message))

    async def open(
        self,
        prompts: Seq[tuple[list[int], SamplingParams]],
        owner: str,
        client: str,
        deadline: float,
        background: bool = False,
    ) -> Stream:
        """Start one job a prompt. Returns once the engine has taken them all, or raises why not. Grammars are compiled
        `client` by client. Background jobs take no place in the queue: their number is bounded where they begin.
        """
        if self.state != "ready":
            raise ApiError(503, f"the engine is not ready: {self.state}", code=self.state, after=2)
        self.refuse_when_full(
            *((0, 0) if background else (len(prompts), sum(len(one) for one, _ in prompts)))
        )
        if not self.jobs:
            self.last_received = time.monotonic()  # silence before the first request is no stall
        stream = Stream(self.drop)
        try:
            for index, (prompt, params) in enumerate(prompts):
                job = Job(stream, index, f"{self._salt}-{next(self._names)}", prompt, params, background)
                stream.jobs.append(job)
                self.jobs[job.id] = job
                if not job.began:
                    self.count_queued(1, len(prompt))
            async with asyncio.timeout_at(deadline):
                await self._submit(stream.jobs, owner, client)
                for job in stream.jobs:
                    job.seed = await job.accepted  # which happens between steps
        except TimeoutError:
            stream.close()
            raise too_late() from None
        except BaseException:
            stream.close()
            raise
        return stream

    async def _submit(self, jobs: Seq[Job], owner: str, client: str) -> None:
        """Let nothing reach the engine that its compiler may die of, nor more grammars than it compiles at once."""
        for job in jobs:
            if job.params.grammar is not None and self.grammars is not None:
                await self.grammars.check(job.params.grammar, client)
        for job in jobs:
            if job.params.grammar is None:
                self._hand_over(job, owner)
                continue
            await self.compiling.begin(client, 0)
            try:
                self._hand_over(job, owner)
                await self._compiled(job)
            finally:
                self.compiling.end(client)
            if job.accepted.done():
                job.accepted.result()  # one that was refused has no need of the others

    def _hand_over(self, job: Job, owner: str) -> None:
        if job.id in self.jobs:  # else the engine died meanwhile
            self._send(link.Submit(job.id, job.prompt, job.params, owner, job.background))
            job.sent = True

    async def _compiled(self, job: Job) -> None:
        limit = self.settings.grammar_timeout
        try:
            async with asyncio.timeout(limit):
                await job.compiled.wait()
        except TimeoutError:
            raise ApiError(
                400, f"the grammar took longer than {limit:g} s to compile", param="grammar"
            ) from None

    def refuse_when_full(self, requests: int, tokens: int) -> None:
        for reason, held, more, most in (
            ("requests", self.queued, requests, self.settings.max_queued_requests),
            ("tokens", self.queued_tokens, tokens, self.settings.max_queued_tokens),
        ):
            if held + more > most:
                self.metrics.count("admission_rejections", reason=f"queued_{reason}")
                raise ApiError(
                    503,
                    f"the queue is full: {held} {reason} wait, at most {most} may",
                    code="queue_full",
                    after=self._patience(),
                )

    def drop(self, jobs: Seq[Job]) -> None:
        for job in jobs:
            if job.id in self.jobs:
                self._forget(job)
                if job.left:
                    self._send(link.Abort(job.id))

    def _patience(self) -> float:
        """Seconds until a few places in the queue should be free, from how fast requests ended lately."""
        if len(self.finished) < 2:
            return 5.0
        rate = len(self.finished) / max(1e-3, time.monotonic() - self.finished[0])
        return min(60.0, max(1.0, 4 / rate))

    def _began(self, job: Job) -> None:
        if not job.began:
            job.began = True
            self.count_queued(-1, -len(job.prompt))

    def count_queued(self, requests: int, tokens: int) -> None:
        self.queued += requests
        self.queued_tokens += tokens
        self.metrics.gauges["num_requests_waiting"] = self.queued

    def _forget(self, job: Job) -> None:
        del self.jobs[job.id]
        self._began(job)
        self.finished.append(time.monotonic())

    async def wait_idle(self, seconds: float) -> bool:
        """Waits for all requests to end. Returns whether they did in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.jobs:
                    await asyncio.sleep(0.02)
        return not self.jobs
