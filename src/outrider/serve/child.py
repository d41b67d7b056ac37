"""What a process that the server starts does first."""

from __future__ import annotations

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1


def become_child() -> None:
    """Leave SIGINT and SIGTERM to the API process, which hangs up when it is time, and do not outlive it (on Linux):
    a closed socket tells us too, but not while something is being loaded.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
