"""Results as lines of text that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.bench.compare import cut
from outrider.bench.serve.figures import COMPARED, LATENCIES, figure

WIDTH = 79
HALF = 0.5  # of a core: above it the client itself is what is busy
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def number(value: float | None) -> str:
    """As many digits as tell something."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def lines(report: Mapping[str, Any]) -> list[str]:
    """The whole report: each load, then all of them side by side."""
    found: list[str] = []
    for load in report["loads"]:
        for server, figures in zip(report["servers"], load["servers"], strict=True):
            name = f" on {server['url']}" if len(report["servers"]) > 1 else ""
            found += [*_server(f"{load['load']}{name}", figures), ""]
        for number_, ratios in enumerate(load.get("ratios", ()), 1):
            found += [*_ratios(load, report["servers"], number_, ratios), ""]
    if len(report["loads"]) > 1:
        for number_, server in enumerate(report["servers"]):
            found += [*_summary(report["loads"], server["url"], number_), ""]
    return [cut(line, WIDTH) for line in found[:-1]]


def _server(title: str, found: Mapping[str, Any]) -> Iterator[str]:
    failed = f"{found['failed']} failed" if found["failed"] else "none failed"
    yield f"{title}: {found['requests']} requests in {found['seconds']:.1f} s, {failed}"
    yield f"{'ms':<24}" + "".join(f"{name:>11}" for name in COLUMNS)
    for name, what in LATENCIES.items():
        spread = found[f"{name}_ms"] or {}
        yield f"{what:<24}" + "".join(f"{number(spread.get(column)):>11}" for column in COLUMNS)
    rates = f"{number(found['output_tok_s'])} tok/s out, {number(found['total_tok_s'])} in and out"
    yield f"{rates}; {number(found['requests_per_s'])} requests/s"
    answered = (found["requests"] - found["failed"]) or 1
    each = f"{found['input_tokens'] / answered:.0f} tokens in, {found['output_tokens'] / answered:.0f} out a request"
    per_event = found["tokens_per_event"]
    yield each + (f"; {per_event:.2f} tokens an event" if per_event else "")
    if goodput := found.get("goodput"):
        bounds = ", ".join(f"{name} {most:g} ms" for name, most in goodput["bounds_ms"].items())
        yield f"goodput {number(goodput['requests_per_s'])} requests/s ({goodput['share']:.1%} within {bounds})"
    if prefix := found.get("prefix"):
        yield from _prefix(prefix)
    yield from remarks(found)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _prefix(found: Mapping[str, Any]) -> Iterator[str]:
    cached = found["cached_share"]
    said = "the server does not report cached tokens" if cached is None else f"{share(cached)} cached"
    yield f"prompts: {said}; {share(found['repeated_share'])} stood in the turn before"
    yield f"{'turn':<6}{'requests':>9}{'tokens in':>11}{'before':>9}{'cached':>9}{'TTFT p50, ms':>14}{'p99':>9}"
    for row in found["turns"]:
        first = row["ttft_ms"] or {}
        cells = f"{row['turn']:<6}{row['requests']:>9}{row['input_tokens'] / row['requests']:>11.0f}"
        cells += f"{share(row['repeated_share']):>9}{share(row['cached_share']):>9}"
        yield cells + f"{number(first.get('p50')):>14}{number(first.get('p99')):>9}"


def remarks(found: Mapping[str, Any]) -> Iterator[str]:
    """What went wrong: on the server's side, and on the client's."""
    for kind, error in found["errors"].items():
        said = f": {error['first']}" if error["first"] else ""
        yield f"failed: {error['count']} x {kind}{said}"
    if found["tokens_counted_by"] == "events":
        yield "the server reports no usage: every event counts as one token"
    client = found["client"]
    if not client["kept_up"]:
        yield "warning: the client could not keep up, these figures are partly its own:"
        yield from (f"  {wrong}" for wrong in client["wrong"])
        busy = client["core_share"] > HALF
        yield (
            "  more processes may help: --clients"
            if busy
            else "  others use its cores: run it elsewhere, or alone"
        )


def _ratios(
    load: Mapping[str, Any], servers: Sequence[Mapping[str, Any]], other: int, ratios: Mapping[str, Any]
) -> Iterator[str]:
    first, second = load["servers"][0], load["servers"][other]
    rounds = len(first["rounds"])
    yield f"{load['load']}: A is {servers[0]['url']}, B is {servers[other]['url']}"
    yield f"{'':<28}{'A':>11}{'B':>11}   B over A, {rounds} rounds"
    for name, (what, path) in COMPARED.items():
        values = "".join(f"{number(figure(found, path)):>11}" for found in (first, second))
        if ratio := ratios.get(name):
            spread = f" ({ratio['low']:.2f} to {ratio['high']:.2f})" if rounds > 1 else ""
            yield f"{what:<28}{values}   {ratio['median']:.3f}{spread}"


def _summary(loads: Sequence[Mapping[str, Any]], url: str, index: int) -> Iterator[str]:
    yield f"{url}: requests and output tokens a second, ms"
    heads = ("req/s", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "failed")
    yield f"{'':<16}" + "".join(f"{head:>9}" for head in heads)
    for load in loads:
        found = load["servers"][index]
        cells = [number(found["requests_per_s"]), number(found["output_tok_s"])]
        cells += [
            number(figure(found, (f"{name}_ms", at))) for name in ("ttft", "itl") for at in ("p50", "p99")
        ]
        cells += [str(found["failed"])]
        yield f"{load['load']:<16}" + "".join(f"{cell:>9}" for cell in cells)
