"""Small JSON files beside weights: config.json and its like, read with a bound and errors that name the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from outrider.errors import BadCheckpoint

MAX_JSON = 64 << 20  # bytes; the largest shard indexes are a few megabytes
MAX_DIGITS = 40  # of an integer; beyond 308 arithmetic with floats raises


def plain_bytes(file: Path, most: int) -> bytes:
    """The bytes of a plain file, `most` at most. A pipe is not waited for, and no device is read: ValueError."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("it is no plain file")
        if len(data := opened.read(most + 1)) > most:
            raise ValueError(f"it is larger than {most} bytes")
    return data


def read_text(file: Path, most: int = MAX_JSON) -> str:
    try:
        return plain_bytes(file, most).decode()
    except (OSError, ValueError) as problem:
        raise BadCheckpoint(f"{file} cannot be read: {problem!s:.300}") from None


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    if not file.exists():
        if optional:
            return {}
        raise BadCheckpoint(f"{file.parent} has no {file.name}")
    try:
        found = json.loads(read_text(file), parse_int=_whole)
    except (ValueError, RecursionError) as problem:
        raise BadCheckpoint(f"{file} is not sound JSON: {problem!s:.300}") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{file} should hold a JSON object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits, at most {MAX_DIGITS} are allowed")
    return int(digits)
