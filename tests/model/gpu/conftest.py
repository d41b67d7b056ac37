"""Triton's kernels run on a CUDA device where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
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


def look_types_up_once(interpreter: ModuleType) -> None:
    """The interpreter builds a table of 18 types to look one up, for every operation."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def looked_up(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = looked_up


def leave_overflow_unchecked(interpreter: ModuleType) -> None:
    """The interpreter computes every sum of integers a second time to find an overflow, and then asserts nothing, as an
    assertion needs `debug`: a third of these tests' time.
    """
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


PATCHES = {  # none of these members is public
    "_patch_lang _LangPatchScope": patch_language_once,
    "_get_np_dtype": look_types_up_once,
    "interpreter_builder": leave_overflow_unchecked,
}
if DEVICE == "cpu" and importlib.util.find_spec("triton"):
    found = importlib.import_module("triton.runtime.interpreter")
    for members, patch in PATCHES.items():
        if all(hasattr(found, member) for member in members.split()):
            patch(found)
