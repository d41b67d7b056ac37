"""The target's KV cache: where keys and values lie, and whose slot is whose."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.errors import InvalidRequest
from outrider.model.decoder import Model, kv_bytes, make_store
from outrider.settings import Settings
from outrider.types import MAX_NODES

MIN_SLOTS = 16  # tokens the cache must hold; fewer answer nothing


@dataclass(frozen=True, slots=True)
class KvCache:
    store: KeyValueStore
    table: SlotTable
    context: int  # longest prompt and answer together


def make_kv_cache(model: Model, settings: Settings) -> KvCache:
    context = settings.context or model.config.context
    slots = settings.cache_bytes // kv_bytes(model)
    if slots < MIN_SLOTS:
        raise InvalidRequest(
            f"cache_bytes ({settings.cache_bytes}) holds {slots} tokens of this model; at least "
            f"{MIN_SLOTS * kv_bytes(model)} are needed for {MIN_SLOTS}, and for a whole context "
            f"{context * kv_bytes(model)}",
            "cache_bytes",
        )
    width = context + MAX_NODES
    slots = min(slots, width * settings.max_sequences)
    pinned = model.device.type == "cuda"
    table = SlotTable(slots, settings.max_sequences, width, settings.prefix_reuse, pinned)
    return KvCache(make_store(model, slots), table, context)
