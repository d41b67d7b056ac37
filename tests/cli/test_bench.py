"""`outrider bench` and `outrider audit` with an as-if model, as users call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from outrider.cli.bench import _sizes, _temperatures
from outrider.cli.measure import Report, tasks_of
from outrider.errors import InvalidRequest
from outrider.types import SamplingParams
from tests.cli.conftest import Outrider

SHAPE, DRAFT = "40:3:8:4:70:300", "36:2:8:4:66:300"
SMALL = (
    "--max-tokens",
    6,
    "--max-sequences",
    4,
    "--cache-bytes",
    "8M",
    "--kernels",
    "torch",
    "--device",
    "cpu",
)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Six short prompts of two tasks, one of them long enough to be rewritten."""
    file = tmp_path / "asked.jsonl"
    rows = [{"task": "chat", "turns": [f"hello {i}"]} for i in range(4)]
    rows += [{"task": "qa", "turns": ["12 hello"]}, {"task": "qa", "turns": ["hello " * 100]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_bench_measures_an_as_if_model(
    outrider: Outrider, tiny_folder: Path, asked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    ran = outrider(
        "bench", tiny_folder, "--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft-layers", 2, "--prompts", asked,
        "--tasks", "chat", "--batches", "1,2", "--groups", 1, "--ways", "lm,auto", "--what", "speculation",
        "--temperatures", "chat=0.3", "--json", out, *SMALL,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out == ""
    found = json.loads(out.read_text())
    assert found["kind"] == "bench" and found["complete"]
    assert list(tmp_path.glob("*.part")) == []
    assert found["as_if"]["shape"] == SHAPE
    assert found["as_if"]["draft"]["layers"] == "2 of 2"
    assert found["as_if"]["draft"]["weights"] == "float32"
    assert found["as_if"]["meaning"] in ran.err
    assert "times are what a model of that shape costs" in found["as_if"]["meaning"]
    assert found["certificate"]["command"].startswith("outrider ")
    chat = found["speculation"]["chat"]
    assert chat["temperature"] == 0.3
    assert list(chat["batches"]) == ["1", "2"]
    for batch in chat["batches"].values():
        assert list(batch["ways"]) == ["plain", "lm", "auto"]
        assert all(way["differing"] == 0 < way["compared"] for way in batch["ways"].values())
    lines = ran.err.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("task ")) :]
    assert max(map(len, table[:-1])) <= 80 and any(line.split()[:3] == ["chat", "2", "lm"] for line in table)
    assert "tokens compared with plain decoding's: identical" in ran.err and "% chat: " in ran.err


def test_audit_compares_an_as_if_model(outrider: Outrider, tiny_folder: Path, asked: Path) -> None:
    ran = outrider(
        "audit", tiny_folder, "--as-if", SHAPE, "--prompts", asked, "--limit", 2, "--temperatures", "0.7",
        "--no-adversaries", "--json", "-", *SMALL,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["kind"] == "audit"
    assert found["as_if"]["shape"] == SHAPE
    assert found["identity"]["differing"] == 0 < found["identity"]["compared"]
    assert "toggled lookup T=0.7" in found["identity"]["by_way_and_temperature"]


def test_an_audit_in_which_nobody_guessed_proves_nothing(
    outrider: Outrider, tiny_folder: Path, asked: Path
) -> None:
    ran = outrider("audit", tiny_folder, "--prompts", asked, "--limit", 1, "--no-adversaries", "--temperatures", "0",
                   "--json", "-", *SMALL[2:], "--max-tokens", 1)  # fmt: skip
    drafted = json.loads(ran.out)["identity"]["drafted"]
    assert sum(drafted.values()) == 0
    assert ran.code == 1
    assert "NOTHING WAS PUT TO THE TEST" in ran.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--draft-as-if", "1b"), "--draft-as-if and --draft-layers go with --as-if"),
        (("--as-if", "8bb"), "unknown shape '8bb'"),
        (("--as-if", SHAPE, "--draft-layers", 2), "--draft-layers says how --draft-as-if is made"),
        (("--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft", "lookup"), "leave out --draft"),
        (
            ("--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft-layers", "0-9"),
            "is not two or more of 2 layers",
        ),
        (("--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft-layers", ""), "a number or stretches"),
        (("--as-if", SHAPE, "--peer", "transformers"), "bench/peers.py"),
        (("--batches", "1,two"), "--batches"),
        (("--batches", "0"), "--batches"),
        (("--temperatures", "chat=warm"), "--temperatures"),
        (("--json", "/nowhere/at/all.json"), "cannot be written"),
        (("-n", 2), "one answer a prompt"),
    ],
)
def test_what_cannot_be_is_said(
    outrider: Outrider, tiny_folder: Path, flags: tuple[object, ...], message: str
) -> None:
    ran = outrider("bench", tiny_folder, *flags, *SMALL)
    assert ran.code == 2
    assert message in ran.err


def test_results_are_kept_as_they_come(tmp_path: Path, capsys) -> None:
    file = tmp_path / "out.json"
    report = Report("bench", str(file))
    assert json.loads(file.read_text()) == {"kind": "bench", "complete": False}
    report["plain"] = 1
    report.keep()
    assert json.loads(file.read_text()) == {"kind": "bench", "complete": False, "plain": 1}
    report.deliver()
    assert json.loads(file.read_text())["complete"]
    aloud = Report("bench", "-")
    aloud.keep()
    assert capsys.readouterr().out == ""
    aloud.deliver()
    assert json.loads(capsys.readouterr().out)["complete"]


def test_sizes_and_temperatures() -> None:
    assert _sizes("1,16") == [1, 16]
    assert _temperatures(None, SamplingParams()) == {}
    assert _temperatures(None, SamplingParams(temperature=0)) == {"": 0.0}
    assert _temperatures("chat=0.7,rewrite=0", SamplingParams()) == {"chat": 0.7, "rewrite": 0.0}
    assert _temperatures("1", SamplingParams()) == {"": 1.0}
    with pytest.raises(InvalidRequest):
        _temperatures("chat=-1", SamplingParams())
    with pytest.raises(typer.BadParameter):
        _sizes("")


def test_tasks_are_chosen_and_rewriting_is_made_of_long_texts(asked: Path) -> None:
    class Plain:
        template = None

        class tokenizer:  # noqa: N801 - stands where an object would
            encode = staticmethod(lambda text: [text])

    llm = Plain()
    assert list(tasks_of(llm, str(asked), None)) == ["chat", "qa"]  # type: ignore[arg-type]
    found = tasks_of(llm, str(asked), None, "rewrite,chat")  # type: ignore[arg-type]
    assert list(found) == ["rewrite", "chat"]
    [[copy]] = found["rewrite"]
    assert copy.startswith("Rewrite this text word for word") and copy.endswith("hello " * 100)  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="no prompt is of the task 'chatt'"):
        tasks_of(llm, str(asked), None, "chatt")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="rewrite"):
        tasks_of(llm, str(asked), 3, "rewrite")  # type: ignore[arg-type]
