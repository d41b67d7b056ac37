"""The operations of a step around its passes, one kernel each. Twins, with the inputs and outputs: device/ops.py."""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import aligned, await_previous, chained, lanes, let_next_start


@kernel(do_not_specialize=["width", "spare"])
def _begin_step_kernel(
    inputs, table, known, rows, lengths, drafting, drafted, stride, spare, width,
    WIDE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    seq = tl.program_id(0)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row = tl.load(inputs + seq * width).to(tl.int64)
    wanted = tl.load(inputs + seq * width + 1)
    length = tl.load(known + row)
    fresh = tl.load(inputs + seq * width + 3 + i, mask=i < width - 3, other=0)
    tl.store(table + row * stride + length + i, fresh, mask=i < width - 3)
    other = tl.where(wanted > 0, row, row * 0 + spare)
    tl.store(rows + seq, row)
    tl.store(lengths + seq, length)
    tl.store(drafting + seq, other)
    tl.store(drafted + seq, tl.load(known + other))


def begin_step(inputs: Tensor, table: Tensor, known: Tensor) -> tuple[Tensor, ...]:
    """Rows, their lengths, the rows that want drafts, and the lengths of those: [S] int64 each."""
    seqs, width = inputs.shape
    made = aligned(4, seqs, torch.int64, inputs.device)
    _begin_step_kernel[(seqs,)](
        inputs, table, known, *made, table.stride(0), len(known) - 1, width,
        WIDE=lanes(width - 3), num_warps=1, **chained(),
    )  # fmt: skip
    return made


@kernel(do_not_specialize=["drafts_stride", "behind", "each"])
def _build_batch_kernel(
    tokens, table, rows, lengths, entries, depths, nodes, masks, drafts,
    ids, positions, slots, owners, prefix, ancestors, tokens_stride, table_stride, drafts_stride, behind, each,
    WIDE: tl.constexpr, DRAFTED: tl.constexpr, BRANCHED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    seq = tl.program_id(0)
    i = tl.arange(0, WIDE)
    valid = i < each
    entry = tl.load(entries + i, mask=valid, other=0)
    depth = tl.load(depths + i, mask=valid, other=0)
    node_of = tl.load(nodes + i, mask=valid, other=-1)
    mask = tl.zeros((WIDE,), tl.int64)
    if BRANCHED:
        mask = tl.load(masks + i, mask=valid, other=0)
    await_previous(CHAIN)
    row = tl.load(rows + seq)
    length = tl.load(lengths + seq)
    entry = tl.maximum(length + entry, behind)
    position = tl.maximum(length + depth, 0).to(tl.int32)
    token = tl.load(tokens + row * tokens_stride + entry, mask=valid & (node_of < 0), other=0)
    if DRAFTED:
        token += tl.load(drafts + seq * drafts_stride + node_of, mask=valid & (node_of >= 0), other=0)
    slot = tl.load(table + row * table_stride + entry, mask=valid, other=0)
    seen = position + 1
    if BRANCHED:
        seen = tl.zeros_like(seen) + (length + 1 - behind).to(tl.int32)
    to = seq * each + i
    tl.store(ids + to, token, mask=valid)
    tl.store(positions + to, position, mask=valid)
    tl.store(slots + to, slot, mask=valid)
    tl.store(owners + to, tl.zeros_like(position) + row.to(tl.int32), mask=valid)
    tl.store(prefix + to, seen, mask=valid)
    tl.store(ancestors + to, mask, mask=valid)


def build_batch(
    tokens: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    layout: tuple[Tensor, Tensor, Tensor, Tensor | None, int],
    drafts: Tensor | None,
) -> dict[str, Tensor]:
    """Fields of a batch. `layout`: entries, depths, nodes [k] int32, masks [k] int64 where they branch, and how many
    entries positions lie behind.
    """
    entries, depths, nodes, masks, behind = layout
    seqs, each = len(rows), len(entries)
    ids, ancestors = aligned(2, seqs * each, torch.int64, rows.device)
    positions, slots, owners, prefix = aligned(4, seqs * each, torch.int32, rows.device)
    _build_batch_kernel[(seqs,)](
        tokens, table, rows, lengths, entries, depths, nodes, masks, drafts,
        ids, positions, slots, owners, prefix, ancestors,
        tokens.stride(0), table.stride(0), 0 if drafts is None else drafts.stride(0), behind, each,
        WIDE=lanes(each), DRAFTED=drafts is not None, BRANCHED=masks is not None,
        num_warps=1, **chained(),
    )  # fmt: skip
    return dict(
        ids=ids, positions=positions, slots=slots, table_rows=owners, prefix=prefix, ancestors=ancestors
    )


@kernel(do_not_specialize=["inputs_stride", "spare", "passes"])
def _append_tokens_kernel(
    tokens, known, rows, lengths, inputs, emitted, stride, inputs_stride, spare, passes,
    WIDE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    seq = tl.program_id(0)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row = tl.load(rows + seq)
    length = tl.load(lengths + seq)
    token = tl.load(emitted + seq * passes + i, mask=i < passes, other=0)
    tl.store(tokens + row * stride + length + 1 + i, token, mask=i < passes)
    commits = tl.load(inputs + seq * inputs_stride + 2) & 1
    tl.store(known + row, tl.where((row == spare) | (commits == 0), length, length + passes))


def append_tokens(
    tokens: Tensor, known: Tensor, rows: Tensor, lengths: Tensor, inputs: Tensor, emitted: Tensor
) -> None:
    seqs, passes = emitted.shape
    _append_tokens_kernel[(seqs,)](
        tokens, known, rows, lengths, inputs, emitted, tokens.stride(0), inputs.stride(0), len(known) - 1, passes,
        WIDE=lanes(passes), num_warps=1, **chained(),
    )  # fmt: skip


@kernel(do_not_specialize=["inputs_stride", "spare", "nodes", "depth"])
def _commit_kernel(
    tokens, table, known, rows, lengths, inputs, parents, drafts, counts, chosen, out,
    tokens_stride, table_stride, inputs_stride, spare, nodes, depth,
    WIDE: tl.constexpr, BRANCHED: tl.constexpr, COUNTED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """One sequence: walks from the last known token down the tree while draft tokens equal the chosen ones."""
    let_next_start(CHAIN)
    seq = tl.program_id(0)
    node = tl.arange(0, WIDE)
    parent = tl.load(parents + node, mask=node < nodes, other=-2)
    await_previous(CHAIN)
    row = tl.load(rows + seq)
    length = tl.load(lengths + seq)
    proposed = tl.load(inputs + seq * inputs_stride + 1).to(tl.int64)
    if COUNTED:
        proposed = tl.minimum(proposed, tl.load(counts + seq))
    draft = tl.load(drafts + seq * nodes + node, mask=node < nodes, other=0)
    sampled_at = chosen + seq * (nodes + 1)
    result = out + seq * (2 + depth + 1 + depth + nodes)
    tl.store(result + 1, proposed)
    tl.store(result + 3 + 2 * depth + node, draft, mask=node < nodes)
    sampled = tl.load(sampled_at)
    writing = tokens + row * tokens_stride + length + 1
    tl.store(writing, sampled)
    tl.store(result + 2, sampled)
    here = tl.full((), -1, tl.int32)
    accepted = tl.full((), 0, tl.int64)
    for level in range(depth):
        fits = (parent == here) & (draft == sampled) & (node < proposed) & (node < nodes)
        held = tl.max(tl.where(fits, node + 1, 0), 0)
        sampled = tl.load(sampled_at + held)
        here = tl.where(held > 0, held - 1, nodes)  # no node's parent
        accepted += tl.where(held > 0, 1, 0)
        tl.store(writing + 1 + level, sampled)
        tl.store(result + 3 + level, sampled)
        tl.store(result + 3 + depth + level, (held - 1).to(tl.int64))
        if BRANCHED:  # the path's slots come first now
            slot = tl.load(inputs + seq * inputs_stride + 3 + held)
            tl.store(table + row * table_stride + length + 1 + level, slot)
    tl.store(result, accepted)
    commits = tl.load(inputs + seq * inputs_stride + 2) & 1
    tl.store(known + row, tl.where((row == spare) | (commits == 0), length, length + accepted + 1))


def commit(
    state: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    lengths: Tensor,
    inputs: Tensor,
    parents: Tensor,
    depth: int,
    drafts: Tensor,
    counts: Tensor | None,
    chosen: Tensor,
) -> Tensor:
    """`state`: tokens, table, lengths of all."""
    tokens, table, known = state
    seqs, nodes = drafts.shape
    out = torch.empty((seqs, 2 + depth + 1 + depth + nodes), dtype=torch.int64, device=rows.device)
    _commit_kernel[(seqs,)](
        tokens, table, known, rows, lengths, inputs, parents, drafts, counts, chosen, out,
        tokens.stride(0), table.stride(0), inputs.stride(0), len(known) - 1, nodes, depth,
        WIDE=lanes(nodes), BRANCHED=nodes > depth, COUNTED=counts is not None,
        num_warps=1, **chained(),
    )  # fmt: skip
    return out
