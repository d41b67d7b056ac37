"""From tokens to the text a user sees: whole characters only, and never a piece of a stop string.

All that is shown, joined, does not depend on how many tokens a step committed: where stop strings are looked for,
tokens are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenText(Protocol):
    """Turns token ids into text, holding back unfinished characters."""

    def feed(self, *tokens: int) -> str: ...
    def finish(self) -> str: ...


class Writer:
    def __init__(self, stream: TokenText, stops: tuple[str, ...], include_stop: bool) -> None:
        self.stream, self.stops, self.include_stop = stream, stops, include_stop
        self.held = ""
        self.matched: str | None = None  # the stop string that was completed

    def feed(self, tokens: Sequence[int], free: int = 0) -> tuple[str, int]:
        """Text that is safe to show, and how many tokens it took to complete a stop string; 0 if none was. In the
        first `free` tokens none is looked for.
        """
        if not self.stops:
            return self.stream.feed(*tokens), 0
        shown = ""
        for i, token in enumerate(tokens):
            self.held += self.stream.feed(token)
            stops = self.stops if i >= free else ()
            if (cut := first_stop(self.held, stops)) is not None:
                begin, end = cut
                self.matched = self.held[begin:end]
                shown, self.held = shown + self.held[: end if self.include_stop else begin], ""
                return shown, i + 1
            keep = len(self.held) - unfinished_stop(self.held, stops)
            shown, self.held = shown + self.held[:keep], self.held[keep:]
        return shown, 0

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        shown, self.held = self.held + self.stream.finish(), ""
        return shown


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Where the stop string that completes first begins and ends."""
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    if not found:
        return None
    end, begin = min(found)
    return begin, end


def unfinished_stop(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may yet become a stop string."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
