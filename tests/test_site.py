"""The documentation site: what docs/site/ makes of the pages, and that it builds where `make docs` was run once."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import outrider
from tests.test_structure import ROOT

SITE = ROOT / "docs" / "site"
LONG = 1500  # words of a page that needs a table of contents
PLACES = [ROOT / ".venv-docs" / "bin" / "zensical", Path(sys.executable).with_name("zensical")]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "docs"
    load("stage").stage(out)
    return out


def leaves(nav: list[dict]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else leaves(value)


def test_the_navigation_has_every_page_once() -> None:
    stage = load("stage")
    listed = list(leaves(tomllib.loads((SITE / "zensical.toml").read_text())["project"]["nav"]))
    entries = {stage.place(page) for page in stage.pages() if page.parent != ROOT / "log"}
    assert sorted(listed) == sorted(entries)


def test_every_link_of_the_site_leads_to_a_page_or_a_file(staged: Path) -> None:
    pages = list((staged / "pages").rglob("*.md"))
    assert len(pages) > 100
    for page in pages:
        text = re.sub(r"(`+).*?\1(?!`)", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in link or (page.parent / link).is_file(), f"{page.relative_to(staged)}: {link}"


def test_links_are_those_of_the_site() -> None:
    stage, linked = load("stage"), []
    text = "[a](../log/007-x.md) [b](../deploy) [start.md](start.md) [c](../README.md#x) [d](../LOG.md)"
    assert stage.rewritten(text, ROOT / "docs" / "index.md", linked) == (
        "[a](../log/007-x.md) [b](files/deploy.md) [Start in five minutes](start.md) [c](index.md) [d](log/index.md)"
    )
    assert ROOT / "deploy" in linked
    deep = stage.rewritten("[N][K] `[N][K]` [a](law.py)", ROOT / "src" / "outrider" / "verify", linked)
    assert deep == "[N]\\[K] `[N][K]` [a](verify/law.py.md)"


def test_the_reference_has_everything_that_is_exported() -> None:
    shown = set(re.findall(r"^::: outrider\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert shown - {"errors"} == set(outrider.__all__) - {"__version__"}


def test_pictures_are_as_they_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = load("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for draw in pictures.PICTURES:
        draw()
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn == {name: (ROOT / "docs" / "pictures" / name).read_text() for name in drawn}
    assert len(drawn) == len(pictures.PICTURES)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_long_pages_begin_with_a_table_of_contents(page: Path) -> None:
    text = page.read_text()
    if len(text.split()) > LONG:
        sections = re.findall(r"^## (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
        head = text.partition("\n## ")[0]
        assert [heading for heading in sections if f"[{heading}](#" not in head] == []


@pytest.fixture(scope="module")
def zensical() -> Path:
    found = [file for file in PLACES if file.exists()]
    if not found:
        pytest.skip("the site is built where Zensical is installed: run `make docs` once")
    return found[0]


def build(zensical: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [zensical, "build", "--strict", "-f", folder / "zensical.toml"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_the_site_builds_without_warnings_and_asks_no_other_host(zensical: Path, staged: Path) -> None:
    ended = build(zensical, staged)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    site = staged / "site"
    for page in [site / "index.html", site / "api.html", site / "log" / "index.html"]:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?([^\" >]+)", page.read_text()
        )
        assert loaded and not [url for url in loaded if re.match(r"(?:https?:)?//", url)], page.name
    assert "speculation" in (site / "search.js").read_text()
    assert "log/005" not in (site / "search.js").read_text()  # pages of the log would bury the others
    assert all(
        name in (site / "api.html").read_text() for name in ("temperature", "max_tokens", "generation_config")
    )


def test_a_link_without_a_target_fails_the_build(zensical: Path, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# A page\n\n[gone](nowhere.md) [here](#no-such-heading)\n")
    (tmp_path / "zensical.toml").write_text(
        '[project]\nsite_name = "x"\ndocs_dir = "pages"\nsite_dir = "site"\n'
    )
    ended = build(zensical, tmp_path)
    assert ended.returncode == 1 and "2 issues found" in ended.stdout + ended.stderr


def test_the_search_has_a_worker_on_pages_opened_as_files(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs Chromium")
    (tmp_path / "double.js").write_text("self.onmessage = (event) => self.postMessage(2 * event.data)\n")
    (tmp_path / "page.html").write_text(
        f"<body><script>{(SITE / 'iframe-worker.js').read_text()}</script><script>"
        "const worker = new Worker('double.js')\n"
        "worker.onmessage = (event) => { document.body.textContent = `doubled: ${event.data}` }\n"
        "worker.postMessage(21)</script></body>"
    )
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "page.html").as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "doubled: 42" in ended.stdout, ended.stdout + ended.stderr
