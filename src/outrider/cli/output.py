"""Where words go: answers to stdout, everything about them to stderr; styled only where a person looks."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from outrider.draft.names import check_parts, parse_draft
from outrider.errors import InvalidRequest, OutriderError, install
from outrider.load.find import find
from outrider.load.progress import bar
from outrider.model.torch_import import import_torch_quickly
from outrider.settings import Settings, cache_folder
from outrider.wrap import WordWrap, fitted, terminal_width

if TYPE_CHECKING:
    from outrider.engine.build import Watch
    from outrider.engine.llm import LLM

PIPE_CLOSED = 141  # what a shell reports for SIGPIPE


def write(text: str) -> None:
    """To stdout, at once. A reader that has gone away ends the command quietly."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more as it leaves; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


class Screen:
    """An answer on stdout as it is written: on a terminal, lines break between words."""

    def __init__(self) -> None:
        width = terminal_width(sys.stdout)
        self._wrap = WordWrap(width) if width else None

    def write(self, text: str) -> None:
        write(text if self._wrap is None else self._wrap.feed(text))

    def end(self) -> None:
        self.write("\n")


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Around imports of packages that only this extra brings."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] == "outrider":
            raise
        raise OutriderError(
            f"{what} needs {missing.name}, which is not installed; {install(extra)}"
        ) from None


def note(text: str) -> None:
    """A line about the answer, on stderr; dim where colours are wanted."""
    text = fitted(text, sys.stderr)
    print(f"\x1b[2m{text}\x1b[0m" if in_colour(sys.stderr) else text, file=sys.stderr, flush=True)


# How --show marks a token: on a terminal by colour, elsewhere by brackets. Plain tokens are left as they are.
COLOURS: dict[str, str] = {"accepted": "32", "recovered": "31", "bonus": "36"}
BRACKETS: dict[str, str] = {"accepted": "[]", "recovered": "<>", "bonus": "{}"}
LEGEND = "accepted draft tokens {}, recovered tokens {}, bonus tokens {}, all others plain"


def in_colour(out: TextIO) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def marked(pieces: Sequence[tuple[str, str]]) -> str:
    """Text with each token marked by its origin, for stdout."""
    colour = in_colour(sys.stdout)

    def mark(text: str, origin: str) -> str:
        if not text or origin not in COLOURS:
            return text
        if colour:
            return f"\x1b[{COLOURS[origin]}m{text}\x1b[0m"
        return f"{BRACKETS[origin][0]}{text}{BRACKETS[origin][1]}"

    return "".join(mark(text, origin) for text, origin in pieces)


def explain_marks() -> None:
    """What `marked` means, on stderr."""
    colour = in_colour(sys.stdout)
    note(LEGEND.format(*("green", "red", "cyan") if colour else (BRACKETS[o] for o in COLOURS)))


def complain(text: str) -> None:
    print(fitted(f"error: {text}", sys.stderr), file=sys.stderr, flush=True)


def open_llm(
    model: str,
    draft: str,
    settings: Settings,
    shape: str | None = None,
    draft_shape: str | None = None,
    draft_layers: str | None = None,
) -> LLM:
    """Find the model, fetching it if need be, then load it. An unknown name fails before torch loads.

    With a `shape` it is loaded as if it had that shape; so is the draft, with one of its own.
    """
    path = find(model, cache_folder())
    parts = parse_draft(draft)
    check_parts(parts, cache_folder())
    if shape is None and (draft_shape is not None or draft_layers is not None):
        raise InvalidRequest("--draft-as-if and --draft-layers go with --as-if", "as_if")
    from outrider.load.template import renderers  # tokenizers take a while to import

    renderers.prepare()  # starts while the model loads
    with _loading(model) as watch, _uncollected():
        if shape is not None:
            from outrider.bench.as_if import AsIf

            llm: LLM = AsIf(path, shape, settings, draft, draft_shape, draft_layers)
        else:
            if not any(part.kind == "own" for part in parts):  # a user's own drafter may compile
                import_torch_quickly()
            from outrider.engine.llm import LLM  # torch takes seconds to import
            from outrider.engine.memory import runs_on_gpu

            if runs_on_gpu(settings):
                from outrider.model.kernels.gpu.compiling import watch_compiling  # Triton comes with it

                watch_compiling(lambda: note(COMPILING))
            llm = LLM(path, draft=draft, settings=settings, watch=watch)
    if llm.memory is not None:
        note(f"memory: {llm.memory.describe()}")
    return llm


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Turns the garbage collector off. Imports and vocabularies make many objects and no garbage, and collecting would
    take a tenth of the loading time (log/083).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


COMPILING = "compiling kernels for this GPU, which takes some seconds: later starts find them on disk"


@contextlib.contextmanager
def _loading(model: str) -> Iterator[Watch | None]:
    """Shows on a terminal what the weights take in memory and how far they are read."""
    if not sys.stderr.isatty():
        yield None
        return
    with bar(f"loading {Path(model).name}", transient=True) as shown:

        def watch(text: str, total: int) -> Callable[[int], None]:
            note(f"{model}: {text}")
            return lambda done: shown(done, total)

        yield watch
