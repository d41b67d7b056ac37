"""`outrider advise` as users call it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import LLM
from outrider.bench import advise
from outrider.cli.advise import CANDIDATES, _together
from tests.bench.test_advise import candidate
from tests.cli.conftest import Outrider

SMALL = (
    "--max-tokens",
    16,
    "--cache-bytes",
    "8M",
    "--kernels",
    "torch",
    "--device",
    "cpu",
    "--batches",
    "1,2",
)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    rows = [
        {"task": "chat", "turns": ["hello 1"]},
        {"task": "code", "messages": [{"role": "user", "content": "2"}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "plain text\nmore of it\n")
    return file


def test_synthetic_drafts_have_an_answer_to_copy(
    outrider: Outrider, tiny_folder: Path, asked: Path, monkeypatch
) -> None:
    """Also for prompts after those that are answered plainly in any case, and where all depths but one are given up."""
    drafted = []

    def note(found, depth, task, done, inner=advise._note_trial) -> None:
        drafted.append(sum(record.drafted for record in done.records))
        inner(found, depth, task, done)

    monkeypatch.setattr(advise, "_note_trial", note)
    monkeypatch.setattr(advise, "_still_good", lambda found, depths: list(depths)[:1])
    ran = outrider(
        "advise", tiny_folder, "--draft", "synthetic:1.0", "--prompts", asked, "--seconds", 30, "--ignore-eos", *SMALL
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert len(drafted) > 3 and all(drafted)


def test_advice_on_synthetic_acceptance(
    outrider: Outrider, tiny_folder: Path, asked: Path, tmp_path: Path
) -> None:
    """Always right: sixteen tokens in few steps, whatever the machine."""
    out = tmp_path / "out.json"
    ran = outrider(
        "advise", tiny_folder, "--draft", "lookup", "--draft", "synthetic:1.0", "--draft", "none", "--prompts", asked,
        "--seconds", 1, "--price-per-hour", "2.5", "--json", out, "--temperature", 0.5, "--ignore-eos",
        "--html", f"{out}.html", *SMALL,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out == "" and "% synthetic: prompt 1 of 4" in ran.err
    found = json.loads(out.read_text())
    html = Path(f"{out}.html").read_text()
    assert "advice" in html.split("<h2>")[0] and 'class="error"' in html and "synthetic:1.0" in html
    assert found["kind"] == "advise" and found["complete"] and found["certificate"]["commit"]
    lookup, synthetic = found["drafts"]
    assert (lookup["draft"], synthetic["draft"]) == ("lookup", "synthetic:1.0")
    assert all(one["rate"] == 1.0 for one in synthetic["acceptance"])
    assert set(synthetic["tasks"]) <= {"chat", "code", "text"}
    assert [one["batch"] for one in synthetic["expected"]] == [1, 2]
    assert synthetic["expected"][0]["tokens_per_step"] > 1.5  # at any depth
    advised = found["advice"]["draft"]  # none on a machine that is too busy for four prompts
    assert advised in ("lookup", "synthetic:1.0", "none", "")
    assert "$/M" in ran.err and f"outrider {'serve' if advised else 'advise'} {tiny_folder}" in ran.err
    for line in ran.err.splitlines():
        assert (
            len(line) <= 80 or str(tiny_folder) in line or "--speculative-config" in line or str(out) in line
        )


def test_the_pair_is_the_first_candidate(
    outrider: Outrider, tiny_folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is one; without it `auto` is lookup, which is a candidate by itself."""
    measured: list[str] = []

    def measure(self: advise.Session, llm: LLM, draft: str, *_: object) -> advise.Measured:
        measured.append(f"{draft} {llm.pair is not None} {self.candidates}")
        return candidate(draft, 1.5)

    monkeypatch.setattr(advise.Session, "measure", measure)
    ran = outrider("advise", tiny_folder, "--draft", "auto", "--draft", "lookup", "--prompts", asked, *SMALL)
    assert ran.code == 0, ran.err
    assert measured == ["lookup False 1"]
    assert CANDIDATES[0] == "auto"
    assert _together(CANDIDATES) == [("auto", ["auto", "lookup"]), ("early_exit", ["early_exit"])]


def test_numbers_alone_need_no_model(outrider: Outrider, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ran = outrider(
        "advise", "no-such-model", "--what-if", "acceptance=0.7,0.6 depth=2 cost=0.1", "--json", out, "--html",
        tmp_path / "out.html",
    )  # fmt: skip
    assert "x at best: drafts of " in (tmp_path / "out.html").read_text().split("<h2>")[0]
    assert ran.code == 0, ran.err
    (row,) = json.loads(out.read_text())["what_if"]
    assert row["speedup"] == pytest.approx((1 + 0.7 + 0.42) / 1.2)
    assert "1.77x" in ran.err


def test_numbers_alone_need_no_torch() -> None:
    code = (
        "import sys; from outrider.cli.main import make_app\n"
        "make_app()(['advise', '--what-if', 'acceptance=0.7 batch=4'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--price-per-hour", "cheap"), "--price-per-hour is a number above 0"),
        (("--price-per-hour", "nan"), "--price-per-hour is a number above 0, such as 2.5, not 'nan'"),
        (("--temperatures", "0,0.7"), "one temperature a task"),
        (("--tasks", "chatt"), "no prompt is of the task 'chatt'; did you mean 'chat'"),
        (("--tasks", ""), "no prompt is of the task ''"),
        (("--price-per-hour", "-1"), "--price-per-hour is a number above 0"),
        (("--what-if", "acceptance=1.4"), "acceptance 1 is 1.4, not between 0 and 1"),
        (("--draft", "synthetic:2"), "acceptance 1 is 2, not between 0 and 1"),
        (("--draft", "lokup"), "did you mean 'lookup'"),
        (("--batches", "1,x"), "not a list of numbers"),
        (("--speculate", "4"), "leave out --speculate"),
        (("--tree", "3x2"), "leave out --speculate"),
        (("--n", "2"), "leave out --n"),
        (("--prompts", "/no/such/file"), "/no/such/file cannot be read"),
    ],
)
def test_bad_flags_are_refused_before_anything_loads(outrider: Outrider, flags, said: str) -> None:
    ran = outrider("advise", *flags)
    assert ran.code in (1, 2) and said in ran.err and "loading" not in ran.err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "holds no prompts"),
        ('fine\n{"turns": [}\n', "line 2: not JSON"),
        ('fine\n\n{"turns": []}\n', 'line 3: "turns" must be a list'),
        ('{"turns": [5]}\n', 'line 1: "turns" must hold texts'),
        ('{"prompt": 7}\n', 'line 1: "prompt" must be a string'),
        (
            '{"messages": [{"role": "system", "content": "x"}]}\n',
            'line 1: "messages" has nothing of the role',
        ),
        ('{"text": "x"}\n', 'line 1: a row needs one of "turns"'),
    ],
)
def test_a_bad_prompt_is_named_by_line_and_field(
    outrider: Outrider, tmp_path: Path, lines: str, said: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    for command in ("advise", "bench"):
        ran = outrider(command, "--prompts", file, *SMALL)
        assert ran.code == 2 and said in ran.err and str(file) in ran.err


@pytest.mark.parametrize("command", ["advise", "bench"])
def test_a_draft_of_another_tokenizer_is_refused_with_the_token_that_differs(
    outrider: Outrider, tiny_folder: Path, tmp_path: Path, command: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    file = other / "tokenizer.json"
    made = json.loads(file.read_text())
    a, b = sorted(made["model"]["vocab"], key=made["model"]["vocab"].__getitem__)[7:9]
    made["model"]["vocab"] |= {a: 8, b: 7}
    file.write_text(json.dumps(made))
    ran = outrider(command, tiny_folder, "--draft", other, "--tasks", "short", *SMALL)
    assert ran.code == 1 and "Traceback" not in ran.err
    assert f"token 7 is {b!r} there and {a!r} here. A draft needs the target's own tokenizer" in ran.err
