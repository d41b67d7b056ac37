"""`outrider pairs export`: writes an EAGLE head in the layout that other engines read."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.flag import option
from outrider.cli.output import note, write
from outrider.errors import InvalidRequest, UnsupportedModel
from outrider.load.cards import FILE, read_card
from outrider.settings import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.load.checkpoint import Checkpoint
    from outrider.load.heads import HeadConfig

Source = Annotated[str, typer.Argument(metavar="DIR", help="A folder with an EAGLE head.")]
Layout = Annotated[
    str, option("layout", "eagle3, as heads are published, speculators, or outrider, our own.")
]
Out = Annotated[str, option("out", "A new folder to write to.", "DIR")]
Target = Annotated[
    str | None, option("target", "The model it drafts for; by default the one its card names.", "MODEL")
]


def export(source: Source, out: Out, layout: Layout = "eagle3", target: Target = None) -> None:
    """Write an EAGLE head for other engines, and say how vLLM is started with it.

    outrider pairs export my-head --target smollm2-135m --layout speculators --out my-head-vllm
    """
    from outrider.load.checkpoint import open_checkpoint
    from outrider.load.find import find
    from outrider.load.heads import engines_that_load, read_head, write_head

    place, folder = Path(out).expanduser(), Path(source).expanduser()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InvalidRequest(f"{place} is there already; give a new folder", "out")
    if target is None:
        if not (folder / FILE).exists():
            raise InvalidRequest(
                f"{folder} has no {FILE} that names its target; give --target MODEL", "target"
            )
        target = read_card(folder).target.name
    model = open_checkpoint(find(target, cache_folder()))
    if model.config is None:
        raise UnsupportedModel(f"{target} is of a family that has no heads here")
    config, tensors = read_head(folder, model.config)
    write_head(place, config, _with_head(config, tensors, model), layout, model.config, target)
    write(f"{place}\n")
    others = engines_that_load(config, model.config)[1:]
    if layout != "outrider" and "vllm" in others:
        said = f'{{"method": "eagle3", "model": "{place}", "num_speculative_tokens": 5}}'
        note(f"read by: {', '.join(others)}")
        note(f"vllm serve MODEL --speculative-config {shlex.quote(said)}")


def _with_head(config: HeadConfig, tensors: dict[str, Tensor], target: Checkpoint) -> dict[str, Tensor]:
    """The same with a last matrix of its own, which other engines want."""
    import torch

    if not config.shared_head:
        return tensors
    assert target.config is not None
    whole = target.tensor("model.embed_tokens.weight" if target.config.tied else "lm_head.weight")
    ids = torch.arange(config.draft_vocab) + tensors.get("d2t", torch.zeros(1)).long()
    return {**tensors, "lm_head.weight": whole[ids]}
