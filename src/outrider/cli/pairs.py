"""`outrider pairs`: drafts made for a target, which are taken by themselves: list them, add one's own, score any."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.card_words import described, in_columns, in_tabs, score_table
from outrider.cli.command import Command
from outrider.cli.export_head import export
from outrider.cli.flag import option, typed
from outrider.cli.output import note, write
from outrider.cli.score_pair import score
from outrider.errors import InvalidRequest
from outrider.load.pairs import Pair, add_pair, list_pairs, pair_named, remove_pair
from outrider.settings import cache_folder
from outrider.wrap import fitted

pairs = typer.Typer()

Json = Annotated[bool, option("json", "One JSON object a pair, on stdout.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As outrider pairs lists it.")]
Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="A folder with the draft's weights and its card.json, or distill's --out."
    ),
]
OwnName = Annotated[str | None, option("name", "What to call it; by default as its folder.", "NAME")]
To = Annotated[str | None, option("to", "A folder of pairs to copy it to; by default the cache's.", "DIR")]
Licence = Annotated[
    str | None, option("licence", "Of the draft's weights; by default as its card says.", "TEXT")
]


@pairs.callback(invoke_without_command=True)
def alone(context: typer.Context, as_json: Json = False) -> None:
    """List drafts that are paired with a model; add, remove and score them."""
    if context.invoked_subcommand is None:
        list_all(as_json)
    elif typed(context, "as_json"):
        raise InvalidRequest(f"write outrider pairs {context.invoked_subcommand} --json", "json")


@pairs.command("list")
def list_all(as_json: Json = False) -> None:
    """List pairs: target, draft, sizes, training, acceptance, speed-up. --draft auto takes the one that fits."""
    found, problems = list_pairs(cache_folder())
    if as_json:
        for pair in found:
            write(json.dumps(_shown(pair)) + "\n")
    else:
        for line in in_columns(found) if sys.stdout.isatty() else in_tabs(found):
            write(line + "\n")
    if not found:
        note("no pairs yet: outrider distill makes one, outrider pairs add DIR takes one in")
    for problem in problems:
        note(f"left out: {problem}")


@pairs.command()
def show(name: Name, as_json: Json = False) -> None:
    """Tell everything its card says: by task and temperature, by depth, with and without trees."""
    pair = pair_named(name, cache_folder())
    if as_json:
        write(json.dumps(_shown(pair)) + "\n")
        return
    for label, words in described(pair):
        write(fitted(f"{label:<14} {words}", sys.stdout) + "\n")
    if pair.card.score is not None:
        write("\n" + "".join(f"{fitted(line, sys.stdout)}\n" for line in score_table(pair.card.score)))


@pairs.command()
def add(folder: Folder, name: OwnName = None, to: To = None, licence: Licence = None) -> None:
    """Copy a draft into the catalogue and print where it is. From then on --draft auto takes it for its target."""
    into = cache_folder() / "pairs" if to is None else Path(to).expanduser()
    write(f"{add_pair(Path(folder).expanduser(), into, name, licence).folder}\n")


@pairs.command()
def remove(name: Name) -> None:
    """Delete a pair that was added. The folder it was copied from stays."""
    note(f"removed {remove_pair(name, cache_folder())}")


pairs.command("score", cls=Command)(score)
pairs.command("export", cls=Command)(export)


def _shown(pair: Pair) -> dict[str, Any]:
    return {**pair.as_json(), "folder": str(pair.folder)}
