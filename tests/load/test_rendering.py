"""Processes that render chat templates: shared by threads, replaced when they die, gone when their parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from outrider.errors import InvalidRequest, OutriderError
from outrider.load.rendering import MOST, Failed, Renderers

LIMITS = {"characters": 1000, "memory": 256 << 20, "seconds": 60, "mark": "\ufdd0"}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def renderers() -> Iterator[Renderers]:
    made = Renderers(LIMITS)
    yield made
    made.close()


def pids(renderers: Renderers) -> list[int]:
    return [one._process.pid for one in renderers._all]


def wait_for(what: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_variables_arrive_as_they_are(renderers: Renderers) -> None:
    source = "{{ a }} {{ b.c }} {{ d[0] is none }} {{ e }} {{ f == 'x' * 9 }}"
    given = {"a": "é🎉\ud800", "b": MappingProxyType({"c": 1.5}), "d": (None,), "e": 10**30, "f": "x" * 9}
    assert renderers.render(source, given, 60) == f"é🎉\ud800 1.5 True {10**30} True"
    assert renderers.render("{{ a }}", {"a": float("inf")}, 60) == "inf"


@pytest.mark.parametrize(
    "value", [object(), {(1, 2): 3}, 10**5000, b"x"], ids=["object", "key", "digits", "bytes"]
)
def test_what_is_no_json_is_refused(renderers: Renderers, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be JSON") as refused:
        renderers.render("x", {"messages": value}, 60)
    assert refused.value.param == "messages"
    assert not pids(renderers)


def test_nothing_heavy_is_imported_in_the_process_and_no_jinja_outside_it() -> None:
    for module, absent in (
        ("outrider.load.template_process", "torch"),
        ("outrider.load.rendering", "jinja2"),
    ):
        code = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


def test_memory_and_text_are_bounded(renderers: Renderers) -> None:
    with pytest.raises(Failed, match="longer than 1000 characters"):
        renderers.render("{{ 'a' * 1001 }}", {}, 60)
    before = pids(renderers)
    with pytest.raises(Failed, match="more than 256 MB"):
        renderers.render("{{ ('a' * 300000000) | length }}", {}, 60)
    assert renderers.render("x", {}, 60) == "x"
    assert pids(renderers) != before  # what ran out of memory is not used again


def test_one_process_serves_short_renders(renderers: Renderers) -> None:
    assert [renderers.render("{{ i }}", {"i": i}, 60) for i in range(50)] == [str(i) for i in range(50)]
    assert len(pids(renderers)) == 1


def test_threads_get_their_own_texts_from_few_processes(renderers: Renderers) -> None:
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        found[number] = [renderers.render("{{ a }}-{{ b }}", {"a": number, "b": i}, 60) for i in range(40)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number}-{i}" for i in range(40)] for number in range(8)}
    assert len(pids(renderers)) <= MOST


def test_a_slow_render_holds_up_no_other(renderers: Renderers) -> None:
    def slow() -> None:
        with pytest.raises((Failed, OutriderError)):
            renderers.render(ENDLESS, {}, 60)

    thread = threading.Thread(target=slow)
    thread.start()
    wait_for(lambda: pids(renderers) and not renderers._idle)
    assert renderers.render("x", {}, 60) == "x"
    assert thread.is_alive()
    while thread.is_alive():
        for pid in pids(renderers):
            os.kill(pid, signal.SIGKILL)
        thread.join(0.1)


@pytest.mark.parametrize("ready", [True, False])
def test_a_process_that_was_killed_is_replaced(renderers: Renderers, ready: bool) -> None:
    renderers.prepare()
    if ready:
        renderers.render("x", {}, 60)
    [pid] = pids(renderers)
    os.kill(pid, signal.SIGKILL)
    assert renderers.render("y", {}, 60) == "y"
    assert pid not in pids(renderers)


def test_a_render_whose_processes_are_killed_again_and_again_ends(renderers: Renderers) -> None:
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.01):
            for one in list(renderers._all):
                if one._ready:
                    os.kill(one._process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(OutriderError, match="ended 2 times"):
            renderers.render(ENDLESS, {}, 60)
    finally:
        over.set()
        thread.join()
    assert renderers.render("x", {}, 60) == "x"


def test_a_process_that_was_stopped_meets_the_time_limit(renderers: Renderers) -> None:
    renderers.render("x", {}, 60)
    [pid] = pids(renderers)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Failed, match=r"longer than 0\.1 s"):
        renderers.render("x", {}, 0.1)
    assert is_gone(pid)
    assert renderers.render("x", {}, 60) == "x"


SCRIPT = f"""
    import os, sys, time
    from outrider.load.rendering import Renderers
    renderers = Renderers({LIMITS})
    assert renderers.render("{{{{ a }}}}", {{"a": 1}}, 60) == "1"
    [first] = renderers._all
    print(first._process.pid, flush=True)
"""


def started(code: str) -> tuple[subprocess.Popen[str], int]:
    """A script with a renderer, and that renderer's pid."""
    source = textwrap.dedent(SCRIPT) + textwrap.dedent(code)
    pipe = subprocess.PIPE
    script = subprocess.Popen([sys.executable, "-P", "-c", source], stdin=pipe, stdout=pipe, text=True)
    assert script.stdout is not None
    return script, int(script.stdout.readline())


def test_a_process_goes_when_its_parent_leaves() -> None:
    script, pid = started("")
    assert script.wait(60) == 0
    assert is_gone(pid)  # at once: the parent has waited for it


def test_a_process_goes_when_its_parent_is_killed() -> None:
    script, pid = started("time.sleep(60)")
    script.kill()
    script.wait(60)
    wait_for(lambda: is_gone(pid))


def test_a_process_is_not_shared_after_a_fork() -> None:
    """Nor kept alive by a forked process that outlives its parent."""
    script, pid = started(
        """
        child = os.fork()
        if child == 0:
            assert not renderers._all
            texts = [renderers.render("{{ a }}", {"a": i}, 60) for i in range(20)]
            sys.stdout.write("same\\n" if texts == [str(i) for i in range(20)] else "other\\n")
            sys.stdout.flush()
            sys.stdin.read()
            os._exit(0)
        texts = [renderers.render("{{ a }}", {"a": -i}, 60) for i in range(20)]
        assert texts == [str(-i) for i in range(20)]
        assert [one._process.pid for one in renderers._all] == [first._process.pid]
        os._exit(7)
        """
    )
    assert script.wait(60) == 7
    wait_for(lambda: is_gone(pid))
    assert script.communicate()[0] == "same\n"
