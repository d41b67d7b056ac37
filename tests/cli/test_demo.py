"""`outrider demo`: both sides really run, under equal conditions, and what is shown suits where it is shown."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from outrider import LLM
from outrider.cli import demo, race
from outrider.cli.demo import Panes, activation, show_race
from outrider.cli.race import FEWEST, TURNS, Race, Scene, Turn
from outrider.types import SamplingParams, Speculation
from tests.test_structure import ROOT

from .conftest import Outrider

SCENE = Scene("A title", "hello", "a moral")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "TOKENS", 24)
    monkeypatch.setattr(race, "SECONDS", 0.0)
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
        ran = show_race(llm, SCENE, console)
    assert ran.identical and ran.plain.answer and ran.speculative.answer
    answers = ran.plain.answer, ran.speculative.answer
    assert [answer.request.params.speculation.off for answer in answers] == [True, False]
    assert answers[0].request.owner != answers[1].request.owner
    assert {answer.sequences[0].reused for answer in answers} == {0}
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
    ran = Race(SCENE)
    ran.speculative.pieces += [("its own ", "target"), ("drafted", "accepted")]
    console.print(Panes(console, ran)._draw())
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
        show_race(llm, SCENE, console)
    assert "[plain]" in (out := capsys.readouterr().out) and "╭" not in out


def test_answers_that_differ_are_said_to(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Race, "same_tokens", 3)
    ran = outrider("demo", tiny_folder)
    assert ran.code == 1 and "3 of 24 tokens identical" in ran.out and "outrider doctor" in ran.out


# -------------------------------------------------------------------------------------------- what is concluded


def race_of(
    plain: list[float], speculative: list[float], others: list[float] | None = None, **more: Any
) -> Race:
    """A race whose turns took these seconds, with 20 tokens each: 1 a step, and 2 a step by lookup."""
    ran = Race(SCENE)
    for i, (a, b) in enumerate(zip(plain, speculative, strict=True)):
        shared = 0.0 if others is None else others[i]
        ran.plain.turns.append(Turn(a, list(range(20)), 20, others=shared))
        ran.speculative.turns.append(
            Turn(b, list(range(20)), 10, Counter(more.get("accepted", {"lookup": 10})), shared)
        )
    return ran


def test_the_verdict_is_the_median_and_names_the_drafter() -> None:
    verdict = race_of([2.0, 2.1, 2.0, 2.0, 2.4], [1.0, 1.0, 1.1, 1.25, 1.2]).verdict()
    assert verdict == (
        "2.0x faster (1.60x to 2.10x in 5 turns): 2.0 tokens a pass of the model instead of 1.0; "
        "20 of 20 tokens identical, 10 of them drafted by lookup"
    )
    both = race_of([2.0] * 3, [1.0] * 3, accepted={"lookup": 2, "eagle": 8, "lm": 0})
    assert both.verdict().endswith("10 of them drafted by eagle and lookup")
    assert race_of([2.0] * 3, [1.0] * 3, accepted={}).verdict().endswith("none of them drafted")


@pytest.mark.parametrize(
    ("plain", "speculative", "said"),
    [
        ([1.0, 1.0, 1.0], [1.02, 1.0, 1.03], "as fast as plain decoding (within 5 %, 3 turns)"),
        ([1.0, 1.0, 1.0], [0.97, 0.98, 0.99], "as fast as plain decoding (within 5 %, 3 turns)"),
        ([1.0] * 5, [0.9, 0.9, 1.1, 1.2, 1.2], "as fast as plain decoding"),  # turns disagree
        ([1.0, 1.0, 1.0], [1.2, 0.9, 0.9], "1.1x faster (0.83x to 1.11x in 3 turns)"),  # one does not count
        ([1.0, 1.0, 1.0], [1.2, 1.25, 1.3], "slower here, 0.80x (0.77x to 0.83x in 3 turns)"),
    ],
)
def test_a_difference_is_claimed_when_turns_agree(
    plain: list[float], speculative: list[float], said: str
) -> None:
    assert race_of(plain, speculative).verdict().startswith(said)


@pytest.mark.parametrize(
    ("plain", "speculative", "others"),
    [
        ([1.0] * 5, [2.0] * 5, [1.0, 0.9, 0.0, 1.2, 0.0]),  # two quiet turns are too few
        ([1.0] * 5, [0.2] * 5, [0.3] * 5),
        ([1.0, 1.5, 1.0], [2.0] * 3, [0.0] * 3),  # the same work, half as long again
    ],
)
def test_a_busy_machine_gives_no_speed_up(
    plain: list[float], speculative: list[float], others: list[float]
) -> None:
    ran = race_of(plain, speculative, others)
    assert ran.busy and not re.search(r"\d+\.\d+x", ran.verdict())
    assert ran.verdict().startswith("the machine is busy, so there is no speed-up to tell: 2.0 tokens a pass")
    ran.speculative.turns = ran.plain.turns
    assert ran.verdict().startswith("the machine is busy, so there is no speed-up to tell; 20 of 20 tokens")


def test_turns_that_were_disturbed_do_not_count() -> None:
    ran = race_of([2.0, 9.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.1])
    assert not ran.busy and ran.ratios == [2.0, 2.0, 2.0]


def test_turns_alternate_until_enough_were_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    loud = {2, 3}  # the second round

    def turn(llm: object, prompt: str, side: Any, *_: object) -> Turn:
        taken.append(side.title)
        return Turn(1.0, [1], 1, others=1.0 if len(taken) - 1 in loud else 0.0)

    monkeypatch.setattr(race, "take_turn", turn)
    monkeypatch.setattr(race, "SECONDS", 1e9)
    ran = Race(SCENE)
    ran.run(None, lambda side: None)  # type: ignore[arg-type]
    assert taken[:4] == ["plain", "speculative", "speculative", "plain"]
    assert len(ran.quiet) == TURNS and len(ran.plain.turns) == len(ran.speculative.turns) == TURNS + 1
    loud |= set(range(1000))
    monkeypatch.setattr(race, "SECONDS", 0.0)
    late = Race(SCENE)
    late.run(None, lambda side: None)  # type: ignore[arg-type]
    assert len(late.plain.turns) == FEWEST and late.busy


def test_every_turn_is_compared() -> None:
    ran = race_of([1.0] * 3, [1.0] * 3)
    assert ran.identical
    ran.speculative.turns[2].tokens[5] = 99
    assert ran.same_tokens == 19 and not ran.identical
    ran.plain.turns[1].tokens.append(7)
    assert ran.same_tokens == 0


def test_a_busy_machine_is_named_at_the_end(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10**6, 100))
    monkeypatch.setattr(race, "_others_seconds", lambda: next(seconds))
    ran = outrider("demo", tiny_folder)
    assert ran.code == 0 and ran.out.count("the machine is busy") == 2 and "outrider doctor names" in ran.out
    assert not re.search(r"\d+\.\d+x (faster|as fast)|slower", ran.out)


def test_a_real_race_names_its_drafter(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Speculation(drafter="early_exit", depth=3, nodes=3)  # the planner may find that it does not pay
    monkeypatch.setattr(race, "SamplingParams", partial(SamplingParams, speculation=fixed))
    with LLM(tiny_folder, draft="early_exit") as llm:
        ran = Race(Scene("t", "12 12 12 12", "m"))
        ran.run(llm, lambda side: None)
    assert ran.identical and len(ran.plain.turns) >= FEWEST
    accepted = sum(turn.accepted["early_exit"] for turn in ran.speculative.turns)
    assert accepted == sum(len(turn.tokens) - turn.steps for turn in ran.speculative.turns) > 0
    assert ran.drafters == "early_exit"
    assert not any(turn.accepted.total() for turn in ran.plain.turns)


# ------------------------------------------------------------------------------------------------ the picture


def test_the_picture_shows_each_token_when_it_came() -> None:
    """docs/race.py, which makes the moving picture of README."""
    spec = importlib.util.spec_from_file_location("race_picture", ROOT / "docs" / "race.py")
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    words = "one two three <four> & five, and so on until the line is full and another line begins here"
    plain = [(one, 0.1 * (i + 1), False) for i, one in enumerate(words)]
    drafted = [(one, 0.05 * (i // 4 + 1), i % 4 > 0) for i, one in enumerate(words)]
    drawn = picture.draw(race_of([2.0] * 3, [1.0] * 3), {"plain": plain, "speculative": drafted})
    svg = ElementTree.fromstring(drawn)
    shown = [one for one in svg.iter() if one.tag.endswith("text")]
    told = "".join(one.text or "" for one in shown).replace("\u00a0", " ")
    assert told.count("<four> & five") == 2 and "2.0x faster" in told and "drafted by lookup" in told
    held = "".join(one.text or "" for one in shown if one.get("class") == "acc").replace("\u00a0", "")
    assert len(held) > 40 and not re.search(r"<script|href|url\(|@import", drawn)
    times = [float(one) for one in re.findall(r'keyTimes="0;([0-9.]+);1" calcMode', drawn)]
    whole = plain[-1][1] + picture.PAUSE
    assert times[1] == pytest.approx(0.1 / whole, abs=1e-3) and max(times) == pytest.approx(
        1 - 3 / whole, abs=1e-3
    )


# -------------------------------------------------------------------------------------------------- the page


def test_the_page_is_opened_once_the_server_answers(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, answers = list[str](), iter([False, False, True])
    done = threading.Event()

    def serve(table: Any, how: Any) -> int:
        [spec] = table
        assert (spec.source, spec.draft, how.port) == (str(tiny_folder), "auto", 8123)
        assert done.wait(60)
        return 0

    monkeypatch.setattr(demo, "serve_table", serve)
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(demo, "_answers", lambda url: next(answers))
    monkeypatch.setattr(demo.webbrowser, "open", lambda url: bool(opened.append(url)))
    monkeypatch.setattr(demo, "note", lambda text: (opened.append(text), done.set()))
    ran = outrider("demo", tiny_folder, "--page", "--port", 8123)
    assert ran.code == 0 and opened[0] == "http://127.0.0.1:8123/"
    assert opened[1].endswith("http://127.0.0.1:8123/ (no browser was found to open it with)")


def test_a_port_goes_with_the_page(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("demo", tiny_folder, "--port", 9000)
    assert ran.code == 2 and "--page" in ran.err


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
