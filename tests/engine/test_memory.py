"""What is loaded on a GPU, as what, and where its memory goes; told by a machine that has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from outrider import LLM, Settings
from outrider.draft.names import parse_draft
from outrider.engine import build
from outrider.engine.build import Built, Reshape
from outrider.engine.memory import LOGITS_KEPT, working_memory
from outrider.engine.placement import Memory, cache_size
from outrider.errors import InvalidRequest
from outrider.load.checkpoint import open_checkpoint
from outrider.model.parallel import ALONE
from tests.load.tiny import write_folder
from tests.tiny import tiny_model

GIB = 1 << 30


class Gpu:
    """Stands in for everything that needs one: says what is free, keeps what was loaded and how."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.free = [10 * GIB]  # the last one is for ever
        self.held = [0]  # bytes of tensors; the last one is for ever
        self.loaded: list[str | None] = []
        self.working, self.measured = 0, list[tuple[int, int]]()
        self.drafters: dict[str, Any] = {"lookup": None}
        self.sources: Any = None
        monkeypatch.setattr(build.GpuMeter, "held", lambda: self.next(self.held))
        monkeypatch.setattr(build, "gpu_memory", lambda: (self.next(self.free), 10 * GIB))
        monkeypatch.setattr(build, "runs_on_gpu", lambda s: True)
        monkeypatch.setattr(build, "working_memory", self.work)
        monkeypatch.setattr(build, "load_model", self.load)
        monkeypatch.setattr(build, "Engine", lambda *given: given)
        monkeypatch.setattr(build, "make_kv_cache", self.cache)
        monkeypatch.setattr(build, "make_drafters", self.draft)
        monkeypatch.setattr(build, "kv_bytes", lambda model: 1 << 10)
        monkeypatch.setattr(build, "make_graph_runner", lambda *given: None)

    @staticmethod
    def next(values: list[int]) -> int:
        return values.pop(0) if values[1:] else values[0]

    def draft(self, parts: Any, sources: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        self.sources, names = sources, tuple(self.drafters)
        return {**self.drafters, "+".join(names): None}, names

    def load(
        self,
        checkpoint: Any,
        settings: Settings,
        weights: str | None = None,
        watch: Any = None,
        group: Any = ALONE,
    ) -> Any:
        self.loaded.append(weights)
        place, kind = SimpleNamespace(type="cuda"), torch.bfloat16
        return SimpleNamespace(
            device=place,
            config=checkpoint.config,
            group=group,
            dtype=kind,
            kept=kind,
            weight_bytes=lambda: 3 * GIB,
        )

    def work(self, model: Any, settings: Settings, meter: Any) -> int:
        self.measured.append((settings.step_rows, settings.max_sequences))
        return self.working

    def cache(self, model: Any, settings: Settings) -> Any:
        table = SimpleNamespace(pool=SimpleNamespace(total=settings.cache_bytes >> 10))
        return SimpleNamespace(store=None, table=table, context=128)

    def build(self, draft: str, reshape: Reshape | None = None, **options: Any) -> Built:
        checkpoint, parts = open_checkpoint(self.folder), parse_draft(draft)
        return build.build_engine(checkpoint, parts, None, Settings(**options), reshape or Reshape())


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    write_folder(tmp_path)
    return Gpu(tmp_path, monkeypatch)


def numbers(folder: Path) -> int:
    opened = open_checkpoint(folder)
    return sum(opened.tensor(name).numel() for name in opened.names())


@pytest.mark.parametrize(("asked", "stored"), [("auto", "int8"), ("int4", "int4"), ("bfloat16", "bfloat16")])
def test_a_draft_is_loaded_as_the_settings_say(gpu: Gpu, asked: str, stored: str) -> None:
    gpu.drafters["lm"] = None
    gpu.build("lookup", weights="int8", draft_weights=asked)
    gpu.sources.load(open_checkpoint(gpu.folder))
    assert gpu.loaded == [None, stored]


def test_a_widened_draft_is_loaded_the_same_way(gpu: Gpu) -> None:
    gpu.drafters["lm"], seen, small = None, [], open_checkpoint(gpu.folder)
    reshape = Reshape(draft=lambda found: seen.append(found) or SimpleNamespace(config="wide"))
    gpu.build("lookup", reshape, draft_weights="int8")
    assert gpu.sources.load(small).config == "wide"
    assert (gpu.loaded, seen) == ([None, "int8"], [small])


def test_room_is_left_for_a_draft_in_the_shape_that_is_loaded(gpu: Gpu) -> None:
    """The memory set aside for a draft is that of the checkpoint that will be loaded."""
    gpu.drafters["lm"], gpu.free = None, [GIB // 1024]
    wide = SimpleNamespace(
        names=lambda: ["a"], shape=lambda name: (100, 100), stored_format=lambda name: "Q8_0"
    )
    made = gpu.build(str(gpu.folder), Reshape(draft=lambda found: wide), draft_weights="int8")
    assert made.settings.cache_bytes == pytest.approx(cache_size(int(0.6 * gpu.free[0]), 10**4, 0.0), abs=8)


def test_the_cache_leaves_room_for_a_draft_to_come(gpu: Gpu) -> None:
    gpu.free = [GIB // 1024]
    gpu.drafters["lm"] = None
    gpu.patch.setattr(build, "kv_bytes", lambda model: 2 * model.config.kv_numbers)
    made = gpu.build(f"lookup+{gpu.folder}+early_exit:1", draft_weights="int8")
    room = cache_size(int(0.6 * gpu.free[0]), numbers(gpu.folder), 1.0)  # itself as its draft
    assert made.settings.cache_bytes == pytest.approx(room, abs=8)


def test_without_a_draft_model_nothing_is_set_aside_or_looked_for(gpu: Gpu) -> None:
    def looked(*given: Any) -> Path:
        raise AssertionError(given)

    gpu.patch.setattr(build, "find", looked)
    for draft in ("auto", "none", "lookup+early_exit:2", "early_exit"):
        assert gpu.build(draft).settings.cache_bytes == int(0.92 * 10 * GIB)


def test_what_is_wrong_with_a_draft_is_left_to_who_loads_it(gpu: Gpu) -> None:
    assert gpu.build("/no/such/draft").settings.cache_bytes == int(0.92 * 10 * GIB)


def test_memory_is_what_was_measured(gpu: Gpu) -> None:
    """Free twice before anything, beside the weights, beside kernels, and in the end, when another process took 2 GiB.
    A draft takes what this process's tensors grew by.
    """
    gpu.free = [10 * GIB, 10 * GIB, 7 * GIB, 6 * GIB, GIB]
    gpu.held = [7 * GIB, 8 * GIB]
    gpu.working = 2 * GIB
    made = gpu.build("lookup", gpu_memory_utilization=1)
    assert made.memory == Memory(3 * GIB, GIB, 4 * GIB, 4 * GIB >> 10, GIB)


def test_the_steps_that_will_run_are_measured_unless_the_cache_has_a_size(gpu: Gpu) -> None:
    gpu.build("none", max_sequences=64)
    gpu.build("none", max_sequences=32, step_rows=700)
    gpu.build("none", cache_bytes=GIB)
    assert gpu.measured == [(8192, 64), (700, 32)]


class Counted:
    """A meter of two measurements."""

    def __init__(self, *most: int) -> None:
        self.found, self.started = list(most), 0

    def start(self) -> None:
        self.started += 1

    def most(self) -> int:
        return self.found.pop(0)


@pytest.mark.parametrize(("context", "rows"), [(256, 40), (32, 100)])
def test_the_largest_pass_is_run_and_all_that_sequences_hold_is_made(context: int, rows: int) -> None:
    """With prompts longer than a step, and shorter."""
    model, meter, passes = tiny_model(), Counted(1000, 200), []
    forward = model.forward
    model.forward = lambda batch, store: passes.append(batch) or forward(batch, store)  # type: ignore[method-assign]
    settings = Settings(max_sequences=8, step_rows=rows, context=context)
    logits = 8 * model.config.vocab * 4
    assert working_memory(model, settings, meter) == 1000 + 200 + LOGITS_KEPT * logits
    [batch] = passes
    assert (batch.rows, len(batch.logit_rows), meter.started) == (rows, 8, 2)
    assert int(batch.positions.max()) < context


def test_a_draft_format_with_no_draft_model_is_refused(gpu: Gpu) -> None:
    with pytest.raises(InvalidRequest, match=r"there is none \(draft: lookup\)") as refused:
        gpu.build("lookup", draft_weights="int8")
    assert refused.value.param == "draft_weights"


def test_a_cpu_has_no_such_plan(gpu: Gpu) -> None:
    gpu.patch.undo()
    with LLM(gpu.folder, draft=str(gpu.folder), device="cpu") as made:
        assert made.memory is None
        assert (made.settings.draft_weights, made.drafter) == ("stored", "lm")


def test_a_gpu_recalls_no_costs_because_captured_steps_are_measured(gpu: Gpu) -> None:
    *_, costs = gpu.build("lookup").engine  # type: ignore[misc]
    assert costs is None


def test_a_small_model_reads_more_rows_a_step_unless_told_otherwise(gpu: Gpu) -> None:
    rows = {}
    for small, asked in ((10**12, 0), (1, 0), (10**12, 700)):
        gpu.patch.setattr(build, "LAUNCH_BOUND", small)
        rows[small, asked] = gpu.build("none", step_rows=asked, max_sequences=64).settings.step_rows
    assert rows == {(10**12, 0): 8192, (1, 0): 2048, (10**12, 700): 700}
