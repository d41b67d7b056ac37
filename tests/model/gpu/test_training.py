"""A draft's training over the decoder on a device: the same features, and a step with half precision matmuls."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from outrider.distill.acceptance import measure_acceptance
from outrider.distill.answers import Answers
from outrider.distill.features import TargetReader
from outrider.distill.head_net import HeadNet
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.students import HeadStudent, head_shape
from outrider.distill.train import Training, on_the_cpu
from outrider.load.token_shards import Conversation
from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.rope import rope_tables
from tests.model.gpu.test_kernels import HALF
from tests.shards import ShardWriter
from tests.tiny import prompt_of, random_tensors, tiny_config

CONFIG = tiny_config()


@pytest.mark.slow  # Triton's interpreter takes its time
def test_a_step_of_training(device: str, tmp_path: Path) -> None:
    tables = rope_tables(CONFIG, 192)
    model = DeviceDecoder(Decoder(CONFIG, random_tensors(CONFIG), GpuKernels(CONFIG, tables, device, HALF)))
    twin = Decoder(CONFIG, random_tensors(CONFIG), ReferenceKernels(CONFIG, tables))
    writer = ShardWriter(tmp_path)
    for i, length in enumerate((7, 5, 6)):
        said = [at > 3 for at in range(length)]
        writer.add(Conversation.of(prompt_of(length, i), said, "chat", float(i), f"p{i}"))
    writer.flush()
    answers = Answers(tmp_path, 16)
    batch = answers.batch([0, 1])
    made, known = (TargetReader(one, (0, 2), 32).read(batch) for one in (model, twin))
    for row, length in enumerate(batch.lengths.tolist()):
        for ours, theirs in ((made.taps, known.taps), (made.last, known.last)):
            torch.testing.assert_close(
                ours[row, :length].float().cpu(), theirs[row, :length], rtol=0.05, atol=0.05
            )

    recipe = Recipe(
        shards=("x",), context=16, batch_tokens=48, unroll=2, dtype="bfloat16", vocabulary=50, depth=2
    )
    student = HeadStudent(HeadNet(head_shape(recipe, CONFIG), torch.arange(50)), CONFIG, "outrider", "x")
    run = Training(model, student, recipe, answers, tmp_path / "out", Silent())
    before = {name: p.detach().clone() for name, p in student.net.named_parameters()}
    with on_the_cpu(1) if device == "cpu" else nullcontext():
        run._step(batch)
        line = run._read()
    assert len(line["loss"]) == 2 and all(0 < value < 20 for value in line["loss"])
    assert all(not torch.equal(p, before[name]) for name, p in student.net.named_parameters())
    found = measure_acceptance(student, run.reader, answers, range(3), 48, 2, 0)
    assert found["greedy"].reached[0] > 0 and found["sampled"].reached[0] > 0
