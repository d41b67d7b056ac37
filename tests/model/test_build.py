"""Building the C kernels: kept once built; every way to fail has a name, and torch to fall back on."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
import torch

from outrider.errors import KernelUnavailable
from outrider.load.config import ModelConfig
from outrider.model.decoder import make_kernels
from outrider.model.kernels.build import _key, library
from outrider.model.kernels.native import read_bandwidth
from tests.model.batches import Reader, random_ids
from tests.model.families import NEEDS_COMPILER, VOCAB, ours
from tests.sweep import sweep


@pytest.fixture
def config(kernel_folder: Path) -> ModelConfig:
    return ours("llama", "torch", kernel_folder).config


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CC", raising=False)


def fake_compiler(tmp_path: Path, script: str) -> str:
    file = tmp_path / "compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_no_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: ModelConfig) -> None:
    no_compiler(monkeypatch, tmp_path)
    with pytest.raises(KernelUnavailable, match=r"no C compiler found; install a C compiler .* or set CC"):
        make_kernels(config, 64, 1, tmp_path, "c")


def test_auto_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: ModelConfig
) -> None:
    no_compiler(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match="plain torch, several times slower: no C compiler"):
        assert make_kernels(config, 64, 1, tmp_path, "auto").name == "torch"


def test_torch_on_request_warns_of_nothing(
    recwarn: pytest.WarningsRecorder, tmp_path: Path, config: ModelConfig
) -> None:
    assert make_kernels(config, 64, 1, tmp_path, "torch").name == "torch"
    own = [
        one for one in recwarn.list if issubclass(one.category, UserWarning)
    ]  # not of files left open elsewhere
    assert not own and not list(tmp_path.iterdir())


def test_a_failing_compiler_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: ModelConfig
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "echo 'cpu.c:1: no such luck' >&2; exit 1"))
    folder = tmp_path / "kernels"
    with pytest.raises(KernelUnavailable, match="no such luck"):
        make_kernels(config, 64, 1, folder, "c")
    assert not list(folder.iterdir()), "nothing half-built is left behind"


def test_a_compiler_that_writes_nonsense_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: ModelConfig
) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    with pytest.raises(KernelUnavailable, match="cannot be loaded"):
        make_kernels(config, 64, 1, tmp_path / "kernels", "c")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailable, match=r"no place for the built kernels|no C compiler"):
        make_kernels(config, 64, 1, tmp_path / "file" / "kernels", "c")


@NEEDS_COMPILER
@pytest.mark.parametrize("damage", sweep(["", "\x7fELF garbage"], quick=["\x7fELF garbage"]))
def test_a_damaged_library_is_built_again(
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kernel_folder: Path,
    config: ModelConfig,
) -> None:
    """By a compiler that copies: the real one built the library that it copies."""
    good = Path(library(kernel_folder)._name)
    script = f'while [ "$1" != -o ]; do shift; done; cp \'{good}\' "$2"'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    damaged = tmp_path / "kernels" / f"cpu-{_key()}.so"
    damaged.parent.mkdir()
    damaged.write_text(damage)
    assert make_kernels(config, 64, 1, damaged.parent, "c").name == "c"
    assert [*damaged.parent.iterdir()] == [damaged] and damaged.read_bytes() == good.read_bytes()


@NEEDS_COMPILER
def test_a_built_library_is_not_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_folder: Path
) -> None:
    good = Path(library(kernel_folder)._name)
    shutil.copy(good, tmp_path)
    monkeypatch.setattr("outrider.model.kernels.build._compile", lambda path: pytest.fail("compiled again"))
    library(tmp_path)


@NEEDS_COMPILER
def test_a_head_size_the_vectors_cannot_hold_is_named(tmp_path: Path, config: ModelConfig) -> None:
    odd = config.reshaped(head_dim=24)
    with pytest.raises(KernelUnavailable, match="head size 24 is not a multiple of 16"):
        make_kernels(odd, 64, 1, tmp_path, "c")
    with pytest.warns(UserWarning, match="head size 24"):
        assert make_kernels(odd, 64, 1, tmp_path, "auto").name == "torch"


@NEEDS_COMPILER
def test_threads_do_not_change_a_bit(kernel_folder: Path) -> None:
    ids, logits = random_ids(VOCAB, 20), []
    for threads in (1, 2, 3):
        model = ours("llama-odd-sizes", "c", kernel_folder, threads)
        logits.append(Reader(model.config).read(model, ids))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@NEEDS_COMPILER
def test_bandwidth_is_a_speed(kernel_folder: Path) -> None:
    assert read_bandwidth(1, kernel_folder, megabytes=16) > 1e8
