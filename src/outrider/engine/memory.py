"""Memory: what is free, what drafts and a GPU's steps need, and errors that say what to reduce when it runs out."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from outrider.cache.formats import FORMATS, token_bytes
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.eagle import EagleDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.weights import weights_of
from outrider.engine.kv_cache import KvCache
from outrider.engine.placement import Memory, place
from outrider.errors import OutOfMemory
from outrider.load.checkpoint import Checkpoint
from outrider.load.config import ModelConfig
from outrider.load.heads import IGNORED
from outrider.model.decoder import Model, kv_bytes, make_store
from outrider.model.weights import BYTES, kept_formats
from outrider.settings import Settings, shown_size
from outrider.types import MAX_NODES, Batch

LESS = (
    "take a smaller model, a shorter --context, a smaller --cache-bytes or fewer --max-sequences "
    "(in Python: context, cache_bytes, max_sequences)"
)
# Messages of torch's allocators, whose errors are plain RuntimeErrors on a CPU.
SIGNS = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
SIZE = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ [KMG]iB)")


def wake_gpu() -> None:
    """Starts the GPU and imports its code on another thread while the checkpoint is opened; each takes half a second.
    Errors are dropped here because loading the model meets them again.
    """

    def wake() -> None:
        with contextlib.suppress(Exception):
            torch.zeros(1, device="cuda")
            import_module("outrider.model.device")

    threading.Thread(target=wake, name="outrider-wake", daemon=True).start()


def in_words(error: BaseException, doing: str) -> BaseException:
    """OutOfMemory if the error means that, else the error itself."""
    text = str(error)
    if isinstance(error, OutOfMemory):
        return error
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and SIGNS.search(text)):
        return error
    found = SIZE.search(text)
    wanted = (
        ""
        if found is None
        else f", where {shown_size(int(found[1])) if found[1] else found[2]} more were needed"
    )
    words = OutOfMemory(f"out of memory while {doing}{wanted}; {LESS}")
    words.__cause__ = error
    return words


# ------------------------------------------------------------------------------------------- of drafts

KEYS = "self_attn.k_proj.weight"
FUSION = "fc.weight"  # of an EAGLE head: it reads the target's hidden states


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """How much memory drafts take, from the shapes of their tensors before anything is loaded."""

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


NO_DRAFT = DraftRoom()


# ------------------------------------------------------------------------------------------- of a CPU


def cpu_size(config: ModelConfig, settings: Settings, weights: int, draft: DraftRoom) -> tuple[int, int]:
    """Bytes of all weights and of a full cache in a CPU's memory. `weights`: those of the target."""
    placed = place(settings, None)
    tokens = ((settings.context or config.context) + MAX_NODES) * placed.max_sequences
    own = token_bytes(config.kv_shapes, FORMATS[placed.kv_cache_dtype])
    tokens = min(tokens, placed.cache_bytes // own)
    return weights + draft.kept, tokens * (own + 4 * draft.cached)


def check_room(
    config: ModelConfig, settings: Settings, free: int, weights: int, draft: DraftRoom = NO_DRAFT
) -> str | None:
    """Raises if a model with `weights` bytes and its drafts cannot fit in `free` bytes of a CPU's memory. Returns a
    warning if weights and a full cache would not fit.

    Linux grants memory that it does not have and kills the process that uses it, so this is checked before loading.
    """
    weights, cache = cpu_size(config, settings, weights, draft)
    if weights > free:
        whose = "the weights of model and draft" if draft.weights else "the model's weights"
        raise OutOfMemory(
            f"{whose} take {shown_size(weights)}, and {shown_size(free)} is free; take --weights int8 or int4, or "
            f"{LESS}"
        )
    if weights + cache <= free:
        return None
    text = (
        f"weights ({shown_size(weights)}) and cache ({shown_size(cache)}) take more than the {shown_size(free)} that "
        f"is free; {LESS}"
    )
    if settings.cache_bytes:
        raise OutOfMemory(text)
    return text


# ------------------------------------------------------------------------------------------- of a GPU


def runs_on_gpu(settings: Settings) -> bool:
    return settings.device != "cpu" and torch.cuda.is_available()


def gpu_memory() -> tuple[int, int]:
    """Free and total bytes. Memory that torch keeps for later is released first, so it counts as free."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


# Memory that captured steps keep, in multiples of the largest logits. An estimate, because steps are captured after the
# cache is allocated. They share the memory of their logits; sampling needs some beside it.
LOGITS_KEPT = 4


class Meter(Protocol):
    """Measures the peak of a device's memory."""

    def start(self) -> None: ...

    def most(self) -> int:
        """The peak since the start, in bytes."""
        ...


class GpuMeter:
    """Counts this process's own tensors, because free memory also changes with other processes."""

    @staticmethod
    def held() -> int:
        """Bytes of tensors that exist now."""
        return int(torch.cuda.memory_allocated())

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.before = self.held()

    def most(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - self.before


def working_memory(model: Model, settings: Settings, meter: Meter) -> int:
    """Bytes that steps need beside weights and KV cache. Measured: makes the state of all sequences once and runs the
    largest pass over slots of its own.
    """
    context = settings.context or model.config.context
    meter.start()
    state = SequenceState(settings.max_sequences, context + MAX_NODES, model.device, model.config.vocab)
    state.edits.make()
    held = meter.most()
    del state
    batch = _largest_batch(settings, context, model.device)
    store = make_store(model, batch.rows)
    meter.start()
    logits = model.forward(batch, store)
    return held + meter.most() + LOGITS_KEPT * logits.nbytes


def _largest_batch(settings: Settings, context: int, device: torch.device) -> Batch:
    """A full step of new prompts, with logits for one row of each sequence."""
    rows, each = settings.step_rows, min(settings.step_rows, context)
    at = torch.arange(rows, dtype=torch.int32, device=device)
    positions, prompts = at % each, -(-rows // each)
    table = torch.arange(prompts * each, dtype=torch.int32, device=device).view(prompts, each)
    wanted = min(rows, settings.max_sequences)
    return Batch(
        ids=torch.zeros(rows, dtype=torch.int64, device=device),
        positions=positions,
        slots=at,
        table_rows=at // each,
        prefix=positions + 1,
        ancestors=torch.zeros(rows, dtype=torch.int64, device=device),
        table=table,
        logit_rows=torch.arange(rows - wanted, rows, device=device),
    )
