"""The memory that drafts need, computed from the shapes of their tensors before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.draft.head_layouts import IGNORED
from outrider.load.checkpoint import Checkpoint

KEYS = "self_attn.k_proj.weight"
FUSION = "fc.weight"  # of an EAGLE head: it reads the target's hidden states


@dataclass(frozen=True, slots=True)
class DraftRoom:
    weights: int = 0  # numbers in all
    cached: int = 0  # numbers for each cached token: keys, values, and for a head the target's hidden states


def draft_room(drafts: Iterable[Checkpoint]) -> DraftRoom:
    """The sum over these models and heads."""
    weights = cached = 0
    for draft in drafts:
        names = draft.names()
        if FUSION in names:
            names = [name for name in names if name not in IGNORED]
        shapes = {name: draft.shape(name) for name in names}
        weights += sum(map(math.prod, shapes.values()))
        cached += 2 * sum(shape[0] for name, shape in shapes.items() if name.endswith(KEYS))
        if FUSION in shapes:
            hidden, read = shapes[FUSION]
            cached += read
            if "lm_head.weight" not in shapes and "d2t" in shapes:  # a copy of rows of the target's head
                weights += shapes["d2t"][0] * hidden
    return DraftRoom(weights, cached)
