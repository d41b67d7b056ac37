"""Memory for packed weights: what is handed out lies apart, aligned, and is as large as asked for."""

from __future__ import annotations

import mmap

import pytest
import torch

from outrider.model.kernels.huge import ALIGNED, CHUNK, HugePages

SHAPES = [(3, 5, 16), (1, 7), (CHUNK // 8,), (0, 16), (2, 33), (CHUNK // 2 + 1,), (CHUNK // 3,), (4, 4)]


@pytest.mark.parametrize("advised", [True, False])
def test_tensors_lie_apart(advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not advised:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    pages = HugePages()
    dtypes = [(torch.float32, torch.int32, torch.uint8)[i % 3] for i in range(len(SHAPES))]
    made = [pages.empty(*shape, dtype=dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    for number, (one, shape, dtype) in enumerate(zip(made, SHAPES, dtypes, strict=True)):
        assert (one.shape, one.dtype) == (shape, dtype)
        assert one.is_contiguous() and one.data_ptr() % ALIGNED == 0
        one.fill_(number)
    for number, one in enumerate(made):
        assert (one == number).all(), number


def test_memory_outlives_what_hands_it_out() -> None:
    one = HugePages().empty(64, dtype=torch.float32).fill_(7)
    assert (one == 7).all()
