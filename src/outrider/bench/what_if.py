"""`--what-if`: what drafting would bring, from numbers that the user gives. No torch, no model.

acceptance=0.7,0.65,0.6   by depth, of a token whose predecessors were accepted; deeper ones have the last
depth=4                   of the draft; else the best one is found
cost=0.1                  of drafting one token, in plain steps of the target; 0.1 unless given
batch=16                  sequences, one or several: 1,4,16
rows=1:1,16:1.1,80:1.6    time of a pass over so many rows; without it rows cost nothing, as on a large GPU with few
tok_s=40                  plain decoding's tokens a second at that batch, for a price
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.control.costs import EagerCosts
from outrider.control.expected import Drafts, EagerChains, Prediction, StepCosts, predict
from outrider.draft.names import read_rates
from outrider.errors import InvalidRequest, suggest
from outrider.types import MAX_NODES

FIELDS = ("acceptance", "depth", "cost", "batch", "rows", "tok_s")
DEEPEST = 16  # that the best depth is looked for among
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
class WhatIf:
    acceptance: tuple[float, ...]
    depth: int | None = None
    cost: float = USUAL_COST
    batches: tuple[int, ...] = (1,)
    rows: dict[int, float] = field(default_factory=dict)
    tok_s: float | None = None

    @classmethod
    def of(cls, text: str) -> WhatIf:
        given = _fields(text)
        if "acceptance" not in given:
            raise InvalidRequest("--what-if needs acceptance=0.8,0.7 (by depth)", "acceptance")
        return cls(
            read_rates(given["acceptance"], "acceptance"),
            _whole(given["depth"], "depth", MAX_NODES) if "depth" in given else None,
            _number(given["cost"], "cost") if "cost" in given else USUAL_COST,
            tuple(_whole(one, "batch", 4096) for one in given.get("batch", "1").split(",")),
            _curve(given["rows"]) if "rows" in given else {},
            _number(given["tok_s"], "tok_s") if "tok_s" in given else None,
        )

    @property
    def costs(self) -> StepCosts:
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
        if price is not None and self.tok_s is None:
            raise InvalidRequest("a price needs plain decoding's speed: add tok_s=40 to --what-if", "tok_s")
        found = []
        for batch in self.batches:
            by_depth = self.predictions(batch)
            best = max(by_depth.values(), key=lambda one: one.speedup)
            one = by_depth[self.depth or best.depth]
            row: dict[str, Any] = {}
            row |= {"batch": batch, "depth": one.depth, "tokens_per_step": one.tokens, "speedup": one.speedup}
            row |= {"step": one.seconds / one.plain_seconds, "break_even": one.break_even}
            row |= {"best_depth": best.depth if best.speedup > 1 else 0}
            row |= {"best_speedup": max(best.speedup, 1.0)}
            if price is not None and self.tok_s:
                row["per_million"] = per_million(price, self.tok_s * one.speedup)
                row["plain_per_million"] = per_million(price, self.tok_s)
            found.append(row)
        return found


def per_million(price: float, tokens_per_second: float) -> float:
    """The price of a million tokens, from that of an hour."""
    return price / 3600 / tokens_per_second * 1e6


def what_if_table(asked: WhatIf, rows: list[dict[str, Any]]) -> Iterator[str]:
    priced = "per_million" in rows[0]
    titles = f"{'batch':>5} {'depth':>5} {'speed-up':>8} {'tok/step':>8} {'step':>6} {'breaks even':>11} {'best':>14}"
    yield titles + (f" {'$/M tok':>8}" if priced else "")
    for row in rows:
        even = "never" if row["break_even"] is None else f"{row['break_even']:.2f}"
        best = f"{row['best_depth']} deep: {row['best_speedup']:.2f}x" if row["best_depth"] else "no draft"
        line = f"{row['batch']:5} {row['depth']:5} {row['speedup']:7.2f}x {row['tokens_per_step']:8.2f}"
        line += f" {row['step']:5.2f}x {even:>11} {best:>14}"
        yield line + (f" {row['per_million']:8.3f}" if priced else "")
    yield "step: against a plain one; breaks even: at this acceptance, equal at every depth"
    if asked.cost:
        yield f"Drafting a token is taken to cost {asked.cost:g} plain steps; cost=0: nothing, as lookup."
    else:
        yield "Drafting is taken to cost nothing, as lookup does; for a head say cost=0.1."
    if not asked.rows:
        yield "Rows are taken to cost nothing; rows=1:1,80:1.6 says what a pass over 80 takes."


def _fields(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequest(f"--what-if: {part!r:.40} is not NAME=VALUE, such as depth=4", "what_if")
        if name not in FIELDS:
            raise InvalidRequest(f"--what-if: no field {name!r:.40}{suggest(name, FIELDS)}", "what_if")
        if name in found:
            raise InvalidRequest(f"--what-if: {name} is given twice", name)
        found[name] = value
    return found


def _whole(text: str, name: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise InvalidRequest(f"{name} is a whole number from 1 to {most}, not {text!r:.40}", name)
    return int(text)


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (name == "tok_s" and value == 0):
        raise InvalidRequest(f"{name} is a number that is not negative, not {text!r:.40}", name)
    return value


def _curve(text: str) -> dict[int, float]:
    curve = {}
    for part in text.split(","):
        rows, colon, time = part.partition(":")
        if not colon:
            raise InvalidRequest(f"rows: {part!r:.40} is not ROWS:TIME, such as 16:1.1", "rows")
        curve[_whole(rows, "rows", 1 << 20)] = _number(time, "rows")
    if min(curve) > 1 or min(curve.values()) <= 0:
        raise InvalidRequest("rows begins with one row, and times are above 0: rows=1:1,16:1.1", "rows")
    return curve
