"""What settings leave to the device is settled, a GPU's memory shared out, and what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider import Settings
from outrider.engine.placement import Memory, cache_size, place, share_of_all
from outrider.errors import InvalidRequest, OutOfMemory

GIB = 1 << 30


def test_without_a_gpu_everything_is_for_the_cpu() -> None:
    placed = place(Settings(), None)
    assert (placed.device, placed.kv_cache_dtype, placed.weights) == ("cpu", "float32", "stored")
    assert (placed.max_sequences, placed.step_rows, placed.cache_bytes) == (64, 128, GIB)


def test_with_a_gpu_it_is_used_and_its_memory_shared_out() -> None:
    placed = place(Settings(), 100 * GIB)
    assert (placed.device, placed.kv_cache_dtype, placed.max_sequences) == ("cuda", "bfloat16", 512)
    assert placed.cache_bytes == 100 * GIB
    assert placed.weights == "bfloat16"


def test_a_cpu_keeps_weights_as_they_are_stored() -> None:
    placed = place(Settings(), None)
    assert (placed.weights, placed.draft_weights) == ("stored", "stored")
    for kind in ("float32", "bfloat16", "int8", "int4"):
        assert place(Settings(weights=kind), None).weights == kind


@pytest.mark.parametrize("whose", ["weights", "draft_weights"])
def test_fp8_needs_a_gpu(whose: str) -> None:
    asked = {whose: "fp8"}
    assert getattr(place(Settings(**asked), GIB), whose) == "fp8"
    assert place(Settings(**asked, device="cuda"), GIB).kv_cache_dtype == "bfloat16"
    for settle in (lambda: Settings(**asked, device="cpu"), lambda: place(Settings(**asked), None)):
        with pytest.raises(
            InvalidRequest, match=f"cpu stores {whose} as stored, float32, bfloat16, int8, int4, not as fp8"
        ) as refused:
            settle()
        assert refused.value.param == whose


def test_a_draft_is_stored_as_its_target_unless_it_is_said_how() -> None:
    assert place(Settings(weights="int8"), GIB).draft_weights == "int8"
    both = place(Settings(weights="int8", draft_weights="bfloat16"), GIB)
    assert (both.weights, both.draft_weights) == ("int8", "bfloat16")
    one = place(Settings(draft_weights="int4"), GIB)
    assert (one.weights, one.draft_weights) == ("bfloat16", "int4")
    for asked, kept in (("auto", "stored"), ("bfloat16", "bfloat16"), ("int4", "int4")):
        assert place(Settings(draft_weights=asked), None).draft_weights == kept


def test_what_was_asked_for_stays() -> None:
    asked = Settings(device="cpu", max_sequences=200, cache_bytes=5)
    placed = place(asked, None)
    assert (placed.max_sequences, placed.cache_bytes, placed.step_rows) == (200, 5, 200)


@pytest.mark.parametrize(
    ("options", "free", "param"),
    [
        ({"device": "cuda"}, None, "device"),
        ({"kv_cache_dtype": "float32"}, GIB, "kv_cache_dtype"),
        ({"weights": "float32"}, GIB, "weights"),
        ({"weights": "stored"}, GIB, "weights"),
        ({"draft_weights": "float32"}, GIB, "draft_weights"),
        ({"kernels": "c"}, GIB, "kernels"),
    ],
)
def test_what_cannot_be_is_named(options, free, param) -> None:
    with pytest.raises(InvalidRequest) as refused:
        place(Settings(**options), free)
    assert refused.value.param == param


def test_a_draft_gets_its_part_before_the_cache_is_sized() -> None:
    assert cache_size(100 * GIB, 0, 0.0) == 100 * GIB
    assert cache_size(100 * GIB, 20 * GIB, 0.0) == 80 * GIB
    assert cache_size(100 * GIB, 20 * GIB, 0.25) == 64 * GIB
    assert place(Settings(), 100 * GIB, 20 * GIB, 0.25).cache_bytes == 64 * GIB


def test_so_do_the_steps_as_measured() -> None:
    assert cache_size(100 * GIB, 20 * GIB, 0.25, 5 * GIB) == 60 * GIB
    assert place(Settings(), 100 * GIB, 20 * GIB, 0.25, working=5 * GIB).cache_bytes == 60 * GIB
    with pytest.raises(OutOfMemory, match=r"steps take 5.0 GiB, and 4.0 GiB is left.*--max-sequences"):
        cache_size(9 * GIB, 5 * GIB, 0.0, 5 * GIB)


def test_a_draft_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"take 9.0 GiB, and 8.0 GiB is free.*--draft-weights"
    ) as refused:
        place(Settings(cache_bytes=1), 8 * GIB, 9 * GIB)
    assert refused.value.param == "draft"


def test_what_was_asked_for_stays_with_a_draft() -> None:
    assert place(Settings(cache_bytes=GIB), 8 * GIB, GIB, 1.0).cache_bytes == GIB


def test_a_share_of_the_gpu_bounds_everything_on_it() -> None:
    """Of 100 GiB 70 are free: 30 are taken, by the weights or by others."""
    asked = Settings(gpu_memory_utilization=0.8)
    placed = place(asked, 70 * GIB, total=100 * GIB)
    assert placed.cache_bytes == cache_size(50 * GIB, 0, 0.0) == 50 * GIB
    assert place(asked, 70 * GIB, 10 * GIB, 0.25, 100 * GIB).cache_bytes == cache_size(
        50 * GIB, 10 * GIB, 0.25
    )
    assert place(placed, 20 * GIB, total=100 * GIB).cache_bytes == 50 * GIB  # settled is settled
    whole = place(Settings(gpu_memory_utilization=1), 70 * GIB, total=100 * GIB)
    assert whole == place(Settings(), 70 * GIB, total=100 * GIB)


def shared(free: int, share: float | None = None, **options: int) -> float | None:
    found = share_of_all(Settings(gpu_memory_utilization=share, **options), free * GIB, 100 * GIB)
    return found.gpu_memory_utilization


def test_what_is_asked_for_is_for_this_engine_alone() -> None:
    assert shared(100, 0.5) == pytest.approx(0.5)
    assert shared(60, 0.5) == pytest.approx(0.9)  # others have 0.4
    assert shared(50, 0.5) == pytest.approx(1.0)
    bound = share_of_all(Settings(gpu_memory_utilization=0.5), 60 * GIB, 100 * GIB)
    assert place(bound, 45 * GIB, total=100 * GIB).cache_bytes == pytest.approx(35 * GIB)  # weights have 15


def test_unless_asked_nearly_all_that_is_free_is_taken() -> None:
    assert shared(100) == pytest.approx(0.92)
    assert shared(50) == pytest.approx(0.92)
    assert shared(10) == pytest.approx(0.96)  # little is free: six tenths of it
    assert shared(10, cache_bytes=GIB) is None


@pytest.mark.parametrize(
    ("settle", "says"),
    [
        (lambda: shared(60, 0.7), r"asks for 70.0 GiB of 100.0 GiB, and 60.0 GiB is free.*at most 0.6,"),
        (lambda: Settings(gpu_memory_utilization=0), r"must be in \(0, 1\]"),
        (lambda: Settings(gpu_memory_utilization=1.1), r"must be in \(0, 1\]"),
        (lambda: Settings(gpu_memory_utilization=0.5, cache_bytes=1), "leave out one of them"),
        (lambda: Settings(gpu_memory_utilization=0.5, device="cpu"), "--cache-bytes"),
        (lambda: place(Settings(gpu_memory_utilization=0.5), None), "--cache-bytes"),
        (
            lambda: place(Settings(gpu_memory_utilization=0.25), 70 * GIB, total=100 * GIB),
            r"allows 25.0 GiB of 100.0 GiB, and 30.0 GiB is taken",
        ),
    ],
)
def test_a_share_that_cannot_be_is_refused(settle: Callable[[], Settings], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        settle()
    assert refused.value.param == "gpu_memory_utilization"


def test_memory_reads_as_a_line() -> None:
    memory = Memory(15 * GIB, 700 << 20, 72 * GIB + GIB // 2, 593_920, 48 * GIB)
    assert memory.describe() == (
        "15.0 GiB weights, 700 MiB draft, 72.5 GiB cache for 593920 tokens, 48.0 GiB left for graphs and logits"
    )
