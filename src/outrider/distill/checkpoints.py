"""Where training stood, on disk: weights, the optimiser's moments and the counters, whole or not there.

The last two are kept. One that cannot be read is passed over for the one before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from outrider.load.token_shards import write_atomically

NAME = re.compile(r"checkpoint-(\d{8})\.safetensors")
KEPT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Counters:
    step: int = 0
    tokens: int = 0  # seen, without padding
    seconds: float = 0.0


def checkpoints(folder: Path) -> list[Path]:
    """From the latest on."""
    names = sorted(
        (path.name for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)), reverse=True
    )
    return [folder / name for name in names]


def save_checkpoint(
    folder: Path, net: nn.Module, optimiser: torch.optim.Optimizer, counters: Counters
) -> Path:
    tensors = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        for moment in MOMENTS:
            if moment in optimiser.state[parameter]:
                tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment]
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path = folder / f"checkpoint-{counters.step:08}.safetensors"
    write_atomically(path, save(tensors, {"counters": json.dumps(asdict(counters))}))
    for old in checkpoints(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(
    folder: Path, net: nn.Module, optimiser: torch.optim.Optimizer, note: Callable[[str], None]
) -> Counters:
    """Where the latest that can be read stood; the beginning, if there is none."""
    for path in checkpoints(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                counters = Counters(**json.loads(opened.metadata()["counters"]))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            _restore(net, optimiser, tensors, counters.step)
            return counters
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as problem:
            note(f"{path.name} cannot be used ({problem!s:.120}); going on from the one before it")
    return Counters()


@torch.no_grad()
def _restore(net: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], step: int) -> None:
    named = list(net.named_parameters())
    for name, parameter in named:
        if tensors[f"net.{name}"].shape != parameter.shape:
            raise ValueError(f"{name} has another shape")
    for name, parameter in named:
        parameter.copy_(tensors[f"net.{name}"])
        if f"{MOMENTS[0]}.{name}" in tensors:
            moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
            where = parameter.device if optimiser.defaults.get("fused") else None  # it counts there
            optimiser.state[parameter] = {"step": torch.tensor(float(step), device=where), **moments}
