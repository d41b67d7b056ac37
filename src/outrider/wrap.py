"""Text at a terminal's width: lines break between words, in a finished text and in one that is still being written.

A word that is longer than a line stays whole: the terminal wraps it, and it can still be copied in one piece.
"""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TextIO

FENCE = "```"  # code between two of them keeps its lines
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PART = re.compile(rf"{_STYLE.pattern}|.", re.DOTALL)
_LABEL = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)| *")  # the first of two columns, or an indentation
TAB = 8


class WordWrap:
    """Wraps text that comes in pieces. Holds the last word back until it is complete."""

    def __init__(self, width: int, hang: int = 0) -> None:
        """`hang`: columns by which lines are indented that begin after a break."""
        self.width, self.hang = width, hang
        self._column = 0
        self._spaces, self._word, self._size = "", "", 0  # not written yet
        self._breaks_after = False  # the word is a wide character, after which a line may end
        self._longer = False  # a word longer than a line is written as it comes
        self._first, self._code = True, False

    def feed(self, text: str) -> str:
        """What can be written by now."""
        return "".join(map(self._take, _PART.findall(text)))

    def flush(self) -> str:
        """The word that was held back."""
        return self._place()

    def _take(self, part: str) -> str:
        if part == "\n":
            placed = self._place() + "\n"
            self._column, self._spaces, self._first, self._longer = 0, "", True, False
        elif part in " \t":
            placed = self._place()
            self._spaces += part
            self._longer = False
        elif self._longer:
            self._column += _columns(part)
            placed = part
        else:
            columns = _columns(part)
            placed = self._place() if columns == 2 or (columns and self._breaks_after) else ""
            self._word += part
            self._size += columns
            self._breaks_after = columns == 2 or (self._breaks_after and not columns)
            if self._size > self.width:
                placed += self._place()
                self._longer = True
        return placed

    def _place(self) -> str:
        word, size = self._word, self._size
        self._word, self._size, self._breaks_after = "", 0, False
        if not size:  # a change of colour: the spaces before it wait for the next word
            return word
        if self._first and _STYLE.sub("", word).startswith(FENCE):
            self._code = not self._code
        self._first = False
        end = self._column
        for space in self._spaces:
            end += TAB - end % TAB if space == "\t" else 1
        lead, self._spaces = self._spaces, ""
        if self._column and end + size > self.width and not self._code:
            lead, end = "\n" + " " * self.hang, self.hang
        self._column = end + size
        return lead + word


def _columns(part: str) -> int:
    """Columns of a character on a terminal; 0 for what combines with the one before, and for changes of colour."""
    if len(part) > 1 or unicodedata.category(part) in ("Mn", "Me", "Cf", "Cc"):
        return 0
    return 2 if unicodedata.east_asian_width(part) in "WF" else 1


def wrapped(text: str, width: int) -> str:
    """A finished text. The second of two columns stays a column."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    label = _LABEL.match(line)
    hang = len(label[0]) if label else 0
    wrap = WordWrap(width, hang if hang <= width // 2 else 0)
    return wrap.feed(line) + wrap.flush()


def terminal_width(out: TextIO) -> int | None:
    """Columns of the terminal that `out` writes to; None where it is a file or a pipe, or the size is not known."""
    try:
        return os.get_terminal_size(out.fileno()).columns or None if out.isatty() else None
    except (OSError, ValueError):  # no file of the system, or closed
        return None


def fitted(text: str, out: TextIO) -> str:
    """The text as `out` should show it: wrapped on a terminal, as it is elsewhere."""
    width = terminal_width(out)
    return text if width is None else wrapped(text, width)
