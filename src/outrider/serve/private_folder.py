"""A folder that only the server's own user can read, and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import OutriderError

LOCK = ".lock"


def make_private(folder: Path, what: str) -> None:
    """Makes the folder, or checks the one that is there. `what`: what is kept in it, for the error."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
        if mode & 0o077:
            raise OutriderError(
                f"{folder} is open to other users of this machine (mode {mode:o}): chmod 700 {folder}"
            )
        os.close(_open_lock(folder))
    except OSError as problem:
        raise OutriderError(f"{what} cannot be kept in {folder}: {problem.strerror}") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time. Fails if the folder was deleted, which is to stay so."""
    descriptor = _open_lock(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold(folder: Path) -> int:
    """Locks the folder for this process until the returned descriptor is closed; or says that another one has it."""
    descriptor = _open_lock(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OutriderError(f"{folder} is in use by another process; give each its own folder") from None
    return descriptor


def _open_lock(folder: Path) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
