"""What-if: what drafting would bring, from numbers that the user gives. No torch, no model.

acceptance=0.7,0.65,0.6   by depth, of a token whose predecessors were accepted; deeper ones have the last
depth=4                   of the draft; else the best one is found
cost=0.1                  of drafting one token, in plain steps of the target; 0.1 unless given
batch=16                  sequences, one or several: 1,4,16
rows=1:1,16:1.1,80:1.6    time of a pass over 1, 16 and 80 rows; without it rows cost nothing, as few do on a large GPU
experts=128:8             of a mixture of experts, in place of rows: a row reads 8 of 128 experts, and a pass those that
                          any of its rows reads
dense=0.4                 share of the bytes of a pass over one row that are no experts; 0.4 unless given
tok_s=40,150              plain decoding's tokens per second at each batch, for a price; one number: of the first,
                          and the others follow from rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.control.costs import EagerCosts
from outrider.control.expected import Drafts, EagerChains, Prediction, StepCosts, predict
from outrider.control.experts import ExpertCosts
from outrider.draft.names import read_rates
from outrider.errors import InvalidRequest, suggest
from outrider.types import MAX_NODES

FIELDS = ("acceptance", "depth", "cost", "batch", "rows", "experts", "dense", "tok_s")
DEEPEST = 16  # that the best depth is looked for among
MOST_BATCHES, MAX_EXPERTS = 16, 4096
USUAL_DENSE = 0.4  # Qwen3-30B-A3B: 2.5 of 6.1 GB
USUAL_COST = 0.1  # a draft is rarely free: with cost 0 the deepest one would always look best


class _FreeRows:
    """Passes that take the same time whatever their rows."""

    def __init__(self, cost: float) -> None:
        self.cost = cost

    def plain(self, batch: int) -> float:
        return 1.0

    def step(self, batch: int, depth: int, drafted: int) -> float:
        return 1.0 + self.cost * depth


@dataclass(frozen=True, slots=True)
class _Experts:
    """Passes that take as long as reading the bytes of their experts, and of the rest."""

    experts: ExpertCosts
    cost: float

    def plain(self, batch: int) -> float:
        return self._rows(batch)

    def step(self, batch: int, depth: int, drafted: int) -> float:
        return self._rows(batch + drafted) + self.cost * depth * self._rows(batch)

    def _rows(self, rows: int) -> float:
        return (self.experts.dense + self.experts.distinct(rows)) / (self.experts.dense + self.experts.chosen)


@dataclass(frozen=True, slots=True)
class WhatIf:
    acceptance: tuple[float, ...]
    depth: int | None = None
    cost: float = USUAL_COST
    batches: tuple[int, ...] = (1,)
    rows: dict[int, float] = field(default_factory=dict)
    experts: tuple[int, int] | None = None  # in a layer, and of each row
    dense: float = USUAL_DENSE
    tok_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, text: str) -> WhatIf:
        return cls.of_fields(fields_of(text))

    @classmethod
    def of_fields(cls, given: Mapping[str, str]) -> WhatIf:
        if unknown := next((name for name in given if name not in FIELDS), None):
            raise InvalidRequest(f"what-if: no field {unknown!r:.40}{suggest(unknown, FIELDS)}", "what_if")
        if "acceptance" not in given:
            raise InvalidRequest("what-if needs acceptance=0.8,0.7 (by depth)", "acceptance")
        return cls(
            read_rates(given["acceptance"], "acceptance"),
            _whole(given["depth"], "depth", MAX_NODES) if "depth" in given else None,
            number(given["cost"], "cost") if "cost" in given else USUAL_COST,
            tuple(_whole(one, "batch", 4096) for one in given.get("batch", "1").split(",")),
            _curve(given["rows"]) if "rows" in given else {},
            _experts(given["experts"]) if "experts" in given else None,
            _dense(given),
            tuple(number(one, "tok_s") for one in given["tok_s"].split(",")) if "tok_s" in given else (),
        )

    def __post_init__(self) -> None:
        if self.experts is not None and self.rows:
            raise InvalidRequest("rows and experts both say what a pass takes: give one of them", "experts")
        if len(self.batches) > MOST_BATCHES:
            raise InvalidRequest(f"batch: {len(self.batches)} given, at most {MOST_BATCHES}", "batch")
        if len(self.tok_s) not in (0, 1, len(self.batches)):
            raise InvalidRequest(
                f"tok_s has {len(self.tok_s)} rates for {len(self.batches)} batches: one each, or one",
                "tok_s",
            )

    def plain_rates(self) -> list[float]:
        """Tokens per second of plain decoding, by batch."""
        if len(self.tok_s) != 1:
            return list(self.tok_s)
        costs, (first, *_) = self.costs, self.batches
        one = self.tok_s[0] / first * costs.plain(first)  # tokens of a sequence in a unit of time
        return [one * batch / costs.plain(batch) for batch in self.batches]

    @property
    def costs(self) -> StepCosts:
        if self.experts is not None:
            total, chosen = self.experts
            return _Experts(ExpertCosts(total, chosen, chosen * self.dense / (1 - self.dense)), self.cost)
        if not self.rows:
            return _FreeRows(self.cost)
        model = EagerCosts()
        model.by_rows.update(self.rows)
        return EagerChains(model, lambda batch, depth: self.cost * depth * model.step(batch))

    def predictions(self, batch: int) -> dict[int, Prediction]:
        """By depth, as far as the rows' times are known."""
        costs, most = self.costs, max(self.rows, default=1 << 20)
        if self.rows and batch * (1 + (self.depth or 1)) > most:
            raise InvalidRequest(
                f"rows: the curve ends at {most} rows; batch {batch}, {self.depth or 1} deep, has "
                f"{batch * (1 + (self.depth or 1))}",
                "rows",
            )
        depths = [d for d in range(1, max(DEEPEST, self.depth or 0) + 1) if batch * (1 + d) <= most]
        return {d: predict(Drafts.of_rates(self.acceptance, d), batch, costs) for d in depths}

    def answer(self, price: float | None = None) -> list[dict[str, Any]]:
        """By batch: at the depth asked for, else at the best one; and what the best one is."""
        if price is not None and not self.tok_s:
            raise InvalidRequest("a price needs plain decoding's speed: add tok_s=40", "tok_s")
        found = []
        for number, batch in enumerate(self.batches):
            by_depth = self.predictions(batch)
            best = max(by_depth.values(), key=lambda one: one.speedup)
            one = by_depth[self.depth or best.depth]
            row: dict[str, Any] = {}
            row |= {"batch": batch, "depth": one.depth, "tokens_per_step": one.tokens, "speedup": one.speedup}
            row |= {"step": one.seconds / one.plain_seconds, "break_even": one.break_even}
            row |= {"best_depth": best.depth if best.speedup > 1 else 0}
            row |= {"best_speedup": max(best.speedup, 1.0)}
            row |= {"by_depth": [each.speedup for each in by_depth.values()]}
            if price is not None:
                plain = self.plain_rates()[number]
                row |= priced(price, plain, plain * one.speedup)
            found.append(row)
        return found


def priced(price: float, plain: float, speculative: float) -> dict[str, float]:
    """The price of a million tokens with and without drafts, from that of an hour and tokens per second."""
    seconds = price / 3600 * 1e6  # the price of a million seconds
    return {
        "plain_per_million": seconds / plain,
        "per_million": seconds / speculative,
        "saving": 1 - plain / speculative,
    }


def fields_of(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequest(f"what-if: {part!r:.40} is not NAME=VALUE, such as depth=4", "what_if")
        if name in found:
            raise InvalidRequest(f"what-if: {name} is given twice", name)
        found[name] = value
    return found


def _whole(text: str, name: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise InvalidRequest(f"{name} is a whole number from 1 to {most}, not {text!r:.40}", name)
    return int(text)


def _experts(text: str) -> tuple[int, int]:
    count, colon, chosen = text.partition(":")
    if not colon:
        raise InvalidRequest(f"experts are COUNT:PER_TOKEN, such as 128:8, not {text!r:.40}", "experts")
    total = _whole(count, "experts", MAX_EXPERTS)
    return total, _whole(chosen, "experts of a token", total)


def _dense(given: Mapping[str, str]) -> float:
    if "dense" not in given:
        return USUAL_DENSE
    if "experts" not in given:
        raise InvalidRequest("dense is a share beside experts: add experts=128:8", "dense")
    share = number(given["dense"], "dense")
    if share >= 1:
        raise InvalidRequest(f"dense is a share from 0 to less than 1, not {given['dense']!r:.40}", "dense")
    return share


def number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (name in ("tok_s", "price_per_hour") and value == 0):
        raise InvalidRequest(f"{name} is a number that is not negative, not {text!r:.40}", name)
    return value


def _curve(text: str) -> dict[int, float]:
    curve = {}
    for part in text.split(","):
        rows, colon, time = part.partition(":")
        if not colon:
            raise InvalidRequest(f"rows: {part!r:.40} is not ROWS:TIME, such as 16:1.1", "rows")
        curve[_whole(rows, "rows", 1 << 20)] = number(time, "rows")
    if min(curve) > 1 or min(curve.values()) <= 0:
        raise InvalidRequest("rows begins with one row, and times are above 0: rows=1:1,16:1.1", "rows")
    return curve
