"""How much memory the models of a table take, and whether those that are loaded together fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import OutOfMemory
from outrider.serve.model_spec import ModelSpec
from outrider.serve.settings import FIRST_USE
from outrider.serve.size_process import SizeRequest, ask_sizes
from outrider.settings import shown_size

NAMES = {"cpu": "the machine's", "cuda": "the GPU's"}


@dataclass(frozen=True, slots=True)
class ModelRoom:
    needs: dict[str, tuple[str, int, int]]  # by the model's name: device, bytes of weights and of cache
    free: dict[str, int]  # bytes by device, before anything is loaded

    def shared(self, one: ModelSpec, other: ModelSpec) -> bool:
        """Whether two models take memory of the same device."""
        return self.needs[one.name][0] == self.needs[other.name][0]

    def lacking(self, loaded: Sequence[ModelSpec], wanted: ModelSpec) -> int:
        """Bytes that the models would need beyond those of the device that `wanted` runs on."""
        device = self.needs[wanted.name][0]
        needed = sum(sum(self.needs[spec.name][1:]) for spec in loaded if self.shared(spec, wanted))
        return max(0, needed - self.free.get(device, needed))


def measure_room(table: Sequence[ModelSpec], most: int) -> ModelRoom | None:
    """Reads the sizes from the files, and raises if the models cannot be loaded as the table says. A single model
    without a bound is measured by its own engine. `most`: bytes that all models may take; 0: what is free.
    """
    if len(table) == 1 and not most:
        return None
    asked = [(spec.source, spec.draft, dataclasses.asdict(spec.settings)) for spec in table]
    sizes = ask_sizes(SizeRequest(asked))
    free = {device: min(free, most or free) for device, free in sizes.free.items()}
    room = ModelRoom(dict(zip((spec.name for spec in table), sizes.models, strict=True)), free)
    check_table_fits(table, room)
    return room


def check_table_fits(table: Sequence[ModelSpec], room: ModelRoom) -> None:
    """Raises unless the models that are loaded at start fit together, and each of the others alone."""
    at_start = [spec for spec in table if spec.serve.load != FIRST_USE]
    for wanted in table:
        together = at_start if wanted in at_start else [wanted]
        if not room.lacking(together, wanted):
            continue
        device = room.needs[wanted.name][0]
        each = ", ".join(
            f"{spec.name} {shown_size(weights)} weights and {shown_size(cache)} cache"
            for spec in together
            for where, weights, cache in (room.needs[spec.name],)
            if where == device
        )
        which, others = "the model does", ""
        if len(together) > 1:
            which, others = "the models do", f', or load = "{FIRST_USE}"'
        less = "cache_bytes" if device == "cpu" else "cache_bytes or gpu_memory_utilization"
        raise OutOfMemory(
            f"{which} not fit into {shown_size(room.free[device])} of {NAMES[device]} memory: {each}; set a smaller "
            f"{less}{others}"
        )
