"""Sets an engine up to fly: its rounds on a CUDA device, and the drafters that can guess there."""

from __future__ import annotations

from outrider.draft.chains import DEEPEST, ChainDrafter, LmChain, LookupChain
from outrider.draft.drafter import Drafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_device import DeviceHead, HeadPass
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.state_device import DeviceBetween
from outrider.draft.target_chains import EagleChain, EarlyExitChain
from outrider.engine.engine import Engine
from outrider.engine.rounds import Rounds
from outrider.model.decoder import make_store
from outrider.model.device import DeviceDecoder, DevicePass, GraphedPass
from outrider.model.kernels.gpu.copies import find_copies


def make_rounds(engine: Engine) -> Rounds:
    model = engine.model
    assert isinstance(model, DeviceDecoder)
    run, between = DevicePass(model, engine.store), DeviceBetween()
    rounds = Rounds(model, engine.store, engine.table, model.device, run, between=between)
    for name, drafter in engine.drafters.items():
        chain = _chain(drafter, model, engine)
        if chain is not None:
            rounds.drafters[name] = chain
    choices = (engine.planner.default, "lookup")  # which costs next to nothing
    engine.planner.choices = tuple(dict.fromkeys(name for name in choices if name in rounds.drafters))
    return rounds


def _chain(drafter: Drafter, model: DeviceDecoder, engine: Engine) -> ChainDrafter | None:
    """What guesses as this drafter does, in rounds; None: it only takes part in packed steps.

    Keys and values lie by the target's slots, so a model has a store of its own beside the packed path's.
    """
    if isinstance(drafter, LookupDrafter):
        return LookupChain(find_copies)
    if isinstance(drafter, EarlyExitDrafter):
        return EarlyExitChain(model, DevicePass(model, engine.store, drafter.layers))
    if isinstance(drafter, LmDrafter) and isinstance(drafter.model, DeviceDecoder):
        store = make_store(drafter.model, engine.store.slots)
        run = DevicePass(drafter.model, store)
        return LmChain(drafter.model, run, model.config.vocab, GraphedPass(run))
    if isinstance(drafter, EagleDrafter) and isinstance(drafter.head, DeviceHead):
        store = drafter.head.make_store(engine.store.slots)
        return EagleChain(
            drafter.head, model, engine.store, store, HeadPass(drafter.head, store), DEEPEST + 1
        )
    return None
