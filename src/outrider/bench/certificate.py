"""Every number's birth certificate: command, commit, versions, machine. Attached to each report."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider.settings import usable_cores


def certificate() -> dict[str, str]:
    return {
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "commit": _commit(),
        "versions": ", ".join(filter(None, map(_version, ("outrider", "torch", "transformers", "numpy")))),
        "python": platform.python_version(),
        "machine": f"{_processor()}, {usable_cores()} cores",
    }


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit this source stands at, with a mark if files differ from it; empty outside a checkout."""
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    arm = f"{platform.machine()} part {fields.get('CPU part', '?')}"
    return fields.get("model name") or arm
