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
from outrider.errors import InvalidRequest, ModelNotFound, suggest
from outrider.load.find import ModelEntry, delete, fetched, find, list_models, size_of
from outrider.load.progress import file_size
from outrider.settings import cache_folder
from outrider.wrap import fitted

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
            write(f"{entry.name}\t{file_size(entry.bytes)}\t{_state(entry)}\t{entry.about}\n")


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
    raise ModelNotFound(
        f"{name!r} is not on this machine{suggest(name, here)}\nfetch: outrider models pull {name}"
    )


def _as_json(entry: ModelEntry) -> dict[str, str | int | bool | None]:
    return {
        "name": entry.name,
        "about": entry.about,
        "bytes": entry.bytes,
        "present": entry.present,
        "path": None if entry.path is None else str(entry.path),
    }


def _state(entry: ModelEntry) -> str:
    return "here" if entry.present else "not fetched"


def _table(entries: list[ModelEntry]) -> None:
    from rich.console import Console  # only where a person looks
    from rich.table import Table

    table = Table("name", "size", "state", "about", box=None, pad_edge=False, header_style="bold")
    for entry in entries:
        style = None if entry.present else "dim"
        table.add_row(entry.name, file_size(entry.bytes), _state(entry), entry.about, style=style)
    Console().print(table)
