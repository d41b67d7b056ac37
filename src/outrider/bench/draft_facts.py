"""What is known of a candidate draft: its size against the target, its family, its memory, the engines that load it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.draft.names import parse_draft, settle_auto
from outrider.engine.llm import LLM
from outrider.engine.memory import draft_cache_tokens, draft_weight_bytes
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.load.heads import card_facts
from outrider.settings import cache_folder


@dataclass(frozen=True, slots=True)
class CandidateFacts:
    kind: str  # lookup, early_exit, synthetic, own, lm, eagle, or several joined by '+'
    parameters: int = 0
    parameter_ratio: float = 0.0  # to the target's
    family: str | None = None  # None: it has none
    same_family: bool | None = None
    same_tokenizer: bool | None = None
    weight_bytes: int = 0
    memory_tokens: int = 0  # that the KV cache could hold more without it
    model: str | None = None  # where its files are
    engines: tuple[str, ...] = ()  # that load those files as they are


def facts_of_draft(llm: LLM, draft: str) -> CandidateFacts:
    """Of all models that `draft` names together. `llm` was opened with them."""
    kinds, parameters = [], 0
    model: str | None = None
    target, engine = llm.model.config, llm.engine
    for part in settle_auto(parse_draft(draft), None if llm.pair is None else llm.pair.folder):
        kinds.append(part.kind)
        if part.kind == "model":
            path, model, family = find(part.text, cache_folder()), part.text, target.family
            known = card_facts(path, llm.checkpoint)
            kinds[-1], parameters = known.kind, parameters + known.parameters
            if known.kind == "lm":  # a head is made for its target
                opened = open_checkpoint(path)
                family = (
                    str(opened.raw_config.get("model_type"))
                    if opened.config is None
                    else opened.config.family
                )
    if model is None:
        return CandidateFacts("+".join(kinds) or "none")
    return CandidateFacts(
        "+".join(kinds),
        parameters,
        parameters / target.parameters,
        family,
        family == target.family,
        True,  # with another tokenizer it would not have been loaded
        draft_weight_bytes(engine.drafters),
        draft_cache_tokens(engine.drafters, engine.cache, llm.model, llm.memory),
        model,
        known.engines,
    )
