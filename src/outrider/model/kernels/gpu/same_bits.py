"""Checks where the library gives the bits of our kernels, when a model is loaded, for every weight shape and row count
in use. If they differ, our kernels are used and a warning is logged.

The reference rows come from our kernels for few rows, which every model needs anyway: no kernel is compiled for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from outrider.model.kernels.gpu import library
from outrider.model.kernels.gpu.ahead import AHEAD
from outrider.model.kernels.gpu.launch import INTERPRETED
from outrider.model.kernels.gpu.library import COUNTS, Library, Product
from outrider.model.kernels.gpu.matmul import HIGH, Packed, multiply, segment_length, segments, widen
from outrider.model.kernels.gpu.quantise import KINDS

SHORTEST_SEGMENT = 1024  # inputs; shorter segments have not been measured
GATED_FROM = 192  # rows from which the library is quicker, though the activation is a launch of its own then
# Rows for each segment from which it is quicker, where segments differ in length, so that each is a call of its own.
ONE_BY_ONE = 64
WIDENED_FROM = 512  # rows from which a weight in fewer bits is worth being written out in bfloat16 first
WIDEST_WIDENED = 65536  # outputs of such a weight; a head has more, and few rows
TRIED = 16  # rows that our kernels multiply at a time
WIDEST_OUT = 1 << 27  # numbers of a result that is compared; a head has many
TURNS = 5  # timed repetitions
SEEDS = (0, 1, 2)

Weight = tuple[Packed, Tensor | None]  # and its bias


@dataclass(slots=True)
class Adopted:
    """What came of it."""

    refused: str = ""  # why no weight is multiplied by the library, if none is
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # row counts with our bits, of how many

    @property
    def differing(self) -> list[str]:
        return [
            f"{name} at {all_ - same} of {all_}" for name, (same, all_) in self.shapes.items() if same < all_
        ]

    def describe(self) -> str:
        if self.refused:
            return f"own kernels for every pass: {self.refused}"
        odd = (
            f"; other bits, so own kernels: {', '.join(self.differing)} row counts" if self.differing else ""
        )
        return f"cuBLASLt for passes of many rows{odd}"


def worthwhile(weight: Packed) -> bool:
    """Whether the library is faster with this weight at all."""
    pieces = segments(weight)
    short = pieces > 1 and segment_length(weight.width, pieces) < SHORTEST_SEGMENT
    fits = weight.kind == "bfloat16" or (
        weight.kind in KINDS and len(weight.data) * weight.outputs <= WIDEST_WIDENED
    )
    return fits and not short


def adopt_library(weights: Sequence[Weight], product: Product | None = None) -> Adopted:
    """Lets the library serve weights for which it gives our bits."""
    wanted = [(weight, bias) for weight, bias in weights if worthwhile(weight)]
    if product is None and not library.can_forbid_splits():
        return Adopted(refused=f"torch {torch.__version__} cannot forbid split sums; 2.10 can")
    if not wanted:
        return Adopted(refused="no weight that cuBLASLt is quicker with")
    made = Adopted()
    by_shape: dict[str, list[Weight]] = {}
    for weight, bias in wanted:
        by_shape.setdefault(shape_name(weight, bias), []).append((weight, bias))
    _compile([alike[0] for alike in by_shape.values()])
    room = _room([weight for weight, _ in wanted])
    for name, alike in by_shape.items():
        first, bias = alike[0]
        found = compare(first, bias, room, product)
        made.shapes[name] = len(found.counts), len(counts_for(first))
        for weight, _ in alike if found.counts else ():
            read = reading(weight, room)
            weight.library = replace(found, rows=read.rows, fill=read.fill)
    return made


def _room(weights: Sequence[Packed]) -> Tensor | None:
    """For the largest weight in fewer bits, written out. Passes multiply by one weight at a time."""
    fewer = [weight for weight in weights if weight.kind in KINDS]
    if not fewer:
        return None
    return torch.empty(max(map(_numbers, fewer)), dtype=torch.bfloat16, device=fewer[0].data.device)


def _numbers(weight: Packed) -> int:
    return len(weight.data) * weight.blocks * HIGH * weight.width


def _compile(weights: Sequence[Weight]) -> None:
    """Our kernels for the rows compared with, all of them at the same time."""
    if INTERPRETED:
        return
    for weight, bias in weights:
        with AHEAD.collecting():
            own_result(weight, bias, trial_rows(TRIED, weight, SEEDS[0]))


def shape_name(weight: Packed, bias: Tensor | None) -> str:
    halves = "2 x " if weight.gated else ""
    return f"{halves}{weight.outputs} x {weight.inputs}{' with bias' if bias is not None else ''}"


def reading(weight: Packed, room: Tensor | None) -> Library:
    """How the library reads a weight."""
    if weight.kind in KINDS:
        assert room is not None
        rows = room[: _numbers(weight)].view(-1, weight.width)
        fill = partial(widen, weight, rows)
    else:
        rows, fill = weight.rows, None
    return Library(
        rows[: None if weight.gated else weight.outputs, : weight.inputs],
        frozenset(),
        library.one_by_one,
        fill,
    )


def counts_for(weight: Packed) -> tuple[int, ...]:
    """Row counts that the library may be asked for with such a weight."""
    pieces = segments(weight)
    wide = len(weight.data) * weight.outputs * pieces
    uneven = weight.inputs % segment_length(weight.width, pieces) if pieces > 1 else 0
    least = GATED_FROM if weight.gated else ONE_BY_ONE * pieces if uneven else 0
    least = max(least, WIDENED_FROM) if weight.kind in KINDS else least
    return tuple(count for count in COUNTS if count >= least and count * wide <= WIDEST_OUT)


def compare(
    weight: Packed, bias: Tensor | None, room: Tensor | None, product: Product | None = None
) -> Library:
    """The fastest call of the library for this weight, and the row counts at which it gives our bits."""
    methods = (product,) if product else library.METHODS[: segments(weight)]
    asked = [replace(reading(weight, room), product=method) for method in methods]
    found = [replace(one, counts=same_counts(weight, bias, one)) for one in asked]
    most = max(len(one.counts) for one in found)
    best = [one for one in found if len(one.counts) == most]
    return best[0] if len(best) == 1 or not most else min(best, key=lambda one: seconds(weight, bias, one))


def seconds(weight: Packed, bias: Tensor | None, theirs: Library) -> float:
    """Of a product of as many rows as there may be."""
    x = trial_rows(max(theirs.counts), weight, SEEDS[0])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TURNS):
        library_result(weight, bias, theirs, x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / TURNS


def same_counts(weight: Packed, bias: Tensor | None, theirs: Library) -> frozenset[int]:
    counts = counts_for(weight)
    same = set(counts)
    for seed in SEEDS if counts else ():
        x = trial_rows(max(counts), weight, seed)
        ours = own_result(weight, bias, x)
        for count in sorted(same):
            made = library_result(weight, bias, theirs, x[:count])
            if made is None or not torch.equal(made, ours[:, :count]):
                same.discard(count)
    return frozenset(same)


def trial_rows(rows: int, weight: Packed, seed: int) -> Tensor:
    """As they come out of a norm, with some numbers much larger than others."""
    there = weight.data.device
    random = torch.Generator(there).manual_seed(seed)
    x = torch.randn((rows, weight.inputs), generator=random, device=there)
    dtype = weight.data.dtype if weight.data.is_floating_point() else torch.bfloat16
    return (x * x * x if seed % 2 else x).to(dtype)


def own_result(weight: Packed, bias: Tensor | None, x: Tensor) -> Tensor:
    """Of our kernels, some rows at a time: with every segment in a part of its own, or gated."""
    pieces = []
    for mine in x.split(TRIED):
        parts = 1 if weight.gated else segments(weight)
        out = mine.new_empty(
            (parts, len(mine), weight.outputs), dtype=x.dtype if weight.gated else torch.float32
        )
        multiply(mine, weight, bias, out)
        pieces.append(out)
    return torch.cat(pieces, dim=1)


def library_result(weight: Packed, bias: Tensor | None, theirs: Library, x: Tensor) -> Tensor | None:
    """None if it cannot do it."""
    dtype = x.dtype if weight.gated else torch.float32
    out = x.new_empty((1 if weight.gated else segments(weight), len(x), weight.outputs), dtype=dtype)
    try:
        if weight.gated:
            theirs.multiply_gated(x, bias, out, weight.activation, weight.clamp)
        else:
            theirs.multiply(x, segment_length(weight.width, segments(weight)), bias, out)
    except RuntimeError:
        return None
    return out
