"""How kernels are launched: through Triton's interpreter on a CPU, or on a device, chained where it can.

On Hopper and later a kernel may start while the one before it still runs (programmatic dependent launch): it
declares this with `chained`, reads what does not depend on its predecessor, and waits before it reads anything else.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = tl.constexpr(not INTERPRETED)

# Lanes of kernels over a sequence's few rows: one width for most of them, so that few kernels are compiled.
LANES = 16


def lanes(count: int) -> int:
    return max(LANES, triton.next_power_of_2(count))


def aligned(rows: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Uninitialised rows with aligned starts: Triton would compile another kernel for unaligned ones."""
    step = 16 // dtype.itemsize
    return torch.empty((rows, -(-count // step) * step), dtype=dtype, device=device)[:, :count].unbind()


@cache
def chained() -> dict[str, Any]:
    """Options for kernels that take part in the chain: `CHAIN` for the kernel, `launch_pdl` for the launch."""
    if INTERPRETED or torch.cuda.get_device_capability() < (9, 0):
        return {"CHAIN": False}
    return {"CHAIN": True, "launch_pdl": True}


@triton.jit
def let_next_start(CHAIN: tl.constexpr):
    if CHAIN:
        gdc_launch_dependents()


@triton.jit
def await_previous(CHAIN: tl.constexpr):
    """Everything the kernels before this one wrote is visible after this."""
    if CHAIN:
        gdc_wait()
