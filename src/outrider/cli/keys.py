"""`outrider keys`: makes API keys for a server, lists and revokes them. Only their hashes are kept."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.flag import option
from outrider.cli.options import envvar
from outrider.cli.output import note, write
from outrider.errors import InvalidRequest, OutriderError, suggest
from outrider.serve.keys import MARKS, Key, KeyLimits, check_name, digest_of, parse_keys, read_key_file

keys = typer.Typer(help="Make API keys for a server; list and revoke them.", no_args_is_help=True)

PREFIX = "or-"  # so that a key is known for one where it turns up
HEADER = re.compile(r"^[ \t]*\[", re.MULTILINE)
SAID = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "max_running": "requests at once",
}

Name = Annotated[str, typer.Argument(help="Whose key it is.")]
File = Annotated[
    str, option("key_file", "The key file, as the server's --key-file has it.", "FILE", "--file")
]


def _limit(name: str, what: str) -> Any:
    return typer.Option(
        "--" + name.replace("_", "-"),
        min=0,
        envvar=envvar(name),
        show_envvar=False,
        help=f"Most {what}; 0: no limit.",
    )


Requests = Annotated[int, _limit("requests_per_minute", "requests a minute")]
Tokens = Annotated[int, _limit("tokens_per_minute", "tokens a minute, of prompts and answers")]
Running = Annotated[int, _limit("max_running", "requests at once")]
Admin = Annotated[bool, option("admin", "It may swap drafts, too.")]
KeepTraffic = Annotated[
    bool,
    option("key_keep_traffic", "Its tokens may be kept, where the server keeps any.", None, "--keep-traffic"),
]
KeyModels = Annotated[
    list[str] | None,
    option("key_models", "A model it may use; all by default. Repeatable.", "NAME", "--model"),
]
Folder = Annotated[str, option("keep_traffic", "The folder, as the server's --keep-traffic has it.", "DIR")]
Json = Annotated[bool, option("json", "One JSON object a key, on stdout.")]


@keys.command()
def add(
    name: Name,
    file: File = "keys.toml",
    requests_per_minute: Requests = 0,
    tokens_per_minute: Tokens = 0,
    max_running: Running = 0,
    admin: Admin = False,
    keep_traffic: KeepTraffic = False,
    model: KeyModels = None,
) -> None:
    """Make a key and print it, this once; the file keeps its hash. A running server reads the file again on SIGHUP.

    outrider keys add team-a --file keys.toml --requests-per-minute 60
    """
    path = Path(file).expanduser()
    check_name(name, "a key", "name")
    secret = PREFIX + secrets.token_urlsafe(32)
    limits = KeyLimits(requests_per_minute, tokens_per_minute, max_running)
    made = Key(name, digest_of(secret), limits, admin, keep_traffic, tuple(model or ()))
    with _locked(path):
        text, known = _contents(path)
        if name in [key.name for key in known]:
            raise InvalidRequest(
                f"{file} has a key named {name!r}; remove it first, or choose another", "name"
            )
        _replace(path, _joined(text, _entry(made)), [*known, made])
    write(f"{secret}\n")
    note(f"its hash is in {file}; the key itself is kept nowhere, so keep it now")


@keys.command("list")
def list_all(file: File = "keys.toml", as_json: Json = False) -> None:
    """List the keys of a file: names and limits."""
    for key in read_key_file(Path(file).expanduser()):
        limits, marks = asdict(key.limits), {mark: getattr(key, mark) for mark in MARKS}
        if as_json:
            write(json.dumps({"name": key.name, **limits, **marks, "models": key.models}) + "\n")
        else:
            said = [f"{value} {SAID[limit]}" for limit, value in limits.items() if value]
            said += [mark for mark, on in marks.items() if on]
            said += [f"only {', '.join(key.models)}"] if key.models else []
            write(f"{key.name}\t{', '.join(said) or 'no limits'}\n")


@keys.command()
def remove(name: Name, file: File = "keys.toml") -> None:
    """Revoke a key. A running server knows once it has read the file again: send it SIGHUP."""
    path = Path(file).expanduser()
    with _locked(path):
        known = read_key_file(path)
        text = path.read_text(encoding="utf-8")
        if name not in [key.name for key in known]:
            raise InvalidRequest(
                f"{file} has no key named {name!r}{suggest(name, [key.name for key in known])}", "name"
            )
        _replace(path, _without(text, name), [key for key in known if key.name != name])


@keys.command()
def forget(name: Name, keep_traffic: Folder) -> None:
    """Erase what a server kept of a key's traffic, also what it still holds in memory. The key stays as it is.

    outrider keys forget team-a --keep-traffic traffic
    """
    from outrider.serve.traffic import forget as erase  # brings numpy

    note(f"{erase(Path(keep_traffic).expanduser(), name)} shards erased")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One command at a time changes the files of a folder. The lock is the folder's own: no file for it stays."""
    try:
        descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as problem:
        raise OutriderError(f"{path} cannot be written: {problem.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _contents(path: Path) -> tuple[str, list[Key]]:
    if not path.exists():
        return "", []
    known = read_key_file(path)
    return path.read_text(encoding="utf-8"), known


def _entry(key: Key) -> str:
    """As TOML; its basic strings take what JSON writes."""
    lines = [
        "[[key]]",
        f"name = {json.dumps(key.name, ensure_ascii=False)}",
        f'hash = "sha256:{key.digest.hex()}"',
    ]
    limits = [(field.name, getattr(key.limits, field.name)) for field in fields(key.limits)]
    lines += [f"{limit} = {value}" for limit, value in limits if value]
    lines += [f"models = {json.dumps(key.models, ensure_ascii=False)}"] if key.models else []
    return "\n".join([*lines, *(f"{mark} = true" for mark in MARKS if getattr(key, mark))]) + "\n"


def _joined(text: str, entry: str) -> str:
    return f"{text.rstrip()}\n\n{entry}" if text.strip() else entry


def _without(text: str, name: str) -> str:
    """The text without the table of this key. Comments stay, those above the next table among them."""
    starts = [match.start() for match in HEADER.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        table = text[start:end]
        with contextlib.suppress(InvalidRequest):  # a table of something else
            if [key.name for key in parse_keys(table, "")] == [name]:
                left = text[:start] + _after(table).lstrip("\n") + text[end:]
                return left.strip("\n") + "\n" if left.strip() else ""
    return text


def _after(table: str) -> str:
    """What stands between a table's last line and the next table."""
    lines = table.splitlines(keepends=True)
    own = max(i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
    return "".join(lines[own + 1 :])


def _replace(path: Path, text: str, expected: list[Key]) -> None:
    """Write all of it or nothing, for the owner only, once it is sure to say what was meant."""
    try:
        right = parse_keys(text, str(path)) == expected
    except InvalidRequest:
        right = False
    if not right:
        raise OutriderError(f"{path} is written in a way that cannot be changed safely; edit it by hand")
    try:
        _swap(path.resolve(), text)  # of a link, what it leads to
    except OSError as problem:
        raise OutriderError(f"{path} cannot be written: {problem.strerror}") from None


def _swap(path: Path, text: str) -> None:
    """Replace the file by a finished one with the same owner."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            before = path.stat()
            os.chown(beside, before.st_uid, before.st_gid)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
