"""How many events a second one client process of `outrider bench serve` can follow.

    python -m bench.follow --streams 128 --rates 2500,5000,10000,20000 [--json OUT.json]

A process of its own plays the server: it sends each stream an event of the usual size whenever one is due, and records
when it did. Everything both sides see is compared: what is read later than it was sent is the client's lag, the
system's, or that of the player, which says how late it was itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from bench.serving import birth_certificate

from outrider.bench.serve.arrivals import Lengths
from outrider.bench.serve.asked import COMPLETIONS, Asked
from outrider.bench.serve.client import Load
from outrider.bench.serve.figures import Bounds, figures
from outrider.bench.serve.http import Server
from outrider.bench.serve.processes import run

EVENT = {
    "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1_760_000_000,
    "model": "org/a-model-of-usual-name", "system_fingerprint": "fp-1",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: Any) -> bytes:
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


class Player(asyncio.Protocol):
    """Sends one stream; `rate` is of all of them together."""

    late: list[float] = []  # noqa: RUF012 - one list for all streams of the process

    def __init__(self, streams: int, rate: float, tokens: int) -> None:
        self.gap, self.tokens = streams / rate, tokens
        usage = {"prompt_tokens": 1, "completion_tokens": tokens}
        self.one = event(EVENT)
        self.end = event({**EVENT, "choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        asyncio.get_running_loop().create_task(self.play())

    async def play(self) -> None:
        self.transport.write(HEAD)
        begin = time.perf_counter()
        for number in range(self.tokens):
            due = begin + number * self.gap
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self.late.append(time.perf_counter() - due)
            self.transport.write(self.one)
        self.transport.write(self.end)


def play(streams: int, rate: float, tokens: int, port: Any) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Player(streams, rate, tokens), "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, port.recv)
        late = sorted(Player.late)
        port.send(late[int(0.99 * len(late))])

    asyncio.run(serve())


def measure(streams: int, rate: float, seconds: float) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    tokens = max(2, round(seconds * rate / streams))
    player = multiprocessing.Process(target=play, args=(streams, rate, tokens, there))
    player.start()
    asked = Asked(COMPLETIONS, "m", Lengths(8, 8), Lengths(8, 8))
    load = Load(Server.of(f"127.0.0.1:{here.recv()}"), asked, concurrency=streams, requests=streams)
    droves = run(load, 1, lambda ended: None)
    here.send("done")
    late = here.recv()
    player.join()
    found = figures([droves], Bounds({}))
    events = sum(len(sample.times) for drove in droves for sample in drove.samples)
    gaps = [gap for drove in droves for sample in drove.samples for gap in sample.gaps]
    return {
        "asked_events_s": rate,
        "events_s": events / found["seconds"],
        "core_share": found["client"]["core_share"],
        "us_an_event": 1e6 * sum(drove.cpu for drove in droves) / events,
        "lag_p99_ms": found["client"]["lag_ms"]["p99"],
        "gap_ms": 1e3 * streams / rate,
        "gap_p50_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": found["itl_ms"]["p99"],
        "player_late_p99_ms": 1e3 * late,
        "failed": found["failed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument(
        "--rates", type=lambda text: [float(n) for n in text.split(",")], default=[2500, 5000, 10000]
    )
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = [measure(given.streams, rate, given.seconds) for rate in given.rates]
    print(
        "| events/s asked | read | of a core | us an event | lag p99 | gap asked, p50, p99 | player late p99 |"
    )
    print("|---|---|---|---|---|---|---|")
    for one in found:
        print(
            f"| {one['asked_events_s']:,.0f} | {one['events_s']:,.0f} | {one['core_share']:.0%} "
            f"| {one['us_an_event']:.0f} | {one['lag_p99_ms']:.1f} ms | {one['gap_ms']:.1f}, {one['gap_p50_ms']:.1f}, "
            f"{one['gap_p99_ms']:.1f} ms | {one['player_late_p99_ms']:.1f} ms |"
        )
    if given.json:
        given.json.write_text(json.dumps({"certificate": birth_certificate("bench.follow"), "found": found}))


if __name__ == "__main__":
    main()
