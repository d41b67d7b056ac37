"""Modules of transformers converted so that no row's result depends on the rows beside it, to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class RowLinear(nn.Module):
    """A linear layer whose rows do not depend on each other, to the last bit."""

    def __init__(self, kernels: Any, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.kernels = kernels
        self.packed = kernels.pack_linear(
            weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).float().contiguous()
        out = self.kernels.linear(self.packed, flat)
        return out.view(*x.shape[:-1], out.shape[-1])


class TiedEmbedding(nn.Module):
    """Embeds from the head's packed weights: a tied embedding needs no second copy."""

    def __init__(self, head: RowLinear) -> None:
        super().__init__()
        self.head = [head]  # in a list: not a submodule twice

    def forward(self, ids: Tensor) -> Tensor:
        head = self.head[0]
        return head.kernels.embed(head.packed, ids.flatten()).view(*ids.shape, -1)


class EachRow(nn.Module):
    """An elementwise module, one row at a time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).split(1)
        return torch.cat([self.inner(row) for row in rows]).view(x.shape)


class EachPosition(nn.Module):
    """Rotary tables, one position at a time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> tuple[Tensor, ...]:
        each = [self.inner(x, p, *more, **named) for p in position_ids.split(1, dim=1)]
        return tuple(torch.cat(part, dim=1) for part in zip(*each, strict=True))


def make_rows_independent(model: nn.Module, kernels: Any) -> None:
    """Replaces, in place, every module whose result for a row could depend on the rows beside it."""
    linears: dict[int, RowLinear] = {}  # by the weight they came from
    embeddings: list[tuple[nn.Module, str, int]] = []
    for parent in list(model.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            if type(child) is nn.Embedding:
                embeddings.append((parent, name, child.weight.data_ptr()))
            elif type(child) is nn.Linear:
                linear = RowLinear(kernels, child.weight, child.bias)
                linears[child.weight.data_ptr()] = linear
                setattr(parent, name, linear)
            elif type(child) is Conv1D:
                setattr(parent, name, RowLinear(kernels, child.weight.T, child.bias))
            elif type(child).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
                setattr(parent, name, EachRow(child))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, EachPosition(child))
    for parent, name, weight in embeddings:
        if weight in linears:
            setattr(parent, name, TiedEmbedding(linears[weight]))
