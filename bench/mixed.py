"""Measures what a few requests with logprobs, a grammar, penalties or a prediction cost a batch.

    python -m bench.mixed smollm2-135m --as-if 8b --draft-as-if 1536:28:24:8:6144 --draft-layers 0-3,5-16,18-29 \
        --batch 16 --rounds 6 --json mixed.json

One request of the mixed batch has logprobs, one a JSON grammar, one penalties and one a prediction. The other batch has
the same prompts and seeds without them. The planner decides for both, and they run in turn. Rates count the tokens from
the moment every request has its first token to the moment the first request ends, so the batch is whole. `others` are
the requests without extras: their tokens must be the same in both batches, and what they lose is their cost.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.bench.compare import differing
from outrider.bench.speculation import groups_of
from outrider.cli.measure import Report, described
from outrider.cli.output import open_llm
from outrider.cli.tasks import tasks_of
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest, OutriderError, stopped
from outrider.settings import Settings
from outrider.types import Event, Request, SamplingParams

GOAL = 0.93  # tokens per second of the mixed batch over the other's, on an H200
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
# More items than any request has tokens for: the answer must not end before the others.
ASKED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 5},
    "grammar": {"grammar": {"json_schema": {"type": "array", "items": ITEM, "minItems": 1000}}},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "prediction": {},  # `_predicted` makes its text from the prompt's own answer
}
OTHERS = "others"


@dataclass(slots=True)
class Batch:
    """A batch while it runs. `_received` is called on the engine's thread."""

    llm: LLM
    requests: list[Request]
    answers: dict[str, list[int]] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)  # tokens of each when the last one got its first
    within: dict[str, int] = field(default_factory=dict)  # tokens of each when the first one ended
    begin: float = 0.0
    end: float = 0.0
    left: int = 0
    failure: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        self.left = len(self.requests)
        self.llm.driver.submit(self.requests, self._received)
        while not self.done.wait(0.5):
            self.llm.driver.check()
        if self.failure is not None:
            raise stopped(self.failure) from self.failure

    def _received(self, event: Event | BaseException) -> None:
        if isinstance(event, BaseException):
            self.failure = event
            self.done.set()
            return
        self.answers.setdefault(event.request_id, []).extend(event.token_ids)
        if not self.before and len(self.answers) == len(self.requests):
            self.begin, self.before = time.perf_counter(), self._counts()
        if event.finish_reason:
            self.left -= 1
            if not self.within:
                self._close()
        if not self.left:
            self.done.set()

    def _close(self) -> None:
        """Ends the measurement and aborts the other requests: the batch is no longer whole."""
        self.end, self.within = time.perf_counter(), self._counts()
        for request in self.requests:
            self.llm.driver.abort(request.id)

    def _counts(self) -> dict[str, int]:
        return {name: len(tokens) for name, tokens in self.answers.items()}

    def rate(self, numbers: Seq[int]) -> float:
        """Tokens per second of these requests while all ran."""
        if not self.before:
            raise InvalidRequest("an answer ended before all had a token; ask for more --tokens", "tokens")
        names = [self.requests[i].id for i in numbers]
        return sum(self.within[name] - self.before[name] for name in names) / (self.end - self.begin)

    def answer(self, number: int) -> list[int]:
        return self.answers[self.requests[number].id]


class Mixed:
    """Both batches, with the same prompts. The first requests of the mixed one have the extras."""

    def __init__(self, llm: LLM, kinds: Mapping[str, Mapping[str, Any]], params: SamplingParams) -> None:
        self.llm, self.kinds, self.params = llm, kinds, params
        self.plain: list[Batch] = []
        self.mixed: list[Batch] = []

    def round(self, prompts: Seq[list[int]], mixed_first: bool, kept: bool = True) -> None:
        each = [replace(self.params, seed=(self.params.seed or 0) + i) for i in range(len(prompts))]
        asked = [replace(p, **more) for p, more in zip(each, self.kinds.values(), strict=False)]
        if "prediction" in self.kinds:
            at = list(self.kinds).index("prediction")
            asked[at] = replace(asked[at], prediction=self._predicted(prompts[at], each[at]))
        asked += each[len(asked) :]
        for mixed in (True, False) if mixed_first else (False, True):
            requests = [
                self.llm.request(ids, one, owner=secrets.token_hex(8))
                for ids, one in zip(prompts, asked if mixed else each, strict=True)
            ]
            batch = Batch(self.llm, requests)
            batch.run()
            if kept:
                (self.mixed if mixed else self.plain).append(batch)

    def _predicted(self, ids: list[int], params: SamplingParams) -> str:
        """The prompt's own answer with something else in the middle."""
        plain = replace(params, speculation=False)  # type: ignore[arg-type]
        text = self.llm.generate([ids], plain, owner=secrets.token_hex(8))[0].text
        return f"{text[: len(text) // 2]} or so {text[len(text) // 2 :]}"

    def summary(self) -> dict[str, Any]:
        size = len(self.plain[0].requests)
        whose = {"all": range(size), OTHERS: range(len(self.kinds), size)}
        whose |= {kind: range(i, i + 1) for i, kind in enumerate(self.kinds)}
        pairs = list(zip(self.plain, self.mixed, strict=True))
        wrong = compared = 0
        for without, among in pairs:
            for i in whose[OTHERS]:
                a, b = without.answer(i), among.answer(i)
                common = min(len(a), len(b))  # either may have been cut short
                wrong, compared = wrong + differing(a[:common], b[:common]), compared + common
        rates = {name: [(a.rate(n), b.rate(n)) for a, b in pairs] for name, n in whose.items() if len(n)}
        return {
            "batch": size,
            "rounds": len(pairs),
            "rates": {name: _figures(some) for name, some in rates.items()},
            "compared": compared,
            "differing": wrong,
        }


def _figures(rates: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [mixed / without for without, mixed in rates if without]
    return {
        "without_tok_s": statistics.median(without for without, _ in rates),
        "mixed_tok_s": statistics.median(mixed for _, mixed in rates),
        "ratio": statistics.median(ratios) if ratios else 0.0,
        "worst": min(ratios, default=0.0),
    }


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams, given: argparse.Namespace) -> Mixed:
    kinds = {kind: more for kind, more in ASKED.items() if kind not in given.without}
    if given.batch < len(kinds):
        raise InvalidRequest(f"a batch of {given.batch} cannot hold {len(kinds)} kinds of requests", "batch")
    if "grammar" in kinds:
        try:
            _ = llm.compiler
        except OutriderError as missing:
            raise OutriderError(f"{missing}; or leave it out with --no-grammar") from None
    groups = groups_of(prompts * given.rounds, given.batch, given.rounds)
    made = Mixed(llm, kinds, params)
    llm.prepare(given.batch)
    for mixed_first in (False, True):  # kernels, graphs and the planner's estimates
        made.round(groups[0], mixed_first, kept=False)
    for number in range(given.rounds):
        made.round(groups[number % len(groups)], mixed_first=number % 2 == 1)
        figures = made.summary()["rates"]["all"]
        print(f"round {number + 1} of {given.rounds}: {figures['ratio']:.3f}x so far", flush=True)
    return made


def table(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{'':12} {'without':>10} {'mixed':>10} {'ratio':>8} {'lowest':>8}"]
    for name, one in found["rates"].items():
        rates = f"{one['without_tok_s']:10.1f} {one['mixed_tok_s']:10.1f}"
        lines.append(f"{name:12} {rates} {one['ratio']:7.3f}x {one['worst']:7.3f}x")
    verdict = f"{found['differing']} DIFFER" if found["differing"] else "identical"
    lines.append(f"tokens a second; {found['compared']} tokens of the others compared: {verdict}")
    return lines


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--as-if", help="a shape, as outrider bench takes it")
    parser.add_argument("--draft", default="auto", help="as outrider bench takes it")
    parser.add_argument("--draft-as-if", help="with --as-if: draft with the same model in this shape")
    parser.add_argument("--draft-layers", help="how many of its layers to keep, or which: 0-3,5-29")
    parser.add_argument("--prompts", help="a file of prompts; built-in ones without it")
    parser.add_argument("--tasks", default="chat,rewrite")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192, help="maximum per answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--cache-bytes", type=int, default=0, help="0: as the device has room")
    parser.add_argument("--json", help="a file for the results")
    for kind in ASKED:
        parser.add_argument(
            f"--no-{kind}", dest="without", action="append_const", const=kind, default=[],
            help=f"leave out the request with {'a ' if kind in ('grammar', 'prediction') else ''}{kind}",
        )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    given = arguments(argv)
    report = Report("mixed", given.json)
    settings = Settings(
        device=given.device, context=given.context, max_sequences=given.batch, cache_bytes=given.cache_bytes
    )
    params = SamplingParams(
        temperature=given.temperature, max_tokens=given.tokens, ignore_eos=True, seed=given.seed
    )
    with open_llm(
        given.model, given.draft, settings, given.as_if, given.draft_as_if, given.draft_layers
    ) as llm:
        report |= described(llm, "python -m bench.mixed")
        tasks = tasks_of(llm, given.prompts, None, given.tasks)
        made = measure(llm, [ids for some in tasks.values() for ids in some], params, given)
    found = made.summary()
    report |= {"goal": GOAL, "left_out": given.without, **found}
    print("\n".join(table(found)))
    ratio = found["rates"]["all"]["ratio"]
    print(f"all: {ratio:.3f}x of the batch without them; the goal on an H200 is {GOAL}x")
    report.deliver()


if __name__ == "__main__":
    main()
