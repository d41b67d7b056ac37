"""What Triton compiles for this process. Kernels that are on disk, for this version and this GPU, do not count."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


class Compiled:
    """So far, in this process."""

    kernels = 0
    seconds = 0.0


def watch_compiling(begun: Callable[[], None] = lambda: None) -> None:
    """Count from now on. `begun` is called when the first kernel had to be compiled: others will follow, some seconds
    of them.
    """

    def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            return
        Compiled.kernels += 1
        Compiled.seconds += times.total / 1e6
        if Compiled.kernels == 1:
            begun()

    triton.knobs.compilation.listener = heard
