"""`outrider audit`: no option is taken and dropped."""

from __future__ import annotations

import pytest
import typer

from outrider.cli.audit import TEMPERATURES, _temperatures, audit
from outrider.errors import InvalidRequest
from outrider.types import SamplingParams


def test_temperatures_come_from_either_flag() -> None:
    assert _temperatures(None, SamplingParams()) == list(TEMPERATURES)
    assert _temperatures(None, SamplingParams(temperature=0.4)) == [0.4]
    assert _temperatures("0,1", SamplingParams(temperature=0.4)) == [0.0, 1.0]
    with pytest.raises(typer.BadParameter):
        _temperatures("warm", SamplingParams())


def test_several_choices_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="one answer"):
        audit.__wrapped__(params=SamplingParams(n=2), settings=None)  # type: ignore[attr-defined]
