"""`outrider chat`: a conversation in the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.answer import Answer, Heard, listen
from outrider.cli.options import (
    DEFAULT_MODEL,
    ENGINE,
    SAMPLING,
    Draft,
    GenerationConfig,
    Model,
    ShowStats,
    System,
    takes,
)
from outrider.cli.output import complain, note, open_llm, write
from outrider.errors import InvalidRequest, suggest
from outrider.settings import Settings
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

HELP = """\
/reset   forget the conversation so far
/help    show this
/quit    leave (so does Ctrl-D)
Ctrl-C   stop the answer being written"""
COMMANDS = ("/help", "/quit", "/reset")


@takes(SAMPLING, ENGINE)
def chat(
    model: Model = DEFAULT_MODEL,
    system: System = None,
    draft: Draft = "auto",
    stats: ShowStats = False,
    generation_config: GenerationConfig = "auto",
    *,
    params: SamplingParams,
    given: frozenset[str],
    settings: Settings,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /help lists what else there is.

    Lines from a pipe are answered one after the other.
    """
    if params.n != 1:
        raise InvalidRequest("a chat has one answer a turn; leave out -n", "n")
    with open_llm(model, draft, settings) as llm:
        if llm.template is None:
            raise InvalidRequest(f"{model} has no chat template; use outrider generate", "model")
        talk = Talk(llm, llm.sampling.under(params, given), system, stats)
        interactive = sys.stdin.isatty()
        for line in _typed() if interactive else _piped():
            if line == "/quit":
                break
            talk.take(line)
    if talk.failed and not interactive:
        raise typer.Exit(2)


class Talk:
    """The conversation so far."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, stats: bool) -> None:
        self.llm, self.params, self.stats = llm, params, stats
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self.opening)
        self.failed = False

    def take(self, line: str) -> None:
        """A line the user wrote: a command or a turn. A refused turn is left out of the conversation."""
        if line == "/reset":
            self.messages = list(self.opening)
        elif line == "/help":
            note(HELP)
        elif line.startswith("/"):
            complain(f"there is no command {line.split()[0]!r}{suggest(line.split()[0], COMMANDS)}")
            self.failed = True
        elif line:
            self.messages.append({"role": "user", "content": line})
            try:
                answer = self._answer()
                self.messages.append({"role": "assistant", "content": answer.text})
            except InvalidRequest as problem:
                self.messages.pop()
                complain(f"{problem} (/reset starts a new conversation)")
                self.failed = True

    def _answer(self) -> Answer:
        heard: Heard = queue.SimpleQueue()
        answer = Answer(self.llm, self.llm.chat_ids(self.messages), self.params, heard)
        running = {answer.request.id: answer}
        interactive = sys.stdin.isatty()
        try:
            with contextlib.closing(listen(running, heard)) as events:  # closing it aborts the answer
                for _, event in events:
                    write(event.text)
        except KeyboardInterrupt:
            if not interactive:
                raise
        write("\n")
        if answer.reasons[0] == "length":
            note(f"[cut at {self.params.max_tokens} tokens; --max-tokens sets this]")
        if self.stats:
            note(answer.stats_line())
        return answer


def _typed() -> Iterator[str]:
    """Lines from a person, with history and editing where the system has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what gives input() history
    note("/help for help, /quit to leave")
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()
