"""Who waits for kernels hears what for, once; kernels that are on disk are not spoken of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from outrider.cli.output import open_llm
from outrider.engine import llm, memory
from outrider.model.kernels.gpu import compiling
from outrider.model.kernels.gpu.compiling import Compiled, watch_compiling
from outrider.settings import Settings
from tests.load.tiny import write_folder


def test_the_first_kernel_that_is_compiled_is_said_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(Compiled, "kernels", 0)
    monkeypatch.setattr(Compiled, "seconds", 0.0)
    said: list[int] = []
    watch_compiling(lambda: said.append(1))
    for hit in (True, False, True, False):
        triton.knobs.compilation.listener(
            src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=250_000), cache_hit=hit
        )
        assert len(said) == (Compiled.kernels > 0)
    assert (Compiled.kernels, Compiled.seconds) == (2, pytest.approx(0.5))


def test_a_command_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path)
    received: list[Callable[[], None]] = []

    def loaded(*given: Any, **options: Any) -> Any:
        received[0]()  # its first kernel had to be compiled
        return SimpleNamespace(memory=None)

    monkeypatch.setattr(memory, "runs_on_gpu", lambda settings: True)
    monkeypatch.setattr(compiling, "watch_compiling", received.append)
    monkeypatch.setattr(llm, "LLM", loaded)
    open_llm(str(tmp_path), "none", Settings())
    assert "compiling kernels for this GPU" in capsys.readouterr().err
