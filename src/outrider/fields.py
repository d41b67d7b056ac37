"""Fields of settings objects: declared with the values they may hold, checked when an object is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any

from outrider.errors import LONGEST_NAME, InvalidRequest, brief, suggest

# By the name of a type: what a value must be an instance of, what it becomes, and the words for one and for several.
KINDS: dict[str, tuple[type, type, str, str]] = {
    "int": (Integral, int, "a whole number", "whole numbers"),
    "float": (Real, float, "a number", "numbers"),
    "bool": (bool, bool, "true or false", "true or false"),
    "str": (str, str, "a string", "strings"),
}


def setting(
    default: Any,
    low: float = -inf,
    high: float = inf,
    *,
    above: float | None = None,
    known: tuple[str, ...] = (),
    secret: bool = False,
    **more: Any,
) -> Any:
    """A dataclass field. `low` and `high` bound a number, or the length of a string; `above` excludes the bound itself.
    `known` lists the allowed values. `secret` keeps the value out of repr(). `more` is metadata: `help`, `metavar` and
    `flag` are for the command line.
    """
    about = {"low": low, "high": high, "above": above, "known": known, **more}
    return field(default=default, repr=not secret, metadata=about)


@dataclass(frozen=True, slots=True)
class Rule:
    """The type and the bounds of one field."""

    name: str
    kind: str
    many: bool
    optional: bool
    low: float = -inf
    high: float = inf
    above: float | None = None
    known: tuple[str, ...] = ()

    def checked(self, value: Any) -> Any:
        """The value as the field holds it, or InvalidRequest. Values stay out of messages on types: one may be
        an API key.
        """
        if value is None and self.optional:
            return None
        if self.known and value not in self.known:
            raise InvalidRequest(f"unknown {self.name} {brief(value)}{suggest(value, self.known)}", self.name)
        if not self.many:
            return self._one(value, f"{KINDS[self.kind][2]}, not {type(value).__name__}")
        words = f"a list of {KINDS[self.kind][3]}"
        if self.kind == "str":
            words, value = f"a string or {words}", (value,) if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)):
            raise InvalidRequest(f"{self.name} must be {words}", self.name)
        return tuple(self._one(item, words) for item in value)

    def _one(self, value: Any, words: str) -> Any:
        wanted, made, *_ = KINDS[self.kind]
        if not isinstance(value, wanted) or isinstance(value, bool) != (self.kind == "bool"):
            raise InvalidRequest(f"{self.name} must be {words}", self.name)
        # A blank name is empty; a stop string may be a line break.
        size: Any = len(value if self.many else value.strip()) if isinstance(value, str) else value
        if self.low <= size <= self.high and (self.above is None or self.above < size):  # NaN is in no range
            return made(value) if abs(size) < 1e300 else value
        if isinstance(value, str):
            raise InvalidRequest(
                f"{self.name} must not {'hold' if self.many else 'be'} an empty string", self.name
            )
        raise InvalidRequest(f"{self.name} must be {self._bounds()}, got {value}", self.name)

    def _bounds(self) -> str:
        low, high = (f"{end:g}" if self.kind == "float" else f"{end}" for end in (self.low, self.high))
        if self.above is not None:
            return f"above {self.above:g}" if self.high == inf else f"in ({self.above:g}, {high}]"
        if self.high == inf:
            return f"at least {low}"
        return f"in [{low}, {high}]" if self.kind == "float" else f"between {low} and {high}"


@cache
def _rules(cls: type) -> tuple[Rule, ...]:
    """Rules of the fields whose types are in KINDS, by themselves, optional or in a tuple."""
    bounds = ("low", "high", "above", "known")
    return tuple(
        Rule(
            one.name,
            found[1] or found[2],
            found[1] is not None,
            found[3] is not None,
            **{name: one.metadata[name] for name in bounds if name in one.metadata},
        )
        for one in fields(cls)
        if (
            found := re.fullmatch(
                r"(?:tuple\[(\w+), \.\.\.\]|(int|float|bool|str))( \| None)?", str(one.type)
            )
        )
    )


def check_fields(built: Any) -> None:
    """For `__post_init__` of a frozen dataclass: checks each field against its declaration. Lists become tuples."""
    for rule in _rules(built.__class__):
        object.__setattr__(built, rule.name, rule.checked(getattr(built, rule.name)))


def known_options(cls: type, options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The options, once each name is a field of `cls`."""
    known = [one.name for one in fields(cls)]
    for name in options:
        if name not in known:
            raise InvalidRequest(
                f"unknown {what} {brief(name)}{suggest(str(name), known)}", str(name)[:LONGEST_NAME]
            )
    return dict(options)
