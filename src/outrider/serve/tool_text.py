"""Calls read out of what a model says, as it says it.

`ToolReader` is fed the answer in pieces and gives text and calls on as soon as they are certain. It reads a
character at a time, so what comes out does not depend on how the answer was cut up, and each character is looked
at a fixed number of times. How a model sees tools, and in which dialect it calls them, is for tools.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from outrider.serve.tools import ToolFormat, ToolRequest


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments, JSON as the model writes it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


Piece = Text | Thought | CallBegin | CallArguments | CallEnd

_WHITE = frozenset(" \t\r\n")
_LITERAL = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NESTED = _WHITE | _LITERAL | frozenset(",:")
_CLOSER = {"{": "}", "[": "]"}
_SEPARATORS = _WHITE | frozenset(",;[]}")  # between calls; a stray bracket is a slip to forgive

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")


class Mark(Enum):
    """What a character is to the object it is in."""

    BAD = auto()  # it cannot be there
    FRAME = auto()  # not of a value: space, comma, colon, key
    OPENS = auto()  # the first of a value
    INSIDE = auto()
    CLOSES = auto()  # the last of a text, object or list
    END = auto()  # the object's own closing brace


class ObjectScanner:
    """Follows one JSON object, its opening brace already read. Values are followed, not checked."""

    def __init__(self) -> None:
        self.key = ""  # of the value being read
        self.step: Callable[[str], Mark] = self._first_key
        self._raw_key: list[str] = []
        self._owed: list[str] = []  # closing brackets of the value being read
        self._quoted = self._escaped = False

    def _first_key(self, c: str) -> Mark:
        return Mark.END if c == "}" else self._next_key(c)

    def _next_key(self, c: str) -> Mark:
        if c == '"':
            self._raw_key = [c]
            self.step = self._in_key
            return Mark.FRAME
        return Mark.FRAME if c in _WHITE else Mark.BAD

    def _in_key(self, c: str) -> Mark:
        self._raw_key.append(c)
        if self._text_ends(c):
            self.key = _decoded("".join(self._raw_key)) or ""
            self.step = self._colon
        return Mark.FRAME

    def _colon(self, c: str) -> Mark:
        if c == ":":
            self.step = self._value
            return Mark.FRAME
        return Mark.FRAME if c in _WHITE else Mark.BAD

    def _value(self, c: str) -> Mark:
        if c in _WHITE:
            return Mark.FRAME
        if c == '"':
            self.step = self._in_text
        elif c in _CLOSER:
            self._owed = [_CLOSER[c]]
            self.step = self._in_nest
        elif c in _LITERAL:
            self.step = self._in_literal
        else:
            return Mark.BAD
        return Mark.OPENS

    def _in_text(self, c: str) -> Mark:
        if not self._text_ends(c):
            return Mark.INSIDE
        self.step = self._after
        return Mark.CLOSES

    def _in_nest(self, c: str) -> Mark:
        if self._quoted:
            self._quoted = not self._text_ends(c)
        elif c == '"':
            self._quoted = True
        elif c in _CLOSER:
            self._owed.append(_CLOSER[c])
        elif c == self._owed[-1]:
            self._owed.pop()
            if not self._owed:
                self.step = self._after
                return Mark.CLOSES
        elif c not in _NESTED:
            return Mark.BAD
        return Mark.INSIDE

    def _in_literal(self, c: str) -> Mark:
        if c in _LITERAL:
            return Mark.INSIDE
        self.step = self._after
        return self._after(c)

    def _after(self, c: str) -> Mark:
        if c == "}":
            return Mark.END
        if c == ",":
            self.step = self._next_key
            return Mark.FRAME
        return Mark.FRAME if c in _WHITE else Mark.BAD

    def _text_ends(self, c: str) -> bool:
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = c == "\\"
        return c == '"'


class ToolReader:
    """Text and calls out of an answer. What looks like a call is held back until it is one, which is when its
    name is known and its arguments begin, or until it is not, when it is given on as text just as written.
    Text of nothing but whitespace next to a call is left out.
    """

    def __init__(self, fmt: ToolFormat, request: ToolRequest) -> None:
        self.done = False  # nothing more is wanted: the one call there may be has been read
        self._fmt, self._parallel = fmt, request.parallel
        self._names = {function.name for function in request.allowed}
        self._calls = 0
        self._state: Callable[[str], None] = self._between if fmt.bare else self._text
        self._partial = ""  # the beginning of a tag, perhaps
        self._held: list[str] = []  # read since the last thing given on, not yet known to be text or call
        self._sent = False  # a call of this tag has been given on
        self._blank: list[str] | None = []  # the text since the last call, while it is only whitespace
        self._pieces: list[Piece] = []
        self._run: list[str] = []  # of one text, or of one call's arguments
        self._run_index = -1  # of that call; -1: text
        # Of the object being read, which may be a call:
        self._object = ObjectScanner()
        self._fate: Callable[[Mark, str], None] = self._weigh
        self._value: list[str] = []
        self._name: str | None = None
        self._arguments: str | None = None
        self._live = False  # its arguments are being given on as they come

    def feed(self, text: str) -> list[Piece]:
        for c in text:
            if self.done:
                break
            self._state(c)
        return self._given()

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes. A call that was begun stays without its end."""
        if not self.done:
            if not (self._sent and self._state == self._between):
                self._release()
            if self._blank and not self._calls:
                self._put(-1, "".join(self._blank))
            self.done = True
        return self._given()

    # ---- outside of calls

    def _text(self, c: str) -> None:
        if self._fmt.tag.startswith(self._partial + c):
            self._partial += c
            if self._partial == self._fmt.tag:
                self._open()
        elif self._partial:  # a tag's first character is in it only once, so that none can have begun within
            self._release()
            self._text(c)
        else:
            self._say(c)

    def _open(self) -> None:
        self._held, self._partial, self._sent = [self._fmt.tag], "", False
        self._state = self._between

    def _between(self, c: str) -> None:
        """In a tag, or at the start of a message that needs none: before, between and after the calls."""
        seen = self._partial + c
        if seen == self._fmt.end:
            self._close(seen)
        elif seen == self._fmt.tag:  # the one before was not closed
            self._close("")
            self._open()
        elif self._fmt.end.startswith(seen) or self._fmt.tag.startswith(seen):
            self._partial = seen
        elif c == "{" and not self._partial:
            self._begin_object()
        elif c in _SEPARATORS and not self._partial:
            self._held.append(c)
        else:
            self._to_text(c)

    def _close(self, end: str) -> None:
        """A tag that held a call is left out; one that held none was text."""
        self._partial = end
        if self._sent:
            self._held, self._partial = [], ""
        self._release()
        self._state = self._text

    def _to_text(self, c: str) -> None:
        self._release()
        self._state = self._text
        self._text(c)

    # ---- in what may be a call

    def _begin_object(self) -> None:
        if self._sent:
            self._held = []
        self._held.append("{")
        self._object, self._fate = ObjectScanner(), self._weigh
        self._name = self._arguments = None
        self._state = self._in_object

    def _in_object(self, c: str) -> None:
        mark = self._object.step(c)
        if mark is Mark.BAD:
            self._break_off(c)
            return
        if mark is Mark.END:
            self._state = self._between
        self._fate(mark, c)

    def _weigh(self, mark: Mark, c: str) -> None:
        """Nothing of the object has been given on yet: decide whether it is a call."""
        self._held.append(c)
        if mark is Mark.OPENS:
            self._value = [c]
            self._weigh_opening(self._object.key, c)
        elif mark is Mark.INSIDE:
            self._value.append(c)
        elif mark is Mark.CLOSES:
            self._value.append(c)
            self._weigh_value(self._object.key, "".join(self._value))
        elif mark is Mark.END:
            self._send("{}") if self._name else self._refuse()

    def _weigh_opening(self, key: str, c: str) -> None:
        if key in _ARGUMENTS and c == "{":
            if self._name:
                self._begin_call()
                self._live = True
                self._put(self._calls - 1, c)
        elif key not in _IGNORED and (c != '"' or key not in ("name", *_ARGUMENTS)):
            self._refuse()

    def _weigh_value(self, key: str, raw: str) -> None:
        if key == "name":
            self._name = _decoded(raw)
            if self._name not in self._names:
                self._refuse()
                return
        elif key in _ARGUMENTS:
            self._arguments = raw if raw[0] == "{" else _object_in(raw)
            if self._arguments is None:
                self._refuse()
                return
        if self._name and self._arguments:
            self._send(self._arguments)

    def _refuse(self) -> None:
        self._fate = self._refused
        self._release()

    def _refused(self, mark: Mark, c: str) -> None:
        self._say(c)

    def _called(self, mark: Mark, c: str) -> None:
        """The call has been given on; of what follows in the object only the arguments matter."""
        if self._live:
            self._put(self._calls - 1, c)
            if mark is Mark.CLOSES:
                self._end_call()

    def _break_off(self, c: str) -> None:
        """The object cannot go on with `c`. If it was a call, brackets and tags that still follow are its own."""
        if self._fate != self._called:
            self._to_text(c)
        elif self._live and not self._parallel:
            self.done = True
        else:
            self._live = False
            self._state = self._between
            self._between(c)

    # ---- what is given on

    def _begin_call(self) -> None:
        assert self._name
        self._held, self._blank = [], []
        self._sent, self._fate = True, self._called
        self._end_run()
        self._pieces.append(CallBegin(self._calls, self._name))
        self._calls += 1

    def _send(self, arguments: str) -> None:
        self._begin_call()
        self._put(self._calls - 1, arguments)
        self._end_call()

    def _end_call(self) -> None:
        self._live = False
        self._end_run()
        self._pieces.append(CallEnd(self._calls - 1))
        self.done = not self._parallel

    def _release(self) -> None:
        """What was held back is text."""
        held = "".join(self._held) + self._partial
        self._held, self._partial = [], ""
        self._say(held)

    def _say(self, text: str) -> None:
        if self._blank is None:
            self._put(-1, text)
        elif text and not text.isspace():
            self._put(-1, "".join(self._blank) + text)
            self._blank = None
        else:
            self._blank.append(text)

    def _put(self, index: int, text: str) -> None:
        if index != self._run_index:
            self._end_run()
            self._run_index = index
        self._run.append(text)

    def _end_run(self) -> None:
        if text := "".join(self._run):
            self._pieces.append(Text(text) if self._run_index < 0 else CallArguments(self._run_index, text))
        self._run = []

    def _given(self) -> list[Piece]:
        self._end_run()
        pieces, self._pieces = self._pieces, []
        return pieces


def _decoded(raw: str) -> str | None:
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object_in(raw: str) -> str | None:
    """The JSON object that a JSON string holds: some models quote the arguments as a whole."""
    text = _decoded(raw)
    try:
        value = json.loads(text or "")
        (text or "").encode()
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None
