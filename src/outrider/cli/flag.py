"""Flags of commands, each with its variable; and those that the fields of a settings class declare."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any

import typer


def envvar(name: str) -> str:
    """Every flag can be set by a variable too: --max-tokens is OUTRIDER_MAX_TOKENS."""
    return f"OUTRIDER_{name.upper().replace('-', '_')}"


def option(name: str, text: str, metavar: str | None = None, *flags: str, **more: Any) -> Any:
    """A flag of one command and its variable. It is spelled as its name unless `flags` are given."""
    spelled = flags or (f"--{name.replace('_', '-')}",)
    return typer.Option(*spelled, envvar=envvar(name), show_envvar=False, metavar=metavar, help=text, **more)


def typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by a variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@dataclass(frozen=True, slots=True)
class Flag:
    """One field as a flag. `read` turns what was typed into the field's value."""

    name: str
    kind: Any
    help: str
    read: Callable[[Any], Any] | None = None
    metavar: str | None = None
    spelled: tuple[str, ...] = ()  # when it is not --name
    default: str | None = None  # in the flag's own spelling, where that is not the field's

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def parameter(self, panel: str, default: Any, by_model: bool) -> inspect.Parameter:
        """With `by_model` it is left open (None) unless given, for the model's own default to fill."""
        shown: bool | str = default is not None and default is not False and default != []
        typed = self.kind
        if by_model:
            typed, default, shown = self.kind | None, None, f"the model's, else {default}"
        made = option(
            self.name, self.help, self.metavar, *self.spelled, rich_help_panel=panel, show_default=shown
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=Annotated[typed, made])

    def value(self, typed: Any) -> Any:
        try:
            return self.read(typed) if self.read else typed
        except ValueError as problem:
            raise typer.BadParameter(str(problem), param_hint=(self.spelled or (self.flag,))[-1]) from None


def read_bytes(text: str) -> int:
    """`512M` -> 536870912."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 1073741824, 512M or 1.5G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _shown_bytes(size: Any) -> str:
    """`536870912` -> `512M`."""
    power = max(p for p in range(4) if size % 1024**p == 0)
    return f"{size // 1024**power}{' KMG'[power]}".strip()


def flags_of(cls: type, *own: Flag, without: Container[str] = ()) -> tuple[Flag, ...]:
    """A flag for every field of a settings class. `own` flags are typed otherwise than their fields hold them, and take
    the place of the fields of their names.
    """
    by_name = {flag.name: flag for flag in own}
    names = [one for one in fields(cls) if one.name not in without]
    return tuple(by_name.get(one.name) or _flag_of(one) for one in names)


def help_of(cls: type, name: str) -> str:
    return str(next(one.metadata["help"] for one in fields(cls) if one.name == name))


def _flag_of(one: Field[Any]) -> Flag:
    about, dashed = one.metadata, one.name.replace("_", "-")
    found = re.fullmatch(r"(?:tuple\[(\w+), \.\.\.\]|(\w+))( \| None)?", str(one.type))
    assert found is not None, one.name
    kind: Any = {"int": int, "float": float, "bool": bool, "str": str}[found[1] or found[2]]
    text, metavar = about["help"], about.get("metavar") or "|".join(about["known"]) or None
    spelled = tuple(about["flag"].split()) if "flag" in about else ()
    if one.name.endswith("_bytes"):
        return Flag(one.name, str, text, read_bytes, "SIZE", default=_shown_bytes(one.default))
    if kind is bool:
        return Flag(one.name, bool, text, spelled=spelled or (f"--{dashed}/--no-{dashed}",))
    if found[1]:
        return Flag(one.name, list[kind], text, tuple, metavar, spelled)
    if kind is float and metavar is None:
        metavar = "SEC" if one.name.endswith(("timeout", "seconds")) else "F"
    return Flag(one.name, kind | None if found[3] else kind, text, None, metavar, spelled)
