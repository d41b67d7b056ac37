"""How much memory a model takes with its drafts and its cache, from its files alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.draft.names import parse_draft
from outrider.engine.build import Reshape, room_of, settle_pair
from outrider.engine.memory import cpu_size, gpu_memory, runs_on_gpu
from outrider.engine.placement import GPU_SHARE, place
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.find import find
from outrider.model.weights import BYTES, kept_formats
from outrider.settings import WEIGHT_BYTES, Settings, cache_folder, free_memory


@dataclass(frozen=True, slots=True)
class ModelSize:
    device: str
    weights: int  # bytes, drafts included
    cache: int


def model_size(model: str, draft: str, settings: Settings) -> ModelSize:
    """Opens the files and reads no weights. A model that is not on this machine is fetched."""
    checkpoint = open_checkpoint(find(model, cache_folder()))
    parts, _ = settle_pair(parse_draft(draft), checkpoint)
    room = room_of(parts, settings, Reshape())
    if runs_on_gpu(settings):
        return _gpu_size(checkpoint, room.weights, settings)
    weights = sum(kept_formats(checkpoint, place(settings, None).weights).values())
    if checkpoint.config is None:  # run through transformers: its cache grows with its requests
        return ModelSize("cpu", weights + room.kept, settings.cache_bytes)
    return ModelSize("cpu", *cpu_size(checkpoint.config, settings, weights, room))


def _gpu_size(checkpoint: Checkpoint, draft: int, settings: Settings) -> ModelSize:
    """Unless its cache has a size, an engine takes its share of the GPU, whatever its weights take."""
    free, total = gpu_memory()
    placed = place(settings, free, total=total)
    parameters = checkpoint.config.parameters if checkpoint.config else 0
    weights = int(parameters * WEIGHT_BYTES[placed.weights] + draft * WEIGHT_BYTES[placed.draft_weights])
    if placed.weights == "bfloat16":  # experts in MXFP4 stay what they are
        small = sum(
            math.prod(checkpoint.shape(name)) for name in checkpoint.names() if checkpoint.has_mxfp4(name)
        )
        weights -= int(small * (WEIGHT_BYTES["bfloat16"] - BYTES["MXFP4"]))
    if settings.cache_bytes:
        return ModelSize("cuda", weights, settings.cache_bytes)
    share = int((settings.gpu_memory_utilization or GPU_SHARE) * total)
    return ModelSize("cuda", weights, max(0, share - weights))


def free_by_device(devices: set[str]) -> dict[str, int]:
    """Bytes that are free on each of these devices; without those of which that is not known."""
    found = {"cuda": gpu_memory()[0]} if "cuda" in devices else {}
    free = free_memory()
    return found if free is None else {**found, "cpu": free}
