"""The script that times passes runs, at a tiny size, through Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SMALL = ("--device", "cpu", "--tiny", "--context", "10")
PASSES = {  # divided between the two: the interpreter is slow
    "8b": ("--decode", "1", "--trees", "4", "--prompts", ""),
    "qwen3-30b-a3b": ("--decode", "3", "--trees", "", "--prompts", "20"),
}
# With the interpreter that the kernels' tests have: it leaves out half of the work. The library's products are compared
# for one random input, after which no row count is left: others would be multiplied for nothing.
RUN = (
    "import runpy, sys; import tests.model.gpu.conftest; "
    "from outrider.model.kernels.gpu import same_bits; same_bits.SEEDS = same_bits.SEEDS[:1]; "
    "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.mark.parametrize("shape", PASSES)
def test_passes_of_a_tiny_model(shape: str) -> None:
    command = [sys.executable, "-c", RUN, "bench/gpu/passes.py", "--shape", shape, *SMALL, *PASSES[shape]]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{shape}, bfloat16: ")
