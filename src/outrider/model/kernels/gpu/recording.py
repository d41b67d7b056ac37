"""Recording launches into CUDA graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Recorded:
    """Graphs made by this process so far, and the seconds that took: what an answer had to wait for, if one did."""

    count = 0
    seconds = 0.0


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
    Recorded.count += 1
    Recorded.seconds += time.perf_counter() - begun
    return graph, result
