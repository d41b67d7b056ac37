"""`outrider bench` and `outrider audit` with an as-if model, as users call them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.bench.arrivals import Traffic
from outrider.bench.show import headline, latencies, overview, table
from outrider.cli.bench import batch_sizes, task_temperatures
from outrider.cli.measure import Progress, Report
from outrider.cli.tasks import TOKENS
from outrider.errors import InvalidRequest
from outrider.types import SamplingParams
from tests.cli.conftest import SMALL, Outrider

SHAPE, DRAFT = "40:3:8:4:70:300", "36:2:8:4:66:300"


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default rounds go on until the machine is quiet, for a minute at most."""
    monkeypatch.setattr("outrider.cli.bench.SECONDS", 0.0)


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
        "--tasks", "chat", "--batches", "1,2", "--groups", 1, "--methods", "lm,auto", "--what", "speculation",
        "--temperatures", "chat=0.3", "--details", "--json", out, *SMALL,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out == ""
    found = json.loads(out.read_text())
    assert found["kind"] == "bench" and found["complete"]
    assert list(tmp_path.glob("*.part")) == []
    assert found["as_if"]["shape"] == SHAPE
    assert found["as_if"]["draft"]["layers"] == "2 of 2"
    assert "weights" not in found["as_if"]["draft"]  # bfloat16, as it would be on a GPU
    assert found["as_if"]["meaning"] in ran.err.replace("\n", " ")
    assert "times are what a model of that shape costs" in found["as_if"]["meaning"]
    assert found["certificate"]["command"].startswith("outrider ")
    chat = found["speculation"]["chat"]
    assert chat["temperature"] == 0.3
    assert list(chat["batches"]) == ["1", "2"]
    for batch in chat["batches"].values():
        assert list(batch["methods"]) == ["plain", "lm", "auto"]
        assert all(method["differing"] == 0 < method["compared"] for method in batch["methods"].values())
    lines = ran.err.splitlines()
    assert max(map(len, lines[:-1])) <= 80 and any(line.split()[:3] == ["chat", "2", "lm"] for line in lines)
    assert "tokens compared with plain decoding's: identical" in ran.err and "% chat, batch 1: " in ran.err
    assert "more thorough" not in ran.err  # the prompts are the user's


def test_bench_takes_few_prompts_and_short_answers_unless_told(
    outrider: Outrider, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so, with every stage as it begins."""
    short = {"chat": ("hello", "12", "34"), "code": ("hello",)}
    monkeypatch.setattr("outrider.bench.prompts.KINDS", short)
    monkeypatch.setattr("outrider.bench.speculation.pass_seconds", lambda *_, **__: [1e-3])
    measured = {"reached_gb_s": 1.0, "read_gb_s": 2.0}
    monkeypatch.setattr("outrider.bench.speed.memory_limit", lambda *_: measured)
    ran = outrider(
        "bench",
        tiny_folder,
        "--json",
        tmp_path / "o",
        "--together",
        2,
        "--methods",
        "lookup",
        "--within",
        100,
        *SMALL[2:],
    )
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "o").read_text())
    prompts = {task: one["batches"]["1"]["prompts"] for task, one in found["speculation"].items()}
    assert prompts == {"chat": 1, "code": 1}
    assert {one["max_tokens"] for one in found["speculation"].values()} == {TOKENS}
    lines = ran.err.splitlines()
    assert max(len(line) for line in lines if not line.startswith("written to ")) <= 80
    assert any(line.startswith("loading ") for line in lines[:2])
    said = dict.fromkeys(line.partition(" % ")[2].partition(",")[0] for line in lines)
    stages = ["passes over several tokens", "the machine's memory bandwidth", "plain decoding", "chat"]
    assert [one for one in said if one in stages] == stages
    assert "more thorough: --limit 72 --max-tokens 256, or your own prompts: --prompts FILE" in lines


def cells(**ratios: tuple[float, float | None]) -> dict[str, Any]:
    """A report by task, of plain decoding and auto."""
    plain = {"ratio": 1.0, "ratio_within": 0.0, "tok_s": 100.0, "compared": 9, "differing": 0}
    return {
        task: {"batches": {"1": {"noise": 1.0, "methods": {"plain": plain, "auto": plain | made}}}}
        for task, (ratio, within) in ratios.items()
        for made in ({"ratio": ratio, "ratio_within": within},)
    }


def test_the_headline_has_mean_best_worst_and_error() -> None:
    report = cells(rewriting=(2.0, 0.06), creative=(0.98, 0.08))
    assert headline(report) == "auto: 1.40x on average, 2.00x rewriting, 0.98x creative, +-5 %"
    assert headline(cells(chat=(1.2, 0.03))) == "auto: 1.20x chat, +-3 %"
    report["creative"]["batches"]["1"]["noise"] = 2.0
    report["rewriting"]["batches"]["1"]["methods"]["auto"]["ratio_within"] = None
    assert headline(report).endswith("0.98x creative, +-?; a busy machine")
    report["creative"]["batches"]["16"] = report["creative"]["batches"].pop("1")
    assert "0.98x creative (batch 16)" in headline(report)
    del report["creative"], report["rewriting"]["batches"]["1"]["methods"]["auto"]
    assert headline(report) == ""


def test_the_overview_has_a_row_a_task_and_fits_80_columns() -> None:
    report = cells(rewriting=(2.0, 0.06), creative=(0.98, 0.08))
    lines = list(overview(report))
    assert lines[0].split() == ["task", "batch", "plain", "tok/s", "auto"]
    assert lines[1].split() == ["rewriting", "1", "100.0", "2.00x"]
    methods = report["creative"]["batches"]["1"]["methods"]
    auto = methods.pop("auto")
    methods |= {f"a_long_drafter_{i}": auto for i in range(9)} | {"auto": auto}
    lines = list(overview({"creative": report["creative"]}))
    assert max(map(len, lines)) < 80 and lines[0].split()[-1] == "auto"


def test_what_is_printed_begins_with_the_headline(outrider: Outrider, tiny_folder: Path, asked: Path) -> None:
    ask = ("bench", tiny_folder, "--prompts", asked, "--tasks", "chat", "--methods", "lookup,auto", "--what",
           "speculation", "--groups", 1, *SMALL)  # fmt: skip
    ran = outrider(*ask)
    lines = [
        line for line in ran.err.splitlines() if "%" not in line.split("auto")[0] and "warning" not in line
    ]
    assert re.match(r"auto: \d\.\d\dx chat, \+-", lines[1]), lines
    assert "first token" not in ran.err and "memory:" not in ran.err
    full = outrider(*ask, "--details").err
    assert "first token" in full and "memory:" in full


def test_wide_figures_and_names_do_not_wrap() -> None:
    spread = {"p50": 12345.6, "p90": 99999.9, "p99": 99999.9}
    method = {"tok_s": 12345.6, "ratio": 99.5, "ratio_within": 0.999, "worst": 98.25, "held": 1.0,
           "tokens_per_step": 16.5, "ttft_ms": spread, "itl_ms": spread, "stages_ms": {"draft": 123.4},
           "total_ratio": 10.5}  # fmt: skip
    methods = dict.fromkeys(
        ("plain", "a_drafter_of_one_s_own:auto"), method | {"differing": 0, "compared": 10**9}
    )
    named = {"a_task_of_20_letters": 0, "a_task_of_21_letters_": 0, "chat": 0}
    report = {task: {"batches": {"128": {"methods": methods, "noise": 3.0}}} for task in named}
    for lines in (list(table(report)), list(latencies(report))):
        assert max(map(len, lines)) < 80
        assert len({line.index(" 128 ") for line in lines if " 128 " in line}) == 1
    assert next(line for line in table(report) if " 128 " in line).split()[:4] == [
        "a_task_of_20_…", "128", "plain", "12345.6",
    ]  # fmt: skip


def test_a_run_that_was_cut_short_is_taken_up_again(
    outrider: Outrider, tiny_folder: Path, asked: Path, tmp_path: Path
) -> None:
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    ask = ("bench", tiny_folder, "--prompts", asked, "--tasks", "chat,qa", "--methods", "lookup",
           "--what", "speculation", "--groups", 1, "--temperatures", "0,1", "--json", out, *SMALL)  # fmt: skip
    whole = outrider(*ask, "--html", html)
    assert whole.code == 0, whole.err
    found = json.loads(out.read_text())
    assert (
        list(found["speculation"]) == ["chat T=0", "chat T=1", "qa T=0", "qa T=1"] and not found["left_out"]
    )
    kept = found["speculation"]["chat T=0"]
    found["speculation"] = {"chat T=0": kept | {"marked": True}}
    out.write_text(json.dumps(found))
    more = outrider(*ask, "--resume")
    assert more.code == 0, more.err
    again = json.loads(out.read_text())
    assert list(again["speculation"]) == ["chat T=0", "chat T=1", "qa T=0", "qa T=1"]
    assert again["speculation"]["chat T=0"]["marked"] and again["resumed"] == [found["certificate"]]
    other = outrider(*ask, "--resume", "--max-tokens", 5)
    assert other.code == 2 and "was measured with max_tokens 6, not 5" in other.err
    assert json.loads(out.read_text()) == again  # nothing is lost


@pytest.mark.parametrize(
    ("flags", "content", "message"),
    [
        ((), None, "name it with --json FILE"),
        (("--json", "FILE"), "{", "cannot be read"),
        (("--json", "FILE"), '{"kind": "audit"}', "does not hold results of bench"),
    ],
)
def test_what_cannot_be_resumed_is_said(
    outrider: Outrider,
    tiny_folder: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    content: str | None,
    message: str,
) -> None:
    file = tmp_path / "before.json"
    if content is not None:
        file.write_text(content)
    given = [str(file) if flag == "FILE" else flag for flag in flags]
    ran = outrider("bench", tiny_folder, "--resume", *given, *SMALL)
    assert ran.code == 2 and message in ran.err and "loading" not in ran.err


@pytest.mark.parametrize("live", [True, False])
def test_progress_is_one_line_on_a_terminal_and_few_in_a_pipe(
    live: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 0.5, 1.0, 1.5, 12.0, 30.0])
    monkeypatch.setattr("outrider.cli.measure.time.monotonic", lambda: next(now))
    monkeypatch.setattr("sys.stderr.isatty", lambda: live, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with Progress({"first": 1, "second": 3}) as progress:
        progress.of("first")("a", 0)
        progress.of("first")("b", 0.5)
        progress.of("second")("c", 0)
        progress.of("second")("d" * 100, 1 / 3)
        progress.of("second")("e", 2 / 3)
    said = capsys.readouterr().err
    shown = [line for line in re.split(r"\r\x1b\[2K|\n", said) if line]
    bars = ("#########... ", "######...... ") if live else ("", "")
    assert max(map(len, shown)) < 80 and shown[-1] == f"{bars[0]} 75 % e, about 10 s left"
    assert shown[-2].startswith(f"{bars[1]} 50 % ddd") and shown[-2].endswith("…, about 12 s left")
    assert len(shown) == (5 if live else 4)  # in a pipe: a line a stage, and every ten seconds
    assert ("\n" in said) is not live and said.endswith("\r\x1b[2K") is live


def test_audit_compares_an_as_if_model(
    outrider: Outrider, tiny_folder: Path, asked: Path, tmp_path: Path
) -> None:
    page = tmp_path / "audit.html"
    ran = outrider(
        "audit", tiny_folder, "--as-if", SHAPE, "--prompts", asked, "--limit", 2, "--temperatures", "0.7",
        "--no-adversaries", "--json", "-", "--html", page, *SMALL,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["kind"] == "audit"
    assert found["as_if"]["shape"] == SHAPE
    assert found["identity"]["differing"] == 0 < found["identity"]["compared"]
    assert "toggled lookup T=0.7" in found["identity"]["by_way_and_temperature"]
    assert f"{found['identity']['compared']:,} tokens compared" in page.read_text().split("<h2>")[0]
    begun, *_, last = [line for line in ran.err.splitlines() if "compared" in line]
    assert begun == "  0 % nothing compared yet"
    identity = found["identity"]
    assert (
        last
        == f"{identity['compared']} tokens compared, {sum(identity['drafted'].values())} drafted: identical"
    )


ARRIVALS = ("--arrivals", "--limit", 2, "--temperatures", "0,0.7", "--no-adversaries", "--json", "-", *SMALL)


def test_audit_compares_what_arrives(
    outrider: Outrider, tiny_folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.arrivals.RUNS_ONCE", 1)
    ran = outrider("audit", tiny_folder, "--prompts", asked, *ARRIVALS)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["arrivals"]
    assert found["differing"] == found["differing_logprobs"] == 0 < found["compared"]
    lines = ran.err.splitlines()
    amount = f"{found['compared']} tokens of {sum(found['requests'].values())} requests ({found['aborted']} aborted)"
    assert lines[-1] == f"{amount} compared, {sum(found['drafted'].values())} drafted: identical"
    assert f"{found['requests']['penalties']} penalties" in lines[-3]
    assert lines[-2] == f"{found['logprobs']} log-probabilities compared"


def test_what_arrivals_find_and_leave_out_is_said(
    outrider: Outrider, tiny_folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> Traffic:
        found = Traffic(left_out={"regex": "no llguidance"}, logprobs=9, differing_logprobs=2)
        found.tokens["usual", 0.0], found.drafted["lm"] = 50, 5
        return found

    monkeypatch.setattr("outrider.bench.arrivals.audit_arrivals", run)
    ran = outrider("audit", tiny_folder, "--prompts", asked, *ARRIVALS)
    assert ran.code == 1
    assert "left out: regex: no llguidance" in ran.err
    assert "9 log-probabilities compared, 2 DIFFER" in ran.err


def test_what_was_compared_is_said_after_an_interruption(
    outrider: Outrider, tiny_folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*given: Any) -> Traffic:
        found, (*_, tell, _) = Traffic(), given
        tell(found, 0.0, "1 of 30 requests answered alone")
        found.tokens["usual", 0.0], found.drafted["lm"], found.requests["usual"] = 50, 5, 1
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.bench.arrivals.audit_arrivals", run)
    file = tmp_path / "audit.json"
    ran = outrider("audit", tiny_folder, "--prompts", asked, *ARRIVALS, "--json", file)
    assert ran.code == 130
    assert "stopped before the end" in ran.err
    assert "50 tokens of 1 requests (0 aborted) compared, 5 drafted: identical" in ran.err
    kept = json.loads(file.read_text())
    assert kept["arrivals"]["compared"] == 50 and not kept["complete"]


@pytest.mark.parametrize("mode", ["rejection", "lossy"])
def test_arrivals_are_for_a_mode_that_keeps_every_token(
    outrider: Outrider, tiny_folder: Path, mode: str
) -> None:
    ran = outrider("audit", tiny_folder, *ARRIVALS, "--mode", mode)
    assert ran.code == 2 and mode in ran.err and "loading" not in ran.err


def test_an_audit_without_drafts_proves_nothing(outrider: Outrider, tiny_folder: Path, asked: Path) -> None:
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
        (("--as-if", "640:30:12:3:384:49408:16xmany"), "[:EXPERTSxPER_TOKEN], such as"),
        (("--as-if", SHAPE, "--draft-layers", 2), "--draft-layers says how --draft-as-if is made"),
        (("--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft", "lookup"), "leave out --draft"),
        (
            ("--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft-layers", "0-9"),
            "is not two or more of 2 layers",
        ),
        (("--as-if", SHAPE, "--draft-as-if", DRAFT, "--draft-layers", ""), "a number or ranges"),
        (("--as-if", SHAPE, "--peer", "transformers"), "bench/peers.py"),
        (("--batches", "1,two"), "--batches"),
        (("--batches", "0"), "--batches"),
        (("--temperatures", "chat=warm"), "--temperatures"),
        (("--json", "/nowhere/at/all.json"), "cannot be written"),
        (("--html", "/nowhere/at/all.html"), "cannot be written"),
        (("--html", "page.html", "--what", "plain"), "leave out --what plain"),
        (("--details", "--what", "plain"), "leave out --what plain"),
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
    assert batch_sizes("1,16") == [1, 16]
    assert task_temperatures(None, SamplingParams()) == {}
    assert task_temperatures(None, SamplingParams(temperature=0)) == {"": [0.0]}
    assert task_temperatures("chat=0.7,rewrite=0", SamplingParams()) == {"chat": [0.7], "rewrite": [0.0]}
    assert task_temperatures("1", SamplingParams()) == {"": [1.0]}
    assert task_temperatures("0,0.7,1.2,chat=1,0", SamplingParams()) == {"": [0.0, 0.7, 1.2], "chat": [1.0]}
    with pytest.raises(InvalidRequest):
        task_temperatures("chat=-1", SamplingParams())
    with pytest.raises(typer.BadParameter):
        batch_sizes("")
