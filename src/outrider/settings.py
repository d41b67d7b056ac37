"""Every knob of the engine, complete when built, never changed after; and how a GPU's memory is shared out.

Reads no files and no models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest, OutOfMemory, suggest, suggesting


def usable_cores() -> int:
    """Cores this process may run on, not cores the machine has; a container's quota counts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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


OBJECTIVES = ("throughput", "latency")
# Least and most of the settings that bound the planner.
GUARD_BOUNDS: dict[str, tuple[float, float]] = {
    "draft_max_batch": (0, inf),
    "tree_max_batch": (0, inf),
    "draft_max_depth": (1, 63),
    "draft_max_temperature": (0, inf),
    "draft_flat_temperature": (0, inf),
    "draft_break_even": (1, inf),
    "draft_patience": (1, inf),
    "draft_max_stretch": (1, inf),
    "draft_probe_share": (0, 1),
    "draft_baseline_interval": (1, inf),
}
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
FAST = {"cpu": "float32", "cuda": "bfloat16"}
WEIGHTS = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "fp8", "int8", "int4")}
SEQUENCES = {"cpu": 64, "cuda": 512}
ROWS = {"cpu": 128, "cuda": 2048}
# A row costs a CPU nearly as much as a step of one; a GPU reads its weights for a hundred of them as fast as for one,
# so that a small part of a step's time is room for a bite of prompt rows.
PREFILL_STRETCH = {"cpu": 4.0, "cuda": 0.4}
PREFILL_WAIT = {"cpu": 1.0, "cuda": 0.05}  # some ten steps of one sequence
# A head's logits over 49,000 words take a CPU four times as long as its layer, and hardly any of them is written.
DRAFT_WORDS = {"cpu": 12_288, "cuda": 0}
# A weight, with its part of a scale.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.52}
GPU_SHARE = 0.92  # of a GPU's memory, for everything, unless said otherwise
MOST_LEFT = 0.4  # of what is free: no more is left alone, however much of a GPU others have taken


# What a setting's value may be, by its type, and in words.
KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
}


def shown_size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a GPU's memory is once everything is loaded, in bytes."""

    weights: int
    draft: int  # its weights, its keys and values, and what captured steps keep
    cache: int
    tokens: int  # that the cache has room for
    left: int

    def describe(self) -> str:
        return (
            f"{shown_size(self.weights)} weights, {shown_size(self.draft)} draft, {shown_size(self.cache)} cache for "
            f"{self.tokens} tokens, {shown_size(self.left)} left for graphs and logits"
        )


def cache_room(free: int, draft: int, beside: float, working: int = 0) -> int:
    """Bytes for the model's keys and values, of `free` beside its weights.

    A draft is loaded later and gets its part first: `draft` bytes of weights, and for every byte of the model's
    cache `beside` bytes of its own. So do steps: the `working` bytes that were measured.
    """
    left = free - draft
    if left <= 0 < draft:
        raise InvalidRequest(
            f"the draft's weights take {shown_size(draft)}, and {shown_size(free)} is free beside the model's; "
            "take a smaller draft, or fewer bits with --weights and --draft-weights",
            "draft",
        )
    if left <= working:
        raise OutOfMemory(
            f"steps take {shown_size(working)}, and {shown_size(max(0, left))} is left for them beside all weights: "
            "there is none for the cache; take a smaller model, fewer bits with --weights, fewer --max-sequences, a "
            "shorter --context or a larger --gpu-memory-utilization"
        )
    return int((left - working) / (1 + beside))


@suggesting
@dataclass(frozen=True, slots=True)
class Settings:
    """Engine settings. Defaults serve one machine well; sizes are in tokens unless the name says bytes."""

    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16; auto: what the device is fast with
    weights: str = "auto"  # auto | float32 | bfloat16 | fp8 | int8 | int4; auto: as dtype
    draft_weights: str = "auto"  # the same for a model that drafts; auto: as weights, on a CPU bfloat16
    draft_vocabulary: int = 0  # frequent words that a head drafts with, if it names them; 0 = by device
    threads: int = 0  # 0 = the cores this process may use
    context: int = 0  # 0 = what the model was trained for
    cache_bytes: int = 0  # memory for the KV cache; 0 = by device
    # Share of a GPU's memory, for this engine; None = nearly all that is free.
    gpu_memory_utilization: float | None = None
    max_sequences: int = 0  # sequences that share a step; 0 = by device
    step_rows: int = 0  # rows of a step; a longer prompt is prefilled in chunks; 0 = by device
    # What prompt chunks may add to a step beside decoding sequences, in times of what it takes without them; None = by
    # device, inf = no bound.
    prefill_stretch: float | None = None
    # Bounds on what the planner may decide; their reasons are in control/guards.py.
    draft_max_batch: int | None = None  # sequences of a step that may draft; None: what is measured decides
    tree_max_batch: int = 4  # the same for drafts that branch
    draft_max_depth: int = 15
    draft_max_temperature: float = 1.5
    draft_flat_temperature: float = 1.3  # the same where sampling leaves out next to nothing
    draft_break_even: float = 1.05  # speed-up to expect before drafting begins
    draft_patience: int = 24  # drafts of a request after which one that does not gain is probed less often
    # Times plain decoding's time per token, for a request that others' drafts hold up.
    draft_max_stretch: float = 1.15
    draft_probe_share: float = 0.002  # of the time, for probes where nothing is drafted; 0: none
    draft_baseline_interval: int = 100  # drafting steps after which a plain one is measured
    objective: str = "throughput"  # throughput | latency
    # Seconds from which on a waiting prompt raises that bound; None = by device.
    prefill_wait: float | None = None
    # Long steps that may read a burst of prompts on a GPU, whatever that bound; 0: none.
    prefill_at_once: int = 2
    release_draft: bool = False  # give up a draft that never paid, and its memory
    prefix_reuse: bool = True
    special_tokens_in_text: bool = False  # messages may hold control tokens by their strings, as templates do
    # auto | own; on a GPU. auto: cuBLASLt for passes of many rows, where its bits are ours.
    prompt_matmul: str = "auto"
    check_integrity: bool = False  # after every step; tests turn it on
    kernels: str = "auto"  # auto | c | torch

    def __post_init__(self) -> None:
        self._check_kinds()
        for name, known in (("device", DEVICES), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise InvalidRequest(f"{name} must be {', '.join(known)}, got {getattr(self, name)!r}", name)
        if self.dtype != "auto" and self.device != "auto" and self.dtype != FAST[self.device]:
            raise InvalidRequest(
                f"{self.device} computes in {FAST[self.device]}, not in {self.dtype}", "dtype"
            )
        self._check_weights("weights")
        self._check_weights("draft_weights")
        if self.kernels not in ("auto", "c", "torch"):
            raise InvalidRequest(f"kernels must be auto, c or torch, got {self.kernels!r}", "kernels")
        self._check_prompt_matmul()
        for name in (
            "threads", "context", "cache_bytes", "max_sequences", "draft_vocabulary", "prefill_at_once",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must be at least 0, got {getattr(self, name)}", name)
        self._check_share()
        self._check_guards()
        for name in ("prefill_stretch", "prefill_wait"):
            if (bound := getattr(self, name)) is not None and not bound > 0:
                raise InvalidRequest(f"{name} must be above 0, got {bound}", name)
        if self.step_rows < 0 or (self.step_rows and self.step_rows < self.max_sequences):
            raise InvalidRequest(
                f"step_rows ({self.step_rows}) must be at least max_sequences ({self.max_sequences}), "
                "so that every running sequence can move in every step",
                "step_rows",
            )
        if self.threads == 0:
            object.__setattr__(self, "threads", usable_cores())

    def _check_kinds(self) -> None:
        """That numbers are numbers, and so on: whatever is compared below can be."""
        for one in fields(self):
            value, (kind, *optional) = getattr(self, one.name), str(one.type).split(" | ")
            wanted, words = KINDS[kind]
            fits = isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))
            if not fits and not (value is None and optional):
                raise InvalidRequest(f"{one.name} must be {words}, got {value!r}", one.name)

    def _check_prompt_matmul(self) -> None:
        name, asked = "prompt_matmul", self.prompt_matmul
        if asked not in ("auto", "own"):
            raise InvalidRequest(f"{name} must be auto or own, got {asked!r}", name)
        if self.device == "cpu" and asked != "auto":
            raise InvalidRequest(f"{name} is for a GPU; on the CPU leave it out", name)

    def _check_share(self) -> None:
        share, name = self.gpu_memory_utilization, "gpu_memory_utilization"
        if share is None:
            return
        if not 0 < share <= 1:
            raise InvalidRequest(
                f"{name} is a share of the GPU's memory: above 0, at most 1; not {share}", name
            )
        if self.cache_bytes:
            raise InvalidRequest(f"{name} and cache_bytes both size the cache; leave out one of them", name)
        if self.device == "cpu":
            raise InvalidRequest(f"{name} is for a GPU; on the CPU --cache-bytes bounds the cache", name)

    def _check_guards(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidRequest(
                f"unknown objective {self.objective!r}{suggest(str(self.objective), OBJECTIVES)}", "objective"
            )
        for name, (low, high) in GUARD_BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN is in none
                most = "" if high == inf else f" and at most {high:g}"
                raise InvalidRequest(f"{name} must be at least {low:g}{most}, got {value}", name)

    def _check_weights(self, name: str) -> None:
        kind, known = getattr(self, name), ("auto", *WEIGHTS["cpu"], *WEIGHTS["cuda"])
        if kind not in known:
            raise InvalidRequest(f"unknown {name} {kind!r}{suggest(str(kind), known)}", name)
        if "auto" not in (kind, self.device) and kind not in WEIGHTS[self.device]:
            kinds = ", ".join(WEIGHTS[self.device])
            raise InvalidRequest(f"{self.device} stores {name} as {kinds}, not as {kind}", name)

    def placed(
        self,
        free: int | None,
        draft: int = 0,
        beside: float = 0.0,
        total: int | None = None,
        working: int = 0,
    ) -> Settings:
        """With everything settled that was left to the device.

        `free` is a GPU's free memory, None without one, of `total`; what a draft and steps will need of it is as
        `cache_room` has it.
        """
        if free is None and self.device == "cuda":
            raise InvalidRequest("no CUDA device is to be seen; use --device cpu", "device")
        device = ("cpu" if free is None else "cuda") if self.device == "auto" else self.device
        if self.dtype not in ("auto", FAST[device]):
            raise InvalidRequest(f"{device} computes in {FAST[device]}, not in {self.dtype}", "dtype")
        if device == "cuda" and self.kernels != "auto":
            raise InvalidRequest(f"kernels {self.kernels!r} are for the CPU; leave them out", "kernels")
        if device == "cpu":
            replace(self, device=device)  # refuses what is for a GPU alone
        elif free is not None and total is not None:
            free = self.within_share(free, total)
        sequences = self.max_sequences or SEQUENCES[device]
        weights = FAST[device] if self.weights == "auto" else self.weights
        draft_weights = "bfloat16" if device == "cpu" else weights
        room = 1 << 30 if device == "cpu" or free is None else cache_room(free, draft, beside, working)
        return replace(
            self,
            device=device,
            dtype=FAST[device],
            weights=weights,
            draft_weights=draft_weights if self.draft_weights == "auto" else self.draft_weights,
            draft_vocabulary=self.draft_vocabulary or DRAFT_WORDS[device],
            max_sequences=sequences,
            step_rows=self.step_rows or max(ROWS[device], sequences),
            prefill_stretch=self.prefill_stretch or PREFILL_STRETCH[device],
            prefill_wait=self.prefill_wait or PREFILL_WAIT[device],
            cache_bytes=self.cache_bytes or room,
            gpu_memory_utilization=None,  # it is in cache_bytes now
        )

    def bounded(self, free: int, total: int) -> Settings:
        """With the share of the whole GPU that all on it may have together: what is asked for is for this engine alone.
        Before anything is loaded.
        """
        share, others = self.gpu_memory_utilization, total - free
        if self.cache_bytes:
            return self
        if share is None:
            left = min((1 - GPU_SHARE) * total, MOST_LEFT * free)
            return replace(self, gpu_memory_utilization=1 - left / total)
        if share * total > free:
            raise InvalidRequest(
                f"gpu_memory_utilization {share:g} asks for {shown_size(share * total)} of {shown_size(total)}, and "
                f"{shown_size(free)} is free, as others have {shown_size(others)}: ask for at most "
                f"{int(100 * free / total) / 100:g}, or end what else runs there",
                "gpu_memory_utilization",
            )
        return replace(self, gpu_memory_utilization=min(1.0, share + others / total))

    def within_share(self, free: int, total: int) -> int:
        """What may still be taken of `free` bytes, once `bounded`."""
        if self.gpu_memory_utilization is None:
            return free
        may = int(self.gpu_memory_utilization * total)
        if may <= total - free:
            raise InvalidRequest(
                f"gpu_memory_utilization {self.gpu_memory_utilization:g} allows {shown_size(may)} of "
                f"{shown_size(total)}, and {shown_size(total - free)} is taken already: there is none for the cache",
                "gpu_memory_utilization",
            )
        return free - (total - may)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Build from a mapping of names, refusing unknown ones with a suggestion."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidRequest(f"unknown setting {name!r}{suggest(name, known)}", name)
        return cls(**options)
