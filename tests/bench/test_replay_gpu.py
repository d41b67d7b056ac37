"""The engine beside a card that is reckoned: recorded answers come out as they are, and copied ones sooner."""

from __future__ import annotations

import json
import random
from argparse import Namespace

import pytest

from bench import host, replay_gpu
from outrider.device.capture import CapturedStep

pytestmark = pytest.mark.model  # for its tokenizer
SEQUENCES = 4


def texts(copied: bool) -> list[dict[str, list[int]]]:
    dice = random.Random(3)
    made = []
    for _ in range(SEQUENCES):
        prompt = dice.choices(range(100, 4000), k=60)
        made.append(
            {"prompt": prompt, "answer": prompt[5:45] if copied else dice.choices(range(100, 4000), k=40)}
        )
    return made


@pytest.fixture
def clock():
    away = host.Clock(CapturedStep, "_step")
    yield host.Reckoned(away, 0.1)
    away.stop()


def test_what_was_recorded_is_said_and_copies_take_less_time(clock) -> None:
    given = Namespace(sequences=SEQUENCES)
    engines = {method: replay_gpu.make_engine(method, given, clock) for method in ("plain", "auto")}
    for copied in (False, True):
        took = {}
        for method, engine in engines.items():
            asked = replay_gpu.requests(texts(copied), engine.model, SEQUENCES, f"{copied}", 0)
            with host.timed_by(clock):
                ran = replay_gpu.answer(engine, asked, clock)
            took[method] = ran.seconds
            assert not engine.model.texts and (ran.tokens_per_step > 1.5) == (copied and method == "auto")
            assert len(ran.each) == SEQUENCES and all(0 < pace * 39 <= took[method] for pace in ran.each)
        assert took["auto"] < (0.8 if copied else 1.2) * took["plain"]


def test_a_target_that_says_something_else_is_noticed(clock) -> None:
    engine = replay_gpu.make_engine("plain", Namespace(sequences=SEQUENCES), clock)
    engine.model.draw = lambda logits, *_: (logits[:, 0] * 0 + 7).long()
    with host.timed_by(clock), pytest.raises(AssertionError):
        asked = replay_gpu.requests(texts(False), engine.model, SEQUENCES, "other", 0)
        replay_gpu.answer(engine, asked, clock)


def test_tables_are_printed(tmp_path, capsys) -> None:
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"copied": texts(True)}))
    replay_gpu.run(Namespace(answers=file, batches=[2], tasks=None, rounds=1, slower=0.1))
    row, *host_times = capsys.readouterr().out.splitlines()
    task, batch, auto, *_ = row.split()
    assert (task, batch) == ("copied", "2") and float(auto.removesuffix("x,")) > 1.2
    assert (
        0 < float(row.split("p99 time per token ")[1].split("x")[0]) < 1
    )  # who copies waits less for a token
    assert [line.split(", ")[2].split(":")[0] for line in host_times] == ["plain", "auto", "lookup"]
