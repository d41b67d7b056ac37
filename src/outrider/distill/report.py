"""What a long run says while it runs: a bar where a person looks, plain lines in a pipe, nothing in a test.

`update` is called as often as one likes: all but a few calls a second cost a comparison.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any, Protocol, TextIO

BAR_SECONDS, LINE_SECONDS = 0.2, 15.0  # between two updates that are shown
SETTLED = 2.0  # seconds until a rate means something
SAMPLE_SECONDS, WINDOW = 1.0, 20.0  # seconds between two samples, and that a rate is the mean of
SURE = 0.05  # of the work: from then on the mean since the beginning will do
NARROW = 100  # columns of a terminal that have no room for notes


class Report(Protocol):
    """A stage at a time: `begin` it, `update` how much of it is done, and of how much if more is known now, `end`.
    `note` is a line of its own.
    """

    def begin(self, stage: str, total: float, unit: str, done: float = 0.0) -> None: ...

    def update(self, done: float, note: str = "", total: float | None = None) -> None: ...

    def end(self) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """Says nothing; keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, stage: str, total: float, unit: str, done: float = 0.0) -> None:
        pass

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        pass

    def end(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


class _Timed:
    """How far a stage is, how fast it goes, and when it will be through; shown now and then."""

    every: float

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._next = 0.0

    def begin(self, stage: str, total: float, unit: str, done: float = 0.0) -> None:
        self.stage, self.total, self.unit, self.first, self.done = stage, total, unit, done, done
        self.begun = time.monotonic()
        self._samples: deque[tuple[float, float]] = (
            deque()
        )  # times and what was done then, from the first progress on
        self._next = self.begun + self.every
        self.show(done, "")

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        self.done, self.total = done, total or self.total
        now = time.monotonic()
        if done > self.first and (not self._samples or now - self._samples[-1][0] >= SAMPLE_SECONDS):
            self._samples.append((now, done))
            while now - self._samples[0][0] > WINDOW:
                self._samples.popleft()
        if now >= self._next:
            self._next = now + self.every
            self.show(done, note)

    def show(self, done: float, note: str) -> None:
        raise NotImplementedError

    def rate(self) -> float:
        """Units per second; 0 while unknown. Time before the first progress, such as reading prompts, does not count
        unless much was done by then.
        """
        (at, before), now = self._samples[0] if self._samples else (self.begun, self.first), time.monotonic()
        if now - at <= SETTLED and self.done - self.first >= SURE * (self.total - self.first):
            at, before = self.begun, self.first
        return (self.done - before) / (now - at) if now - at > SETTLED else 0.0

    def progress(self) -> str:
        rate = self.rate()
        share = 100 * self.done / self.total if self.total else 100
        text = f"{share:3.0f} %  {short(self.done)} of {short(self.total)} {self.unit}"
        if rate > 0:
            text += f", {short(rate)}/s, {clock((self.total - self.done) / rate)} left"
        return text


class Lines(_Timed):
    """For logs and pipes: a line a stage, one now and then, and one at its end."""

    every = LINE_SECONDS

    def show(self, done: float, note: str) -> None:
        self._say(f"{self.stage}: {self.progress()}{f' ({note})' if note else ''}")

    def end(self) -> None:
        self._say(f"{self.stage}: {self.progress()}, {clock(time.monotonic() - self.begun)} taken")

    def note(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


class Bar(_Timed):
    """A bar, drawn by rich; notes go above it."""

    every = BAR_SECONDS

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._bar: Any = None
        self._task: Any = None

    def begin(self, stage: str, total: float, unit: str, done: float = 0.0) -> None:
        # Imported here: rich takes longer to import than most commands that show no bar.
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(24),
            progress.TextColumn("{task.fields[text]}"),
        )
        self._bar = progress.Progress(*columns, console=Console(file=self.out), auto_refresh=False)
        self._bar.start()
        self._task = self._bar.add_task(stage, total=total, completed=done, text="")
        super().begin(stage, total, unit, done)

    def show(self, done: float, note: str) -> None:
        wide = self._bar.console.width > NARROW
        text = self.progress() + (f"  {note}" if note and wide else "")
        self._bar.update(self._task, completed=done, total=self.total, text=text, refresh=True)

    def end(self) -> None:
        if self._bar is not None:
            taken = clock(time.monotonic() - self.begun)
            self._bar.update(
                self._task, completed=self.done, text=f"{self.progress()}, {taken} taken", refresh=True
            )
            self._bar.stop()
            self._bar = None

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.out, flush=True)


def default_report() -> Report:
    """A bar on a terminal, else lines."""
    out = sys.stderr
    return Bar(out) if out.isatty() and os.environ.get("TERM") != "dumb" else Lines(out)


def short(number: float) -> str:
    """20000000 -> 20.0M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if number >= size:
            return f"{number / (1e3 if letter == 'K' else size):.1f}{letter}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def clock(seconds: float) -> str:
    """3700 -> 1 h 01 min."""
    minutes, whole = divmod(round(seconds), 60)
    hours, rest = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest:02} min"
    return f"{minutes} min {whole:02} s" if minutes else f"{whole} s"
