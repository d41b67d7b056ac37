"""The command `outrider`: its subcommands, and how anything that goes wrong is reported.

Nothing here or in the command files imports torch at the top: `outrider --help` must answer at once.
One file per command; to add one, write its function and add it to `app` below.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from outrider import __version__
from outrider.cli.advise import advise
from outrider.cli.audit import audit
from outrider.cli.bench import bench
from outrider.cli.bench_serve import bench_serve
from outrider.cli.chat import chat
from outrider.cli.command import Command, Group
from outrider.cli.demo import demo
from outrider.cli.distill import distill
from outrider.cli.doctor import doctor
from outrider.cli.draft import draft
from outrider.cli.generate import generate
from outrider.cli.help import explain
from outrider.cli.keys import keys
from outrider.cli.models import models
from outrider.cli.output import complain
from outrider.cli.pairs import pairs
from outrider.cli.serve import serve
from outrider.errors import InvalidRequest, OutriderError, show_cause

FAILED, USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="outrider",
    cls=Group,
    help="Run large language models: same tokens, fewer passes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain, as every command's own help; and rich takes a third of a second to import
)
app.command("demo", cls=Command)(demo)
app.command("generate", cls=Command)(generate)
app.command("chat", cls=Command)(chat)
app.command("serve", cls=Command)(serve)
app.command("audit", cls=Command)(audit)
app.command("bench", cls=Command)(bench)
app.command("bench serve", cls=Command)(bench_serve)
app.command("advise", cls=Command)(advise)
app.command("distill", cls=Command)(distill)
app.add_typer(models, name="models", cls=Group)
app.add_typer(pairs, name="pairs", cls=Group)
app.command("doctor", cls=Command)(doctor)
app.add_typer(keys, name="keys", cls=Group)
app.add_typer(draft, name="draft", cls=Group)
app.command("help", cls=Command)(explain)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
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
    try:
        code = app(argv, prog_name="outrider", standalone_mode=False) or 0
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
