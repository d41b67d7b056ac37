"""Triton's kernels run on a CUDA device where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
import inspect
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


TYPE_MEMBERS = {"element_ty", "shape", "numel", "name"}  # all of them are set below; others would be missing
TENSOR_MEMBERS = {"handle", "shape", "numel", "type", "dtype"}


def make_shapes_once(interpreter: ModuleType) -> None:
    """Every operation makes the type and the shape of its result anew, checks them, and compares shapes number by
    number before it broadcasts: a third of these tests' time. Here equal shapes are one object, which is made and
    checked once.
    """
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    compare = type(semantic).broadcast_impl_value
    kinds, shapes = dict[tuple[int, ...], Any](), dict[int, Any]()
    example = core.block_type(core.int32, [2])
    members = vars(example).keys(), vars(core.tensor(None, example)).keys()
    if members != (TYPE_MEMBERS, TENSOR_MEMBERS):
        return

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([one.value if isinstance(one, core.constexpr) else one for one in shape])
        if sizes not in kinds:
            make_type(self, element_ty, shape)
            kinds[sizes] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element_ty, kinds[sizes]
        self.name = f"<{sizes}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        key = id(kind.shape) if kind.is_block() else 0
        if key not in shapes:
            make_tensor(self, handle, kind)
            shapes[key] = self.shape, self.numel, kind  # whose shape must not be freed: its id is the key
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel, _ = shapes[key]

    def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return compare(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    type(semantic).broadcast_impl_value = broadcast


def find_builtins_once(interpreter: ModuleType) -> None:
    """For every launch the interpreter looks through all members of `triton.language` for those that it replaces."""
    core, found = interpreter.tl.core, dict[Any, list[tuple[str, Any]]]()

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            members = inspect.getmembers(package)
            found[package] = [(name, member) for name, member in members if core.is_builtin(member)]
        for name, member in found[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


PATCHES = {  # none of these members is public
    "_patch_lang _LangPatchScope": patch_language_once,
    "_get_np_dtype": look_types_up_once,
    "interpreter_builder": leave_overflow_unchecked,
    "tl interpreter_semantic": make_shapes_once,
    "_patch_builtin _patch_attr _LangPatchScope": find_builtins_once,
}
if DEVICE == "cpu" and importlib.util.find_spec("triton"):
    found = importlib.import_module("triton.runtime.interpreter")
    for members, patch in PATCHES.items():
        if all(hasattr(found, member) for member in members.split()):
            patch(found)
