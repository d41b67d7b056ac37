"""What processes that Outrider starts have in common: the signals they leave to their parent, and their limits."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
# Signals by which a process ends of what it does itself. Others may have sent any other.
ITS_OWN_DOING = frozenset(
    -number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGXCPU, signal.SIGILL)
)


def become_child() -> None:
    """Leave SIGINT and SIGTERM to the API process, which hangs up when it is time, and do not outlive it (on Linux):
    a closed socket tells us too, but not while something is being loaded.
    """
    ignore_signals()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def limit_memory(more: int) -> None:
    """Limits memory beyond what is taken now."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a limit below it already
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def limit_time(seconds: int) -> None:
    """Limits processor time beyond what was taken so far."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard))
