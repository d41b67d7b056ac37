"""Pages of `audit`, `advise` and `distill`: they say what was found, in the look of the others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outrider.bench.report_pages import advise_page, audit_page, score_page
from outrider.load.cards import read_card
from outrider.load.pairs import SHIPPED
from tests.bench.test_speculation_page import CERTIFICATE, figures
from tests.browser import Look, needs_browser

IDENTITY = {
    "compared": 12345, "differing": 0,
    "by_way_and_temperature": {"plain T=0": 5, "<lookup> T=0": 6, "<lookup> T=0.7": 7},
    "by_batch": {"2": 18}, "drafted": {"<lookup>": 200, "eagle": 0}, "accepted": {"<lookup>": 50}, "divergences": [],
    "seconds": 1.5,
}  # fmt: skip
EXPECTED = {"batch": 1, "depth": 3, "speedup": 1.5, "low": 1.2, "high": 1.8, "tokens_per_step": 2.0, "acceptance": 0.6,
            "break_even": None, "p99": 1.1}  # fmt: skip
DRAFT = {"draft": "<lookup>", "expected": [EXPECTED, EXPECTED | {"batch": 4, "speedup": 0.9, "low": 0.8, "high": 1.0}],
         "acceptance": [{"depth": 1, "rate": 0.5, "of": 10}, {"depth": 2, "rate": 0.25, "of": 4}]}  # fmt: skip


def audited(**more: Any) -> str:
    return audit_page({"certificate": CERTIFICATE, "identity": IDENTITY | more}, "a <model>")


def advised() -> str:
    said = ["advice: lookup, drafts of 3", "  - it pays"]
    return advise_page({"certificate": CERTIFICATE, "drafts": [DRAFT]}, "a <model>", said)


def scored() -> str:
    return score_page(read_card(SHIPPED / "smollm2-135m-eagle"))


def test_an_audit_says_its_verdict_first() -> None:
    html = audited()
    assert "12,345 tokens compared, 200 drafted: identical" in html.split("<h2>")[0]
    assert figures(html) == ["Drafted, tokens", "Accepted, %"]
    assert "<lookup>, <lookup>" not in html and "<td class=n>7</td>" in html and "Divergences" not in html
    wrong = {"prompt": 3, "temperature": 0.7, "method": "lm", "position": 9}
    differs = audited(differing=4, divergences=[wrong])
    assert "200 drafted: 4 DIFFER" in differs and "<h2>Divergences</h2>" in differs
    assert "NOTHING WAS PUT TO THE TEST" in audited(drafted={})


def test_an_audit_of_the_distribution_has_its_tests() -> None:
    tests = [{"prompt": 0, "temperature": 0.7, "p_value": 0.4, "holds": True}]
    html = audit_page({"certificate": CERTIFICATE, "distribution": tests}, "m")
    assert "1 tests of the distribution: all hold" in html and "Drafts that were" not in html
    failed = audit_page({"certificate": CERTIFICATE, "distribution": [tests[0] | {"holds": False}]}, "m")
    assert "1 FAIL" in failed


def test_advice_has_error_bars() -> None:
    html = advised()
    assert "advice: lookup, drafts of 3" in html.split("<h2>")[0]
    assert "1.50 ±0.30" in html and "0.90 ±0.10" in html and "% accepted" in html
    alone = [{"batch": 1, "depth": 4, "speedup": 1.2, "best_speedup": 1.4, "best_depth": 2}]
    what_if = advise_page({"what_if": alone}, "from numbers alone", ["1.40x at best"])
    assert re.findall("<h2>(.*?)</h2>", what_if) == ["What if"] and "at the best depth" in what_if


def test_a_draft_has_its_score() -> None:
    html = scored()
    assert "of draft tokens accepted" in html.split("<h2>")[0]
    assert (
        figures(html)[0] == "Tokens per pass" and "<th class=n>Measured" not in html and "trained on" in html
    )


@pytest.mark.parametrize("html", [audited(), advised(), scored()], ids=["audit", "advise", "distill"])
def test_pages_are_single_files(html: str) -> None:
    assert not re.search(r"<script|<link|https?://|@import|url\(|<model>|<lookup>|None", html)
    assert "@media print" in html and "prefers-color-scheme: dark" in html


@needs_browser
@pytest.mark.parametrize("made", [audited, advised, scored])
@pytest.mark.parametrize("width", [1280, 500])
def test_pages_fit_the_screen(look: Look, tmp_path: Any, made: Any, width: int) -> None:
    found = look(made(), tmp_path, width)
    assert found["needs"] <= found["width"] and found["figures"]
    assert (
        found["empty"] == [] and found["outside"] == [] and found["overlaps"] == [] and found["fetched"] == []
    )
