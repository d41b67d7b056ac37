"""Fixtures shared by the model's tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

torch.set_num_threads(2)

KERNELS = [
    pytest.param("c", marks=pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")),
    "torch",
]


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once a run, never taken from the user's cache."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param
