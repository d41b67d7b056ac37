"""Outrider: speculative decoding for large language models. Same tokens, fewer passes.

The doors are `LLM` and `SamplingParams`; they load on first use, so that importing Outrider stays quick.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

# `python -m outrider` puts the working directory first on the path. What lies there, a downloaded model's torch.py say,
# is not ours to run. While this file is read for it, argv starts with "-m".
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and "outrider" in sys.orig_argv:
    del sys.path[0]

from outrider.draft.drafter import Drafter, DrafterContext
from outrider.errors import OutriderError
from outrider.settings import Settings
from outrider.types import Draft, Event, SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.output import Choice, Output

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Choice",
    "Draft",
    "Drafter",
    "DrafterContext",
    "Event",
    "Output",
    "OutriderError",
    "SamplingParams",
    "Settings",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "LLM":  # it needs torch, which takes seconds to import
        from outrider.engine.llm import LLM

        return LLM
    if name in ("Choice", "Output"):
        from outrider.engine import output

        return getattr(output, name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
