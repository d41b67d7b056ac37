"""Other engines' flags and commands: taken as ours, or answered by name. Help that fits a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from outrider.cli import coming_from
from outrider.cli.coming_from import COMMANDS, FLAGS, read_speculative_config, translated
from outrider.cli.command import EVERYDAY, ORDER
from outrider.cli.main import make_app
from outrider.errors import InvalidRequest, closest, suggest
from outrider.settings import Settings
from outrider.types import SamplingParams

from .conftest import Outrider
from .test_serve_flags import Served

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_a_line_of_vllm_serves(outrider: Outrider, served: Served) -> None:
    ran = outrider(
        *("serve", "--model", "org/big", "--max-model-len", 4096, "--served-model-name=big", "--max-num-seqs", 8),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', "--tensor-parallel-size", 2),
        *("--no-enable-prefix-caching", "--disable-log-requests", "--allowed-origins", '["*"]', "-q", "fp8"),
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert (served.model, served.draft) == ("org/big", "lookup")
    assert served.params == SamplingParams(speculation={"depth": 3})  # type: ignore[arg-type]
    assert served.settings == Settings(
        context=4096, max_sequences=8, prefix_reuse=False, weights="fp8", tensor_parallel=2
    )
    assert (served.serve.served_name, served.serve.cors_origins) == ("big", ("*",))


def test_a_line_of_llama_cpp_serves(outrider: Outrider, served: Served) -> None:
    ran = outrider(
        *(
            "serve",
            "-m",
            "a.gguf",
            "-md",
            "org/small",
            "--draft-max",
            5,
            "-c",
            2048,
            "-ngl",
            0,
            "-t",
            2,
            "--temp",
            0,
        ),
        *("-np", 4, "-a", "mine"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert (served.model, served.draft, served.params.temperature) == ("a.gguf", "org/small", 0.0)
    assert served.settings == Settings(context=2048, device="cpu", threads=2, max_sequences=4)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--trust-remote-code"], "--trust-remote-code: code that comes with a model is never run"),
        (["serve", "--pipeline-parallel-size", "2"], "share a model by --tensor-parallel only"),
        (["serve", "--gpu-memory-utilization", "0.9", "--device", "cpu"], "--cache-bytes"),
        (["serve", "--mem-fraction-static", "0.9"], "--gpu-memory-utilization F"),
        (["serve", "-ngl", "20"], "as a whole: --device"),
        (["serve", "-q", "awq"], "--weights fp8, int8 or int4"),
        (["serve", "--speculative-config", "ngram"], "JSON object"),
        (["serve", "--speculative-config", '{"method": "eagle3"}'], 'needs a "model"'),
        (["serve", "--speculative-config", '{"depth_of_field": 1}'], "'depth_of_field' has no meaning"),
        (["generate", "--served-model-name", "x"], "is --served-name here, which this command does not have"),
        (["serve", "--temprature", "1"], "no such option: --temprature; did you mean --temperature?"),
        (["serve", "--max-toks", "1"], "did you mean --max-tokens?"),
        (["bench", "--jsn", "x"], "did you mean --json?"),
        (["run", "model"], "outrider chat MODEL"),
        (["pull", "model"], "outrider models pull MODEL"),
        (["list"], "outrider models"),
        (["generat"], "did you mean 'generate'?"),
        (["xyz"], "no command 'xyz'; commands: demo, generate"),
        (["models", "pul", "x"], "did you mean 'pull'?"),
    ],
)
def test_answers(outrider: Outrider, served: Served, args: list[str], says: str) -> None:
    ran = outrider(*args)
    assert ran.code == 2 and says in ran.err and served.model == ""


OWN = {"--stop": True, "--context": True, "--temperature": True, "--stats": False, "-n": True}


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("--stop --temp", "--stop --temp"),
        ("--temp 1 --stop -c", "--temperature 1 --stop -c"),
        ("--temp=1 --stats -c=5", "--temperature 1 --stats --context 5"),
        ("hello -m x -n 2", "x hello -n 2"),
        ("--model=x hello", "x hello"),
        ("hi -- --temp -m y", "hi -- --temp -m y"),
        ("--verbose", "--stats"),
        ("-pp 1", ""),
    ],
)
def test_values_are_left_alone(typed: str, becomes: str) -> None:
    assert translated(typed.split(), OWN, takes_model=True) == becomes.split()


def test_speculative_configs() -> None:
    assert read_speculative_config('{"model": "org/x", "num_speculative_tokens": 5}') == [
        *("--draft", "org/x", "--speculate", "5")
    ]
    assert read_speculative_config('{"method": "ngram", "prompt_lookup_max": 4}') == ["--draft", "lookup"]
    assert read_speculative_config('{"model": "[ngram]"}') == ["--draft", "lookup"]
    assert read_speculative_config("{}") == []


def test_config_files_get_the_same_answers(outrider: Outrider, served: Served, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for text, says in {
        "max_model_len = 4": "unknown key 'max_model_len': here that is context",
        "[serve]\nserved-model-name = 'x'": "here that is served_name",
        "trust_remote_code = true": "code that comes with a model is never run",
        "num_speculative_tokens = 4": "here that is speculation",
    }.items():
        file.write_text(text)
        ran = outrider("serve", "--config", file)
        assert ran.code == 2 and says in ran.err, ran.err


def test_what_the_table_names_exists() -> None:
    commands = get_command(make_app()).commands  # type: ignore[attr-defined]
    load = commands["bench"].commands["serve"]
    known = {flag for one in (*(commands[name] for name in ("serve", "chat", "generate")), load) for p in one.params
             for flag in (*p.opts, *p.secondary_opts)}  # fmt: skip
    assert {entry.ours for entry in FLAGS.values() if entry.ours} <= known
    for word, answer in COMMANDS.items():
        assert word not in commands
        for name in re.findall(r"outrider (\w+)", answer):
            assert name in commands, answer


def test_flags_of_the_docs_page_are_in_the_table() -> None:
    commands = get_command(make_app()).commands  # type: ignore[attr-defined]
    own = {name for p in commands["serve"].params for name in p.opts}
    for row in re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE):
        for flag in re.findall(r"(?<=[` ])(--?[a-z][a-z-]+)", row):
            assert flag in FLAGS or flag in own or flag in ("-n", "-s", "-p"), flag


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "audit"])
def test_help_fits_a_screen_and_help_all_has_everything(
    outrider: Outrider, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = outrider(command, "--help"), outrider(command, "--help-all")
    assert short.code == long.code == 0
    lines = short.out.splitlines()
    assert len(lines) <= 44 and max(map(len, lines)) <= 80 and "--help-all" in short.out
    assert "--draft NAME" in short.out and "outrider help WORD" in short.out and "[[" not in short.out
    for param in get_command(make_app()).commands[command].params:  # type: ignore[attr-defined]
        if param.param_type_name == "option" and not param.hidden:
            assert param.opts[-1] in long.out, param.name


def test_every_everyday_name_is_a_flag() -> None:
    commands = list(get_command(make_app()).commands.values())  # type: ignore[attr-defined]
    commands += [within for group in commands for within in getattr(group, "commands", {}).values()]
    for name, text in EVERYDAY.items():
        measured = text == EVERYDAY["bench"]  # three commands share one list
        own = {p.name for c in commands if measured or c.name == name for p in c.params}
        assert {*text.split()} - {"help"} <= own, name
    assert {*ORDER} == {*get_command(make_app()).commands}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("generate", "MODEL PROMPT --prompts --chat --system --draft --show --stats"),
        ("serve", "MODEL --host --port --api-key --key-file --allowed-host --cors-origin --served-name"),
    ],
)
def test_help_begins_with_what_people_need(
    outrider: Outrider, command: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = outrider(command, "--help").out
    rows = re.findall(r"^  (?:-\w, )?([A-Z]+|--[\w-]+)", short.partition("Everyday flags:")[2], re.MULTILINE)
    assert rows[: len(first.split())] == first.split()
    assert ("--price-per-hour" in short, "--weights FORMAT" in short) == (False, True)


def test_help_all_of_the_server_begins_with_its_own_flags(outrider: Outrider) -> None:
    panels = re.findall(r"^(\w+):$", outrider("serve", "--help-all").out, re.MULTILINE)
    assert panels == ["Arguments", "Options", "Server", "Sampling", "Engine"]


def test_no_command_is_cut_in_lists(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("models",), ("pairs",), ("keys",), ("draft",)):
        listed = outrider(*group, "--help").out.partition("Commands:")[2]
        assert listed and "..." not in listed


def test_the_bare_command_is_help(outrider: Outrider) -> None:
    for group in ((), ("keys",), ("draft",)):
        ran = outrider(*group)
        assert (ran.code, ran.out) == (2, "") and ran.err.startswith("Usage: outrider")
        assert ran.err.rstrip("\n") == outrider(*group, "--help").out.rstrip("\n")


def test_suggestions() -> None:
    assert closest("--temp", ["--stop", "--temperature", "--tree"]) == "--temperature"
    assert closest("tokens-max", ["max_tokens", "max_stop"]) == "max_tokens"
    assert closest("zzz", ["max_tokens"]) is None
    assert suggest("temprature", ["top_k", "temperature"]) == "; did you mean 'temperature'?"
    assert suggest("x" * 8_000_000, ["temperature"]) == "; known: temperature"  # at once


def test_an_unknown_config_is_not_answered() -> None:
    assert coming_from.key_answer("nothing_at_all") is None
    with pytest.raises(InvalidRequest):
        read_speculative_config("[]")
