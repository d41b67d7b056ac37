"""How the command's process ends: at once, with its exit status, and with everything written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.cli import main as module


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit statuses with which the process would have ended without taking the interpreter apart."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(module.atexit, "_run_exitfuncs", lambda: None)
    alive = [threading.main_thread()]
    monkeypatch.setattr(module.threading, "enumerate", lambda: alive)
    return statuses


@pytest.mark.parametrize("code", [0, 3])
def test_it_ends_at_once(monkeypatch: pytest.MonkeyPatch, left: list[int], code: int) -> None:
    monkeypatch.setattr(module, "run", lambda: sys.exit(code))
    module.main()
    assert left == [code]


def test_it_waits_for_threads_that_have_work_left(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    monkeypatch.setattr(module, "run", lambda: sys.exit(0))
    busy = threading.Thread(target=lambda: None, daemon=False)
    monkeypatch.setattr(module.threading, "enumerate", lambda: [threading.main_thread(), busy])
    with pytest.raises(SystemExit):
        module.main()
    assert not left


def test_answers_and_exit_status_reach_a_pipe(tiny_folder: Path) -> None:
    flags = ("--max-tokens", "4", "--temperature", "0", "--json", "--device", "cpu")
    command = [sys.executable, "-m", "outrider", "generate", str(tiny_folder)]
    done = subprocess.run([*command, "ab", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"finish_reason": "length"' in done.stdout and done.stdout.endswith("}\n")
    wrong = subprocess.run([*command, "", *flags], capture_output=True, text=True, timeout=120)
    assert (wrong.returncode, wrong.stderr) == (2, "error: the prompt is empty\n")
