"""Recording launches into CUDA graphs."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

# Tokens of the longest sequence; few, as capturing takes time.
CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)

CLOSE, LONG = 2.5, 16_384
THREAD = "outrider-compile"  # the name of those that compile ahead


class Recorded:
    """Counts of captured graphs and compiled kernels in this process, and the seconds that captures took."""

    seconds = 0.0
    graphs = 0
    kernels = 0  # compiled, or read from where compiled ones are kept; not those ahead of who launches them


def count_kernels() -> None:
    """Starts to count kernels that are prepared for their first launch."""
    from triton import knobs  # type: ignore[import-untyped, unused-ignore]  # not where there is no GPU

    before = knobs.runtime.jit_post_compile_hook

    def count(**given: Any) -> Any:
        Recorded.kernels += threading.current_thread().name != THREAD
        return before(**given) if before is not None else None

    if getattr(before, "__name__", "") != count.__name__:
        knobs.runtime.jit_post_compile_hook = count


def context_for(longest: int, width: int) -> int:
    """The context bucket for sequences of up to `longest` tokens in a table of this width. Shorter sequences cost time
    there, in empty programs.
    """
    return next((context for context in CONTEXTS if context >= longest and _apart(context, width)), width)


def contexts_for(width: int, longest: int) -> list[int]:
    """Those that texts of up to `longest` tokens need in such a table, shortest first."""
    return sorted({context_for(one, width) for one in CONTEXTS if one <= longest})


def _apart(context: int, width: int) -> bool:
    """Whether a table is so much wider that graphs for this context are worth having. Parts of long texts take memory:
    those have them sooner.
    """
    return context < width and (width > CLOSE * context or context >= LONG)


def _alone(capture: Callable[[], Any]) -> Any:
    return capture()


def record(
    work: Callable[[], Any],
    pool: Any = None,
    share: Callable[[Callable[[], Any]], Any] = _alone,
    ran: bool = False,
) -> tuple[Any, Any]:
    """The graph of what `work` launches, and what it returned; run once before, unless it `ran`, which compiles what is
    not yet. No garbage is collected while it is recorded: the graphs of an engine that is gone may be part of it, and
    freeing one then spoils the recording. What other threads do does not: one that compiles may be collecting since
    before. `share` has the other ranks capture at the same time.
    """
    begun = time.perf_counter()
    if not ran:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
    graph, result = share(lambda: capture(work, pool))
    Recorded.seconds += time.perf_counter() - begun
    Recorded.graphs += 1
    return graph, result


def capture(work: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """As `record`, of kernels that were launched before."""
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    finally:
        if collecting:
            gc.enable()
    return graph, result
