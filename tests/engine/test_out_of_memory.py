"""Running out of memory, in words: before loading, while loading and in a step; in Python and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.cli.main import run
from outrider.engine import build
from outrider.engine.engine import Engine
from outrider.engine.memory import in_words
from outrider.errors import OutOfMemory, OutriderError
from tests.load.tiny import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "model"
    write_folder(path)
    return path


def too_much(*_: Any, **__: Any) -> Any:
    return torch.empty(1 << 60)  # no machine has it: torch's own error


def test_weights_and_cache_that_cannot_fit_are_refused_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    real = build.load_model
    monkeypatch.setattr(build, "load_model", lambda *given, **more: loaded.append("") or real(*given, **more))
    monkeypatch.setattr(build, "free_memory", lambda: 1 << 10)
    with pytest.raises(
        OutOfMemory, match=r"weights take .*, and 0 MiB is free; take --weights int8 or int4, or take a"
    ):
        LLM(folder)
    monkeypatch.setattr(build, "free_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemory, match=r"cache \(.*--cache-bytes"):
        LLM(folder, cache_bytes=1 << 40, max_sequences=1 << 14)
    assert not loaded
    with pytest.warns(UserWarning, match="take more than the 1 MiB that is free"), LLM(folder) as small:
        assert small.generate(
            "hello", max_tokens=1
        )  # the default cache size is only a bound, so this is a warning


def test_out_of_memory_while_loading_and_while_answering(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder) as llm:
        monkeypatch.setattr(Engine, "step", too_much)
        with pytest.raises(
            OutOfMemory, match=r"out of memory while answering, where .* more were needed; take a"
        ):
            llm.generate("hello", max_tokens=4)
        with pytest.raises(OutOfMemory):  # so do later requests
            llm.generate("hello", max_tokens=4)
    monkeypatch.setattr(build, "load_model", too_much)
    with pytest.raises(OutOfMemory, match="out of memory while loading the model"):
        LLM(folder)


def test_the_command_line_says_it_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "step", too_much)
    with pytest.raises(SystemExit) as left:
        run(["generate", str(folder), "hello", "--max-tokens", "4"])
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert left.value.code == 1 and len(err) == 1 and "out of memory while answering" in err[0]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (MemoryError(), ""),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "2.50 GiB"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."
            ),
            "4.0 GiB",
        ),
    ],
)
def test_every_allocator_is_understood(error: Exception, wanted: str) -> None:
    words = in_words(error, "testing")
    assert isinstance(words, OutOfMemory) and wanted in str(words) and words.__cause__ is error


def test_other_errors_stay_what_they_are() -> None:
    for error in (
        RuntimeError("a shape is wrong"),
        ValueError("out of memory"),
        OutriderError("out of memory"),
    ):
        assert in_words(error, "testing") is error
