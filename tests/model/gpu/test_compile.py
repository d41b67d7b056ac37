"""What the interpreter runs, the compiler must take: every kernel is compiled for a Hopper GPU, with none at hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outrider
from outrider.settings import cache_folder
from tests.sweep import sweep

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("sizes", sweep(["few", "every"], quick=["few"]))
def test_every_kernel_compiles(sizes: str) -> None:
    """In one size each, others being read alone; and in every size that a decoder launches."""
    sources = [file.read_text() for file in Path(outrider.__path__[0]).rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.M)}
    assert len(kernels) > 5
    command = [sys.executable, "-m", "tests.model.gpu.compile_kernels", sizes]
    there = {**os.environ, "TRITON_CACHE_DIR": str(cache_folder() / "triton")}
    done = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == kernels
    assert all(line.endswith(" 0 spilled") for line in done.stdout.splitlines()), done.stdout


def test_numbers_of_a_row_are_added_in_one_order() -> None:
    """The compiler has `mma.sync` take numbers that come from 8 bits in an order of its own, and `wgmma` not: a row
    would have other bits in a taller program.
    """
    command = [sys.executable, "-m", "tests.model.gpu.compile_kernels", "orders"]
    there = {**os.environ, "TRITON_CACHE_DIR": str(cache_folder() / "triton")}
    done = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(", ") for line in done.stdout.splitlines() if line.startswith("_attend_kernel")]
    assert len(lines) >= 4 and {tuple(line[2:]) for line in lines} == {("kWidth = 2",)}
