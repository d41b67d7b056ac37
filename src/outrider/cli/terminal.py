"""Turns of a conversation from stdin: typed by a person, pasted, or from a pipe.

A turn is a line; or lines between two of \"\"\"; or lines that end in a backslash but for the last; or what was pasted
at once. What is typed while an answer is written is dropped, so that it does not get into the answer's text.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from outrider.cli.output import note, write

try:
    import termios
except ImportError:  # not a Unix
    termios = None  # type: ignore[assignment]

BLOCK = '"""'
PASTE_SECONDS = 0.03  # a line that follows sooner was pasted, not typed
HISTORY_LINES = 1000
LEAVE_HINT = "(Ctrl-C again leaves; so do Ctrl-D and /exit)"


def typed_turns(history: Path | None) -> Generator[str]:
    """From a person, with editing and, in `history`, what was typed before."""
    # A parent that ignores SIGINT (a shell's background job, nohup) must not disable Ctrl-C here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _line_editing(history):
            yield from _person()
    finally:
        signal.signal(signal.SIGINT, before)


def _person() -> Iterator[str]:
    hinted = False
    while True:
        try:
            turn = read_turn(input, "> ", "... ")
            while _more_was_pasted():
                turn += "\n" + input("")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            if hinted:
                return
            note(LEAVE_HINT)
            hinted = True
            continue
        hinted = False
        yield turn.strip()


def piped_turns() -> Generator[str]:
    lines = iter(sys.stdin)

    def line(_: str) -> str:
        try:
            return next(lines).rstrip("\r\n")
        except StopIteration:
            raise EOFError from None

    with contextlib.suppress(EOFError):
        while True:
            yield read_turn(line, "", "").strip()


def read_turn(line: Callable[[str], str], first: str, more: str) -> str:
    """One turn of one or more lines. `line` asks for one, with a prompt, and raises EOFError when there is none."""
    text = line(first)
    if text.strip().startswith(BLOCK):
        text = text.strip().removeprefix(BLOCK)
        while not text.rstrip().endswith(BLOCK):
            text += "\n" + line(more)
        return text.rstrip().removesuffix(BLOCK)
    while text.endswith("\\"):
        text = text[:-1] + "\n" + line(more)
    return text


def _more_was_pasted() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], PASTE_SECONDS)[0])
    except (OSError, ValueError):  # stdin is no file here
        return False


@contextlib.contextmanager
def keys_held() -> Iterator[None]:
    """While an answer is written: keys are not echoed, and forgotten afterwards. Ctrl-C still works."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    kept: list[Any] = termios.tcgetattr(descriptor)
    silent = [*kept]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, kept)  # drops what was typed meanwhile


@contextlib.contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Editing by readline, where the system has it. Only the user may read the history file."""
    try:
        import readline
    except ImportError:
        yield
        return
    if history is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
        readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        if history is not None:
            with contextlib.suppress(OSError):  # a folder that cannot be written to: nothing is kept
                history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
                readline.write_history_file(history)
