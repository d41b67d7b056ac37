"""`outrider help`: what a command does, or what a word of the output means. The words are in `glossary.md`."""

from __future__ import annotations

import re
import sys
from importlib import resources
from typing import Annotated, Any

import typer

from outrider.cli.command import Group
from outrider.cli.output import write
from outrider.errors import InvalidRequest, closest
from outrider.wrap import fitted

Words = Annotated[
    list[str] | None, typer.Argument(metavar="WORD...", help="A command, or a word such as acceptance rate.")
]


def explain(ctx: typer.Context, words: Words = None) -> None:
    """Explain a command, or a word of the output such as accepted or tokens per step."""
    asked, top = " ".join(words or ()), ctx.find_root()
    known = glossary()
    meaning, command = known.get(asked.lower()), _command(top, asked.split())
    if meaning is not None:
        also = f"\nThe command: outrider {asked} --help" if command is not None else ""
        write(fitted(f"{asked}: {meaning}{also}", sys.stdout) + "\n")
    elif command is not None:
        write(command.get_help() + "\n")
    else:
        near = closest(asked.lower(), known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise InvalidRequest(f"no command and no word {asked!r:.60}{hint}\nsee: outrider --help", "word")


def glossary() -> dict[str, str]:
    text = resources.files("outrider").joinpath("glossary.md").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for words, meaning in re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", meaning)
        for word in re.split(r", | \((?=[A-Z])", words):
            found[word.strip("`)").lower()] = plain
    found.pop("word")  # the tables' heading
    return found


def _command(top: Any, path: list[str]) -> Any:
    """The context of the command that these words name; the top one for none."""
    context = top
    for name in path:
        commands = getattr(context.command, "commands", {})
        if name not in commands:
            return None
        above = context if isinstance(context.command, Group) else context.parent
        words = name if above is context else f"{context.info_name} {name}"
        context = typer.Context(commands[name], info_name=words, parent=above)
    return context
