"""Batches are a function of seed and step; what is held out never comes back through another conversation."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.distill.answers import HELD_OUT, Answers, held_out
from outrider.errors import InvalidRequest
from outrider.load.token_shards import Conversation
from tests.shards import ShardWriter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of 5 to 89 tokens over 60 prompts; the first token is the conversation's number."""
    path = tmp_path_factory.mktemp("answers")
    writer, random = ShardWriter(path, 1000), np.random.default_rng(0)
    for number in range(200):
        length = int(random.integers(5, 90))
        ids = [number, *range(1, length)]
        writer.add(Conversation.of(ids, [i > 3 for i in range(length)], "chat", 0.7, f"p{number % 60}"))
    writer.add(Conversation.of([1, 2], [False, False], "chat", 0, "unanswered"))
    writer.flush()
    return path


def test_a_step_is_the_same_wherever_one_starts(folder: Path) -> None:
    answers = Answers(folder, 64)
    whole = list(islice(answers.batches(512, 3), 70))
    assert answers.batches(512, 3) is not None
    for start in (0, 1, 19, 37, 69):
        again = islice(answers.batches(512, 3, start), 70 - start)
        for one, two in zip(whole[start:], again, strict=True):
            assert torch.equal(one.ids, two.ids) and torch.equal(one.answered, two.answered)


def test_an_epoch_has_every_conversation_once(folder: Path) -> None:
    answers = Answers(folder, 64)
    assert len(answers) == 200
    orders = []
    for epochs, seed in ((1, 3), (1, 4)):
        batches = list(answers.batches(512, seed, epochs=epochs))
        orders.append([int(row[0]) for batch in batches for row in batch.ids])
        assert sorted(orders[-1]) == answers.rows()
    assert orders[0] != orders[1]
    two = [int(row[0]) for batch in answers.batches(512, 3, epochs=2) for row in batch.ids]
    assert two[: len(orders[0])] == orders[0] and two[len(orders[0]) :] != orders[0]
    assert sorted(two[len(orders[0]) :]) == answers.rows()


def test_batches_fit_and_hold_what_was_answered(folder: Path) -> None:
    answers = Answers(folder, 64)
    padded = real = 0
    for batch in answers.batches(512, 3, epochs=1):
        assert batch.ids.dtype == torch.int64 and batch.ids.numel() <= 512
        padded, real = padded + batch.ids.numel(), real + batch.tokens
        for ids, length, answered in zip(batch.ids, batch.lengths, batch.answered, strict=True):
            one = answers[int(ids[0])]
            assert length == len(one) <= 64
            assert ids[:length].tolist() == one.ids.tolist() and not ids[length:].any()
            assert answered[:length].tolist() == one.answered.tolist() and not answered[length:].any()
    assert real / padded > 0.8  # those of a length are together


def test_what_is_held_out_is_held_out_by_prompt(folder: Path) -> None:
    answers = Answers(folder, 64)
    kept, held = answers.rows(), answers.rows(held_out=True)
    assert held and sorted([*kept, *held]) == list(range(200))
    assert not {answers[i].prompt for i in kept} & {answers[i].prompt for i in held}
    shown = {int(row[0]) for batch in answers.batches(512, 0, held_out=True, epochs=1) for row in batch.ids}
    assert shown == set(held)


def test_the_share_held_out() -> None:
    prompts = [f"prompt-{i}" for i in range(10_000)]
    held = held_out(iter(prompts))
    assert abs(len(held) / len(prompts) - HELD_OUT) < 0.005
    assert held >= held_out(iter(prompts[:5000]))  # more prompts move none into training
    assert not held_out(iter(["alone"] * 3)) and len(held_out(iter(["one", "two"]))) == 1


def test_what_cannot_be_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing to train on"):
        Answers(tmp_path, 64)
    with pytest.raises(InvalidRequest, match="do not hold one conversation of 64"):
        next(Answers(folder, 64).batches(32, 0))
