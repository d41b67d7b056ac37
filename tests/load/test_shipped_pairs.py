"""What comes with the package: few bytes, files that any host takes, a card and a history, and drafts that load."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from outrider.load.cards import read_card
from outrider.load.checkpoint import open_checkpoint, open_safetensors
from outrider.load.find import find
from outrider.load.heads import read_head
from outrider.load.pairs import SHIPPED, find_pair, fingerprint
from outrider.settings import cache_folder

PAIR_BYTES = 30_000_000
FILE_BYTES = 15 << 20
HEADER_BYTES = 1 << 14  # of a shard, beside its numbers
FILES = {"card.json", "config.json", "train.json", "model.safetensors.index.json"}

shipped = pytest.mark.parametrize(
    "folder", sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else [], ids=lambda folder: folder.name
)


def test_the_package_carries_them() -> None:
    root = Path(__file__).parent.parent.parent
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "pairs/*/*" in data["outrider"]


@shipped
def test_a_shipped_pair_is_small_and_says_how_it_was_made(folder: Path) -> None:
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    weights = {name for name in files if name.endswith(".safetensors")}
    assert weights and files.keys() - weights <= FILES
    assert sum(files.values()) <= PAIR_BYTES
    assert max(files.values()) <= FILE_BYTES + HEADER_BYTES
    for name in weights:
        opened = open_safetensors(folder / name)
        kinds = {opened.get_slice(one).get_dtype() for one in opened.keys()}  # noqa: SIM118 - not a dict
        assert kinds <= {"BF16", "I32", "I64"}
    card = read_card(folder)
    assert card.licence and card.trained_tokens and card.score is not None
    assert not any(one.differing for one in card.score.tasks)
    assert card.speedup is not None and card.speedup > 1
    assert all(one.machine and one.commit and "outrider bench" in one.command for one in card.measured)
    made = (folder / "train.json").read_text()
    assert json.loads(made)["command"].startswith("outrider distill")
    assert '"/' not in made and " /" not in made and "../" not in made  # nobody's folders


@shipped
@pytest.mark.model
def test_a_shipped_pair_is_its_targets(folder: Path, tmp_path: Path) -> None:
    card = read_card(folder)
    if card.target.name != "smollm2-135m":
        pytest.skip("its target is not built in")
    target = open_checkpoint(find(card.target.name, cache_folder()))
    assert card.target.fingerprint == fingerprint(target) and target.config is not None
    assert find_pair(target, tmp_path).source == "shipped"  # where there is nothing else
    config, _ = read_head(folder, target.config)
    assert (card.draft.kind, card.draft.layout, config.layer.vocab) == ("eagle", "outrider", 49152)
