"""What training says of a draft on held-out text is what its score will say: within two points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.distill import score as scoring
from outrider.distill.acceptance import measure_acceptance
from outrider.distill.answers import Answers
from outrider.distill.features import TargetReader
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.score import ScoreOptions, score_open
from outrider.distill.students import make_student
from outrider.distill.train import CURVES, read_curves, train
from outrider.load.cards import Acceptance
from outrider.load.token_shards import Conversation
from tests.distill.learnable import ANSWER, OPTIONS, PROMPT, answer, write_learnable
from tests.shards import ShardWriter
from tests.tiny import prompt_of

DEPTH, POINTS = 3, 0.02
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
PROMPTS = [prompt_of(PROMPT, 1000 + i) for i in range(32)]
RECIPE = Recipe(
    shards=("here",), context=64, batch_tokens=512, train_tokens=12_000, unroll=2, vocabulary=200, learning_rate=1e-2,
    checkpoint_steps=1000, validate_steps=1000, depth=DEPTH,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_learnable(tmp_path_factory.mktemp("target")), draft="none", **OPTIONS) as made:
        yield made


def scored(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Acceptance]:
    """As serving counts it, all prompts together."""
    monkeypatch.setitem(scoring.BATCH, "cpu", OPTIONS["max_sequences"])
    options = ScoreOptions(tuple(TEMPERATURES.values()), DEPTH, 2, ANSWER, timed=0)
    with LLM(llm.checkpoint.path, draft=str(folder), **OPTIONS) as served:
        found = score_open(served, {"chat": PROMPTS}, options, Silent())
    assert not any(one.differing for one in found.tasks)
    return {kind: found.chain(heat) for kind, heat in TEMPERATURES.items()}


def trained(llm: LLM, recipe: Recipe, answers: Answers, folder: Path) -> dict[str, list[float]]:
    """As training counts it, on the same answers, with noise of its own: rates by depth."""
    said = answered(llm, folder)
    student = make_student(recipe, llm.checkpoint, answers)
    reader = TargetReader(llm.model, student.taps, 1024)  # type: ignore[arg-type]
    rows = range(len(said))
    runs = [measure_acceptance(student, reader, said, rows, 1024, DEPTH, seed) for seed in range(2)]
    return {
        kind: [
            sum(run[kind].accepted[d] for run in runs) / sum(run[kind].reached[d] for run in runs)
            for d in range(DEPTH)
        ]
        for kind in TEMPERATURES
    }


def answered(llm: LLM, folder: Path) -> Answers:
    writer = ShardWriter(folder)
    for heat in TEMPERATURES.values():
        params = [SamplingParams(temperature=heat, seed=i, max_tokens=ANSWER) for i in range(len(PROMPTS))]
        for i, out in enumerate(llm.generate(PROMPTS, params)):
            ids = [*PROMPTS[i], *out.token_ids]
            writer.add(Conversation.of(ids, [at >= PROMPT for at in range(len(ids))], "chat", heat, f"{i}"))
    writer.flush()
    return Answers(folder, 64)


def test_a_heads_score_is_what_training_said(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answer(llm, tmp_path / "answers", 120, 0)
    folder = train(llm, RECIPE, answers, tmp_path / "out", Silent())
    curve = [line["held_out"] for line in read_curves(tmp_path / "out" / CURVES) if "held_out" in line]
    assert curve[0]["greedy"]["rates"][0] < 0.1 and curve[-1]["greedy"]["rates"][0] > 0.3
    ours = trained(llm, replace(RECIPE, continue_from=str(folder)), answers, tmp_path / "said")
    check(scored(llm, folder, monkeypatch), ours)


def check(served: dict[str, Acceptance], ours: dict[str, list[float]]) -> None:
    """Greedy text leaves nothing to chance. Of sampled text both count draws, so as many as there are."""
    for kind, counts in served.items():
        assert counts.by_depth[0] > 0.25
        for depth in range(DEPTH):
            rate, count = counts.by_depth[depth], counts.reached[depth]
            chance = 0.0 if kind == "greedy" else 3 * (rate * (1 - rate) / count) ** 0.5
            assert ours[kind][depth] == pytest.approx(rate, abs=POINTS + chance)
