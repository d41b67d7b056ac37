"""Number formats of the KV cache: how a store holds the keys or values of a head. The C twin is
model/kernels/kv_formats.h.

`int8` keeps a scale of its own for each token and head: its largest number is 127. So what a token leaves in the cache
depends on that token alone, and a step's results do not depend on how tokens were read (log/117).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
SCALE = torch.float32.itemsize  # bytes, behind a head's numbers


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a head takes."""
    return head_dim + SCALE if dtype is torch.int8 else head_dim


def token_bytes(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values; `shapes` are the key heads and head size of each layer."""
    return 2 * sum(heads * stored_size(size, dtype) for heads, size in shapes) * dtype.itemsize


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., head_dim] as a store holds them."""
    if dtype is not torch.int8:
        return x.to(dtype)
    top = x.float().abs().amax(-1, keepdim=True)
    top = torch.where(top < 1e-30, 0.0, top)  # 127 / top would overflow
    inverse = 127 / torch.where(top > 0, top, 1.0)
    return torch.cat([(x * inverse).round().to(torch.int8), (top / 127).view(torch.int8)], -1)


def keep(store: Tensor, slots: Tensor, x: Tensor) -> None:
    """Puts keys or values [R, heads, head_dim] into the slots of a layer's store."""
    store[slots] = stored(x, store.dtype)


def widened(numbers: Tensor) -> Tensor:
    """What a store holds, as float32."""
    if numbers.dtype is not torch.int8:
        return numbers.float()
    return numbers[..., :-SCALE].float() * numbers[..., -SCALE:].contiguous().view(torch.float32)
