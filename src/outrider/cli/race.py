"""A race: one prompt answered plainly and speculatively, in several turns, and what may be concluded from their times.

Turns alternate, so that neither side has the quieter machine. Conditions are equal: a warm engine, temperature 0, and
an owner of its own for each turn, so that none finds another's prompt in the prefix cache nor another's answer in what
lookup remembers. The clock runs from the request to the last token. A turn beside which other programs used the cores
is not counted; if too few turns are left, the race has no speed-up, only counts of tokens and passes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.cli.answer import Answer, Pieces, Received, listen
from outrider.settings import others_seconds
from outrider.types import SamplingParams, StepRecord

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

TOKENS = 128
TURNS = 5  # quiet ones of each side that are wanted
FEWEST = 3  # quiet ones that a speed-up needs
SECONDS = 12.0  # no turn begins later, once FEWEST were tried
BUSY = 0.25  # cores that other programs used during a turn: it is not counted
UNEVEN = 1.35  # the slowest plain turn over the fastest: something disturbed that was not seen
EQUAL = 0.05  # speed-ups this near to 1 are within what turns of the same work differ by


@dataclass(frozen=True, slots=True)
class Scene:
    title: str
    prompt: str
    moral: str  # what its result shows


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer that was timed."""

    seconds: float
    tokens: list[int]
    steps: int
    accepted: Counter[str] = field(default_factory=Counter)  # draft tokens, by drafter
    others: float = 0.0  # cores that other programs used meanwhile


class Side:
    """Plain or speculative: the answer that is shown, and the turns."""

    def __init__(self, title: str) -> None:
        self.title, self.pieces = title, Pieces()
        self.begun: float | None = None
        self.answer: Answer | None = None
        self.turns: list[Turn] = []

    @property
    def seconds(self) -> float:
        """The median of the turns; of the first one, the time so far."""
        if self.turns:
            return median(turn.seconds for turn in self.turns)
        return 0.0 if self.begun is None else time.perf_counter() - self.begun

    @property
    def tokens_per_step(self) -> float:
        return median(len(turn.tokens) / turn.steps for turn in self.turns)

    def summary(self) -> str:
        if not self.turns:
            return f"{self.seconds:.1f} s" if self.begun is not None else "waits"
        rate = len(self.turns[0].tokens) / self.seconds
        median = f" (median of {len(self.turns)})" if len(self.turns) > 1 else ""
        return f"{self.seconds:.2f} s{median}, {rate:.0f} tok/s, {self.tokens_per_step:.1f} a step"


class Race:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.plain, self.speculative = Side("plain"), Side("speculative")

    def run(self, llm: LLM, show: Callable[[Side], None]) -> None:
        """Calls `show` as tokens of the first turns come, and after every turn."""
        begun = time.monotonic()
        while self._wants_more(time.monotonic() - begun):
            sides = (self.plain, self.speculative)
            # Every other round begins with the other side.
            for side in sides if len(self.plain.turns) % 2 == 0 else sides[::-1]:
                side.turns.append(take_turn(llm, self.scene.prompt, side, side is self.speculative, show))
                show(side)

    def _wants_more(self, seconds: float) -> bool:
        tried = len(self.plain.turns)
        return len(self.quiet) < TURNS and (tried < FEWEST or seconds < SECONDS)

    @property
    def quiet(self) -> list[tuple[Turn, Turn]]:
        """Rounds that no other program disturbed."""
        rounds = zip(self.plain.turns, self.speculative.turns, strict=False)
        return [pair for pair in rounds if max(turn.others for turn in pair) <= BUSY]

    @property
    def busy(self) -> bool:
        times = [plain.seconds for plain, _ in self.quiet]
        return len(times) < FEWEST or max(times) > UNEVEN * min(times)

    @property
    def ratios(self) -> list[float]:
        """Speed-ups of the quiet rounds, the lowest first."""
        return sorted(plain.seconds / speculative.seconds for plain, speculative in self.quiet)

    @property
    def same_tokens(self) -> int:
        """Tokens that all turns of both sides have in common, if they are equally many."""
        answers = [turn.tokens for turn in (*self.plain.turns, *self.speculative.turns)]
        if len({len(tokens) for tokens in answers}) > 1:
            return 0
        return sum(len(set(column)) == 1 for column in zip(*answers, strict=True))

    @property
    def identical(self) -> bool:
        return self.same_tokens == len(self.plain.turns[0].tokens)

    @property
    def drafters(self) -> str:
        """Who drafted what was accepted, the one with the most first."""
        accepted = sum((turn.accepted for turn in self.speculative.turns), Counter[str]())
        return " and ".join(name for name, count in accepted.most_common() if count)

    def verdict(self) -> str:
        total = len(self.plain.turns[0].tokens)
        held = round(mean(turn.accepted.total() for turn in self.speculative.turns))
        by = f"{held} of them drafted by {self.drafters}" if held else "none of them drafted"
        return f"{self._pace()}; {self.same_tokens} of {total} tokens identical, {by}"

    def _pace(self) -> str:
        """A difference is claimed if all quiet turns but one agree on it. A busy machine has no speed-up."""
        passes = self.speculative.tokens_per_step
        steps = f": {passes:.1f} tokens a pass of the model instead of 1.0" if passes >= 1.05 else ""
        if self.busy:
            return f"the machine is busy, so there is no speed-up to tell{steps}"
        ratios = self.ratios
        ratio, turns = (
            median(ratios),
            f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x in {len(ratios)} turns",
        )
        if ratio > 1 + EQUAL and ratios[1] > 1:
            return f"{ratio:.1f}x faster ({turns}){steps}"
        if ratio < 1 - EQUAL and ratios[-2] < 1:
            return f"slower here, {ratio:.2f}x ({turns}){steps}"
        return f"as fast as plain decoding (within {100 * EQUAL:.0f} %, {len(ratios)} turns)"

    def others(self) -> float:
        """Cores that other programs used, on average."""
        return mean(turn.others for turn in (*self.plain.turns, *self.speculative.turns))


def take_turn(llm: LLM, prompt: str, side: Side, speculate: bool, show: Callable[[Side], None]) -> Turn:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    if not speculate:
        params = replace(params, speculation=False)  # type: ignore[arg-type] # SamplingParams reads it
    received: Received = queue.SimpleQueue()
    accepted, first = Counter[str](), not side.turns
    ids = prompt_ids(llm, prompt)
    with _watched_steps(llm, accepted):
        before, begun = _others_seconds(), time.perf_counter()
        answer = Answer(llm, ids, params, received, owner=f"demo {side.title} {len(side.turns)}")
        if first:
            side.begun, side.answer = begun, answer
        with contextlib.closing(listen({answer.request.id: answer}, received)) as events:
            for _ in events:
                if first:
                    side.pieces += answer.fresh
                    show(side)
        seconds = answer.ended - answer.begun
    sequence = answer.sequences[0]
    return Turn(seconds, sequence.output, sequence.steps, accepted, (_others_seconds() - before) / seconds)


@contextlib.contextmanager
def _watched_steps(llm: LLM, accepted: Counter[str]) -> Iterator[None]:
    """Counts accepted draft tokens by drafter."""

    def stepped(record: StepRecord) -> None:
        for outcome in record.outcomes:
            accepted[outcome.draft_plan.drafter] += outcome.accepted
        if before is not None:
            before(record)

    before, llm.driver.observer = llm.driver.observer, stepped
    try:
        yield
    finally:
        llm.driver.observer = before


def _others_seconds() -> float:
    own = os.times()
    return others_seconds(own.user + own.system) or 0.0


def median(values: Iterable[float]) -> float:
    """Python's own `statistics` takes too long to import for a command line."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def prompt_ids(llm: LLM, prompt: str) -> list[int]:
    if llm.template is None:
        return llm.tokenizer.encode(f"{prompt}\n\n")
    return llm.chat_ids([{"role": "user", "content": prompt}])
