"""Cards and folders of pairs for tests: the figures are made up, the weights whatever the test puts beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.load.cards import Acceptance, Card, DraftFacts, Score, TargetFacts, TaskScore, write_card

CHAIN = Acceptance(100, 240, (100, 70, 45), (70, 45, 25))
TREE = Acceptance(80, 250, (80, 70, 60), (72, 60, 38))


def task_score(task: str = "chat", temperature: float = 0.0, **changes: Any) -> TaskScore:
    made = TaskScore(task, temperature, 4, CHAIN, TREE, 1.4, 1.3, 500, 0)
    return replace(made, **changes)


def some_score(*tasks: TaskScore) -> Score:
    return Score(5, 24, 64, tasks or (task_score(),), "a machine", "2026-01-31", "abc1234", "outrider 0.1.0")


def some_card(fingerprint: str = "0" * 64, tokens_per_step: float | None = None, **changes: Any) -> Card:
    score = some_score()
    if tokens_per_step is not None:
        steps = 100
        chain = Acceptance(steps, round(steps * tokens_per_step), CHAIN.reached, CHAIN.accepted)
        score = some_score(task_score(chain=chain))
    made = Card(
        1,
        TargetFacts("a-target", fingerprint, 1_000_000),
        DraftFacts("eagle", "eagle3", 50_000, ("outrider",)),
        licence="Apache-2.0",
        trained_tokens=1_500_000,
        recipe="d" * 64,
        score=score,
    )
    return replace(made, **changes)


def write_pair(folder: Path, card: Card) -> Path:
    """A folder that has everything a catalogue looks at."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    write_card(folder, card)
    return folder
