"""The card of a pair: what is known of a draft and the target it was made for, in `card.json` beside its weights.

It holds counts, not rates: rates of several tasks can then be put together. docs/pairs.md says what is counted. Reading
is strict, because what a card says decides which draft is taken. No torch here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from outrider.errors import BadCheckpoint, suggest
from outrider.load.json_files import read_json

FILE = "card.json"
VERSION = 1
KINDS = ("eagle", "lm")
# Layouts of a draft's files, and the engines that read them.
ENGINES = {
    "outrider": ("outrider",),
    "eagle3": ("outrider", "vllm", "sglang"),
    "speculators": ("outrider", "vllm"),
    "huggingface": ("outrider", "vllm", "sglang", "transformers"),
    "gguf": ("outrider", "llama.cpp"),
}


@dataclass(frozen=True, slots=True)
class TargetFacts:
    name: str
    fingerprint: str  # load/pairs.py has how it is made
    parameters: int

    def __post_init__(self) -> None:
        _require(re.fullmatch(r"[0-9a-f]{64}", self.fingerprint), "fingerprint must be 64 hexadecimal digits")
        _require(self.parameters > 0, "parameters must be above 0")


@dataclass(frozen=True, slots=True)
class DraftFacts:
    kind: str
    layout: str
    parameters: int
    engines: tuple[str, ...]  # that can load it

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"kind must be {' or '.join(KINDS)}, not {self.kind!r:.40}")
        _require(
            self.layout in ENGINES, f"layout must be one of {', '.join(ENGINES)}, not {self.layout!r:.40}"
        )
        _require(self.parameters > 0, "parameters must be above 0")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over steps with a draft. A position is reached where everything before it in the draft was accepted and
    the draft has a token for it; it is accepted where one of those is the target's.
    """

    steps: int = 0
    tokens: int = 0  # that these steps brought, the target's own included
    reached: tuple[int, ...] = ()  # positions, by depth
    accepted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fit = len(self.reached) == len(self.accepted)
        fit = fit and all(0 <= a <= r for a, r in zip(self.accepted, self.reached, strict=True))
        _require(
            fit,
            "reached and accepted must be as long as each other, and no depth accept more than it reached",
        )
        _require(
            0 <= self.steps <= max(self.tokens, 0), "steps must be between 0 and the tokens they brought"
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        def added(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))

        return Acceptance(
            self.steps + other.steps,
            self.tokens + other.tokens,
            added(self.reached, other.reached),
            added(self.accepted, other.accepted),
        )

    @property
    def rate(self) -> float | None:
        """Accepted over reached positions of all depths: the accept rate, of a tree the effective one."""
        return sum(self.accepted) / sum(self.reached) if sum(self.reached) else None

    @property
    def by_depth(self) -> tuple[float | None, ...]:
        """The same at each depth, given that the one before was accepted."""
        return tuple(a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None


@dataclass(frozen=True, slots=True)
class TaskScore:
    task: str
    temperature: float
    prompts: int
    chain: Acceptance
    tree: Acceptance
    expected_speedup: float | None = None  # at batch 1, by the engine's cost model
    speedup: float | None = None  # measured at batch 1, the planner deciding: median over prompts
    compared: int = 0  # tokens, with plain decoding's
    differing: int = 0  # answers that are not plain decoding's
    # Mean that the target gave the tokens of its answers: how predictable these texts are, whatever the draft.
    target_probability: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    depth: int  # of chains
    tree_nodes: int
    max_tokens: int  # of an answer
    tasks: tuple[TaskScore, ...]
    machine: str
    date: str
    commit: str
    versions: str

    def __post_init__(self) -> None:
        _require(self.tasks, "tasks must not be empty")
        _require_date(self.date)

    def mean(
        self, figure: Callable[[TaskScore], float | None], temperature: float | None = None
    ) -> float | None:
        """Over tasks, each counting the same; at one temperature, or at all."""
        found = [figure(one) for one in self.at(temperature)]
        known = [value for value in found if value is not None]
        return math.fsum(known) / len(known) if known else None

    def at(self, temperature: float | None = None) -> list[TaskScore]:
        return [one for one in self.tasks if temperature in (None, one.temperature)]

    @property
    def accept_rate(self) -> float | None:
        return self.mean(lambda one: one.chain.rate)

    @property
    def effective_accept_rate(self) -> float | None:
        return self.mean(lambda one: one.tree.rate)

    @property
    def tokens_per_step(self) -> float | None:
        return self.mean(lambda one: one.chain.tokens_per_step)

    @property
    def expected_speedup(self) -> float | None:
        return self.mean(lambda one: one.expected_speedup)

    @property
    def speedup(self) -> float | None:
        return self.mean(lambda one: one.speedup)

    @property
    def first_accept_rate(self) -> float | None:
        """Of the first token of a chain."""
        return self.mean(lambda one: one.chain.by_depth[0] if one.chain.by_depth else None)

    @property
    def target_probability(self) -> float | None:
        return self.mean(lambda one: one.target_probability)

    def chain(self, temperature: float | None = None) -> Acceptance:
        """All tasks together, every position counting the same."""
        return sum((one.chain for one in self.at(temperature)), Acceptance())

    def tree(self, temperature: float | None = None) -> Acceptance:
        return sum((one.tree for one in self.at(temperature)), Acceptance())


@dataclass(frozen=True, slots=True)
class Measured:
    """A speed-up that was measured elsewhere than by `outrider pairs score`, and where it comes from."""

    task: str
    temperature: float
    speedup: float  # over plain decoding, one sequence, the planner deciding
    machine: str
    date: str
    commit: str
    command: str

    def __post_init__(self) -> None:
        _require(self.speedup > 0, "speedup must be above 0")
        _require_date(self.date)


@dataclass(frozen=True, slots=True)
class Card:
    version: int
    target: TargetFacts
    draft: DraftFacts
    licence: str | None = None  # of the draft's weights
    trained_tokens: int | None = None
    recipe: str | None = None  # digest of what it was trained by
    score: Score | None = None
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        _require(self.version == VERSION, f"version must be {VERSION}, not {self.version}")

    @property
    def ratio(self) -> float:
        return self.draft.parameters / self.target.parameters

    @property
    def speedup(self) -> float | None:
        """The score's, else the mean of what was measured elsewhere."""
        own = None if self.score is None else self.score.speedup
        found = [one.speedup for one in self.measured]
        return math.fsum(found) / len(found) if own is None and found else own

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def tokens_trained(made: Mapping[str, Any]) -> int | None:
    """That a draft has seen, by its train.json: also in the trainings that this one went on from."""
    if "tokens_seen" not in made:
        return None
    return int(made["tokens_seen"]) + int(made.get("continued_from", {}).get("tokens_seen", 0))


def card_from_json(raw: Any) -> Card:
    """Raises ValueError, which names the field."""
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is int and version > VERSION:
        raise ValueError(f"version {version} was written by a newer Outrider; this one reads {VERSION}")
    return _decode(Card, raw, "")


def read_card(folder: Path) -> Card:
    file = folder / FILE
    try:
        return card_from_json(read_json(file))
    except ValueError as wrong:
        raise BadCheckpoint(f"{file}: {wrong}") from None


def write_card(folder: Path, card: Card) -> Path:
    """A reader never sees half of it."""
    file = folder / FILE
    part = file.with_name(f".{FILE}.part")
    part.write_text(json.dumps(card.as_json(), indent=1) + "\n", encoding="utf-8")
    part.replace(file)
    return file


WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _require(sound: object, message: str) -> None:
    if not sound:
        raise ValueError(message)


def _require_date(text: str) -> None:
    _require(re.fullmatch(r"\d{4}-\d\d-\d\d", text), f"date must be like 2026-01-31, not {text!r:.40}")


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`: a dataclass, a tuple of one kind, something or None, or a plain value."""
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, where)
    if get_origin(kind) is tuple:
        _require(isinstance(value, list), f"{where} must be a list, not {value!r:.60}")
        item = get_args(kind)[0]
        return tuple(_decode(item, one, f"{where}[{i}]") for i, one in enumerate(value))
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        [kind] = [one for one in get_args(kind) if one is not types.NoneType]
        return _decode(kind, value, where)
    number = type(value) in (int, float) and math.isfinite(value)
    _require(
        number if kind is float else type(value) is kind, f"{where} must be {WORDS[kind]}, not {value!r:.60}"
    )
    _require(kind is not str or value.isprintable(), f"{where} holds characters that cannot be shown")
    return float(value) if kind is float else value


def _object(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), f"{where or 'it'} must be an object, not {value!r:.60}")
    hints, known = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    within = f"{where}." if where else ""
    for name in value:
        if name not in known:
            raise ValueError(f"unknown field {within + str(name)!r:.80}{suggest(str(name), known)}")
    for name, field in known.items():
        _require(name in value or field.default is not dataclasses.MISSING, f"{within}{name} is missing")
    given = {name: _decode(hints[name], value[name], within + name) for name in known if name in value}
    try:
        return kind(**given)
    except ValueError as wrong:
        raise ValueError(f"{within}{wrong}") from None
