"""Which experts a row goes to, and which rows an expert has: what the products of experts.py are scheduled by.

A row's choice depends on its own logits alone. It is kept in ascending order of the experts, the order in which a row
adds what they give. Pair `row * per_token + j` is a row's j-th expert. Rows of padding have none.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.load.config import Experts
from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import await_previous, chained, let_next_start
from outrider.model.kernels.gpu.matmul import add_parts
from outrider.model.kernels.gpu.rows import sum_parts
from outrider.model.kernels.reference_experts import route

NO_EXPERT = -1
LONGEST_LOOK = 1024  # rows that an expert's program looks at together


@dataclass(slots=True)
class Choice:
    """The experts of rows, in ascending order."""

    experts: Tensor  # [R, per_token] int32; NO_EXPERT throughout for padding
    weights: Tensor  # [R, per_token] float32


@dataclass(slots=True)
class Schedule:
    """The rows of experts."""

    pairs: (
        Tensor  # [experts, R] int32: an expert's pairs, in ascending order; what follows them is not written
    )
    counts: Tensor  # [experts] int32: how many
    single: bool = False  # of one row: both are its choice [1, per_token]

    @property
    def rows(self) -> int:
        return 1 if self.single else self.pairs.shape[1]


@triton.jit
def _largest(scores, numbers, left, NONE: tl.constexpr):
    """The number of the largest score that is left, the lower one of equals."""
    best = tl.max(tl.max(tl.where(left, scores, -float("inf")), 1), 0)
    return tl.min(tl.min(tl.where(left & (scores == best), numbers, NONE), 1), 0)


@kernel(do_not_specialize=["parts_stride", "padding"])
def _choose_kernel(
    parts, correction, slots, spread, touched, experts, weights, parts_stride, padding, floor, scale,
    PARTS: tl.constexpr, COUNT: tl.constexpr, TOP: tl.constexpr, TOPS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, NORMALISED: tl.constexpr, COUNTED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, HIGH)[:, None]
    place = tl.arange(0, WIDE)[None, :]
    each: tl.constexpr = COUNT // GROUPS
    left = (group < GROUPS) & (place < each)
    number = tl.where(left, group * each + place, COUNT)
    if CORRECTED:
        added = tl.load(correction + number, mask=left, other=0.0)
    await_previous(CHAIN)
    among = tl.load(spread)
    routed = (tl.load(slots + row) != padding) | (among > 0)
    logit = sum_parts(parts, row * COUNT + number, parts_stride.to(tl.int64), left, PARTS)
    logit = tl.where(left & (logit == logit), logit, -float("inf"))  # so that a row chooses something, always
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    order = logit  # as scores, but not rounded to equal ones
    if CORRECTED:
        order = score + added
    elif GROUPS > 1:
        order = score
    if GROUPS > 1:
        best = tl.max(tl.where(left, order, -float("inf")), 1)[:, None]
        first = tl.min(tl.where(left & (order == best), number, COUNT), 1)[:, None]
        second = tl.max(tl.where(left & (number != first), order, -float("inf")), 1)[:, None]
        both, waiting, kept = best + second, group < GROUPS, group < 0
        for _ in tl.static_range(GROUPS_KEPT):
            found = _largest(both, group, waiting, HIGH)
            kept, waiting = kept | (group == found), waiting & (group != found)
        left = left & kept
    j = tl.arange(0, TOPS)
    chosen = tl.full((TOPS,), COUNT, tl.int32)
    weight = tl.zeros((TOPS,), tl.float32)
    for step in tl.static_range(TOP):
        found = _largest(order, number, left, COUNT)
        chosen = tl.where(j == step, found, chosen)
        weight = tl.where(j == step, tl.sum(tl.sum(tl.where(number == found, score, 0.0), 1), 0), weight)
        left = left & (number != found)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 0) + floor)
    weight = weight * scale
    if among > 0:
        chosen = tl.where(j < TOP, ((row * TOP + j) % among).to(tl.int32), COUNT)
    rank = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), 1)
    at = row * TOP + rank
    tl.store(experts + at, tl.where(routed, chosen, -1), mask=j < TOP)
    tl.store(weights + at, tl.where(routed, weight, 0.0), mask=j < TOP)
    if COUNTED:
        tl.atomic_add(touched, tl.where(among > 0, tl.minimum(among, TOP), TOP), mask=routed)


def choose(
    logits: Tensor, correction: Tensor | None, how: Experts, slots: Tensor, padding: int, spread: Tensor,
    touched: Tensor | None = None,
) -> Choice:  # fmt: skip
    """From the router's logits, float32 [parts, R, experts]. Rows whose slot is `padding` choose nothing. Where
    `spread`, int32 [1], is not 0, all rows are spread evenly over so many experts instead, to time a step that reads
    them. `touched`, int32 [1]: the number of one row's experts is added to it, as `schedule` does it for more.
    """
    rows, top = logits.shape[1], how.per_token
    if touched is not None and rows > 1:
        raise ValueError("rows may share experts: `schedule` counts them")
    weights = logits.new_empty(rows, top)
    made = Choice(torch.empty_like(weights, dtype=torch.int32), weights)
    if rows:
        _choose_kernel[(rows,)](
            logits, correction, slots, spread, touched, made.experts, made.weights, logits.stride(0), padding,
            how.floor, how.scale,
            PARTS=len(logits), COUNT=how.count, TOP=top, TOPS=triton.next_power_of_2(top), GROUPS=how.groups,
            GROUPS_KEPT=how.groups_kept, HIGH=triton.next_power_of_2(how.groups),
            WIDE=triton.next_power_of_2(how.count // how.groups), SIGMOID=how.score == "sigmoid",
            CORRECTED=correction is not None, NORMALISED=how.normalise,
            COUNTED=touched is not None, num_warps=1, **chained(),
        )  # fmt: skip
    return made


@kernel(do_not_specialize=["rows"])
def _schedule_kernel(
    experts, pairs, counts, touched, rows,
    TOP: tl.constexpr, TOPS: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    expert = tl.program_id(0)
    j = tl.arange(0, TOPS)[None, :]
    await_previous(CHAIN)
    found = tl.zeros((), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        at = row[:, None] * TOP + j
        here = tl.load(experts + at, mask=(row < rows)[:, None] & (j < TOP), other=-1) == expert
        mine = tl.max(here.to(tl.int32), 1)
        place = found + tl.cumsum(mine, 0) - 1
        tl.store(pairs + expert.to(tl.int64) * rows + place, tl.max(tl.where(here, at, 0), 1), mask=mine > 0)
        found += tl.sum(mine, 0)
    tl.store(counts + expert, found)
    tl.atomic_add(touched, 1, mask=found > 0)


def schedule(choice: Choice, count: int, touched: Tensor) -> Schedule:
    """The rows of each of `count` experts. The number of experts that have any is added to `touched`, int32 [1]."""
    rows, top = choice.experts.shape
    made = Schedule(choice.experts.new_empty(count, rows), choice.experts.new_empty(count))
    _schedule_kernel[(count,)](
        choice.experts, made.pairs, made.counts, touched, rows, TOP=top, TOPS=triton.next_power_of_2(top),
        BLOCK=min(LONGEST_LOOK, max(16, triton.next_power_of_2(rows))), num_warps=4, **chained(),
    )  # fmt: skip
    return made


def schedule_one(choice: Choice) -> Schedule:
    """Of one row, whose choice says it all: nothing is launched."""
    assert len(choice.experts) == 1
    return Schedule(choice.experts, choice.experts, single=True)


# ---------------------------------------------------------------------------------------------------- twins


def choose_twin(
    logits: Tensor, correction: Tensor | None, how: Experts, slots: Tensor, padding: int, spread: Tensor
) -> Choice:
    chosen, weights = route(add_parts(logits), how, correction)
    if spread:
        pairs = torch.arange(chosen.numel(), device=logits.device).view_as(chosen)
        chosen, padding = (pairs % spread).sort(dim=-1).values, NO_EXPERT
    there = (slots != padding)[:, None]
    return Choice(torch.where(there, chosen, NO_EXPERT).int(), torch.where(there, weights, 0.0))


def schedule_twin(choice: Choice, count: int, touched: Tensor) -> Schedule:
    rows = len(choice.experts)
    found = [(choice.experts.flatten() == expert).nonzero().flatten().int() for expert in range(count)]
    counts = torch.tensor([len(one) for one in found], dtype=torch.int32, device=choice.experts.device)
    pairs = choice.experts.new_zeros((count, rows))
    for expert, mine in enumerate(found):
        pairs[expert, : len(mine)] = mine
    touched += (counts > 0).sum().int()
    return Schedule(pairs, counts)
