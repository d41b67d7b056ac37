"""Triton's kernels run on a CUDA device where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DEVICE == "cpu" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


def patch_language_once(interpreter: ModuleType) -> None:
    """The interpreter replaces the members of `triton.language` for a launch, and walks through all of them again for
    every device function that the kernel calls: a quarter of these tests' time. Once a launch is enough.
    """
    patch, done = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        package = function.__globals__.get(
            "__package__", ""
        )  # kernels know `tl`, Triton's own functions `tl.core`
        if package in done:
            return interpreter._LangPatchScope()
        scope, outermost = patch(function), not done
        done.add(package)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


if DEVICE == "cpu" and importlib.util.find_spec("triton"):
    found = importlib.import_module("triton.runtime.interpreter")
    if hasattr(found, "_patch_lang") and hasattr(found, "_LangPatchScope"):  # neither is public
        patch_language_once(found)
