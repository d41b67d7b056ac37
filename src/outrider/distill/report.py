"""What a long run says while it runs: one bar where a person looks, plain lines in a pipe, nothing in a test.

`update` is called as often as it likes: all but a few calls a second cost a comparison.
"""

from __future__ import annotations

from typing import Protocol

EVERY = {True: 0.25, False: 15.0}  # seconds between two updates that are shown: on a terminal, in a pipe
SETTLED = 1.0  # seconds until a rate means something


class Report(Protocol):
    """A stage at a time: `begin` it, `update` how much of it is done, `end`. `note` is a line of its own."""

    def begin(self, stage: str, total: float, unit: str, done: float = 0.0) -> None: ...

    def update(self, done: float, note: str = "") -> None: ...

    def end(self) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """Says nothing; keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, stage: str, total: float, unit: str, done: float = 0.0) -> None:
        pass

    def update(self, done: float, note: str = "") -> None:
        pass

    def end(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)
