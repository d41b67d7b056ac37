"""The page says what the results say: a miss is a miss, and what was not measured is not there."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from bench.report import GOALS, main, page

from outrider import SamplingParams
from outrider.bench import arrivals
from outrider.bench.as_if import AsIf
from outrider.bench.speculation import Comparison, compare, ways_of
from outrider.bench.speed import concurrency
from outrider.cli.measure import described
from tests.bench.conftest import prompts

CERTIFICATE = {
    "command": "outrider bench <x> --json a&b",
    "commit": "c0ffee",
    "versions": "v",
    "machine": "H200",
}
ROUND = ("round_rows", "round_ms", "pass_ms", "outside_pass")
AS_IF = {
    "shape": "8b",
    "parameters": 8,
    "small": "tiny",
    "draft": {"shape": "1b", "layers": "28 of 30", "parameters": 1},
    "meaning": "the big one's cost, the small one's text",
}


def step(ms: float, rows: int = 1, of_plain: float = 1.0, context: int = 512) -> dict[str, Any]:
    one = {"context": context, "sequences": 1, "rows": rows, "ms": ms, "of_plain": of_plain}
    return {"kind": "step", "certificate": CERTIFICATE, "shape": "8b", "weight_gb": 15.0, "steps": [one]}


def rounds(
    drafter: str, ms: float, size: int = 1, form: tuple[int, int] = (4, 4), **changes: Any
) -> dict[str, Any]:
    """As bench/gpu/rounds.py writes it, of one round; read back, as a form is a list then."""
    one = {
        "size": size,
        "drafter": drafter,
        "form": form,
        "ms": ms,
        "of_plain": 1.25,
        "tokens": None,
        "tok_s": None,
    }
    made = {
        "kind": "rounds",
        "certificate": CERTIFICATE,
        "shape": "8b",
        "draft": "1b",
        "context": 512,
        "rounds": [one],
    }
    read: dict[str, Any] = json.loads(json.dumps(made | changes))
    return read


def offline(together: int, rate: float) -> dict[str, Any]:
    found = {"together": together, "one_tok_s": 1200.0, "all_tok_s": rate, "ratio": rate / 1200}
    return {"kind": "bench", "certificate": CERTIFICATE, "draft": "none", "plain": {"together": found}}


def way(**changes: Any) -> dict[str, Any]:
    made = {
        "tok_s": 250.0, "ratio": 1.0, "worst": 0.95, "tokens_per_step": 1.0, "drafted": 0, "held": None,
        "compared": 100, "differing": 0, "round_rows": 1, "round_ms": 4.0, "pass_ms": 3.9, "outside_pass": 0.025,
    }  # fmt: skip
    return made | changes


def bench(task: str = "chat", batch: str = "1", **ways: dict[str, Any]) -> dict[str, Any]:
    batches = {batch: {"groups": 1, "prompts": 1, "ways": {"plain": way(), **ways}}}
    found = {task: {"temperature": 0.7, "max_tokens": 9, "batches": batches}}
    return {"kind": "bench", "certificate": CERTIFICATE, "draft": "lm", "as_if": AS_IF, "speculation": found}


def audit(compared: int, differing: int) -> dict[str, Any]:
    identity = {
        "compared": compared, "differing": differing, "by_way_and_temperature": {"lm T=0": compared},
        "by_batch": {"32": compared}, "drafted": {"lm": 5}, "accepted": {}, "divergences": [], "seconds": 1.0,
    }  # fmt: skip
    return {"kind": "audit", "certificate": CERTIFICATE, "draft": "lm", "as_if": AS_IF, "identity": identity}


def verdict(html: str, goal: str) -> str:
    row = next(row for row in html.split("<tr>") if goal in unescape(row))
    return unescape(re.sub("<[^>]+>", " ", row))


@pytest.mark.parametrize(
    ("result", "goal", "shown"),
    [
        (step(3.8), "Plain step of the 8B shape, context 512", ("3.80 ms", "✓ met")),
        (step(3.9), "Plain step of the 8B shape, context 512", ("3.90 ms", "✗ missed")),
        (step(4.2, context=8192), "context 8,192", ("4.20 ms", "✓ met")),
        (step(4.2, 64, 1.12), "Verifying 64 nodes", ("1.12x", "✗ missed")),
        (bench(), "Step outside the target's pass", ("2.50 %", "✓ met")),
        (bench(lookup=way(outside_pass=0.07)), "Step outside the target's pass", ("7.00 %", "✗ missed")),
        (bench(lookup=way(round_rows=5, round_ms=4.5)), "Lookup, 4 of 4 draft tokens", ("1,111 tok/s", "✓ met")),
        (bench(lm=way(round_rows=5, round_ms=9.0)), "1B-shaped draft", ("308.1 tok/s", "✗ missed")),
        (rounds("lookup", 4.6), "Lookup, 4 of 4 draft tokens", ("1,087 tok/s", "5.00 tokens in a step of", "✓ met")),
        (rounds("lookup", 4.7), "Lookup, 4 of 4 draft tokens", ("1,064 tok/s", "✗ missed")),
        (rounds("lm", 8.0), "1B-shaped draft", ("346.6 tok/s", "2.77 tokens in a step of 8.00 ms", "✓ met")),
        (rounds("lm", 8.1), "1B-shaped draft", ("342.3 tok/s", "✗ missed")),
        (rounds("none", 5.0, 16, (0, 0)), "Plain decoding, batch 16", ("3,200 tok/s", "context 512", "✓ met")),
        (rounds("none", 5.2, 16, (0, 0)), "Plain decoding, batch 16", ("3,077 tok/s", "✗ missed")),
        (rounds("none", 5.7, 32, (0, 0)), "Plain decoding, batch 32", ("5,614 tok/s", "✓ met")),
        (rounds("none", 5.8, 32, (0, 0)), "Plain decoding, batch 32", ("5,517 tok/s", "✗ missed")),
        (offline(512, 100_000.0), "512 prompts at once", ("100,000 tok/s", "✓ met")),
        (offline(512, 99_999.0), "512 prompts at once", ("99,999 tok/s", "✗ missed")),
        (bench(lm=way(ratio=2.1)), "Chat at T = 0.7 with the draft", ("2.10x plain", "✓ met")),
        (bench("rewrite", lookup=way(ratio=2.4)), "Rewriting at T = 0", ("2.40x plain", "✗ missed")),
        (bench(batch="16", lm=way()), "Plain decoding, batch 16", ("250 tok/s", "✗ missed")),
        (bench(auto=way(ratio=0.98)), "auto against plain", ("0.98x plain", "✗ missed")),
        (bench(auto=way(ratio=1.2)), "auto against plain", ("1.20x plain", "✓ so far, 1 of 10 measured")),
        (bench(lm=way(differing=2)), "Tokens that differ from plain ones", ("2", "✗ missed")),
        (bench("code", "2", **{"lm:auto": way(differing=3)}), "Tokens that differ", ("3", "code, lm:auto", "✗ missed")),
        (audit(1_000_001, 0), "Identity: tokens compared", ("1,000,001", "✓ met")),
        (audit(999_999, 0), "Identity: tokens compared", ("999,999", "✗ missed")),
        (audit(10**6, 1), "Identity: tokens that differ", ("1", "✗ missed")),
    ],
)  # fmt: skip
def test_verdicts(result: dict[str, Any], goal: str, shown: tuple[str, ...]) -> None:
    found = verdict(page([result]), goal)
    assert all(text in found for text in shown), found
    assert "outrider bench <x> --json a&b" in found


def test_nothing_measured_is_nothing_shown() -> None:
    html = page([])
    assert html.count("not measured") == len(GOALS)
    assert "✓" not in html and "✗" not in html


def test_another_shape_meets_no_goal_of_this_one() -> None:
    result = bench(lm=way(ratio=9.0))
    result["as_if"] = AS_IF | {"shape": "1b"}
    assert "not measured" in verdict(page([result]), "Chat at T = 0.7")


@pytest.mark.parametrize(
    ("result", "goal"),
    [
        (rounds("lookup", 1.0, shape="1b"), "Lookup, 4 of 4 draft tokens"),
        (rounds("lookup", 1.0, context=64), "Lookup, 4 of 4 draft tokens"),
        (rounds("lookup", 1.0, 4), "Lookup, 4 of 4 draft tokens"),
        (rounds("lm", 1.0, draft="64:2:1:1:128"), "1B-shaped draft"),
        (rounds("lm", 1.0, form=(2, 2)), "1B-shaped draft"),
        (
            bench(lm=way(round_rows=5, round_ms=1.0))
            | {"as_if": AS_IF | {"draft": {"shape": "64:2:1:1:128", "layers": "1 of 2"}}},
            "1B-shaped draft",
        ),
        (rounds("none", 1.0, 4, (0, 0)), "Plain decoding, batch 16"),
        (offline(1024, 1e6), "512 prompts at once"),
        (offline(512, 1e6) | {"as_if": AS_IF}, "512 prompts at once"),
    ],
)
def test_what_a_goal_is_not_about_does_not_meet_it(result: dict[str, Any], goal: str) -> None:
    assert "not measured" in verdict(page([result]), goal)


def test_a_figure_of_whole_answers_and_of_rounds_alone_is_the_worse_of_both() -> None:
    whole = bench(lookup=way(round_rows=5, round_ms=5.0))
    found = verdict(page([whole, rounds("lookup", 4.0)]), "Lookup, 4 of 4 draft tokens")
    assert "1,000 tok/s" in found and "worst of 2" in found and "missed" in found
    found = verdict(page([whole, rounds("lookup", 6.25)]), "Lookup, 4 of 4 draft tokens")
    assert "800 tok/s" in found and "(context 512)" in found


def test_rounds_are_told_with_their_form_and_the_tokens_that_were_given() -> None:
    one = {"size": 4, "of_plain": 1.25, "tokens": None, "tok_s": None, "ms": 6.5}
    given = {"tokens": 2.773, "tok_s": 1706.5}
    result = rounds("", 1.0, rounds=[
        one | {"drafter": "none", "form": (0, 0), "tokens": 1.0, "tok_s": 615.4},
        one | {"drafter": "<lm>", "form": (4, 4)} | given,
        one | {"drafter": "lm", "form": (3, 11)},
    ])  # fmt: skip
    html = page([result])
    section = html[html.index("One captured step, shape 8b, draft 1b") :]
    assert "Tokens a step are given here, not measured: a step takes as long whatever is accepted." in section
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in section.split("<tr>")[2:]]
    assert cells == [
        ["4", "none", "no draft", "6.500", "1.250", "615.4", "1.00"],
        ["4", "&lt;lm&gt;", "chain of 4", "6.500", "1.250", "1,706", "2.77"],
        ["4", "lm", "tree of 11, 3 deep", "6.500", "1.250", "", ""],
    ]


def test_a_draft_in_fewer_bits_says_so() -> None:
    draft = {"shape": "1b", "layers": "16 of 30", "parameters": 1}
    result = bench(lm=way())
    whole = page([result | {"as_if": AS_IF | {"draft": draft}}])
    assert "as if 8b, draft as if 1b with 16 of 30 layers<" in whole
    fewer = page([result | {"as_if": AS_IF | {"draft": draft | {"weights": "fp8"}}}])
    assert "as if 8b, draft as if 1b in fp8 with 16 of 30 layers<" in fewer


def test_what_bench_writes_is_what_is_read(wide: AsIf) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    ways = ways_of(wide, params, ["lookup", "lm", "lm:auto", "auto"])
    found = compare(wide, Comparison({"chat": prompts(2)}, params, ways, batches=(1, 2), most=1))
    result = {"kind": "bench", **described(wide), "speculation": found, "plain": {}}
    result["plain"]["together"] = concurrency(wide, prompts(2), 4, 2, repeats=1)
    result["as_if"]["shape"] = "8b"
    result["as_if"]["draft"]["weights"] = "int4"
    html = page([json.loads(json.dumps(result))])
    assert "2 requests at once" in html and "draft as if 64:2:8:4:48:300 in int4 with" in html
    # A lookup on the host has as many guesses as it finds, so there is no round of 5 rows to count on.
    for goal in ("Step outside", "Chat at T", "auto against", "Tokens that differ"):
        assert "not measured" not in verdict(html, goal), goal
    assert "worst of 8" in verdict(html, "Tokens that differ")


def test_a_way_in_which_nothing_only_decoded_has_no_round() -> None:
    """A batch whose sequences never all decode together has no round to tell of."""
    short = {name: value for name, value in way().items() if name not in ROUND}
    html = page([bench(lm=short, lookup=short)])
    assert "not measured" in verdict(html, "Lookup, 4 of 4 draft tokens")
    assert html.count("0 of 100") == 3


def test_a_run_that_ended_before_it_measured_anything_is_named(tmp_path: Path) -> None:
    file = tmp_path / "begun.json"
    file.write_text('{"kind": "bench", "complete": false}')
    with pytest.raises(SystemExit, match=r"begun\.json .*leave it out"):
        main([str(file), "--out", str(tmp_path / "page.html")])


def test_arrivals_are_shown_with_who_came(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "RUNS_ONCE", 1)
    found = arrivals.audit_arrivals(wide, prompts(2), False, [0.0], SamplingParams(max_tokens=4, seed=1))
    found.left_out["regex"] = "why"
    result = {"kind": "audit", "certificate": CERTIFICATE, "draft": "lm", "arrivals": found.as_json()}
    text = unescape(re.sub("<[^>]*>", "", page([result])))
    assert f"{found.compared:,} tokens compared, 0 differ." in text
    assert f"{found.requests['penalties']} penalties" in text and f"{found.aborted} aborted" in text
    assert "Left out: regex" in text
    assert "the model as it is, with arrivals" in text and "✗ missed" in text  # of a million
    assert "logprobs T=0" in text


@pytest.mark.parametrize(
    ("ratio", "left_out", "shown"), [(0.95, [], "✓ met"), (0.91, [], "✗ missed"), (0.95, ["grammar"], None)]
)
def test_a_mixed_batch_has_its_goal(ratio: float, left_out: list[str], shown: str | None) -> None:
    rates = {"all": {"without_tok_s": 100.0, "mixed_tok_s": 95.0, "ratio": ratio, "worst": 0.9}}
    result = {"kind": "mixed", "certificate": CERTIFICATE, "as_if": AS_IF, "left_out": left_out, "batch": 16,
              "rates": rates, "compared": 5, "differing": 0}  # fmt: skip
    text = unescape(re.sub("<[^>]*>", " ", page([result])))
    assert f"{ratio:.3f}" in text and "0.900" in text
    assert [verdict for verdict in ("✓ met", "✗ missed") if verdict in text] == ([shown] if shown else [])


def test_a_run_that_was_cut_short_says_so() -> None:
    assert "cut short" in page([audit(5, 0) | {"complete": False}])
    assert "cut short" not in page([audit(5, 0) | {"complete": True}])


def test_the_worst_counts() -> None:
    found = verdict(page([step(3.7), step(3.95), step(3.8)]), "context 512")
    assert "3.95 ms" in found and "missed" in found and "worst of 3" in found


def test_the_page_stands_alone_and_says_what_it_is(tmp_path: Path) -> None:
    peers = {
        "kind": "peers", "certificate": CERTIFICATE, "draft": "lm", "as_if": AS_IF, "depth": 4,
        "tasks": {"chat": {"1": {"groups": 1, "tokens_each": 9, "engines": {
            "<vllm>": {"tok_s": 10.0, "ratio": 0.1, "first_s": 0.01, "agreed_tokens": 7}
        }}}},
    }  # fmt: skip
    files = []
    for i, result in enumerate([step(3.8), rounds("lm", 8.0), bench(lm=way()), peers, audit(5, 0)]):
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(result))
    main([*map(str, files), "--out", str(tmp_path / "page.html")])
    html = (tmp_path / "page.html").read_text()
    assert html.count("the big one&#x27;s cost, the small one&#x27;s text") == 3
    assert "&lt;vllm&gt;" in html and "<vllm>" not in html
    assert not re.search(r"<script|<link|https?://|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(SystemExit, match=r"other\.json"):
        main([str(other), "--out", str(tmp_path / "page.html")])
