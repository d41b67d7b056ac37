"""The page over HTTP: who gets it, what protects it, what it is made of. In a browser: test_page_browser.py."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from types import SimpleNamespace

import httpx
import psutil
import pytest

from outrider.control.reasons import KINDS
from outrider.serve import live
from outrider.serve.page_files import FOLDER, POLICY
from tests.serve.conftest import Served, wait_for
from tests.test_structure import ROOT, SOURCE

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = sorted(FOLDER.iterdir())
KEY = "a-key-of-this-test-0123456789"


def test_a_browser_gets_the_page_and_a_program_the_routes(served: Served) -> None:
    page = served.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html") and "<h1" in page.text
    assert page.headers["vary"] == "accept"
    assert "/v1/live" in served.get("/").json()["routes"]
    assert served.get("/docs", headers=BROWSER).text.startswith("<!doctype html>")


@pytest.mark.parametrize("path", ["/", "/docs", *(f"/page/{file.name}" for file in FILES)])
def test_nothing_is_loaded_from_elsewhere_and_no_script_stands_in_a_page(served: Served, path: str) -> None:
    reply = served.get(path, headers=BROWSER)
    assert reply.status_code == 200 and reply.headers["content-security-policy"] == POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY and POLICY.startswith("default-src 'none'; ") and "*" not in POLICY
    text = reply.text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://|\bstyle=|\son\w+=|<style|<script(?! (type=\"module\" )?src=\"/page/)", text
    )
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )


def test_the_page_loads_only_files_that_are_there_and_installed() -> None:
    names = {file.name for file in FILES}
    asked = {
        name for file in FILES for name in re.findall(r"(?:/page/|from \"\./)([\w.]+)", file.read_text())
    }
    assert asked | {"index.html", "docs.html"} == names
    assert sum(file.stat().st_size for file in FILES) < 500_000
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = found["tool"]["setuptools"]["package-data"]["outrider"]
    assert all(any(fnmatch(str(f.relative_to(SOURCE)), one) for one in patterns) for f in FILES)


def test_a_file_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    first = served.get("/page/main.js")
    again = served.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


@pytest.mark.parametrize("name", ["none.js", "..%2fapp.py", "%2e%2e", "page_files.py", "main.js%00", ""])
def test_only_files_of_the_page_are_served(served: Served, name: str) -> None:
    assert served.get(f"/page/{name}").status_code == 404


def test_with_keys_the_page_is_open_and_the_api_is_not(serve_tiny: Callable[..., Served]) -> None:
    server = serve_tiny("--api-key", KEY)
    for path in ("/", "/docs", "/page/main.js"):
        assert server.get(path, headers=BROWSER).status_code == 200
    for path in ("/", "/docs", "/v1/live", "/v1/pairs", "/v1/what-if?acceptance=0.5", "/openapi.json"):
        assert server.get(path).status_code == 401, path
    assert server.get("/v1/live", headers=BROWSER).status_code == 401
    assert server.post("/", {}, headers=BROWSER).status_code == 401
    assert server.get("/v1/live", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_the_time_of_other_programs_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    service, seconds = SimpleNamespace(others_seconds=0.0), iter([5.0, 4.99, 5.5, None])
    monkeypatch.setattr(live, "others_seconds", lambda own: next(seconds))
    assert [live._others(service) for _ in range(4)] == [5.0, 5.0, 5.5, None]  # type: ignore[arg-type]


def test_live_figures_are_those_of_the_metrics(served: Served) -> None:
    before = served.get("/v1/live").json()
    body = {"prompt": "aaaa", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    body["speculative_decoding"] = {"drafter": "lookup", "depth": 3}
    for _ in range(2):  # lookup copies the first answer
        served.post("/v1/completions", body)
    served.wait_idle()
    now = served.get("/v1/live").json()
    assert now["generation_tokens"] == before["generation_tokens"] + 200
    assert now["generation_tokens"] == served.metric("generation_tokens_total")
    assert (
        sum(now["token_counts"]) - sum(before["token_counts"]) == 198
    )  # each answer's first has no time before
    assert len(now["token_counts"]) == len(now["token_seconds"]) + 1
    lookup = now["drafters"]["lookup"]
    assert lookup["drafts"][0] >= lookup["accepted"][0] > 0 and lookup["recent_acceptance"] is not None
    decided = now["decisions"]["asked"]
    assert decided["count"] > 0 and decided["meaning"] == KINDS["asked"]
    assert "asked, drafter lookup" in decided["latest"]
    assert (now["running"], now["waiting"], now["ready"]) == (0, 0, True)
    others = [figures["other_programs_seconds"] for figures in (before, now)]
    assert others == [None, None] or others[0] <= others[1]


def test_the_latest_reason_is_put_into_words_again_and_again(served: Served) -> None:
    def latest(depth: int) -> str:
        body = {
            "prompt": "aaaa",
            "max_tokens": 8,
            "speculative_decoding": {"drafter": "lookup", "depth": depth},
        }
        served.post("/v1/completions", body)
        return served.get("/v1/live").json()["decisions"].get("asked", {}).get("latest") or ""

    for depth in (2, 5):
        wait_for(lambda: latest(depth).startswith(f"depth {depth}: asked"))  # noqa: B023 (called at once)


def test_a_poll_takes_less_than_a_hundredth_of_a_processor(served: Served) -> None:
    """Processor time of both processes, of polls that come once a second."""
    processes = [psutil.Process(served.process.pid), served.engine()]

    def spent() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    wait_for(
        lambda: served.get("/v1/live").json()["prepared"]
    )  # until then an idle engine measures its steps
    before, polls = spent(), 100
    with httpx.Client(base_url=served.url) as client:
        for _ in range(polls):
            assert client.get("/v1/live").status_code == 200
    api, engine = (after - first for after, first in zip(spent(), before, strict=True))
    assert api / polls < 0.01 and engine / polls < 0.001


def test_polls_are_not_logged(served: Served) -> None:
    served.get("/v1/live")
    served.get("/version")
    assert "path=/v1/live" not in served.printed("path=/version")
