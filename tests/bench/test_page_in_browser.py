"""The page of `outrider bench` in a real browser, if there is one: it fits the screen, is drawn, and asks nobody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.bench.speculation_page import page
from tests.bench.test_speculation_page import cell, method, report
from tests.browser import Look, needs_browser

pytestmark = needs_browser

TASKS = ("chat", "code", "json", "rewrite", "summary", "creative", "short", "long")


def whole_matrix() -> str:
    methods = {"lookup": method(0.86), "auto": method(1.42)}
    cells = {
        f"{task} T={heat:g}": cell(task, heat, 1, 4, 16, **methods)
        for task in TASKS
        for heat in (0.0, 0.7, 1.2)
    }
    return page(report(**cells))


@pytest.mark.parametrize("width", [1280, 600])
def test_a_whole_matrix_is_drawn_and_fits(look: Look, tmp_path: Path, width: int) -> None:
    found = look(whole_matrix(), tmp_path, width)
    assert found["figures"] >= 9 + 2 * len(TASKS) + len(TASKS) + 9
    assert found["rows"] > 2 * 3 * 3 * 3 * len(TASKS)
    assert found["needs"] <= found["width"]  # nobody has to scroll sideways; wide tables do so by themselves
    assert found["empty"] == [] and found["outside"] == [] and found["overlaps"] == []
    assert found["fetched"] == []


def test_a_dark_screen_is_dark(look: Look, tmp_path: Path) -> None:
    light = look(whole_matrix(), tmp_path, 800)
    dark = look(whole_matrix(), tmp_path, 800, "dark")

    def bright(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert bright(light["ground"]) > 600 > 150 > bright(light["ink"])
    assert bright(dark["ground"]) < 150 < 600 < bright(dark["ink"])


def test_a_page_of_nothing_says_so(look: Look, tmp_path: Path) -> None:
    found = look(page(report()), tmp_path, 800)
    assert found["figures"] == 0 and found["needs"] <= found["width"]
