"""Measures what HTTP costs: tokens per second and time to the first token through the server, against the engine called
from Python in one process, with the same prompts and settings, in turn.

    python -m bench.serve_overhead smollm2-135m --prompts FILE.jsonl [--json OUT.json] [-- ENGINE FLAGS]

Both sides stay loaded for the whole run and only one works at a time. Every round asks both for the same answers and
begins with the other side. Figures are medians. Every prompt is used once and begins with a number of its own, so
neither side finds it in its cache. The client is that of `outrider bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving import Server, arguments, deliver, make_parser, read_prompts

from outrider import LLM, SamplingParams, Settings
from outrider.bench.prompts import BUILT_IN
from outrider.bench.serve.arrivals import Lengths
from outrider.bench.serve.asked import CHAT, Asked
from outrider.bench.serve.client import Client
from outrider.bench.serve.http import Pool
from outrider.bench.serve.http import Server as Address
from outrider.bench.serve.run import served_model

SIDES = ("http", "inside")
LONGEST = 400  # characters of a prompt: decoding, not prefill, should take the time
PATIENCE = 600.0  # seconds an answer may take
FIRST_TOKENS = 4  # the first may be half a character
FIRST_LENGTH = 120  # characters of the prompt: a long prefill would hide the overhead


@dataclass
class Sides:
    """The same model twice: behind HTTP and inside this process."""

    server: Server
    llm: LLM
    model: str = ""  # as the server calls it
    pool: Pool | None = None  # connections, which are kept

    async def asking(self, prompts: Sequence[str], tokens: int, speculate: bool) -> Client:
        address = Address.of(f"{self.server.host}:{self.server.port}")
        self.pool = self.pool or Pool(address)
        self.model = self.model or await served_model(self.pool)
        rows = tuple({"messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
        fields = {"temperature": 0, "ignore_eos": True, "speculative_decoding": speculate}
        asked = Asked(CHAT, self.model, Lengths(tokens, tokens), rows=rows, fields=fields)
        client = Client(address, asked, PATIENCE)
        client.pool = self.pool
        return client


@dataclass
class Run:
    """One side's answers to a few prompts at once."""

    tokens: int
    seconds: float
    first_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def params_of(tokens: int, speculate: bool) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=speculate)  # type: ignore[arg-type]


async def through_http(sides: Sides, prompts: Sequence[str], tokens: int, speculate: bool) -> Run:
    client = await sides.asking(prompts, tokens, speculate)
    begin = time.perf_counter()
    answers = await asyncio.gather(*(client.ask(number) for number in range(len(prompts))))
    seconds = time.perf_counter() - begin
    if failed := [f"{answer.error}: {answer.said}" for answer in answers if answer.error]:
        raise SystemExit(failed[0])
    first, written = min(answer.first for answer in answers), sum(answer.tokens for answer in answers)
    return Run(written, seconds, first)


async def inside(sides: Sides, prompts: Sequence[str], tokens: int, speculate: bool) -> Run:
    """All prompts in one call, without streaming: the least that an answer can cost."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    begin = time.perf_counter()
    outs = await asyncio.to_thread(sides.llm.chat, chats, params_of(tokens, speculate))
    seconds = time.perf_counter() - begin
    return Run(sum(len(out.token_ids) for out in outs), seconds)


async def first_inside(sides: Sides, prompt: str) -> float:
    """Seconds to the first text of a stream."""
    begin, first = time.perf_counter(), 0.0
    stream = sides.llm.stream([{"role": "user", "content": prompt}], params_of(FIRST_TOKENS, False))
    async with contextlib.aclosing(stream):
        async for event in stream:
            if event.text and not first:
                first = time.perf_counter() - begin
    return first


async def rounds(
    sides: Sides, prompts: Iterator[str], together: int, tokens: int, speculate: bool, count: int
) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for number in range(-1, count):
        chosen = [next(prompts) for _ in range(together)]
        made: dict[str, Run] = {}
        for side in SIDES if number % 2 else SIDES[::-1]:
            ask = through_http if side == "http" else inside
            made[side] = await ask(sides, chosen, tokens, speculate)
        if made["http"].tokens != made["inside"].tokens:
            raise SystemExit("the two sides wrote different numbers of tokens")
        if number >= 0:  # the first round warms up
            for side in SIDES:
                runs[side].append(made[side])
    pairs = list(zip(runs["http"], runs["inside"], strict=True))
    return {
        "together": together,
        "speculation": speculate,
        "http_tok_s": statistics.median(run.rate for run in runs["http"]),
        "inside_tok_s": statistics.median(run.rate for run in runs["inside"]),
        "ratio": statistics.median(a.rate / b.rate for a, b in pairs),
        "ratios": [a.rate / b.rate for a, b in pairs],
    }


async def first_tokens(sides: Sides, prompts: Iterator[str], count: int) -> dict[str, float]:
    """Milliseconds to the first text, of both sides in turn, without drafts."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(-2, count):
        prompt = next(prompts)[:FIRST_LENGTH]
        for side in SIDES if number % 2 else SIDES[::-1]:
            if side == "http":
                seconds = (await through_http(sides, [prompt], FIRST_TOKENS, False)).first_s
            else:
                seconds = await first_inside(sides, prompt)
            if number >= 0:
                times[side].append(1000 * seconds)
    medians = {side: statistics.median(values) for side, values in times.items()}
    return {
        "requests": count,
        "http_ms": medians["http"],
        "inside_ms": medians["inside"],
        "overhead_ms": medians["http"] - medians["inside"],
        "median_difference_ms": statistics.median(
            a - b for a, b in zip(times["http"], times["inside"], strict=True)
        ),
    }


async def measure(sides: Sides, texts: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    prompts = (f"{number}. {text}" for number, text in enumerate(itertools.cycle(texts)))
    rates = []
    for speculate in given.speculation:
        for together in given.together:
            rates.append(await rounds(sides, prompts, together, given.tokens, speculate, given.rounds))
            print(json.dumps(rates[-1]), file=sys.stderr, flush=True)
    first = await first_tokens(sides, prompts, given.first)
    if sides.pool is not None:
        sides.pool.close()
    return {"rates": rates, "first_token": first}


def show(report: dict[str, Any]) -> None:
    print("| together | speculation | through HTTP | inside | ratio |")
    print("|---|---|---|---|---|")
    for row in report["rates"]:
        print(
            f"| {row['together']} | {'on' if row['speculation'] else 'off'} | {row['http_tok_s']:.1f} tok/s "
            f"| {row['inside_tok_s']:.1f} tok/s | {row['ratio']:.3f} |"
        )
    first = report["first_token"]
    print(
        f"\nfirst token: {first['http_ms']:.1f} ms through HTTP, {first['inside_ms']:.1f} ms inside; overhead "
        f"{first['overhead_ms']:.1f} ms (median of differences {first['median_difference_ms']:.1f} ms, "
        f"{first['requests']} requests)"
    )


def settings_of(flags: Sequence[str]) -> Settings:
    """The engine's settings from the server's flags, so that both sides have the same."""
    options: dict[str, Any] = {}
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        options[name.removeprefix("--").replace("-", "_")] = int(value)
    return Settings.of(options)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=Path, help="a JSON-lines file; a dozen built-in ones without it")
    parser.add_argument("--limit", type=int, default=100, help="prompts to use of it")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--together", type=lambda s: [int(n) for n in s.split(",")], default=[1, 16])
    parser.add_argument(
        "--speculation",
        type=lambda s: [{"on": True, "off": False}[word] for word in s.split(",")],
        default=[False, True],
        help="off, on, or off,on",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--first", type=int, default=40, help="requests for the time to the first token")
    parser.add_argument("--draft", default="auto")
    given = arguments(parser)
    settings = settings_of(given.flags)
    texts = read_prompts(given.prompts, given.limit, LONGEST) if given.prompts else list(BUILT_IN)
    flags = ["--draft", given.draft, "--log-level", "warning", *given.flags]
    with (
        Server(given.model, *flags) as server,
        LLM(given.model, draft=given.draft, settings=settings) as llm,
    ):
        report = asyncio.run(measure(Sides(server, llm), texts, given))
    show(report)
    deliver(given.json, "bench.serve_overhead", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
