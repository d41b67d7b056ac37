"""The forms of `draft`, split into parts and checked before anything is loaded. No torch here.

auto                      the draft that is paired with the target (load/pairs.py), if there is one; else lookup
none                      no drafts unless a request asks
lookup, early_exit[:N]    no second model; N layers, or found by a short search
synthetic:0.8,0.7         no model: right with these probabilities by depth, for trying things out
PATH, alias or hub id     a smaller model (then called `lm`) or an EAGLE-3 head (`eagle`)
NAME                      a drafter that an installed package offers: entry points `outrider.drafters`
package.module:Class      a drafter of one's own, imported because it was named
a+b                       both, sharing one tree

A drafter of one's own is found by name, made, and checked for its four verbs. What it does later can cost drafts, never
an answer: drafters.py sees to that.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.draft.drafter import Drafter, DrafterContext
from outrider.errors import InvalidRequest, ModelNotFound, OutriderError, suggest
from outrider.load.find import FORMS, is_model_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "outrider.drafters"
WORDS = ("auto", "none", "lookup", "early_exit")
# Names of drafters in requests, in `--methods` and in reports. A package cannot offer a drafter by one of them.
TAKEN = (*WORDS, "lm", "eagle", "plain", "synthetic")
IMPORT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_MODEL = "give the model itself: a folder, a .gguf file, an alias or a hub id"
_LOOKUP = "here that is 'lookup'"
# Words of other engines and papers, and what to give instead.
ELSEWHERE = {
    "lm": f"'lm' is what a smaller model is called once it is open; {_MODEL}",
    "draft_model": f"a smaller model has no name of its own here; {_MODEL}",
    "eagle": "'eagle' is what an EAGLE-3 head is called once it is open; give the head's folder or hub id",
    "eagle3": "give the EAGLE-3 head itself: its folder or hub id",
    "ngram": _LOOKUP,
    "[ngram]": _LOOKUP,
    "prompt_lookup": _LOOKUP,
    "suffix": _LOOKUP,
    "off": "here that is 'none', or --speculate off",
    "mtp": "heads of that kind are not read here",
    "medusa": "heads of that kind are not read here; an EAGLE-3 head is",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One drafter to make."""

    kind: str  # auto, lookup, early_exit, synthetic, model or own
    text: str  # as it was written
    source: Any = None  # of kind own: the drafter, or the class or function that makes it, or where that is
    name: str | None = None  # the name by which a package offers it
    paired: bool = False  # chosen by `auto`; if it cannot be used, lookup drafts instead


def parse_draft(draft: Any) -> tuple[Part, ...]:
    """The parts of `draft`: of text as above, or of an object, a class or a function."""
    if not isinstance(draft, (str, Path)):
        return (Part("own", _called(draft), draft),)
    text = str(draft)
    if text == "none":
        return ()
    offered = offered_drafters() if text not in WORDS else {}
    return tuple(_part(one.strip(), offered) for one in ([text] if text == "auto" else text.split("+")))


def settle_auto(parts: Iterable[Part], paired: Path | None) -> tuple[Part, ...]:
    """The parts with `auto` replaced by the paired draft in this folder, or by lookup if there is none."""
    meant = Part("lookup", "auto") if paired is None else Part("model", str(paired), paired=True)
    return tuple(meant if part.kind == "auto" else part for part in parts)


def label(names: Iterable[str]) -> str:
    """Drafters that draft together, as requests and reports name them."""
    return "+".join(names) or "none"


def offered_drafters() -> dict[str, EntryPoint]:
    """The drafters of installed packages."""
    from importlib.metadata import entry_points  # takes 25 ms; most commands need none of it

    return {point.name: point for point in entry_points(group=GROUP)}


def _part(text: str, offered: Mapping[str, EntryPoint]) -> Part:
    if text in ("auto", "lookup"):
        return Part(text, text)
    if text.partition(":")[0] == "early_exit":
        return Part("early_exit", text)
    if text.partition(":")[0] == "synthetic":
        return Part("synthetic", text)
    if text in offered and text not in TAKEN:
        return Part("own", text, offered[text], text)
    if IMPORT.fullmatch(text) and not Path(text).exists():
        return Part("own", text)
    return Part("model", text)


def check_parts(parts: Iterable[Part], cache: Path) -> None:
    """Refuses parts that cannot name a drafter, before a model is loaded."""
    for part in parts:
        if part.kind == "synthetic":
            read_rates(part.text.partition(":")[2], "draft")
        if part.kind != "model" or is_model_name(part.text, cache):
            continue
        if not part.text or part.text == "none":
            raise InvalidRequest("draft joins names with '+', such as lookup+early_exit", "draft")
        if answer := ELSEWHERE.get(part.text.lower().replace("-", "_")):
            raise ModelNotFound(f"no drafter {part.text!r}: {answer}")
        known = (*WORDS, *offered_drafters())
        raise ModelNotFound(
            f"no drafter {part.text!r:.99}{suggest(part.text, known)}\n"
            f"Or a model that drafts: {FORMS}; or one's own: package.module:Class"
        )


def read_rates(text: str, field: str) -> tuple[float, ...]:
    """`0.8,0.7,0.6`: probabilities by depth."""
    rates = []
    for depth, part in enumerate(text.split(","), 1):
        try:
            rate = float(part)
        except ValueError:
            raise InvalidRequest(
                f"{field}: acceptance {depth} is {part.strip()!r:.40}, not a number; write 0.8,0.7,0.6: of the first "
                "token, the second and so on",
                field,
            ) from None
        if not 0 <= rate <= 1:
            raise InvalidRequest(f"{field}: acceptance {depth} is {rate:g}, not between 0 and 1", field)
        rates.append(rate)
    return tuple(rates)


def _called(source: object) -> str:
    return getattr(source, "__name__", type(source).__name__)


# ------------------------------------------------------------------------------------------ drafters of one's own

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
