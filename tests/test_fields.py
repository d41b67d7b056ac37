"""Declared fields: each value is of its type and within its bounds, or the error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidRequest
from outrider.fields import check_fields, known_options, setting


@dataclass(frozen=True, slots=True)
class Declared:
    count: int = setting(1, 0, 9)
    ratio: float = setting(0.5, above=0, high=1)
    slowdown: float | None = setting(None, above=0)
    word: str = setting("a", known=("a", "bb"))
    name: str | None = setting(None, 1)
    on: bool = False
    names: tuple[str, ...] = setting((), 1)
    shares: tuple[float, ...] = setting((), 0, 1)
    other: Mapping[str, int] = field(default_factory=dict)  # not checked here

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("count", 10, "count must be between 0 and 9, got 10"),
        ("count", -1, "count must be between 0 and 9, got -1"),
        ("count", True, "count must be a whole number, not bool"),
        ("count", 1.0, "count must be a whole number, not float"),
        ("count", None, "count must be a whole number, not NoneType"),
        ("ratio", 0, "ratio must be in (0, 1], got 0"),
        ("ratio", math.nan, "ratio must be in (0, 1], got nan"),
        ("ratio", "1", "ratio must be a number, not str"),
        ("slowdown", -1, "slowdown must be above 0, got -1"),
        ("word", "b", "unknown word 'b'; did you mean 'bb'?"),
        ("word", ["a"], "unknown word a list; known: a, bb"),
        ("name", " ", "name must not be an empty string"),
        ("name", 5, "name must be a string, not int"),
        ("on", 1, "on must be true or false, not int"),
        ("names", {"a": 1}, "names must be a string or a list of strings"),
        ("names", ["a", 5], "names must be a string or a list of strings"),
        ("names", ["a", ""], "names must not hold an empty string"),
        ("shares", 0.5, "shares must be a list of numbers"),
        ("shares", [0.5, 2], "shares must be in [0, 1], got 2"),
    ],
)
def test_a_bad_value_names_its_field(name: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Declared(**{name: value})
    assert (str(refused.value), refused.value.param) == (says, name)


def test_values_become_what_the_field_holds() -> None:
    made = Declared(count=np.int64(3), ratio=1, slowdown=math.inf, names="one", shares=[0, 1])  # type: ignore[arg-type]
    assert (made.count, made.ratio, made.slowdown) == (3, 1.0, math.inf)
    assert type(made.count) is int and type(made.ratio) is float
    assert made.names == ("one",) and made.shares == (0.0, 1.0)
    assert Declared(slowdown=10**400).slowdown == 10**400  # larger than any float


def test_unknown_options_get_a_suggestion() -> None:
    assert known_options(Declared, {"count": 2}, "setting") == {"count": 2}
    with pytest.raises(InvalidRequest, match="unknown setting 'cuont'; did you mean 'count'") as refused:
        known_options(Declared, {"cuont": 2}, "setting")
    assert refused.value.param == "cuont"
