"""When requests come and how long they are: by chance from a seed, or from a trace file. Nothing here waits."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest

MOST = 1_000_000  # requests of a round
LONGEST = 10_000_000  # tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens: always the same, or drawn between two, evenly or evenly by orders of magnitude."""

    low: int
    high: int
    log: bool = False

    @classmethod
    def of(cls, text: str, flag: str) -> Lengths:
        """`256`, `64:4096` or `64:4096:log`."""
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9})(:log)?)?", text.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if match is None or not 1 <= low <= high <= LONGEST:
            raise InvalidRequest(
                f"--{flag.replace('_', '-')} {text!r:.40} is not a length such as 256, 64:4096 or 64:4096:log",
                flag,
            )
        return cls(low, high, match[3] is not None)

    def draw(self, chance: random.Random) -> int:
        if self.low == self.high:
            return self.low
        if self.log:
            return round(math.exp(chance.uniform(math.log(self.low), math.log(self.high))))
        return chance.randint(self.low, self.high)

    def __str__(self) -> str:
        return (
            str(self.low)
            if self.low == self.high
            else f"{self.low} to {self.high}{' (log)' if self.log else ''}"
        )


@dataclass(frozen=True, slots=True)
class Due:
    """One request of a trace: seconds from its beginning, and tokens in and out; None: as the flags say."""

    at: float
    input_tokens: int | None = None
    output_tokens: int | None = None


def poisson(
    rate: float,
    requests: int | None,
    seconds: float | None,
    seed: int | str,
    burstiness: float = 1.0,
    burst: int = 1,
) -> list[float]:
    """Moments of arrivals: `rate` a second on average, in groups of `burst` at once. Gaps are drawn from a gamma
    distribution of shape `burstiness`: 1 is a Poisson process, less comes in clusters, more is even.
    """
    if math.isinf(rate):
        return [0.0] * (requests or 0)
    chance = random.Random(f"arrivals {seed}")
    return list(itertools.islice(_moments(rate, seconds, chance, burstiness, burst), requests or MOST))


def _moments(
    rate: float, seconds: float | None, chance: random.Random, burstiness: float, burst: int
) -> Iterator[float]:
    now = 0.0
    while seconds is None or now < seconds:
        yield from [now] * burst
        now += chance.gammavariate(burstiness, burst / (rate * burstiness))


def read_trace(file: str, limit: int | None = None) -> list[Due]:
    """A line a request: JSON with `at` (seconds) or `timestamp` (milliseconds), `input_tokens` or `input_length`,
    `output_tokens` or `output_length`; or `SECONDS INPUT OUTPUT`, separated by spaces or commas.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise InvalidRequest(f"{file} cannot be read: {problem.strerror}", "trace") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file} is not UTF-8 text", "trace") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                found.append(_due(line.strip()))
            except ValueError as problem:
                raise InvalidRequest(f"{file}, line {number}: {problem}", "trace") from None
    if not found:
        raise InvalidRequest(f"{file} holds no requests", "trace")
    found.sort(key=lambda due: due.at)
    begin = found[0].at
    return [Due(due.at - begin, due.input_tokens, due.output_tokens) for due in found[:limit]]


def _due(line: str) -> Due:
    if not line.startswith("{"):
        words = line.replace(",", " ").split()
        if len(words) > 3:
            raise ValueError(f"{line!r:.60} is not SECONDS INPUT OUTPUT")
        return Due(_moment(words[0], 1), *(_length(word) for word in words[1:]))
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise ValueError(f"not JSON: {problem}") from None
    if "at" not in row and "timestamp" not in row:
        raise ValueError('a request needs "at" (seconds) or "timestamp" (milliseconds)')
    at = _moment(row["at"], 1) if "at" in row else _moment(row["timestamp"], 1000)
    return Due(
        at,
        *(
            _length(row.get(f"{method}_tokens", row.get(f"{method}_length")))
            for method in ("input", "output")
        ),
    )


def _moment(value: Any, unit: float) -> float:
    try:
        moment = float(value) / unit
    except (TypeError, ValueError):
        moment = math.nan
    if not math.isfinite(moment) or isinstance(value, bool):
        raise ValueError(f"{value!r:.40} is not a moment in seconds")
    return moment


def _length(value: Any) -> int | None:
    if value is None:
        return None
    try:
        length = int(value)
    except (TypeError, ValueError):
        length = 0
    if not 1 <= length <= LONGEST or isinstance(value, (bool, float)):
        raise ValueError(f"{value!r:.40} is not a number of tokens")
    return length
