"""Flags: one for every field, each with its variable; sizes and biases as people write them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import typer
from typer.main import get_command

from outrider.cli.flag import read_bytes
from outrider.cli.main import make_app
from outrider.cli.options import ENGINE, SAMPLING, Flags, read_bias
from outrider.settings import Settings
from outrider.types import SamplingParams


def test_every_sampling_parameter_has_a_flag() -> None:
    joined = {"tree", "mode"}  # parts of speculation, with flags of their own
    names = [flag.name for flag in SAMPLING.flags if flag.name not in joined]
    # Whether special tokens are in the text is for readers of channels to say.
    assert names == [field.name for field in fields(SamplingParams) if field.name != "mark_special"]


def test_every_setting_has_a_flag() -> None:
    assert {flag.name for flag in ENGINE.flags} == {field.name for field in fields(Settings)}


@pytest.mark.parametrize(("group", "expected"), [(SAMPLING, SamplingParams()), (ENGINE, Settings())])
def test_flags_left_alone_build_the_defaults(group: Flags, expected: object) -> None:
    assert group.build({p.name: p.default for p in group.parameters()}) == expected


def leaf_commands():
    def walk(command, path):
        for name, sub in getattr(command, "commands", {}).items():
            yield f"{path} {name}", sub
            yield from walk(sub, f"{path} {name}")

    return list(walk(get_command(make_app()), "outrider"))


@pytest.mark.parametrize(("path", "command"), leaf_commands())
def test_every_flag_has_a_variable(path: str, command) -> None:
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert parameter.envvar and str(parameter.envvar).startswith("OUTRIDER_"), (path, parameter.name)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("1K", 1024), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "one"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        read_bytes(text)


def test_bias() -> None:
    assert read_bias(["13=-100", "42=1.5"]) == {13: -100.0, 42: 1.5}


@pytest.mark.parametrize("pair", ["13", "x=1", "13=", "=1", "13:1"])
def test_bad_bias(pair: str) -> None:
    with pytest.raises(ValueError, match="TOKEN_ID=NUMBER"):
        read_bias([pair])


def test_a_bad_value_names_its_flag() -> None:
    typed = {p.name: p.default for p in ENGINE.parameters()} | {"cache_bytes": "lots"}
    with pytest.raises(typer.BadParameter) as told:
        ENGINE.build(typed)
    assert "--cache-bytes" in told.value.format_message()
