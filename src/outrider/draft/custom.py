"""Drafters that somebody else wrote: found by name, made, and checked for their four verbs.

What they do later can cost drafts, never an answer: drafters.py sees to that.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from typing import Any

from outrider.draft.drafter import Drafter, DrafterContext
from outrider.draft.names import TAKEN, Part
from outrider.errors import InvalidRequest, OutriderError, suggest

VERBS = {
    "start": ("sequence",),
    "propose": ("sequences", "draft_plans"),
    "accept": ("sequence", "draft", "verdict"),
    "stop": ("sequence",),
}


def load_source(part: Part) -> Part:
    """The part with the drafter, class or function it means: imported, if it was named, and complete."""
    source = part.source
    if source is None:
        source = _imported(part.text)
    elif part.name is not None:  # an entry point
        try:
            source = source.load()
        except Exception as error:  # importing runs the package's own code
            raise OutriderError(
                f"the drafter {part.text!r} ({part.source.value}) cannot be imported: {_short(error)}"
            ) from error
    if not _makes_drafters(source) or inspect.isclass(source):
        _check(source)
    return replace(part, source=source)


def make_custom(part: Part, context: DrafterContext) -> tuple[str, Drafter]:
    """A drafter and the name that requests know it by."""
    made = part.source
    if _makes_drafters(made):
        try:
            made = made(context) if _wants_context(made) else made()
        except Exception as error:
            raise OutriderError(f"the drafter {part.text} could not be made: {_short(error)}") from error
        _check(made)
    return _name_of(made, part), made


def _imported(text: str) -> Any:
    module, _, path = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            raise InvalidRequest(
                f"there is no module {error.name!r} for the drafter {text}: install it, or name its folder in "
                "PYTHONPATH",
                "draft",
            ) from None
        raise OutriderError(
            f"{module}, for the drafter {text}, cannot be imported: {_short(error)}"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            known = [one for one in vars(found) if not one.startswith("_")]
            raise InvalidRequest(f"{module} has no {name!r}{suggest(name, known)}", "draft")
        found = getattr(found, name)
    return found


def _makes_drafters(source: object) -> bool:
    """A class, or a function: it is called for the drafter."""
    return inspect.isclass(source) or (
        callable(source) and not any(callable(getattr(source, verb, None)) for verb in VERBS)
    )


def _check(source: object) -> None:
    """All four verbs, each taking what it will be given."""
    shown = source.__name__ if inspect.isclass(source) else type(source).__name__
    missing = [verb for verb in VERBS if not callable(getattr(source, verb, None))]
    if missing:
        raise InvalidRequest(
            f"{shown} is not a drafter: it has no {' and no '.join(missing)}. A drafter has start, propose, "
            "accept and stop; one derived from outrider.Drafter needs only propose",
            "draft",
        )
    for verb, given in VERBS.items():
        names = ("self", *given) if inspect.isclass(source) and not _bound(source, verb) else given
        try:
            inspect.signature(getattr(source, verb)).bind(*names)
        except TypeError:
            raise InvalidRequest(f"{verb} of {shown} must take ({', '.join(given)})", "draft") from None
        except ValueError:  # written in C: it has no signature
            continue


def _bound(source: type, verb: str) -> bool:
    return isinstance(inspect.getattr_static(source, verb), (staticmethod, classmethod))


def _wants_context(source: Any) -> bool:
    """If it has a parameter of that name, or one that must be given."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except ValueError:
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = next((p for p in parameters if p.kind in positional), None)
    return first is not None and (first.name == "context" or first.default is inspect.Parameter.empty)


def _name_of(drafter: Drafter, part: Part) -> str:
    """Its own `name`; the one it is offered by; else its class's, as this project writes them."""
    own = getattr(drafter, "name", None)
    name = own if isinstance(own, str) else part.name or _snake(type(drafter).__name__)
    if not re.fullmatch(r"[\w.-]+", name):
        raise InvalidRequest(
            f"a drafter's name has letters, digits, '_', '-' and '.' only: not {name!r:.60}", "draft"
        )
    if name in TAKEN:
        raise InvalidRequest(
            f"the name {name!r} is taken: give {type(drafter).__name__} another `name`", "draft"
        )
    return name


def _snake(name: str) -> str:
    """`TrigramDrafter` -> `trigram`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Drafter") or name).lower()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0] + " (OUTRIDER_DEBUG=1 shows where)"
