"""A whole measurement: every server is checked first; then load by load and round by round, the servers in turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.serve.answer import Sample, said_in
from outrider.bench.serve.arrivals import Due, Lengths, poisson
from outrider.bench.serve.asked import CHAT, USUAL, Asked, Vocabulary, vocabulary_of
from outrider.bench.serve.client import Client, Drove, Load, failure
from outrider.bench.serve.conversations import Conversations
from outrider.bench.serve.figures import Bounds, curve, figures, over_time, pooled, ratios, raw
from outrider.bench.serve.http import Pool, Reply, Server
from outrider.bench.serve.processes import run
from outrider.errors import InvalidRequest, OutriderError

EACH_SLOT, LEAST = 4, 16  # requests of a closed loop that is given neither number nor time
USUAL_SECONDS = 30.0  # of an open one
CHECK = 60.0  # seconds that looking at a server may take
FAR = 10**9  # between the prompts of two servers that are one

Tell = Callable[[str, float], None]  # what runs, and the share of all that is done


@dataclass(frozen=True, slots=True)
class Shape:
    """One load: requests in flight, requests a second, or a trace."""

    kind: str  # concurrency, rate or trace
    value: float = 0.0

    def __str__(self) -> str:
        return self.kind if self.kind == "trace" else f"{self.kind} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is asked for."""

    servers: Sequence[Server]
    shapes: Sequence[Shape]
    path: str = CHAT
    model: str | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    input: Lengths = USUAL
    output: Lengths | None = None
    trace: Sequence[Due] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    burstiness: float = 1.0
    burst: int = 1
    requests: int | None = None
    seconds: float | None = None
    warmup: int = 0
    rounds: int = 1
    clients: int = 1
    timeout: float = 600.0
    conversations: Conversations | None = None  # `requests` of them in each round
    bounds: Bounds = field(default_factory=lambda: Bounds({}))

    def load(self, shape: Shape, at: Checked, place: int) -> Load:
        """What the round at this `place` among all of them asks of a server."""
        step = len(self.trace) or self.requests or 10**6
        common: dict[str, Any] = {"server": at.server, "asked": at.asked, "timeout": self.timeout}
        common["first"] = place * step + at.offset
        if shape.kind == "concurrency":
            enough = max(LEAST, int(EACH_SLOT * shape.value)) if self.seconds is None else None
            return Load(
                concurrency=int(shape.value),
                requests=self.requests or enough,
                seconds=self.seconds,
                conversations=self.conversations,
                **common,
            )
        return Load(arrivals=self._arrivals(shape, place), **common)

    def _arrivals(self, shape: Shape, place: int) -> list[float]:
        if shape.kind == "trace":
            return [due.at for due in self.trace if self.seconds is None or due.at < self.seconds][
                : self.requests
            ]
        if math.isinf(shape.value):
            return poisson(shape.value, self.requests or LEAST * EACH_SLOT, None, self.seed)
        seconds = self.seconds or (USUAL_SECONDS if self.requests is None else None)
        return poisson(
            shape.value, self.requests, seconds, f"{self.seed} {place}", self.burstiness, self.burst
        )

    def warming(self, shape: Shape, at: Checked, place: int) -> Load:
        """Requests that are not counted: of numbers below zero, so that no prompt comes again."""
        slots = int(shape.value) if shape.kind == "concurrency" else self.warmup
        first = -2 - (place + 1) * self.warmup
        return Load(
            at.server,
            at.asked,
            min(slots, self.warmup),
            requests=self.warmup,
            first=first,
            timeout=self.timeout,
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """A server that answers, and what to ask it."""

    server: Server
    asked: Asked
    offset: int = 0  # of its prompts' numbers
    version: str = ""

    def described(self) -> dict[str, Any]:
        return {
            "url": self.server.url,
            "model": self.asked.model,
            "version": self.version,
            "lengths_by": "rows"
            if self.asked.rows
            else "tokens"
            if self.asked.vocabulary.measured
            else "words",
        }


# ---------------------------------------------------------------------------------------------- looking at a server


async def check(server: Server, plan: Plan, offset: int) -> Checked:
    """Its model and its tokenizer; and one answer, which must stream. Raises what is wrong, with the way out."""
    pool = Pool(server)
    try:
        async with asyncio.timeout(CHECK):
            model = plan.model or await served_model(pool)
            version = await _version(pool)
            vocabulary = Vocabulary() if plan.rows else await vocabulary_of(pool, model)
    except OSError as problem:
        raise explained(server, "", *failure(problem)) from None
    finally:
        pool.close()
    asked = Asked(
        plan.path, model, plan.output, plan.input, tuple(plan.rows), vocabulary, tuple(plan.trace), plan.seed,
        plan.fields,
    )  # fmt: skip
    client = Client(server, asked, plan.timeout)
    sample: Sample = await client.ask(-1)
    client.pool.close()
    if sample.error and sample.error != "empty answer":
        raise explained(server, plan.path, sample.error, sample.said)
    return Checked(server, asked, offset, version)


async def served_model(pool: Pool) -> str:
    """The first that it serves."""
    reply = Reply()
    await pool.ask(pool.server.request("GET", "/v1/models"), reply)
    if reply.status != 200:
        raise explained(pool.server, "/v1/models", f"HTTP {reply.status}", said_in(reply.json()))
    try:
        return str(reply.json()["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise OutriderError(
            f"{pool.server.url}/v1/models names no model: give one with --model, or check --url"
        ) from None


async def _version(pool: Pool) -> str:
    """What it calls itself, where it does."""
    reply = Reply()
    await pool.ask(pool.server.request("GET", "/version"), reply)
    said = reply.json() if reply.status == 200 else None
    version = said.get("version") if isinstance(said, dict) else None
    return " ".join(str(part) for part in (reply.headers.get("server"), version) if part)


def explained(server: Server, path: str, kind: str, said: str) -> OutriderError:
    """An error of the first request, with the way out."""
    where, more = f"{server.url}{path}", f": {said}" if said else ""
    if kind in ("HTTP 401", "HTTP 403"):
        return OutriderError(
            f"{where} wants an API key ({kind}{more}); give it with --api-key or OUTRIDER_API_KEY"
        )
    if kind == "HTTP 404":
        return OutriderError(
            f"{where}: no such route or model (404{more}); --url is the server's address, with or without /v1, "
            "--model the name it serves"
        )
    methods = {
        "connection refused": "is the server up, and is the port right?",
        "no such host": "check the name in --url",
        "no HTTP": "check --url: is it https, or another port?",
        "TLS failed": "check --url: is it plain http?",
        "no stream": "without a stream the times of tokens cannot be measured",
        "timed out": "is the server busy? --timeout is how long it may take",
        "HTTP 503": "is it still starting, or full? try again when it is ready",
        "HTTP 400": "fields other servers do not know can be left out: --ignore-eos, --body",
    }
    return OutriderError(f"{where}: {kind}{more}" + (f"; {methods[kind]}" if kind in methods else ""))


# ------------------------------------------------------------------------------------------------------ the rounds


def check_plan(plan: Plan) -> None:
    if any(shape.kind == "rate" and math.isinf(shape.value) and plan.seconds for shape in plan.shapes):
        raise InvalidRequest("--rate inf sends all requests at once: give --requests, not --seconds", "rate")
    if plan.fields.get("n", 1) != 1:
        raise InvalidRequest("one answer a request is measured; leave n out of --body", "body")


def measure(plan: Plan, tell: Tell, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The report. `keep` gets it after every load, as far as it is."""
    check_plan(plan)
    found: list[Checked] = []
    for number, server in enumerate(plan.servers):
        tell(f"looking at {server.url}", 0)
        offset = FAR * number if server in plan.servers[:number] else 0  # else it would have read them before
        found.append(asyncio.run(check(server, plan, offset)))
    report: dict[str, Any] = {"servers": [checked.described() for checked in found], "loads": []}
    for number, shape in enumerate(plan.shapes):
        report["loads"].append(_shape(plan, shape, found, number, tell))
        keep(report)
    return report


def _shape(plan: Plan, shape: Shape, found: Sequence[Checked], number: int, tell: Tell) -> dict[str, Any]:
    """One load on every server, in rounds that begin with another server each."""
    rounds: list[list[list[Drove]]] = [[] for _ in found]
    steps = len(plan.shapes) * plan.rounds * len(found)
    done = number * plan.rounds * len(found)
    for turn in range(plan.rounds):
        place = number * plan.rounds + turn
        for index in _order(len(found), turn):
            at = found[index]
            if plan.warmup and not turn:
                tell(f"{shape}: warming up {at.server.url}", done / steps)
                run(plan.warming(shape, at, place), 1, lambda ended: None)
            load = plan.load(shape, at, place)
            droves = run(load, plan.clients, _progress(shape, at, load, done, steps, tell))
            rounds[index].append(droves)
            done += 1
    return _found(plan, shape, rounds)


def _order(count: int, turn: int) -> list[int]:
    return [(turn + i) % count for i in range(count)]


def _progress(
    shape: Shape, at: Checked, load: Load, done: int, steps: int, tell: Tell
) -> Callable[[int], None]:
    most = load.requests if load.arrivals is None else len(load.arrivals)
    most = most * load.conversations.turns if most and load.conversations else most

    def ended(count: int) -> None:
        share = min(1.0, count / most) if most else 0.0
        of = f" of {most}" if most else ""
        tell(f"{shape}, {at.server.url}: {count}{of} requests", (done + share) / steps)

    return ended


def _found(plan: Plan, shape: Shape, rounds: Sequence[Sequence[Sequence[Drove]]]) -> dict[str, Any]:
    servers = []
    for of_server in rounds:
        first = [sample for drove in of_server[0] for sample in drove.samples]
        every = [sample for droves in of_server for drove in droves for sample in drove.samples]
        servers.append({
            **figures(of_server, plan.bounds),
            "rounds": [figures([droves], plan.bounds) for droves in of_server],
            "curves": {name: curve(values) for name, values in pooled(every).items()},
            "over_time": over_time(first),
            "raw": raw(of_server),
        })  # fmt: skip
    load: dict[str, Any] = {"load": str(shape), "kind": shape.kind, "servers": servers}
    load["value"] = (
        None if shape.kind == "trace" else str(shape.value) if math.isinf(shape.value) else shape.value
    )
    if len(servers) > 1:
        load["ratios"] = [ratios(servers[0]["rounds"], other["rounds"]) for other in servers[1:]]
    return load
