"""A tiny model in another shape, with a draft of its own: what the measuring code is tried on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from outrider import Settings
from outrider.bench.as_if import AsIf
from outrider.cache.store import KeyValueStore
from outrider.types import Batch
from tests.browser import BROWSER, FLAGS, Look
from tests.targets import write_target

SHAPE, DRAFT = "64:3:8:4:64:300", "64:2:8:4:48:300"
SETTINGS = Settings(device="cpu", max_sequences=8, cache_bytes=1 << 22)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def wide(folder: Path) -> Iterator[AsIf]:
    with AsIf(folder, SHAPE, SETTINGS, draft_shape=DRAFT) as llm:
        yield llm


@pytest.fixture
def leaky(wide: AsIf) -> Iterator[AsIf]:
    """The same with the fault that everything here is there to find: rows that feel how many share their pass."""
    runner, sound = wide.engine.runner, wide.engine.model
    runner.model = Leaky(sound)  # type: ignore[assignment]
    yield wide
    runner.model = sound


class Leaky:
    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        logits = self.inner.forward(batch, store)
        return logits.roll(batch.rows, 1)[:, : logits.shape[1]] if batch.rows > 1 else logits


def prompts(count: int) -> list[list[int]]:
    """Short, no two alike, and with something in them to look up."""
    return [[5 + i, 17, 30, 44 + i, 17, 30] * 2 for i in range(count)]


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


@pytest.fixture(scope="module")
def look() -> Iterator[Look]:
    """What a browser without a network finds in a page, by the width and the colours of its screen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))

        def looked_at(html: str, folder: Path, width: int, scheme: str = "light") -> dict[str, Any]:
            file = folder / "page.html"
            file.write_text(html.replace("</body>", LOOK), encoding="utf-8")
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.goto(file.as_uri())
            found = json.loads(tab.text_content("#found"))
            tab.close()
            return found

        yield looked_at
        browser.close()
