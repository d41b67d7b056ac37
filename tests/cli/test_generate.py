"""`outrider generate` on a tiny model: every way to ask, and what comes out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.generate import Exchange, Show, exchange_all
from outrider.engine import llm
from outrider.engine.placement import Memory
from outrider.load.prompts import Row

from .conftest import Outrider

GREEDY = ("--temperature", 0, "--max-tokens", 8)


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> dict[str, str]:
    """What the Python API answers."""
    with LLM(tiny_folder) as llm:
        chat = llm.chat([{"role": "user", "content": "hello"}], temperature=0, max_tokens=8)[0].text
        raw = llm.generate("hello", temperature=0, max_tokens=8)[0].text
    assert chat != raw
    return {"chat": chat, "raw": raw}


@pytest.mark.parametrize("args", [("hello",), ("--prompt", "hello"), ("-p", "hello", "--chat")])
def test_a_prompt_goes_through_the_template(
    outrider: Outrider, tiny_folder: Path, expected: dict[str, str], args: tuple[str, ...]
) -> None:
    ran = outrider("generate", tiny_folder, *args, *GREEDY)
    assert (ran.code, ran.out, ran.err) == (0, expected["chat"] + "\n", "")


def test_where_a_gpus_memory_goes_is_said_beside_the_answer(
    outrider: Outrider, tiny_folder: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(3 << 30, 1 << 30, 6 << 30, 6144, 2 << 30)
    build = llm.build_engine
    monkeypatch.setattr(llm, "build_engine", lambda *given: replace(build(*given), memory=memory))
    ran = outrider("generate", tiny_folder, "hello", *GREEDY)
    assert (ran.code, ran.out) == (0, expected["chat"] + "\n")
    assert ran.err == f"memory: {memory.describe()}\n"


def test_stdin(outrider: Outrider, tiny_folder: Path, expected: dict[str, str]) -> None:
    assert outrider("generate", tiny_folder, *GREEDY, stdin="hello\n").out == expected["chat"] + "\n"


def test_raw(outrider: Outrider, tiny_folder: Path, expected: dict[str, str]) -> None:
    assert outrider("generate", tiny_folder, "hello", "--raw", *GREEDY).out == expected["raw"] + "\n"


def test_variables_set_flags(
    outrider: Outrider, tiny_folder: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in [
        ("MODEL", tiny_folder),
        ("TEMPERATURE", 0),
        ("MAX_TOKENS", 8),
        ("CHAT", 0),
        ("PROMPT", "hello"),
    ]:
        monkeypatch.setenv(f"OUTRIDER_{name}", str(value))
    assert outrider("generate").out == expected["raw"] + "\n"


def test_stats_are_on_stderr(outrider: Outrider, tiny_folder: Path, expected: dict[str, str]) -> None:
    ran = outrider("generate", tiny_folder, "hello", "--stats", "--seed", 5, "--draft", "none", *GREEDY)
    assert ran.out == expected["chat"] + "\n"
    assert re.match(r"\d+ tokens in ", ran.err) and ran.err.endswith("seed 5\n")
    assert "tok/s" in ran.err and "1.00 tokens per step" in ran.err and "\x1b" not in ran.err


def test_json(outrider: Outrider, tiny_folder: Path, expected: dict[str, str]) -> None:
    [row] = outrider(
        "generate", tiny_folder, "hello", "--json", "--seed", 7, "--logprobs", 2, "--draft", "none", *GREEDY
    ).rows
    assert row["text"] == expected["chat"] and row["seed"] == 7 and row["finish_reason"] in ("stop", "length")
    written = len(row["token_ids"])
    assert row["usage"]["completion_tokens"] == written
    assert row["usage"]["total_tokens"] == row["usage"]["prompt_tokens"] + written
    assert row["stats"]["steps"] == written and row["stats"]["drafted"] == 0
    assert [entry["token"] for entry in row["logprobs"]] == row["token_ids"]
    assert all(len(entry["alternatives"]) == 2 for entry in row["logprobs"])


def test_choices(outrider: Outrider, tiny_folder: Path) -> None:
    args = ("generate", tiny_folder, "hello", "-n", 3, "--seed", 1, "--max-tokens", 4, "--ignore-eos")
    [row] = outrider(*args, "--json").rows
    texts = [choice["text"] for choice in row["choices"]]
    assert len(texts) == 3 and row["text"] == texts[0] and len(set(texts)) > 1
    assert row["usage"]["completion_tokens"] == 12
    plain = outrider(*args).out
    assert plain == "".join(f"[choice {i}]\n{text}\n\n" for i, text in enumerate(texts))


def test_a_file_of_prompts_keeps_its_order(
    outrider: Outrider, tiny_folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    rows = [
        {"id": "long", "prompt": "x"},
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hello"}]},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = outrider("generate", tiny_folder, "--prompts", tmp_path / "p.jsonl", "--json", *GREEDY)
    assert [row["id"] for row in ran.rows] == ["long", "2", "3"]
    assert [row["text"] for row in ran.rows[1:]] == [expected["raw"], expected["chat"]]
    limited = outrider(
        "generate", tiny_folder, "--prompts", tmp_path / "p.jsonl", "--json", "--limit", 2, *GREEDY
    )
    assert [row["token_ids"] for row in limited.rows] == [row["token_ids"] for row in ran.rows[:2]]


def test_turns_carry_the_models_own_answers(outrider: Outrider, tiny_folder: Path) -> None:
    row = json.dumps({"turns": ["hello", "12"]})
    [answer] = outrider("generate", tiny_folder, "--prompts", "-", "--json", *GREEDY, stdin=row).rows
    first, second = answer["turns"]
    with LLM(tiny_folder) as llm:
        talk = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "12"},
        ]
        assert llm.chat(talk, temperature=0, max_tokens=8)[0].token_ids == second["token_ids"]
    assert answer["text"] == second["text"]


def test_a_bad_row_among_good_ones_is_told_and_the_rest_answered(
    outrider: Outrider, tiny_folder: Path, expected: dict[str, str]
) -> None:
    rows = "\n".join(json.dumps(row) for row in [{"turns": ["raise"]}, {"prompt": "hello"}, {"turns": []}])
    ran = outrider("generate", tiny_folder, "--prompts", "-", "--json", *GREEDY, stdin=rows)
    assert ran.code == 2
    assert "not this word" in ran.rows[0]["error"] and "not empty" in ran.rows[2]["error"]
    assert ran.rows[1]["text"] == expected["raw"]
    plain = outrider("generate", tiny_folder, "--prompts", "-", *GREEDY, stdin=rows)
    assert plain.out == f"[2]\n{expected['raw']}\n\n"
    assert plain.err.startswith("error: prompt 1: the chat template failed: not this word\n")


def test_stop_and_bias_flags_reach_the_request(outrider: Outrider, tiny_folder: Path) -> None:
    args = ("generate", tiny_folder, "hello", "--json", *GREEDY, "--logit-bias", "40=100", "--ignore-eos")
    [row] = outrider(*args).rows
    assert row["token_ids"] == [40] * 8
    [stopped] = outrider(*args, "--stop-token-id", 40).rows
    assert stopped["token_ids"] == [40] and stopped["finish_reason"] == "stop"
    [by_text] = outrider(*args, "--stop", row["text"][:2]).rows
    assert by_text["text"] == "" and by_text["finish_reason"] == "stop"
    [kept] = outrider(*args, "--stop", row["text"][:2], "--include-stop").rows
    assert kept["text"] == row["text"][:2]


def test_answers_are_shown_as_soon_as_those_before_them_are(tiny_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tiny_folder) as llm:
        exchanges = [Exchange(llm, row_id, params) for row_id in "ab"]
        exchanges[0].open(Row("a", prompt="hello"), None)
        exchanges[1].open(Row("b", turns=("hello", "12", "hello")), None)
        finished = exchange_all(exchanges, Show(as_json=True, stats=False, streams=False, headed=True))
        assert next(finished) is exchanges[0] and exchanges[1].turns  # b has more to say
        assert list(finished) == [exchanges[1]] and len(exchanges[1].answers) == 3


def test_guessing_changes_the_steps_and_not_the_text(outrider: Outrider, tiny_folder: Path) -> None:
    args = (
        "generate",
        tiny_folder,
        "hello",
        "--json",
        "--logit-bias",
        "40=100",
        "--ignore-eos",
        "--max-tokens",
        32,
    )
    [plain] = outrider(*args, "--speculate", "off").rows
    [guessed] = outrider(*args, "--draft", "lookup", "--speculate", "4").rows
    assert plain["token_ids"] == guessed["token_ids"]
    assert plain["stats"]["drafted"] == 0 and plain["stats"]["steps"] == 32
    assert guessed["stats"]["drafted"] > 0 and guessed["stats"]["steps"] < 32


def test_a_sentence_alone_is_the_prompt(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = outrider("generate", tiny_folder, "hello there", *GREEDY)
    monkeypatch.setenv("OUTRIDER_MODEL", str(tiny_folder))
    alone = outrider("generate", "hello there", *GREEDY)
    assert (alone.code, alone.out) == (0, told.out) and f"asking {tiny_folder}" in alone.err
    both = outrider("generate", "hello there", *GREEDY, stdin="and more\n")
    assert (both.code, both.out) == (2, "") and "'hello there' is no model" in both.err


def test_a_word_alone_is_told_how_to_be_a_prompt(outrider: Outrider, empty_cache: Path) -> None:
    ran = outrider("generate", "Hello")
    assert ran.code == 1 and "there is no model 'Hello'" in ran.err
    assert "to ask it: outrider generate smollm2-135m Hello" in ran.err
