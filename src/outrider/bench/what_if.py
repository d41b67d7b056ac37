"""Tables of `advise --what-if`, and of prices. What they show is computed in draft/what_if.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.bench.compare import cut
from outrider.draft.what_if import WhatIf


def price_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows with `priced` in them, by batch, and by draft where there are several."""
    wide = max(5 * ("draft" in rows[0]), *(len(cut(row.get("draft", ""), 14)) for row in rows))
    yield f"{'draft' if wide else '':{wide}} {'batch':>5} {'plain $/M tok':>14} {'speculative':>12} {'saving':>7}"
    for row in rows:
        line = f"{cut(row.get('draft', ''), 14):{wide}} {row['batch']:5} {row['plain_per_million']:14.3f}"
        yield line + f" {row['per_million']:12.3f} {100 * row['saving']:5.0f} %"


def what_if_table(asked: WhatIf, rows: list[dict[str, Any]]) -> Iterator[str]:
    titles = f"{'batch':>5} {'depth':>5} {'speed-up':>8} {'tok/step':>8} {'step':>6} {'breaks even':>11} {'best':>14}"
    yield titles
    for row in rows:
        even = "never" if row["break_even"] is None else f"{row['break_even']:.2f}"
        best = f"{row['best_depth']} deep: {row['best_speedup']:.2f}x" if row["best_depth"] else "no draft"
        line = f"{row['batch']:5} {row['depth']:5} {row['speedup']:7.2f}x {row['tokens_per_step']:8.2f}"
        yield line + f" {row['step']:5.2f}x {even:>11} {best:>14}"
    yield "step: against a plain one; breaks even: at this acceptance, equal at every depth"
    if asked.cost:
        yield f"Drafting a token is taken to cost {asked.cost:g} plain steps; cost=0: nothing, as lookup."
    else:
        yield "Drafting is taken to cost nothing, as lookup does; for a head say cost=0.1."
    if asked.experts is not None:
        yield "Rows are taken to choose experts independently; those of one text share some, and cost less."
        yield f"Of the bytes of a plain pass, {asked.dense:g} are taken to be no experts; dense= says another share."
    elif not asked.rows:
        yield "Rows are taken to cost nothing; rows=1:1,80:1.6 says what a pass over 80 takes."
    if "per_million" in rows[0]:
        yield from price_table(rows)
