"""Outrider: speculative decoding for large language models. Same tokens, fewer passes.

The doors are `LLM` and `SamplingParams`; they load on first use, so that importing Outrider stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import OutriderError
from outrider.settings import Settings
from outrider.types import Event, SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM, Choice, Output

__version__ = "0.1.0"
__all__ = ["LLM", "Choice", "Event", "Output", "OutriderError", "SamplingParams", "Settings", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("LLM", "Choice", "Output"):  # these need torch, which takes seconds to import
        from outrider.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
