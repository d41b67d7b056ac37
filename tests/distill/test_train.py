"""Training, from a target on disk to a draft that serving loads; and what becomes of it when it is interrupted."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM
from outrider.distill import train as training
from outrider.distill.answers import Answers
from outrider.distill.checkpoints import checkpoints
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.students import make_student
from outrider.distill.train import CHECKPOINTS, CURVES, Diverged, read_curves, schedule, train
from outrider.errors import OutriderError
from tests.distill.learnable import OPTIONS, answer, write_learnable

DEPTH = 3
SMALL = Recipe(
    shards=("here",), context=64, batch_tokens=256, train_tokens=2400, unroll=2, vocabulary=200, learning_rate=1e-2,
    checkpoint_steps=3, validate_steps=6, depth=DEPTH,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_learnable(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, draft="none", **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def answers(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answer(llm, tmp_path_factory.mktemp("answers"), 120, 0)


class Stops(Silent):
    """Ends the run after so many steps."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def update(self, done: float, note: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def outcome(out: Path) -> tuple[dict[str, bytes], list[dict]]:
    files = {file.name: file.read_bytes() for file in sorted((out / "draft").iterdir())}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read_curves(out / CURVES)]
    return files, lines


def test_whatever_interrupts_it_the_result_is_the_same(
    llm: LLM, answers: Answers, tmp_path: Path, monkeypatch
) -> None:
    with torch.no_grad():  # which may be what the caller's program does
        train(llm, SMALL, answers, tmp_path / "whole", Silent())
    files, lines = outcome(tmp_path / "whole")
    steps = lines[-1]["step"]
    assert steps >= 8 and len(checkpoints(tmp_path / "whole" / CHECKPOINTS)) == 2

    out = tmp_path / "broken"
    for after in (
        random.randrange(1, 3),
        4,
        4,
    ):  # the second gets past a checkpoint of step 3, the third past 6
        with pytest.raises(KeyboardInterrupt):
            train(llm, SMALL, answers, out, Stops(after))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OutriderError, match=r"No space left.*make room"):
            train(llm, SMALL, answers, out, Silent())
    assert not list(out.rglob("*.part"))
    kept = checkpoints(out / CHECKPOINTS)
    assert [path.stem[-1] for path in kept] == ["6", "3"]
    kept[0].write_bytes(kept[0].read_bytes()[:-9])  # a disk that lost the end of it
    report = Silent()
    train(llm, SMALL, answers, out, report)
    assert kept[0].name in report.notes[0]
    assert outcome(out) == (files, lines)


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_loss_that_is_no_number_ends_it_with_what_was_good(
    llm: LLM, answers: Answers, tmp_path: Path, monkeypatch
) -> None:
    sound = training.losses_and_gradients
    calls = iter(range(100))

    def poisoned(*arguments):
        losses, gradients, of_head = sound(*arguments)
        if next(calls) == 4:
            gradients[0] *= float("nan")
        return losses, gradients, of_head

    monkeypatch.setattr(training, "losses_and_gradients", poisoned)
    with pytest.raises(Diverged, match=r"step 5.*lower learning rate"):
        train(llm, SMALL, answers, tmp_path, Silent())
    (kept,) = checkpoints(tmp_path / CHECKPOINTS)
    assert kept.name == "checkpoint-00000003.safetensors"
    assert all(tensor.isfinite().all() for tensor in load_file(kept).values())


def test_it_goes_on_from_a_draft(llm: LLM, answers: Answers, tmp_path: Path) -> None:
    """Also from one in a layout of others, whose form it keeps."""
    for layout in ("outrider", "speculators"):
        recipe = replace(SMALL, layout=layout, shared_head=True, taps=(0, 1), train_tokens=600)
        folder = train(llm, recipe, answers, tmp_path / layout, Silent())
        net = make_student(replace(recipe, continue_from=str(folder)), llm.checkpoint, answers).net
        assert net.config.shared_head == (layout == "outrider")  # others have no such heads
        ended = load_file(checkpoints(tmp_path / layout / CHECKPOINTS)[0])
        for name, parameter in net.named_parameters():
            if name != "lm_head.weight":
                assert torch.equal(parameter.data, ended[f"net.{name}"].bfloat16().float())


def test_the_learning_rate_rises_and_falls() -> None:
    assert schedule(0, 0.1) == schedule(1, 0.1) == training.FLOOR
    assert schedule(0.05, 0.1) == pytest.approx(0.5) and schedule(0.1, 0.1) == pytest.approx(1)
    falling = [schedule(0.1 + 0.09 * i, 0.1) for i in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert schedule(0, 0) == 1
