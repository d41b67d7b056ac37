"""The look of every page of results: one file each, with nothing fetched from elsewhere, for light and dark screens,
phones and paper. A page begins with a headline, and sections without content are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1d2023; --soft: #565c63; --line: #dedbd1; --page: #fff; --panel: #f6f5f0;
  --bar: #0d6b5c; --mark: #c2571a; --good: #2f66b3; --bad: #a3341f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e7e1; --soft: #a7adb4; --line: #343a40; --page: #131517;
  --panel: #1b1e21; --bar: #5fd0ae; --mark: #f0985c; --good: #80b4f3; --bad: #f29a84; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); } h3 { margin-bottom: .3rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin-bottom: 1rem; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: middle; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } .n { text-align: right; font-variant-numeric: tabular-nums; }
td code { font-size: .75rem; color: var(--soft); word-break: break-word; }
pre { background: var(--panel); padding: .6rem .8rem; white-space: pre-wrap; word-break: break-word; font-size: .8rem; }
.small { color: var(--soft); font-size: .8rem; } .as-if { border-left: 3px solid var(--mark); padding-left: .8rem; }
.met { color: var(--bar); white-space: nowrap; } .missed { color: var(--bad); font-weight: 600; white-space: nowrap; }
.none { color: var(--soft); white-space: nowrap; } .bar { fill: var(--bar); }
.mark { stroke: var(--mark); stroke-width: 2; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg.chart { width: 100%; height: auto; overflow: visible; }
.grid { stroke: var(--line); stroke-width: 1; } .chart text { fill: var(--soft); font-size: 12px; }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { opacity: 0; } .dot:hover,
.only { opacity: 1; fill: none; stroke-width: 2; }
.s0 { stroke: var(--bar); } .s1 { stroke: var(--mark); stroke-dasharray: 6 3; } .s2 { stroke: var(--good);
  stroke-dasharray: 2 3; } .s3 { stroke: var(--soft); stroke-dasharray: 8 3 2 3; }
.b0 { fill: var(--bar); } .b1 { fill: var(--mark); } .b2 { fill: var(--good); } .b3 { fill: var(--soft); }
.line { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.headline { font-size: 1.25rem; font-weight: 600; margin: .2rem 0 1rem; } .chart .figure { fill: var(--ink);
  stroke: var(--page); stroke-width: 3px; paint-order: stroke; }
.error { stroke: var(--ink); stroke-width: 1; } details { margin: 1rem 0; } summary { cursor: pointer; }
@media (max-width: 30rem) { body { margin: 1rem auto; font-size: 14px; } h1 { font-size: 1.25rem; }
  .headline { font-size: 1.05rem; } th, td { padding: .25rem .4rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --page: #fff; --panel: #f6f5f0;
  --bar: #0d6b5c; --mark: #c2571a; --good: #2f66b3; --bad: #a3341f; }
  body { max-width: none; margin: 0; font-size: 10pt; }
  .wide { overflow: visible; } .wide table { font-size: 6.5pt; } th, td { padding: .1rem .25rem; }
  figure, tr, h2, h3 { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } }
.key { color: var(--soft); font-size: .8rem; margin-right: 1rem; } .key svg { vertical-align: middle; }
"""


def number(value: float) -> str:
    """As many digits as tell something."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """Cells are HTML already. A head that begins with ~ is of a column of numbers. Empty columns are left out."""
    rows = list(rows)
    filled = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    heads, rows = [heads[i] for i in filled], [[row[i] for i in filled] for row in rows]
    right = [head.startswith("~") for head in heads]

    def cells(kind: str, texts: list[str]) -> str:
        return "".join(
            f"<{kind}{' class=n' if r else ''}>{text}</{kind}>" for text, r in zip(texts, right, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = cells("th", [escape(head.removeprefix("~")) for head in heads])
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def document(title: str, headline: str, body: str) -> str:
    """A whole page. `headline` is the result in one line of text; `body` is HTML already."""
    said = f'<p class="headline">{escape(headline)}</p>' if headline else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{said}{body}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Nothing if it has no content."""
    content = "".join(parts)
    return f"<h2>{escape(title)}</h2>{content}" if content else ""


def charts(drawn: Iterable[str]) -> str:
    content = "".join(drawn)
    return f'<div class="charts">{content}</div>' if content else ""


def facts(found: Mapping[str, Any]) -> str:
    """What was asked for or found, a row each; what was not is left out."""
    rows = [
        [escape(name.replace("_", " ")), escape(str(value))]
        for name, value in found.items()
        if value is not None
    ]
    return table(["", ""], rows) if rows else ""


def certified(certificate: Mapping[str, str]) -> str:
    """Where the numbers come from."""
    where = " · ".join(escape(str(certificate[part])) for part in ("machine", "versions", "commit"))
    return f'<pre>{escape(certificate["command"])}</pre><p class="small">{where}</p>'


# ---------------------------------------------------------------------------------------------------------- charts

WIDE, HIGH, LEFT, BELOW = 480, 240, 50, 34  # of a chart, and the room for its scales
THICK, GAP = 14, 8  # of a bar, and between two categories
LETTER = 7.5  # the width of a letter, about
STYLES = 4  # of lines
MANY = 30  # times the least value the greatest must be for a scale by orders of magnitude


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart; `said` is what each of its points is called. `spans`: see Bars."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    said: Sequence[str]
    spans: Sequence[tuple[float, float] | None] = ()


def chart(
    title: str, series: Sequence[Series], ticks: Sequence[tuple[float, str]], across: str, up: str
) -> str:
    """Lines over one another. `ticks` are of the horizontal scale; points say their values when pointed at."""
    series = [one for one in series if one.xs]
    if not series:
        return ""
    values = [y for one in series for y in (*one.ys, *(end for span in one.spans if span for end in span))]
    log = min(values) > 0 and max(values) > MANY * min(values)
    marks = _orders(min(values), max(values)) if log else even(max(values))
    low, high = (math.log10(marks[0]), math.log10(marks[-1])) if log else (0.0, marks[-1])
    left = min(min(x for one in series for x in one.xs), min(x for x, _ in ticks))
    right = max(max(x for one in series for x in one.xs), max(x for x, _ in ticks))

    def at(x: float, y: float) -> tuple[float, float]:
        shown = math.log10(y) if log else y
        return (
            LEFT + (WIDE - LEFT) * (x - left) / ((right - left) or 1),
            (HIGH - BELOW) * (1 - (shown - low) / ((high - low) or 1)),
        )

    drawn = [_level(at(left, mark)[1], number(mark)) for mark in marks]
    drawn += [_column(at(x, marks[-1])[0], text) for x, text in ticks]
    drawn += [f'<text x="{WIDE}" y="{HIGH - 2}" text-anchor="end">{escape(across)}</text>']
    drawn += [_line(one, index % STYLES, at, up) for index, one in enumerate(series)]
    keys = (
        "".join(_key(one.name, index % STYLES) for index, one in enumerate(series)) if len(series) > 1 else ""
    )
    return _figure(title, up, keys, [one.name for one in series], drawn)


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar a category; None: there is none. `spans` are the lowest and highest that a value may be."""

    name: str
    values: Sequence[float | None]
    spans: Sequence[tuple[float, float] | None] = ()


def bars(
    title: str, categories: Sequence[str], series: Sequence[Bars], up: str, mark: float | None = None
) -> str:
    """Bars from 0 to the right, those of a category one below the other, with figures and error bars. `mark` is a level
    to compare with.
    """
    series = [one for one in series if any(value is not None for value in one.values)]
    if not series:
        return ""
    left = 12 + LETTER * max(map(len, categories))
    ends = [span[1] for one in series for span in one.spans if span is not None]
    levels = even(max(*(v for one in series for v in one.values if v is not None), *ends, mark or 0.0))
    high = len(categories) * (THICK * len(series) + GAP)
    shown = [(v, span) for one in series for v, span in zip_longest(one.values, one.spans) if v is not None]
    beside = 10 + LETTER * max(len(_said(*one)) for one in shown)

    def at(value: float) -> float:
        return left + (WIDE - left - beside) * value / levels[-1]

    drawn = [
        f'<line class="grid" x1="{at(level):.1f}" x2="{at(level):.1f}" y1="0" y2="{high}"/>'
        f'<text x="{at(level):.1f}" y="{high + 14}" text-anchor="middle">{number(level)}</text>'
        for level in levels
    ]
    if mark is not None:
        drawn.append(f'<line class="line" x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="0" y2="{high}"/>')
    for row, category in enumerate(categories):
        top = row * (THICK * len(series) + GAP) + GAP / 2
        middle = top + THICK * len(series) / 2 + 4
        drawn.append(f'<text x="{left - 8:.1f}" y="{middle:.1f}" text-anchor="end">{escape(category)}</text>')
        for place, one in enumerate(series):
            if (value := one.values[row]) is not None:
                span = one.spans[row] if one.spans else None
                said = f"{one.name}, {category}: {number(value)} {up}"
                drawn.append(_bar(place % STYLES, at, value, span, top + place * THICK, said))
    keys = "".join(_key(one.name, i % STYLES, "b") for i, one in enumerate(series))
    return _figure(
        title, up, keys if len(series) > 1 else "", [one.name for one in series], drawn, high + BELOW / 2
    )


def _said(value: float, span: tuple[float, float] | None) -> str:
    """The figure at the end of a bar. A span that is not even on both sides is written out."""
    if span is None:
        return number(value)
    if math.isclose(value - span[0], span[1] - value, rel_tol=0.02, abs_tol=1e-9):
        return f"{number(value)} ±{number((span[1] - span[0]) / 2)}"
    return f"{number(value)} ({number(span[0])}–{number(span[1])})"


def _bar(
    style: int,
    at: Callable[[float], float],
    value: float,
    span: tuple[float, float] | None,
    top: float,
    said: str,
) -> str:
    middle, end = top + THICK / 2, at(value)
    box = f'x="{at(0):.1f}" y="{top + 1:.1f}" width="{end - at(0):.1f}" height="{THICK - 2}"'
    drawn = f'<rect class="b{style}" {box}><title>{escape(said)}</title></rect>'
    if span is not None:
        low, high = at(span[0]), at(span[1])
        caps = f"M{low:.1f} {middle - 3:g}v6M{high:.1f} {middle - 3:g}v6"
        drawn += f'<path class="error" d="M{low:.1f} {middle:g}H{high:.1f}{caps}"/>'
        end = max(end, high)
    return drawn + f'<text class="figure" x="{end + 4:.1f}" y="{middle + 4:.1f}">{_said(value, span)}</text>'


def _figure(
    title: str, up: str, keys: str, names: Sequence[str], drawn: Sequence[str], high: float = HIGH
) -> str:
    label = escape(f"{title}: {_joined(*names)}" if any(names) else title)
    box = f'viewBox="0 -8 {WIDE} {high + 8:g}" role="img" aria-label="{label}"'
    return (
        f"<figure><figcaption>{escape(title if up in title.lower() else f'{title}, {up}')}</figcaption>{keys}"
        f'<svg class="chart" {box}>{"".join(drawn)}</svg></figure>'
    )


def _line(one: Series, style: int, at: Callable[[float, float], tuple[float, float]], unit: str) -> str:
    points = [at(x, y) for x, y in zip(one.xs, one.ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    only = " only" if len(points) == 1 else ""  # a line would not show it
    dots = "".join(
        f'<circle class="dot s{style}{only}" cx="{x:.1f}" cy="{y:.1f}" r="5">'
        f"<title>{escape(f'{_joined(one.name, said)}: {number(value)} {unit}')}</title></circle>"
        for (x, y), said, value in zip(points, one.said, one.ys, strict=True)
    )
    errors = ""
    for x, span in zip(one.xs, one.spans, strict=False):
        if span is not None:
            (left, low), (_, high) = at(x, span[0]), at(x, span[1])
            caps = f"M{left - 3:.1f} {low:.1f}h6M{left - 3:.1f} {high:.1f}h6"
            errors += f'<path class="error" d="M{left:.1f} {low:.1f}V{high:.1f}{caps}"/>'
    return f'<polyline class="series s{style}" points="{path}"/>{errors}{dots}'


def _joined(*names: str) -> str:
    return ", ".join(filter(None, names))


def _level(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _column(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HIGH - BELOW + 16}" text-anchor="middle">{escape(text)}</text>'


def _key(name: str, style: int, kind: str = "s") -> str:
    line = f'<line class="series s{style}" x1="0" x2="24" y1="6" y2="6"/>'
    if kind == "b":
        line = f'<rect class="b{style}" x="6" width="12" height="12"/>'
    return (
        f'<span class="key"><svg width="26" height="12" aria-hidden="true">{line}</svg> {escape(name)}</span>'
    )


def even(most: float) -> list[float]:
    """Round numbers from 0 to the first at or above `most`, about five of them."""
    if most <= 0:
        return [0.0, 1.0]
    size = 10 ** math.floor(math.log10(most))
    step = next(size * part for part in (0.2, 0.25, 0.5, 1, 2) if size * part * 5 >= most)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _orders(least: float, most: float) -> list[float]:
    """Powers of ten around both, with 2 and 5 between them where they are few."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    parts = (1, 2, 5) if high - low <= 2 else (1,)
    marks = [part * 10.0**power for power in range(low, high + 1) for part in parts]
    first = max(i for i, mark in enumerate(marks) if mark <= least * (1 + 1e-9))
    last = min(i for i, mark in enumerate(marks) if mark >= most * (1 - 1e-9))
    return marks[first : last + 1]
