"""What samples come to: latencies by percentile, throughput, goodput, errors by kind, and whether the client kept up.

All latencies are milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.bench.serve.answer import Sample
from outrider.bench.serve.client import Drove
from outrider.bench.spread import spread, spread_of_rounds
from outrider.errors import InvalidRequest

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}
MOST_ROWS, MOST_GAPS = 5_000, 20_000  # that are written out
SLOW, SLOW_SHARE = 2.0, 0.25  # ms the client may lag at p99; or that share of the p99 it reports
BUSY = 0.9  # of a core that a client may use
BUCKETS = 120  # of a curve over time


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a good request keeps to, in ms: `itl` is of every gap, the others are one figure a request."""

    most: Mapping[str, float]

    @classmethod
    def of(cls, text: str | None) -> Bounds:
        """`ttft=200,itl=50`."""
        most = {}
        for part in text.split(",") if text else ():
            name, _, value = part.strip().partition("=")
            try:
                most[name] = float(value)
            except ValueError:
                most[name] = -1.0
            if name not in LATENCIES or not most[name] > 0:
                raise InvalidRequest(
                    f"--goodput {part!r:.40} is not NAME=MILLISECONDS, with one of {', '.join(LATENCIES)}",
                    "goodput",
                )
        return cls(most)

    def kept(self, sample: Sample) -> bool:
        found = latencies(sample)
        return not sample.error and all(
            max(found[name], default=0.0) <= most for name, most in self.most.items()
        )


def latencies(sample: Sample) -> dict[str, list[float]]:
    """Of one request that was answered, by the names of LATENCIES."""
    per_token = sample.per_token
    return {
        "ttft": [1000 * sample.first] if sample.times else [],
        "itl": [1000 * gap for gap in sample.gaps],
        "tpot": [] if per_token is None else [1000 * per_token],
        "e2e": [1000 * sample.end],
    }


def pooled(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Latencies of all requests that were answered."""
    pool: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for sample in samples:
        if not sample.error:
            for name, values in latencies(sample).items():
                pool[name] += values
    return pool


def lasted(samples: Sequence[Sample]) -> float:
    """Seconds from the first request to the end of the last answer."""
    return max(s.start + s.end for s in samples) - min(s.start for s in samples) if samples else 0.0


def figures(rounds: Sequence[Sequence[Drove]], bounds: Bounds) -> dict[str, Any]:
    """Of one server under one load: all its rounds together, each with what its processes found."""
    by_round = [[sample for drove in droves for sample in drove.samples] for droves in rounds]
    samples = [sample for some in by_round for sample in some]
    good = [sample for sample in samples if not sample.error]
    seconds = sum(map(lasted, by_round))
    events = sum(len(s.times) for s in good)
    latencies_of = [pooled(some) for some in by_round]
    tokens, prompt = sum(s.tokens for s in good), sum(s.prompt_tokens for s in good)

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    found: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": errors(samples),
        "seconds": seconds,
        "input_tokens": prompt,
        "output_tokens": tokens,
        "tokens_counted_by": "usage" if all(s.counted for s in good) else "events",
        "tokens_per_event": tokens / events if events else None,
        "requests_per_s": rate(len(good)),
        "output_tok_s": rate(tokens),
        "total_tok_s": rate(tokens + prompt),
        **{f"{name}_ms": spread_of_rounds(some[name] for some in latencies_of) for name in LATENCIES},
    }
    if bounds.most:
        kept = sum(map(bounds.kept, samples))
        found["goodput"] = {"bounds_ms": dict(bounds.most), "requests": kept, "requests_per_s": rate(kept),
                            "share": kept / len(samples) if samples else 0.0}  # fmt: skip
    if any(s.turn for s in samples):
        found["prefix"] = prefix(by_round)
    found["client"] = client([drove for droves in rounds for drove in droves], found)
    return found


def prefix(by_round: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Of conversations: what of their prompts stood in the turn before, what was found in the cache, and the times to
    first token, by turn. A share is None where the server does not report cached tokens.
    """
    by_turn: dict[int, list[Sample]] = {}
    repeated: dict[int, int] = {}
    for samples in by_round:
        good = {(s.number, s.turn): s for s in samples if not s.error}
        for (number, turn), sample in good.items():
            by_turn.setdefault(turn, []).append(sample)
            if before := good.get((number, turn - 1)):
                known = min(before.prompt_tokens + before.tokens, sample.prompt_tokens)
                repeated[turn] = repeated.get(turn, 0) + known
    rows = [
        {**_prompts(by_turn[turn], repeated.get(turn, 0)), "turn": turn + 1,
         "ttft_ms": spread([1000 * s.first for s in by_turn[turn] if s.times])}
        for turn in sorted(by_turn)
    ]  # fmt: skip
    whole = _prompts([s for some in by_turn.values() for s in some], sum(repeated.values()))
    return {**whole, "turns": rows}


def _prompts(samples: Sequence[Sample], repeated: int) -> dict[str, Any]:
    prompt, cached = (
        sum(s.prompt_tokens for s in samples),
        [s.cached for s in samples if s.cached is not None],
    )
    return {
        "requests": len(samples),
        "input_tokens": prompt,
        "repeated_share": repeated / prompt if prompt else 0.0,
        "cached_share": sum(cached) / prompt if prompt and cached else None,
    }


def errors(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and what the first of them said."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        if sample.error:
            kind = found.setdefault(sample.error, {"count": 0, "first": sample.said})
            kind["count"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["count"]))


def client(droves: Sequence[Drove], found: Mapping[str, Any]) -> dict[str, Any]:
    """The generator's own share: its lag, its lateness, its use of a core; and what is wrong with them."""
    lags = spread([1000 * lag for drove in droves for lag in drove.lags])
    late = spread([1000 * (s.start - s.due) for drove in droves for s in drove.samples])
    share = max((drove.cpu / drove.seconds for drove in droves if drove.seconds), default=0.0)
    wrong = []
    if lags and lags["p99"] > _slow(found["itl_ms"]):
        wrong.append(f"its event loop woke up {lags['p99']:.1f} ms late at p99")
    if share > BUSY:
        wrong.append(f"a process used {share:.0%} of a core")
    if late and late["p99"] > _slow(found["ttft_ms"]):
        wrong.append(f"requests went out {late['p99']:.1f} ms late at p99")
    return {"lag_ms": lags, "late_ms": late, "core_share": share, "kept_up": not wrong, "wrong": wrong,
            "connections": sum(drove.connections for drove in droves)}  # fmt: skip


def _slow(latency: Mapping[str, float] | None) -> float:
    return max(SLOW, SLOW_SHARE * latency["p99"]) if latency else SLOW


# ------------------------------------------------------------------------------------------- between two servers

COMPARED = {
    "output_tok_s": ("output, tok/s", ("output_tok_s",)),
    "requests_per_s": ("requests/s", ("requests_per_s",)),
    **{
        f"{name}_{at}": (f"{what}, {at}", (f"{name}_ms", at))
        for name, what in LATENCIES.items()
        for at in ("p50", "p99")
    },
}


def figure(found: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = found
    for name in path:
        value = None if value is None else value.get(name)
    return None if value is None else float(value)


def ratios(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """The second server's figures over the first's, round by round: median, lowest and highest."""
    found = {}
    for name, (_, path) in COMPARED.items():
        pairs = [(figure(a, path), figure(b, path)) for a, b in zip(first, second, strict=True)]
        each = [b / a for a, b in pairs if a and b]
        if each:
            found[name] = {"median": statistics.median(each), "low": min(each), "high": max(each)}
    return found


# -------------------------------------------------------------------------------------------------- written out


def raw(rounds: Sequence[Sequence[Drove]]) -> dict[str, Any]:
    """Every request, and gaps between events, as far as there is room; what was left out is said."""
    rows = [
        (number, sample)
        for number, droves in enumerate(rounds)
        for drove in droves
        for sample in drove.samples
    ]
    rows.sort(key=lambda row: (row[0], row[1].start))
    gaps = [1000 * gap for _, sample in rows if not sample.error for gap in sample.gaps]
    return {
        "requests_of": len(rows),
        "requests": [_row(*row) for row in rows[:MOST_ROWS]],
        "itl_of": len(gaps),
        "itl_ms": [round(gap, 3) for gap in thinned(gaps, MOST_GAPS)],
    }


def _row(number: int, sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {"round": number, "request": sample.number, "start_s": round(sample.start, 6)}
    row |= {"late_ms": round(1000 * (sample.start - sample.due), 3), "e2e_ms": round(1000 * sample.end, 3)}
    row |= {"ttft_ms": round(1000 * sample.first, 3)} if sample.times else {}
    row |= {"turn": sample.turn + 1, "cached_tokens": sample.cached} if sample.turn else {}
    row |= {"input_tokens": sample.prompt_tokens, "output_tokens": sample.tokens, "events": len(sample.times)}
    return row | ({"error": sample.error} if sample.error else {})


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most `most` of them, evenly spread."""
    if len(values) <= most:
        return list(values)
    return [values[i * len(values) // most] for i in range(most)]


def over_time(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Output tokens a second and requests in flight, over one round."""
    if not samples:
        return {"at_s": [], "output_tok_s": [], "in_flight": []}
    end = max(s.start + s.end for s in samples)
    width = max(end / BUCKETS, 0.05)
    count = int(end / width) + 1
    tokens, in_flight = np.zeros(count), np.zeros(count)
    for sample in samples:
        each: Sequence[float] = sample.counts or [sample.tokens / max(1, len(sample.times))] * len(
            sample.times
        )
        for at, size in zip(sample.times, each, strict=True):
            tokens[int((sample.start + at) / width)] += size
        in_flight[int(sample.start / width) : int((sample.start + sample.end) / width) + 1] += 1
    return {
        "at_s": [round(width * (i + 0.5), 3) for i in range(count)],
        "output_tok_s": [round(float(value) / width, 3) for value in tokens],
        "in_flight": [float(value) for value in in_flight],
    }


# Points of a curve, more where it is steep.
PERCENTS = (*range(0, 90, 5), *range(90, 99), *(99 + i / 10 for i in range(10)))


def curve(values: Sequence[float]) -> list[float]:
    """Values at PERCENTS."""
    return [round(float(value), 3) for value in np.percentile(values, PERCENTS)] if len(values) else []
