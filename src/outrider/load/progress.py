"""Shows a download on stderr: a bar on a terminal, one plain line elsewhere. No downloading here."""

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
    with progress.Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=min(done, total))
