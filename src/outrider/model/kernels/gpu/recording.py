"""Recording launches into CUDA graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CONTEXTS = (
    1024,
    4096,
    16_384,
    65_536,
    262_144,
)  # tokens of the longest sequence; few, as capturing takes time


class Recorded:
    """What graphs took this process so far: what an answer had to wait for, if one did."""

    seconds = 0.0


def context_for(longest: int, width: int) -> int:
    """The context that graphs are captured for if sequences are up to `longest` tokens long, in a table of some width.
    Shorter ones cost time there, in empty programs.
    """
    return min(next((context for context in CONTEXTS if context >= longest), width), width)


def record(work: Callable[[], Tensor], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of what `work` launches, and what it returned; run once before, which compiles what is not yet. No
    garbage is collected while it is recorded: the graphs of an engine that is gone may be part of it, and freeing one
    then spoils the recording.
    """
    begun = time.perf_counter()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = work()
    finally:
        if collecting:
            gc.enable()
    Recorded.seconds += time.perf_counter() - begun
    return graph, result
