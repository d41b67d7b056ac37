"""`outrider demo`: the same prompt answered plainly and speculatively, side by side, and what that brought.

What is timed, how often, and when times say nothing: race.py. `--page` shows the same in a browser instead.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from outrider.cli.flag import option
from outrider.cli.options import DEFAULT_MODEL, ENGINE, Draft, Model, takes
from outrider.cli.output import note, open_llm, write
from outrider.cli.race import Race, Scene, Side, prompt_ids
from outrider.cli.serve import serve_table
from outrider.errors import InvalidRequest
from outrider.serve.model_spec import ModelSpec, read_model
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings, usable_cores
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from outrider.engine.llm import LLM

TEXT = (
    "The outrider rides ahead of the carriage. It looks for the road, and the driver follows only where the road is "
    "good. A small model can ride ahead of a large one in the same way. It guesses the next words, the large model "
    "checks all of them at once, and only the words it would have written itself are kept. "
    "Nothing is lost when a guess is wrong, and several words are won when it is right. The large model reads its "
    "weights once for all of them, and reading its weights is what takes the time."
)
NARROW = 64  # columns; below it panes stand one above the other
POLL_SECONDS = 0.2
PAGE = f"http://{ServeSettings().host}:{ServeSettings().port}/"

SCENES = (
    Scene(
        "Rewriting: the answer repeats its prompt",
        f"Repeat this text exactly:\n\n{TEXT}",
        "editing, extracting, code and tool calls are like this",
    ),
    Scene(
        "Chat: little of the answer stands in the prompt",
        "Why is the sky blue?",
        "where drafting does not pay, Outrider does not draft",
    ),
)

Page = Annotated[bool, option("page", "Start the server instead, and open its page in the browser.")]
Port = Annotated[
    int | None, option("port", "With --page: the server's port; 8000 by default.", min=1, max=65535)
]


@takes(ENGINE)
def demo(
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    page: Page = False,
    port: Port = None,
    *,
    settings: Settings,
) -> None:
    """See one prompt answered plainly and speculatively, and what that brings. Takes under a minute.

    outrider demo
    """
    from rich.console import Console

    if draft == "none":
        raise InvalidRequest("--draft none leaves nothing to show; leave it out", "draft")
    if port is not None and not page:
        raise InvalidRequest("--port is the page's: it goes with --page", "port")
    if page:
        _serve_page(model, draft, settings, ServeSettings() if port is None else ServeSettings(port=port))
    console = Console(highlight=False)
    with open_llm(model, draft, settings) as llm:
        head = f"{model} on {_place(llm)}, drafts by {_drafters(llm)}, temperature 0"
        console.print(head, style="bold", markup=False, soft_wrap=True)
        _warm_up(llm, console)
        races = [show_race(llm, scene, console) for scene in SCENES]
    if any(race.busy for race in races):
        console.print(f"\n{_who_is_busy(races)}", soft_wrap=True)
    _what_next(model, draft, console)
    if not all(race.identical for race in races):
        raise typer.Exit(1)


def _who_is_busy(races: Sequence[Race]) -> str:
    others = max(race.others() for race in races)
    cores = (
        f"Other programs used {others:.1f} of {usable_cores()} cores meanwhile"
        if others > 0.05
        else ("Turns of the same work took very different times")
    )
    return f"{cores}: tokens do not depend on that, times do. outrider doctor names the programs."


def _serve_page(model: str, draft: str, settings: Settings, serve: ServeSettings) -> NoReturn:
    """The server, with its page opened once it answers."""
    url = f"http://{serve.host}:{serve.port}/"
    threading.Thread(target=_open_when_ready, args=(url,), name="outrider-open", daemon=True).start()
    spec = ModelSpec(*read_model(model), draft, SamplingParams(), settings, serve)
    raise typer.Exit(serve_table([spec], serve))


def _open_when_ready(url: str) -> None:
    """Ends with the process if the server never gets ready."""
    while not _answers(f"{url}health"):
        time.sleep(POLL_SECONDS)
    note(
        f"page      {url}"
        if webbrowser.open(url)
        else f"page      {url} (no browser was found to open it with)"
    )


def _answers(url: str) -> bool:
    from urllib.request import urlopen  # takes as long to import as the whole of this file

    try:
        with urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:  # URLError is one
        return False


def show_race(llm: LLM, scene: Scene, console: Console) -> Race:
    race = Race(scene)
    asked = " ".join(scene.prompt.split())
    console.print(f"\n{scene.title}", style="bold")
    room = max(console.width - 2, 20)
    console.print(asked if len(asked) <= room else f"{asked[: room - 3]}...", style="dim", soft_wrap=True)
    show = Panes(console, race) if _is_live(console) else Lines()
    with show:
        race.run(llm, show.update)
    colour = "red" if not race.identical else "yellow" if race.busy else "green"
    console.print(race.verdict(), style=f"bold {colour}", soft_wrap=not _is_live(console))
    console.print(f"({scene.moral})", style="dim", soft_wrap=not _is_live(console))
    if not race.identical:
        message = "The tokens differ, which must not be: please report it, with what outrider doctor says."
        console.print(message, style="red", soft_wrap=True)
    return race


def _warm_up(llm: LLM, console: Console) -> None:
    """Build kernels, measure costs and answer once with and without drafts, with another text and for another owner."""
    with console.status("measuring costs and warming up") if _is_live(console) else contextlib.nullcontext():
        llm.prepare(1)
        ids = prompt_ids(llm, "Write the numbers from 1 to 20, and then write them again.")
        for how in (False, True):
            llm.generate([ids], owner="warm-up", temperature=0, max_tokens=24, speculation=how)


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


class Panes:
    """Two panes on a terminal, redrawn as tokens come."""

    def __init__(self, console: Console, race: Race) -> None:
        from rich.live import Live

        self.console, self.race = console, race
        self.live = Live(get_renderable=self._draw, console=console, refresh_per_second=12)

    def __enter__(self) -> Panes:
        self.live.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.live.__exit__(*problem)  # type: ignore[arg-type]

    def update(self, side: Side) -> None:
        """The next frame shows it."""

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        panes = [self._pane(side) for side in (self.race.plain, self.race.speculative)]
        if self.console.width < NARROW:
            return Group(*panes)
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panes)
        return grid

    def _pane(self, side: Side) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

        text = Text()
        held = "underline" if self.console.no_color else "green"
        for words, origin in side.pieces:
            text.append(words, held if origin == "accepted" else None)
        running = side.begun is not None and not side.turns
        return Panel(
            text,
            title=f"[bold]{side.title}[/]",
            subtitle=side.summary(),
            title_align="left",
            subtitle_align="left",
            border_style="bold" if running else "dim",
        )


class Lines:
    """Plain text, for a pipe or a terminal that can only write on: each answer as it comes."""

    def __init__(self) -> None:
        self.titled: set[str] = set()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        write("\n")

    def update(self, side: Side) -> None:
        if side.turns:
            if len(side.turns) == 1:
                write(f"\n[{side.summary()}]\n")
            return
        assert side.answer is not None
        if side.title not in self.titled:
            self.titled.add(side.title)
            write(f"\n[{side.title}]\n")
        write("".join(text for text, _ in side.answer.fresh))


def _drafters(llm: LLM) -> str:
    """The drafters that serve a request which names none."""
    return " and ".join(llm.engine.planner.choices) or "no drafter"


def _place(llm: LLM) -> str:
    if llm.settings.device == "cuda":
        return "the GPU"
    count = llm.settings.threads
    return f"{count} core{'s' if count > 1 else ''}"


def _what_next(model: str, draft: str, console: Console) -> None:
    which = "" if model == DEFAULT_MODEL else f" {shlex.quote(model)}"
    which += "" if draft == "auto" else f" --draft {shlex.quote(draft)}"
    lines = [
        (f"outrider demo{which} --page", f"the same in your browser, at {PAGE}"),
        (f"outrider chat{which} --show", "talk with it, accepted draft tokens in colour"),
        (f"outrider serve{which}", "an OpenAI-compatible server on port 8000"),
        (f"outrider bench{which}", "measure it, by task and drafter"),
    ]
    if line := activation():
        lines.insert(0, (line, "so that the shell finds outrider"))
    console.print("\n[bold]Next[/]")
    wide = max(len(command) for command, _ in lines)
    for command, why in lines:
        console.print(f"  {command:<{wide}}  {why}", markup=False, soft_wrap=True)


def activation() -> str | None:
    """The line that puts this virtual environment on the PATH; None if it is there, or there is none."""
    if sys.prefix == sys.base_prefix:
        return None
    folder = Path(sys.prefix) / ("Scripts" if os.name == "nt" else "bin")
    on_path = (Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part)
    if any(part == folder or part.resolve() == folder.resolve() for part in on_path):
        return None
    script = folder / "activate"
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return str(script) if os.name == "nt" else f"source {shlex.quote(str(script))}"
