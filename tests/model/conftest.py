"""Fixtures shared by the model's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.settings import cache_folder
from tests.model.families import KERNELS


@pytest.fixture(scope="session")
def kernel_folder() -> Path:
    """The user's. A library is named by its sources, its flags and the compiler, so that none of others is taken."""
    return cache_folder() / "kernels"


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param
