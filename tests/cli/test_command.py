"""The installed command in a process of its own: how soon it answers, and how it is interrupted."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, __version__

OUTRIDER = str(Path(sys.executable).with_name("outrider"))
LONG = ("--ignore-eos", "--max-tokens", "1500", "--temperature", "0")


def test_help_answers_within_half_a_second() -> None:
    spent = []
    for _ in range(5):  # the best of a few: other work on the machine is not the command's
        begin = time.perf_counter()
        help_text = subprocess.run([OUTRIDER, "--help"], capture_output=True, text=True, check=True).stdout
        spent.append(time.perf_counter() - begin)
    assert all(command in help_text for command in ("generate", "chat", "models"))
    assert min(spent) < 0.5, spent


@pytest.mark.parametrize("heavy", ["torch", "numpy", "transformers", "huggingface_hub"])
def test_the_command_line_loads_nothing_heavy_before_it_must(heavy: str) -> None:
    code = f"import sys, outrider.cli.main; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_version_and_module() -> None:
    for command in ([OUTRIDER], [sys.executable, "-m", "outrider"]):
        out = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert out == f"outrider {__version__}\n"


def start(*args: str) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([OUTRIDER, *args], **streams)  # type: ignore[call-overload,no-any-return]


@pytest.mark.model
def test_streams_until_ctrl_c(llm: LLM) -> None:
    command = start("generate", "smollm2-135m", "Tell me a long story.", *LONG)
    assert command.stdout and command.stderr
    first = os.read(command.stdout.fileno(), 4096).decode()
    time.sleep(0.5)
    more = os.read(command.stdout.fileno(), 4096).decode()
    assert first and more  # in pieces, long before the end
    command.send_signal(signal.SIGINT)
    rest, err = command.communicate(timeout=30)
    assert (command.returncode, err) == (130, b"")
    begun = first + more + rest.decode()
    ids = llm.chat_ids([{"role": "user", "content": "Tell me a long story."}])
    written = len(llm.tokenizer.encode(begun))
    assert llm.generate(ids, temperature=0, max_tokens=written + 2)[0].text.startswith(begun)


@pytest.mark.model
def test_a_closed_pipe_ends_it_quietly() -> None:
    command = start("generate", "smollm2-135m", "Tell me a long story.", *LONG)
    assert command.stdout and command.stderr
    assert command.stdout.read(1)
    command.stdout.close()
    begin = time.perf_counter()
    assert (command.wait(timeout=30), command.stderr.read()) == (141, b"")
    assert time.perf_counter() - begin < 10  # 1500 tokens would take longer


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.fd, theirs = pty.openpty()
        env = os.environ | {"TERM": "dumb", "NO_COLOR": "1"}
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.command = subprocess.Popen([OUTRIDER, *args], env=env, start_new_session=True, **streams)
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 60) -> str:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        self.command.send_signal(signal.SIGINT)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("chat", "smollm2-135m", *LONG)
    yield opened
    opened.command.kill()
    opened.command.wait()
    os.close(opened.fd)


@pytest.mark.model
def test_ctrl_c_stops_the_turn_and_not_the_chat(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("Count from one to one thousand.\n")
    terminal.wait_for("\n")  # the echo
    terminal.wait_for(" ")  # the answer has begun
    terminal.interrupt()
    terminal.wait_for("> ", seconds=20)
    time.sleep(0.3)  # readline shows its prompt a moment before it listens
    terminal.interrupt()  # a fresh line
    terminal.wait_for("> ")
    terminal.type("/quit\n")
    assert terminal.command.wait(timeout=20) == 0
