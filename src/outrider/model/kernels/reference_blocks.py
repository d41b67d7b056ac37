"""Products with weights in blocks of few bits, in plain torch: the same bits as blocks.c, whose head states the law."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import BadCheckpoint
from outrider.load.quants import Blocks

BLOCK = 32  # inputs that share a scale of the activations
TINIEST = 1e-30  # blocks whose values are all smaller are zero


class BlockMatrix:
    """A matrix [N, K] as whole numbers with scales."""

    def __init__(self, blocks: Blocks) -> None:
        self.columns = blocks.columns
        self.numbers, self.scales, self.least = blocks.split()
        for scales in (self.scales, self.least):
            if scales is not None and not scales.isfinite().all():
                raise BadCheckpoint(
                    f"tensor {blocks.name!r} is corrupt: some of its scales are no finite numbers"
                )

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Rows as float32."""
        numbers, scales = self.numbers[rows], self.scales[rows]
        numbers = numbers.view(*scales.shape, -1)
        if self.least is None:
            wide = numbers * scales[:, :, None]
        else:
            wide = fma(numbers, scales[:, :, None].expand_as(numbers), self.least[rows][:, :, None])
        return wide.flatten(1)[:, : self.columns].contiguous()

    def product(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        x = F.pad(x, (0, self.numbers.shape[1] - x.shape[1]))
        rows, blocks = len(x), x.shape[1] // BLOCK
        cut = x.view(rows, blocks, BLOCK)
        most = cut.abs().amax(-1)
        live = most > TINIEST
        scale = torch.where(live, most / 127, 0)
        q = (cut * torch.where(live, 127 / most, 0)[:, :, None]).round()
        sums = scale * q.sum(-1)
        each = self.scales.shape[1] // blocks  # sub-blocks of a block: 1 or 2
        # Whole numbers below 2^24: exact in float32, whatever the order of the sums.
        numbers = self.numbers.view(len(self.numbers), blocks * each, -1).transpose(0, 1)
        parts = q.view(rows, blocks * each, -1).transpose(0, 1) @ numbers.transpose(1, 2)
        total = torch.zeros(rows, len(self.numbers))
        for i in range(blocks * each):
            b = i // each
            total = fma(parts[i] * self.scales[:, i], scale[:, b, None], total)
            if self.least is not None:
                total = fma(self.least[:, b].expand_as(total), sums[:, b, None], total)
        return total


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once to float32. The product is exact in float64. The sum is rounded to odd there, so that the
    rounding to float32 is the only one that counts.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    outwards = torch.where((error > 0) == (total > 0), 1, -1)
    bits += torch.where((error != 0) & (bits & 1 == 0), outwards, 0)
    return total.float()
