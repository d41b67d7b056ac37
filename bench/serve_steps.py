"""What HTTP adds to a step and to a first token where the model has a device of its own: bench/stand_in.py's engine,
called from Python in this process, and the same behind a server with the load in a process of its own; in turn.

    python -m bench.serve_steps smollm2-135m [--step-ms 5] [--together 1,16,64,128] [--json OUT.json]

Inside, a token's time is when the engine's thread has its text: the least it can be. All answers of a round begin
together. First tokens are measured apart, one request at a time. Client, API process and engine need a core each:
where there are fewer, the many streams measure the lack of them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from bench.serving import Server, birth_certificate
from bench.stand_in import StandIn

from outrider import SamplingParams, Settings
from outrider.bench.serve.arrivals import Lengths
from outrider.bench.serve.asked import CHAT, Asked
from outrider.bench.serve.client import Load
from outrider.bench.serve.http import Server as Address
from outrider.bench.serve.processes import Processes
from outrider.types import Event

PROMPT = "Describe a walk along the coast, and whom one may meet there. " * 4
SIDES = ("inside", "http")
Times = list[list[float]]  # of every token, by answer, from when it was asked for


class Side:
    """One way to ask for `together` answers at once."""

    def __init__(self, server: Server, llm: StandIn, model: str, tokens: int) -> None:
        self.server, self.llm, self.model, self.tokens, self.asked = server, llm, model, tokens, 0
        self.api = psutil.Process(server.process.pid)

    def inside(self, together: int, tokens: int) -> Times:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=False)  # type: ignore[arg-type]
        heard: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()

        def listen(event: Event | BaseException) -> None:
            assert isinstance(event, Event)
            heard.put((event.request_id, time.perf_counter()))

        begin = time.perf_counter()
        prompts = [self.llm.chat_ids([{"role": "user", "content": self._prompt()}]) for _ in range(together)]
        requests = [self.llm.request(prompt, params) for prompt in prompts]
        self.llm.driver.submit(requests, listen)
        found: dict[str, list[float]] = {request.id: [] for request in requests}
        for _ in range(together * tokens):
            name, now = heard.get()
            found[name].append(now - begin)
        return list(found.values())

    def http(self, together: int, tokens: int) -> Times:
        rows = tuple({"messages": [{"role": "user", "content": self._prompt()}]} for _ in range(together))
        fields = {"temperature": 0, "ignore_eos": True}
        asked = Asked(CHAT, self.model, Lengths(tokens, tokens), rows=rows, fields=fields)
        load = Load(Address.of(f"{self.server.host}:{self.server.port}"), asked, together, requests=together)
        [drove] = Processes(load, 1, lambda ended: None).run()
        if failed := [f"{one.error}: {one.said}" for one in drove.samples if one.error]:
            raise SystemExit(failed[0])
        return [one.times for one in drove.samples]

    def _prompt(self) -> str:
        """Of its own: no side finds it in its cache."""
        self.asked += 1
        return f"{self.asked}. {PROMPT}"

    def api_cpu(self) -> float:
        times = self.api.cpu_times()
        return times.user + times.system


def point(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(rounds: Sequence[Times]) -> dict[str, float]:
    """Milliseconds, and tokens a second while all answers were being written."""
    answers = [times for one in rounds for times in one]
    gaps = [1000 * (b - a) for times in answers for a, b in pairwise(times)]
    rates = [len(one) * (len(one[0]) - 1) / statistics.mean(t[-1] - t[0] for t in one) for one in rounds]
    return {
        "tok_s": statistics.median(rates),
        "itl_p50_ms": point(gaps, 0.5),
        "itl_p99_ms": point(gaps, 0.99),
        "ttft_p50_ms": 1000 * point([times[0] for times in answers], 0.5),
    }


def measure(side: Side, together: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Times]] = {name: [] for name in SIDES}
    cpu = 0.0
    for turn in range(-1, rounds):
        for name in SIDES if turn % 2 else SIDES[::-1]:
            before = side.api_cpu()
            times = getattr(side, name)(together, side.tokens)
            if turn >= 0:  # the first round warms up
                found[name].append(times)
                cpu += side.api_cpu() - before
    report: dict[str, Any] = {name: figures(some) for name, some in found.items()}
    return {"together": together, "api_us_a_token": 1e6 * cpu / (rounds * together * side.tokens), **report}


def first_tokens(side: Side, count: int) -> dict[str, float]:
    """Of single requests, in turn."""
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(-2, count):
        for name in SIDES if turn % 2 else SIDES[::-1]:
            [times] = getattr(side, name)(1, 4)
            if turn >= 0:
                found[name].append(1000 * times[0])
    inside, http = (statistics.median(found[name]) for name in SIDES)
    return {"requests": count, "inside_ms": inside, "http_ms": http, "added_ms": http - inside}


def show(report: dict[str, Any]) -> None:
    print(
        "| streams | tok/s inside | over HTTP | ratio | ITL p50 / p99 inside, ms | over HTTP | API, us a token |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in report["loads"]:
        one, two = row["inside"], row["http"]
        print(
            f"| {row['together']} | {one['tok_s']:,.0f} | {two['tok_s']:,.0f} | {two['tok_s'] / one['tok_s']:.3f} "
            f"| {one['itl_p50_ms']:.2f} / {one['itl_p99_ms']:.2f} | {two['itl_p50_ms']:.2f} / {two['itl_p99_ms']:.2f} "
            f"| {row['api_us_a_token']:.0f} |"
        )
    first = report["first_token"]
    print(
        f"\nfirst token: {first['inside_ms']:.2f} ms inside, {first['http_ms']:.2f} ms over HTTP, "
        f"{first['added_ms']:.2f} ms more ({first['requests']} requests each); {os.cpu_count()} cores"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--together", type=lambda s: [int(n) for n in s.split(",")], default=[1, 16, 64, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=20, help="requests for the time to the first token")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["STEP_MS"] = str(given.step_ms)
    flags = ("--draft", "none", "--log-level", "warning")
    with (
        Server(given.model, *flags, module="bench.stand_in") as server,
        StandIn(given.model, draft="none", settings=Settings()) as llm,
    ):
        side = Side(server, llm, given.model, given.tokens)
        loads = []
        for together in given.together:
            loads.append(measure(side, together, given.rounds))
            print(json.dumps(loads[-1]), file=sys.stderr, flush=True)
        report = {"step_ms": given.step_ms, "loads": loads, "first_token": first_tokens(side, given.first)}
    show(report)
    if given.json:
        made = birth_certificate("bench.serve_steps")
        given.json.write_text(json.dumps({"certificate": made, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
