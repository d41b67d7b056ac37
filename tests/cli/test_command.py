"""The installed command in a process of its own: how soon it answers, and how it is interrupted.

What it is interrupted in is an answer of the letter x that would take minutes, of a model that loads at once: nothing
here depends on who is quicker.
"""

from __future__ import annotations

import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import __version__
from tests.load.tiny import vocabulary
from tests.serve.conftest import write_tiny

OUTRIDER = str(Path(sys.executable).with_name("outrider"))
LONG = ("--max-tokens", "100000", "--temperature", "0", "--logit-bias", f"{vocabulary().index('x')}=100")
LONG += ("--speculate", "off", "--threads", "1")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that may write for as long as it likes."""
    folder = tmp_path_factory.mktemp("endless") / "tiny"
    write_tiny(folder, context=1 << 17)
    return folder


def cpu_seconds(*command: str) -> tuple[float, str]:
    """A core's time, which other work on the machine adds little to, and what was printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, printed


def test_help_costs_little_more_than_importing_what_prints_it() -> None:
    """Compared with an import on the same machine, as machines differ: 0.3 s on one, 0.6 s on another."""
    ours, imports = [], []
    for _ in range(5):
        seconds, help_text = cpu_seconds(OUTRIDER, "--help")
        ours.append(seconds)
        imports.append(cpu_seconds(sys.executable, "-c", "import typer")[0])
    assert all(command in help_text for command in ("generate", "chat", "models"))
    assert min(ours) < 6 * min(imports), (ours, imports)


def test_the_command_line_loads_nothing_heavy_before_it_must() -> None:
    heavy = {"torch", "numpy", "transformers", "huggingface_hub"}
    code = f"import sys, outrider.cli.main; print(*{heavy!r} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "\n"


def test_version_and_module() -> None:
    for command in ([OUTRIDER], [sys.executable, "-m", "outrider"]):
        out = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert out == f"outrider {__version__}\n"


def start(*args: object) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([OUTRIDER, *map(str, args)], **streams)  # type: ignore[call-overload,no-any-return]


def test_streams_until_ctrl_c(endless: Path) -> None:
    command = start("generate", endless, "Tell me a long story.", *LONG)
    assert command.stdout and command.stderr
    pieces = [os.read(command.stdout.fileno(), 4096).decode() for _ in range(2)]
    assert all(pieces)  # long before the end
    command.send_signal(signal.SIGINT)
    rest, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (130, b"")
    assert set("".join(pieces) + rest.decode()) == {"x"} and len(rest) < 90_000


def test_a_closed_pipe_ends_it_quietly(endless: Path) -> None:
    command = start("generate", endless, "Tell me a long story.", *LONG)
    assert command.stdout and command.stderr
    assert command.stdout.read(1)
    command.stdout.close()
    assert (command.wait(timeout=60), command.stderr.read()) == (141, b"")


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *args: object, columns: int = 0) -> None:
        self.fd, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        env = os.environ | {"TERM": "dumb", "NO_COLOR": "1"}
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.command = subprocess.Popen(
            [OUTRIDER, *map(str, args)], env=env, start_new_session=True, **streams
        )
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
def terminal(endless: Path) -> Iterator[Terminal]:
    opened = Terminal("chat", endless, "--no-history", *LONG)
    yield opened
    opened.command.kill()
    opened.command.wait()
    os.close(opened.fd)


def test_what_a_person_reads_fits_the_terminal(endless: Path) -> None:
    opened = Terminal("chat", endless, "--no-history", *LONG, columns=40)
    try:
        assert f"{endless}" in opened.wait_for("> ").replace("\r\n", "")  # what is talked to
        time.sleep(0.3)  # as above
        opened.type("/show\n/stats\n")  # pasted together: two commands, no question
        opened.wait_for("figures after each answer")
        opened.type("/?\n")
        told = opened.wait_for("line's end")
        lines = told.partition("/clear ")[2].replace("\r", "").split("\n")[1:]
        assert lines and all(len(line) <= 40 for line in lines)
        opened.type("/bye\n")
        assert opened.command.wait(timeout=60) == 0
    finally:
        opened.command.kill()
        opened.command.wait()
        os.close(opened.fd)


def test_ctrl_c_stops_the_turn_and_not_the_chat(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("Count from one to one thousand.\n")
    terminal.wait_for("\n")  # the echo
    terminal.wait_for("xx")  # the answer has begun
    terminal.interrupt()
    terminal.wait_for("> ")
    time.sleep(0.3)  # readline shows its prompt a moment before it listens
    terminal.interrupt()  # a fresh line, and a hint
    terminal.wait_for("Ctrl-C again leaves")
    terminal.wait_for("> ")
    terminal.type("/quit\n")
    assert terminal.command.wait(timeout=60) == 0


def test_what_is_typed_in_an_answer_is_dropped_and_what_is_pasted_is_one_turn(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.wait_for("> ")
    time.sleep(0.3)  # as above
    terminal.type("first line\nsecond line\n")  # at once, as a paste comes
    terminal.wait_for("xx")
    terminal.type("zzz\n")
    terminal.wait_for("xxxx")
    terminal.interrupt()
    assert "zzz" not in terminal.wait_for("> ")
    time.sleep(0.3)
    terminal.type(f"/save {tmp_path / 'talk.json'}\n")
    terminal.wait_for("saved to")
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["role"] for m in said] == ["user", "assistant"]
    assert said[0]["content"] == "first line\nsecond line" and set(said[1]["content"]) == {"x"}
    for answer in ("Ctrl-C again leaves", "\n"):
        terminal.wait_for("> ")
        time.sleep(0.3)
        terminal.interrupt()
        terminal.wait_for(answer)
    assert terminal.command.wait(timeout=60) == 0
