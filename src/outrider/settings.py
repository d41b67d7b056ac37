"""The engine's settings, complete when built and never changed after; and what this machine offers a process.

What settings leave to the device is settled in engine/placement.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest, invalid, suggesting
from outrider.fields import check_fields, known_options, setting


def usable_cores() -> int:
    """Cores this process may run on, not cores the machine has; a container's quota counts."""
    return _within_quota(len(_own_cores()))


def performance_cores() -> int:
    """Those of the usable cores that are as fast as the fastest, or nearly. Slower ones would delay every step."""
    fast = system_number("hw.perflevel0.logicalcpu") if sys.platform == "darwin" else None
    if fast is None:
        speeds = [_speed(CPUS / f"cpu{core}") for core in _own_cores()]
        fast = sum(speed >= NEARLY * max(speeds) for speed in speeds)
    return max(1, _within_quota(min(fast, len(_own_cores()))))


CPUS = Path("/sys/devices/system/cpu")
NEARLY = 0.8  # of the fastest core's speed: cores of one kind differ by a tenth, kinds by a quarter and more


def _own_cores() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _speed(core: Path) -> int:
    """What Linux says of a core, 0 if nothing; only comparable between cores of one machine."""
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        with contextlib.suppress(OSError, ValueError):
            return int((core / file).read_text())
    return 0


def system_number(name: str) -> int | None:
    """A number that macOS' sysctl has by this name."""
    found, size = ctypes.c_int64(), ctypes.c_size_t(8)
    try:
        failed = ctypes.CDLL(None).sysctlbyname(
            name.encode(), ctypes.byref(found), ctypes.byref(size), None, 0
        )
    except (OSError, TypeError, AttributeError):
        return None  # another system
    return None if failed else found.value


def _within_quota(cores: int) -> int:
    for limit in _quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        try:
            quota, period = limit.read_text().split()
            cores = min(cores, max(1, int(quota) // int(period)))
        except (OSError, ValueError):
            continue  # no cgroup v2, or "max": unlimited
    return cores


def _quotas(root: Path, membership: Path) -> list[Path]:
    """The files that limit this process's group and those above it; a service's group lies below the root."""
    try:
        own = membership.read_text().strip().rpartition("::/")[2]
    except OSError:
        own = ""
    group = root / own
    return [folder / "cpu.max" for folder in (group, *group.parents) if folder.is_relative_to(root)]


def others_seconds(own: float, root: Path = Path("/")) -> float | None:
    """Core seconds that all programs but one's own have used since the machine's start; only differences count.

    None where that is not known: outside of Linux, or if most of the machine's cores are not ours.
    """
    try:
        spent = (root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    if (os.cpu_count() or 1) > usable_cores():
        return None
    user, nice, system, _, _, *interrupts = map(int, spent)
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - own


def family_seconds(process: int, root: Path = Path("/")) -> float:
    """Core seconds that a process and those it started have used. Linux only, else 0."""
    folder = root / "proc" / str(process)
    try:
        spent = (folder / "stat").read_text().rpartition(")")[2].split()[11:15]
        children = [int(one) for file in folder.glob("task/*/children") for one in file.read_text().split()]
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK") + sum(
        family_seconds(one, root) for one in children
    )


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process may still take: of the machine, and of its container where that has a limit."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = int(found[1]) * 1024 if found else None
    group = root / "sys/fs/cgroup"
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        left = int(limit) - int(used)  # "max" is no number: no limit
    except (OSError, ValueError):
        return free
    return left if free is None else min(free, max(0, left))


def cache_folder() -> Path:
    """Where downloads and built kernels live. OUTRIDER_CACHE wins, then XDG, then ~/.cache."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"


DEVICES = ("auto", "cpu", "cuda")
KV_CACHE = {
    "cpu": ("float32", "bfloat16", "int8"),
    "cuda": ("bfloat16", "int8"),
}  # the first: what it computes in
WEIGHTS = {
    "cpu": ("stored", "float32", "bfloat16", "int8", "int4"),
    "cuda": ("bfloat16", "fp8", "int8", "int4"),
}
FORMATS = ("auto", *dict.fromkeys((*WEIGHTS["cpu"], *WEIGHTS["cuda"])))
# Bytes of a weight and its part of a scale.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.52}


def shown_size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


@suggesting
@dataclass(frozen=True, slots=True)
class Settings:
    """Engine settings. Sizes are in tokens unless the name says bytes. 0 or None: engine/placement.py settles it.

    `help` is what the command line says of a setting.
    """

    device: str = setting("auto", known=DEVICES, help="Where to run.")
    kv_cache_dtype: str = setting(
        "auto",
        known=("auto", *KV_CACHE["cpu"]),
        metavar="FORMAT",
        help="Number format of the KV cache: auto, bfloat16, int8; CPU: float32 (auto).",
    )
    weights: str = setting(
        "auto",
        known=FORMATS,
        metavar="FORMAT",
        help="Number format of weights: auto, bfloat16, int8, int4; CPU: stored (auto), float32; GPU: fp8.",
    )
    draft_weights: str = setting(
        "auto",
        known=FORMATS,
        metavar="FORMAT",
        help="The same for a draft model; auto: as --weights, on a CPU stored.",
    )
    threads: int = setting(0, 0, help="Threads; 0 means all performance cores.")
    tensor_parallel: int = setting(
        1, 1, help="Processes that share the model, with a GPU each; same bits for any number."
    )
    context: int = setting(0, 0, help="Longest prompt and answer together; 0 means the model's own.")
    cache_bytes: int = setting(0, 0, help="Memory for the KV cache.")
    gpu_memory_utilization: float | None = setting(
        None,
        above=0,
        high=1,
        help="Share of a GPU's memory for weights, graphs and KV cache together; 0.92 by default.",
    )
    max_sequences: int = setting(0, 0, help="Sequences that share a step; 0 means by device.")
    step_rows: int = setting(
        0, 0, help="Rows of a step; longer prompts are prefilled in chunks; 0 means by device."
    )
    prefill_slowdown: float | None = setting(
        None,
        above=0,
        help="Time that prompt chunks may add to a step, relative to the step without them; inf: no bound.",
    )
    # Bounds on what the planner may decide. control/guards.py has the reasons.
    draft_max_batch: int | None = setting(
        None, 0, help="Draft only in steps of up to N sequences; auto: measured costs decide."
    )
    draft_max_depth: int = setting(15, 1, 63, help="Deepest draft; the planner measures which depth pays.")
    draft_max_temperature: float = setting(1.5, 0, help="Draft nothing above this temperature.")
    objective: str = setting(
        "throughput",
        known=("throughput", "latency"),
        help="Most tokens per second of all requests, or least time per token of each.",
    )
    release_draft: bool = setting(
        False,
        flag="--release-draft/--keep-draft",
        help="Release a draft that has not paid for some thousand steps, and its memory.",
    )
    prefix_reuse: bool = setting(True, help="Reuse cached prompt prefixes.")
    special_tokens_in_text: bool = setting(
        False, help="Let messages hold control tokens by their strings; by default they stay text."
    )
    kernels: str = setting("auto", known=("auto", "c", "torch"), help="Kernels of the forward pass on a CPU.")

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_format("weights", WEIGHTS)
        self._check_format("draft_weights", WEIGHTS)
        self._check_format("kv_cache_dtype", KV_CACHE)
        self._check_share()
        if self.step_rows and self.step_rows < self.max_sequences:
            raise invalid(
                "step_rows",
                f"({self.step_rows}) must be at least max_sequences ({self.max_sequences}), "
                "so that every running sequence can move in every step",
            )
        if self.threads == 0:
            object.__setattr__(self, "threads", performance_cores())

    def _check_share(self) -> None:
        name = "gpu_memory_utilization"
        if self.gpu_memory_utilization is None:
            return
        if self.cache_bytes:
            raise invalid(name, "and cache_bytes both size the cache; leave out one of them")
        if self.device == "cpu":
            raise invalid(name, "is for a GPU; on the CPU --cache-bytes bounds the cache")

    def _check_format(self, name: str, by_device: Mapping[str, tuple[str, ...]]) -> None:
        kind = getattr(self, name)
        if "auto" not in (kind, self.device) and kind not in by_device[self.device]:
            kinds = ", ".join(by_device[self.device])
            raise InvalidRequest(f"{self.device} stores {name} as {kinds}, not as {kind}", name)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Builds from a mapping of names. Refuses unknown names with a suggestion."""
        return cls(**known_options(cls, options, "setting"))
