"""What the planner is given: bounds from the settings, rates from a card, and drafts to watch with their memory."""

from __future__ import annotations

from math import inf

from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.draft.drafter import NetworkDrafter
from outrider.draft.drafters import Drafters
from outrider.engine.draft_room import DraftRoom
from outrider.engine.kv_cache import KvCache
from outrider.engine.placement import PREFILL_WAIT, Memory
from outrider.load.pairs import Pair
from outrider.model.decoder import Model, kv_bytes
from outrider.settings import Settings


def guards_of(settings: Settings) -> Guards:
    """As the user set them; one set for every device."""
    return Guards(
        max_batch=settings.draft_max_batch,
        max_depth=settings.draft_max_depth,
        max_temperature=settings.draft_max_temperature,
        objective=settings.objective,
        prefill_stretch=settings.prefill_slowdown or inf,
        prefill_wait=PREFILL_WAIT.get(settings.device, PREFILL_WAIT["cpu"]),
    )


def watch_draft(
    planner: Planner, drafters: Drafters, room: DraftRoom, cache: KvCache, model: Model, memory: Memory | None
) -> None:
    """Have the planner say if a draft with weights of its own never pays, and how many tokens of KV cache its memory
    would hold: as measured on a GPU, else by its shapes.
    """
    size = 4 * (room.weights + room.cached * cache.table.pool.total) if memory is None else memory.draft
    for name in planner.choices:
        if isinstance(drafters[name], NetworkDrafter):
            planner.payoff.watch(name, size // kv_bytes(model))


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
