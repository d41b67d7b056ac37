"""A TOML file of settings, for what would be long on a command line: `--config FILE` or OUTRIDER_CONFIG.

    model = "smollm2-135m"
    max_tokens = 512

    [serve]                       # [sampling], [engine] and [serve] only group; keys may stand outside as well
    port = 8080
    key-file = "/etc/outrider/keys.toml"

    [models.coder]                # one of several models that `outrider serve` offers, with its own settings
    model = "/models/coder.gguf"
    load = "first use"

Keys are names of fields; values are as the flag takes them. What is typed wins, then the environment, then the
file. One file may serve every command: what a command has no flag for, it leaves alone.
"""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cli.coming_from import key_answer
from outrider.cli.flag import Flag
from outrider.errors import InvalidRequest, closest
from outrider.load.sampling import GENERATION_CONFIGS
from outrider.serve.settings import PER_MODEL

Tables = Mapping[str, Mapping[str, Flag]]  # by the table's name, then by the key

TOP_LEVEL = ("model", "draft", "generation_config")
MODELS = "models"
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says, by parameter, ready to be a command's defaults."""

    file: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # by name, what a model's table sets

    def blame(self, problem: InvalidRequest, used: Mapping[str, Any]) -> InvalidRequest:
        """Name the file in the error if the value at fault came from it and not from a flag or variable."""
        name = problem.param or ""
        if name not in self.values or [used.get(name)] != [self.values[name]]:  # in lists NaN equals itself
            return problem
        return InvalidRequest(f"{self.file}: {problem}", name)


def read_config(file: str, tables: Tables) -> Config:
    document = _document(file)
    models = document.pop(MODELS, {})
    if not isinstance(models, dict) or not all(isinstance(own, dict) for own in models.values()):
        raise InvalidRequest(f"{file}: models are tables headed [models.NAME]", MODELS)
    values = _values(_entries(document, tables), tables, file)
    if models and "model" in values:
        raise InvalidRequest(f"{file}: model and [models] both say what is served; leave out one", "model")
    return Config(
        file, values, {name: _model_values(name, own, tables, file) for name, own in models.items()}
    )


def _values(entries: Iterable[tuple[str, str, Any]], tables: Tables, file: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for table, key, value in entries:
        name = key.replace("-", "_")
        flag = _flag_of(name, key, table, tables, file)
        if name in values:
            raise InvalidRequest(f"{file}: {name} is given twice", name)
        values[name] = _fitted(name, str if flag is None else flag.kind, flag, value, file)
    return values


def _model_values(model: str, own: Mapping[str, Any], tables: Tables, file: str) -> dict[str, Any]:
    """What the table of one model sets. What concerns the server as a whole is refused."""
    where = f"{file}: [{MODELS}.{model}]"
    allowed = {
        table: {name: flag for name, flag in flags.items() if table != "serve" or name in PER_MODEL}
        for table, flags in tables.items()
    }
    for key in own:
        if (name := key.replace("-", "_")) in tables["serve"] and name not in PER_MODEL:
            raise InvalidRequest(f"{where}: {key} concerns the whole server; it belongs at the top", name)
    return _values((("", key, value) for key, value in own.items()), allowed, where)


def _document(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as problem:
        raise InvalidRequest(f"{file} cannot be read: {problem.strerror}", "config") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file} is not UTF-8 text", "config") from None
    except tomllib.TOMLDecodeError as problem:
        raise InvalidRequest(f"{file} is not TOML: {problem}", "config") from None


def _entries(document: Mapping[str, Any], tables: Tables) -> Iterator[tuple[str, str, Any]]:
    """Table ("" outside of one), key and value."""
    for key, value in document.items():
        if key in tables and isinstance(value, dict):
            yield from ((key, inner, v) for inner, v in value.items())
        else:
            yield "", key, value


def _flag_of(name: str, key: str, table: str, tables: Tables, file: str) -> Flag | None:
    """The flag a key sets; None for those at the top, which are not a field of anything."""
    homes = [home for home, flags in tables.items() if name in flags]
    if name in TOP_LEVEL:
        if not table:
            return None
        raise InvalidRequest(f"{file}: {key} belongs at the top, before [{table}]", name)
    if not homes:
        where = f" in [{table}]" if table else ""
        known = [*(tables[table] if table else _all_names(tables))]
        raise InvalidRequest(f"{file}: unknown key {key!r}{where}{_hint(name, known)}", name)
    if table and table not in homes:
        raise InvalidRequest(f"{file}: {key} belongs in [{homes[0]}], not in [{table}]", name)
    return tables[homes[0]][name]


def _all_names(tables: Tables) -> list[str]:
    return [*TOP_LEVEL, *tables, *(name for flags in tables.values() for name in flags)]


def _hint(name: str, known: list[str]) -> str:
    if answer := key_answer(name):
        return f": {answer}"
    near = closest(name, known)
    return (
        f"; did you mean {near!r}?"
        if near
        else "; keys are named like the flags of outrider serve --help-all"
    )


def _fitted(name: str, kind: Any, flag: Flag | None, value: Any, file: str) -> Any:
    """The value as the command line would have it, once it is of the flag's type and can be read."""
    try:
        fitted = _of_kind(kind, value, flag is not None and flag.read is not None)
        if name == "generation_config" and fitted not in GENERATION_CONFIGS:
            raise ValueError(f"{fitted!r} is not {' or '.join(GENERATION_CONFIGS)}")
        if flag is not None and flag.read is not None:
            flag.read(fitted)
    except ValueError as problem:
        raise InvalidRequest(f"{file}: {name}: {problem}", name) from None
    return fitted


def _of_kind(kind: Any, value: Any, is_read: bool) -> Any:
    if typing.get_origin(kind) is list:
        [inner] = typing.get_args(kind)
        return [_of_kind(inner, one, False) for one in (value if isinstance(value, list) else [value])]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        [kind] = [inner for inner in typing.get_args(kind) if inner is not type(None)]
    if kind is str and is_read and type(value) is int:  # sizes and depths are read from text
        return str(value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"must be {WANTED[kind]}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """What is in the file, as TOML has it; not at length, and the inside of a list may be a key."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    names: dict[type, str] = {str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)
