"""What was measured, as lines of text that fit 80 columns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from outrider.bench.compare import cut
from outrider.bench.tally import NOISY

Found = Mapping[str, Any]
LOSS = 0.98  # a speed-up below is a loss, above what a machine's noise explains
COLUMNS = 79
WIDE, METHOD, METHOD_LEAST = 14, 12, 7  # most columns of labels and of methods: names are cut, numbers never


def methods_in(report: Found) -> Iterator[tuple[str, str, str, Found]]:
    """Label, batch, method and figures of all that was measured."""
    for label, found in report.items():
        for size, batch in found["batches"].items():
            for name, method in batch["methods"].items():
                yield label, size, name, method


def main_method(names: Seq[str]) -> str:
    """The one that a report is about."""
    return "auto" if "auto" in names else names[-1]


def headline(report: Found) -> str:
    """One line: what the main method brings on average, at best and at worst, and how sure that is."""
    every = list(methods_in(report))
    if not any(name != "plain" for _, _, name, _ in every):
        return ""
    name = main_method([name for _, _, name, _ in every if name != "plain"])
    own = sorted(
        (one["ratio"], label, size, one["ratio_within"]) for label, size, n, one in every if n == name
    )
    batches = len({size for _, _, size, _ in own}) > 1

    def where(one: tuple[float, str, str, float | None]) -> str:
        return f"{one[0]:.2f}x {one[1]}{f' (batch {one[2]})' if batches else ''}"

    known = [one[3] for one in own if one[3] is not None]
    # Of a mean of independent figures.
    sure = math.sqrt(math.fsum(share**2 for share in known)) / len(own) if len(known) == len(own) else None
    within = "+-?" if sure is None else f"+-{max(1, round(100 * sure))} %"
    mean = statistics.geometric_mean(one[0] for one in own)
    some = [f"{mean:.2f}x on average", where(own[-1]), where(own[0])] if len(own) > 1 else [where(own[0])]
    busy = "; a busy machine" if _noisiest(report) > NOISY else ""
    return f"{name}: {', '.join(some)}, {within}{busy}"


def overview(report: Found) -> Iterator[str]:
    """Speed-ups by task, a column a method."""
    names = list(dict.fromkeys(name for _, _, name, _ in methods_in(report) if name != "plain"))
    wide = _width(["task", *report], WIDE)
    columns = [max(METHOD_LEAST, min(METHOD, len(name))) for name in names]
    while len(names) > 1 and wide + 18 + sum(columns) + len(columns) > COLUMNS:
        del names[0], columns[0]  # --details has them all; the last is the planner's
    heads = "".join(f" {cut(name, w):>{w}}" for name, w in zip(names, columns, strict=True))
    yield f"{'task':{wide}} {'batch':>5} {'plain tok/s':>11}{heads}"
    for label, found in report.items():
        for size, batch in found["batches"].items():
            methods, noisy = batch["methods"], batch["noise"] > NOISY
            cells = [
                f"{'~' if noisy else ''}{methods[n]['ratio']:.2f}x" if n in methods else "" for n in names
            ]
            line = "".join(f" {cell:>{w}}" for cell, w in zip(cells, columns, strict=True))
            yield f"{cut(label, wide):{wide}} {size:>5} {methods['plain']['tok_s']:11.1f}{line}"
    yield "speed-up against plain decoding in the same run, in turn; --details: errors,"
    yield "acceptance, latencies, memory; +-?: too few rounds to say, --seconds gives more"


def table(report: Found) -> Iterator[str]:
    wide = _width(["task", *(label for label, *_ in methods_in(report))], WIDE)
    method_wide = _width(["answered by", *(name for _, _, name, _ in methods_in(report))], METHOD)
    names = f"{'task':{wide}} {'batch':>5} {'answered by':{method_wide}} {'tok/s':>7} {'speed-up':>8}"
    yield f"{names} {'+-':>5} {'lowest':>6} {'accept':>6} {'tok/step':>8}"
    for label, size, name, method in methods_in(report):
        rate = "" if method["held"] is None else f"{100 * method['held']:.0f}%"
        known = "?" if method["ratio_within"] is None else f"{100 * method['ratio_within']:.1f}%"
        noisy = report[label]["batches"][size]["noise"] > NOISY
        ratio = f"{'~' if noisy else ''}{method['ratio']:.2f}x"
        speed = f"{ratio:>8} {known:>5} {method['worst']:5.2f}x" if name != "plain" else f"{'':21}"
        whose = f"{cut(label, wide):{wide}} {size:>5} {cut(name, method_wide):{method_wide}}"
        yield f"{whose} {method['tok_s']:7.1f} {speed} {rate:>6} {method['tokens_per_step']:8.2f}"
    yield "speed-up: against plain decoding in the same run, in turn; the mean of prompts"
    yield "+-: how far off it may be, 19 times in 20; lowest: of a single batch"
    if any(method["ratio_within"] is None for *_, method in methods_in(report)):
        yield "?: too few rounds to say; --seconds gives more"
    if any(batch["noise"] > NOISY for one in report.values() for batch in one["batches"].values()):
        yield "~: the machine was busy with something else meanwhile"
    yield "accept: the share of drafted tokens; tok/step: tokens a pass of the target"


def latencies(report: Found) -> Iterator[str]:
    wide = _width(["task", *(label for label, *_ in methods_in(report))], WIDE - 3)  # `total` needs the room
    method_wide = _width(["answered by", *(name for _, _, name, _ in methods_in(report))], METHOD)
    yield f"{'ms':{wide}} {'':5} {'':{method_wide}} {'first token':>13} {'between two':>20}"
    heads = "".join(f" {head:>6}" for head in ("p50", "p99", "p50", "p90", "p99", "draft", "total"))
    yield f"{'task':{wide}} {'batch':>5} {'answered by':{method_wide}}{heads}"
    for label, size, name, method in methods_in(report):
        first, gap = method["ttft_ms"] or {}, method["itl_ms"] or {}
        values = [first.get("p50"), first.get("p99"), gap.get("p50"), gap.get("p90"), gap.get("p99")]
        cells = "".join(f" {_number(value):>6}" for value in (*values, method["stages_ms"]["draft"]))
        cells += f" {method['total_ratio']:5.2f}x" if name != "plain" else ""
        yield f"{cut(label, wide):{wide}} {size:>5} {cut(name, method_wide):{method_wide}}{cells}"
    yield "draft: time of drafting, of a step; total: speed-up until all answers"
    yield "of a batch have ended, prompts included"


def verdicts(report: Found, details: bool = True) -> Iterator[str]:
    """Identity, and whether the machine was noisy. In detail: where each method loses, and its slowest answers."""
    every = list(methods_in(report))
    exact = [method for *_, method in every if method.get("exact", True)]
    compared, differing = (sum(method[key] for method in exact) for key in ("compared", "differing"))
    verdict = "identical" if not differing else f"{differing} DIFFER"
    yield f"{compared} tokens compared with plain decoding's: {verdict}"
    if other := list(dict.fromkeys(name for *_, name, method in every if not method.get("exact", True))):
        yield cut(f"not compared, as they may write other tokens: {', '.join(other)}", 79)
    methods = dict.fromkeys(name for _, _, name, _ in every if name != "plain")
    for name in methods if details else ():
        own = [
            (method["ratio"], f"{label}, batch {size}") for label, size, one, method in every if one == name
        ]
        low = sorted(one for one in own if one[0] < LOSS)
        least, where = min(own)
        lost = f"below {LOSS}x in {len(low)} of {len(own)}" if low else f"nowhere below {LOSS}x"
        yield cut(f"{name}: {lost}; lowest {least:.2f}x ({where})", 79)
        for what, key in (("time per token", "tpot_ms"), ("between two events", "itl_ms")):
            if largest := max(_slowdowns(report, name, key), default=None):
                most, where = largest
                yield cut(f"{name}: p99 {what} at most {most:.2f}x plain's ({where})", 79)
    if (noisy := _noisiest(report)) > NOISY:
        yield f"warning: a noisy machine: like steps differ by up to {noisy:.1f}x; see ~ in the table"


def _noisiest(report: Found) -> float:
    return max((batch["noise"] for one in report.values() for batch in one["batches"].values()), default=1.0)


def _slowdowns(report: Found, name: str, key: str) -> Iterator[tuple[float, str]]:
    """The 99th percentile of answers' time per token, or of the time between two events, against plain decoding's."""
    for label, found in report.items():
        for size, batch in found["batches"].items():
            own, plain = (batch["methods"].get(one, {}).get(key) for one in (name, "plain"))
            if own and plain:
                yield own["p99"] / plain["p99"], f"{label}, batch {size}"


def _width(names: list[str], most: int) -> int:
    return min(most, max(map(len, names)))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
