"""Conversations as tokens on disk: shards of safetensors that are whole or not there, each with its digest.

`shard-00012.safetensors` holds `tokens` (uint16 where all of them fit, else int32) and `answered` (bits, eight to a
byte, the first the highest) of all its conversations one after the other, `offsets` (int64) where each begins, and
beside them, as JSON, their tasks, temperatures and prompts and a sha256 over all of it. A shard is written beside its
name, synced and renamed: a process that is killed or runs out of disk leaves only finished shards. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from outrider.errors import OutriderError

NAME = re.compile(r"shard-(\d{5,})\.safetensors")
KEY = "outrider"  # of the metadata; one alone, so that equal shards are equal bytes
VERSION = 2
WHOLE_BYTES = 1  # the version before it: int32, and a byte for every mark
SHARD_TOKENS = 1 << 18  # of a shard: a megabyte or so


class BadShard(OutriderError):
    """A shard that cannot be trusted."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One text as the target saw it: `answered` marks the tokens that it wrote itself."""

    ids: NDArray[np.int32]
    answered: NDArray[np.bool_]
    task: str = ""
    temperature: float = 0.0
    prompt: str = ""  # its id; what is held out is held out by it

    @classmethod
    def of(
        cls, ids: Sequence[int], answered: Sequence[bool], task: str, temperature: float, prompt: str
    ) -> Conversation:
        return cls(np.array(ids, np.int32), np.array(answered, np.bool_), task, temperature, prompt)

    def __len__(self) -> int:
        return len(self.ids)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.safetensors"


def shard_paths(folder: Path) -> dict[int, Path]:
    """The shards of a folder by number, in order. A file that was never finished does not count."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = {int(match[1]): folder / name for name in names if (match := NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def shard_folders(folder: Path) -> list[Path]:
    """The folder, if it holds shards, and those in it that do: a server keeps one a key."""
    within = sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    return [each for each in (folder, *within) if shard_paths(each)]


def write_shard(folder: Path, number: int, conversations: Sequence[Conversation]) -> Path:
    path = shard_path(folder, number)
    write_atomically(path, shard_bytes(conversations))
    return path


def shard_bytes(conversations: Sequence[Conversation]) -> bytes:
    """The same conversations give the same bytes."""
    lengths = [len(one) for one in conversations]
    none = np.zeros(0, np.int32)
    tokens = np.concatenate([none, *(one.ids for one in conversations)]).astype(np.int32)
    short = not len(tokens) or 0 <= tokens.min() <= tokens.max() < 1 << 16
    tensors: dict[str, NDArray[Any]] = {
        "tokens": tokens.astype(np.uint16) if short else tokens,
        "answered": np.packbits(
            np.concatenate([none, *(one.answered for one in conversations)]).astype(np.bool_)
        ),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
    }
    about: dict[str, Any] = {
        "version": VERSION,
        "tasks": [one.task for one in conversations],
        "temperatures": [one.temperature for one in conversations],
        "prompts": [one.prompt for one in conversations],
    }
    about["sha256"] = _digest(tensors, about)
    return save(tensors, {KEY: json.dumps(about, ensure_ascii=False)})


def read_shard(path: Path) -> list[Conversation]:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise OutriderError(f"{path} cannot be read: {problem.strerror}") from None
    try:
        tensors = load(data)
        about = _metadata(data)
        offsets = tensors["offsets"]
        if about.get("version") not in (WHOLE_BYTES, VERSION):
            raise BadShard(
                f"{path} is of version {about.get('version')!r:.20}; this Outrider reads version {VERSION}"
            )
        if about.pop("sha256") != _digest(tensors, about):
            raise _corrupt(path, "its digest differs")
        tokens, answered = tensors["tokens"].astype(np.int32), tensors["answered"]
        if about["version"] == VERSION:
            answered = np.unpackbits(answered, count=len(tokens))
        answered = answered.astype(np.bool_)
        rows = zip(about["tasks"], about["temperatures"], about["prompts"], strict=True)
        return [
            Conversation(tokens[begin:end], answered[begin:end], *row)
            for begin, end, row in zip(offsets[:-1].tolist(), offsets[1:].tolist(), rows, strict=True)
        ]
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _corrupt(path, str(problem) or type(problem).__name__) from None


def _metadata(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])
    if not isinstance(about, dict):
        raise ValueError("its metadata is no object")
    return about


def _digest(tensors: dict[str, NDArray[Any]], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def _corrupt(path: Path, why: str) -> BadShard:
    return BadShard(
        f"{path} is truncated or corrupt ({why:.200}): delete it; a distillation answers it again, and what the "
        "server kept of its traffic is only less by it"
    )


def write_atomically(path: Path, data: bytes) -> None:
    """Beside it, synced, renamed: a reader sees all of it or nothing, also after a crash."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as problem:
        with contextlib.suppress(OSError):
            part.unlink()
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        out_way = (
            "make room and run the same command again: what was finished is kept"
            if full
            else "nothing is lost"
        )
        raise OutriderError(f"{path} cannot be written: {problem.strerror} ({out_way})") from None


def _sync_folder(folder: Path) -> None:
    """So that the new name survives a power cut, too; not every system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_shards(folder: Path) -> Iterator[Conversation]:
    for path in shard_paths(folder).values():
        yield from read_shard(path)
