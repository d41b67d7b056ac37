"""`outrider chat`: a conversation in the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.answer import Answer, Received, listen
from outrider.cli.flag import option
from outrider.cli.options import (
    DEFAULT_MODEL,
    ENGINE,
    SAMPLING,
    Draft,
    GenerationConfig,
    Model,
    ShowOrigins,
    ShowStats,
    System,
    takes,
)
from outrider.cli.output import Screen, complain, explain_marks, marked, note, open_llm
from outrider.cli.terminal import keys_held, piped_turns, typed_turns
from outrider.errors import InvalidRequest, suggest
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

HELP = '''\
/clear           forget the conversation so far (also /reset)
/retry           answer the last turn anew
/system TEXT     set the system prompt; without TEXT, show it
/set NAME VALUE  set a sampling parameter, such as /set temperature 0.2; alone, show them
/show            colour tokens by where they came from, or no longer
/stats           tell tokens, times and rates after each answer, or no longer
/save FILE       write the conversation as JSON, for outrider generate --prompts FILE
/help            show this (also /?)
/exit            leave (also /bye, /quit, Ctrl-D, or Ctrl-C twice)
Ctrl-C           stop the answer being written
"""              begin and end a turn of several lines; so does \\ at a line's end'''
LEAVE = ("/exit", "/quit", "/bye")
SETTABLE = (
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    ),
    *("seed", "max_tokens", "min_tokens", "speculation"),
)
History = Annotated[
    bool,
    option(
        "history",
        "Keep what is typed, for the arrow keys of later chats; in the cache folder, for you alone.",
        None,
        "--history/--no-history",
    ),
]


@takes(SAMPLING, ENGINE)
def chat(
    model: Model = DEFAULT_MODEL,
    system: System = None,
    draft: Draft = "auto",
    show_origins: ShowOrigins = False,
    stats: ShowStats = False,
    history: History = True,
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
        talk = Talk(llm, llm.sampling.under(params, given), system, stats, show_origins)
        interactive = sys.stdin.isatty()
        if interactive:
            note(f"{model}, drafter {llm.drafter}. /help lists commands, /bye leaves.")
        kept = cache_folder() / "chat-history" if history else None
        with contextlib.closing(typed_turns(kept) if interactive else piped_turns()) as turns:
            for turn in (part for typed in turns for part in talk.parts(typed)):
                if turn in LEAVE:
                    break
                talk.take(turn)
    if talk.failed and not interactive:
        raise typer.Exit(2)


class Talk:
    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, stats: bool, show: bool = False
    ) -> None:
        self.llm, self.params, self.stats, self.show = llm, params, stats, show
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.failed = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/reset": self._clear,
            "/retry": self._retry,
            "/system": self._system,
            "/set": self._set,
            "/show": self._show,
            "/stats": self._stats,
            "/save": self._save,
            "/help": lambda _: note(HELP),
            "/?": lambda _: note(HELP),
        }
        if show:
            explain_marks()

    def parts(self, turn: str) -> list[str]:
        """Commands that were pasted together, one by one; anything else is one turn, also a list of paths."""
        lines = [line.strip() for line in turn.split("\n") if line.strip()]
        known = any(line.partition(" ")[0] in (*self.commands, *LEAVE) for line in lines)
        return lines if known and all(line.startswith("/") for line in lines) else [turn]

    def take(self, turn: str) -> None:
        """What the user wrote: a command or words. A refused turn is left out of the conversation."""
        if not turn:
            return
        try:
            if turn.startswith("/") and "\n" not in turn:  # a pasted text may begin with a path
                self._run_command(turn)
            else:
                self._ask([*self.messages, {"role": "user", "content": turn}])
        except InvalidRequest as problem:
            complain(str(problem))
            self.failed = True

    def _run_command(self, turn: str) -> None:
        name, _, argument = turn.partition(" ")
        if name not in self.commands:
            raise InvalidRequest(f"there is no command {name!r}{suggest(name, (*self.commands, *LEAVE))}")
        self.commands[name](argument.strip())

    def _ask(self, messages: list[dict[str, Any]]) -> None:
        """Answer the last of `messages`; they become the conversation once there is an answer."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            answer = self._answer(self.llm.chat_ids([*opening, *messages]))
        except InvalidRequest as problem:
            raise InvalidRequest(f"{problem} (/clear starts a new conversation)", problem.param) from None
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]

    def _answer(self, prompt_ids: list[int]) -> Answer:
        received: Received = queue.SimpleQueue()
        answer = Answer(self.llm, prompt_ids, self.params, received)
        running = {answer.request.id: answer}
        interactive, screen = sys.stdin.isatty(), Screen()
        with keys_held():
            try:
                with contextlib.closing(listen(running, received)) as events:  # closing it aborts the answer
                    for _, event in events:
                        screen.write(marked(answer.fresh) if self.show else event.text)
            except KeyboardInterrupt:
                if not interactive:
                    raise
            screen.end()
        if answer.reasons[0] == "length":
            note(f"[cut at {self.params.max_tokens} tokens; /set max_tokens N or --max-tokens sets this]")
        if self.stats:
            note(answer.stats_line())
        return answer

    def _clear(self, _: str) -> None:
        self.messages = []
        note("conversation forgotten; the system prompt stays" if self.system else "conversation forgotten")

    def _retry(self, _: str) -> None:
        if not self.messages:
            raise InvalidRequest("there is nothing to answer anew yet")
        self._ask(self.messages[:-1])

    def _system(self, text: str) -> None:
        if text:
            self.system = text
            note("system prompt set")
        else:
            note("no system prompt" if self.system is None else self.system)

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if not name:
            note("  ".join(f"{known}={getattr(self.params, known)}" for known in SETTABLE[:-1]))
            return
        if name not in SETTABLE:
            raise InvalidRequest(f"there is no parameter {name!r} to set{suggest(name, SETTABLE)}", name)
        if not value.strip():
            raise InvalidRequest(f"/set {name} needs a value, such as /set temperature 0.2", name)
        self.params = replace(self.params, **{name: _read(value.strip())})
        note(f"{name} = {value.strip()}")

    def _show(self, _: str) -> None:
        self.show = not self.show
        if self.show:
            explain_marks()
        else:
            note("tokens are no longer marked")

    def _stats(self, _: str) -> None:
        self.stats = not self.stats
        note("figures after each answer" if self.stats else "no figures any more")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidRequest("/save needs a file's name")
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        talk = json.dumps({"messages": [*opening, *self.messages]}, ensure_ascii=False)
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(talk + "\n")
        except OSError as problem:
            raise InvalidRequest(f"{name} cannot be written: {problem.strerror}") from None
        note(f"saved to {name}")


def _read(text: str) -> Any:
    """A number where it reads as one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
