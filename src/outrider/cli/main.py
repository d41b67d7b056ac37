"""The command `outrider`: its subcommands, and how anything that goes wrong is reported.

Nothing here or in the command files imports torch at the top: `outrider --help` must answer at once.
One file per command; to add one, write its function and add its name to `ORDER` in command.py.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from outrider import __version__
from outrider.cli.command import ORDER, Command, Group
from outrider.cli.output import complain
from outrider.errors import InvalidRequest, OutriderError, show_cause

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def make_app(names: Sequence[str] = ORDER) -> typer.Typer:
    """The command line with these commands. Each is in a file of its name. Importing and describing all of them takes a
    fifth of a second, so that a call gets those it names.
    """
    made = typer.Typer(
        name="outrider",
        cls=Group,
        help="Run large language models: same tokens, fewer passes.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,  # plain, as every command's own help; and rich takes a third of a second to import
    )
    made.callback()(_outrider)
    for name in names:
        module = importlib.import_module(f"outrider.cli.{name}")
        command = module.explain if name == "help" else getattr(module, name)
        if isinstance(command, typer.Typer):
            made.add_typer(command, name=name, cls=Group)
        elif name == "bench":
            made.command(name, cls=_with_serve())(command)
        else:
            made.command(name, cls=Command)(command)
    return made


def _with_serve() -> type[Command]:
    """The class of `bench`, which measures in this process, or a server by its sub-command."""
    from outrider.cli.bench_serve import bench_serve

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command("bench serve", cls=Command)(bench_serve)
    return type("Bench", (Command,), {"commands": {"serve": typer.main.get_command(alone)}})


def _version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {__version__}")
        raise typer.Exit


def _outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Errors are one clear message on stderr and an exit code, never a traceback."""
    # A warning says what, not where in the code it arose.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    first = next(iter(sys.argv[1:] if argv is None else argv), None)
    # `help` describes the other commands, so it needs all of them.
    named = [name for name in ORDER if name == first != "help"]
    try:
        code = make_app(named or ORDER)(argv, prog_name="outrider", standalone_mode=False) or 0
    except OutriderError as error:
        show_cause(error)
        complain(str(error))
        code = USAGE if isinstance(error, InvalidRequest) else FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = _unexpected(error)
    sys.exit(code)


def main() -> NoReturn:
    """The entry point: `run`, then the process ends at once. Taking the interpreter apart with torch in it would take
    half a second more.
    """
    try:
        run()
    except SystemExit as left:
        others = [thread for thread in threading.enumerate() if not thread.daemon]
        if (
            "torch" not in sys.modules
            or others != [threading.main_thread()]
            or not isinstance(left.code, int)
        ):
            raise
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # the reader has gone away, or the stream is closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(left.code)


def _unexpected(error: Exception) -> int:
    if hasattr(error, "format_message"):  # a usage error; its class moved between versions of typer
        message = error.format_message().strip()
        command = getattr(getattr(error, "ctx", None), "command_path", "outrider")
        if message:  # without one, help has been shown already
            complain(f"{message[0].lower()}{message[1:]}\nsee: {command} --help")
        return USAGE
    if os.environ.get("OUTRIDER_DEBUG"):
        traceback.print_exception(error)
    else:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        complain(f"{what} (OUTRIDER_DEBUG=1 shows where)")
    return FAILED
