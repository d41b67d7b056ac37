"""A candidate is compared with the draft in use on held-out traffic; only one that is surely better is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.distill.shadow import Comparison, compare, traffic_folders
from outrider.errors import InvalidRequest
from outrider.load.token_shards import Conversation, write_shard
from tests.serve.test_draft import write_drafts


def write_traffic(folder: Path, prompts: int) -> Path:
    some = [
        Conversation.of(
            [3 + i % 50, 4 + i // 50, 9, 9], [False, False, True, True], "traffic", 0.7 * (i % 2), str(i)
        )
        for i in range(prompts)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder, 0, some)
    return folder


def test_only_a_better_draft_is_better(tmp_path: Path) -> None:
    write_drafts(tmp_path)
    write_traffic(tmp_path / "traffic" / "key-a", 500)
    folders = traffic_folders(tmp_path / "traffic")
    right, wrong = tmp_path / "drafts" / "right", tmp_path / "drafts" / "wrong"
    found = compare(str(tmp_path / "target"), wrong, right, folders, limit=12, cache_bytes=1 << 22)
    assert found.better and found.candidate > found.running and found.conversations >= 4
    assert found.gain == pytest.approx(found.candidate - found.running)
    with pytest.raises(InvalidRequest, match="fewer than 4"):
        compare(str(tmp_path / "target"), wrong, right, [write_traffic(tmp_path / "few", 3)])


def test_a_gain_within_its_uncertainty_is_none() -> None:
    assert Comparison(9, 90, 2.0, 2.2, 0.2, 0.05).better
    assert not Comparison(9, 90, 2.0, 2.2, 0.2, 0.15).better
    assert not Comparison(9, 90, 2.0, 2.0, 0.0, 0.0).better


def test_folders_without_traffic_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no kept traffic"):
        traffic_folders(tmp_path)
    assert traffic_folders(write_traffic(tmp_path / "one", 2)) == [tmp_path / "one"]
