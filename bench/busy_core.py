"""What a neighbour costs: decoding and reading on a quiet machine and beside a process that keeps one core busy.

    python -m bench.busy_core smollm2-135m --baseline HEAD~1 --threads 1,2 --json busy.json

Every thread count, and with `--baseline` the code of another commit too, has a process of its own with the model
loaded. They take turns within a round, so that what the machine does meanwhile meets all of them; figures are
medians of the rounds, and the least. Guessing is off, the temperature 0, and all must write the same tokens.

    decode N   tokens a second of N requests at once, all together, reading not counted
    prefill    tokens a second of a fresh prompt's reading
    quiet      nothing else runs
    beside     beside a process that spins, wherever the system puts it
    pinned     beside a process that spins and is bound to the last core
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCENES = ("quiet", "beside", "pinned")
PROMPT = 48  # tokens a decoding request begins with
SETTLE = 0.3  # seconds that the scheduler has to find out who is busy


# ------------------------------------------------------------------------------------------- a measured process


def serve_turns(model: str, threads: int) -> None:
    """Loads the model, then does what each line of the input asks and answers with seconds and tokens."""
    from outrider import LLM, SamplingParams

    llm = LLM(model, speculation=False, threads=threads)
    print("loaded", flush=True)
    for line in sys.stdin:
        what, rows, tokens, seed = json.loads(line)
        length = tokens if what == "prefill" else PROMPT
        prompts = [
            [2 + (7919 * (seed + row) + 31 * i * i) % 40000 for i in range(length)] for row in range(rows)
        ]
        wanted = 1 if what == "prefill" else tokens
        params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
        ends: list[float] = []
        llm.driver.observer = lambda record, ends=ends: ends.append(time.perf_counter())
        begin = time.perf_counter()
        out = llm.generate(prompts, params, owner=str(seed))
        # Steps that read the prompts end with the first token; the rest are decoding.
        seconds = ends[-1] - begin if what == "prefill" else ends[-1] - ends[-wanted]
        done = tokens if what == "prefill" else rows * (wanted - 1)
        print(json.dumps([done / seconds, [o.token_ids for o in out]]), flush=True)


class Turns:
    """The process at its other end."""

    def __init__(self, source: Path, model: str, threads: int) -> None:
        path = f"{source / 'src'}{os.pathsep}{ROOT}"
        command = [sys.executable, "-m", "bench.busy_core", model, "--serve", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path}, cwd=ROOT,
        )  # fmt: skip
        self._line()

    def ask(self, what: str, rows: int, tokens: int, seed: int) -> tuple[float, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, rows, tokens, seed]) + "\n")
        self.process.stdin.flush()
        rate, written = json.loads(self._line())
        return rate, written

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a measured process ended; its message is above")
        return line


# ------------------------------------------------------------------------------------------------------- the run


@contextlib.contextmanager
def neighbour(scene: str) -> Iterator[None]:
    if scene == "quiet":
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if scene == "pinned":
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        time.sleep(SETTLE)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def sources(baseline: str | None) -> Iterator[dict[str, Path]]:
    """Where each version's code lies."""
    if baseline is None:
        yield {"now": ROOT}
        return
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["git", "archive", baseline, "src"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield {baseline: Path(folder), "now": ROOT}


def jobs(args: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """Name, kind, rows and tokens of everything that is measured."""
    decoding = [(f"decode {rows}", "decode", rows, args.tokens) for rows in args.rows]
    return decoding + ([("prefill", "prefill", 1, args.prefill)] if args.prefill else [])


def measure(
    args: argparse.Namespace, turns: dict[tuple[str, int], Turns]
) -> dict[tuple[Any, ...], list[float]]:
    """Rates by (scene, job, version, threads), one a round."""
    rates: dict[tuple[Any, ...], list[float]] = {}
    for process in turns.values():
        process.ask("decode", 1, 4, seed=0)
    for number in range(args.rounds):
        for place, scene in enumerate(args.scenes):
            seed = 1 + number * len(args.scenes) + place  # a prompt read before would come from the cache
            with neighbour(scene):
                for name, kind, rows, tokens in jobs(args):
                    expected = None
                    for who in list(turns)[:: -1 if number % 2 else 1]:
                        rate, written = turns[who].ask(kind, rows, tokens, seed)
                        rates.setdefault((scene, name, *who), []).append(rate)
                        if expected is not None and written != expected:
                            raise SystemExit(f"{who} wrote other tokens beside {scene}: {written}")
                        expected = written
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return rates


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m bench.busy_core",
    )
    parser.add_argument("model")
    parser.add_argument("--baseline", help="a commit whose code is measured in turn with this one")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="default 1,2")
    parser.add_argument("--rows", type=numbers, default=[1, 8], help="requests at once, default 1,8")
    parser.add_argument("--tokens", type=int, default=32, help="of a decoding request, default 32")
    parser.add_argument("--prefill", type=int, default=192, help="tokens of the prompt that is read; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenes", type=lambda text: text.split(","), default=list(SCENES))
    parser.add_argument("--json", type=Path, help="the rates of every round, with their birth certificate")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.scenes) - set(SCENES):
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(SCENES)}")
    return args


def main() -> None:
    args = parse()
    if args.serve is not None:
        serve_turns(args.model, args.serve)
        return
    from bench.serving import birth_certificate

    turns: dict[tuple[str, int], Turns] = {}
    with sources(args.baseline) as versions, contextlib.ExitStack() as stack:
        for version, source in versions.items():
            for threads in args.threads:
                turns[version, threads] = Turns(source, args.model, threads)
                stack.callback(turns[version, threads].close)
        rates = measure(args, turns)
    print(f"{'scene':8} {'job':10} {'version':12} {'threads':>7} {'tok/s':>8} {'least':>8}")
    for (scene, job, version, threads), values in sorted(rates.items(), key=lambda item: item[0][:2]):
        print(
            f"{scene:8} {job:10} {version[:12]:12} {threads:7} {statistics.median(values):8.1f} {min(values):8.1f}"
        )
    if args.json:
        rows = [{"case": list(case), "rates": values} for case, values in rates.items()]
        args.json.write_text(json.dumps({"certificate": birth_certificate("bench.busy_core"), "rates": rows}))


if __name__ == "__main__":
    main()
