"""Running out of memory, in words: what needed it, and what to take less of."""

from __future__ import annotations

import re

from outrider.engine.draft_room import DraftRoom
from outrider.errors import OutOfMemory
from outrider.load.config import ModelConfig
from outrider.settings import Settings, shown_size
from outrider.types import MAX_NODES

LESS = (
    "take a smaller model, a shorter --context, a smaller --cache-bytes or fewer --max-sequences "
    "(in Python: context, cache_bytes, max_sequences)"
)
# How torch's allocators say it; their errors are plain RuntimeErrors on a CPU.
SIGNS = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
NO_DRAFT = DraftRoom()
SIZE = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ [KMG]iB)")


def in_words(error: BaseException, doing: str) -> BaseException:
    """The error itself, or OutOfMemory if that is what it means."""
    text = str(error)
    if isinstance(error, OutOfMemory):
        return error
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and SIGNS.search(text)):
        return error
    found = SIZE.search(text)
    wanted = (
        ""
        if found is None
        else f", where {shown_size(int(found[1])) if found[1] else found[2]} more were needed"
    )
    words = OutOfMemory(f"out of memory while {doing}{wanted}; {LESS}")
    words.__cause__ = error
    return words


def check_room(config: ModelConfig, settings: Settings, free: int, draft: DraftRoom = NO_DRAFT) -> str | None:
    """Before a CPU loads a model and its drafts: raises if they cannot fit in `free` bytes; else what may not, for a
    warning.

    A system lends memory that it does not have and ends the process once it is used: better said before.
    """
    weights = 4 * (config.parameters + draft.weights)
    if weights > free:
        whose = "the weights of model and draft" if draft.weights else "the model's weights"
        raise OutOfMemory(
            f"{whose} take {shown_size(weights)} as float32, and {shown_size(free)} is free; {LESS}"
        )
    placed = settings.placed(None)
    tokens = ((settings.context or config.context) + MAX_NODES) * placed.max_sequences
    tokens = min(tokens, placed.cache_bytes // config.kv_bytes_per_token)
    cache = tokens * (config.kv_bytes_per_token + 4 * draft.cached)
    if weights + cache <= free:
        return None
    text = (
        f"weights ({shown_size(weights)}) and cache ({shown_size(cache)}) take more than the {shown_size(free)} that "
        f"is free; {LESS}"
    )
    if settings.cache_bytes:
        raise OutOfMemory(text)
    return text
