"""What the planner is given: bounds from the settings, rates from a card, and drafts to watch with their memory."""

from __future__ import annotations

from math import inf

from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.draft.drafter import NetworkDrafter
from outrider.draft.drafters import Drafters
from outrider.engine.draft_room import draft_cache_tokens
from outrider.engine.kv_cache import KvCache
from outrider.load.pairs import Pair
from outrider.model.decoder import Model
from outrider.settings import Memory, Settings


def guards_of(settings: Settings) -> Guards:
    """As the user set them; one set for every device."""
    share, usual = settings.draft_probe_share, Guards()
    return Guards(
        max_batch=settings.draft_max_batch,
        tree_batch=settings.tree_max_batch,
        max_depth=settings.draft_max_depth,
        max_temperature=settings.draft_max_temperature,
        flat_temperature=settings.draft_flat_temperature,
        break_even=settings.draft_break_even,
        patience=settings.draft_patience,
        max_stretch=settings.draft_max_stretch,
        probe_share=share,
        spare_probe_share=share / usual.probe_share * usual.spare_probe_share,
        baseline_interval=settings.draft_baseline_interval,
        objective=settings.objective,
        prefill_stretch=settings.prefill_stretch or inf,
        prefill_wait=settings.prefill_wait or usual.prefill_wait,
        prefill_at_once=settings.prefill_at_once,
    )


def watch_draft(
    planner: Planner, drafters: Drafters, cache: KvCache, model: Model, memory: Memory | None
) -> None:
    """Have the planner say if a draft with weights of its own never pays, and how many tokens of KV cache its memory
    would hold.
    """
    for name in planner.choices:
        if isinstance(drafters[name], NetworkDrafter):
            planner.payoff.watch(name, draft_cache_tokens(drafters, cache, model, memory))


def expect_score(planner: Planner, pair: Pair | None) -> None:
    """Start from what a paired draft was scored with, at each temperature: not every start need find it out anew."""
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
