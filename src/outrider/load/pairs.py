"""The catalogue of pairs: drafts made for a target, each a folder of weights with a card (cards.py).

They lie in folders that OUTRIDER_PAIRS names, in the user's cache (`outrider pairs add`), and in the package. Which fit
a target is known by its fingerprint, the same for every quantisation of a model. No torch here, and no weights are
read but the target's last norm.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import BadCheckpoint, InvalidRequest, ModelNotFound, OutriderError, suggest
from outrider.load.cards import FILE, Card, read_card, write_card
from outrider.load.json_files import read_json

if TYPE_CHECKING:
    from outrider.load.checkpoint import Checkpoint

SHIPPED = Path(__file__).parent.parent / "pairs"
VARIABLE = "OUTRIDER_PAIRS"
NORM = "model.norm.weight"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
WEIGHTS = ("*.safetensors", "*.gguf")
HOW_IT_WAS_MADE = "train.json"
PATH_STARTS = ("/", "./", "../", "~")  # of words that are paths; a hub id has none of them


@dataclass(frozen=True, slots=True)
class Pair:
    name: str  # of its folder
    folder: Path
    card: Card
    source: str  # named (by OUTRIDER_PAIRS), added or shipped

    def as_json(self) -> dict[str, Any]:
        """Without its folder, which is the machine's own affair."""
        score = self.card.score
        figures = ("accept_rate", "effective_accept_rate", "tokens_per_step", "expected_speedup")
        return {
            "name": self.name,
            "source": self.source,
            "ratio": self.card.ratio,
            **{figure: None if score is None else getattr(score, figure) for figure in figures},
            "speedup": self.card.speedup,
            "card": self.card.as_json(),
        }


def fingerprint(checkpoint: Checkpoint) -> str | None:
    """Of a target; None of one whose family only transformers knows.

    Norms are float32 in every GGUF file and exact from bfloat16, so that all quantisations of a model share one.
    """
    c = checkpoint.config
    if c is None:
        return None
    widths = [spec.intermediate for spec in c.specs]  # first layers of a mixture of experts may have none
    width = widths if len(set(widths)) > 1 else widths[0]
    shape = [c.vocab, c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, width]
    values = checkpoint.tensor(NORM).numpy().astype("<f4").tobytes()
    return hashlib.sha256(json.dumps(shape).encode() + values).hexdigest()


def list_pairs(cache: Path) -> tuple[list[Pair], list[str]]:
    """All of them, and what is wrong with folders that should be pairs and are not."""
    pairs, problems = [], []
    for source, folder in _folders(cache):
        try:
            pairs.append(Pair(folder.name, folder, read_card(folder), source))
        except OutriderError as problem:
            problems.append(str(problem))
    return pairs, problems


def find_pair(checkpoint: Checkpoint, cache: Path) -> Pair | None:
    """The pair of this target: one's own before one that was shipped, then the one with the most tokens per step."""
    pairs, problems = list_pairs(cache)
    for problem in problems:
        warnings.warn(f"a pair is left out: {problem}", stacklevel=2)
    if not pairs:
        return None
    own = fingerprint(checkpoint)
    return min((pair for pair in pairs if pair.card.target.fingerprint == own), key=_rank, default=None)


def _rank(pair: Pair) -> tuple[bool, float, str, str]:
    score = pair.card.score
    tokens = score.tokens_per_step if score is not None else None
    return pair.source == "shipped", -(tokens or 0.0), pair.name, str(pair.folder)


def pair_named(name: str, cache: Path) -> Pair:
    for source, folder in _folders(cache):
        if folder.name == name:
            return Pair(name, folder, read_card(folder), source)
    known = {folder.name for _, folder in _folders(cache)}
    none = "" if known else "; there are none yet: outrider pairs add DIR"
    raise ModelNotFound(f"there is no pair {name!r:.99}{suggest(name, known)}{none}")


def add_pair(folder: Path, into: Path, name: str | None = None, licence: str | None = None) -> Pair:
    """Copy a draft with its card, or a distillation's draft, to a folder of pairs: whole or not at all."""
    name = folder.resolve().name if name is None else name
    if not NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r:.99} is no name for a pair: letters, digits and _ . - only", "name")
    draft = _draft_within(folder)
    card = read_card(draft)
    card = replace(card, licence=licence or card.licence)
    place = into / name
    taken = InvalidRequest(
        f"there is a pair {name!r} already, {place}: outrider pairs remove {name}, or give this one another --name",
        "name",
    )
    if place.exists():
        raise taken
    try:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=into) as part:
            made = shutil.copytree(draft, Path(part) / name, ignore=shutil.ignore_patterns(".*"))
            write_card(made, card)
            _forget_folders(made / HOW_IT_WAS_MADE)
            made.rename(place)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first
            raise taken from None
        raise InvalidRequest(f"{place} cannot be written: {_reason(problem)}", "name") from None
    return Pair(name, place, card, "added")


def _reason(problem: OSError) -> str:
    """The reason of the first file that could not be copied."""
    said = problem.args[0][0][2] if isinstance(problem, shutil.Error) else problem.strerror or str(problem)
    return re.sub(r"^\[Errno \d+\] |: '.*", "", str(said))


def _draft_within(folder: Path) -> Path:
    """The folder of a draft itself, or of the distillation that made it."""
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is no folder; a pair is a folder with weights and {FILE}")
    draft = folder / "draft" if (folder / "draft" / "config.json").exists() else folder
    if not (draft / FILE).exists():
        raise BadCheckpoint(f"{draft} has no {FILE}; outrider pairs score TARGET {draft} writes it")
    if not any(file for form in WEIGHTS for file in draft.glob(form)):
        raise BadCheckpoint(f"{draft} holds no weights: no .safetensors and no .gguf file")
    return draft


def _forget_folders(file: Path) -> None:
    """Cut paths in it to their last part. A pair may be published, and its maker's folders are private."""
    if not file.exists():
        return
    made = _cut(read_json(file))
    if isinstance(made.get("command"), str):
        made["command"] = shlex.join(map(_last_part, shlex.split(made["command"])))
    file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for key, held in value.items():
            short, again = _cut(key), 2
            while short in made:  # two folders had files of one name
                short, again = f"{_cut(key)} ({again})", again + 1
            made[short] = _cut(held)
        return made
    if isinstance(value, list):
        return [_cut(one) for one in value]
    return _last_part(value) if isinstance(value, str) else value


def _last_part(word: str) -> str:
    option, equals, path = ("", "", word) if word.startswith(PATH_STARTS) else word.rpartition("=")
    return option + equals + Path(path).name if path.startswith(PATH_STARTS) else word


def remove_pair(name: str, cache: Path) -> Path:
    """Delete a pair that was added; also one whose card cannot be read."""
    place = cache / "pairs" / name
    if NAME.fullmatch(name) and place.is_dir():
        try:
            place.rename(place.with_name(f".{name}.{secrets.token_hex(8)}.removed"))
        except FileNotFoundError:
            raise ModelNotFound(f"there is no pair {name!r}: another process has removed it") from None
        except OSError as problem:
            raise OutriderError(f"{place} cannot be removed: {problem.strerror}") from None
        for gone in place.parent.glob(f".{name}.*.removed"):  # also of a process that was killed
            shutil.rmtree(gone, ignore_errors=True)
        return place
    pair = pair_named(name, cache)
    if pair.source == "shipped":
        raise InvalidRequest(f"{name} came with Outrider; --draft lookup runs without it", "name")
    raise InvalidRequest(f"{name} is {pair.folder}, which {VARIABLE} names; take it out there", "name")


def _folders(cache: Path) -> Iterator[tuple[str, Path]]:
    """Folders that should be pairs, with where they are from: one's own first."""
    for named in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        place = Path(named).expanduser()
        one = (place / FILE).exists() or not place.is_dir()
        yield from (("named", folder) for folder in ([place] if one else _within(place)))
    yield from (("added", folder) for folder in _within(cache / "pairs"))
    yield from (("shipped", folder) for folder in _within(SHIPPED))


def _within(place: Path) -> list[Path]:
    try:
        return sorted(
            folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith(".")
        )
    except OSError:  # not there, or not for us to read
        return []
