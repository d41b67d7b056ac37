"""How a download is shown: a bar where a person looks, else one plain line. No downloading here."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self, TextIO


def file_size(count: float) -> str:
    """How large a file is, as package indexes and file managers show it."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


class Progress(Protocol):
    """One download at a time: `start` it, say how many bytes there are so far, `stop`."""

    def start(self, what: str, total: int) -> None: ...

    def update(self, done: int) -> None: ...

    def stop(self) -> None: ...


class Silent:
    def start(self, what: str, total: int) -> None:
        pass

    def update(self, done: int) -> None:
        pass

    def stop(self) -> None:
        pass


class PlainLine:
    """A single line at the start, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def start(self, what: str, total: int) -> None:
        print(f"fetching {what} ({file_size(total)})", file=self._out, flush=True)

    def update(self, done: int) -> None:
        pass

    def stop(self) -> None:
        pass


class Bar:
    """A bar with rate and time left, drawn by rich."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._bar: Any = None
        self._task: Any = None

    def start(self, what: str, total: int) -> None:
        # Imported here: rich takes longer to import than most commands that never download anything.
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        self._bar = progress.Progress(*columns, console=Console(file=self._out))
        self._bar.start()
        self._task = self._bar.add_task(what, total=total)

    def update(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def default_progress() -> Progress:
    return Bar(sys.stderr) if sys.stderr.isatty() else PlainLine(sys.stderr)


class Shown:
    """`with Shown(progress, what, total):` stops the display whatever happens inside."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress = progress
        self._what = what
        self._total = total

    def __enter__(self) -> Self:
        self._progress.start(self._what, self._total)
        return self

    def update(self, done: int) -> None:
        self._progress.update(min(done, self._total))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
