"""What was measured, as lines of text that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.bench.compare import cut
from outrider.bench.tally import NOISY

Found = Mapping[str, Any]
LOSS = 0.98  # a speed-up below is a loss, above what a machine's noise explains
WIDE, METHOD = 14, 12  # most columns of labels and of methods: names are cut, numbers never


def methods_in(report: Found) -> Iterator[tuple[str, str, str, Found]]:
    """Label, batch, method and figures of all that was measured."""
    for label, found in report.items():
        for size, batch in found["batches"].items():
            for name, method in batch["methods"].items():
                yield label, size, name, method


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
    wide = _width(["task", *(label for label, *_ in methods_in(report))], WIDE)
    method_wide = _width(["answered by", *(name for _, _, name, _ in methods_in(report))], METHOD)
    yield f"{'ms':{wide}} {'':5} {'':{method_wide}} {'first token':>13} {'between two':>20}"
    heads = "".join(f" {head:>6}" for head in ("p50", "p99", "p50", "p90", "p99", "draft"))
    yield f"{'task':{wide}} {'batch':>5} {'answered by':{method_wide}}{heads}"
    for label, size, name, method in methods_in(report):
        first, gap = method["ttft_ms"] or {}, method["itl_ms"] or {}
        values = [first.get("p50"), first.get("p99"), gap.get("p50"), gap.get("p90"), gap.get("p99")]
        cells = "".join(f" {_number(value):>6}" for value in (*values, method["stages_ms"]["draft"]))
        yield f"{cut(label, wide):{wide}} {size:>5} {cut(name, method_wide):{method_wide}}{cells}"
    yield "draft: time of drafting, of a step"


def verdicts(report: Found) -> Iterator[str]:
    """Identity, where a method loses, and whether the machine was noisy."""
    every = list(methods_in(report))
    exact = [method for *_, method in every if method.get("exact", True)]
    compared, differing = (sum(method[key] for method in exact) for key in ("compared", "differing"))
    verdict = "identical" if not differing else f"{differing} DIFFER"
    yield f"{compared} tokens compared with plain decoding's: {verdict}"
    if other := list(dict.fromkeys(name for *_, name, method in every if not method.get("exact", True))):
        yield cut(f"not compared, as they may write other tokens: {', '.join(other)}", 79)
    methods = dict.fromkeys(name for _, _, name, _ in every if name != "plain")
    for name in methods:
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
    noisy = max((batch["noise"] for one in report.values() for batch in one["batches"].values()), default=1.0)
    if noisy > NOISY:
        yield f"warning: a noisy machine: like steps differ by up to {noisy:.1f}x; see ~ in the table"


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
