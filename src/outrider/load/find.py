"""From a model's name to its files on this machine: a path, a built-in alias, or a repository of the hub.

What is in the files is for checkpoint.py. This file imports in milliseconds, because listing models and
completing names must not wait for torch or for the hub's library.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelNotFound, OutriderError
from outrider.load import builtin, hub
from outrider.load.aliases import ALIASES, Alias, HubModel, did_you_mean
from outrider.load.hub import HubId
from outrider.load.sampling import SamplingDefaults

FORMS = "a folder, a .gguf file, an alias, or a hub id such as org/name or org/name:file.gguf"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"({_PART}/{_PART})(?::([A-Za-z0-9_][A-Za-z0-9_./+ -]*\.gguf))?")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str  # what to give as MODEL
    about: str
    path: Path | None  # where it is, when it is here
    bytes: int
    present: bool
    alias: Alias | None = None  # what is known of it beside its file


def find(name: str | Path, cache: Path) -> Path:
    """The folder or `.gguf` file that `name` means, fetched into `cache` or the hub's cache if need be."""
    text = str(name).strip()
    path = Path(text).expanduser()
    if text and _exists(path):
        return path
    if text in ALIASES:
        model = ALIASES[text]
        return hub.fetch(model.hub) if isinstance(model, HubModel) else builtin.fetch(model, cache)
    cached = cache / "models" / f"{text}.gguf"
    if "/" not in text and text and _exists(cached):
        return cached
    if hub_id := parse_hub_id(text):
        return hub.fetch(hub_id)
    if text.endswith(".gguf") or text.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no file or folder {text!r:.999}; a model is {FORMS}")
    raise ModelNotFound(f"there is no model {text!r:.99}{did_you_mean(text)}\nA model is {FORMS}")


def could_be_model(text: str, cache: Path) -> bool:
    """Whether `find` could ever make something of it: it is here, or it has the form of a name."""
    path = Path(text).expanduser()
    looks = text in ALIASES or parse_hub_id(text) is not None or text.endswith(".gguf")
    return (
        looks
        or text.startswith((".", "/", "~"))
        or _exists(path)
        or _exists(cache / "models" / f"{text}.gguf")
    )


def published_sampling(path: Path, cache: Path) -> SamplingDefaults:
    """For a model with an alias whose file says nothing of sampling: what its makers publish beside it."""
    for model in ALIASES.values():
        if model.sampling and path == model.place(cache):
            return SamplingDefaults(model.sampling, f"the card of {model.alias}")
    return SamplingDefaults()


def is_model_name(name: str, cache: Path) -> bool:
    """Whether `find` would have something to look for, here or on the hub. Nothing is fetched."""
    text = name.strip()
    here = [Path(text).expanduser(), *([] if "/" in text else [cache / "models" / f"{text}.gguf"])]
    return bool(text) and (text in ALIASES or any(map(_exists, here)) or parse_hub_id(text) is not None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, or one with a zero byte
        return False


def parse_hub_id(text: str) -> HubId | None:
    match = _HUB_ID.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or match[1].endswith(".gguf"):
        return None
    return HubId(match[1], match[2])


def list_models(cache: Path) -> list[ModelEntry]:
    """The aliases, other `.gguf` files in the cache, and the hub's cached models."""
    entries = []
    for model in ALIASES.values():
        present = model.present(cache)
        place = model.place(cache) if present else None
        entries.append(ModelEntry(model.alias, model.about, place, model.bytes, present, model))
    own = {builtin.SMOLLM2.file}
    entries += [
        ModelEntry(file.stem, "GGUF file in the cache", file, file.stat().st_size, True)
        for file in sorted((cache / "models").glob("[!.]*.gguf"))
        if file.name not in own and file.is_file()
    ]
    named = {entry.path for entry in entries}
    for repo, snapshot in hub.cached_models():
        files = hub.weights(snapshot)
        if snapshot in named or named.issuperset(files):
            continue  # an alias names it
        size = sum(file.stat().st_size for file in files)
        entries.append(ModelEntry(repo, "cached from the hub", snapshot, size, True))
    return entries


def fetched(name: str, cache: Path) -> Path | None:
    """The file or folder that fetching this model made; None for what the user put there.

    Of the hub it is the repository's folder, with every revision of it.
    """
    if (model := ALIASES.get(name)) is not None and model.present(cache):
        return hub.folder_of(model.hub.repo) if isinstance(model, HubModel) else model.place(cache)
    if name not in (repo for repo, _ in hub.cached_models()):
        return None
    return hub.folder_of(name)


def size_of(place: Path) -> int:
    """Bytes on disk. The hub's folders link to one copy of each file, which counts once."""
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files if not file.is_symlink())


def delete(place: Path) -> None:
    try:
        place.unlink() if place.is_file() else shutil.rmtree(place)
    except OSError as problem:
        raise OutriderError(f"{place} cannot be deleted: {problem.strerror}") from None
