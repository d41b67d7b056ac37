"""Finished conversations of shards that are not complete, on disk: an interrupted run resumes with them.

`.open-00012.safetensors`, beside the shards, is a shard in form. A prompt's id has the conversation's number before it,
as `17 rivers`. The file goes when its shard is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.load.token_shards import Conversation, read_shard, shard_bytes, write_atomically

NAME = re.compile(r"\.open-(\d{5,})\.safetensors")

Rows = dict[int, list[Conversation]]  # by the conversation's number; one that came to nothing has none


@dataclass(slots=True)
class OpenShard:
    """What is there of a shard that waits for `left` conversations."""

    left: int
    rows: Rows = field(default_factory=dict)
    kept: int = 0  # conversations that are on disk


def open_shards(folder: Path) -> dict[int, Path]:
    names = os.listdir(folder) if folder.is_dir() else []
    found = {int(match[1]): folder / name for name in names if (match := NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def write_open(folder: Path, shard: int, rows: Mapping[int, list[Conversation]]) -> None:
    numbered = [
        replace(row, prompt=f"{number} {row.prompt}") for number in sorted(rows) for row in rows[number]
    ]
    write_atomically(folder / f".open-{shard:05}.safetensors", shard_bytes(numbered))


def read_open(path: Path) -> Rows:
    found: Rows = {}
    for row in read_shard(path):
        number, _, prompt = row.prompt.partition(" ")
        found.setdefault(int(number), []).append(replace(row, prompt=prompt))
    return found


def drop_open(folder: Path, shard: int) -> None:
    (folder / f".open-{shard:05}.safetensors").unlink(missing_ok=True)
