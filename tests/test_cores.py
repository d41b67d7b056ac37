"""How many threads a model gets by default: the performance cores, as Linux and macOS tell them apart."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from outrider import settings
from outrider.settings import Settings, performance_cores, system_number

# Cores by what cpu_capacity or cpuinfo_max_freq says of them, and how many of these are performance cores.
LAPTOPS = {
    "ARM, three kinds": ("cpu_capacity", [1024, 1000, 1000, 1000, 420, 420, 420, 420], 4),
    "x86, favoured cores": ("cpufreq/cpuinfo_max_freq", [5200, 5200, 4900, 4900, 3900, 3900, 3900], 4),
    "all alike": ("cpu_capacity", [1024] * 6, 6),
    "nothing said": (None, [0] * 3, 3),
}


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_quotas", lambda *_: [])


def cores(monkeypatch: pytest.MonkeyPatch, mine: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mine, raising=False)


@pytest.mark.parametrize("laptop", LAPTOPS)
def test_linux_tells_cores_apart(laptop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, speeds, fast = LAPTOPS[laptop]
    for core, speed in enumerate(speeds):
        place = tmp_path / f"cpu{core}" / (file or "nothing")
        place.parent.mkdir(parents=True)
        place.write_text(f"{speed}\n")
    monkeypatch.setattr(settings, "CPUS", tmp_path)
    cores(monkeypatch, set(range(len(speeds))))
    assert performance_cores() == Settings().threads == fast
    assert Settings(threads=2).threads == 2
    cores(monkeypatch, {len(speeds) - 1})  # an efficiency core alone
    assert performance_cores() == 1


class Sysctl:
    """libc as macOS has it. Its numbers are of 32 bits."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers

    def sysctlbyname(self, name: bytes, to: Any, size: Any, *_: Any) -> int:
        if name.decode() not in self.numbers:
            return -1
        number = ctypes.c_int32(self.numbers[name.decode()])
        ctypes.memmove(to, ctypes.byref(number), 4)
        return 0


def test_macos_tells_cores_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libc = Sysctl({"hw.perflevel0.logicalcpu": 4})
    monkeypatch.setattr(settings.sys, "platform", "darwin")
    monkeypatch.setattr(settings, "CPUS", tmp_path)
    monkeypatch.setattr(settings.ctypes, "CDLL", lambda name: libc)
    cores(monkeypatch, set(range(10)))
    assert performance_cores() == 4
    libc.numbers.clear()  # a Mac with an Intel processor
    assert system_number("hw.perflevel0.logicalcpu") is None
    assert performance_cores() == 10


def test_a_system_without_sysctl_has_no_numbers() -> None:
    assert system_number("hw.nothing") is None
