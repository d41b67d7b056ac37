"""One field of a settings object as a flag, with its variable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
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
