"""Counts the kernels that Triton compiles in this process. Kernels already on disk do not count."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

import triton

_counting = threading.Lock()  # kernels are compiled in several threads


class Compiled:
    """So far, in this process."""

    kernels = 0
    seconds = 0.0  # of all threads together
    began, ended = inf, 0.0  # moments of the clock, of the first and the last


def watch_compiling(begun: Callable[[], None] = lambda: None) -> None:
    """Starts counting. Calls `begun` when the first kernel has to be compiled: others will follow."""

    def received(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            return
        with _counting:
            Compiled.kernels += 1
            Compiled.seconds += times.total / 1e6
            Compiled.ended = time.time()
            Compiled.began = min(Compiled.began, Compiled.ended - times.total / 1e6)
            first = Compiled.kernels == 1
        if first:
            begun()

    triton.knobs.compilation.listener = received
