"""What can go wrong, as a tree. Every message carries the way out.

    OutriderError
    ├── ModelNotFound        no such folder, file, alias or repository
    ├── BadCheckpoint        the files are there but cannot be trusted or understood
    ├── UnsupportedModel     a readable model that needs something Outrider does not have
    ├── InvalidRequest       the request asks for something impossible; names the parameter
    │   └── TemplateFailed   the model's chat template raised on these messages
    ├── OutOfMemory          the model, its cache or a step needs more than there is; says what to take less of
    └── KernelUnavailable    no compiler, or it failed; the torch twins still work

This file is in the lowest row: it imports nothing of Outrider.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class OutriderError(Exception):
    """Anything Outrider raises on purpose."""


class ModelNotFound(OutriderError):
    pass


class BadCheckpoint(OutriderError):
    pass


class UnsupportedModel(OutriderError):
    pass


class InvalidRequest(OutriderError):
    """`param` is the name of the offending parameter, as the user wrote it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TemplateFailed(InvalidRequest):
    pass


class OutOfMemory(OutriderError):
    pass


class KernelUnavailable(OutriderError):
    pass


def stopped(error: BaseException) -> OutriderError:
    """What to raise when the engine has ended with `error`: itself, if it was made to be read."""
    return error if isinstance(error, OutriderError) else OutriderError(f"the engine stopped: {error!r}")


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something known is close, else the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def suggesting(cls: type[T]) -> type[T]:
    """A dataclass that answers a name it does not know with the one that was meant."""
    names = frozenset(f.name for f in dataclasses.fields(cls) if f.init)  # type: ignore[arg-type]
    init: Any = cls.__init__

    @functools.wraps(init)
    def checked(self: T, *args: Any, **options: Any) -> None:
        for name in options.keys() - names:
            raise InvalidRequest(f"{cls.__name__} has no {name!r}{suggest(name, names)}", name)
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls
