"""bench/serve_load.py for a few seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.serve_load import Case, Failed, Reading, Tally, flat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("load") / "report.json"
    options = ["--minutes", "0.1", "--tokens", "48", "--json", str(out), "--", "--threads", "1"]
    command = [sys.executable, "-m", "bench.serve_load", str(tiny_folder), *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert out.exists(), ended.stderr
    return json.loads(out.read_text())


@pytest.mark.slow  # as many come as the machine lets in within its seconds
def test_a_crowd_is_served_right_and_leaves_nothing_behind(report: dict[str, Any]) -> None:
    assert [name for name, good in report["checks"].items() if not good] == [], report["wrong"][:5]


@pytest.mark.slow
def test_the_crowd_was_one(report: dict[str, Any]) -> None:
    outcomes = Counter(report["outcomes"])
    assert all(outcomes[kind] > 2 for kind in ("plain", "abort", "bad", "slow"))
    assert report["disconnects"] > 2
    assert report["preemptions"] > 0
    assert outcomes["refused: queue_full"] > 0
    assert report["queued"] > 0
    assert sum(report["stop"]["outcomes"].values()) > 64


def read(case: Case, *events: dict[str, Any], tally: Tally | None = None) -> Reading:
    reading = Reading(SimpleNamespace(), case, tally or Tally())  # type: ignore[arg-type]
    for event in events:
        reading._take(event)
    return reading


def event(text: str, reason: str | None = None, name: str = "a", **more: Any) -> dict[str, Any]:
    return {"id": name, "choices": [{"delta": {"content": text}, "finish_reason": reason}], **more}


LAST = {"id": "a", "choices": [], "usage": {"completion_tokens": 2}, "metrics": {"queue_time_ms": 1.0}}
CASE = Case({}, "one two", "stop", 2)


def test_the_right_answer_passes_once() -> None:
    tally = Tally()
    right = [event("one "), event("two", "stop"), LAST]
    read(CASE, *right, tally=tally).check_whole()
    with pytest.raises(RuntimeError, match="twice"):
        read(CASE, *right, tally=tally).check_whole()


@pytest.mark.parametrize(
    "events",
    [
        [event("one two"), LAST],  # no reason
        [event("one twa", "stop"), LAST],
        [event("one ", "stop"), LAST],
        [event("one two", "stop")],  # no usage
    ],
)
def test_a_wrong_answer_is_seen(events: list[dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match="another answer"):
        read(CASE, *events).check_whole()


def test_a_foreign_event_a_foreign_beginning_and_an_error_are_seen() -> None:
    with pytest.raises(RuntimeError, match="event of b"):
        read(CASE, event("one "), event("two", name="b"))
    with pytest.raises(RuntimeError, match="beginning"):
        read(CASE, event("two")).check_beginning()
    with pytest.raises(Failed, match="draining"):
        read(CASE, event("one "), {"error": {"code": "draining"}}).check_whole()


def test_growing_memory_is_seen() -> None:
    level = [256.0 + i % 3 for i in range(50)]
    assert flat(level, 8) == (True, 257, 257)
    assert not flat([value + i for i, value in enumerate(level)], 8)[0]
