"""How much memory drafts take: from the shapes of their tensors before anything is loaded, and once they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.draft.drafters import Drafters
from outrider.draft.eagle import EagleDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.weights import weights_of
from outrider.engine.kv_cache import KvCache
from outrider.engine.placement import Memory
from outrider.load.checkpoint import Checkpoint
from outrider.load.heads import IGNORED
from outrider.model.decoder import Model, kv_bytes
from outrider.model.weights import BYTES, kept_formats

KEYS = "self_attn.k_proj.weight"
FUSION = "fc.weight"  # of an EAGLE head: it reads the target's hidden states


@dataclass(frozen=True, slots=True)
class DraftRoom:
    weights: int = 0  # numbers in all
    cached: int = 0  # numbers for each cached token: keys, values, and for a head the target's hidden states
    kept: int = 0  # bytes of the weights on a CPU


def draft_room(drafts: Iterable[Checkpoint], kind: str = "stored") -> DraftRoom:
    """The sum over these models and heads; a CPU keeps the models as `kind`, one of settings.WEIGHTS."""
    weights = cached = kept = 0
    for draft in drafts:
        names = draft.names()
        if FUSION in names:
            names = [name for name in names if name not in IGNORED]
        else:
            kept += sum(kept_formats(draft, kind, draft=True).values())
        shapes = {name: draft.shape(name) for name in names}
        numbers = sum(map(math.prod, shapes.values()))
        cached += 2 * sum(shape[0] for name, shape in shapes.items() if name.endswith(KEYS))
        if FUSION in shapes:
            hidden, read = shapes[FUSION]
            cached += read
            if "lm_head.weight" not in shapes and "d2t" in shapes:  # a copy of rows of the target's head
                numbers += shapes["d2t"][0] * hidden
            kept += int(BYTES["bfloat16"] * numbers)
        weights += numbers
    return DraftRoom(weights, cached, kept)


def draft_weight_bytes(drafters: Drafters) -> int:
    """Bytes of the loaded weights of models and heads."""
    size = 0
    for drafter in map(drafters.__getitem__, drafters.names):
        if isinstance(drafter, LmDrafter):
            size += drafter.model.weight_bytes()
        elif isinstance(drafter, EagleDrafter):
            size += sum(tensor.nbytes for tensor in weights_of(drafter.network).values())
    return size


def draft_cache_tokens(drafters: Drafters, cache: KvCache, model: Model, memory: Memory | None) -> int:
    """Tokens of KV cache that the memory of all loaded drafts would hold: measured on a GPU, else counted by tensors
    (weights, keys and values, and the hidden states of the target that are kept for a head).
    """
    if memory is not None:
        return memory.draft // kv_bytes(model)
    size, features = draft_weight_bytes(drafters), cache.store.features
    for drafter in map(drafters.__getitem__, drafters.names):
        if isinstance(drafter, LmDrafter | EagleDrafter):
            size += sum(tensor.nbytes for tensor in (*drafter.store.keys, *drafter.store.values))
    return (size + (0 if features is None else features.nbytes)) // kv_bytes(model)
