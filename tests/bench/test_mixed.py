"""A batch with requests that ask for more beside the same one without: both are whole while they are timed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench.mixed import ASKED, GOAL, Batch, Mixed, main

from bench import mixed
from outrider import SamplingParams
from outrider.bench.as_if import AsIf
from outrider.errors import InvalidRequest, OutriderError
from tests.bench.conftest import DRAFT, SHAPE, prompts

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=3, temperature=0.7)
HERE = {kind: more for kind, more in ASKED.items() if kind != "grammar" or find_spec("llguidance")}


def test_both_batches_are_the_same_but_for_the_few(wide: AsIf) -> None:
    both = Mixed(wide, HERE, PARAMS)
    for turn in (False, True):
        both.round(prompts(6), mixed_first=turn)
    found = both.summary()
    assert (found["batch"], found["rounds"], found["differing"]) == (6, 2, 0)
    assert found["compared"] > 2 * (6 - len(HERE))
    assert list(found["rates"]) == ["all", "others", *HERE]
    for one in found["rates"].values():
        assert one["without_tok_s"] > 0 < one["mixed_tok_s"]
        assert 0 < one["worst"] <= one["ratio"]
    asked = [request.params for request in both.mixed[0].requests]
    assert [p.logprobs for p in asked] == [5, *[None] * 5]
    assert [p.penalised for p in asked].count(True) == 1
    assert [bool(p.prediction) for p in asked].count(True) == 1
    assert [p.grammar is not None for p in asked].count(True) == len(HERE) - 3
    assert [request.params for request in both.plain[0].requests][len(HERE) :] == asked[len(HERE) :]
    for plain in both.plain:
        assert not any(r.params.penalised or r.params.prediction or r.grammar for r in plain.requests)
        assert all(r.params.logprobs is None and not r.params.speculation.off for r in plain.requests)
    assert wide.engine.idle


def test_a_wrong_token_of_the_others_is_counted(wide: AsIf) -> None:
    both = Mixed(wide, {"penalties": ASKED["penalties"]}, PARAMS)
    both.round(prompts(3), mixed_first=False)
    both.mixed[0].answer(2)[3] += 1
    assert both.summary()["differing"] > 0


def test_rates_are_of_the_time_in_which_all_ran(wide: AsIf) -> None:
    requests = [wide.request(ids, PARAMS) for ids in prompts(2)]
    a, b = (request.id for request in requests)
    batch = Batch(wide, requests, begin=10.0, end=12.0, before={a: 1, b: 3}, within={a: 24, b: 13})
    assert batch.rate([0]) == pytest.approx(23 / 2)
    assert batch.rate([0, 1]) == pytest.approx(33 / 2)
    with pytest.raises(InvalidRequest, match="more --tokens"):
        Batch(wide, requests).rate([0])


def test_the_script_runs_to_its_end(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "mixed.json"
    asked.write_text(
        "".join(json.dumps({"task": "chat", "prompt": f"hello 12 {i}"}) + "\n" for i in range(5))
    )
    main(
        [str(folder), "--as-if", SHAPE, "--draft-as-if", DRAFT, "--device", "cpu", "--cache-bytes", str(1 << 22),
         "--context", "200", "--prompts", str(asked), "--tasks", "chat", "--batch", "6", "--rounds", "2",
         "--tokens", "16", "--no-grammar", "--json", str(out)]
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert (found["kind"], found["goal"], found["left_out"]) == ("mixed", GOAL, ["grammar"])
    assert found["certificate"]["command"].startswith("python -m bench.mixed ")
    assert found["differing"] == 0 < found["compared"]
    said = capsys.readouterr().out
    assert f"all: {found['rates']['all']['ratio']:.3f}x of the batch without them" in said
    assert "round 2 of 2" in said and "identical" in said


def test_what_cannot_be_is_said(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="cannot hold 4 kinds"):
        mixed.measure(wide, prompts(3), PARAMS, mixed.arguments(["--batch", "3"]))

    def missing(*_):
        raise OutriderError("structured output needs llguidance")

    monkeypatch.delitem(wide.__dict__, "compiler", raising=False)
    monkeypatch.setattr("outrider.engine.llm.GrammarCompiler", missing)
    with pytest.raises(OutriderError, match="llguidance; or leave it out with --no-grammar"):
        mixed.measure(wide, prompts(3), PARAMS, mixed.arguments([]))
