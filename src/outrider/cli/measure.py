"""What `bench` and `audit` share: as-if models, progress, and where results go."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from outrider.bench.compare import cut
from outrider.cli.flag import option
from outrider.cli.output import note, write
from outrider.errors import InvalidRequest
from outrider.settings import usable_cores

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

BUSY = 0.4  # load a core, before anything is measured
EVERY = 10.0  # seconds between lines of progress in a pipe
BAR = 12  # columns
WIDTH = 80  # of lines, where there is no terminal


SHAPE = "1b|8b|70b|30b-a3b|HIDDEN:LAYERS:HEADS:KV_HEADS:INTERMEDIATE[:VOCAB][:EXPERTSxPER_TOKEN]"
AsIfShape = Annotated[
    str | None,
    option("as_if", "Widen the model to this shape: a big model's cost, the small one's text.", SHAPE),
]
DraftAsIf = Annotated[
    str | None, option("draft_as_if", "With --as-if: draft with the same model in this shape.", SHAPE)
]
DraftLayers = Annotated[
    str | None,
    option(
        "draft_layers", "With --draft-as-if: keep N of its layers, or these; else all that fit.", "N|0-3,5-29"
    ),
]
JsonFile = Annotated[str | None, option("json", "Write the results as JSON, too; - is stdout.", "FILE")]
HtmlFile = Annotated[str | None, option("html", "Write one page with plots and every figure, too.", "FILE")]


def described(llm: LLM, program: str = "outrider") -> dict[str, Any]:
    """Where the numbers come from; and what the model is, if it is not what it seems."""
    from outrider.bench.as_if import AsIf
    from outrider.engine.certificate import certificate

    report: dict[str, Any] = {"certificate": certificate(program), "draft": llm.drafter}
    if isinstance(llm, AsIf):
        report["as_if"] = llm.described()
        note(textwrap.fill(report["as_if"]["meaning"], WIDTH - 1))
    return report


def warn_if_busy() -> None:
    """Warns when other programs use the cores."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > BUSY * cores:
        note(f"warning: the machine is busy (load {load:.1f} on {cores} cores): figures may be far off")


def say_loading(model: str) -> None:
    """Says so in a pipe; a terminal shows it anyway."""
    if not sys.stderr.isatty():
        note(cut(f"loading {model}", WIDTH))


def writable(file: str | None) -> Path | None:
    """What cannot be written is said before anything is measured."""
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        path.touch()
    except OSError as problem:
        raise InvalidRequest(f"{file} cannot be written: {problem.strerror}", "html") from None
    return path


def write_page(file: Path | None, made: Callable[[], str]) -> None:
    """To the file that `writable` gave, if a page was asked for."""
    if file is not None:
        file.write_text(made(), encoding="utf-8")
        note(f"written to {file}")


class Progress:
    """What runs, how far it is and about how long it takes, on stderr: one line that is written over where a person
    looks, else a line a stage and one every few seconds.

    `stages` is what is to come, each with what it costs in any unit.
    """

    def __init__(self, stages: Mapping[str, float]) -> None:
        total, before = sum(stages.values()) or 1.0, 0.0
        self.parts: dict[str, tuple[float, float]] = {}  # where a stage begins, and its share
        for name, cost in stages.items():
            self.parts[name] = before / total, cost / total
            before += cost
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.begun = time.monotonic()
        self.last: tuple[str, float] = ("", 0.0)

    def of(self, stage: str) -> Callable[[str, float], None]:
        """A callback for one stage: takes what it does now and the share of it that is done."""
        begin, share = self.parts[stage]
        return lambda what, done: self._tell(stage, what, begin + share * done)

    def _tell(self, stage: str, what: str, done: float) -> None:
        passed = time.monotonic() - self.begun
        if not self.live and stage == self.last[0] and passed - self.last[1] < EVERY:
            return
        self.last = stage, passed
        left = f", about {passed / done - passed:.0f} s left" if done > 0.02 else ""
        width = (shutil.get_terminal_size().columns if self.live else WIDTH) - 1
        bar = f"{'#' * round(BAR * done):.<{BAR}} " if self.live else ""
        line = f"{bar}{100 * done:3.0f} % {cut(what, width - len(bar) - 6 - len(left))}{left}"
        if self.live:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        else:
            note(line)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class Report(dict[str, Any]):
    """Results, kept in a file as they come if one is named: measuring takes long, and may be cut short."""

    def __init__(self, kind: str, file: str | None, **found: Any) -> None:
        super().__init__(kind=kind, complete=False, **found)
        self.file = None if file in (None, "-") else Path(str(file)).expanduser()
        self.aloud = file == "-"
        self.keep()  # what cannot be written is said before anything is measured

    def keep(self) -> None:
        """A reader never sees half of it."""
        if self.file is None:
            return
        part = self.file.with_name(f"{self.file.name}.part")
        try:
            part.write_text(self._text(), encoding="utf-8")
            part.replace(self.file)
        except OSError as problem:
            raise InvalidRequest(f"{self.file} cannot be written: {problem.strerror}", "json") from None

    def deliver(self) -> None:
        """To the file or to stdout, if either was asked for."""
        self["complete"] = True
        if self.aloud:
            write(self._text())
        elif self.file is not None:
            self.keep()
            note(f"written to {self.file}")

    def _text(self) -> str:
        return json.dumps(self, indent=2) + "\n"
