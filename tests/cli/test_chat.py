"""`outrider chat` from a pipe: turns, commands, and a turn that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import LLM
from outrider.cli.chat import HELP, Talk
from outrider.cli.terminal import _line_editing
from tests.load.tiny import vocabulary

from .conftest import Outrider

GREEDY = ("--temperature", 0, "--max-tokens", 8)


def turns(tiny_folder: Path, *talk: str, system: str | None = None) -> list[str]:
    """What a conversation answers through the Python API."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    with LLM(tiny_folder) as llm:
        for line in talk:
            messages.append({"role": "user", "content": line})
            answers.append(llm.chat(messages, temperature=0, max_tokens=8)[0].text)
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_lines_are_turns(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, "--system", "S", *GREEDY, stdin="hello\n\n12\n")
    assert ran.code == 0
    assert ran.out == "".join(f"{text}\n" for text in turns(tiny_folder, "hello", "12", system="S"))


@pytest.mark.parametrize(("clear", "leave"), [("/clear", "/exit"), ("/reset", "/quit"), ("/clear", "/bye")])
def test_clear_forgets_and_exit_leaves(outrider: Outrider, tiny_folder: Path, clear: str, leave: str) -> None:
    ran = outrider("chat", tiny_folder, *GREEDY, stdin=f"hello\n{clear}\nhello\n{leave}\nhello\n")
    assert ran.out == 2 * (turns(tiny_folder, "hello")[0] + "\n")


def test_turns_of_several_lines(outrider: Outrider, tiny_folder: Path) -> None:
    blocks = '"""one\ntwo"""\n/clear\none\\\ntwo\n/clear\n"""\n/etc\n"""\n'
    ran = outrider("chat", tiny_folder, *GREEDY, stdin=blocks)
    [whole], [path] = turns(tiny_folder, "one\ntwo"), turns(tiny_folder, "/etc")
    assert ran.out.count(f"{whole}\n") == 2 and ran.err.count("there is no command") == 1
    assert path != whole  # a block of one line that looks like a command is one


def test_commands_change_what_comes_next(outrider: Outrider, tiny_folder: Path, tmp_path: Path) -> None:
    [free] = turns(tiny_folder, "hello")
    [told] = turns(tiny_folder, "hello", system="S")
    file = tmp_path / "talk.json"
    talk = f"hello\n/retry\n/system S\n/system\n/clear\nhello\n/save {file}\n/save {file}\n"
    ran = outrider("chat", tiny_folder, *GREEDY, stdin=talk)
    assert ran.out == f"{free}\n{free}\n{told}\n" and free != told
    assert "\nS\n" in ran.err and f"{file} cannot be written: File exists" in ran.err and ran.code == 2
    said = [("system", "S"), ("user", "hello"), ("assistant", told)]
    assert [(m["role"], m["content"]) for m in json.loads(file.read_text())["messages"]] == said
    [again] = outrider("generate", tiny_folder, "--prompts", file, "--json", *GREEDY).rows
    assert again["text"]  # what was saved can be asked


def test_set_changes_sampling_by_name(outrider: Outrider, tiny_folder: Path) -> None:
    [greedy] = turns(tiny_folder, "hello")
    talk = "/set temperature 0\nhello\n/set\n/set temprature 1\n/set top_p 7\n/set max-tokens=2\n/set seed\n"
    ran = outrider("chat", tiny_folder, "--temperature", 1, "--max-tokens", 8, stdin=talk)
    assert ran.out == f"{greedy}\n"
    assert "temperature=0.0" in ran.err and "did you mean 'temperature'?" in ran.err
    assert "top_p must be in" in ran.err and "/set seed needs a value" in ran.err and ran.code == 2


def test_commands_say_what_they_did(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, *GREEDY, stdin="/set top-p 0.5\n/system S\n/clear\n/?\n")
    assert (ran.code, ran.out) == (0, "")
    said = [
        "top_p = 0.5",
        "system prompt set",
        "conversation forgotten; the system prompt stays",
        *HELP.split("\n"),
    ]
    assert ran.err.splitlines()[-len(said) :] == said


def test_commands_pasted_together_are_commands(tiny_folder: Path) -> None:
    with LLM(tiny_folder) as llm:
        talk = Talk(llm, llm.default_params(), None, False)
        assert talk.parts("/show\n/stats\n\n /set seed 1") == ["/show", "/stats", "/set seed 1"]
        assert talk.parts("/stats\n/bye") == ["/stats", "/bye"]
        for text in ("/etc/hosts\n/usr/bin", "/stats\nand then?", "why?\n/stats", "one", "/etc"):
            assert talk.parts(text) == [text]


def test_answers_break_between_words_on_a_terminal(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = [f"--logit-bias={vocabulary().index(letter)}=100" for letter in ("x", "Ġ")]
    asked = (tiny_folder, "--temperature", 1, "--seed", 3, "--max-tokens", 80, *letters)
    whole = outrider("chat", *asked, stdin="hello\n").out
    assert whole.count("\n") == 1 and whole.count(" ") > 10 and set(whole) == set("x \n")
    monkeypatch.setattr("outrider.cli.output.terminal_width", lambda _: 12)
    for out in (
        outrider("chat", *asked, stdin="hello\n").out,
        outrider("generate", *asked, "--prompt", "hello").out,
    ):
        assert out.split() == whole.split() and out.count("\n") > 4
        assert all(len(line) <= 12 for line in out.split("\n"))


def test_show_marks_where_tokens_came_from(outrider: Outrider, tiny_folder: Path) -> None:
    text = "/show\n" + "12 " * 20 + "\n/show\n/stats\n"
    ran = outrider("chat", tiny_folder, "--temperature", 0, "--max-tokens", 32, "--ignore-eos", stdin=text)
    assert "accepted draft tokens []" in ran.err and "no longer marked" in ran.err and "figures" in ran.err
    assert outrider("chat", tiny_folder, *GREEDY, "--show", stdin="").err.count("accepted draft tokens") == 1


def test_history_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "chat-history"
    readline = pytest.importorskip("readline")
    with _line_editing(file):
        readline.add_history("what I typed")
    assert "what I typed" in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    with _line_editing(None):
        pass


def test_nothing_to_retry(outrider: Outrider, tiny_folder: Path) -> None:
    assert "nothing to answer anew" in outrider("chat", tiny_folder, *GREEDY, stdin="/retry\n").err


def test_a_refused_turn_is_forgotten(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, *GREEDY, stdin=f"raise\n{'x' * 500}\nhello\n")
    assert ran.out == turns(tiny_folder, "hello")[0] + "\n"
    told = [line for line in ran.err.splitlines() if line.startswith("error")]
    assert "not this word" in told[0] and "maximum context length" in told[1] and "/clear" in told[1]
    assert ran.code == 2


def test_help_stats_and_unknown_commands(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, *GREEDY, "--stats", stdin="/help\n/rest\nhello\n")
    assert "/quit" in ran.err and "did you mean '/reset'?" in ran.err and "tok/s" in ran.err


def test_an_answer_that_was_cut_is_marked(outrider: Outrider, tiny_folder: Path) -> None:
    assert (
        "cut at 3 tokens"
        in outrider("chat", tiny_folder, "--max-tokens", 3, "--ignore-eos", stdin="hello\n").err
    )


def test_one_answer_a_turn(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, "-n", 2, stdin="hello\n")
    assert (ran.code, ran.out) == (2, "") and "one answer a turn" in ran.err
