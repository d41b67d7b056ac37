"""The kernel of the losses against its twin in torch, on a CUDA device or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.distill import losses_gpu
from outrider.distill.losses import LOSSES, Targets, divergence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("words", "known"), [(16, 1.0), (37, 0.6), (5, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_says_what_its_twin_says(
    monkeypatch, kind: str, words: int, known: float, dtype: torch.dtype
) -> None:
    """With rows shorter than a block, of several blocks, and with a last block that is not full."""
    monkeypatch.setattr(losses_gpu, "BLOCK", 16)
    torch.manual_seed(words)
    wide = torch.tensor([0.5, 3.0, 30.0])[:, None].repeat(4, 1)
    logits = (torch.randn(12, words) * wide).to(DEVICE, dtype)
    p = (known * (3 * torch.randn(12, words)).softmax(-1)).to(DEVICE)
    p[3, 1:] = 0  # all of it on one word, and words that the target never writes
    weights = torch.rand(12, device=DEVICE)
    made = losses_gpu.fused_divergence(kind, logits, Targets.of(p), weights)
    twin = divergence(kind, logits.float(), Targets.of(p), weights)
    torch.testing.assert_close(made.loss, twin.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.overlap, twin.overlap, rtol=1e-4, atol=1e-6)
    near = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(made.gradient.float(), twin.gradient, **near)
