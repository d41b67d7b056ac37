"""`outrider demo`: both ways really run, under equal conditions, and what is shown suits where it is shown."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from outrider import LLM
from outrider.cli import demo
from outrider.cli.demo import Duel, Panes, Scene, activation, show_duel

from .conftest import Outrider

SCENE = Scene("A title", "hello", "a moral")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TOKENS", 24)
    monkeypatch.setattr(demo, "SCENES", (SCENE, Scene("Another", "12 12 12", "another moral")))


def test_in_a_pipe_it_is_plain_text_that_says_everything_once(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("demo", tiny_folder)
    assert ran.code == 0
    assert "\x1b" not in ran.out and "\r" not in ran.out
    assert "\n\n\n" not in re.sub(r"\[(plain|speculative)\]\n.*?\n\[\d", "", ran.out, flags=re.DOTALL)
    assert ran.out.count("[plain]") == ran.out.count("[speculative]") == 2
    verdicts = re.findall(r"(\d+) of (\d+) tokens identical", ran.out)
    assert len(verdicts) == 2 and all(same == all_ for same, all_ in verdicts)
    answers = re.findall(r"\[(?:plain|speculative)\]\n(.*?)\n\[\d", ran.out, re.DOTALL)
    assert len(answers) == 4 and answers[0] == answers[1] and answers[2] == answers[3]
    assert f"outrider chat {tiny_folder} --show" in ran.out.replace("'", "")


@pytest.mark.parametrize(("width", "panes"), [(80, 2), (50, 1), (132, 2)])
def test_on_a_terminal_two_panes_fit_its_width(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, width: int, panes: int
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=40, color_system="standard")
    with LLM(tiny_folder) as llm:
        duel = show_duel(llm, SCENE, console)
    assert duel.identical and duel.plain.answer and duel.speculative.answer
    assert {
        r.params.speculation.off for r in (duel.plain.answer.request, duel.speculative.answer.request)
    } == {
        True,
        False,
    }
    assert duel.plain.answer.request.owner != duel.speculative.answer.request.owner
    assert {a.sequences[0].reused for a in (duel.plain.answer, duel.speculative.answer)} == {0}
    last = out.getvalue().split("\x1b[?25h")[0].split("\x1b[2K")[-1]  # the last frame
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("╭") for line in lines if "╭" in line) == 2
    assert max(line.count("╭") for line in lines) == panes


@pytest.mark.parametrize(("no_color", "held"), [("", "32"), ("1", "4")], ids=["green", "underlined"])
def test_accepted_draft_tokens_are_seen_with_and_without_colour(
    monkeypatch: pytest.MonkeyPatch, no_color: str, held: str
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")
    duel = Duel(SCENE)
    duel.speculative.pieces += [("its own ", "target"), ("drafted", "accepted")]
    console.print(Panes(console, duel)._draw())
    out = console.file.getvalue()
    assert f"\x1b[{held}mdrafted\x1b[0m" in out
    codes = {code for style in re.findall(r"\x1b\[([\d;]*)m", out) for code in style.split(";")}
    assert not no_color or codes <= {"", "0", "1", "2", "4"}  # bold, dim, underlined


def test_a_terminal_that_can_only_write_on_gets_lines(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=sys.stdout, force_terminal=True, width=80)
    with LLM(tiny_folder) as llm:
        show_duel(llm, SCENE, console)
    assert "[plain]" in (out := capsys.readouterr().out) and "╭" not in out


def test_answers_that_differ_are_said_to(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.Duel, "same_tokens", 3)
    ran = outrider("demo", tiny_folder)
    assert ran.code == 1 and "3 of 24 tokens identical" in ran.out and "outrider doctor" in ran.out


def test_a_ratio_measured_beside_other_programs_is_not_called_a_gain() -> None:
    class Took:
        def __init__(self, seconds: float, others: float) -> None:
            self.seconds, self.others, self.tokens, self.answer = seconds, others, 0, None

    duel = type("Fixed", (demo.Duel,), {"same_tokens": 0})(SCENE)
    duel.plain, duel.speculative = Took(4, 1), Took(1, 0)
    assert duel.verdict().startswith("about 4.0x as fast,")
    duel.plain = Took(4, 0)
    assert duel.verdict().startswith("4.0x faster")
    duel.plain = Took(1.05, 0)
    assert duel.verdict().startswith("as fast (1.05x)")
    duel.plain = Took(0.5, 0)
    assert duel.verdict().startswith("slower here (0.50x)")


def test_without_a_drafter_there_is_nothing_to_show(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("demo", tiny_folder, "--draft", "none")
    assert ran.code == 2 and "--draft none" in ran.err


def test_the_line_that_activates_is_shown_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "my venv"))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert activation() == "source 'my venv/bin/activate'"
    monkeypatch.setenv("PATH", f"/usr/bin:{tmp_path}/my venv/bin")
    assert activation() is None
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert activation() is None
