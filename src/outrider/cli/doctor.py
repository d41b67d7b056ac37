"""`outrider doctor`: what is here, what will be slow and why, and the command that fixes each."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.flag import option
from outrider.cli.output import in_colour, write

if TYPE_CHECKING:
    from outrider.cli.checks import Finding

COLOURS = {"ok": "32", "note": "36", "warning": "33", "error": "31"}
STATES, TOPICS = 8, 9  # columns
Json = Annotated[bool, option("json", "One JSON object, on stdout.")]


def doctor(as_json: Json = False) -> None:
    """Tell what is here, what will be slow and why, and the command that fixes it. Exit status 1 on errors.

    Loads no model and takes about a second. Put its output into bug reports: it holds no keys and no texts.
    """
    from outrider.cli.checks import findings  # no other command waits for what it imports

    found = []
    for finding in findings():
        found.append(finding)
        if not as_json:
            write(_lines(finding))
    bad = sum(finding.state == "error" for finding in found)
    doubtful = sum(finding.state == "warning" for finding in found)
    if as_json:
        write(
            json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in found]}, indent=2) + "\n"
        )
    else:
        write(f"\n{_count(bad, 'error')}, {_count(doubtful, 'warning')}\n")
    if bad:
        raise typer.Exit(1)


def _lines(finding: Finding) -> str:
    """Wrapped to the terminal; in a pipe one line each, for grep."""
    state = f"{finding.state:<{STATES}}"
    if in_colour(sys.stdout):
        state = f"\x1b[{COLOURS[finding.state]}m{state}\x1b[0m"
    indent = " " * (STATES + TOPICS)
    texts = [finding.text, *([f"-> {finding.mend}"] if finding.mend else [])]
    if sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns - len(indent), 20)
        texts = [line for text in texts for line in textwrap.wrap(text, width, break_long_words=False)]
    return f"{state}{finding.topic:<{TOPICS}}" + f"\n{indent}".join(texts) + "\n"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
