"""The results of `outrider bench` as one page: plots, and every figure in tables beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from outrider.bench.fidelity import fidelity_charts
from outrider.bench.page import (
    Bars,
    Series,
    bars,
    certified,
    chart,
    charts,
    document,
    facts,
    number,
    section,
    table,
)
from outrider.bench.show import headline, main_method, methods_in, verdicts
from outrider.bench.spread import span_of_rounds
from outrider.bench.tally import STAGES

Found = Mapping[str, Any]
Cells = list[tuple[str, float, int, Found]]  # task, temperature, batch, methods
PERCENTS = ("p50", "p90", "p99")


def page(report: Found) -> str:
    found = report["speculation"]
    title = f"What speculation brings: {report['asked']['model']}"
    cells = [
        (one["task"], one["temperature"], int(size), batch["methods"])
        for one in found.values()
        for size, batch in one["batches"].items()
    ]
    if not cells:
        return document(title, "Nothing was measured.", _about(report))
    main = main_method(_names(cells))
    parts = [
        section("Speed-up by workload", charts(_by_workload(cells))),
        section("Fidelity against speed", charts(fidelity_charts(found))),
        section("By batch and by temperature", charts(_by_number(cells, main))),
        section("Acceptance by depth", charts(_acceptance(cells))),
        section("Latency", charts(_latency(cells))),
        section("All figures", _speeds(found), _times(found), _memory(report)),
        section("What was measured", _about(report)),
    ]
    return document(title, headline(found), "".join(parts))


def _about(report: Found) -> str:
    said = "".join(f"<p>{escape(line)}</p>" for line in verdicts(report["speculation"]))
    if report.get("as_if"):
        said = f'<p class="as-if">{escape(report["as_if"]["meaning"])}</p>{said}'
    if left := report.get("left_out"):
        said += f'<p class="missed">There was no time for {len(left)} of them: {escape("; ".join(left))}</p>'
    return (
        f"{said}{certified(report['certificate'])}{facts(report['asked'])}"
        "<p>All methods answer the same prompts in turn, within one run; a speed-up is against plain decoding there, "
        "its tokens per second counted from each answer's own first token to its last. Of a group of prompts it is the "
        "median of its rounds, over groups the geometric mean. An error bar holds it 19 times in 20; a bar without one "
        "has too few rounds to say. Of a latency, the error bar goes from the lowest to the highest of its rounds.</p>"
    )


def _names(cells: Cells) -> list[str]:
    return [n for n in dict.fromkeys(n for *_, methods in cells for n in methods) if n != "plain"]


# ------------------------------------------------------------------------------------------------------------ plots


def _workloads(cells: Cells) -> Iterator[tuple[str, list[str], list[Found]]]:
    """For every batch and temperature, the workloads that were measured there; each task's own where they differ."""
    own = {task: {at for t, at, *_ in cells if t == task} for task, *_ in cells}
    curve = any(len(some) > 1 for some in own.values())
    temperatures = sorted({at for _, at, *_ in cells}) if curve else [None]
    for batch in sorted({batch for *_, batch, _ in cells}):
        for at in temperatures:
            some = [(t, methods) for t, h, b, methods in cells if b == batch and at in (None, h)]
            if some:
                said = f"batch {batch}" + ("" if at is None else f", temperature {at:g}")
                yield said, [task for task, _ in some], [methods for _, methods in some]


def _by_workload(cells: Cells) -> Iterator[str]:
    for said, tasks, found in _workloads(cells):
        made = [
            Bars(n, [w[n]["ratio"] if n in w else None for w in found], [_span(w.get(n)) for w in found])
            for n in _names(cells)
        ]
        yield bars(said[0].upper() + said[1:], tasks, made, "times plain", 1.0)


def _by_number(cells: Cells, method: str) -> Iterator[str]:
    """Of each task: speed-up over batch with a line a temperature, and over temperature with a line a batch."""
    for task in dict.fromkeys(task for task, *_ in cells):
        own = [
            (temperature, batch, methods[method]["ratio"])
            for t, temperature, batch, methods in cells
            if t == task and method in methods
        ]
        for across, places, lines in (("batch", 1, 0), ("temperature", 0, 1)):
            at = sorted({one[places] for one in own})
            if len(at) < 2:
                continue
            drawn = []
            for fixed in sorted({one[lines] for one in own}):
                points = sorted((one[places], one[2]) for one in own if one[lines] == fixed)
                named = f"temperature {fixed:g}" if across == "batch" else f"batch {fixed}"
                xs = [_place(x, across) for x, _ in points]
                drawn.append(
                    Series(named, xs, [y for _, y in points], [f"{across} {x:g}" for x, _ in points])
                )
            ticks = [(_place(x, across), f"{x:g}") for x in at]
            yield chart(f"{task}: {method} by {across}", drawn, ticks, across, "times plain")


def _span(method: Found | None) -> tuple[float, float] | None:
    """Where the speed-up lies 19 times in 20."""
    if method is None or method["ratio_within"] is None:
        return None
    ratio, share = method["ratio"], method["ratio_within"]
    return max(0.0, ratio * (1 - share)), ratio * (1 + share)


def _place(x: float, across: str) -> float:
    return math.log2(x) if across == "batch" else x


def _acceptance(cells: Cells) -> Iterator[str]:
    """Of each task, over all its temperatures and batches."""
    for task in dict.fromkeys(task for task, *_ in cells):
        lines = []
        for name in _names(cells):
            counts: dict[int, list[float]] = {}
            for t, *_, methods in cells:
                for one in methods[name]["acceptance"] if t == task and name in methods else ():
                    right, of = counts.setdefault(int(one["depth"]), [0.0, 0.0])
                    counts[int(one["depth"])] = [right + one["rate"] * one["of"], of + one["of"]]
            known = sorted(counts.items())
            said = [f"depth {depth}, of {of:.0f}" for depth, (_, of) in known]
            lines.append(
                Series(
                    name, [float(d) for d, _ in known], [100 * right / of for _, (right, of) in known], said
                )
            )
        deepest = max((x for line in lines for x in line.xs), default=1.0)
        ticks = [(float(d), str(d)) for d in range(1, int(deepest) + 1)]
        yield chart(task, lines, ticks, "depth", "% accepted")


def _latency(cells: Cells) -> Iterator[str]:
    for said, tasks, found in _workloads(cells):
        names = [*_names(cells), "plain"]  # methods have the colours of the other charts
        for key, what, percent in (
            ("tpot_ms", "Time per token", "p50"),
            ("tpot_ms", "Time per token", "p99"),
            ("ttft_ms", "First token", "p50"),
        ):
            own = {n: [w[n].get(key) if n in w else None for w in found] for n in names}
            made = [
                Bars(
                    n,
                    [(one or {}).get(percent) for one in some],
                    [span_of_rounds(one, percent) for one in some],
                )
                for n, some in own.items()
            ]
            yield bars(f"{what}, {percent}, {said}", tasks, made, "ms")


# ----------------------------------------------------------------------------------------------------------- tables


def _speeds(found: Found) -> str:
    rows = []
    for label, size, name, method in methods_in(found):
        known = "" if method["ratio_within"] is None else f"{100 * method['ratio_within']:.1f} %"
        gauge = f"{method['gauge']:.3f}" if method.get("gauge") else ""
        ratio = [f"{method['ratio']:.3f}", known, f"{method['worst']:.3f}", gauge]
        ratio = [""] * len(ratio) if name == "plain" else ratio
        held = "" if method["held"] is None else f"{100 * method['held']:.0f} %"
        depths = ", ".join(f"{100 * one['rate']:.0f}" for one in method["acceptance"])
        last = [
            f"{method['tokens_per_step']:.2f}",
            held,
            depths,
            f"{method['differing']} of {method['compared']:,}",
        ]
        rows.append([escape(label), size, escape(name), number(method["tok_s"]), *ratio, *last])
    heads = ["Workload", "~Batch", "Method", "~tok/s", "~Speed-up", "~Within", "~Lowest", "~By the gauge",
             "~Tokens per step", "~Accepted", "By depth, %", "~Differ"]  # fmt: skip
    return table(heads, rows)


def _times(found: Found) -> str:
    rows = []
    for label, size, name, method in methods_in(found):
        cells = [(method.get(key) or {}).get(p) for key in ("ttft_ms", "itl_ms", "tpot_ms") for p in PERCENTS]
        cells += [method["stages_ms"][stage] for stage in (*STAGES, "other", "total")]
        rows.append([escape(label), size, escape(name), *("" if c is None else f"{c:.2f}" for c in cells)])
    heads = [f"~{what} {p}" for what in ("First token", "Between two", "A token") for p in PERCENTS]
    stages = [f"~{stage.capitalize()}" for stage in (*STAGES, "other", "total")]
    return (
        "<h3>Latency, and time by stage of a decode step, ms</h3>"
        f"{table(['Workload', '~Batch', 'Method', *heads, *stages], rows)}"
    )


def _memory(report: Found) -> str:
    rows = [
        [escape(name.replace("_", " ")), number(value)] for name, value in report.get("memory", {}).items()
    ]
    return f"<h3>Memory</h3>{table(['', '~'], rows)}" if rows else ""
