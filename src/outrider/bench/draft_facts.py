"""What is known of a drafter from its files: its size beside the target's, its family, its tokenizer, its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from outrider.draft.names import parse_draft, settle_auto
from outrider.draft.table import is_eagle
from outrider.engine.llm import LLM
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.find import find
from outrider.model.decoder import kv_bytes
from outrider.settings import WEIGHT_BYTES, cache_folder


@dataclass(frozen=True, slots=True)
class DraftFacts:
    kind: str  # lookup, early_exit, synthetic, own, model, eagle, or several joined by '+'
    parameters: int = 0
    parameter_ratio: float = 0.0  # to the target's
    family: str | None = None  # None: it has none
    same_family: bool | None = None
    same_tokenizer: bool | None = None
    weight_bytes: int = 0
    memory_tokens: int = 0  # that the KV cache could hold more without it
    model: str | None = None  # where its files are


def facts_of_draft(llm: LLM, draft: str) -> DraftFacts:
    """Of all models that `draft` names together."""
    kinds, numbers, cached, weights = [], 0, 0, 0
    family: str | None = None
    tokenizer: bool | None = None
    model: str | None = None
    for part in settle_auto(parse_draft(draft), None if llm.pair is None else llm.pair.folder):
        kinds.append(part.kind)
        if part.kind == "model":
            path = find(part.text, cache_folder())
            kinds[-1] = "eagle" if is_eagle(path) else "model"
            size, kept, own, stored = _sizes(path, llm)
            numbers, cached, model = numbers + size, cached + kept, part.text
            weights += int(size * WEIGHT_BYTES[stored])
            family = own or llm.model.config.family  # a head is made for its target
            tokenizer = True  # else it would not have been loaded
    target, itemsize = llm.model.config, llm.model.dtype.itemsize
    slots = llm.engine.table.pool.total
    return DraftFacts(
        "+".join(kinds) or "none",
        numbers,
        numbers / target.parameters,
        family,
        None if family is None else family == target.family,
        tokenizer,
        weights,
        round((weights + slots * cached * itemsize) / kv_bytes(llm.model)),
        model,
    )


def _sizes(path: Path, llm: LLM) -> tuple[int, int, str | None, str]:
    """Numbers in its weights, numbers it caches a token, its family, and what its weights are stored as."""
    checkpoint: Checkpoint = open_checkpoint(path)
    numbers = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    if is_eagle(path):
        c = llm.model.config
        return numbers, 2 * c.kv_heads * c.head_dim, None, "bfloat16"
    config = checkpoint.config
    if config is None:
        return numbers, 0, str(checkpoint.raw_config.get("model_type")), "float32"
    cached = 2 * config.layers * config.kv_heads * config.head_dim
    return numbers, cached, config.family, llm.settings.draft_weights
