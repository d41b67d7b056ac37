"""The results of `outrider bench serve` as one page: plots, and every figure in tables beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from outrider.bench.page import (
    Bars,
    Series,
    bars,
    certified,
    chart,
    charts,
    document,
    even,
    facts,
    number,
    section,
    table,
)
from outrider.bench.serve.figures import COMPARED, LATENCIES, PERCENTS, figure
from outrider.bench.serve.show import COLUMNS, remarks, share
from outrider.bench.spread import span_of_rounds

Found = Mapping[str, Any]
NINES = [(percent, f"p{percent:g}") for percent in (0, 50, 90, 99, 99.9)]


def page(report: Found) -> str:
    urls, loads = [server["url"] for server in report["servers"]], report["loads"]
    # Several servers are A, B and so on; one needs no name in a legend.
    names = [chr(ord("A") + i) for i in range(len(urls))] if len(urls) > 1 else [""]
    title = f"Load on {' and '.join(dict.fromkeys(urls))}"
    parts = []
    if len(loads) > 1:
        parts = [section("All loads", _across(loads, names), *_summary(loads, names))]
    parts += [_load(load, names) for load in loads]
    parts.append(section("What was measured", _about(report, names)))
    return document(title, headline(loads), "".join(parts))


def headline(loads: Sequence[Found]) -> str:
    """The highest rate, or the first comparison of two servers."""
    best = max(loads, key=lambda load: load["servers"][0]["output_tok_s"])
    first = best["servers"][0]
    if ratio := best["ratios"][0].get("output_tok_s") if best.get("ratios") else None:
        return (
            f"B: {ratio['median']:.2f}x the output of A ({ratio['low']:.2f}x to {ratio['high']:.2f}x in rounds), "
            f"{best['load']}"
        )
    failed = f", {first['failed']} of {first['requests']} requests failed" if first["failed"] else ""
    waits = figure(first, ("ttft_ms", "p50"))
    begins = "" if waits is None else f", first token after {number(waits)} ms (median)"
    return f"{number(first['output_tok_s'])} tok/s with {best['load']}{begins}{failed}"


def _about(report: Found, names: Sequence[str]) -> str:
    servers = {}
    for name, server in zip(names, report["servers"], strict=True):
        said = f"{server['url']}, model {server['model']}" + (
            f", {server['version']}" if server["version"] else ""
        )
        if server["lengths_by"] == "words":
            said += "; it has no /tokenize, so lengths of made-up prompts are in words"
        servers[f"server {name}".strip()] = said
    return (
        f"{certified(report['certificate'])}{facts({**report['settings'], **servers})}"
        "<p>Times are the client's, taken where the socket is read. Inter-token latency is the time between two events "
        "with tokens; time per output token is that from the first to the last of an answer, by its other tokens. "
        "An error bar of a latency goes from the lowest to the highest of its rounds.</p>"
    )


# -------------------------------------------------------------------------------------------------------- all loads


def _across(loads: Sequence[Found], names: Sequence[str]) -> str:
    ticks = [(float(i), load["load"].rpartition(" ")[2]) for i, load in enumerate(loads)]
    asked = loads[0]["kind"]

    def lines(path: tuple[str, ...], suffix: str = "") -> list[Series]:
        made = []
        for index, name in enumerate(names):
            points = [(i, load, figure(load["servers"][index], path)) for i, load in enumerate(loads)]
            kept = [(i, load, value) for i, load, value in points if value is not None]
            spans = [
                span_of_rounds(load["servers"][index][path[0]], path[-1]) for _, load, _ in kept if path[1:]
            ]
            said = [load["load"] for _, load, _ in kept]
            made.append(
                Series((name + suffix).strip(), [i for i, _, _ in kept], [v for _, _, v in kept], said, spans)
            )
        return made

    drawn = [chart("Output", lines(("output_tok_s",)), ticks, asked, "tok/s")]
    for name, what in LATENCIES.items():
        both = [*lines((f"{name}_ms", "p50"), " p50"), *lines((f"{name}_ms", "p99"), " p99")]
        drawn.append(chart(what.capitalize(), both, ticks, asked, "ms"))
    return charts(drawn)


def _summary(loads: Sequence[Found], names: Sequence[str]) -> list[str]:
    heads = [
        "Load",
        "~Requests/s",
        "~Output, tok/s",
        *(f"~{n.upper()} {at}, ms" for n in LATENCIES for at in ("p50", "p99")),
    ]
    made = []
    for index, name in enumerate(names):
        rows = []
        for load in loads:
            found = load["servers"][index]
            cells = [_shown(found["requests_per_s"]), _shown(found["output_tok_s"])]
            cells += [_shown(figure(found, (f"{n}_ms", at))) for n in LATENCIES for at in ("p50", "p99")]
            rows.append([escape(load["load"]), *cells, str(found["failed"])])
        made.append((f"<h3>{escape(name)}</h3>" if len(names) > 1 else "") + table([*heads, "~Failed"], rows))
    return made


# --------------------------------------------------------------------------------------------------------- one load


def _load(load: Found, names: Sequence[str]) -> str:
    parts = [f"<h2>{escape(load['load'].capitalize())}</h2>"]
    for name, found in zip(names, load["servers"], strict=True):
        parts.append((f"<h3>{escape(name)}</h3>" if len(names) > 1 else "") + _server(found))
    for other, ratios in enumerate(load.get("ratios", ()), 1):
        parts.append(_ratios(load, names, other, ratios))
    parts.append(charts([_compared(load), _latencies(load, names), _over_time(load, names)]))
    parts.append(_curves(load, names))
    return "".join(parts)


def _server(found: Found) -> str:
    rows = []
    for name, what in LATENCIES.items():
        spread = found[f"{name}_ms"] or {}
        rows.append([escape(what), *(_shown(spread.get(column)) for column in COLUMNS)])
    rates = (
        f"<p><b>{number(found['output_tok_s'])} tok/s</b> out, {number(found['total_tok_s'])} in and out; "
        f"{number(found['requests_per_s'])} requests/s; {found['requests']:,} requests in {found['seconds']:.1f} s, "
        f"{found['failed']:,} failed."
    )
    if goodput := found.get("goodput"):
        bounds = ", ".join(f"{name} {most:g} ms" for name, most in goodput["bounds_ms"].items())
        share = f"{goodput['share']:.1%} within {escape(bounds)}"
        rates += f" Goodput {number(goodput['requests_per_s'])} requests/s, {share}."
    lag, core = (found["client"]["lag_ms"] or {}).get("p99"), found["client"]["core_share"]
    rates += f" The client's event loop lagged {_shown(lag)} ms at p99, on {core:.0%} of a core.</p>"
    wrong = "".join(f'<p class="missed">{escape(line)}</p>' for line in remarks(found))
    turns = _turns(found["prefix"]) if found.get("prefix") else ""
    return table(["ms", *(f"~{column}" for column in COLUMNS)], rows) + rates + turns + wrong


def _turns(found: Found) -> str:
    rows = []
    for row in found["turns"]:
        waits = [_shown((row["ttft_ms"] or {}).get(at)) for at in ("p50", "p99")]
        shares = [share(row["repeated_share"]), share(row["cached_share"])]
        tokens = f"{row['input_tokens'] / row['requests']:.0f}"
        rows.append([str(row["turn"]), str(row["requests"]), tokens, *shares, *waits])
    heads = [
        "Turn",
        "~Requests",
        "~Prompt tokens",
        "~In the turn before",
        "~Cached",
        "~TTFT p50, ms",
        "~p99, ms",
    ]
    cached, repeated = share(found["cached_share"]), share(found["repeated_share"])
    said = f"Of all prompt tokens {cached} were cached; {repeated} stood in the turn before."
    return f"<p>{said}</p>{table(heads, rows)}"


def _ratios(load: Found, names: Sequence[str], other: int, ratios: Found) -> str:
    rows = []
    for name, (what, path) in COMPARED.items():
        if ratio := ratios.get(name):
            values = [_shown(figure(load["servers"][index], path)) for index in (0, other)]
            rows.append(
                [escape(what), *values, *(f"{ratio[part]:.3f}" for part in ("median", "low", "high"))]
            )
    heads = ["", f"~{names[0]}", f"~{names[other]}", "~Ratio, median", "~lowest", "~highest"]
    said = f"{names[other]} against {names[0]}: ratios are of rounds taken in turn."
    return f"<p>{escape(said)}</p>{table(heads, rows)}"


def _compared(load: Found) -> str:
    """Every other server against A, with the lowest and the highest of the rounds."""
    rows = [
        what
        for name, (what, _) in COMPARED.items()
        if any(name in ratios for ratios in load.get("ratios", ()))
    ]
    made = []
    for other, ratios in enumerate(load.get("ratios", ()), 1):
        own = [ratios.get(name) for name, (what, _) in COMPARED.items() if what in rows]
        spans = [(one["low"], one["high"]) if one else None for one in own]
        name = f"{chr(ord('A') + other)} over A"
        made.append(Bars(name, [one["median"] if one else None for one in own], spans))
    return bars("Against A", rows, made, "times A", 1.0) if rows else ""


def _latencies(load: Found, names: Sequence[str]) -> str:
    ticks = [(_nines(percent), text) for percent, text in NINES]
    drawn = []
    for name, what in LATENCIES.items():
        series = []
        for server, found in zip(names, load["servers"], strict=True):
            ys = found["curves"][name]
            series.append(
                Series(
                    server,
                    [_nines(p) for p in PERCENTS][: len(ys)],
                    ys,
                    [f"p{p:g}" for p in PERCENTS][: len(ys)],
                )
            )
        drawn.append(chart(what.capitalize(), series, ticks, "percentile", "ms"))
    return "".join(drawn)


def _nines(percent: float) -> float:
    """As far from p50 to p90 as from p90 to p99."""
    return -math.log10(1 - min(percent, 99.95) / 100)


def _over_time(load: Found, names: Sequence[str]) -> str:
    end = max((found["over_time"]["at_s"] or [1.0])[-1] for found in load["servers"])
    ticks = [(second, number(second)) for second in even(end) if second <= end]
    drawn = []
    for name, title, unit in (
        ("output_tok_s", "Output, first round", "tok/s"),
        ("in_flight", "In flight, first round", "requests"),
    ):
        series = []
        for server, found in zip(names, load["servers"], strict=True):
            at = found["over_time"]["at_s"]
            series.append(Series(server, at, found["over_time"][name], [f"at {second:g} s" for second in at]))
        drawn.append(chart(title, series, ticks, "seconds", unit))
    return "".join(drawn)


def _curves(load: Found, names: Sequence[str]) -> str:
    """What the plots show, in numbers."""
    heads = ["~Percentile"]
    columns: list[list[float]] = []
    for server, found in zip(names, load["servers"], strict=True):
        for name in LATENCIES:
            heads.append(f"~{name.upper()}{f', {server}' if len(names) > 1 else ''}, ms")
            columns.append(found["curves"][name])
    rows = [
        [f"p{percent:g}", *(_shown(column[i]) if column else "" for column in columns)]
        for i, percent in enumerate(PERCENTS)
    ]
    return f"<details><summary>The curves in numbers</summary>{table(heads, rows)}</details>"


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)
