"""A quicker import of torch, for commands that only run a model. Imports nothing itself."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

# Says what operations do to tensors without data. torch.compile, torch.export and transformers need it; running a model
# does not, and it takes a quarter of the time that importing torch does (log/083).
SKIPPED = "torch._meta_registrations"


def import_torch_quickly() -> None:
    """Imports torch without the registrations that `import_all_of_torch` adds."""
    if "torch" not in sys.modules:
        sys.modules[SKIPPED] = ModuleType(SKIPPED)
        # While torch defines its own operations, it looks up the module of each caller. inspect compares the paths of
        # all modules for that, and takes a twentieth of the import.
        search, inspect.getmodule = inspect.getmodule, _module_by_name
        try:
            importlib.import_module("torch")
        finally:
            inspect.getmodule = search


def _module_by_name(object: object, _filename: str | None = None) -> ModuleType | None:
    return sys.modules.get(getattr(object, "__module__", None) or "")


def import_all_of_torch() -> None:
    """Imports torch, and what `import_torch_quickly` left out."""
    importlib.import_module("torch")
    if not hasattr(sys.modules.get(SKIPPED), "__file__"):
        sys.modules.pop(SKIPPED, None)
        importlib.import_module(SKIPPED)
