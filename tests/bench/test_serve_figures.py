"""Arrivals, prompts, figures, text and page of the load generator: pure functions, by known numbers."""

from __future__ import annotations

import json
import random
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.page import _orders, even
from outrider.bench.serve.answer import Sample
from outrider.bench.serve.arrivals import Due, Lengths, poisson, read_trace
from outrider.bench.serve.asked import CHAT, COMPLETIONS, WORDS, Asked, Vocabulary
from outrider.bench.serve.client import Drove
from outrider.bench.serve.figures import Bounds, figures, over_time, ratios, raw, thinned
from outrider.bench.serve.page import page
from outrider.bench.serve.run import Plan, Shape, _found
from outrider.bench.serve.show import lines
from outrider.bench.spread import spread
from outrider.errors import InvalidRequest

# -------------------------------------------------------------------------------------------------------- arrivals


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    moments = poisson(4, 4000, None, seed=1)
    gaps = [b - a for a, b in pairwise(moments)]
    assert len(moments) == 4000 and moments[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # as an exponential distribution has it
    assert moments == poisson(4, 4000, None, seed=1) != poisson(4, 4000, None, seed=2)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness: float, variation: float) -> None:
    moments = poisson(10, 8000, None, 3, burstiness)
    gaps = [b - a for a, b in pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_bursts_arrive_at_once_and_keep_the_rate() -> None:
    moments = poisson(8, 400, None, 0, burst=4)
    groups = [moments[i : i + 4] for i in range(0, 400, 4)]
    assert all(len(set(group)) == 1 for group in groups) and len({group[0] for group in groups}) == 100
    assert moments[-1] == pytest.approx(400 / 8, rel=0.3)


def test_arrivals_end_with_their_time() -> None:
    assert all(moment < 5 for moment in poisson(20, None, 5, 0))
    assert poisson(float("inf"), 3, None, 0) == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "low", "high"), [("256", 256, 256), ("64:4096", 64, 4096), ("64:4096:log", 64, 4096)]
)
def test_lengths_are_drawn_within_their_bounds(text: str, low: int, high: int) -> None:
    lengths, chance = Lengths.of(text, "input_tokens"), random.Random(0)
    drawn = [lengths.draw(chance) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    middle = {"256": 256, "64:4096": 2080, "64:4096:log": 512}[text]
    assert statistics.median(drawn) == pytest.approx(middle, rel=0.1)


@pytest.mark.parametrize("text", ["", "0", "x", "5:4", "1:2:lin", "-3", "1.5", "99999999999"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--output-tokens .* is not a length"):
        Lengths.of(text, "output_tokens")


def test_traces_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(
        '# seconds in out\n12.5 100 20\n10,300\n\n{"at": 11, "output_tokens": 7}\n'
        '{"timestamp": 13000, "input_length": 5, "output_length": 6, "hash_ids": [1]}\n'
    )
    assert read_trace(str(file)) == [Due(0, 300), Due(1, None, 7), Due(2.5, 100, 20), Due(3, 5, 6)]
    assert len(read_trace(str(file), 2)) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x 1 2", "'x' is not a moment"),
        ("1 two", "'two' is not a number of tokens"),
        ("1 0", "'0' is not a number of tokens"),
        ("1 2 3 4", "is not SECONDS INPUT OUTPUT"),
        ('{"at": 1', "not JSON"),
        ('{"input_tokens": 1}', 'needs "at"'),
        ('{"at": NaN}', "is not a moment"),
        ('{"at": 1, "output_tokens": 2.5}', "2.5 is not a number of tokens"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "trace"
    file.write_text(f"0 1 1\n{line}\n")
    with pytest.raises(InvalidRequest, match=re.escape(f"{file}, line 2: ")) as raised:
        read_trace(str(file))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("data", "said"), [(None, "cannot be read"), (b"", "no requests"), (b"\xff", "UTF-8")]
)
def test_bad_trace_files(tmp_path: Path, data: bytes | None, said: str) -> None:
    if data is not None:
        (tmp_path / "trace").write_bytes(data)
    with pytest.raises(InvalidRequest, match=said):
        read_trace(str(tmp_path / "trace"))


# --------------------------------------------------------------------------------------------------------- prompts


def test_bodies_follow_seed_and_number() -> None:
    asked = Asked(
        COMPLETIONS, "m", Lengths(8, 64), Lengths(10, 90), fields={"temperature": 0.5, "top_p": 0.9}
    )
    first, again = asked.body(3), asked.body(3)
    assert first == again != asked.body(4)
    assert 10 <= len(first["prompt"].split()) <= 90 and 8 <= first["max_tokens"] <= 64
    assert first["seed"] == 3 and first["top_p"] == 0.9 and first["stream_options"] == {"include_usage": True}
    other = Asked(COMPLETIONS, "m", Lengths(8, 64), Lengths(10, 90), seed=1)
    assert other.body(3)["prompt"] != first["prompt"] and "seed" not in other.body(3)
    assert Asked(CHAT, "m", None).body(0)["messages"][0]["role"] == "user"


def test_rows_are_asked_in_turn_and_traces_say_how_long() -> None:
    rows = ({"prompt": "a"}, {"prompt": "b"})
    assert [Asked(COMPLETIONS, "m", None, rows=rows).body(i)["prompt"] for i in range(3)] == ["a", "b", "a"]
    asked = Asked(COMPLETIONS, "m", Lengths(9, 9), trace=(Due(0, 3, 4), Due(1, 5)))
    bodies = [asked.body(i) for i in range(3)]
    assert [len(body["prompt"].split()) for body in bodies] == [3, 5, 3]
    assert [body["max_tokens"] for body in bodies] == [4, 9, 4]


def test_words_of_several_tokens_add_up() -> None:
    sizes = tuple(len(word) + 1 for word in WORDS)
    for tokens in (1, 2, 50, 333):
        text = Vocabulary(tuple(WORDS), sizes, True).text(tokens, random.Random(0))
        assert tokens - min(sizes) < len(text) <= max(tokens, min(sizes))


def test_no_prompt_comes_twice() -> None:
    plan = Plan((), [Shape("rate", 5), Shape("rate", 9)], seconds=2, rounds=2, warmup=3)
    at: Any = type("At", (), {"server": None, "asked": None, "offset": 0})
    numbers: list[int] = []
    for shape, place in ((0, 0), (0, 1), (1, 2), (1, 3)):
        load = plan.load(plan.shapes[shape], at, place)
        numbers += range(load.first, load.first + len(load.arrivals or ()))
    for place in (0, 2):
        load = plan.warming(plan.shapes[0], at, place)
        numbers += range(load.first, load.first + (load.requests or 0))
    assert len(numbers) == len(set(numbers)) and -1 not in numbers  # -1 is of the look at the server


# --------------------------------------------------------------------------------------------------------- figures


def sample(number: int, start: float, first: float, gap: float, tokens: int = 4, error: str = "") -> Sample:
    times = [] if error else [first + gap * i for i in range(tokens)]
    end = times[-1] if times else 1.0
    return Sample(number, start, start, end, times, None, 10, tokens, True, error, "why" if error else "")


def drove(*samples: Sample, lags: tuple[float, ...] = (0.0001,), cpu: float = 0.1) -> Drove:
    return Drove(list(samples), list(lags), cpu, 10.0, 1)


def test_figures_of_known_samples() -> None:
    found = figures([[drove(sample(0, 0, 1, 0.5), sample(1, 2, 2, 1)), drove(sample(2, 1, 0, 0, error="HTTP 500"))]],
                    Bounds.of("ttft=1500,tpot=500"))  # fmt: skip
    assert (found["requests"], found["failed"], found["seconds"]) == (3, 1, 7.0)
    assert found["errors"] == {"HTTP 500": {"count": 1, "first": "why"}}
    assert found["output_tok_s"] == pytest.approx(8 / 7) and found["requests_per_s"] == pytest.approx(2 / 7)
    assert found["ttft_ms"] == pytest.approx(
        {"mean": 1500, "p50": 1500, "p90": 1900, "p99": 1990, "max": 2000}
    )
    assert found["goodput"]["requests"] == 1 and found["goodput"]["share"] == pytest.approx(1 / 3)
    assert found["tokens_per_event"] == 1 and found["client"]["kept_up"]
    assert spread([]) is None


def talked(cached: tuple[int | None, ...]) -> list[Sample]:
    """A conversation of three turns: 100, 150 and 200 tokens of prompt, answers of 10."""
    return [
        Sample(
            4,
            turn=turn,
            times=[0.1 * (turn + 1)],
            end=1,
            prompt_tokens=100 + 50 * turn,
            cached=hit,
            tokens=10,
        )
        for turn, hit in enumerate(cached)
    ]


def test_prefix_figures_of_known_conversations() -> None:
    other = [Sample(5, times=[0.3], end=1, prompt_tokens=100, cached=20, tokens=10)]
    found = figures([[Drove([*talked((0, 100, 150)), *other])]], Bounds({}))["prefix"]
    assert found["cached_share"] == pytest.approx(270 / 550)
    assert found["repeated_share"] == pytest.approx((110 + 160) / 550)
    first, second, third = found["turns"]
    assert (first["turn"], first["requests"], first["ttft_ms"]["max"]) == (1, 2, pytest.approx(300))
    assert first["cached_share"] == pytest.approx(0.1) and first["repeated_share"] == 0
    assert second["cached_share"] == pytest.approx(100 / 150)
    assert third["repeated_share"] == pytest.approx(160 / 200)
    silent = figures([[Drove(talked((None, None, None)))]], Bounds({}))
    assert silent["prefix"]["cached_share"] is None
    assert "prefix" not in figures([[Drove(other)]], Bounds({}))


@pytest.mark.parametrize(
    ("lags", "cpu", "late", "said"),
    [
        ((0.02,) * 10, 0.1, 0.0, "its event loop woke up 20.0 ms late"),
        ((0.0,), 9.5, 0.0, "used 95% of a core"),
        ((0.0,), 0.1, 0.5, "requests went out 500.0 ms late"),
    ],
)
def test_a_client_that_cannot_keep_up_says_so(
    lags: tuple[float, ...], cpu: float, late: float, said: str
) -> None:
    one = sample(0, 1, 0.2, 0.01)
    one.due -= late
    found = figures([[drove(one, lags=lags, cpu=cpu)]], Bounds({}))
    assert not found["client"]["kept_up"] and said in found["client"]["wrong"][0]
    text = "\n".join(lines(report_of(found)))
    assert "could not keep up" in text and said in text
    assert ("--clients" in text) == (cpu > 1)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=x", "p50=3", "itl=-1", "itl=0", "itl=nan"])
def test_bad_bounds(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--goodput .* is not NAME=MILLISECONDS"):
        Bounds.of(text)


def test_ratios_are_of_rounds() -> None:
    first = [figures([[drove(sample(0, 0, 1, gap))]], Bounds({})) for gap in (0.5, 0.5, 0.5)]
    second = [figures([[drove(sample(0, 0, 1, gap))]], Bounds({})) for gap in (0.25, 0.5, 1.0)]
    assert ratios(first, second)["itl_p50"] == pytest.approx({"median": 1, "low": 0.5, "high": 2})
    assert ratios(first, second)["ttft_p99"] == pytest.approx({"median": 1, "low": 1, "high": 1})


def test_raw_numbers_are_bounded_and_say_of_how_many() -> None:
    many = [drove(*(sample(i, 0, 1, 0.5, tokens=6) for i in range(5001)))]
    found = raw([many])
    assert found["requests_of"] == 5001 and len(found["requests"]) == 5000
    assert found["itl_of"] == 25_005 and len(found["itl_ms"]) == 20_000
    assert thinned([1, 2, 3, 4], 2) == [1, 3] and thinned([1], 2) == [1]


def test_curves_over_time_hold_every_token() -> None:
    found = over_time([sample(0, 0, 1, 0.5), sample(1, 2, 2, 1)])
    width = found["at_s"][1] - found["at_s"][0]
    assert sum(found["output_tok_s"]) * width == pytest.approx(8, rel=0.05)
    assert max(found["in_flight"]) == 2 and over_time([])["at_s"] == []


# -------------------------------------------------------------------------------------------------- text and page


def report_of(*found: dict[str, Any], rounds: int = 2) -> dict[str, Any]:
    """A report of one load on as many servers."""
    plan = Plan((), [Shape("concurrency", 16)], bounds=Bounds.of("ttft=1500"))
    some = [[[drove(sample(0, 0, 1, 0.5), sample(1, 2, 2, 1, error="HTTP 503"))]] * rounds] * max(
        1, len(found)
    )
    load = _found(plan, plan.shapes[0], some)
    for place, one in enumerate(found):
        load["servers"][place] |= one
    certificate = {
        "command": "outrider bench serve --url <x>",
        "machine": "m",
        "versions": "v",
        "commit": "c",
    }
    servers = [
        {"url": f"http://h:{i}", "model": "m", "version": "", "lengths_by": "words"} for i in range(len(some))
    ]
    settings = {"endpoint": CHAT, "seed": 0}
    return {"certificate": certificate, "settings": settings, "servers": servers, "loads": [load]}


def test_text_fits_80_columns_and_hides_no_error() -> None:
    one = {"errors": {"HTTP 503": {"count": 1, "first": "a very long story " * 20}}}
    report = report_of(one, one)
    report["loads"] *= 2
    text = lines(report)
    assert max(map(len, text)) <= 79
    assert any(line.startswith("failed: 1 x HTTP 503: a very long") for line in text)
    assert any(line.startswith("time to first token") for line in text)
    assert any("B over A, 2 rounds" in line for line in text)
    assert any(
        line.startswith("concurrency 16 ") and line.endswith(" 2") for line in text
    )  # failed, of both rounds


class Tags(HTMLParser):
    """What a page fetches, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [tag for name, _ in attrs if name in ("src", "href", "xlink:href")] + [tag] * (
            tag == "script"
        )
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing() -> None:
    report = report_of({}, {})
    report["loads"] *= 2
    text = page(report)
    tags = Tags()
    tags.feed(text)
    assert not tags.open and not tags.fetched
    assert "prefers-color-scheme: dark" in text and "&lt;x&gt;" in text and "<x>" not in text
    assert text.count("<svg class=") >= 10 and "HTTP 503" in text and "http://h:1" in text
    assert "NaN" not in text and "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    assert "p99.9" in text and "<details>" in text  # the numbers behind the plots
    json.dumps(report)


def test_latencies_have_the_lowest_and_the_highest_of_their_rounds() -> None:
    plan = Plan((), [Shape("concurrency", 16)])
    rounds = [[drove(sample(0, 0, first, 0.5))] for first in (1.0, 3.0)]
    load = _found(plan, plan.shapes[0], [rounds])
    assert load["servers"][0]["ttft_ms"]["rounds"]["p50"] == pytest.approx([1000.0, 3000.0])
    alone = _found(plan, plan.shapes[0], [rounds[:1]])
    assert "rounds" not in alone["servers"][0]["ttft_ms"]
    text = page(report_of() | {"loads": [load, alone]})
    assert text.count('class="error"') == 8  # p50 and p99 of four latencies, of the load with two rounds


def test_a_page_of_failures_alone_is_made() -> None:
    plan = Plan((), [Shape("rate", 2)])
    found = _found(plan, plan.shapes[0], [[[drove(sample(0, 0, 1, 1, error="HTTP 500"))]]])
    report = report_of() | {"loads": [found]}
    assert "HTTP 500" in page(report) and any("HTTP 500" in line for line in lines(report))


@pytest.mark.parametrize("most", [0, 0.003, 1, 3.7, 10, 99, 101, 12345])
def test_scales_reach_what_they_show(most: float) -> None:
    marks = even(most)
    assert marks[0] == 0 and marks[-1] >= most and 2 <= len(marks) <= 7
    if most:
        orders = _orders(most / 100, most)
        assert orders[0] <= most / 100 * 1.001 and orders[-1] >= most * 0.999 and len(orders) >= 2
