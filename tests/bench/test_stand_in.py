"""The stand-in for a GPU follows the engine's protocol: it answers, a step at a time, whatever is in the steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.stand_in import StandIn

from outrider import Settings


def test_steps_take_the_time_they_are_given_and_answers_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_MS", "1")
    steps = []
    with StandIn(folder, draft="none", settings=Settings(device="cpu", cache_bytes=1 << 22)) as llm:
        llm.prepare(2)
        llm.driver.observer = steps.append
        outputs = llm.generate(["one two", "three four five"], max_tokens=6, ignore_eos=True)
    assert [len(output.token_ids) for output in outputs] == [6, 6]
    assert sum(record.emitted for record in steps) == 12
    assert {record.target_s for record in steps} == {0.001}
