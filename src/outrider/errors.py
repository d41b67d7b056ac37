"""What can go wrong, as a tree. Every message carries the way out.

    OutriderError
    ├── ModelNotFound        no such folder, file, alias or repository
    ├── BadCheckpoint        the files are there but cannot be trusted or understood
    ├── UnsupportedModel     a readable model that needs something Outrider does not have
    ├── InvalidRequest       the request asks for something impossible; names the parameter
    │   └── TemplateFailed   the model's chat template raised on these messages
    ├── OutOfMemory          the model, its cache or a step needs more than there is; says what to take less of
    ├── RankLost             a process of a tensor parallel engine ended or does not answer
    └── KernelUnavailable    no compiler, or it failed; the torch twins still work

This file is in the lowest row: it imports nothing of Outrider.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_NAME = 100  # letters that are compared: difflib takes seconds for a megabyte


def install(extra: str) -> str:
    """The command that installs what an extra needs. The installed package knows, be it a clone or a wheel."""
    from importlib import metadata  # takes as long to import as all other modules of an error's

    try:
        needs = " ".join(_needs(metadata.requires("outrider") or (), extra))
    except metadata.PackageNotFoundError:  # run from its folder
        needs = ""
    return f"pip install {needs}" if needs else f"install Outrider with its extra {extra!r}"


def _needs(lines: Sequence[str], extra: str) -> Iterator[str]:
    for line in lines:
        what, _, marker = line.partition(";")
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            own = re.match(r"outrider\[(\w+)\]", what)
            yield from _needs(lines, own[1]) if own else [f"'{what.strip()}'"]


class OutriderError(Exception):
    """Anything Outrider raises on purpose."""


def show_cause(error: BaseException) -> bool:
    """With OUTRIDER_DEBUG, on stderr: where that arose which an error tells of. Whether it did."""
    if error.__cause__ is None or not os.environ.get("OUTRIDER_DEBUG"):
        return False
    traceback.print_exception(error.__cause__)
    return True


class ModelNotFound(OutriderError):
    pass


class BadCheckpoint(OutriderError):
    pass


class UnsupportedModel(OutriderError):
    pass


class InvalidRequest(OutriderError):
    """`param` is the name of the offending parameter, as the user wrote it. Messages that name it begin with it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def about(self, param: str) -> InvalidRequest:
        """The same error, about the parameter as another interface names it."""
        text = str(self)
        if self.param and text.startswith(self.param):
            text = param + text.removeprefix(self.param)
        return InvalidRequest(text, param or None)


def invalid(param: str, says: str) -> InvalidRequest:
    """An error whose message begins with the name of the parameter."""
    return InvalidRequest(f"{param} {says}", param)


class TemplateFailed(InvalidRequest):
    pass


class OutOfMemory(OutriderError):
    pass


class RankLost(OutriderError):
    pass


class KernelUnavailable(OutriderError):
    pass


@contextlib.contextmanager
def naming(place: object) -> Iterator[None]:
    """Errors from within begin with the file or folder at fault."""
    try:
        yield
    except OutriderError as problem:
        raise type(problem)(f"{place}: {problem}") from None


def stopped(error: BaseException) -> OutriderError:
    """What to raise when the engine has ended with `error`: itself, if it was made to be read."""
    return error if isinstance(error, OutriderError) else OutriderError(f"the engine stopped: {error!r}")


def brief(value: Any) -> str:
    """A value as an error shows it: a long text cut short, of anything larger only what it is."""
    if isinstance(value, str):
        return repr(value[:LONGEST_NAME])
    if isinstance(value, (list, tuple)):
        return "a list"
    return "an object" if isinstance(value, dict) else f"{value!r:.100}"


def suggest(name: Any, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something known is close, else the list of what is known."""
    known = sorted(known)
    if near := closest(name if isinstance(name, str) else "", known):
        return f"; did you mean {near!r}?"
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


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one it begins, one with its words, or one spelt nearly so."""
    plain = {one.strip("-_").lower().replace("-", "_"): one for one in sorted(known, reverse=True)}
    asked = name[:LONGEST_NAME].strip("-_").lower().replace("-", "_")
    begins = sorted((one for one in plain if len(asked) > 2 and one.startswith(asked)), key=len)
    words = [one for one in plain if "_" in asked and set(asked.split("_")) <= set(one.split("_"))]
    spelt = difflib.get_close_matches(asked, plain, n=1, cutoff=0.6)
    # Letters that happen to agree are not enough where a whole word does.
    held = [one for one in plain if len(one) > 3 and one in asked.split("_")]
    found = next(iter([*begins, *words, *spelt, *held]), None)
    return None if found is None else plain[found]
