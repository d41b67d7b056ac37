"""`outrider demo`: the same prompt answered plainly and speculatively, side by side, and what that brought.

Both answers are made here and now, one after the other, so that neither takes the other's cores. Conditions are
equal: a warm engine, temperature 0, and an owner of its own for each, so that neither finds the other's prompt in
the prefix cache nor the other's answer in what lookup remembers. The clock runs from the request to the last token.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.cli.answer import Answer, Pieces, Received, listen
from outrider.cli.options import DEFAULT_MODEL, ENGINE, Draft, Model, takes
from outrider.cli.output import open_llm, write
from outrider.errors import InvalidRequest
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
TOKENS = 120
NARROW = 64  # columns; below it panes stand one above the other
BUSY = 0.25  # cores that others used while an answer ran: its time says less then


@dataclass(frozen=True, slots=True)
class Scene:
    title: str
    prompt: str
    moral: str  # what its result shows


SCENES = (
    Scene(
        "An answer that repeats its prompt",
        f"Repeat this text exactly:\n\n{TEXT}",
        "editing, extracting, code and tools are like this",
    ),
    Scene(
        "Free text",
        "Why is the sky blue?",
        "little of it stands in the prompt; where drafting does not pay, it is left",
    ),
)


@takes(ENGINE)
def demo(model: Model = DEFAULT_MODEL, draft: Draft = "auto", *, settings: Settings) -> None:
    """See one prompt answered plainly and speculatively, and what that brings. Takes under a minute.

    outrider demo
    """
    from rich.console import Console

    if draft == "none":
        raise InvalidRequest("--draft none leaves nothing to show; leave it out", "draft")
    console = Console(highlight=False)
    with open_llm(model, draft, settings) as llm:
        head = f"{model} on {_place(llm)}, drafts by {_drafters(llm)}, temperature 0"
        console.print(head, style="bold", markup=False, soft_wrap=True)
        _warm_up(llm, console)
        duels = [show_duel(llm, scene, console) for scene in SCENES]
    if any(duel.noisy for duel in duels):
        console.print(
            "\nOther programs used the cores meanwhile: times, not tokens, depend on them.", soft_wrap=True
        )
    _what_next(model, draft, console)
    if not all(duel.identical for duel in duels):
        raise typer.Exit(1)


class Pane:
    """One of the two answers, as far as it is written."""

    def __init__(self, title: str) -> None:
        self.title, self.pieces = title, Pieces()
        self.begun: float | None = None
        self.answer: Answer | None = None
        self.others = 0.0  # cores that other programs used meanwhile

    @property
    def seconds(self) -> float:
        if self.answer is not None and self.answer.done:
            return self.answer.ended - self.answer.begun
        return 0.0 if self.begun is None else time.perf_counter() - self.begun

    @property
    def tokens(self) -> int:
        return 0 if self.answer is None else self.answer.tokens

    def summary(self) -> str:
        if self.answer is None or not self.answer.done:
            return f"{self.seconds:.1f} s" if self.begun is not None else "waits"
        rate, steps = self.answer.tokens_per_s, self.answer.tokens_per_step
        return f"{self.seconds:.2f} s, {rate:.0f} tok/s, {steps:.1f} a step"


class Duel:
    """One prompt, answered plainly and speculatively."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.plain, self.speculative = Pane("plain"), Pane("speculative")

    @property
    def same_tokens(self) -> int:
        a, b = (pane.answer.sequences[0].output for pane in (self.plain, self.speculative) if pane.answer)
        return sum(x == y for x, y in zip(a, b, strict=False)) if len(a) == len(b) else 0

    @property
    def identical(self) -> bool:
        return self.same_tokens == self.plain.tokens == self.speculative.tokens

    @property
    def noisy(self) -> bool:
        return max(self.plain.others, self.speculative.others) > BUSY

    def verdict(self) -> str:
        ratio = self.plain.seconds / self.speculative.seconds
        if self.noisy:
            pace = f"about {ratio:.1f}x as fast"  # why only about, the end says
        elif ratio >= 1.15:
            pace = f"{ratio:.1f}x faster"
        elif ratio >= 0.95:
            pace = f"as fast ({ratio:.2f}x)"
        else:
            pace = f"slower here ({ratio:.2f}x)"
        answer = self.speculative.answer
        held = 0 if answer is None else answer.sequences[0].accepted
        same = f"{self.same_tokens} of {self.plain.tokens} tokens identical"
        return f"{pace}, {same}, {held} of them drafted"


def show_duel(llm: LLM, scene: Scene, console: Console) -> Duel:
    duel = Duel(scene)
    asked = " ".join(scene.prompt.split())
    console.print(f"\n{scene.title}", style="bold")
    room = max(console.width - 2, 20)
    console.print(asked if len(asked) <= room else f"{asked[: room - 3]}...", style="dim", soft_wrap=True)
    show = Panes(console, duel) if _is_live(console) else Lines()
    with show:
        for pane, how in ((duel.plain, False), (duel.speculative, True)):
            _answer(llm, scene.prompt, pane, how, show)
    good = "green" if duel.identical else "red"
    console.print(duel.verdict(), style=f"bold {good}", soft_wrap=not _is_live(console))
    console.print(f"({scene.moral})", style="dim", soft_wrap=not _is_live(console))
    if not duel.identical:
        message = "The tokens differ, which must not be: please report it, with what outrider doctor says."
        console.print(message, style="red", soft_wrap=True)
    return duel


def _answer(llm: LLM, prompt: str, pane: Pane, speculate: bool, show: Panes | Lines) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    if not speculate:
        params = replace(params, speculation=False)  # type: ignore[arg-type] # SamplingParams reads it
    received: Received = queue.SimpleQueue()
    ids = _prompt_ids(llm, prompt)
    before, pane.begun = _others_seconds(), time.perf_counter()
    pane.answer = answer = Answer(llm, ids, params, received, owner=f"demo {pane.title}")
    with contextlib.closing(listen({answer.request.id: answer}, received)) as events:
        for _ in events:
            pane.pieces += answer.fresh
            show.update(pane)
    pane.others = (_others_seconds() - before) / pane.seconds


def _others_seconds() -> float:
    """Core seconds that other programs have used so far, as far as cores are scarce. Linux only, else 0."""
    try:
        spent = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    if (os.cpu_count() or 1) > usable_cores():
        return 0.0  # most of the machine's work is elsewhere
    user, nice, system, _, _, *interrupts = (int(ticks) for ticks in spent[:8])
    own = os.times()
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _prompt_ids(llm: LLM, prompt: str) -> list[int]:
    if llm.template is None:
        return llm.tokenizer.encode(f"{prompt}\n\n")
    return llm.chat_ids([{"role": "user", "content": prompt}])


def _warm_up(llm: LLM, console: Console) -> None:
    """Build kernels, measure costs and answer once with and without drafts, with another text and for another owner."""
    with console.status("warming up") if _is_live(console) else contextlib.nullcontext():
        llm.prepare(1)
        ids = _prompt_ids(llm, "Write the numbers from 1 to 20, and then write them again.")
        for how in (False, True):
            llm.generate([ids], owner="warm-up", temperature=0, max_tokens=24, speculation=how)


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


class Panes:
    """Two panes on a terminal, redrawn as tokens come."""

    def __init__(self, console: Console, duel: Duel) -> None:
        from rich.live import Live

        self.console, self.duel = console, duel
        self.live = Live(get_renderable=self._draw, console=console, refresh_per_second=12)

    def __enter__(self) -> Panes:
        self.live.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.live.__exit__(*problem)  # type: ignore[arg-type]

    def update(self, pane: Pane) -> None:
        """The next frame shows it."""

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        panes = [self._pane(pane) for pane in (self.duel.plain, self.duel.speculative)]
        if self.console.width < NARROW:
            return Group(*panes)
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panes)
        return grid

    def _pane(self, pane: Pane) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

        text = Text()
        held = "underline" if self.console.no_color else "green"
        for words, origin in pane.pieces:
            text.append(words, held if origin == "accepted" else None)
        running = pane.begun is not None and not (pane.answer and pane.answer.done)
        return Panel(
            text,
            title=f"[bold]{pane.title}[/]",
            subtitle=pane.summary(),
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

    def update(self, pane: Pane) -> None:
        assert pane.answer is not None
        if pane.title not in self.titled:
            self.titled.add(pane.title)
            write(f"\n[{pane.title}]\n")
        write("".join(text for text, _ in pane.answer.fresh))
        if pane.answer.done:
            write(f"\n[{pane.summary()}]\n")


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
