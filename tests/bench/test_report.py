"""The page says what the results say: a miss is a miss, and what was not measured is not there."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from bench.report import GOALS, main, page

CERTIFICATE = {
    "command": "outrider bench <x> --json a&b",
    "commit": "c0ffee",
    "versions": "v",
    "machine": "H200",
}
AS_IF = {
    "shape": "8b",
    "parameters": 8,
    "small": "tiny",
    "meaning": "the big one's cost, the small one's text",
}


def step(ms: float, rows: int = 1, of_plain: float = 1.0, context: int = 512) -> dict[str, Any]:
    one = {"context": context, "sequences": 1, "rows": rows, "ms": ms, "of_plain": of_plain}
    return {"kind": "step", "certificate": CERTIFICATE, "shape": "8b", "weight_gb": 15.0, "steps": [one]}


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
        (bench(), "Round outside the target's pass", ("2.50 %", "✓ met")),
        (bench(lookup=way(outside_pass=0.07)), "Round outside the target's pass", ("7.00 %", "✗ missed")),
        (bench(lookup=way(round_rows=5, round_ms=4.5)), "Lookup, 4 guesses of 4", ("1,111 tok/s", "✓ met")),
        (bench(lm=way(round_rows=5, round_ms=9.0)), "1B-shaped draft", ("308.1 tok/s", "✗ missed")),
        (bench(lm=way(ratio=2.1)), "Chat at T = 0.7 with the draft", ("2.10x plain", "✓ met")),
        (bench("rewrite", lookup=way(ratio=2.4)), "Rewriting at T = 0", ("2.40x plain", "✗ missed")),
        (bench(batch="16", lm=way()), "Plain decoding, batch 16", ("250 tok/s", "✗ missed")),
        (bench(auto=way(ratio=0.98)), "auto against plain", ("0.98x plain", "✗ missed")),
        (bench(auto=way(ratio=1.2)), "auto against plain", ("1.20x plain", "✓ so far, 1 of 10 measured")),
        (bench(lm=way(differing=2)), "Tokens that differ from plain ones", ("2", "✗ missed")),
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
    for i, result in enumerate([step(3.8), bench(lm=way()), peers, audit(5, 0)]):
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
