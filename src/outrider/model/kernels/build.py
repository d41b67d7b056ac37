"""The C kernels as a library: one that the package carries for this machine, else one built here with the machine's own
compiler, once, into the cache folder; says by name when neither can be had.

A built library is keyed by source, flags, compiler and processor, so a cache shared between machines is safe. A carried
library is keyed by source and flags, so that none of other sources is taken. deploy/wheels.py makes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from outrider.errors import KernelUnavailable
from outrider.settings import system_number

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.c"))
HEADERS = sorted(HERE.glob("*.h"))
CARRIED = HERE / "carried"
# No -ffast-math: it would let the compiler reorder the sums whose fixed order is the point.
FLAGS = [
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp-simd",  # for what may be added in any order; threads are team.c's own
    "-pthread",
    "-fPIC",
    "-shared",
    "-std=gnu11",
]
# For the machine that compiles. Scheduling before register allocation spills the accumulators (log/073).
OWN_FLAGS = ["-march=native", "-fno-schedule-insns"]
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
    """The kernels: those that the package carries, or compiled on first use (some ten seconds) and then loaded from
    `folder`.
    """
    if (path := carried()) is not None:
        with contextlib.suppress(OSError):  # damaged, or for another system of that name: built below
            return ctypes.CDLL(str(path))
    path = folder / f"cpu-{_key()}.so"
    if path.exists():
        with contextlib.suppress(OSError):  # damaged: built again below
            return ctypes.CDLL(str(path))
    _compile(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(f"the built kernels cannot be loaded: {error}") from None


def carried() -> Path | None:
    """The library in this package that runs on this machine, if there is one."""
    path = CARRIED / carried_name(sys.platform, platform.machine().lower())
    return path if path.exists() and _runs_carried() else None


def carried_name(system: str, machine: str) -> str:
    """The file of a library for a system, as sys.platform names it, and a machine."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)
    return f"cpu-{system}-{machine}-{_sources_key()}.{'dll' if system == 'win32' else 'so'}"


def _runs_carried() -> bool:
    """Carried libraries for x86 are compiled for AVX2 and FMA; the dot products are chosen when they are loaded."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    if sys.platform == "win32":
        return bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(40))  # AVX2
    if sys.platform == "darwin":
        return system_number("hw.optional.avx2_0") == 1
    return {"avx2", "fma"} <= set(_processor().split())


def _key() -> str:
    own = (_sources_key(), *OWN_FLAGS, os.path.realpath(compiler()), platform.machine(), _processor())
    return hashlib.sha256("\0".join(own).encode()).hexdigest()[:16]


def _sources_key() -> str:
    parts = [*(f"{file.name}\0{file.read_text()}" for file in (*SOURCES, *HEADERS)), *FLAGS]
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
    command = [compiler(), *FLAGS, *OWN_FLAGS, *map(str, SOURCES), "-o", unfinished, "-lm"]
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
