"""Builds the C files here with the machine's own compiler, once, into the cache folder; says so by name when it cannot.

The library is keyed by source, flags, compiler and processor, so a cache shared between machines is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from outrider.errors import KernelUnavailable

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
# No -ffast-math: it would let the compiler reorder the sums whose fixed order is the point.
FLAGS = [
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-schedule-insns",  # scheduling before register allocation spills the accumulators (log/073)
    "-fopenmp-simd",  # for what may be added in any order; threads are team.c's own
    "-pthread",
    "-fPIC",
    "-shared",
    "-std=gnu11",
]
WAY_OUT = "install a C compiler (gcc or clang), or set CC"


def compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise KernelUnavailable(f"no C compiler found; {WAY_OUT}")


def built(folder: Path) -> bool:
    """Whether the library for this machine exists."""
    return (folder / f"cpu-{_key()}.so").exists()


@cache
def library(folder: Path) -> ctypes.CDLL:
    """The kernels, compiled on first use (some ten seconds) and then loaded from `folder`."""
    path = folder / f"cpu-{_key()}.so"
    if path.exists():
        with contextlib.suppress(OSError):  # damaged: built again below
            return ctypes.CDLL(str(path))
    _compile(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(f"the built kernels cannot be loaded: {error}") from None


def _key() -> str:
    parts = [
        *(f"{file.name}\0{file.read_text()}" for file in (*SOURCES, *HEADERS)),
        " ".join(FLAGS),
        os.path.realpath(compiler()),
        platform.machine(),
        _processor(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The vector extensions -march=native would see."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    except OSError as error:
        raise KernelUnavailable(f"no place for the built kernels: {error}") from None
    os.close(handle)
    command = [compiler(), *FLAGS, *map(str, SOURCES), "-o", unfinished, "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise KernelUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-800:]}; {WAY_OUT}")
        with open(unfinished, "rb+") as file:
            os.fsync(
                file.fileno()
            )  # a library truncated by a power loss would crash the process that loads it
        os.replace(unfinished, path)  # atomic: two processes may build at once
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"building the kernels failed: {error}; {WAY_OUT}") from None
    finally:
        Path(unfinished).unlink(missing_ok=True)
