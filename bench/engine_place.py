"""Why the engine has a process of its own: how long its steps take while requests are read and answers are
written in another thread of its process, in another process, and not at all.

    python -m bench.engine_place smollm2-135m [--duty 0.5] [--threads 1] [--json OUT.json]

The work is the API process's: JSON in, template, tokenizer, then an event a token. It is paced to keep one
core busy for the share `duty` of the time when undisturbed, wherever it runs. The three places take turns;
figures are medians of the rounds. With as many engine threads as cores, any work beside it costs something;
`--threads` one below the cores shows what the place alone costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from bench.serving import birth_certificate

from outrider import LLM, SamplingParams, Settings
from outrider.bench.prompts import BUILT_IN
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.load.template import ChatTemplate
from outrider.serve.limits import read_json
from outrider.serve.wire import ChatRequest, read_request
from outrider.settings import cache_folder
from outrider.types import StepRecord

PLACES = ("nowhere", "thread", "process")
EVENTS = 64  # tokens of an answer
TURNS = 11  # of the conversation


class Counted:
    """A counter that looks like multiprocessing's."""

    value = 0


def request_handler(model: str) -> Callable[[], None]:
    """One request of a long conversation and the events of its answer, as the server handles them."""
    checkpoint = open_checkpoint(find(model, cache_folder()))
    tokenizer = checkpoint.tokenizer
    template = ChatTemplate.for_tokenizer(checkpoint.chat_template, tokenizer)
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(BUILT_IN[:TURNS])
    ]
    body = msgspec.json.encode({"messages": turns, "max_tokens": EVENTS, "stream": True, "temperature": 0.7})
    encode = msgspec.json.Encoder().encode

    def handle() -> None:
        asked = read_request(read_json(body, 64), ChatRequest)
        text = (
            template.render(asked.messages) if template else "\n".join(m["content"] for m in asked.messages)
        )
        ids = tokenizer.encode(text, special=False, parse_special=True)
        writer = tokenizer.text_stream()
        for number in range(EVENTS):
            delta = {"content": writer.feed(ids[number % len(ids)])}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            event = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "choices": [choice]}
            _ = b"data: " + encode(event) + b"\n\n"

    return handle


def work(model: str, pause_each: float, going: Any, over: Any, done: Any) -> None:
    """Handle requests, one every `pause_each` seconds, while `going` is set; until `over` is."""
    handle = request_handler(model)
    while not over.is_set():
        if not going.wait(0.1):
            continue
        begin = time.perf_counter()
        handle()
        done.value += 1
        time.sleep(max(0.0, begin + pause_each - time.perf_counter()))


def unit_seconds(model: str) -> float:
    """What one request takes with the process to itself."""
    handle = request_handler(model)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        handle()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@contextlib.contextmanager
def placed(place: str, model: str, pause_each: float) -> Iterator[tuple[Any, Any]]:
    """Somebody who works there when told to: the switch and the count."""
    context: Any = multiprocessing.get_context("spawn") if place == "process" else threading
    going, over = context.Event(), context.Event()
    done = context.Value("q", 0) if place == "process" else Counted()
    make = context.Process if place == "process" else context.Thread
    someone = make(target=work, args=(model, pause_each, going, over, done), daemon=True)
    someone.start()
    going.set()
    while not done.value:  # it has loaded what it needs
        time.sleep(0.01)
    going.clear()
    try:
        yield going, done
    finally:
        over.set()
        someone.join()


class Steps:
    """When each step of the engine ended."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.ends: list[float] = []
        llm.driver.observer = self._hear

    def _hear(self, record: StepRecord) -> None:
        if record.known == record.sequences:  # no prompt was read
            self.ends.append(time.perf_counter())

    def run(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Seconds from step to step while answering."""
        self.ends = []
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=False)  # type: ignore[arg-type]
        self.llm.generate(prompts, params)
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def measure(llm: LLM, model: str, given: argparse.Namespace) -> dict[str, Any]:
    unit = unit_seconds(model)
    prompts = [llm.chat_ids([{"role": "user", "content": text}]) for text in BUILT_IN[: given.together]]
    steps = Steps(llm)
    found: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
    with contextlib.ExitStack() as stack:
        there = {place: stack.enter_context(placed(place, model, unit / given.duty)) for place in PLACES[1:]}
        for number in range(-1, given.rounds):
            for place in PLACES[number % 3 :] + PLACES[: number % 3]:
                figures = one_round(steps, prompts, given.tokens, there.get(place))
                if number >= 0:
                    found[place].append(figures)
                note(f"{number} {place}: {figures}")
    medians = {
        place: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for place, rows in found.items()
    }
    for figures in medians.values():
        figures["step_ratio"] = figures["step_ms"] / medians["nowhere"]["step_ms"]
        figures["rate_ratio"] = figures["steps_a_second"] / medians["nowhere"]["steps_a_second"]
    return {"request_ms": 1000 * unit, "places": medians, "threads": llm.settings.threads}


def one_round(
    steps: Steps, prompts: list[list[int]], tokens: int, there: tuple[Any, Any] | None
) -> dict[str, float]:
    before = there[1].value if there else 0
    if there:
        there[0].set()
    begin = time.perf_counter()
    gaps = steps.run(prompts, tokens)
    seconds = time.perf_counter() - begin
    if there:
        there[0].clear()
    handled = there[1].value - before if there else 0
    return {
        "step_ms": 1000 * statistics.median(gaps),
        "step_p99_ms": 1000 * statistics.quantiles(gaps, n=100)[98],
        "steps_a_second": len(gaps) / sum(gaps),
        "requests_a_second": handled / seconds,
    }


def show(report: dict[str, Any]) -> None:
    print(f"{report['threads']} engine threads; one request takes {report['request_ms']:.2f} ms to handle\n")
    print("| work is done | step | p99 | against none | steps a second, against none | requests a second |")
    print("|---|---|---|---|---|---|")
    for place, row in report["places"].items():
        print(
            f"| {place} | {row['step_ms']:.2f} ms | {row['step_p99_ms']:.2f} ms | {row['step_ratio']:.3f} "
            f"| {row['rate_ratio']:.3f} | {row['requests_a_second']:.1f} |"
        )


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--duty", type=float, default=0.5, help="share of a core the work keeps busy")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0 means the cores")
    parser.add_argument("--together", type=int, default=4, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with LLM(given.model, draft="none", settings=Settings(threads=given.threads)) as llm:
        report = measure(llm, given.model, given)
    show(report)
    if given.json:
        given.json.write_text(json.dumps({"certificate": birth_certificate("bench.engine_place"), **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
