"""What is known of a drafter from its files: its size beside the target's, its family, its tokenizer, its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.draft.names import parse_draft, settle_auto
from outrider.draft.table import is_eagle
from outrider.engine.draft_room import draft_cache_tokens, draft_weight_bytes
from outrider.engine.llm import LLM
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder


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
    """Of all models that `draft` names together. `llm` was opened with them."""
    kinds, numbers = [], 0
    family: str | None = None
    model: str | None = None
    target, engine = llm.model.config, llm.engine
    for part in settle_auto(parse_draft(draft), None if llm.pair is None else llm.pair.folder):
        kinds.append(part.kind)
        if part.kind == "model":
            path, model = find(part.text, cache_folder()), part.text
            kinds[-1] = "eagle" if is_eagle(path) else "model"
            checkpoint = open_checkpoint(path)
            numbers += sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
            family = target.family  # a head is made for its target
            if kinds[-1] == "model":
                config = checkpoint.config
                family = str(checkpoint.raw_config.get("model_type")) if config is None else config.family
    if model is None:
        return DraftFacts("+".join(kinds) or "none")
    return DraftFacts(
        "+".join(kinds),
        numbers,
        numbers / target.parameters,
        family,
        family == target.family,
        True,  # with another tokenizer it would not have been loaded
        draft_weight_bytes(engine.drafters),
        draft_cache_tokens(engine.drafters, engine.cache, llm.model, llm.memory),
        model,
    )
