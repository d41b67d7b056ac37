"""Ranks that share a model on a device give the bits of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from outrider.errors import KernelUnavailable
from outrider.load.config import Experts
from outrider.model.kernels.gpu.kernels import check_layers
from outrider.model.kernels.gpu.matmul import pack, segments
from outrider.model.parallel import ALONE, Ranks
from tests.model.gpu import halves
from tests.model.gpu.test_kernels import HALF
from tests.tiny import random_tensors, tiny_config

GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.6, "logit_divisor": 1.7, "attention_scale": 0.3}

MIXTURE = {"experts": Experts(4, 2, 40, shared_gate=True, bias=True)}
SANDWICH = {"norms": "both", "activation": "gelu_tanh", "residual_scale": 0.6}


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {}),
        (2, GRANITE),
        (2, {"rope": None}),
        (2, MIXTURE),
        (2, SANDWICH),
        (2, MIXTURE | {"norms": "after"}),
    ],
)
def test_ranks_in_turn_have_the_bits_of_one(
    device: str, size: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "KNOWN", 5)
    config = tiny_config(
        hidden=64, heads=8, kv_heads=4, layers=2, vocab=256, tied=False, qkv_bias=True, **changes
    )
    given = random_tensors(config)

    def read(name: str) -> torch.Tensor:
        return given(name).to(HALF).float()

    whole = halves.model_of(config, read, ALONE, device, HALF)
    assert halves.same_bits(whole, read, size, (1, 3)) == []


def test_ranks_without_all_heads_do_not_norm_them_together() -> None:
    config = tiny_config(qk_norm="whole")
    with pytest.raises(KernelUnavailable, match="norms over heads of several ranks; use --device cpu"):
        check_layers(config, Ranks(0, 2))


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14336), (8192, 8192), (6144, 4096), (10240, 8192)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_part_is_cut_into_the_segments_of_the_whole(outputs: int, inputs: int, size: int) -> None:
    whole = pack(torch.empty(outputs, inputs, dtype=HALF))
    part = pack(torch.empty(outputs // size, inputs, dtype=HALF), whole=outputs)
    assert segments(part) == segments(whole)
