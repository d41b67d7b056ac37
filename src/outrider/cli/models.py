"""`outrider models`: what can be loaded by name, what of it is here, and fetching models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.flag import option, typed
from outrider.cli.options import DEFAULT_MODEL
from outrider.cli.output import note, write
from outrider.engine.placement import CPU_CACHE
from outrider.errors import InvalidRequest, ModelNotFound
from outrider.load.aliases import HubModel, did_you_mean
from outrider.load.find import ModelEntry, delete, fetched, find, is_model_name, list_models, size_of
from outrider.load.progress import file_size
from outrider.settings import cache_folder, free_memory
from outrider.wrap import fitted, wrapped

PROGRAM = (
    600_000_000  # bytes of Python, torch and what a step works on: the built-in model's peak less its file
)
REPACKED = 1.03  # bytes in memory for one of a GGUF file, at most
HEADS = ("name", "params", "download", "memory", "fits", "head", "on disk")

FAMILY_HEADS = ("family", "cpu", "gguf", "quantised", "heads", "gpu")

models = typer.Typer(no_args_is_help=False)

Json = Annotated[bool, option("json", "One JSON object a model, on stdout.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="An alias, or a hub id such as org/name or org/name:file.gguf.")
]
Yes = Annotated[bool, option("yes", "Do not ask.")]


@models.callback(invoke_without_command=True)
def alone(context: typer.Context, as_json: Json = False) -> None:
    """List aliases and cached models; fetch and delete them; say what and where they are."""
    if context.invoked_subcommand is None:
        list_all(as_json)
    elif typed(context, "as_json"):
        raise InvalidRequest(f"write outrider models {context.invoked_subcommand} --json", "json")


@models.command("list")
def list_all(as_json: Json = False) -> None:
    """List aliases and cached models. Any folder or .gguf file can be given by its path as well."""
    entries = list_models(cache_folder())
    if as_json:
        for entry in entries:
            write(json.dumps(_as_json(entry)) + "\n")
    elif sys.stdout.isatty():
        _table(entries)
    else:
        for entry in entries:
            write("\t".join((*_cells(entry), entry.about)) + "\n")


@models.command()
def families(as_json: Json = False) -> None:
    """List the families that Outrider's own decoder runs, and what works for each."""
    from outrider.load.families import FAMILIES  # help needs no families

    rows = [_family(name) for name in FAMILIES]
    if as_json:
        for row in rows:
            write(json.dumps(row) + "\n")
        return
    for cells in (FAMILY_HEADS, *(tuple(map(str, row.values())) for row in rows)):
        wide = f"{cells[0]:<12} {cells[1]:<4} {cells[2]:<9} {cells[3]:<10} {cells[4]:<6} {cells[5]}"
        write((wide if sys.stdout.isatty() else "\t".join(cells)).rstrip() + "\n")
    note("other model_types run through transformers, as safetensors, on a CPU, in float32, without heads")


def _family(name: str) -> dict[str, str]:
    from outrider.load.families import FAMILIES, sample_config
    from outrider.model.gpu_limits import gpu_obstacle

    config = sample_config(name)
    missing, alone = gpu_obstacle(config), gpu_obstacle(config, ranks=2)
    return {
        "family": name, "cpu": "yes", "gguf": FAMILIES[name].gguf, "quantised": "yes", "heads": "yes",
        "gpu": f"no: {missing}" if missing else "yes, on one GPU" if alone else "yes",
    }  # fmt: skip


@models.command()
def pull(name: Name) -> None:
    """Fetch a model, if it is not here yet, and print its path."""
    write(f"{find(name, cache_folder())}\n")


@models.command()
def path(name: Name) -> None:
    """Print where a model is. Fetches nothing."""
    write(f"{_here(name)}\n")


@models.command()
def show(name: Name = DEFAULT_MODEL, as_json: Json = False) -> None:
    """Tell what a model is: its shape, its sampling defaults, the drafts that fit it. Fetches nothing."""
    path = _here(name)
    from outrider.cli.model_facts import facts_of  # torch takes seconds to import

    facts = facts_of(path, cache_folder())
    if as_json:
        write(json.dumps({"name": name, **facts.as_json()}) + "\n")
        return
    for label, words in (("model", name), *facts.rows()):
        write(f"{label:<16} {words}\n")


@models.command()
def rm(name: Name, yes: Yes = False) -> None:
    """Delete a model that was fetched, and say how much room that makes. Asks first."""
    place = fetched(name, cache_folder())
    if place is None:
        raise InvalidRequest(
            f"{name} was not fetched by Outrider; delete it yourself, if it is not needed: {_here(name)}",
            "name",
        )
    size = size_of(place)
    if not yes and not _agreed(f"Delete {name} ({file_size(size)}) in {place}?"):
        note("nothing was deleted")
        raise typer.Exit(1)
    delete(place)
    note(f"deleted {name}: {file_size(size)} freed")


models.command("remove", hidden=True)(rm)  # as for pairs and keys


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask on: --yes deletes without asking", "yes")
    try:
        return input(f"{fitted(question, sys.stdout)} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _here(name: str) -> Path:
    here = {entry.name: entry.path for entry in list_models(cache_folder()) if entry.path is not None}
    if name in here:
        return here[name]
    if Path(name).expanduser().exists():
        return Path(name).expanduser()
    way_out = (
        f"\nfetch: outrider models pull {name}" if is_model_name(name, cache_folder()) else did_you_mean(name)
    )
    raise ModelNotFound(f"{name!r} is not on this machine{way_out}")


def memory_needed(entry: ModelEntry) -> int:
    """Bytes on a CPU with a full KV cache of the default size."""
    return int(REPACKED * entry.bytes) + CPU_CACHE + PROGRAM


def fits(entry: ModelEntry) -> bool | None:
    """Whether it fits into the memory that is free now; None where that is unknown."""
    free = free_memory()
    return None if free is None else memory_needed(entry) <= free


def _as_json(entry: ModelEntry) -> dict[str, str | int | bool | None]:
    known = entry.alias
    return {
        "name": entry.name,
        "about": entry.about,
        "hub": str(known.hub) if isinstance(known, HubModel) else None,
        "parameters": None if known is None else known.parameters,
        "bytes": entry.bytes,
        "memory_bytes": memory_needed(entry),
        "fits": fits(entry),
        "pair": None if known is None else known.pair,
        "present": entry.present,
        "path": None if entry.path is None else str(entry.path),
    }


def _cells(entry: ModelEntry) -> tuple[str, ...]:
    """One for each of HEADS."""
    known = entry.alias
    size = 0 if known is None else known.parameters
    params = "" if known is None else f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.0f}M"
    head = "yes" if known is not None and known.pair else ""
    fit = {True: "yes", False: "no", None: "?"}[fits(entry)]
    disk = "yes" if entry.present else ""
    return entry.name, params, file_size(entry.bytes), file_size(memory_needed(entry)), fit, head, disk


def _table(entries: list[ModelEntry]) -> None:
    from rich.console import Console  # only where a person looks
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in HEADS:
        table.add_column(
            head, justify="right" if head in ("params", "download", "memory") else "left", no_wrap=True
        )
    for entry in entries:
        table.add_row(
            *_cells(entry), style="dim" if fits(entry) is False else "bold" if entry.present else None
        )
    console = Console()
    console.print(table)
    free = free_memory()
    now = "" if free is None else f" in the {file_size(free)} that are free now"
    for text in (
        f"memory: on a CPU, with a full cache of 1 GiB (--cache-bytes); fits: it does{now}; head: a trained "
        "draft for it comes with Outrider; the others draft by lookup.",
        "outrider models families lists the families that Outrider runs, and what works for each.",
        "outrider chat NAME fetches a model from the hub when it is first used.",
    ):
        console.print(wrapped(text, min(console.width, 100)), style="dim", highlight=False, markup=False)
