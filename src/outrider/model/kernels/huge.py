"""Memory for packed weights in huge pages, where the system has them. A pass reads every weight once: with pages of
4 KB the processor waits for the page table (log/104).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch
from torch import Tensor

CHUNK = 32 << 20  # bytes of one mapping: matrices of small models are smaller than a huge page
ALIGNED = 64


class HugePages:
    """Hands out tensors of a few large mappings. A mapping is freed with its last tensor; what no tensor has of it
    was never touched and takes no memory.
    """

    def __init__(self) -> None:
        self._left: Tensor = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        size = -(-made.nbytes // ALIGNED) * ALIGNED
        if size > len(self._left):
            if size > CHUNK // 2:
                return _mapped(size)[: made.nbytes].view(dtype).view(shape)
            self._left = _mapped(CHUNK)
        taken, self._left = self._left[: made.nbytes], self._left[size:]
        return taken.view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    advice: Any = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # The system may have no huge pages, or too little memory: torch's error says that better.
        with contextlib.suppress(OSError):
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(advice)
            return torch.frombuffer(mapping, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8)
