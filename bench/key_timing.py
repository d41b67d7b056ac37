"""Does the time to a key's first token tell whether another key sent the same prompt?

    python -m bench.key_timing smollm2-135m [--rounds 60] [--words 150] [--json OUT.json] [-- SERVER FLAGS]

A round asks three prompts that nobody asked before, in an order drawn anew, each right after another request. Measured
is key B's time to its first token: `fresh`, after key A sent something else; `other`, after key A sent the same prompt;
`own`, after key B did, which shows what a shared prefix cache would tell. Between keys nothing is told if `other` takes
as long as `fresh`: their difference, round by round, with the 95 % interval of its median, and the chance to tell one
from the other by time alone (0.5 is guessing).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving import Connection, Server, arguments, birth_certificate

KEYS = {"A": "or-key-timing-a-0123456789", "B": "or-key-timing-b-0123456789"}
ARMS = {
    "fresh": ("A", False),
    "other": ("A", True),
    "own": ("B", True),
}  # who asks before, and whether the same
RESAMPLED = 4000


def words(dice: random.Random, count: int) -> str:
    """A text that no other one begins like."""
    return " ".join("".join(dice.choices(string.ascii_lowercase, k=5)) for _ in range(count))


async def first_token(server: Server, key: str, prompt: str) -> float:
    """Milliseconds from the request to the first event of its stream."""
    connection = await Connection.open(server.host, server.port)
    with contextlib.closing(connection):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
        begin, first = time.perf_counter(), 0.0
        connection.send("POST", "/v1/completions", body, {"authorization": f"Bearer {KEYS[key]}"})
        if await connection.head() != 200:
            raise SystemExit(f"the server answered {connection.status}")
        async for _ in connection.events():
            first = first or time.perf_counter() - begin
        return 1000 * first


async def measure(server: Server, rounds: int, length: int, dice: random.Random) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(-2, rounds):  # two to warm up
        for arm in dice.sample(sorted(ARMS), len(ARMS)):
            before, same = ARMS[arm]
            prompt = words(dice, length)
            await first_token(server, before, prompt if same else words(dice, length))
            took = await first_token(server, "B", prompt)
            if number >= 0:
                times[arm].append(took)
    return times


def interval(values: Sequence[float], dice: random.Random) -> tuple[float, float]:
    """95 % of the median, by resampling."""
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(RESAMPLED))
    return medians[RESAMPLED // 40], medians[-RESAMPLED // 40]


def chance(one: Sequence[float], other: Sequence[float]) -> float:
    """Of a time of `one` to be longer than a time of `other`."""
    return sum((a > b) + 0.5 * (a == b) for a in one for b in other) / (len(one) * len(other))


def summary(times: dict[str, list[float]], dice: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"median_ms": {arm: statistics.median(values) for arm, values in times.items()}}
    for arm in ("other", "own"):
        differences = [a - b for a, b in zip(times[arm], times["fresh"], strict=True)]
        made[arm] = {
            "difference_ms": statistics.median(differences),
            "interval_ms": interval(differences, dice),
            "chance_to_tell": chance(times["fresh"], times[arm]),
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = arguments(parser)
    dice = random.Random(given.seed)
    keys = [word for key in KEYS.values() for word in ("--api-key", key)]
    with Server(given.model, *keys, *given.flags) as server:
        times = asyncio.run(measure(server, given.rounds, given.words, dice))
    report = {"rounds": given.rounds, "words": given.words, **summary(times, dice)}
    print(json.dumps(report, indent=1))
    if given.json:
        report |= {"times_ms": times, "certificate": birth_certificate("bench.key_timing")}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
