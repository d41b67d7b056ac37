"""Every number's birth certificate: command, commit, versions, machine. Attached to each report."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider.settings import usable_cores

PACKAGES = ("outrider", "torch", "triton", "transformers", "vllm", "numpy")


def certificate(program: str = "outrider") -> dict[str, str]:
    """`program` is what the command line begins with."""
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "commit": _commit(),
        "versions": ", ".join(filter(None, map(package_version, PACKAGES))),
        "python": platform.python_version(),
        "machine": ", ".join([processor(), f"{usable_cores()} cores", *_gpu()]),
    }


def _gpu() -> list[str]:
    """Its name, where torch has been loaded and sees one."""
    torch = sys.modules.get("torch")
    return [torch.cuda.get_device_name()] if torch is not None and torch.cuda.is_available() else []


def package_version(package: str) -> str:
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


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    arm = f"{platform.machine()} part {fields.get('CPU part', '?')}"
    return fields.get("model name") or arm
