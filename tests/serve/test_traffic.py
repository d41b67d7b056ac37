"""Tokens of served requests, kept on disk: what is kept and what not, how much, how it is erased, and a full disk."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.load import token_shards
from outrider.load.token_shards import read_shards, shard_paths
from outrider.serve import traffic
from outrider.serve.traffic import TrafficKeeper, folder_name, forget
from tests.full_disk import file_size_limit

MIB = 1 << 20


def kept(folder: Path, key: str = "a") -> list[tuple[list[int], list[bool], float]]:
    own = folder / folder_name(key)
    return [(one.ids.tolist(), one.answered.tolist(), one.temperature) for one in read_shards(own)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traffic"


def test_prompt_and_answer_are_kept_for_the_owner_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        keeper = TrafficKeeper(folder, MIB)
        keeper.keep("a", [1, 2, 3], [4, 5], 0.7)
        keeper.keep("b/../c", [9], [8], 0.0)
        keeper.close()
    finally:
        os.umask(before)
    assert kept(folder) == [([1, 2, 3, 4, 5], [False] * 3 + [True] * 2, pytest.approx(0.7))]
    assert kept(folder, "b/../c") == [([9, 8], [False, True], 0.0)]
    assert keeper.counts["kept"] == 2
    own = folder / folder_name("b/../c")
    assert own.parent == folder and {p.name for p in folder.iterdir()} == {".lock", own.name, "key-a"}
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, own, *shard_paths(own).values())}
    assert list(modes.values()) == [0o700, 0o700, 0o600]
    [one] = read_shards(own)
    assert one.task == "traffic" and len(one.prompt) == 16


def test_one_shard_grows_until_it_is_full(folder: Path) -> None:
    keeper = TrafficKeeper(folder, MIB, write_seconds=0.0)  # whenever there is nothing else to do
    for i in range(3):
        keeper.keep("a", [i], [i + 1], 0.0)
        wait_for(lambda i=i: keeper.counts["kept"] == i + 1)
    assert list(shard_paths(folder / "key-a")) == [0] and len(kept(folder)) == 3
    keeper.shard_tokens = 10
    for i in range(8):
        keeper.keep("a", [i, i, i], [i, i], 0.0)
    keeper.close()
    assert len(shard_paths(folder / "key-a")) > 2 and len(kept(folder)) == 11


def wait_for(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not come to pass in time")


def test_the_oldest_goes_whoever_it_is_of(folder: Path) -> None:
    keeper = TrafficKeeper(folder, MIB)
    wide = 1 << 16  # from where on ids take four bytes
    for i in range(60):
        keeper.keep("ab"[i % 2], [wide + i] * 3000, [wide + i] * 3000, 0.0)
        if i % 16 == 15:
            wait_for(keeper._queue.empty)
    keeper.close()
    sizes = [path.stat().st_size for key in "ab" for path in shard_paths(folder / f"key-{key}").values()]
    assert MIB // 2 < sum(sizes) <= MIB and keeper.bytes == sum(sizes)
    firsts = [kept(folder, key)[0][0][0] - wide for key in "ab"]
    assert min(firsts) > 10 and abs(firsts[0] - firsts[1]) < 15  # both lost their first ones
    assert [kept(folder, key)[-1][0][0] - wide for key in "ab"] == [58, 59]
    small = TrafficKeeper(folder, MIB // 2)  # started again with less room
    assert small.bytes <= MIB // 2
    small.close()


def test_a_key_is_forgotten_alone_and_what_is_held_of_it_too(folder: Path) -> None:
    keeper = TrafficKeeper(folder, MIB, write_seconds=1000)
    keeper.keep("a", [1], [2], 0.0)
    keeper.keep("b", [3], [4], 0.0)
    wait_for(lambda: keeper._queue.empty() and len(keeper._open) == 2)
    keeper._write_all()
    keeper.keep("a", [5], [6], 0.0)  # in memory only
    wait_for(lambda: keeper._open["a"].fresh == 1)
    assert forget(folder, "a") == 1 and kept(folder) == []
    keeper.keep("a", [7], [8], 0.0)  # after it
    keeper.close()
    assert [ids for ids, *_ in kept(folder)] == [[7, 8]]
    assert [ids for ids, *_ in kept(folder, "b")] == [[3, 4]]
    assert keeper.counts["erased"] == 1
    with pytest.raises(OutriderError, match="is no folder"):
        forget(folder / "other", "a")


@pytest.mark.parametrize("what", ["all", "key"])
def test_what_was_deleted_by_hand_does_not_come_back(folder: Path, what: str) -> None:
    import shutil

    keeper = TrafficKeeper(folder, MIB, write_seconds=1000)
    keeper.keep("a", [1], [2], 0.0)
    wait_for(lambda: keeper._queue.empty() and "a" in keeper._open)
    keeper._write_all()
    keeper.keep("a", [3], [4], 0.0)
    wait_for(lambda: keeper._open["a"].fresh == 1)
    shutil.rmtree(folder if what == "all" else folder / "key-a")
    keeper.close()
    assert not (folder / "key-a").exists()
    assert keeper.keeping is (what == "key")


def test_a_full_disk_ends_it_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = TrafficKeeper(folder, MIB, write_seconds=1000)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_shards.os, "fsync", full)
    keeper.keep("a", [1], [2], 0.0)
    with caplog.at_level(logging.WARNING):
        keeper.close()
    assert "kept no longer" in caplog.text and "No space left" in caplog.text
    assert not keeper.keeping and keeper.counts["unwritten"] == 1
    keeper.keep("a", [1], [2], 0.0)  # no error
    assert keeper.counts["off"] == 1 and not list((folder / "key-a").iterdir())


def test_a_full_disk_does_not_keep_what_is_to_be_erased(folder: Path) -> None:
    """The shards go first, which makes room; where the mark cannot be written even then, that is said."""
    keeper = TrafficKeeper(folder, MIB, write_seconds=1000)
    keeper.keep("a", [1], [2], 0.0)
    keeper.close()
    (folder / "key-b").write_text("no folder")
    with file_size_limit(0), pytest.raises(OutriderError, match=r"shards are erased.*cannot be written"):
        forget(folder, "a")
    assert kept(folder) == []
    with pytest.raises(OutriderError, match=r"key-b cannot be written: File exists"):
        forget(folder, "b")


def test_a_folder_in_place_of_a_shard_is_named_at_the_start(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "key-a" / "shard-00000.safetensors" / "x").mkdir(parents=True)
    with pytest.raises(OutriderError, match=r"traffic cannot be kept in .*: Is a directory"):
        TrafficKeeper(folder, 0)


def test_what_the_thread_cannot_keep_up_with_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "QUEUED", 4)
    stuck, entered = threading.Event(), threading.Event()

    def hold(self, answer) -> None:
        entered.set()
        stuck.wait(20)

    monkeypatch.setattr(TrafficKeeper, "_hold", hold)
    keeper = TrafficKeeper(folder, MIB)
    keeper.keep("a", [0], [0], 0.0)
    assert entered.wait(20)
    for i in range(10):
        keeper.keep("a", [i], [i], 0.0)  # returns at once
    assert keeper.counts["queue"] == 6
    stuck.set()
    keeper.close()


def test_a_folder_that_others_can_read_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o750)
    with pytest.raises(OutriderError, match="chmod 700"):
        TrafficKeeper(folder, MIB)


def test_long_names_of_keys_have_short_folders() -> None:
    assert len(folder_name("x" * 5000)) < 80 and folder_name("x" * 5000) != folder_name("x" * 5001)
    assert folder_name("..") == "key-.." and "/" not in folder_name("a/b")
    assert folder_name("b\udcff") not in (folder_name("b\udcfe"), folder_name("b"))  # of a shell's bytes


def test_no_key_has_the_folder_of_another_one() -> None:
    long = "x" * 5000
    hashed = folder_name(long).removeprefix("key-")
    assert folder_name(hashed) != folder_name(long)
