"""`outrider doctor`: what it finds, told with the line that mends it; no torch, no network, no keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli import checks
from outrider.cli.checks import Finding

from .conftest import Outrider


def test_it_tells_each_topic_and_leaves_well(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SAMPLE_SECONDS", 0.01)
    ran = outrider("doctor")
    assert ran.code == 0 and "no errors" in ran.out
    topics = {line.split()[1] for line in ran.out.splitlines() if line.startswith(("ok", "note", "warning"))}
    assert topics >= {
        "versions",
        "system",
        "cores",
        "memory",
        "kernels",
        "gpu",
        "models",
        "drafts",
        "folders",
        "port",
    }
    monkeypatch.setenv("OUTRIDER_API_KEY", "or-secret-of-mine")
    told = outrider("doctor", "--json").out
    assert json.loads(told)["ok"] is True and "OUTRIDER_API_KEY" in told and "secret" not in told


def test_it_does_not_wait_for_torch() -> None:
    code = "import sys; from outrider.cli.checks import findings; list(findings()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_has_its_exit_status_and_its_mend(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(checks.os, "access", lambda place, how: place != tmp_path)
    ran = outrider("doctor")
    assert ran.code == 1 and "1 error" in ran.out
    assert (
        f"cache {tmp_path / 'a' / 'b'} cannot be written to" in ran.out and "-> set OUTRIDER_CACHE" in ran.out
    )


def one(check, state: str) -> Finding:
    return next(finding for finding in check() if finding.state == state)


def test_busy_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "usable_cores", lambda: 2)
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(checks, "_busy_programs", lambda: [("cc1 (pid 7)", 0.97)])
    found = one(checks.cores, "warning")
    assert "cc1 (pid 7) 97%" in found.text and found.mend and "--threads 1" in found.mend
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 8)  # there is room for both
    assert [f.state for f in checks.cores()] == ["ok"]


def test_a_program_that_works_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([{1: ("init", 5), 9: ("cc1", 100)}, {1: ("init", 5), 9: ("cc1", 200), 10: ("new", 9)}])
    monkeypatch.setattr(checks, "_cpu_times", lambda: next(ticks))
    monkeypatch.setattr(checks.time, "sleep", lambda _: None)
    monkeypatch.setattr(checks.os, "sysconf", lambda _: 100)
    assert checks._busy_programs() == [("cc1 (pid 9)", 1 / checks.SAMPLE_SECONDS)]


def test_little_memory_no_compiler_and_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda: 1 << 28)
    assert "--cache-bytes" in (one(checks.memory, "warning").mend or "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "gcc or clang" in (one(checks.kernels, "warning").mend or "")
    monkeypatch.setattr(checks, "carried", lambda: Path("a library"))
    assert one(checks.kernels, "ok").text == "come with the package"
    monkeypatch.setattr(checks, "_cards", lambda: ("570.1", [("A card", 80 << 30, 70 << 30)]))
    monkeypatch.setattr(checks, "_torch_cuda", lambda: None)
    assert [f.state for f in checks.gpu()] == ["ok", "warning"]
    monkeypatch.setattr(checks, "_torch_cuda", lambda: "12.8")
    monkeypatch.setattr(checks, "installed", lambda name: None)
    assert [f.state for f in checks.gpu()] == ["ok", "error"]


def test_the_bug_template_asks_for_it() -> None:
    template = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
    assert "outrider doctor" in template.read_text()
