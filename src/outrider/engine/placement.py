"""Settles what settings leave to the device, and shares out a GPU's memory.

Imports no torch: the server's own process reads `Memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.errors import InvalidRequest, OutOfMemory, invalid
from outrider.settings import KV_CACHE, WEIGHTS, Settings, shown_size

SEQUENCES = {"cpu": 64, "cuda": 512}
ROWS = {"cpu": 128, "cuda": 2048}
# A row costs a CPU nearly as much as a step of one sequence. A GPU reads its weights for a hundred rows as fast as for
# one, so a prefill chunk fits into a small part of a step's time.
PREFILL_SLOWDOWN = {"cpu": 4.0, "cuda": 0.4}
PREFILL_WAIT = {"cpu": 1.0, "cuda": 0.05}  # seconds: some ten steps of one sequence
# Frequent tokens that a head drafts with, if it names them. Logits over 49,000 tokens take a CPU four times as long as
# the head's layer, and few of those tokens are ever written. 0: all of them.
DRAFT_TOKENS = {"cpu": 12_288, "cuda": 0}
CPU_CACHE = 1 << 30  # bytes
GPU_SHARE = 0.92  # of a GPU's memory, unless set
MOST_LEFT = 0.4  # of the free memory: the most that is left unused where other processes hold much of a GPU


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a GPU's memory is once everything is loaded, in bytes."""

    weights: int
    draft: int  # weights, keys and values of drafters, and what captured steps keep
    cache: int
    tokens: int  # that fit the cache
    left: int

    def describe(self) -> str:
        return (
            f"{shown_size(self.weights)} weights, {shown_size(self.draft)} draft, {shown_size(self.cache)} cache for "
            f"{self.tokens} tokens, {shown_size(self.left)} left for graphs and logits"
        )


def cache_size(free: int, draft: int, draft_share: float, working: int = 0) -> int:
    """Bytes for the model's keys and values out of `free`, measured with the model's weights loaded.

    A draft is loaded later and gets its part first: `draft` bytes of weights, and `draft_share` bytes of its own cache
    for every byte of the model's. Steps need `working` bytes, as measured.
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
    return int((left - working) / (1 + draft_share))


def place(
    settings: Settings,
    free: int | None,
    draft: int = 0,
    draft_share: float = 0.0,
    total: int | None = None,
    working: int = 0,
) -> Settings:
    """The settings with everything settled that was left to the device.

    `free` and `total` are bytes of the GPU's memory; `free` is None without a GPU. `cache_size` explains the others.
    """
    if free is None and settings.device == "cuda":
        raise InvalidRequest("no CUDA device is to be seen; use --device cpu", "device")
    device = ("cpu" if free is None else "cuda") if settings.device == "auto" else settings.device
    if device == "cuda" and settings.kernels != "auto":
        raise invalid("kernels", f"{settings.kernels!r} are for the CPU; leave them out")
    if device == "cpu":
        replace(settings, device=device)  # refuses what is for a GPU alone
    elif free is not None and total is not None:
        free = within_share(settings, free, total)
    sequences = settings.max_sequences or SEQUENCES[device]
    weights = WEIGHTS[device][0] if settings.weights == "auto" else settings.weights
    draft_weights = "stored" if device == "cpu" else weights
    cache = CPU_CACHE if device == "cpu" or free is None else cache_size(free, draft, draft_share, working)
    return replace(
        settings,
        device=device,
        kv_cache_dtype=KV_CACHE[device][0] if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
        weights=weights,
        draft_weights=draft_weights if settings.draft_weights == "auto" else settings.draft_weights,
        max_sequences=sequences,
        step_rows=settings.step_rows or max(ROWS[device], sequences),
        prefill_slowdown=settings.prefill_slowdown or PREFILL_SLOWDOWN[device],
        cache_bytes=settings.cache_bytes or cache,
        gpu_memory_utilization=None,  # cache_bytes follows from it
    )


def share_of_all(settings: Settings, free: int, total: int) -> Settings:
    """The settings with a share of the whole GPU, other processes' memory included. The user's share is for this engine
    alone. Call before anything is loaded.
    """
    share, others = settings.gpu_memory_utilization, total - free
    if settings.cache_bytes:
        return settings
    if share is None:
        left = min((1 - GPU_SHARE) * total, MOST_LEFT * free)
        return replace(settings, gpu_memory_utilization=1 - left / total)
    if share * total > free:
        raise invalid(
            "gpu_memory_utilization",
            f"{share:g} asks for {shown_size(share * total)} of {shown_size(total)}, and "
            f"{shown_size(free)} is free, as others have {shown_size(others)}: ask for at most "
            f"{int(100 * free / total) / 100:g}, or end what else runs there",
        )
    return replace(settings, gpu_memory_utilization=min(1.0, share + others / total))


def within_share(settings: Settings, free: int, total: int) -> int:
    """Of `free` bytes, those that this engine may still take. Call after `share_of_all`."""
    if settings.gpu_memory_utilization is None:
        return free
    may = int(settings.gpu_memory_utilization * total)
    if may <= total - free:
        raise invalid(
            "gpu_memory_utilization",
            f"{settings.gpu_memory_utilization:g} allows {shown_size(may)} of "
            f"{shown_size(total)}, and {shown_size(total - free)} is taken already: there is none for the cache",
        )
    return free - (total - may)
