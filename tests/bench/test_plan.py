"""The planner over a device's costs, counted: guessing never costs more than it brings."""

from __future__ import annotations

import subprocess
import sys


def test_guessing_pays_or_is_left_alone() -> None:
    command = [sys.executable, "-m", "bench.plan", "--batches", "1,16", "--groups", "3"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = [line.split() for line in told.splitlines()]
    assert [(line[0], line[2]) for line in found] == [
        (task, batch) for task in ("chat", "rewrite") for batch in ("1", "16")
    ]
    for line in found:
        assert float(line[4].rstrip("x")) >= 0.99 and float(line[-1].rstrip(")")) >= 0.98, line
    assert float(found[0][4].rstrip("x")) > 1.4  # one answer, with a draft
    assert float(found[3][4].rstrip("x")) > 1.5  # sixteen that are mostly copies
