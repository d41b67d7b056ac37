"""Training, from a target on disk to a draft that serving loads; and what becomes of it when it is interrupted."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.bench.as_if import config_json
from outrider.distill import train as training
from outrider.distill.acceptance import measure_acceptance
from outrider.distill.answers import Answers
from outrider.distill.checkpoints import checkpoints
from outrider.distill.features import TargetReader
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.students import make_student
from outrider.distill.train import CHECKPOINTS, CURVES, Diverged, read_curves, schedule, train
from outrider.errors import OutriderError
from outrider.load.checkpoint import expected_shapes
from outrider.load.token_shards import Conversation, ShardWriter
from tests.load.tiny import byte_level_backend, vocabulary
from tests.tiny import prompt_of, random_tensors, tiny_config

DEPTH, PROMPT, ANSWER = 3, 6, 30
OPTIONS = dict(threads=1, max_sequences=32, cache_bytes=1 << 22, device="cpu")
SMALL = Recipe(
    shards=("here",), context=64, batch_tokens=256, train_tokens=2400, unroll=2, vocabulary=200, learning_rate=1e-2,
    checkpoint_steps=3, validate_steps=6, depth=DEPTH,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be learned: what it says next hangs mostly on the last token."""
    folder = tmp_path_factory.mktemp("target")
    config = tiny_config(vocab=len(vocabulary()), eos_ids=(0,), tied=False)
    read = random_tensors(config)
    tensors = {name: read(name) for name, _ in expected_shapes(config)}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.04
    order = torch.randperm(config.vocab, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = 2.5 * tensors["model.embed_tokens.weight"][order]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(target: Path) -> Iterator[LLM]:
    with LLM(target, draft="none", **OPTIONS) as made:
        yield made


def answer(llm: LLM, folder: Path, count: int, first: int) -> Answers:
    """Half of them greedy, half at temperature 1."""
    prompts, heat = [prompt_of(PROMPT, first + i) for i in range(count)], [float(i % 2) for i in range(count)]
    params = [
        SamplingParams(temperature=t, seed=first + i, max_tokens=ANSWER, ignore_eos=True)
        for i, t in enumerate(heat)
    ]
    writer = ShardWriter(folder)
    for i, out in enumerate(llm.generate(prompts, params)):
        ids = [*prompts[i], *out.token_ids]
        said = [at >= PROMPT for at in range(len(ids))]
        writer.add(Conversation.of(ids, said, "chat", heat[i], f"p{first + i}"))
    writer.flush()
    return Answers(folder, 64)


@pytest.fixture(scope="module")
def answers(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answer(llm, tmp_path_factory.mktemp("answers"), 120, 0)


def test_a_trained_head_is_accepted_by_the_engine_as_training_says(
    llm: LLM, target: Path, answers: Answers, tmp_path: Path
) -> None:
    recipe = replace(SMALL, batch_tokens=512, train_tokens=20_000, checkpoint_steps=1000, validate_steps=1000)
    folder = train(llm, recipe, answers, tmp_path / "out", Silent())
    first, *_, last = [
        line["held_out"] for line in read_curves(tmp_path / "out" / CURVES) if "held_out" in line
    ]
    assert first["greedy"]["rates"][0] < 0.1 and last["greedy"]["rates"][0] > 0.3

    seen: list[tuple[bool, int]] = []
    asked = {"depth": DEPTH, "nodes": DEPTH}
    with LLM(target, draft=str(folder), speculation=asked, **OPTIONS) as served:
        served.driver.observer = lambda record: seen.extend(
            (o.sequence.request.params.temperature > 0, o.accepted) for o in record.outcomes if o.drafted
        )
        later = answer(served, tmp_path / "after", 80, 1000)
    student = make_student(replace(recipe, continue_from=str(folder)), llm.checkpoint, answers)
    reader = TargetReader(llm.model, student.taps, 1024)  # type: ignore[arg-type]
    found = measure_acceptance(student, reader, later, range(len(later)), 1024, DEPTH, 0)
    for sampled, kind, near in ((False, "greedy", 0.02), (True, "sampled", 0.05)):
        accepted = [count for hot, count in seen if hot == sampled]
        rates = [sum(c > k for c in accepted) / sum(c >= k for c in accepted) for k in range(2)]
        assert rates[0] > 0.3
        assert found[kind].rates[:2] == pytest.approx(rates, abs=near)


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
    train(llm, SMALL, answers, tmp_path / "whole", Silent())
    files, lines = outcome(tmp_path / "whole")
    steps = lines[-1]["step"]
    assert steps >= 8 and len(checkpoints(tmp_path / "whole" / CHECKPOINTS)) == 2

    out = tmp_path / "broken"
    for after in (
        *random.sample(range(1, 4), 2),
        4,
    ):  # 4 steps on from a checkpoint that is three at most behind
        with pytest.raises(KeyboardInterrupt):
            train(llm, SMALL, answers, out, Stops(after))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OutriderError, match=r"No space left.*make room"):
            train(llm, SMALL, answers, out, Silent())
    assert not list(out.rglob("*.part"))
    kept = checkpoints(out / CHECKPOINTS)
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
