"""The whole command on a tiny target: three stages, gone on with after a kill, refused where the recipe changed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import Settings
from outrider.distill.folder import Folder
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.run import distill
from outrider.errors import InvalidRequest
from outrider.load.cards import read_card
from outrider.load.token_shards import Conversation, shard_paths
from tests.shards import ShardWriter

SETTINGS = Settings(device="cpu", threads=1, kernels="torch", max_sequences=8, cache_bytes=1 << 22)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"id": f"r{i}", "task": ("code", "chat")[i % 2], "turns": [f"hello {i}"]} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def recipe(target_folder: Path, prompts: Path) -> Recipe:
    return Recipe(
        target=str(target_folder), prompts=(str(prompts),), answer_tokens=300, max_tokens=8, context=64,
        batch_tokens=256, train_tokens=600, unroll=2, checkpoint_steps=4, validate_steps=100, score_limit=1,
        score_tokens=6, score_temperatures=(0.0,), depth=2, tree_nodes=3, shares={"code": 0.75},
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_three_stages_and_again(recipe: Recipe, tmp_path: Path, prompts: Path) -> None:
    report = Silent()
    draft = distill(recipe, tmp_path, SETTINGS, report)
    assert draft == tmp_path / "draft" and (draft / "config.json").exists()
    made = json.loads((draft / "train.json").read_text())
    assert made["recipe"] == recipe.to_json() and made["tokens_seen"] >= 600 and made["curves"]
    assert {"command", "commit", "versions", "machine", "date", "seed"} <= made.keys()
    data = made["data"]
    assert list(data["files"]) == [str(prompts)] and len(data["shards"]) == len(
        shard_paths(tmp_path / "answers")
    )
    assert data["tasks"]["code"]["share"] > data["tasks"]["chat"]["share"] > 0
    assert data["answered"] >= 300 and set(data["temperatures"]) == {"0", "0.7", "1"}
    card = read_card(draft)
    assert card.trained_tokens == made["tokens_seen"] and card.score is not None and card.score.depth == 2
    before = contents(draft)
    distill(recipe, tmp_path, SETTINGS, report)
    assert contents(draft) == before
    assert [note.split(":")[0] for note in report.notes[-3:]] == ["answers", "draft", "score"]


def test_stages_one_by_one_and_what_may_change(recipe: Recipe, tmp_path: Path, prompts: Path) -> None:
    def run(changed: Recipe, *stages: str) -> Path:
        return distill(changed, tmp_path, SETTINGS, Silent(), stages)

    with pytest.raises(InvalidRequest, match=r"answers in .* are not complete; run the stage answer first"):
        run(recipe, "train")
    with pytest.raises(InvalidRequest, match=r"no draft in .*; run the stage train first"):
        run(recipe, "score")
    run(replace(recipe, loss="kl"), "answer")
    with pytest.raises(InvalidRequest, match="was begun with max_tokens 8, not 9; leave it as it was, or"):
        run(replace(recipe, max_tokens=9), "answer")
    with pytest.raises(InvalidRequest, match=r'was begun with shares \{"code": 0.75\}, not nothing'):
        run(replace(recipe, shares={}), "answer")
    first = contents(tmp_path / "answers")
    more = replace(recipe, answer_tokens=420)  # and another loss than in the folder: nobody has trained
    run(more, "answer")
    assert first.items() < contents(tmp_path / "answers").items()
    with pytest.raises(InvalidRequest, match="was begun with answer_tokens 420, not 300"):
        run(recipe, "answer")
    kept = prompts.read_text()
    try:
        prompts.write_text(kept + "one more\n")
        with pytest.raises(InvalidRequest, match=r"p\.jsonl has changed since its prompts were answered"):
            run(more, "answer")
    finally:
        prompts.write_text(kept)


def test_several_processes_answer_the_same(recipe: Recipe, tmp_path: Path) -> None:
    """Also where one process has begun, and where a shard in the middle is missing."""
    recipe = replace(recipe, answer_tokens=900)
    distill(recipe, tmp_path / "one", SETTINGS, Silent(), ["answer"])
    known = contents(tmp_path / "one" / "answers")
    assert len(known) >= 6
    distill(replace(recipe, answer_tokens=300), tmp_path / "two", SETTINGS, Silent(), ["answer"])
    shard_paths(tmp_path / "two" / "answers")[1].unlink()
    distill(recipe, tmp_path / "two", SETTINGS, Silent(), ["answer"], processes=2)
    assert contents(tmp_path / "two" / "answers") == known
    summaries = [json.loads((tmp_path / out / "answers.json").read_text()) for out in ("one", "two")]
    assert summaries[0] == summaries[1]


def test_what_goes_wrong_in_one_of_several_processes_is_said(recipe: Recipe, tmp_path: Path) -> None:
    narrow = replace(
        recipe, context=16, batch_tokens=256, max_tokens=16
    )  # no prompt leaves room for an answer
    with pytest.raises(InvalidRequest, match="came to nothing"):
        distill(narrow, tmp_path, SETTINGS, Silent(), ["answer"], processes=2)


def test_a_deleted_shard_is_answered_again(recipe: Recipe, tmp_path: Path) -> None:
    distill(recipe, tmp_path, SETTINGS, Silent(), ["answer"])
    before = contents(tmp_path / "answers")
    shard_paths(tmp_path / "answers")[0].unlink()
    distill(recipe, tmp_path, SETTINGS, Silent(), ["answer"])
    assert contents(tmp_path / "answers") == before


def test_what_a_server_kept_and_a_draft_that_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "kept" / "key-a")
    for number in range(20):
        ids = [(number + 3 * i) % 90 for i in range(24)]
        writer.add(Conversation.of(ids, [i > 5 for i in range(24)], "traffic", 0.7, f"k{number}"))
    writer.flush()
    learns = replace(
        recipe,
        prompts=(),
        shares={},
        shards=(str(tmp_path / "kept"),),
        train_tokens=300,
        score_prompts=recipe.prompts,
    )
    first = distill(learns, tmp_path / "one", SETTINGS, Silent(), ["answer", "train"])
    assert not (tmp_path / "one" / "answers").exists()
    again = replace(learns, continue_from=str(tmp_path / "one"), layers=2)
    second = distill(again, tmp_path / "two", SETTINGS, Silent(), ["train"])
    kept = json.loads((second / "train.json").read_text())
    assert kept["recipe"]["continue_from"] == str(first) and list(kept["data"]["tasks"]) == ["traffic"]
    seen = json.loads((first / "train.json").read_text())["tokens_seen"]
    begun = dict(draft=str(first), layers=1, layers_added=1, tokens_seen=seen)
    assert seen >= 300 and kept["continued_from"] == begun
    with pytest.raises(InvalidRequest, match="is no draft to go on from"):
        distill(replace(learns, continue_from=str(tmp_path / "kept")), tmp_path / "x", SETTINGS, Silent())
    with pytest.raises(InvalidRequest, match="no shards in"):
        distill(
            replace(learns, shards=(str(tmp_path / "one"),)), tmp_path / "y", SETTINGS, Silent(), ["train"]
        )
    (tmp_path / "two" / "draft" / "train.json").unlink()  # as if it had been killed before its end
    writer.add(Conversation.of(range(9), [True] * 9, "traffic", 0.7, "late"))
    writer.flush()
    with pytest.raises(InvalidRequest, match="shards have changed since training began"):
        distill(again, tmp_path / "two", SETTINGS, Silent(), ["train"])


def test_one_at_a_time_in_a_folder(recipe: Recipe, tmp_path: Path) -> None:
    with Folder(tmp_path).held(), pytest.raises(InvalidRequest, match="another distillation is at work"):
        distill(recipe, tmp_path, SETTINGS, Silent())
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        distill(recipe, tmp_path / "file", SETTINGS, Silent())


def test_a_killed_run_ends_with_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    """A process of its own, killed for real while it answers."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    flags = [
        "distill", recipe.target, "--prompts", recipe.prompts[0], "--out", str(killed), "--stage", "answer",
        "--answer-tokens", "600", "--max-tokens", "8", "--context", "64", "--batch-tokens", "256", "--device", "cpu",
        "--threads", "1", "--kernels", "torch", "--max-sequences", "1",
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "outrider", *flags], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not shard_paths(killed / "answers"):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[1]
        time.sleep(0.002)
    process.kill()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGKILL and "answer:   0 %" in said, said
    assert not (killed / "answers.json").exists()
    same = Recipe(
        target=recipe.target,
        prompts=recipe.prompts,
        answer_tokens=600,
        max_tokens=8,
        context=64,
        batch_tokens=256,
    )
    for out in (killed, whole):
        distill(same, out, SETTINGS, Silent(), ["answer"])
    assert contents(killed / "answers") == contents(whole / "answers")
