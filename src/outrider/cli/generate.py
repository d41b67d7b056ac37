"""`outrider generate`: answer a prompt as it is written, or many prompts together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.answer import Answer, Pieces, Received, listen
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
    envvar,
    takes,
)
from outrider.cli.output import Screen, complain, explain_marks, marked, note, open_llm, write
from outrider.errors import InvalidRequest, ModelNotFound
from outrider.load.aliases import did_you_mean
from outrider.load.find import could_be_model
from outrider.load.prompts import Row, make_row, read_rows
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

Prompt = Annotated[str | None, option("prompt", "The prompt.", None, "--prompt", "-p")]
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt; else stdin is read.")
]
Prompts = Annotated[
    str | None,
    option(
        "prompts",
        'Many prompts, one a line (- is stdin): text, or JSON with "turns", "messages" or "prompt".',
        "FILE",
    ),
]
Limit = Annotated[int | None, option("limit", "Only the first N prompts.", min=1)]
Chat = Annotated[
    bool | None,
    option(
        "chat",
        "Put text through the chat template or not; by default, if the model has one.",
        None,
        "--chat/--raw",
        show_default=False,
    ),
]
Json = Annotated[bool, option("json", "One JSON object a prompt, on stdout.")]


@takes(SAMPLING, ENGINE)
def generate(
    ctx: typer.Context,
    model: Model = DEFAULT_MODEL,
    text: PromptArgument = None,
    prompt: Prompt = None,
    prompts: Prompts = None,
    limit: Limit = None,
    chat: Chat = None,
    system: System = None,
    draft: Draft = "auto",
    as_json: Json = False,
    show_origins: ShowOrigins = False,
    stats: ShowStats = False,
    generation_config: GenerationConfig = "auto",
    *,
    params: SamplingParams,
    given: frozenset[str],
    settings: Settings,
) -> None:
    """Answer one prompt as it is written, or many together.

    outrider generate smollm2-135m "Why is the sky blue?"
    """
    model, text = _in_place(ctx, model, text, prompt, prompts)
    if chat is False and system is not None:
        raise InvalidRequest("a system prompt needs the chat template; leave out --raw", "system")
    asked = _asked(text, prompt, prompts, limit)
    with open_llm(model, draft, settings) as llm:
        params = llm.sampling.under(params, given)
        exchanges = _exchanges(llm, asked, chat, system, params)
        streams = len(asked) == 1 and params.n == 1
        if show_origins and not as_json:
            explain_marks()
        show = Show(as_json, stats, streams, headed=len(asked) > 1, origins=show_origins)
        for exchange in exchange_all(exchanges, show):
            show.exchange(exchange)
    if any(exchange.error for exchange in exchanges):
        raise typer.Exit(2)


def _in_place(
    ctx: typer.Context, model: str, text: str | None, prompt: str | None, prompts: str | None
) -> tuple[str, str | None]:
    """Model and prompt, each where it belongs: a sentence given alone is no model but the prompt."""
    source = ctx.get_parameter_source("model")
    typed = source is not None and source.name == "COMMANDLINE"
    if not typed or any(given is not None for given in (text, prompt, prompts)):
        return model, text
    if could_be_model(model, cache_folder()):
        return model, text
    usual = os.environ.get(envvar("model")) or (ctx.default_map or {}).get("model") or DEFAULT_MODEL
    line = f"outrider generate {shlex.quote(usual)} {shlex.quote(model)}"
    if not any(map(str.isspace, model)):  # as likely a misspelt model
        raise ModelNotFound(f"there is no model {model!r:.99}{did_you_mean(model)}\nto ask it: {line}")
    if not sys.stdin.isatty() and sys.stdin.read().strip():
        raise InvalidRequest(
            f"{model!r:.99} is no model, and a prompt is piped in; write one of them: {line}", "prompt"
        )
    note(f"asking {usual}")
    return usual, model


def _asked(
    text: str | None, prompt: str | None, prompts: str | None, limit: int | None
) -> list[tuple[str, str | dict[str, Any]]]:
    given = [
        name
        for name, value in (("PROMPT", text), ("--prompt", prompt), ("--prompts", prompts))
        if value is not None
    ]
    if len(given) > 1:
        raise InvalidRequest(f"give one of {' and '.join(given)}, not both", "prompt")
    if prompts is not None:
        rows = read_rows(prompts, sys.stdin, limit)
        if not rows:
            raise InvalidRequest(f"{prompts} holds no prompts", "prompts")
        return rows
    if not given and sys.stdin.isatty():
        raise InvalidRequest(
            "no prompt: outrider generate MODEL PROMPT, or --prompts FILE, or pipe text in", "prompt"
        )
    only = text if text is not None else prompt
    if only is None:
        only = sys.stdin.read().removesuffix("\n")
    if not only:
        raise InvalidRequest("the prompt is empty", "prompt")
    return [("1", only)]


class Exchange:
    """A row being asked: its turns one after the other, with the model's own answers in between."""

    def __init__(self, llm: LLM, row_id: str, params: SamplingParams) -> None:
        self.llm, self.id, self.params = llm, row_id, params
        self.messages: list[Mapping[str, Any]] = []
        self.turns: list[str] = []
        self.prompt: str | None = None
        self.answers: list[Answer] = []
        self.error: str | None = None

    def open(self, row: Row, system: str | None) -> None:
        self.prompt, self.turns = row.prompt, list(row.turns)
        if system is not None and self.prompt is None:
            self.messages.append({"role": "system", "content": system})
        self.messages.extend(row.messages)

    def ask(self, received: Received) -> Answer:
        if self.prompt is not None:
            ids = self.llm.tokenizer.encode(self.prompt)
        else:
            if self.answers:
                self.messages.append({"role": "assistant", "content": self.answers[-1].text})
            if self.turns:
                self.messages.append({"role": "user", "content": self.turns.pop(0)})
            ids = self.llm.chat_ids(self.messages)
        self.answers.append(Answer(self.llm, ids, self.params, received))
        return self.answers[-1]

    def as_json(self) -> dict[str, Any]:
        """The last answer's fields, and every turn when there are several."""
        if self.error is not None:
            return {"id": self.id, "error": self.error}
        turns = [answer.as_json() for answer in self.answers]
        return {"id": self.id, **turns[-1], **({"turns": turns} if len(turns) > 1 else {})}


def _exchanges(
    llm: LLM,
    asked: Sequence[tuple[str, str | dict[str, Any]]],
    chat: bool | None,
    system: str | None,
    params: SamplingParams,
) -> list[Exchange]:
    """One exchange a row. A bad row among many is reported and left out; alone, it is the command's own error."""
    exchanges = []
    for row_id, value in asked:
        exchange = Exchange(llm, row_id, params)
        try:
            exchange.open(make_row(row_id, value, chat, llm.template is not None), system)
        except InvalidRequest as problem:
            if len(asked) == 1:
                raise
            exchange.error = str(problem)
        exchanges.append(exchange)
    return exchanges


def exchange_all(exchanges: Sequence[Exchange], show: Show) -> Iterator[Exchange]:
    """Ask everything together; give exchanges back finished, in the order they were given."""
    received: Received = queue.SimpleQueue()
    running: dict[str, Answer] = {}
    owner: dict[str, Exchange] = {}
    waiting = list(exchanges)

    def ask(exchange: Exchange) -> None:
        try:
            answer = exchange.ask(received)
        except InvalidRequest as problem:
            if len(exchanges) == 1:
                raise
            exchange.error = str(problem)
            return
        running[answer.request.id], owner[answer.request.id] = answer, exchange

    for exchange in exchanges:
        if exchange.error is None:
            ask(exchange)
    with contextlib.closing(listen(running, received)) as events:  # closing it aborts what still runs
        for answer, _ in events:
            show.fresh(answer)
            if not answer.done:
                continue
            exchange = owner.pop(answer.request.id)
            if exchange.turns:
                ask(exchange)
            busy = set(map(id, owner.values()))
            while waiting and id(waiting[0]) not in busy:
                yield waiting.pop(0)
    yield from waiting


class Show:
    """Writes answers: as they come when there is one, else whole and in order, or as JSON."""

    def __init__(
        self, as_json: bool, stats: bool, streams: bool, headed: bool, origins: bool = False
    ) -> None:
        self.as_json, self.stats, self.headed, self.origins = as_json, stats, headed, origins
        self.streams, self.screen = streams and not as_json, Screen()

    def fresh(self, answer: Answer) -> None:
        text = self._text(answer.fresh)
        if self.streams and (text or answer.done):
            self.screen.write(f"{text}\n" if answer.done else text)

    def _text(self, pieces: Pieces) -> str:
        return marked(pieces) if self.origins else "".join(text for text, _ in pieces)

    def exchange(self, exchange: Exchange) -> None:
        if self.as_json:
            write(json.dumps(exchange.as_json(), ensure_ascii=False) + "\n")
        elif exchange.error is not None:
            complain(f"prompt {exchange.id}: {exchange.error}")
        elif not self.streams:
            self._whole(exchange)
        if self.stats:
            for answer in exchange.answers:
                note(answer.stats_line())

    def _whole(self, exchange: Exchange) -> None:
        for turn, answer in enumerate(exchange.answers, 1):
            for choice, origins in enumerate(answer.origins):
                text = self._text(origins.pieces)
                head = [exchange.id] if self.headed else []
                head += [f"turn {turn}"] if len(exchange.answers) > 1 else []
                head += [f"choice {choice}"] if len(answer.texts) > 1 else []
                self.screen.write(f"[{', '.join(head)}]\n{text}\n\n" if head else f"{text}\n")
