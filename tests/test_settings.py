"""What is left to the device, settled; what cannot be, said by name."""

from __future__ import annotations

import pytest

from outrider import Settings
from outrider.errors import InvalidRequest

GIB = 1 << 30


def test_without_a_gpu_everything_is_for_the_cpu() -> None:
    placed = Settings().placed(None)
    assert (placed.device, placed.dtype, placed.weights) == ("cpu", "float32", "float32")
    assert (placed.max_sequences, placed.step_rows, placed.cache_bytes) == (64, 128, GIB)


def test_with_a_gpu_it_is_used_and_its_memory_shared_out() -> None:
    placed = Settings().placed(100 * GIB)
    assert (placed.device, placed.dtype, placed.max_sequences) == ("cuda", "bfloat16", 512)
    assert placed.cache_bytes == 60 * GIB
    assert placed.weights == "bfloat16"


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "int8", "int4"])
def test_weights_in_fewer_bits_need_a_gpu(kind: str) -> None:
    assert Settings(weights=kind).placed(GIB).weights == kind
    assert Settings(weights=kind, device="cuda").placed(GIB).dtype == "bfloat16"
    for settle in (lambda: Settings(weights=kind, device="cpu"), lambda: Settings(weights=kind).placed(None)):
        with pytest.raises(InvalidRequest, match=f"cpu stores weights as float32, not as {kind}") as refused:
            settle()
        assert refused.value.param == "weights"


def test_weights_that_are_misspelt_are_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown weights 'int9'; did you mean 'int8'") as refused:
        Settings(weights="int9")
    assert refused.value.param == "weights"


def test_what_was_asked_for_stays() -> None:
    asked = Settings(device="cpu", max_sequences=200, cache_bytes=5)
    placed = asked.placed(None)
    assert (placed.max_sequences, placed.cache_bytes, placed.step_rows) == (200, 5, 200)


@pytest.mark.parametrize(
    ("options", "free", "param"),
    [
        ({"device": "cuda"}, None, "device"),
        ({"dtype": "bfloat16"}, None, "dtype"),
        ({"dtype": "float32"}, GIB, "dtype"),
        ({"weights": "float32"}, GIB, "weights"),
        ({"kernels": "c"}, GIB, "kernels"),
    ],
)
def test_what_cannot_be_is_named(options, free, param) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Settings(**options).placed(free)
    assert refused.value.param == param
