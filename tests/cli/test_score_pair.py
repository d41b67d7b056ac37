"""`outrider pairs score`: from a draft and prompts to a card that makes the draft the default."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM
from outrider.distill.recipe import Recipe
from outrider.load import pairs
from outrider.load.cards import read_card, write_card
from tests.load.pairs import some_card
from tests.targets import write_target

from .conftest import Outrider

FLAGS = (
    "--each",
    1,
    "--max-tokens",
    8,
    "--depth",
    2,
    "--tree-nodes",
    4,
    "--temperatures",
    "0",
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pairs, "SHIPPED", tmp_path / "shipped")
    return write_target(tmp_path / "small", noise=0.1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"task": task, "prompt": f"say {word}"} for task in ("chat", "code") for word in ("yes", "no")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_scored_draft_becomes_the_default(
    outrider: Outrider, target: Path, draft: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = outrider("pairs", "score", target, draft, "--prompts", prompts, "--licence", "MIT", *FLAGS)
    assert ran.code == 0, ran.err
    card = read_card(draft)
    assert [(one.task, one.prompts) for one in card.score.tasks] == [("chat", 1), ("code", 1)]
    assert (card.target.name, card.draft.kind, card.licence) == (target.name, "lm", "MIT")
    assert (card.score.depth, card.score.tree_nodes, card.score.max_tokens) == (2, 4, 8)
    assert ran.out.startswith("task ") and ran.out.rstrip().endswith("identical")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "outrider pairs add" in ran.err
    monkeypatch.setenv("OUTRIDER_PAIRS", str(draft))
    assert f"the pair {draft.name}" in outrider("models", "show", target).out
    assert any("small (for " in row["text"] for row in doctor_findings(outrider))
    with LLM(target, device="cpu", cache_bytes=1 << 20) as llm:
        assert (llm.drafter, llm.pair and llm.pair.name) == ("lm", "small")


def doctor_findings(outrider: Outrider) -> list[dict]:
    return json.loads(outrider("doctor", "--json").out)["findings"]


def test_what_a_card_says_of_training_stays(
    outrider: Outrider, target: Path, draft: Path, prompts: Path, tmp_path: Path
) -> None:
    recipe = Recipe(target=str(target), prompts=(str(prompts),), shares={"chat": 0.25})
    before = {"tokens_seen": 45}
    made = json.dumps({"tokens_seen": 10, "continued_from": before, "recipe": recipe.to_json()}, indent=1)
    (draft / "train.json").write_text(made)
    assert outrider("pairs", "score", target, draft, "--prompts", prompts, "--timed", 0, *FLAGS).code == 0
    card = read_card(draft)
    assert (card.trained_tokens, card.recipe) == (55, hashlib.sha256(recipe.text().encode()).hexdigest())
    write_card(draft, replace(read_card(draft), trained_tokens=77, recipe="r", licence="MIT"))
    place = tmp_path / "elsewhere"
    ran = outrider(
        "pairs", "score", target, draft, "--prompts", prompts, "--timed", 0, "--out", place, "--json", "-", *FLAGS
    )  # fmt: skip
    card = read_card(place)
    assert (card.trained_tokens, card.recipe, card.licence) == (77, "r", "MIT")
    assert json.loads(ran.out)["card"] == json.loads(json.dumps(card.as_json()))


def test_what_cannot_be_scored_is_refused(
    outrider: Outrider, target: Path, draft: Path, prompts: Path
) -> None:
    write_card(draft, some_card("1" * 64))
    ran = outrider("pairs", "score", target, draft, "--prompts", prompts, *FLAGS)
    assert ran.code == 2 and "made for a-target, another model than" in ran.err
    (draft / "card.json").write_text("{")
    ran = outrider("pairs", "score", target, draft, "--prompts", prompts, *FLAGS)
    assert ran.code == 1 and "not sound JSON" in ran.err
    ran = outrider("pairs", "score", target, draft, "--temperatures", "hot")
    assert ran.code == 2 and "such as 0,0.7" in ran.err
    ran = outrider("pairs", "score", target, draft / "nowhere")
    assert ran.code == 1 and "there is no" in ran.err
