"""The kernels' threads: every unit once, the same bits beside a busy core, asleep when idle, safe at fork and exit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model.kernels.build import library
from outrider.model.kernels.native import _ptr
from tests.model.families import NEEDS_COMPILER, ours

pytestmark = NEEDS_COMPILER
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)


@pytest.fixture(scope="module")
def team(kernel_folder: Path) -> Any:
    return library(kernel_folder)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    spins = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # no longer than whoever wants it lives
    spinning = subprocess.Popen([sys.executable, "-S", "-c", spins])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def run(team: Any, threads: int, units: int, work: Any = lambda unit: None) -> tuple[Counter[int], set[int]]:
    """How often each unit was done, and by which members."""
    done: Counter[int] = Counter()
    members = set()

    def task(job: int, member: int, begin: int, end: int) -> None:
        members.add(member)
        for unit in range(begin, end):
            done[unit] += 1  # under Python's lock
            work(unit)

    team.team_run(threads, units, TASK(task), None)
    return done, members


@pytest.mark.parametrize("threads", range(1, 9))
def test_every_unit_is_done_once(team: Any, threads: int) -> None:
    for units in (0, 1, 2, 3, threads - 1, threads + 1, 65, 1000):
        done, members = run(team, threads, units)
        assert done == Counter(range(units)), units
        assert members <= set(range(threads))


def test_more_threads_than_a_team_has_room_for(team: Any) -> None:
    assert run(team, 300, 500)[0] == Counter(range(500))


def test_others_do_what_a_slow_member_leaves(team: Any) -> None:
    """Unit 0 ends when 64 of the other 95 are done: nobody may wait for whoever does it."""

    def one_try() -> bool:
        others, enough, in_time = set(), threading.Event(), []

        def work(unit: int) -> None:
            if unit == 0:
                in_time.append(enough.wait(3))
                return
            others.add(unit)
            if len(others) == 64:  # the first piece that is claimed holds a few more than unit 0
                enough.set()

        assert run(team, 2, 96, work)[0] == Counter(range(96))
        return in_time[0]

    # A helper that was late is left out for up to 0.64 s: only a later try can show anything.
    assert any(time.sleep(0.7) or one_try() for _ in range(3))


def test_two_callers_at_once(team: Any) -> None:
    """One has the helpers, the other does its units itself."""
    wrong = []

    def call() -> None:
        wrong.extend(units for units in range(2, 120) if run(team, 3, units)[0] != Counter(range(units)))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_busy_core_does_not_change_a_bit(kernel_folder: Path) -> None:
    """Members are put aside in the middle of their units, and whoever is there goes on."""
    kernels = ours("llama", "c", kernel_folder, 1).kernels
    generator = torch.Generator().manual_seed(0)
    packed = kernels.pack_linear(torch.randn(3000, 257, generator=generator))
    rows = torch.randn(9, 257, generator=generator)
    expected = {count: kernels.linear(packed, rows[:count]) for count in (1, 5, 9)}
    with busy_core():
        for threads in (2, 3, 8):
            for count, result in expected.items():
                out = torch.empty_like(result)
                for _ in range(10):
                    kernels.lib.outrider_linear(
                        packed.matrix, None, _ptr(rows), count, 3000, 257, threads, _ptr(out.fill_(9.0))
                    )
                    assert torch.equal(out, result), (threads, count)


def test_threads_that_have_nothing_to_do_sleep(team: Any) -> None:
    run(team, 4, 1000)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_members_that_a_task_is_not_for_are_not_woken(team: Any) -> None:
    """A process may have a model with many threads and one with few."""
    run(team, 300, 500)
    begin = time.process_time()
    for _ in range(100):
        run(team, 2, 8)
        time.sleep(0.001)  # the helper sleeps before the next
    assert time.process_time() - begin < 1.5  # each woken in vain looks out for 0.2 ms: 5 s
    assert run(team, 300, 500)[0] == Counter(range(500))


# ---------------------------------------------------------------------------------------------- fork and exit

PROGRAM = """
import ctypes, os, sys, threading, time
lib = ctypes.CDLL(sys.argv[1])
x = (ctypes.c_float * (1 << 18))()
def work(times=1):
    for _ in range(times):
        lib.outrider_read(x, ctypes.c_int64(len(x)), 4)
def work_on():
    threading.Thread(target=work, args=(1 << 30,), daemon=True).start()
    time.sleep(0.05)
def child_works():
    child = os.fork()
    if not child:
        work(3)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
work(3)
"""


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("child_works(); work(3)", id="fork"),
        pytest.param("work_on()\nfor _ in range(30): child_works()", id="fork-while-another-thread-works"),
        pytest.param("time.sleep(0.05)", id="exit-asleep"),
        pytest.param("work_on()", id="exit-at-work"),
    ],
)
def test_fork_and_exit(ending: str, team: Any, kernel_folder: Path) -> None:
    built = next(kernel_folder.glob("cpu-*.so"))
    command = [sys.executable, "-S", "-W", "ignore", "-c", PROGRAM + ending, str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
