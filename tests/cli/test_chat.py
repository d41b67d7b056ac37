"""`outrider chat` from a pipe: turns, commands, and a turn that is refused."""

from __future__ import annotations

from pathlib import Path

from outrider import LLM

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


def test_reset_forgets_and_quit_leaves(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, *GREEDY, stdin="hello\n/reset\nhello\n/quit\nhello\n")
    assert ran.out == 2 * (turns(tiny_folder, "hello")[0] + "\n")


def test_a_refused_turn_is_forgotten(outrider: Outrider, tiny_folder: Path) -> None:
    ran = outrider("chat", tiny_folder, *GREEDY, stdin=f"raise\n{'x' * 500}\nhello\n")
    assert ran.out == turns(tiny_folder, "hello")[0] + "\n"
    told = [line for line in ran.err.splitlines() if line.startswith("error")]
    assert "not this word" in told[0] and "maximum context length" in told[1] and "/reset" in told[1]
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
