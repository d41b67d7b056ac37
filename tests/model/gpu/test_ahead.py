"""Kernels are compiled before they are launched: each once, in order, and whoever launches one waits for that alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

from outrider.model.kernels.gpu.ahead import CompileAhead
from tests.sweep import sweep

ROOT = Path(__file__).parents[3]
LONG = 30.0  # seconds that nothing here takes


def test_each_is_compiled_once_and_in_order() -> None:
    ahead, done = CompileAhead(threads=1), list[int]()
    ahead.pause()
    for number in (3, 1, 3, 2, 1):
        ahead.add((number,), lambda number=number: done.append(number))
    jobs = list(ahead.jobs.values())
    assert not done
    ahead.resume()
    assert all(job.done.wait(LONG) for job in jobs)
    assert done == [3, 1, 2] and not ahead.jobs


def test_several_are_compiled_at_a_time() -> None:
    ahead, together = CompileAhead(threads=3), threading.Barrier(3)
    for number in range(3):
        ahead.add((number,), lambda: together.wait(LONG) and None)
    jobs = list(ahead.jobs.values())
    assert all(job.done.wait(LONG) for job in jobs) and not together.broken


def test_who_launches_waits_for_what_was_begun_and_does_the_rest() -> None:
    ahead, begun, go, done = CompileAhead(threads=1), threading.Event(), threading.Event(), list[str]()

    def slow() -> None:
        begun.set()
        assert go.wait(LONG)
        done.append("slow")

    ahead.add(("slow",), slow)
    ahead.add(("waiting",), lambda: done.append("waiting"))
    assert begun.wait(LONG)
    ahead.settle(("waiting",))  # left to who asks: no thread will do it
    ahead.settle(("unknown",))
    threading.Timer(0.05, go.set).start()
    ahead.settle(("slow",))
    assert done == ["slow"] and not ahead.jobs


def test_a_failure_is_left_to_who_launches() -> None:
    ahead, done = CompileAhead(threads=1), list[str]()
    ahead.pause()
    ahead.add(("bad",), lambda: 1 // 0)
    ahead.add(("good",), lambda: done.append("good"))
    jobs = list(ahead.jobs.values())
    ahead.resume()
    assert all(job.done.wait(LONG) for job in jobs) and done == ["good"]


def test_what_is_dropped_is_not_compiled() -> None:
    ahead, done = CompileAhead(threads=1), list[int]()
    ahead.pause()
    ahead.add((1,), lambda: done.append(1))
    ahead.drop()
    ahead.resume()
    assert not ahead.jobs and not done


# Steps, and kernels, of steps without drafts and of all: no more than when somebody last looked.
BOUNDS = {"1 2048": (12, 31, 28, 76), "16 2048": (26, 44, 94, 84), "64 8192": (33, 46, 228, 87)}


@pytest.mark.parametrize("asked", sweep(list(BOUNDS), quick=["16 2048"]))
def test_what_steps_launch_was_collected_and_is_not_much(asked: str) -> None:
    command = [sys.executable, "-m", "tests.model.gpu.collect_kernels", *asked.split()]
    free = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=free, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, everything, missing = map(json.loads, done.stdout.splitlines())
    assert missing == []
    found = plain[0], sum(plain[1].values()), everything[0], sum(everything[1].values())
    assert all(count <= most for count, most in zip(found, BOUNDS[asked], strict=True)), (found, everything)
