"""What is left to the device, settled; what cannot be, said by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider import Settings
from outrider.control.guards import Guards
from outrider.engine.planning import guards_of
from outrider.errors import InvalidRequest, OutOfMemory
from outrider.settings import Memory, cache_room, free_memory

GIB = 1 << 30


def test_without_a_gpu_everything_is_for_the_cpu() -> None:
    placed = Settings().placed(None)
    assert (placed.device, placed.dtype, placed.weights) == ("cpu", "float32", "float32")
    assert (placed.max_sequences, placed.step_rows, placed.cache_bytes) == (64, 128, GIB)


def test_with_a_gpu_it_is_used_and_its_memory_shared_out() -> None:
    placed = Settings().placed(100 * GIB)
    assert (placed.device, placed.dtype, placed.max_sequences) == ("cuda", "bfloat16", 512)
    assert placed.cache_bytes == 100 * GIB
    assert placed.weights == "bfloat16"


def test_a_cpu_keeps_a_model_as_float32_and_its_draft_as_bfloat16() -> None:
    placed = Settings().placed(None)
    assert (placed.weights, placed.draft_weights) == ("float32", "bfloat16")
    assert Settings(weights="bfloat16").placed(None).weights == "bfloat16"


@pytest.mark.parametrize("whose", ["weights", "draft_weights"])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_weights_in_fewer_bits_need_a_gpu(whose: str, kind: str) -> None:
    asked = {whose: kind}
    assert getattr(Settings(**asked).placed(GIB), whose) == kind
    assert Settings(**asked, device="cuda").placed(GIB).dtype == "bfloat16"
    for settle in (lambda: Settings(**asked, device="cpu"), lambda: Settings(**asked).placed(None)):
        with pytest.raises(
            InvalidRequest, match=f"cpu stores {whose} as float32, bfloat16, not as {kind}"
        ) as refused:
            settle()
        assert refused.value.param == whose


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("cache_bytes", "1G", "a whole number"),
        ("threads", 2.5, "a whole number"),
        ("context", True, "a whole number"),
        ("context", None, "a whole number"),
        ("prefill_wait", "soon", "a number"),
        ("prefix_reuse", 1, "True or False"),
        ("device", None, "a string"),
    ],
)
def test_values_of_another_kind_are_named(name: str, value: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be {words}, got {value!r}") as refused:
        Settings(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert Settings(draft_max_batch=None, prefill_wait=1).prefill_wait == 1


@pytest.mark.parametrize("name", ["threads", "draft_vocabulary", "prefill_at_once"])
def test_numbers_below_nothing_are_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be at least 0, got -1") as refused:
        Settings(**{name: -1})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert getattr(Settings(**{name: 0}), name) >= 0


@pytest.mark.parametrize("whose", ["weights", "draft_weights"])
def test_weights_that_are_misspelt_are_named(whose: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown {whose} 'int9'; did you mean 'int8'") as refused:
        Settings(**{whose: "int9"})
    assert refused.value.param == whose


def test_a_draft_is_stored_as_its_target_unless_it_is_said_how() -> None:
    assert Settings(weights="int8").placed(GIB).draft_weights == "int8"
    both = Settings(weights="int8", draft_weights="bfloat16").placed(GIB)
    assert (both.weights, both.draft_weights) == ("int8", "bfloat16")
    one = Settings(draft_weights="int4").placed(GIB)
    assert (one.weights, one.draft_weights) == ("bfloat16", "int4")
    for asked, kept in (("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert Settings(draft_weights=asked).placed(None).draft_weights == kept


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
        ({"draft_weights": "float32"}, GIB, "draft_weights"),
        ({"kernels": "c"}, GIB, "kernels"),
        ({"prompt_matmul": "own"}, None, "prompt_matmul"),
        ({"prompt_matmul": "cublas"}, GIB, "prompt_matmul"),
    ],
)
def test_what_cannot_be_is_named(options, free, param) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Settings(**options).placed(free)
    assert refused.value.param == param


# ----------------------------------------------------------------------------------------- a GPU's memory


def test_a_draft_gets_its_part_before_the_cache_is_sized() -> None:
    assert cache_room(100 * GIB, 0, 0.0) == 100 * GIB
    assert cache_room(100 * GIB, 20 * GIB, 0.0) == 80 * GIB
    assert cache_room(100 * GIB, 20 * GIB, 0.25) == 64 * GIB
    assert Settings().placed(100 * GIB, 20 * GIB, 0.25).cache_bytes == 64 * GIB


def test_so_do_the_steps_as_measured() -> None:
    assert cache_room(100 * GIB, 20 * GIB, 0.25, 5 * GIB) == 60 * GIB
    assert Settings().placed(100 * GIB, 20 * GIB, 0.25, working=5 * GIB).cache_bytes == 60 * GIB
    with pytest.raises(OutOfMemory, match=r"steps take 5.0 GiB, and 4.0 GiB is left.*--max-sequences"):
        cache_room(9 * GIB, 5 * GIB, 0.0, 5 * GIB)


def test_a_draft_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"take 9.0 GiB, and 8.0 GiB is free.*--draft-weights"
    ) as refused:
        Settings(cache_bytes=1).placed(8 * GIB, 9 * GIB)
    assert refused.value.param == "draft"


def test_what_was_asked_for_stays_with_a_draft() -> None:
    assert Settings(cache_bytes=GIB).placed(8 * GIB, GIB, 1.0).cache_bytes == GIB


def test_a_share_of_the_gpu_bounds_everything_on_it() -> None:
    """Of 100 GiB 70 are free: 30 are taken, by the weights or by others."""
    asked = Settings(gpu_memory_utilization=0.8)
    placed = asked.placed(70 * GIB, total=100 * GIB)
    assert placed.cache_bytes == cache_room(50 * GIB, 0, 0.0) == 50 * GIB
    assert asked.placed(70 * GIB, 10 * GIB, 0.25, 100 * GIB).cache_bytes == cache_room(
        50 * GIB, 10 * GIB, 0.25
    )
    assert placed.placed(20 * GIB, total=100 * GIB).cache_bytes == 50 * GIB  # settled is settled
    whole = Settings(gpu_memory_utilization=1).placed(70 * GIB, total=100 * GIB)
    assert whole == Settings().placed(70 * GIB, total=100 * GIB)


def shared(free: int, share: float | None = None, **options: int) -> float | None:
    found = Settings(gpu_memory_utilization=share, **options).bounded(free * GIB, 100 * GIB)
    return found.gpu_memory_utilization


def test_what_is_asked_for_is_for_this_engine_alone() -> None:
    assert shared(100, 0.5) == pytest.approx(0.5)
    assert shared(60, 0.5) == pytest.approx(0.9)  # others have 0.4
    assert shared(50, 0.5) == pytest.approx(1.0)
    bound = Settings(gpu_memory_utilization=0.5).bounded(60 * GIB, 100 * GIB)
    assert bound.placed(45 * GIB, total=100 * GIB).cache_bytes == pytest.approx(35 * GIB)  # weights have 15


def test_unless_asked_nearly_all_that_is_free_is_taken() -> None:
    assert shared(100) == pytest.approx(0.92)
    assert shared(50) == pytest.approx(0.92)
    assert shared(10) == pytest.approx(0.96)  # little is free: six tenths of it
    assert shared(10, cache_bytes=GIB) is None


@pytest.mark.parametrize(
    ("settle", "says"),
    [
        (lambda: shared(60, 0.7), r"asks for 70.0 GiB of 100.0 GiB, and 60.0 GiB is free.*at most 0.6,"),
        (lambda: Settings(gpu_memory_utilization=0), "above 0, at most 1"),
        (lambda: Settings(gpu_memory_utilization=1.1), "above 0, at most 1"),
        (lambda: Settings(gpu_memory_utilization=0.5, cache_bytes=1), "leave out one of them"),
        (lambda: Settings(gpu_memory_utilization=0.5, device="cpu"), "--cache-bytes"),
        (lambda: Settings(gpu_memory_utilization=0.5).placed(None), "--cache-bytes"),
        (
            lambda: Settings(gpu_memory_utilization=0.25).placed(70 * GIB, total=100 * GIB),
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


def test_a_container_s_memory_limit_counts(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4194304 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "1000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == 4 << 30
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1001000\n")
    assert free_memory(tmp_path) == 1_000_000
    assert free_memory(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "low", "bad"),
    [
        ("draft_max_batch", 0, -1),
        ("tree_max_batch", 0, -1),
        ("draft_max_depth", 1, 64),
        ("draft_max_temperature", 0, float("nan")),
        ("draft_flat_temperature", 0, -0.1),
        ("draft_break_even", 1, 0.9),
        ("draft_patience", 1, 0),
        ("draft_max_stretch", 1, 0.99),
        ("draft_probe_share", 0, 1.5),
        ("draft_baseline_interval", 1, 0),
        ("objective", "latency", "speed"),
    ],
)
def test_bounds_of_the_planner(name: str, low: object, bad: object) -> None:
    guards = guards_of(Settings(**{name: low}))
    field = {"tree_max_batch": "tree_batch"}.get(name, name.removeprefix("draft_"))
    assert getattr(guards, field) == low and guards != guards_of(Settings())
    with pytest.raises(InvalidRequest, match=name) as refused:
        Settings(**{name: bad})
    assert refused.value.param == name


def test_usual_bounds_are_the_guards_own() -> None:
    assert guards_of(Settings()) == Guards()
