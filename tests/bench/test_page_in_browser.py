"""The page of `outrider bench` in a real browser, if there is one: it fits the screen, is drawn, and asks nobody."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.speculation_page import page
from tests.bench.test_speculation_page import cell, method, report
from tests.browser import BROWSER

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: make browser")
pytestmark = needs_browser

TASKS = ("chat", "code", "json", "rewrite", "summary", "creative", "short", "long")
# What a reader would see, as the browser laid it out; it comes back in the page itself. Labels may stand half beyond an
# axis: there is a gap beside it.
LOOK = """<script>
const box = one => { const b = one.getBoundingClientRect(); return {x: b.left, r: b.right, y: b.top, b: b.bottom}; };
const apart = (a, b) => a.r <= b.x + 1 || b.r <= a.x + 1 || a.b <= b.y + 1 || b.b <= a.y + 1;
const found = {width: innerWidth, needs: document.documentElement.scrollWidth, overlaps: [], outside: [], empty: [],
  fetched: performance.getEntriesByType("resource").map(one => one.name)};
const figures = [...document.querySelectorAll("figure")];
found.figures = figures.length;
found.rows = document.querySelectorAll("table tbody tr").length;
found.ink = getComputedStyle(document.body).color;
found.ground = getComputedStyle(document.body).backgroundColor;
for (const figure of figures) {
  const name = figure.querySelector("figcaption").textContent, chart = figure.querySelector("svg.chart");
  const whole = box(chart), texts = [...chart.querySelectorAll("text")].map(one => [one.textContent, box(one)]);
  const shapes = [...chart.querySelectorAll("rect, path, polyline, circle")].map(box);
  if (whole.r - whole.x < 100 || !shapes.some(s => s.r > s.x || s.b > s.y)) found.empty.push(name);
  for (const [text, b] of texts)
    if (b.x < whole.x - 12 || b.r > whole.r + 12) found.outside.push(`${name}: ${text}`);
  texts.forEach(([one, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
    if (!apart(a, b)) found.overlaps.push(`${name}: ${one} / ${other}`);
  }));
}
const said = document.createElement("pre"); said.id = "found"; said.textContent = JSON.stringify(found);
document.body.append(said);
</script></body>"""


def whole_matrix() -> str:
    methods = {"lookup": method(0.86), "auto": method(1.42)}
    cells = {
        f"{task} T={heat:g}": cell(task, heat, 1, 4, 16, **methods)
        for task in TASKS
        for heat in (0.0, 0.7, 1.2)
    }
    return page(report(**cells))


def looked_at(html: str, folder: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the browser found in the page, at a screen so wide, with no network."""
    file = folder / "page.html"
    file.write_text(html.replace("</body>", LOOK), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900", "--virtual-time-budget=2000", *flags, "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    return json.loads(unescape(match[1]))


@pytest.mark.parametrize("width", [1280, 600])
def test_a_whole_matrix_is_drawn_and_fits(tmp_path: Path, width: int) -> None:
    found = looked_at(whole_matrix(), tmp_path, width)
    assert found["figures"] >= 9 + 2 * len(TASKS) + len(TASKS) + 9
    assert found["rows"] > 2 * 3 * 3 * 3 * len(TASKS)
    assert found["needs"] <= found["width"]  # nobody has to scroll sideways; wide tables do so by themselves
    assert found["empty"] == [] and found["outside"] == [] and found["overlaps"] == []
    assert found["fetched"] == []


def test_a_dark_screen_is_dark(tmp_path: Path) -> None:
    light = looked_at(whole_matrix(), tmp_path, 800, "--blink-settings=preferredColorScheme=1")
    dark = looked_at(whole_matrix(), tmp_path, 800, "--blink-settings=preferredColorScheme=0")

    def bright(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert bright(light["ground"]) > 600 > 150 > bright(light["ink"])
    assert bright(dark["ground"]) < 150 < 600 < bright(dark["ink"])


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    found = looked_at(page(report()), tmp_path, 800)
    assert found["figures"] == 0 and found["needs"] <= found["width"]
