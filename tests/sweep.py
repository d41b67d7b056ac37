"""Which cases of a sweep every run takes; the others are marked slow and run by `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """`cases` for pytest.mark.parametrize. `quick` names those at the edges, where faults have been found."""
    every, chosen = list(cases), list(quick)
    assert all(case in every for case in chosen), f"not in the sweep: {chosen}"
    return [case if case in chosen else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
