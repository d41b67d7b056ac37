"""Loads a server with many streaming clients for minutes. Some hang up, some send nonsense and some read slowly.

    python -m bench.serve_load smollm2-135m --minutes 5 [--prompts FILE.jsonl] [--json OUT.json] [-- SERVER FLAGS]

Every request is seeded and answered once alone before the load. Under load an answer must equal that answer, and an
answer that its client broke off must be its beginning. Some answers follow a grammar, some one that no request had
before. The cache is small, so that sequences are preempted. Checked at the end: no answer is lost or mixed up, no queue
entry is left, every slot of the cache is free (a request that needs them all is answered), the queue kept its limit,
and memory, descriptors and threads of the server's processes are flat after a warm-up of a fifth of the time. Then
SIGTERM under load: every stream finishes or ends with an error event, the server exits in time and leaves no process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench.serving import Connection, Server, arguments, ask, deliver, make_parser, read_prompts

from outrider.bench.prompts import BUILT_IN
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder

CHAT = "/v1/chat/completions"
KINDS = {"abort": 0.30, "bad": 0.10, "slow": 0.10, "grammar": 0.05}  # shares; the rest are ordinary
PATIENCE = 600.0  # seconds after which an answer counts as lost: the server's own limit for a request
DRAIN = 20.0
LEAVE = 8.0  # seconds after the drain: the engine's five and the last connections' two, and one

GRAMMAR = "[A-Z][a-z]{2,9}(,? [a-z]{2,9}){4,20}[.]"
HELLO = [{"role": "user", "content": "hello"}]
NONSENSE: list[tuple[str, Any, int]] = [
    (CHAT, b'{"messages": [', 400),
    (CHAT, b'{"messages": "\xff"}', 400),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 400),
    (CHAT, {"messages": HELLO, "n": 0}, 400),
    (CHAT, {"messages": HELLO, "max_tokens": 10**7}, 400),
    (CHAT, {"messages": HELLO, "stream": True, "logit_bias": {"-1": 1}}, 400),
    (CHAT, {"messages": HELLO, "stream": True, "structured_outputs": {"regex": "("}}, 400),
    (CHAT, {"messages": HELLO, "model": "another"}, 404),
    ("/v1/nothing", {}, 404),
]


@dataclass
class Case:
    """A request and the answer it got alone."""

    body: dict[str, Any]
    text: str = ""
    reason: str | None = None
    tokens: int = 0


@dataclass
class Tally:
    """What happened, and what was wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    queued: int = 0  # answers that had waited
    ids: set[str] = field(default_factory=set)
    held: list[dict[str, float]] = field(default_factory=list)  # by the server's processes, once a second
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


class Refused(Exception):
    """The server refused the request for now."""

    def __init__(self, code: str, seconds: float) -> None:
        super().__init__(code)
        self.code, self.seconds = code, seconds


class Failed(Exception):
    """A stream ended with an error event."""


class Unanswered(Exception):
    """The connection was refused, or closed before an answer began."""


# -------------------------------------------------------------------------------------------------- asking


class Reading:
    """An answer while it streams in."""

    def __init__(self, connection: Connection, case: Case, tally: Tally) -> None:
        self.connection, self.case, self.tally = connection, case, tally
        self.text = ""
        self.reason: str | None = None
        self.tokens = 0
        self.name = ""
        self.failed = ""  # the code of the error it ended with

    async def start(self) -> None:
        self.connection.send("POST", CHAT, self.case.body)
        status = await self.connection.head()
        if status != 200:
            reply = b"".join([part async for part in self.connection.parts()])
            error = json.loads(reply)["error"]
            if status != 503 or "retry-after" not in self.connection.headers:
                raise RuntimeError(f"status {status}: {error}")
            raise Refused(error["code"], int(self.connection.headers["retry-after"]))

    async def steps(self) -> AsyncIterator[None]:
        async for event in self.connection.events():
            self._take(event)
            yield

    async def read(self) -> None:
        await self.start()
        async for _ in self.steps():
            pass

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failed = event["error"]["code"] or "?"
            return
        self.name = self.name or event["id"]
        if event["id"] != self.name:
            raise RuntimeError(f"a stream of {self.name} has an event of {event['id']}")
        for choice in event["choices"]:
            said = choice["delta"].get("content") or ""
            self.text += said
            self.reason = choice["finish_reason"] or self.reason
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]
            self.tally.queued += event["metrics"]["queue_time_ms"] > 0

    def check_whole(self) -> None:
        if self.failed:
            raise Failed(self.failed)
        got = (self.text, self.reason, self.tokens)
        if got != (self.case.text, self.case.reason, self.case.tokens):
            raise RuntimeError(f"another answer than alone: {got} for {self.case}")
        if self.name in self.tally.ids:
            raise RuntimeError(f"{self.name} came twice")
        self.tally.ids.add(self.name)

    def check_beginning(self) -> None:
        if not self.case.text.startswith(self.text):
            raise RuntimeError(f"another beginning than alone: {self.text!r} for {self.case}")


class Crowd:
    """The clients. `stopping` is set once the server got SIGTERM."""

    def __init__(self, server: Server, cases: Sequence[Case], seed: int) -> None:
        self.server, self.cases, self.seed = server, cases, seed
        self.tally = Tally()
        self.stopping = False
        self.until = 0.0
        self._numbers = itertools.count()

    async def run(self, clients: int, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._client(random.Random(f"{self.seed} {next(self._numbers)}")))

    async def _client(self, chance: random.Random) -> None:
        await asyncio.sleep(chance.uniform(0, 1))
        while time.monotonic() < self.until:
            [kind] = chance.choices([*KINDS, "plain"], [*KINDS.values(), 1 - sum(KINDS.values())])
            case = chance.choice(self.cases)
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._one(kind, case, chance)
                self.tally.outcomes[kind] += 1
            except Refused as refusal:
                self.tally.outcomes[f"refused: {refusal.code}"] += 1
                if self.stopping:
                    return
                await asyncio.sleep(refusal.seconds * chance.uniform(1, 1.5))
            except Failed as ending:
                self.tally.outcomes[f"failed: {ending}"] += 1
                if not self.stopping:
                    self._wrong(kind, ending)
            except Exception as problem:
                if self.stopping and isinstance(problem, Unanswered):
                    return
                self._wrong(kind, problem)

    def _wrong(self, kind: str, problem: BaseException) -> None:
        self.tally.outcomes["wrong"] += 1
        self.tally.wrong.append(f"{kind}: {problem!r}")

    async def _one(self, kind: str, case: Case, chance: random.Random) -> None:
        try:
            connection = await Connection.open(self.server.host, self.server.port, small=kind == "slow")
        except OSError as problem:
            raise Unanswered(repr(problem)) from None
        try:
            await self._talk(connection, kind, case, chance)
        except (OSError, asyncio.IncompleteReadError) as problem:
            if connection.status:
                raise
            raise Unanswered(repr(problem)) from None
        finally:
            connection.close()

    async def _talk(self, connection: Connection, kind: str, case: Case, chance: random.Random) -> None:
        if kind == "bad":
            await self._nonsense(connection, *chance.choice(NONSENSE))
            return
        if kind == "grammar":
            await self._new_grammar(connection, case, next(self._numbers))
            return
        reading = Reading(connection, case, self.tally)
        if kind == "abort":
            await self._leave_early(reading, chance)
            return
        await reading.start()
        async for _ in reading.steps():
            if kind == "slow":
                await asyncio.sleep(chance.uniform(0, 0.1))
        reading.check_whole()

    async def _leave_early(self, reading: Reading, chance: random.Random) -> None:
        """Hangs up before the answer begins, or in the middle of it."""
        if chance.random() < 0.2:
            reading.connection.send("POST", CHAT, reading.case.body)
            await asyncio.sleep(chance.uniform(0, 0.05))
            return
        await reading.start()
        left = chance.randint(0, reading.case.tokens // 2)
        async for _ in reading.steps():
            left -= 1
            if left < 0:
                break
        reading.check_beginning()

    async def _new_grammar(self, connection: Connection, case: Case, number: int) -> None:
        """An answer to a grammar that is compiled for it alone."""
        body = {**case.body, "structured_outputs": {"regex": f"{number}: [a-z]{{3,9}}( [a-z]{{2,8}}){{1,3}}"}}
        reading = Reading(connection, Case({**body, "max_tokens": 64}), self.tally)
        await reading.read()
        if reading.failed:
            raise Failed(reading.failed)
        if not reading.text.startswith(f"{number}: "):
            raise RuntimeError(f"the answer to grammar {number} is {reading.text!r}")

    async def _nonsense(self, connection: Connection, path: str, body: Any, expected: int) -> None:
        reply = await connection.ask("POST", path, body)
        if reply.status == 503 and "retry-after" in reply.headers:
            raise Refused(reply.json()["error"]["code"], int(reply.headers["retry-after"]))
        if reply.status != expected or not reply.json()["error"]["message"]:
            raise RuntimeError(f"{body!r} had {reply.status} {reply.body[:200]!r}, not {expected}")

    async def watch(self) -> None:
        """Samples the processes and the queue once a second, until cancelled."""
        begin = time.monotonic()
        while True:
            gauges = await self.server.metrics()
            self.tally.waiting.append(int(gauges["num_requests_waiting"]))
            self.tally.running.append(int(gauges["num_requests_running"]))
            self.tally.held.append({"seconds": time.monotonic() - begin, **self.server.held()})
            await asyncio.sleep(1)


# ------------------------------------------------------------------------------------------------ the phases


async def asked_alone(server: Server, case: Case) -> tuple[str, str | None, int]:
    connection = await Connection.open(server.host, server.port)
    with contextlib.closing(connection):
        reading = Reading(connection, case, Tally())
        await reading.read()
    if reading.failed:
        raise SystemExit(f"alone, {case.body} ended with {reading.failed}")
    return reading.text, reading.reason, reading.tokens


def cases_of(prompts: Sequence[str], tokens: int, seed: int) -> list[Case]:
    """Long and short answers, greedy and sampled, with and without drafts, some with a grammar."""
    chance = random.Random(seed)
    return [
        Case(
            {
                "messages": [{"role": "user", "content": prompt}],
                "seed": seed + number,
                "temperature": (0, 0.8, 1)[number % 3],
                "max_tokens": chance.randint(max(1, tokens // 8), tokens),
                "speculative_decoding": (True, {"depth": 4}, False)[number % 3],
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"structured_outputs": {"regex": GRAMMAR}} if number % 4 == 3 else {}),
            }
        )
        for number, prompt in enumerate(prompts)
    ]


async def idle(server: Server, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gauges = await server.metrics()
        if not gauges["num_requests_running"] and not gauges["num_requests_waiting"]:
            return True
        await asyncio.sleep(0.1)
    return False


async def whole_cache_is_free(server: Server, slots: int) -> bool:
    """Asks for an answer that needs every slot: it fails if one is lost."""
    body = {"prompt": [5] * (slots - 8), "max_tokens": 8, "ignore_eos": True, "cache_salt": "all of it"}
    try:
        async with asyncio.timeout(120):
            reply = await ask(server.host, server.port, "POST", "/v1/completions", body)
    except TimeoutError:
        return False
    return reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 8


async def stopped_under_load(server: Server, crowd: Crowd, clients: int, busy: float) -> dict[str, Any]:
    """Sends SIGTERM under load. Returns the seconds to exit, the exit code and processes left behind."""
    family = [psutil.Process(server.process.pid), server.engine()]
    before = dict(crowd.tally.outcomes)
    load = asyncio.create_task(crowd.run(clients, 10 * PATIENCE))
    await asyncio.sleep(busy)
    crowd.stopping = True
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        code: int | None = await asyncio.to_thread(server.process.wait, DRAIN + LEAVE)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - begin
    await asyncio.wait_for(load, 30)
    left = [p.pid for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    outcomes = {kind: n - before.get(kind, 0) for kind, n in crowd.tally.outcomes.items()}
    outcomes = {kind: n for kind, n in outcomes.items() if n}
    return {"code": code, "seconds": seconds, "left": left, "outcomes": outcomes}


def flat(samples: Sequence[float], slack: float) -> tuple[bool, float, float]:
    """Whether the samples stay level, and their medians in the second fifth of the time and in the last."""
    fifth = max(1, len(samples) // 5)
    early = statistics.median(samples[fifth : 2 * fifth] or samples)
    late = statistics.median(samples[-fifth:])
    return late - early <= max(slack, 0.03 * early), early, late


async def measure(server: Server, given: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Any]:
    cases = cases_of(prompts, given.tokens, given.seed)
    for case in cases:
        case.text, case.reason, case.tokens = await asked_alone(server, case)
    note(f"{len(cases)} answers known; {given.clients} clients for {given.minutes:g} minutes")
    crowd = Crowd(server, cases, given.seed)
    tally = crowd.tally
    watch = asyncio.create_task(crowd.watch())
    begin = time.monotonic()
    await crowd.run(given.clients, 60 * given.minutes)
    seconds = time.monotonic() - begin
    if watch.done():
        watch.result()  # it only ends if something is wrong
    watch.cancel()
    checks = {"idle at the end": await idle(server, 30)}
    checks["every slot is free"] = await whole_cache_is_free(server, given.cache_tokens)
    checks["answers as before"] = [
        await asked_alone(server, case) == (case.text, case.reason, case.tokens) for case in cases[:4]
    ] == [True] * len(cases[:4])
    totals = await server.metrics()
    checks["the engine never died"] = totals.get("engine_restarts_total", 0) == 0
    checks["the queue kept its limit"] = max(tally.waiting) <= given.queue
    checks["sequences kept their limit"] = max(tally.running) <= given.sequences
    held: dict[str, list[float]] = {}
    for name in tally.held[0].keys() - {"seconds"}:
        level, *held[name] = flat([row[name] for row in tally.held], given.slack)
        checks[f"{name} is flat"] = level
    during = dict(tally.outcomes)
    stop = await stopped_under_load(server, crowd, given.clients, min(5.0, 20 * given.minutes))
    checks["nothing lost or mixed up"] = not tally.wrong
    checks["left in time"] = stop["code"] == 0 and stop["seconds"] <= DRAIN + LEAVE
    checks["no process left behind"] = not stop["left"]
    return {
        "seconds": seconds,
        "outcomes": during,
        "wrong": tally.wrong[:20],
        "queued": tally.queued,
        "waiting_most": max(tally.waiting),
        "running_most": max(tally.running),
        "preemptions": totals["num_preemptions_total"],
        "tokens": totals["generation_tokens_total"],
        "disconnects": totals.get("client_disconnects_total", 0),
        "held": held,
        "held_over_time": tally.held,
        "stop": stop,
        "checks": checks,
    }


def show(report: dict[str, Any]) -> None:
    print("| | |\n|---|---|")
    for kind, count in sorted(report["outcomes"].items()):
        print(f"| {kind} | {count} |")
    for name in ("queued", "waiting_most", "running_most", "preemptions", "disconnects", "tokens"):
        print(f"| {name.replace('_', ' ')} | {report[name]:g} |")
    for name, (early, late) in sorted(report["held"].items()):
        print(f"| {name}, early -> late | {early:.1f} -> {late:.1f} |")
    stop = report["stop"]
    print(f"| after SIGTERM | code {stop['code']} in {stop['seconds']:.1f} s; {stop['outcomes']} |")
    for name, good in report["checks"].items():
        print(f"| {name} | {'yes' if good else '**NO**'} |")
    for line in report["wrong"][:10]:
        print(line[:500])


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--prompts", type=Path, help="a JSON-lines file; a dozen built-in ones without it")
    parser.add_argument("--limit", type=int, default=32, help="prompts to use of it")
    parser.add_argument("--tokens", type=int, default=64, help="of the longest answer")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--queue", type=int, default=40, help="requests that may wait; others are refused")
    parser.add_argument("--cache-tokens", type=int, default=1024)
    parser.add_argument("--slack", type=float, default=8.0, help="what is flat may grow by: MB, or a number")
    parser.add_argument("--seed", type=int, default=0)
    given = arguments(parser)
    config = open_checkpoint(find(given.model, cache_folder())).config
    if config is None:
        raise SystemExit("the size of this model's cache is not known")
    flags = {
        "--context": given.cache_tokens,
        "--cache-bytes": given.cache_tokens * config.kv_bytes_per_token,
        "--max-sequences": given.sequences,
        "--max-queued-requests": given.queue,
        "--request-timeout": PATIENCE,
        "--drain-seconds": DRAIN,
        "--log-level": "warning",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    longest = given.cache_tokens  # characters; no prompt may fill the cache
    prompts = read_prompts(given.prompts, given.limit, longest) if given.prompts else list(BUILT_IN)
    with Server(given.model, *words, *given.flags) as server:
        report = asyncio.run(measure(server, given, prompts))
    report["checks"]["nothing in the log"] = not [line for line in server.log if " error " in line]
    show(report)
    deliver(given.json, "bench.serve_load", report)
    return 0 if all(report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
