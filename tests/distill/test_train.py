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
from outrider.distill.answers import Answers, TrainBatch
from outrider.distill.checkpoints import checkpoints
from outrider.distill.features import TargetReader
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.students import make_student
from outrider.distill.train import CHECKPOINTS, CURVES, Diverged, Training, read_curves, schedule, train
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.heads import read_head
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

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
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
    monkeypatch.setitem(
        globals(), "SMALL", replace(SMALL, deep_share=0.5)
    )  # whose places are drawn in each step
    with torch.no_grad():  # which may be what the caller's program does
        train(llm, SMALL, answers, tmp_path / "whole", Silent())
    files, lines = outcome(tmp_path / "whole")
    steps = lines[-1]["step"]
    assert steps >= 8 and len(checkpoints(tmp_path / "whole" / CHECKPOINTS)) == 2

    out = tmp_path / "broken"
    reached = [0]

    def step(self: Training, batch: TrainBatch, inner=Training._step) -> None:
        inner(self, batch)
        reached.append(self.counters.step)

    monkeypatch.setattr(Training, "_step", step)
    for after in (1, random.randrange(2, 12), 7, 12):  # updates: several a step, so that most are within one
        with pytest.raises(KeyboardInterrupt):
            train(llm, SMALL, answers, out, Stops(after))
        kept = checkpoints(out / CHECKPOINTS)
        assert (int(kept[0].stem[-8:]) if kept else 0) == reached[-1] < steps  # all steps that were complete
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OutriderError, match=r"No space left.*make room"):
            train(llm, SMALL, answers, out, Silent())
    assert not list(out.rglob("*.part"))
    kept = checkpoints(out / CHECKPOINTS)
    assert len(kept) == 2
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


def test_later_steps_learn_the_same_from_a_share_of_the_places(
    llm: LLM, answers: Answers, tmp_path: Path, monkeypatch
) -> None:
    """Places are drawn anew in every step, and those drawn count for all."""
    sound, seen = training.losses_and_gradients, []

    def watched(kind, states, weights, *rest):
        seen.append(([len(state) for state in states], [float(one.sum()) for one in weights]))
        return sound(kind, states, weights, *rest)

    monkeypatch.setattr(training, "losses_and_gradients", watched)
    student = make_student(SMALL, llm.checkpoint, answers)
    batch = next(answers.batches(256, 0))

    def gradient(share: float, step: int) -> torch.Tensor:
        recipe = replace(SMALL, deep_share=share, unroll=3)
        run = training.Training(llm.model, student, recipe, answers, tmp_path, Silent())
        run.counters.step = step
        student.net.zero_grad()
        run._backward(batch)
        return torch.cat([p.grad.flatten() for p in student.net.parameters() if p.grad is not None])

    whole = gradient(1.0, 0)
    drawn = [gradient(0.5, step) for step in range(24)]
    (every, first, *_), shares = seen[0][0], seen[0][1]
    assert every == first
    for counts, weights in seen[1:]:
        assert counts == [every, -(-every // 2), -(-every // 2)]
        assert weights == pytest.approx(shares, rel=1e-4)
    assert not torch.equal(drawn[0], drawn[1])
    one, mean = (float((made - whole).norm() / whole.norm()) for made in (drawn[0], sum(drawn) / len(drawn)))
    assert mean < one / 3


def test_it_goes_on_from_a_draft(llm: LLM, answers: Answers, tmp_path: Path) -> None:
    """Also from one in a layout of others, whose form it keeps."""
    for layout in ("outrider", "speculators"):
        recipe = replace(SMALL, layout=layout, shared_head=True, taps=(0, 1), train_tokens=600)
        folder = train(llm, recipe, answers, tmp_path / layout, Silent())
        further = replace(recipe, continue_from=str(folder), shared_head=layout == "outrider")
        net = make_student(further, llm.checkpoint, answers).net
        assert net.config.shared_head == (layout == "outrider")  # others have no such heads
        ended = load_file(checkpoints(tmp_path / layout / CHECKPOINTS)[0])
        for name, parameter in net.named_parameters():
            if name != "lm_head.weight":
                assert torch.equal(parameter.data, ended[f"net.{name}"].bfloat16().float())


def test_a_head_grows_by_what_changes_nothing_until_it_learns(
    llm: LLM, answers: Answers, tmp_path: Path
) -> None:
    small = replace(SMALL, taps=(0, 1), train_tokens=600)
    folder = train(llm, small, answers, tmp_path / "small", Silent())
    had = read_head(folder, llm.checkpoint.config)[0].layer.intermediate
    recipe = replace(small, continue_from=str(folder), layers=3, intermediate=had + 24)
    reader, batch = TargetReader(llm.model, (0, 1), 256), next(answers.batches(256, 0))

    def states(recipe: Recipe, weights: Path | None = None) -> torch.Tensor:
        student = make_student(recipe, llm.checkpoint, answers)
        if weights is not None:
            ended = load_file(weights)
            student.net.load_state_dict(
                student.net.state_dict() | {n: ended[f"net.{n}"] for n, _ in student.net.named_parameters()}
            )
        with torch.no_grad():
            return torch.stack(student.states(batch, reader.read(batch), reader, DEPTH, torch.float32))

    before, grown = states(replace(recipe, layers=0, intermediate=0)), states(recipe)
    torch.testing.assert_close(grown, before, rtol=0, atol=1e-6)
    one_step = replace(recipe, train_tokens=1, warm_up=0.0)
    made = train(llm, one_step, answers, tmp_path / "grown", Silent())
    config = read_head(made, llm.checkpoint.config)[0]
    assert (config.layers, config.layer.intermediate) == (3, had + 24)
    (learnt,) = checkpoints(tmp_path / "grown" / CHECKPOINTS)
    weights = load_file(learnt)
    for layer in (1, 2):
        assert all(
            weights[f"net.layers.{layer}.{n}.weight"].any() for n in ("self_attn.o_proj", "mlp.down_proj")
        )
    assert weights["net.midlayer.mlp.down_proj.weight"][:, had:].any()
    assert weights["net.midlayer.mlp.gate_proj.weight"][had:].any()
    assert not torch.allclose(states(recipe, learnt), before, atol=1e-3)


def test_the_loss_compares_both_distributions_at_its_temperature(
    llm: LLM, answers: Answers, tmp_path: Path, monkeypatch
) -> None:
    sound, seen = training.losses_and_gradients, []

    def watched(kind, states, weights, head, targets, dtype, diverge, temperature):
        seen.append((targets(slice(0, 8)), temperature))
        return sound(kind, states, weights, head, targets, dtype, diverge, temperature)

    monkeypatch.setattr(training, "losses_and_gradients", watched)
    for temperature in (1.0, 0.5):
        recipe = replace(SMALL, train_tokens=1, loss_temperature=temperature)
        train(llm, recipe, answers, tmp_path / str(temperature), Silent())
    (plain, one), (sharp, half) = seen
    assert (one, half) == (1.0, 0.5)
    plain, sharp = (p / p[:, :1] for p in (plain, sharp))  # a head may know a part of the words
    torch.testing.assert_close(sharp, plain**2, rtol=1e-3, atol=1e-6)


def test_what_a_head_cannot_become_is_said(llm: LLM, answers: Answers, tmp_path: Path) -> None:
    folder = train(llm, replace(SMALL, layers=2, train_tokens=1), answers, tmp_path / "two", Silent())
    recipe = replace(SMALL, continue_from=str(folder))
    for asked, words in (
        (dict(layers=1), "has layers 2, and training can add some but takes none away"),
        (dict(taps=(0, 1)), r"has taps 1,0,2, which cannot become 0,1"),
        (dict(vocabulary=100), "has vocabulary 200, which cannot become 100"),
        (dict(tap_norms=False), "has tap_norms True"),
        (dict(intermediate=8), r"has intermediate \d+, and training can add some but takes none away"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            make_student(replace(recipe, **asked), llm.checkpoint, answers)


def test_a_small_decoder_goes_on_in_the_shape_it_has(llm: LLM, answers: Answers, tmp_path: Path) -> None:
    shape = dict(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=48)
    small = Recipe(kind="lm", shards=("here",), context=64, batch_tokens=256, train_tokens=1, **shape)
    folder = train(llm, small, answers, tmp_path / "lm", Silent())
    make_student(replace(small, continue_from=str(folder)), llm.checkpoint, answers)
    for name, has in shape.items():
        other = replace(small, continue_from=str(folder), **{name: 2 * has})
        with pytest.raises(InvalidRequest, match=f"has {name} {has}, and only heads grow"):
            make_student(other, llm.checkpoint, answers)


def test_the_learning_rate_rises_and_falls() -> None:
    assert schedule(0, 0.1) == schedule(1, 0.1) == training.FLOOR
    assert schedule(0.05, 0.1) == pytest.approx(0.5) and schedule(0.1, 0.1) == pytest.approx(1)
    falling = [schedule(0.1 + 0.09 * i, 0.1) for i in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert schedule(0, 0) == 1
