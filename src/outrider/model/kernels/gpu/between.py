"""What a round does between its passes, a kernel each: draft/state.py says it in torch, and what comes in and out."""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start


@triton.jit
def _take_off_kernel(
    inputs, table, known, rows, lengths, guessing, guessed, stride, spare,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    text = tl.program_id(0)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row = tl.load(inputs + text * WIDTH).to(tl.int64)
    wanted = tl.load(inputs + text * WIDTH + 1)
    length = tl.load(known + row)
    fresh = tl.load(inputs + text * WIDTH + 2 + i, mask=i < WIDTH - 2, other=0)
    tl.store(table + row * stride + length + i, fresh, mask=i < WIDTH - 2)
    other = tl.where(wanted > 0, row, row * 0 + spare)  # a spare of 1 is compiled in: no tensor
    tl.store(rows + text, row)
    tl.store(lengths + text, length)
    tl.store(guessing + text, other)
    tl.store(guessed + text, tl.load(known + other))


def take_off(inputs: Tensor, table: Tensor, known: Tensor) -> tuple[Tensor, ...]:
    """Rows, their lengths, the rows that want guesses, and the lengths of those: [S] int64 each."""
    texts, width = inputs.shape
    made = torch.empty((4, texts), dtype=torch.int64, device=inputs.device).unbind()
    _take_off_kernel[(texts,)](
        inputs, table, known, *made, table.stride(0), len(known) - 1,
        WIDTH=width, WIDE=triton.next_power_of_2(width - 2), num_warps=1, **chained(),
    )  # fmt: skip
    return made


@triton.jit
def _lay_kernel(
    tokens, table, rows, lengths, entries, depths, picks, masks, guesses,
    ids, positions, slots, owners, prefix, ancestors, tokens_stride, table_stride, guesses_stride, least,
    EACH: tl.constexpr, WIDE: tl.constexpr, GUESSED: tl.constexpr, BRANCHED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    text = tl.program_id(0)
    i = tl.arange(0, WIDE)
    valid = i < EACH
    entry = tl.load(entries + i, mask=valid, other=0)
    depth = tl.load(depths + i, mask=valid, other=0)
    pick = tl.load(picks + i, mask=valid, other=-1)
    mask = tl.zeros((WIDE,), tl.int64)
    if BRANCHED:
        mask = tl.load(masks + i, mask=valid, other=0)
    await_previous(CHAIN)
    row = tl.load(rows + text)
    length = tl.load(lengths + text)
    entry = tl.maximum(length + entry, least)
    position = tl.maximum(length + depth, 0).to(tl.int32)
    token = tl.load(tokens + row * tokens_stride + entry, mask=valid & (pick < 0), other=0)
    if GUESSED:
        token += tl.load(guesses + text * guesses_stride + pick, mask=valid & (pick >= 0), other=0)
    slot = tl.load(table + row * table_stride + entry, mask=valid, other=0)
    seen = position + 1
    if BRANCHED:
        seen = tl.zeros_like(seen) + (length + 1).to(tl.int32)
    to = text * EACH + i
    tl.store(ids + to, token, mask=valid)
    tl.store(positions + to, position, mask=valid)
    tl.store(slots + to, slot, mask=valid)
    tl.store(owners + to, tl.zeros_like(position) + row.to(tl.int32), mask=valid)
    tl.store(prefix + to, seen, mask=valid)
    tl.store(ancestors + to, mask, mask=valid)


def lay(
    tokens: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    layout: tuple[Tensor, Tensor, Tensor, Tensor | None, int],
    guesses: Tensor | None,
) -> dict[str, Tensor]:
    """Fields of a batch. `layout`: entries, depths, picks [k] int32, masks [k] int64 where they branch, least entry."""
    entries, depths, picks, masks, least = layout
    texts, each = len(rows), len(entries)
    wide, narrow = (
        torch.empty((n, texts * each), dtype=kind, device=rows.device).unbind()
        for n, kind in ((2, torch.int64), (4, torch.int32))
    )
    (ids, ancestors), (positions, slots, owners, prefix) = wide, narrow
    _lay_kernel[(texts,)](
        tokens, table, rows, lengths, entries, depths, picks, masks, guesses,
        ids, positions, slots, owners, prefix, ancestors,
        tokens.stride(0), table.stride(0), 0 if guesses is None else guesses.stride(0), least,
        EACH=each, WIDE=triton.next_power_of_2(each), GUESSED=guesses is not None, BRANCHED=masks is not None,
        num_warps=1, **chained(),
    )  # fmt: skip
    return dict(
        ids=ids, positions=positions, slots=slots, table_rows=owners, prefix=prefix, ancestors=ancestors
    )


@triton.jit
def _keep_kernel(
    tokens, known, rows, lengths, told, stride, spare,
    PASSES: tl.constexpr, WIDE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    text = tl.program_id(0)
    i = tl.arange(0, WIDE)
    await_previous(CHAIN)
    row = tl.load(rows + text)
    length = tl.load(lengths + text)
    token = tl.load(told + text * PASSES + i, mask=i < PASSES, other=0)
    tl.store(tokens + row * stride + length + 1 + i, token, mask=i < PASSES)
    tl.store(known + row, tl.where(row == spare, 0, length + PASSES))


def keep(tokens: Tensor, known: Tensor, rows: Tensor, lengths: Tensor, told: Tensor) -> None:
    texts, passes = told.shape
    _keep_kernel[(texts,)](
        tokens, known, rows, lengths, told, tokens.stride(0), len(known) - 1,
        PASSES=passes, WIDE=triton.next_power_of_2(passes), num_warps=1, **chained(),
    )  # fmt: skip


@triton.jit
def _commit_kernel(
    tokens, table, known, rows, lengths, inputs, parents, guesses, counts, chosen, out,
    tokens_stride, table_stride, inputs_stride, spare,
    NODES: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, COUNTED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """One text: from the last known token down the tree, as far as guesses are what was chosen."""
    let_next_start(CHAIN)
    text = tl.program_id(0)
    node = tl.arange(0, WIDE)
    parent = tl.load(parents + node, mask=node < NODES, other=-2)
    await_previous(CHAIN)
    row = tl.load(rows + text)
    length = tl.load(lengths + text)
    meant = tl.load(inputs + text * inputs_stride + 1).to(tl.int64)
    if COUNTED:
        meant = tl.minimum(meant, tl.load(counts + text))
    guess = tl.load(guesses + text * NODES + node, mask=node < NODES, other=0)
    said_at = chosen + text * (NODES + 1)
    result = out + text * (2 + DEPTH + 1 + DEPTH + NODES)
    tl.store(result + 1, meant)
    tl.store(result + 3 + 2 * DEPTH + node, guess, mask=node < NODES)
    said = tl.load(said_at)
    writing = tokens + row * tokens_stride + length + 1
    tl.store(writing, said)
    tl.store(result + 2, said)
    here = tl.full((), -1, tl.int32)
    accepted = tl.full((), 0, tl.int64)
    for level in range(DEPTH):
        fits = (parent == here) & (guess == said) & (node < meant) & (node < NODES)
        held = tl.max(tl.where(fits, node + 1, 0), 0)
        said = tl.load(said_at + held)
        here = tl.where(held > 0, held - 1, NODES)  # nobody's parent
        accepted += tl.where(held > 0, 1, 0)
        tl.store(writing + 1 + level, said)
        tl.store(result + 3 + level, said)
        tl.store(result + 3 + DEPTH + level, (held - 1).to(tl.int64))
        if NODES > DEPTH:  # the path's slots come first now
            slot = tl.load(inputs + text * inputs_stride + 2 + held)
            tl.store(table + row * table_stride + length + 1 + level, slot)
    tl.store(result, accepted)
    tl.store(known + row, tl.where(row == spare, 0, length + accepted + 1))


def commit(
    state: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    lengths: Tensor,
    inputs: Tensor,
    parents: Tensor,
    depth: int,
    guesses: Tensor,
    counts: Tensor | None,
    chosen: Tensor,
) -> Tensor:
    """`state`: tokens, table, lengths of all."""
    tokens, table, known = state
    texts, nodes = guesses.shape
    out = torch.empty((texts, 2 + depth + 1 + depth + nodes), dtype=torch.int64, device=rows.device)
    _commit_kernel[(texts,)](
        tokens, table, known, rows, lengths, inputs, parents, guesses, counts, chosen, out,
        tokens.stride(0), table.stride(0), inputs.stride(0), len(known) - 1,
        NODES=nodes, DEPTH=depth, WIDE=triton.next_power_of_2(nodes), COUNTED=counts is not None,
        num_warps=1, **chained(),
    )  # fmt: skip
    return out
