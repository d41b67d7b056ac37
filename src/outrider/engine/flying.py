"""Sets an engine up to fly: its rounds on a CUDA device, and the drafters that can guess there."""

from __future__ import annotations

from outrider.draft.chains import ChainDrafter, LmChain, LookupChain
from outrider.draft.lm import LmDrafter
from outrider.engine.engine import Engine
from outrider.engine.rounds import Rounds
from outrider.model.decoder import make_store
from outrider.model.device import DeviceDecoder, DevicePass


def make_rounds(engine: Engine) -> Rounds:
    model, table = engine.model, engine.table
    assert isinstance(model, DeviceDecoder)
    rounds = Rounds(model, engine.store, table, model.device, DevicePass(model, engine.store))
    for name, drafter in engine.drafters.items():
        if name == "lookup":
            rounds.drafters[name] = LookupChain()
        elif isinstance(drafter, LmDrafter) and isinstance(drafter.model, DeviceDecoder):
            rounds.drafters[name] = _lm_chain(drafter.model, engine)
    return rounds


def _lm_chain(small: DeviceDecoder, engine: Engine) -> ChainDrafter:
    """Its keys and values lie by the target's slots, so it needs a store of its own beside the packed path's."""
    store = make_store(small, engine.store.slots)
    return LmChain(small, store, DevicePass(small, store), engine.model.config.vocab)
