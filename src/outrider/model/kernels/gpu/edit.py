"""Penalties and logit_bias of the rows of a step that have any; others may be copied. Twins: device/ops.py's `edit` and
`_count`.

The order of operations is verify/process.py's, and none are fused: the host must get the same bits.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, lanes, let_next_start
from outrider.types import Batch

CHUNK = 2048  # tokens a program looks at

# By row of the state: the row of the edits. By that row: counts, tokens of the prompt, bias, penalties.
Edits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@kernel(do_not_specialize=["each", "drafts_stride", "ahead", "nodes"])
def _edit_kernel(
    logits, out, picked, owners, positions, ancestors, lengths, drafts,
    of_row, counts, prompt, bias, penalties, vocab, width, stride, each, drafts_stride, ahead, nodes,
    CHUNK: tl.constexpr, COPY: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    held = token < vocab
    await_previous(CHAIN)
    at = tl.load(picked + row)
    owner = tl.load(owners + at).to(tl.int64)
    edits = tl.load(of_row + owner).to(tl.int64)
    if not COPY:  # noqa: SIM102 - decided when compiling
        if edits < 0:
            return
    x = tl.load(logits + row * stride + token, mask=held, other=0.0)
    if edits >= 0:
        # The text behind this row is the known one, and a path of draft nodes: the first of a chain, or a tree's.
        depth = tl.load(positions + at).to(tl.int64) + ahead - tl.load(lengths + owner) - 1
        mask = tl.load(ancestors + at)
        count = tl.load(counts + edits * width + token, mask=held, other=0)
        for node in range(nodes):
            bit = tl.where(mask != 0, (mask >> node) & 1, tl.where(node < depth, 1, 0))
            drafted = tl.load(drafts + row // each * drafts_stride + node)
            count += tl.where((token == drafted) & (bit > 0), 1, 0)
        seen = tl.where(count > 0, 1.0, 0.0)
        present = (count > 0) | (tl.load(prompt + edits * width + token, mask=held, other=0) > 0)
        repetition = tl.load(penalties + edits * 3)
        changed = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(present, changed, x)
        frequency = tl.load(penalties + edits * 3 + 1)
        x = x - (frequency * count.to(tl.float32) + tl.load(penalties + edits * 3 + 2) * seen)
        x = x + tl.load(bias + edits * width + token, mask=held, other=0.0)
    tl.store(out + row * vocab + token, x, mask=held)


def edit_rows(
    logits: Tensor,
    batch: Batch,
    lengths: Tensor,
    drafted: Tensor,
    edits: Edits,
    ahead: int,
    copy: bool = True,
) -> Tensor:
    """[R, vocab] float32, of the rows of a batch whose logits these are -> the same, edited. Unless they are to be
    copied, rows that have nothing to edit hold anything.
    """
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        _edit_kernel[(rows, triton.cdiv(vocab, CHUNK))](
            logits, out, batch.logit_rows, batch.table_rows, batch.positions, batch.ancestors, lengths, drafted,
            *edits, vocab, edits[1].stride(0), logits.stride(0), rows // len(drafted), drafted.stride(0), ahead,
            drafted.shape[1], CHUNK=CHUNK, COPY=copy, num_warps=4, enable_fp_fusion=False, **chained(),
        )  # fmt: skip
    return out


@kernel(do_not_specialize=["inputs_stride", "emitted_stride", "spare", "most"])
def _count_kernel(
    inputs, emitted, accepted, of_row, counts, inputs_stride, emitted_stride, width, spare, most,
    WIDE: tl.constexpr, COUNTED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    seq = tl.program_id(0)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row = tl.load(inputs + seq * inputs_stride)
    commits = tl.load(inputs + seq * inputs_stride + 2) & 1
    edits = tl.load(of_row + row).to(tl.int64)
    if (commits > 0) & (edits >= 0) & (row != spare):
        number = most.to(tl.int64)
        if COUNTED:
            number = tl.load(accepted + seq * emitted_stride) + 1
        token = tl.load(emitted + seq * emitted_stride + i, mask=i < number, other=0)
        tl.atomic_add(counts + edits * width + token, tl.full((WIDE,), 1, tl.int32), mask=i < number)


def count_tokens(inputs: Tensor, emitted: Tensor, accepted: Tensor | None, edits: Edits) -> None:
    """Count the tokens [S, n] that a step emitted: all, or where some drafts were accepted [S], those and one more.
    Both are columns of one tensor.
    """
    of_row, counts, *_ = edits
    seqs, most = emitted.shape
    _count_kernel[(seqs,)](
        inputs, emitted, accepted, of_row, counts, inputs.stride(0), emitted.stride(0), counts.stride(0),
        len(of_row) - 1, most,
        WIDE=lanes(most), COUNTED=accepted is not None, num_warps=1, **chained(),
    )  # fmt: skip
