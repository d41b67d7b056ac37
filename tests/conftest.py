"""Fixtures for every folder: one loaded model for the whole run, and none of the user's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider import LLM, Settings

if (
    not torch.cuda.is_available()
):  # GPU kernels run in Triton's interpreter, if it hears of it before it is imported
    os.environ["TRITON_INTERPRET"] = "1"

KEPT = {"OUTRIDER_CACHE"}  # where the model and the kernels already are


def pytest_configure() -> None:
    """A user's OUTRIDER_TEMPERATURE must not change what the tests see, nor reach the commands they start."""
    for name in set(os.environ) - KEPT:
        if name.startswith("OUTRIDER_"):
            del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the built-in model is marked so: `-m "not model"` needs no download."""
    for item in items:
        if "llm" in getattr(item, "fixturenames", ()):
            item.add_marker("model")


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The built-in model, checked after every step. Shared: leave it as it was found."""
    with LLM("smollm2-135m", settings=Settings(cache_bytes=1 << 28, check_integrity=True)) as model:
        yield model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with nothing in it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"
