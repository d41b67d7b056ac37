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


def compiled(what: str) -> list[str]:
    """What `compile_kernels` says of each kernel."""
    command = [sys.executable, "-m", "tests.model.gpu.compile_kernels", what]
    there = {**os.environ, "TRITON_CACHE_DIR": str(cache_folder() / "triton")}
    done = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("sizes", sweep(["few", "every"], quick=["few"]))
def test_every_kernel_compiles(sizes: str) -> None:
    """In one size each, others being read alone; and in every size that a decoder launches."""
    sources = [file.read_text() for file in Path(outrider.__path__[0]).rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.M)}
    assert len(kernels) > 5
    lines = compiled(sizes)
    assert {line.split()[0] for line in lines} == kernels
    assert all(line.endswith(" 0 spilled") for line in lines), lines


def test_numbers_of_a_row_are_added_in_one_order() -> None:
    """Triton permutes numbers that come from 8 bits for `mma.sync`, and not for `wgmma`: a row would have other bits in
    a taller program.
    """
    lines = [line.split(", ") for line in compiled("orders") if line.startswith("_attend_kernel")]
    assert len(lines) >= 4 and {tuple(orders) for _, *orders in lines} == {("kWidth = 2",)}
