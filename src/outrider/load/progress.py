"""Shows a download or the loading of a model on stderr: a bar on a terminal, elsewhere at most a line."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

WIDTH, REFRESH = 30, 0.1  # of a bar: characters, and seconds between two pictures of it
CLEAR = "\x1b[K"  # the line from here on

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
    """A bar on a terminal, with bytes and seconds. It is called with the bytes so far and with all."""
    # Written here: importing a library for it would delay every start.
    begin, latest = time.monotonic(), -REFRESH

    def show(done: int, total: int) -> None:
        nonlocal latest
        seconds, done = time.monotonic() - begin, min(done, total)
        if seconds - latest < REFRESH and done < total:
            return
        latest = seconds
        rate = file_size(done / max(seconds, 1e-3))
        line = f"{what}: {file_size(done)} of {file_size(total)}, {seconds:.1f} s, {rate}/s"
        room = shutil.get_terminal_size().columns - 1
        width = max(0, min(WIDTH, room - len(line) - 3))
        line += f" [{'#' * (width * done // max(total, 1)):{width}}]" if width else ""
        print(f"\r{line[:room]}{CLEAR}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if latest >= 0:
            print(f"\r{CLEAR}" if transient else "\n", end="", file=sys.stderr, flush=True)
