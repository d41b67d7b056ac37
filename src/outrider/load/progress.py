"""Shows a download or the loading of a model on stderr: a bar on a terminal, elsewhere at most a line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Update = Callable[[int], None]  # takes the bytes so far


def file_size(count: float) -> str:
    """A file's size, as package indexes and file managers show it."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@contextlib.contextmanager
def download_shown(what: str, total: int) -> Iterator[Update]:
    if not sys.stderr.isatty():
        print(f"fetching {what} ({file_size(total)})", file=sys.stderr, flush=True)
        yield lambda done: None
        return
    with bar(what) as shown:
        yield lambda done: shown(done, total)


@contextlib.contextmanager
def bar(what: str, transient: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal. It is called with the bytes so far and with all; until then it only moves."""
    # Imported here: rich takes longer to import than most commands that never download anything.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(file=sys.stderr), transient=transient) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=min(done, total), total=total)
