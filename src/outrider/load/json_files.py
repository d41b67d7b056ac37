"""Small JSON files beside weights: config.json and its like, read with a bound and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import BadCheckpoint

MAX_JSON = 64 << 20  # bytes; the largest shard indexes are a few megabytes
MAX_DIGITS = 40  # of an integer; beyond 308 arithmetic with floats raises


def read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_JSON:
            raise BadCheckpoint(f"{file} is larger than {MAX_JSON} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadCheckpoint(f"{file} cannot be read: {problem}") from None


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    if not file.exists():
        if optional:
            return {}
        raise BadCheckpoint(f"{file.parent} has no {file.name}")
    try:
        found = json.loads(read_text(file), parse_int=_whole)
    except (ValueError, RecursionError) as problem:
        raise BadCheckpoint(f"{file} is not sound JSON: {problem}") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{file} should hold a JSON object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits, at most {MAX_DIGITS} are allowed")
    return int(digits)
