"""Every knob of the engine, complete when built, never changed after. Reads no files and no models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest, suggest


def usable_cores() -> int:
    """Cores this process may run on, not cores the machine has; a container's quota counts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2, or "max": unlimited
    return cores


def cache_folder() -> Path:
    """Where downloads and built kernels live. OUTRIDER_CACHE wins, then XDG, then ~/.cache."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine settings. Defaults serve one machine well; sizes are in tokens unless the name says bytes."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0  # 0 = the cores this process may use
    context: int = 0  # 0 = what the model was trained for
    cache_bytes: int = 1 << 30  # memory for keys and values
    max_sequences: int = 64  # sequences that share a step
    step_rows: int = 128  # rows a step may carry; a longer prompt is read in chunks
    prefix_reuse: bool = True
    check_integrity: bool = False  # after every step; tests turn it on
    kernels: str = "auto"  # auto | c | torch

    def __post_init__(self) -> None:
        if self.device != "cpu":
            raise InvalidRequest(f"device {self.device!r} is not available here; use 'cpu'", "device")
        if self.dtype != "float32":
            raise InvalidRequest(f"dtype {self.dtype!r} is not available on cpu; use 'float32'", "dtype")
        if self.kernels not in ("auto", "c", "torch"):
            raise InvalidRequest(f"kernels must be auto, c or torch, got {self.kernels!r}", "kernels")
        for name, low in (("threads", 0), ("context", 0), ("cache_bytes", 1), ("max_sequences", 1)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"{name} must be at least {low}, got {getattr(self, name)}", name)
        if self.step_rows < self.max_sequences:
            raise InvalidRequest(
                f"step_rows ({self.step_rows}) must be at least max_sequences ({self.max_sequences}), "
                "so that every running sequence can move in every step",
                "step_rows",
            )
        if self.threads == 0:
            object.__setattr__(self, "threads", usable_cores())

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Build from a mapping of names, refusing unknown ones with a suggestion."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidRequest(f"unknown setting {name!r}{suggest(name, known)}", name)
        return cls(**options)
