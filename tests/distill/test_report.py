"""What a long run says: lines in a pipe, a bar on a terminal, and next to nothing between."""

from __future__ import annotations

import io
import time

import pytest

from outrider.distill import report as reporting
from outrider.distill.report import Bar, Lines, clock, default_report, short


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reporting, "time", made)
    return made


def test_lines_for_a_pipe(timer: Clock) -> None:
    out = io.StringIO()
    report = Lines(out)
    report.begin("answer", 20_000_000, "tokens", 5_000_000)
    for _ in range(60):
        timer.now += 1
        report.update(5_000_000 + (timer.now - 100) * 100_000, "9 conversations")
    report.note("a word")
    report.end()
    lines = out.getvalue().splitlines()
    assert lines[0] == "answer:  25 %  5.0M of 20.0M tokens"
    assert lines[1] == "answer:  32 %  6.5M of 20.0M tokens, 100.0K/s, 2 min 15 s left (9 conversations)"
    assert len(lines) == 1 + 4 + 2 and lines[-2] == "a word"
    assert lines[-1].endswith("11.0M of 20.0M tokens, 100.0K/s, 1 min 30 s left, 1 min 00 s taken")


def test_the_time_left_is_of_recent_progress(timer: Clock) -> None:
    """Half a minute of reading prompts, then a hundred tokens a second: no estimate of hours comes first."""
    out = io.StringIO()
    report = Lines(out)
    report.begin("answer", 2000, "tokens")
    for second in range(61):
        timer.now += 1
        report.update(max(0, second - 30) * 100, total=4000)
    shown = out.getvalue().splitlines()
    assert [line.partition("tokens")[2] for line in shown] == [
        "",
        "",
        "",
        ", 100/s, 26 s left",
        ", 100/s, 11 s left",
    ]
    assert shown[-1].startswith("answer:  72 %  2900 of 4000 tokens")


def test_a_bar_for_a_person(timer: Clock) -> None:
    out = io.StringIO()
    report = Bar(out)
    report.begin("train", 100, "tokens")
    timer.now += 10
    report.update(50, "loss 1.2")
    report.note("[step 3]: fine")
    report.end()
    report.note("over")
    text = out.getvalue()
    assert "train" in text and "50 of 100 tokens, 5/s, 10 s left" in text
    assert "[step 3]: fine" in text and text.endswith("over\n")


def test_an_update_costs_next_to_nothing() -> None:
    report = Lines(io.StringIO())
    report.begin("answer", 10, "tokens")
    begun = time.thread_time()
    for done in range(10_000):
        report.update(done)
    assert (time.thread_time() - begun) / 10_000 < 50e-6


def test_who_looks_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert isinstance(default_report(), Lines)
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(default_report(), Bar)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(default_report(), Lines)


def test_numbers_and_times() -> None:
    shown = {0: "0", 0.25: "0.2", 12: "12", 9999: "9999", 12_345: "12.3K", 2e7: "20.0M", 1.5e9: "1.5G"}
    assert {n: short(n) for n in shown} == shown
    assert [clock(s) for s in (4, 75, 3700)] == ["4 s", "1 min 15 s", "1 h 01 min"]
