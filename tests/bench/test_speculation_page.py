"""The page of `outrider bench`: every plot and every figure, in one file that fetches nothing."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from outrider.bench.page import Bars, Series, bars, chart
from outrider.bench.speculation_page import page

ROUNDS = {"p50": [7.5, 9.25], "p90": [10.0, 12.0], "p99": [14.0, 16.0]}
SPREAD = {"mean": 9.0, "p50": 8.0, "p90": 11.0, "p99": 15.0, "max": 20.0, "rounds": ROUNDS}
CERTIFICATE = {
    "command": "outrider bench <x> --html a&b",
    "commit": "abc",
    "versions": "v",
    "python": "3",
    "machine": "m",
}


def method(ratio: float, **more: Any) -> dict[str, Any]:
    stages = {"plan": 0.1, "draft": 0.2, "target": 7.0, "verify": 0.3, "other": 0.4, "total": 8.0}
    rates = [{"depth": 1, "rate": 0.5, "of": 10}, {"depth": 2, "rate": 0.25, "of": 4}]
    made = {"tok_s": 50 * ratio, "ratio": ratio, "ratio_within": 0.011, "worst": ratio, "tokens_per_step": 1.5,
            "drafted": 14, "held": 0.4, "acceptance": rates, "ttft_ms": SPREAD, "itl_ms": SPREAD, "tpot_ms": SPREAD,
            "stages_ms": stages, "compared": 1000, "differing": 0}  # fmt: skip
    return made | more


def report(**speculation: Any) -> dict[str, Any]:
    return {"kind": "bench", "certificate": CERTIFICATE, "asked": {"model": "a <model>", "max_tokens": 64},
            "memory": {"process_peak_gb": 1.25}, "left_out": [], "speculation": speculation}  # fmt: skip


def cell(task: str, heat: float, *batches: int, **methods: Any) -> dict[str, Any]:
    plain = method(1.0, held=None, acceptance=[])
    found = {
        str(b): {"groups": 1, "rounds": 5, "prompts": 1, "noise": 1.1, "methods": {"plain": plain, **methods}}
        for b in batches
    }
    return {"task": task, "temperature": heat, "max_tokens": 64, "batches": found}


def figures(html: str) -> list[str]:
    return [unescape(one) for one in re.findall("<figcaption>(.*?)</figcaption>", html)]


def test_every_plot_is_there() -> None:
    methods = {"lookup": method(0.8), "auto": method(1.4)}
    cells = {
        f"{task} T={heat:g}": cell(task, heat, 1, 4, **methods)
        for task in ("chat", "<code>")
        for heat in (0.0, 1.2)
    }
    html = page(report(**cells))
    drawn = figures(html)
    for said in (
        "Batch 1, temperature 0, times plain", "Batch 4, temperature 1.2, times plain",
        "chat: auto by batch, times plain", "<code>: auto by temperature, times plain", "chat, % accepted",
        "Time per token, p99, batch 4, temperature 1.2, ms", "First token, p50, batch 1, temperature 0, ms",
    ):  # fmt: skip
        assert said in drawn, said
    assert "auto, chat: 1.40 times plain" in html and "lookup, depth 2, of 16: 25 % accepted" in html
    assert "temperature 1.2, batch 4: 1.40 times plain" in html
    assert "lookup: below 0.98x in 8 of 8" in html and "process peak gb" in html
    assert not re.search(r"<script|<link|https?://|@import|url\(|<model>|<code>|<x>", html)
    assert "outrider bench &lt;x&gt; --html a&amp;b" in html and "1.1 %" in html


def test_tasks_at_their_own_temperatures_share_a_plot() -> None:
    html = page(
        report(chat=cell("chat", 0.7, 1, auto=method(1.1)), rewrite=cell("rewrite", 0.0, 1, auto=method(2.0)))
    )
    drawn = figures(html)
    assert "Batch 1, times plain" in drawn and not any(
        "by batch" in one or "by temperature" in one for one in drawn
    )


def test_what_is_missing_is_said() -> None:
    assert "Nothing was measured" in page(report())
    cut = report(chat=cell("chat", 0.7, 1, auto=method(1.1))) | {"left_out": ["code, batch 1"]}
    assert "no time for 1 of them: code, batch 1" in page(cut)
    alone = page(
        report(chat=cell("chat", 0.7, 1, auto=method(1.1, itl_ms=None, ratio_within=None, acceptance=[])))
    )
    assert "auto" in alone


def test_latencies_have_error_bars_from_their_rounds() -> None:
    html = page(report(chat=cell("chat", 0.7, 1, auto=method(1.1, ttft_ms={**SPREAD, "rounds": None}))))
    p50, p99, first = (
        one.split("</figure>")[0] for one in html.split("<h2>Latency")[1].split("<figure>")[1:]
    )
    said = [re.findall('class="figure"[^>]*>([^<]*)<', one) for one in (p50, p99, first)]
    assert said == [["8 (7.50–9.25)"] * 2, ["15 ±1"] * 2, ["8", "8 (7.50–9.25)"]]
    assert [one.count('class="error"') for one in (p50, p99, first)] == [2, 2, 1]


def test_points_of_a_line_have_error_bars() -> None:
    drawn = chart(
        "t", [Series("x", [0, 1], [1.0, 3.0], ["a", "b"], [None, (2.0, 5.0)])], [(0, "0")], "x", "u"
    )
    [(x, low, high)] = re.findall(r'class="error" d="M([0-9.]+) ([0-9.]+)V([0-9.-]+)M', drawn)
    zero, *_, top = (float(y) for y in re.findall('class="grid" x1="50" x2="480" y1="([0-9.]+)"', drawn))
    assert float(x) == 480 and float(high) == pytest.approx(top)  # the scale has room for the highest, 5
    assert (zero - float(low)) / (zero - float(high)) == pytest.approx(2 / 5, rel=0.01)


def test_sections_without_content_are_left_out() -> None:
    html = page(report(chat=cell("chat", 0.7, 1, auto=method(1.1, acceptance=[]))))
    assert re.findall("<h2>(.*?)</h2>", html) == [
        "Speed-up by workload", "Latency", "All figures", "What was measured",
    ]  # fmt: skip
    asked = report(chat=cell("chat", 0.7, 1, auto=method(1.1)))
    asked["asked"] |= {"limit": None, "methods": None}
    assert "None" not in page(asked) and "max tokens" in page(asked)


def test_a_page_begins_with_the_headline() -> None:
    cells = {
        "chat": cell("chat", 0.7, 1, auto=method(0.99)),
        "rewrite": cell("rewrite", 0.0, 1, auto=method(2.1)),
    }
    html = page(report(**cells))
    assert html.index("auto: 1.44x on average, 2.10x rewrite, 0.99x chat, +-1 %") < html.index("<h2>")


@pytest.mark.parametrize("mark", [None, 1.0])
def test_bars_are_as_long_as_their_values_and_say_them(mark: float | None) -> None:
    series = [Bars("x", [1.0, 2.0], [(0.5, 1.5), None]), Bars("y", [None, 4.0])]
    drawn = bars("t", ["a", "b"], series, "u", mark)
    widths = [
        float(one)
        for one in re.findall('<rect class="b[01]" x="[0-9.]+" y="[0-9.]+" width="([0-9.]+)"', drawn)
    ]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 2, 4], rel=0.01)
    assert re.findall('class="figure"[^>]*>([^<]*)<', drawn) == ["1 ±0.50", "2", "4"]
    [(low, high)] = re.findall('class="error" d="M([0-9.]+) [0-9.]+H([0-9.]+)M', drawn)
    assert float(high) - float(low) == pytest.approx(widths[0], rel=0.01)
    assert drawn.count('class="error"') == 1
    assert ('class="line"' in drawn) is (mark is not None)
    assert bars("t", ["a"], [Bars("x", [None])], "u") == ""
