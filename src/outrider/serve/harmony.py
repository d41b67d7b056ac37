"""Answers in channels, as gpt-oss writes them: thoughts, calls and words out of messages between control tokens.

A message is `<|start|>assistant<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>BODY<|end|>`; most parts may be
left out, and the recipient may stand before the channel. The engine writes control tokens between marks, so that text
which only looks like one is text. `HarmonyReader` reads a character at a time: what comes out does not depend on how
the answer was cut up. What it cannot make sense of it gives on as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from outrider.errors import InvalidRequest, brief, invalid
from outrider.load.tokenizer import MARK, Tokenizer
from outrider.serve.tool_text import (
    CallArguments,
    CallBegin,
    CallEnd,
    Mark,
    ObjectScanner,
    Piece,
    Text,
    Thought,
    ToolReader,
)
from outrider.serve.tools import ToolFormat, ToolRequest

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STOPS = ENDS[1:]  # end an answer
THOUGHTS = "analysis"
EFFORTS = ("low", "medium", "high")
HEADER = re.compile(r"\s*(assistant\b)?(\s+to=\S*|to=\S*)?\s*")
# The beginnings of what HEADER matches, without a role and with one: anything else is text without a header.
BEGUN = re.compile(r"\s*(t|to|to=\S{0,99})?\s*")
BEGUN_BY_ROLE = re.compile(rf"(a|as|ass|assi|assis|assist|assista|assistan|assistant({BEGUN.pattern})?)?")
RECIPIENT = re.compile(r"\bto=functions\.(\S+)")


class Reader(Protocol):
    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def reader_of(fmt: ToolFormat, request: ToolRequest, going_on: bool = False) -> Reader | None:
    """What reads an answer; None if it is all text. `going_on`: the answer's message was begun in the prompt."""
    if fmt.channels:
        return HarmonyReader(request, going_on)
    return ToolReader(fmt, request) if request.allowed else None


class HarmonyReader:
    def __init__(self, request: ToolRequest, going_on: bool = False) -> None:
        self._names = {function.name for function in request.allowed}
        self._parallel, self._done = request.parallel, False
        self._calls = 0
        self._control: list[str] | None = None  # characters since a mark
        self._header: dict[str, list[str]] | None = None  # by the control token before each part
        self._may_begin = BEGUN  # the template wrote the role of the first message
        self._part = START
        self._take: Callable[[str], None] = self._say
        self._pieces: list[Piece] = []
        self._run: list[str] = []  # of one piece
        self._kind: Callable[[str], Piece] = Text
        self._said = {Text: "", Thought: ""}  # the last character of each
        self._begun: set[Any] = set()  # kinds of text that this message has
        self._held: list[str] = []  # of what may be a call
        self._object = ObjectScanner()
        if not going_on:
            self._open_header(START)

    def feed(self, text: str) -> list[Piece]:
        for c in text:
            if self._done:
                break
            if c == MARK:
                self._at_mark()
            elif self._control is not None:
                self._control.append(c)
            elif self._header is not None:
                self._read_header(c)
            else:
                self._take(c)
        return self._given()

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes. A call that was begun stays without its end."""
        if not self._done:
            self._close(ended=False)
            self._done = True
        return self._given()

    # ---- between bodies

    def _at_mark(self) -> None:
        if self._control is None:
            self._control = []
            return
        token, self._control = "".join(self._control), None
        if token in ENDS:
            self._close(ended=True)
            self._open_header(START)
        elif token == START:
            self._close(ended=False)
            self._open_header(START)
            self._may_begin = BEGUN_BY_ROLE
        elif token == CHANNEL:
            if self._header is None:
                self._close(ended=False)
                self._open_header(CHANNEL)
            self._part = CHANNEL
        elif token == CONSTRAIN:
            self._part = CONSTRAIN
        elif token == MESSAGE and self._header is not None:
            self._open_body(self._header)

    def _open_header(self, part: str) -> None:
        self._header, self._part = {START: [], CHANNEL: [], CONSTRAIN: []}, part

    def _read_header(self, c: str) -> None:
        assert self._header is not None
        read = self._header[self._part]
        read.append(c)
        if self._part == START and not self._may_begin.fullmatch("".join(read)):
            self._to_text("".join(read))

    def _to_text(self, text: str) -> None:
        """No header: an answer without channels."""
        self._header, self._take = None, self._say
        for c in text:
            self._say(c)

    def _open_body(self, header: Mapping[str, Sequence[str]]) -> None:
        self._header, self._begun = None, set()
        role, channel = "".join(header[START]), "".join(header[CHANNEL])
        called = RECIPIENT.search(channel) or RECIPIENT.search(role)
        if called and called[1] in self._names:
            self._name, self._held, self._object = called[1], [], ObjectScanner()
            self._take = self._weigh_call
        elif channel.split(" ")[0].strip() == THOUGHTS:
            self._take = self._think
        else:
            self._take = self._say

    def _close(self, ended: bool) -> None:
        """The end of a header or a body."""
        if self._header is not None:
            if not any(self._header[part] for part in (CHANNEL, CONSTRAIN)):
                text = "".join(self._header[START])
                if not HEADER.fullmatch(text):
                    self._to_text(text)
        elif self._take == self._weigh_call and ended:
            self._begin_call("{}")
            self._end_call()
        self._header, self._take = None, self._say
        self._begun = set()

    # ---- bodies

    def _say(self, c: str) -> None:
        self._write(Text, c)

    def _think(self, c: str) -> None:
        self._write(Thought, c)

    def _write(self, kind: Any, c: str) -> None:
        """A message's text. Texts of two messages are apart by a line."""
        if kind not in self._begun:
            self._begun.add(kind)
            if self._said[kind] not in ("", "\n"):
                self._put(kind, "\n\n")
        self._said[kind] = c
        self._put(kind, c)

    def _weigh_call(self, c: str) -> None:
        """A call's arguments are an object; any other body is text."""
        self._held.append(c)
        if c == "{":
            self._begin_call(c)
            self._take = self._argue
        elif not c.isspace():
            self._take = self._say
            for each in self._held:
                self._say(each)

    def _begin_call(self, arguments: str) -> None:
        self._end_run()
        self._pieces.append(CallBegin(self._calls, self._name))
        self._calls += 1
        self._put(self._argument, arguments)

    def _argument(self, text: str) -> Piece:
        return CallArguments(self._calls - 1, text)

    def _argue(self, c: str) -> None:
        mark = self._object.step(c)
        if mark is Mark.BAD:
            self._take = self._skip
            return
        self._put(self._argument, c)
        if mark is Mark.END:
            self._end_call()

    def _end_call(self) -> None:
        self._end_run()
        self._pieces.append(CallEnd(self._calls - 1))
        self._take, self._done = self._skip, not self._parallel

    def _skip(self, c: str) -> None:
        """After a call's object, or after what broke it off."""

    # ---- what is given on

    def _put(self, kind: Callable[[str], Piece], text: str) -> None:
        if kind != self._kind:
            self._end_run()
            self._kind = kind
        self._run.append(text)

    def _end_run(self) -> None:
        if text := "".join(self._run):
            self._pieces.append(self._kind(text))
        self._run = []

    def _given(self) -> list[Piece]:
        self._end_run()
        pieces, self._pieces = self._pieces, []
        return pieces


class ThoughtCount:
    """How many tokens of an answer are in the channel of thoughts, control tokens left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._header: list[int] | None = None  # since the channel's control token
        self._thinks = False
        self.tokens = 0

    def feed(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not self._tokenizer.is_special(token):
                if self._header is not None:
                    self._header.append(token)
                self.tokens += self._thinks
                continue
            name, header = self._tokenizer.token_string(token), self._header
            if name == CHANNEL:
                self._header = []
            elif name == MESSAGE and header is not None:
                self._thinks = self._tokenizer.decode(header).split(" ")[0].strip() == THOUGHTS
                self._header = None
            elif name in (START, *ENDS):
                self._thinks, self._header = False, None


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer, whatever the model's config says."""
    return tuple(i for i, string in enumerate(tokenizer.strings()) if string in STOPS)


def effort_of(asked: str | None, variables: Mapping[str, Any], channels: bool) -> dict[str, Any]:
    """A template's variables with how much the model is to think; those sent for the template itself come first."""
    made = {**({} if asked is None else {"reasoning_effort": asked}), **variables}
    if channels and (effort := made.get("reasoning_effort", EFFORTS[0])) not in EFFORTS:
        raise invalid("reasoning_effort", f"must be low, medium or high for this model, not {brief(effort)}")
    return made


def turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as gpt-oss's template reads them: thoughts under its own name, and one call a turn, followed by what
    came of it.
    """
    results = {m["tool_call_id"]: m for m in messages if m.get("role") == "tool" and "tool_call_id" in m}
    shown: list[Mapping[str, Any]] = []
    moved: set[str] = set()
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") in moved:
            continue
        thoughts, calls = message.get("reasoning_content"), message.get("tool_calls")
        others = {k: v for k, v in message.items() if k not in ("reasoning_content", "tool_calls")}
        if not isinstance(calls, list) or not calls:
            shown.append({**others, "thinking": thoughts} if thoughts else message)
            continue
        # The template shows words before a call as a thought, and takes no second one.
        first = {**others, "thinking": thoughts} if thoughts and not message.get("content") else others
        for i, call in enumerate(calls):
            turn = first if i == 0 else {"role": message["role"], "content": ""}
            shown.append({**turn, "tool_calls": [call]})
            name = str(call.get("id")) if isinstance(call, Mapping) else ""
            if len(calls) > 1 and name in results and name not in moved:
                moved.add(name)
                shown.append(results[name])
    return shown


def check_template(uses_tools: bool, tools: ToolRequest) -> None:
    if tools.allowed and not uses_tools:
        raise InvalidRequest("this model's chat template takes no tools", "tools")
