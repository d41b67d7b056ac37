"""The planner's inputs: bounds from the settings, acceptance rates from a pair's card, and the memory of drafts."""

from __future__ import annotations

from math import inf

from outrider.control.experts import ExpertCosts
from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.draft.drafter import NetworkDrafter
from outrider.draft.drafters import Drafters
from outrider.engine.draft_room import draft_cache_tokens
from outrider.engine.kv_cache import KvCache
from outrider.engine.placement import PREFILL_WAIT, Memory
from outrider.load.config import ModelConfig
from outrider.load.pairs import Pair
from outrider.model.decoder import Layered, Model
from outrider.settings import Settings


def guards_of(settings: Settings) -> Guards:
    """The planner's bounds from the user's settings, the same on every device."""
    return Guards(
        max_batch=settings.draft_max_batch,
        max_depth=settings.draft_max_depth,
        max_temperature=settings.draft_max_temperature,
        objective=settings.objective,
        prefill_slowdown=settings.prefill_slowdown or inf,
        prefill_wait=PREFILL_WAIT.get(settings.device, PREFILL_WAIT["cpu"]),
    )


def watch_draft(
    planner: Planner, drafters: Drafters, cache: KvCache, model: Model, memory: Memory | None
) -> None:
    """Has the planner watch drafts with weights of their own, and report one that never pays together with the tokens
    of KV cache that its memory would hold. The memory is measured on a GPU, on a CPU it follows from the shapes.
    """
    for name in planner.choices:
        if isinstance(drafters[name], NetworkDrafter):
            planner.returns.watch(name, draft_cache_tokens(drafters, cache, model, memory))


def expert_costs(config: ModelConfig) -> ExpertCosts | None:
    """Of a mixture of experts. Layers that have more or fewer of them count by their mean."""
    mixtures = [spec.experts for spec in config.specs if spec.experts is not None]
    if not mixtures:
        return None
    total = round(sum(experts.count for experts in mixtures) / len(mixtures))
    chosen = round(sum(experts.per_token for experts in mixtures) / len(mixtures))
    each = sum(
        3 * experts.width for experts in mixtures
    )  # numbers of an expert in all layers, by hidden size
    active = config.vocab + sum(spec.active for spec in config.specs)
    return ExpertCosts(total, chosen, active / each - chosen)


def inform(planner: Planner, model: Model, pair: Pair | None) -> None:
    """What is known before the first step: the experts of a model whose passes count them, and the score of a paired
    draft, by temperature, from which the estimate of its acceptance starts.
    """
    if isinstance(model, Layered) and (experts := expert_costs(model.config)) is not None:
        planner.costs.know_experts(experts)
    score = None if pair is None else pair.card.score
    if score is None:
        return
    for temperature in {one.temperature for one in score.tasks}:
        chain = score.chain(temperature)
        reached, accepted = sum(chain.reached[1:]), sum(chain.accepted[1:])
        if reached:
            planner.rates.expect(
                planner.default, temperature, chain.accepted[0] / chain.reached[0], accepted / reached
            )
