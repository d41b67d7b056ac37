"""Matrix products of many rows by cuBLASLt, which is faster than our kernels there. If it may not split the inputs, it
adds in the same order in the tensor core. So one call per segment of a weight gives the bits of matmul.py. No document
guarantees this; same_bits.py compares before anything is used.

cuBLASLt's choice of kernel depends on the number of rows, so passes are padded up to row counts that were compared.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start

FEWEST, MOST, STEP = 64, 2048, 64  # rows above which, up to which and in what steps it is asked
COUNTS = tuple(range(128, MOST + 1, STEP))
GATE_BLOCK = 1024
EXPERIMENTAL = b"preferred_blas_library is an experimental feature"

# x [S, R, inputs] by weights [S, outputs, inputs] into [S, R, outputs], as exact as that is: each of S by itself.
Product = Callable[[Tensor, Tensor, Tensor], None]


def padded_rows(rows: int) -> int:
    """The row count to pad a pass to: the next one that the library serves, if there is one."""
    return rows if rows <= FEWEST or rows > MOST else max(COUNTS[0], -(-rows // STEP) * STEP)


@dataclass(frozen=True, slots=True)
class Library:
    """A weight as the library reads it, and where it gives the bits of our kernels."""

    rows: Tensor  # [outputs, inputs], where our kernels read it; a padded gate over a padded up
    counts: frozenset[int]  # of rows
    product: Product
    fill: Callable[[], None] | None = None  # of a weight in fewer bits: writes `rows`, which weights share

    def multiply(self, x: Tensor, segment: int, bias: Tensor | None, out: Tensor) -> None:
        """As matmul.multiply with every segment in a part of its own; segments are `segment` inputs long."""
        self._segments(x, segment, out)
        if bias is not None:
            out[0] += bias

    def multiply_gated(
        self, x: Tensor, bias: Tensor | None, out: Tensor, activation: str = "silu", clamp: float = 0.0
    ) -> None:
        """activation(gate) * up into out [1, R, outputs]; a gated weight has one segment."""
        wide = len(self.rows)
        made = x.new_empty((1, len(x), wide), dtype=out.dtype if bias is None else torch.float32)
        self._segments(x, x.shape[1], made)
        count, outputs = out.shape[1:]
        _gate_kernel[(count, triton.cdiv(outputs, GATE_BLOCK))](
            made, bias, out, outputs, wide // 2, BIASED=bias is not None, ACTIVATION=activation, CLAMP=clamp,
            BLOCK=GATE_BLOCK, num_warps=4, **chained(),
        )  # fmt: skip

    def _segments(self, x: Tensor, segment: int, out: Tensor) -> None:
        inputs = x.shape[1]
        if self.fill is not None:
            self.fill()
        if inputs % segment == 0:
            self.product(_cut(x, segment), _cut(self.rows, segment), out)
            return
        for part, first in enumerate(range(0, inputs, segment)):
            cut = slice(first, first + segment)
            self.product(x[None, :, cut], self.rows[None, :, cut], out[part : part + 1])


def _cut(matrix: Tensor, segment: int) -> Tensor:
    """[rows, inputs] -> [segments, rows, segment], where it lies."""
    return matrix.unflatten(1, (-1, segment)).transpose(0, 1)


def one_by_one(x: Tensor, weight: Tensor, out: Tensor) -> None:
    with _unsplit():
        for mine, theirs, to in zip(x, weight, out, strict=True):
            torch.mm(mine, theirs.T, **_into(mine, to))


def batched(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """All segments in one call."""
    with _unsplit():
        torch.bmm(x, weight.transpose(1, 2), **_into(x, out))


def _into(x: Tensor, out: Tensor) -> dict[str, Any]:
    return {"out": out} if x.dtype == out.dtype else {"out": out, "out_dtype": out.dtype}


METHODS: tuple[Product, ...] = (one_by_one, batched)


@contextmanager
def _unsplit() -> Iterator[None]:
    """Selects cuBLASLt without splitting of inputs for this thread's calls. Other threads that multiply at the same
    time get the same sums, more slowly.
    """
    cuda = torch.backends.cuda
    before = cuda.preferred_blas_library()
    reduced = cuda.matmul.allow_bf16_reduced_precision_reduction
    split = cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
    _choose_quietly()
    cuda.preferred_blas_library("cublaslt")  # first, as cuBLAS itself cannot be kept from splitting
    cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        cuda.matmul.allow_bf16_reduced_precision_reduction = (reduced, split)
        cuda.preferred_blas_library(before)


@functools.cache
def _choose_quietly() -> None:
    """Chooses cublaslt for the first time in this process. torch then writes to the file of stderr that the choice is
    experimental. Results are compared before they are used (same_bits.py), so that line is left out.
    """
    own = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            torch.backends.cuda.preferred_blas_library("cublaslt")
        finally:
            os.dup2(own, 2)
            os.close(own)
        written.seek(0)
        for line in written:
            if EXPERIMENTAL not in line:
                os.write(2, line)


def can_forbid_splits() -> bool:
    """Whether this torch has what `_unsplit` sets."""
    return hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k")


@triton.jit
def gated(gate, up, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr):
    """Of sums rounded to what is stored: those of many rows are written and read again before they come here. Every
    activation is its argument times a sigmoid; products are fused with sums where it says so, the same in all kernels.
    """
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    bent = gate
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + 1
        bent = gate * 1.702
    elif ACTIVATION == "gelu_tanh":  # 0.5 + 0.5 tanh(u) is the sigmoid of 2 u
        one = tl.full(gate.shape, 1.0, tl.float32)
        bent = gate * 1.5957691216057308 * tl.fma(gate * gate, one * 0.044715, one)
    return gate / (1 + tl.exp(-bent)) * up


@kernel
def _gate_kernel(
    made, bias, out, outputs, padded, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """made [R, 2 * padded], gate before up -> out [R, outputs]."""
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < outputs
    await_previous(CHAIN)
    gate = tl.load(made + row * (2 * padded) + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(made + row * (2 * padded) + padded + n, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        gate += tl.load(bias + n, mask=mask, other=0.0)
        up += tl.load(bias + outputs + n, mask=mask, other=0.0)
    stored = out.dtype.element_ty
    tl.store(out + row * outputs + n, gated(gate, up, stored, ACTIVATION, CLAMP).to(stored), mask=mask)
