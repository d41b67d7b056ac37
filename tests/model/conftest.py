"""Fixtures shared by the model's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.families import KERNELS


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once a run, never taken from the user's cache."""
    return tmp_path_factory.mktemp("cache") / "kernels"


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param
