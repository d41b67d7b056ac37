"""Pages of results: one file each, with nothing fetched from elsewhere, for light and dark screens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d8dde3; --page: #fff; --panel: #f5f7f9;
  --bar: #3b78c3; --mark: #b3541e; --good: #1a7f37; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b1; --line: #333b44; --page: #14181c;
  --panel: #1c2228; --bar: #5b9be6; --mark: #f0a060; --good: #4cc26b; --bad: #ff7b6e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); } h3 { margin-bottom: .3rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: middle; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } .n { text-align: right; font-variant-numeric: tabular-nums; }
td code { font-size: .75rem; color: var(--soft); word-break: break-word; }
pre { background: var(--panel); padding: .6rem .8rem; white-space: pre-wrap; word-break: break-word; font-size: .8rem; }
.small { color: var(--soft); font-size: .8rem; } .as-if { border-left: 3px solid var(--mark); padding-left: .8rem; }
.met { color: var(--good); white-space: nowrap; } .missed { color: var(--bad); font-weight: 600; white-space: nowrap; }
.none { color: var(--soft); white-space: nowrap; } .bar { fill: var(--bar); }
.mark { stroke: var(--mark); stroke-width: 2; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg.chart { width: 100%; height: auto; overflow: visible; }
.grid { stroke: var(--line); stroke-width: 1; } .chart text { fill: var(--soft); font-size: 11px; }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { opacity: 0; } .dot:hover { opacity: 1; }
.s0 { stroke: var(--bar); } .s1 { stroke: var(--mark); stroke-dasharray: 6 3; } .s2 { stroke: var(--good);
  stroke-dasharray: 2 3; } .s3 { stroke: var(--bad); stroke-dasharray: 8 3 2 3; }
.b0 { fill: var(--bar); } .b1 { fill: var(--mark); } .b2 { fill: var(--good); } .b3 { fill: var(--bad); }
.line { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.key { color: var(--soft); font-size: .8rem; margin-right: 1rem; } .key svg { vertical-align: middle; }
"""


def number(value: float) -> str:
    """As many digits as tell something."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """Cells are HTML already. A head that begins with ~ is of a column of numbers."""
    right = [head.startswith("~") for head in heads]

    def cells(kind: str, texts: list[str]) -> str:
        return "".join(
            f"<{kind}{' class=n' if r else ''}>{text}</{kind}>" for text, r in zip(texts, right, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = cells("th", [escape(head.removeprefix("~")) for head in heads])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def document(title: str, body: str) -> str:
    """A whole page; `body` is HTML already."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def certified(certificate: Mapping[str, str]) -> str:
    """Where the numbers come from."""
    where = " · ".join(escape(str(certificate[part])) for part in ("machine", "versions", "commit"))
    return f'<pre>{escape(certificate["command"])}</pre><p class="small">{where}</p>'


# ---------------------------------------------------------------------------------------------------------- charts

WIDE, HIGH, LEFT, BELOW = 560, 240, 56, 34  # of a chart, and the room for its scales
STYLES = 4  # of lines
MANY = 30  # times the least value the greatest must be for a scale by orders of magnitude


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart; `said` is what each of its points is called."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    said: Sequence[str]


def chart(
    title: str, series: Sequence[Series], ticks: Sequence[tuple[float, str]], across: str, up: str
) -> str:
    """Lines over one another. `ticks` are of the horizontal scale; points say their values when pointed at."""
    series = [one for one in series if one.xs]
    if not series:
        return ""
    values = [y for one in series for y in one.ys]
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
    """One bar a category; None: there is none."""

    name: str
    values: Sequence[float | None]


def bars(
    title: str, categories: Sequence[str], series: Sequence[Bars], up: str, mark: float | None = None
) -> str:
    """Bars side by side for every category, from 0 up. `mark` is a level to compare with."""
    series = [one for one in series if any(value is not None for value in one.values)]
    if not series:
        return ""
    values = [value for one in series for value in one.values if value is not None]
    levels = even(max(*values, mark or 0.0))
    room = (WIDE - LEFT) / len(categories)
    thick = 0.8 * room / len(series)

    def high(value: float) -> float:
        return (HIGH - BELOW) * (1 - value / levels[-1])

    drawn = [_level(high(level), number(level)) for level in levels]
    for at, category in enumerate(categories):
        left = LEFT + room * (at + 0.1)
        drawn.append(_column(left + 0.4 * room, category))
        for place, one in enumerate(series):
            if (value := one.values[at]) is not None:
                said = escape(f"{one.name}, {category}: {number(value)} {up}")
                box = f'x="{left + place * thick:.1f}" y="{high(value):.1f}" width="{0.9 * thick:.1f}"'
                tall = HIGH - BELOW - high(value)
                drawn.append(
                    f'<rect class="b{place % STYLES}" {box} height="{tall:.1f}"><title>{said}</title></rect>'
                )
    if mark is not None:
        drawn.append(
            f'<line class="line" x1="{LEFT}" x2="{WIDE}" y1="{high(mark):.1f}" y2="{high(mark):.1f}"/>'
        )
    keys = "".join(_key(one.name, i % STYLES, "b") for i, one in enumerate(series))
    return _figure(title, up, keys if len(series) > 1 else "", [one.name for one in series], drawn)


def _figure(title: str, up: str, keys: str, names: Sequence[str], drawn: Sequence[str]) -> str:
    label = escape(f"{title}: {', '.join(names)}")
    box = f'viewBox="0 -8 {WIDE} {HIGH + 8}" role="img" aria-label="{label}"'
    return (
        f"<figure><figcaption>{escape(title)}, {escape(up)}</figcaption>{keys}"
        f'<svg class="chart" {box}>{"".join(drawn)}</svg></figure>'
    )


def _line(one: Series, style: int, at: Callable[[float, float], tuple[float, float]], unit: str) -> str:
    points = [at(x, y) for x, y in zip(one.xs, one.ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle class="dot s{style}" cx="{x:.1f}" cy="{y:.1f}" r="5">'
        f"<title>{escape(f'{one.name}, {said}: {number(value)} {unit}')}</title></circle>"
        for (x, y), said, value in zip(points, one.said, one.ys, strict=True)
    )
    return f'<polyline class="series s{style}" points="{path}"/>{dots}'


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
