"""Shards are whole or not there, equal bytes for equal conversations, and a corrupt one is named."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from outrider.errors import OutriderError
from outrider.load import token_shards
from outrider.load.token_shards import (
    BadShard,
    Conversation,
    read_shard,
    read_shards,
    shard_path,
    shard_paths,
    write_shard,
)
from tests.shards import ShardWriter


def conversation(length: int, prompt: str = "p", first: int = 0) -> Conversation:
    answered = [i >= length // 2 for i in range(length)]
    return Conversation.of(range(first, first + length), answered, "code", 0.7, prompt)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    some = [conversation(5, "a"), conversation(0, "é"), conversation(70_000, "c")]
    path = write_shard(tmp_path, 12, some)
    assert path.name == "shard-00012.safetensors"
    for one, two in zip(some, read_shard(path), strict=True):
        assert one.ids.tolist() == two.ids.tolist() and one.answered.tolist() == two.answered.tolist()
        assert (one.task, one.temperature, one.prompt) == (two.task, two.temperature, two.prompt)
        assert two.ids.dtype == np.int32 and two.answered.dtype == np.bool_


def test_equal_conversations_are_equal_bytes(tmp_path: Path) -> None:
    one, two = (write_shard(tmp_path / name, 0, [conversation(9), conversation(4)]) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_a_writer_goes_on_after_what_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        writer = ShardWriter(tmp_path, shard_tokens=20)
        filled = [writer.add(conversation(8)) for _ in range(4)]
        assert [path is not None for path in filled] == [False, False, True, False]
        writer.flush()
        assert writer.flush() is None
    assert list(shard_paths(tmp_path)) == [0, 1, 2, 3]
    assert len(list(read_shards(tmp_path))) == 8


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_shard_is_named_with_the_way_out(tmp_path: Path, keep: int) -> None:
    path = write_shard(tmp_path, 3, [conversation(50)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadShard, match=r"shard-00003.*truncated or corrupt.*delete it"):
        read_shard(path)


def test_any_changed_byte_is_seen(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 0, [conversation(6)])
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        try:
            [read] = read_shard(path)
        except BadShard:
            continue
        assert read.ids.tolist() == list(range(6)), f"byte {at}"  # padding of the header


def test_a_full_disk_is_said_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path)
    writer.add(conversation(5))
    first = writer.flush()
    assert first is not None
    before = first.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(token_shards.os, "fsync", full)
        writer.add(conversation(7))
        with pytest.raises(OutriderError, match=r"shard-00001.*No space left.*make room.*kept"):
            writer.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    assert first.read_bytes() == before
    assert writer.flush() is not None  # once there is room, nothing was lost
    assert [len(one) for one in read_shards(tmp_path)] == [5, 7]


def test_half_a_shard_is_none(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [conversation(5)])
    (tmp_path / ".shard-00001.safetensors.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert list(shard_paths(tmp_path)) == [0]
    assert not shard_paths(tmp_path / "nowhere")


def test_ids_take_two_bytes_where_they_fit_and_older_shards_are_read(tmp_path: Path) -> None:
    short, long = conversation(40, first=65_000), conversation(40, first=70_000)
    sizes = [
        write_shard(tmp_path, number, [one] * 100).stat().st_size for number, one in enumerate((short, long))
    ]
    assert sizes[1] - sizes[0] == pytest.approx(2 * 4000, abs=16)
    for number, one in enumerate((short, long)):
        assert [row.ids.tolist() for row in read_shard(shard_path(tmp_path, number))] == [
            one.ids.tolist()
        ] * 100
    tensors = {
        "tokens": short.ids, "answered": short.answered.astype(np.uint8), "offsets": np.array([0, 40]),
    }  # fmt: skip
    about = {"version": 1, "tasks": ["code"], "temperatures": [0.7], "prompts": ["p"]}
    about["sha256"] = token_shards._digest(tensors, about)
    shard_path(tmp_path, 2).write_bytes(save(tensors, {"outrider": json.dumps(about)}))
    (old,) = read_shard(shard_path(tmp_path, 2))
    assert old.ids.tolist() == short.ids.tolist() and old.answered.tolist() == short.answered.tolist()
