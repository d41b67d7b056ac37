"""Runs the blocks of documents: a real shell, whose commands are answered in this process by one loaded model.

On the shell's PATH every command the documents may use is a stand-in that hands its words, folder, variables and
standard input to this process and prints what comes back. `outrider` is the command itself, with a model that is
loaded once; `python` runs scripts the same way; `curl` really asks. What would install or build is checked by reading:
the extras, packages and targets it names must exist. A command nobody answers ends the block with an error.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.requirements import Requirement

from outrider import LLM, Settings
from outrider.bench.audit import same_distribution
from outrider.cli.main import run
from outrider.serve.keys import Keyring
from tests.test_structure import ROOT, check_make

MODEL = "smollm2-135m"
TOKENS = 8  # of an answer, at most
LONGEST = {
    "--max-tokens": TOKENS,
    "--limit": 1,
    "--tokens": 300,
    "--groups": 1,
    "--seconds": 1,
    "--requests": 4,
}  # what flags are cut down to
SECONDS = 90  # a block, at most
STAND_IN = """\
#!{python} -IS
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
asked = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
said = dict(words=asked, folder=os.getcwd(), env=dict(os.environ), stdin=sys.stdin.read())
link.sendall(json.dumps(said).encode())
link.shutdown(socket.SHUT_WR)
answer = json.loads(link.makefile().read())
sys.stderr.write(answer["err"])
sys.stdout.write(answer["out"])
sys.exit(answer["code"])
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str


@dataclass
class Shell:
    """`folder` is where blocks run, `tiny` the model that long commands have in the real one's place."""

    folder: Path
    tiny: Path
    llm: LLM
    served: list[Any] = field(default_factory=list)  # what `outrider serve` was told, one call each
    spaces: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: list[str] = field(default_factory=list)  # by each block of Python

    def __post_init__(self) -> None:
        self.answers: dict[str, Callable[[list[str], str], int]] = {
            "outrider": self._outrider, "python": self._python, "python3": self._python, "pip": check_pip,
            "make": lambda words, _: check_make(words) or 0, "curl": curl,
        }  # fmt: skip
        for name in ("examples", "deploy", "tests"):
            (self.folder / name).symlink_to(ROOT / name)
        bin_, self.link = self.folder / ".bin", Path(tempfile.mkdtemp()) / "link"  # its path must be short
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        (self.folder / ".venv" / "bin" / "activate").write_text("")
        bin_.mkdir()
        for name in self.answers:
            text = STAND_IN.format(python=sys.executable, path=str(self.link))
            (bin_ / name).write_text(text)
            (bin_ / name).chmod(0o755)

    def sh(self, block: str) -> Ended:
        """Runs a block; the first command that fails, also in a pipe, ends it."""
        path = f"{self.folder / '.bin'}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(self.folder), "OUTRIDER_MAX_TOKENS": str(TOKENS)}
        with (
            socket.socket(socket.AF_UNIX) as link,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            link.bind(str(self.link))
            link.listen()
            link.settimeout(0.02)
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip
            try:
                self._answer(link, process)
            finally:
                process.kill()
                process.wait()
                self.link.unlink()
            for stream in (out, err):
                stream.seek(0)
            return Ended(process.returncode, out.read(), err.read())

    def _answer(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + SECONDS
        while process.poll() is None:
            assert time.monotonic() < end, f"not done after {SECONDS} s"
            with contextlib.suppress(TimeoutError):
                asked, _ = link.accept()
                with asked, asked.makefile("rw") as words:
                    json.dump(self._call(**json.loads(words.read())), words)

    def _call(self, words: list[str], folder: str, env: dict[str, str], stdin: str) -> dict[str, Any]:
        """A command of the shell, here: its folder, variables and streams, its exit code."""
        out, err = io.StringIO(), io.StringIO()
        ours = {name: value for name, value in env.items() if name.startswith("OUTRIDER_")}
        places = [str(Path(folder, place)) for place in env.get("PYTHONPATH", "").split(":") if place]
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("sys.stdin", io.StringIO(stdin)),
            mock.patch.dict(os.environ, ours),
            importing_from(*places),
        ):
            try:
                code = self.answers[words[0]](words[1:], stdin)
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else int(left.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
        return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

    def python(self, block: str) -> str:
        """Runs a block of Python after those before it on the page; says what it printed."""
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.chdir(self.folder),
            importing_from(str(self.folder)),
            self._warm(),
        ):
            exec(compile(block, "<block>", "exec"), self.spaces)
        self.printed.append(out.getvalue())
        return out.getvalue()

    def notebook(self, file: Path) -> str:
        """Runs the cells of a notebook in an event loop, as notebooks do; says what they printed."""
        cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]

        async def run() -> None:
            for number, cell in enumerate(cells, 1):
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                made = eval(compile("".join(cell["source"]), f"<cell {number}>", "exec", flags), self.spaces)
                if inspect.isawaitable(made):
                    await made

        out = io.StringIO()
        with contextlib.redirect_stdout(out), self._warm():
            asyncio.run(run())
        return out.getvalue()

    def _python(self, words: list[str], _: str) -> int:
        if words[:2] == ["-m", "venv"]:
            return 0
        if words[:2] == ["-m", "pytest"]:
            check_pytest(words[2:])
            return 0
        assert words[0].endswith(".py"), f"python {words}: no script"
        with self._warm(), mock.patch("sys.argv", words):
            runpy.run_path(words[0], run_name="__main__")
        return 0

    def _outrider(self, words: list[str], _: str) -> int:
        words = shorter(words)
        if words[0] in ("bench", "audit", "advise"):
            words = [str(self.tiny) if word == MODEL else word for word in words]
        if words[0] == "bench" and "--prompts" in words and not {"serve", "--limit"} & {*words}:
            words += ["--limit", "1"]
        if words == ["demo"]:
            words.append(str(self.tiny))

        def stands_in(*told: Any) -> int:
            self.served.append(told)
            Keyring.of(told[1])  # the key file is there, and holds keys
            return 0

        few = partial(same_distribution, draws=128)
        with (
            self._warm(),
            mock.patch("outrider.bench.audit.same_distribution", lambda *asked, draws: few(*asked)),
            mock.patch("outrider.serve.server.run_server", stands_in),
            mock.patch("outrider.cli.bench.SECONDS", 0.0),  # one round
        ):
            run(words)

    @contextlib.contextmanager
    def _warm(self) -> Iterator[None]:
        """`LLM(...)` gives the model that is loaded already, where nothing else is asked for; answers are short."""
        for name in ("arrivals", "as_if", "audit", "speculation"):  # these name the class when they are read
            importlib.import_module(f"outrider.bench.{name}")
        request = LLM.request

        def opened(model: Any = MODEL, draft: Any = "auto", **options: Any) -> LLM:
            usual = draft in ("auto", "lookup") and options.get("settings", Settings()) == Settings()
            asked = {name for name, value in options.items() if value is not None}  # nobody watches it load
            if "smollm2-135m" in str(model).lower() and usual and asked <= {"settings"}:
                return self.llm
            return LLM(model, draft, **options)

        def short(llm: LLM, ids: Any, params: Any, *rest: Any, **named: Any) -> Any:
            return request(
                llm, ids, replace(params, max_tokens=min(params.max_tokens, TOKENS)), *rest, **named
            )

        with (
            mock.patch("outrider.engine.llm.LLM", opened),
            mock.patch.object(LLM, "request", short),
            mock.patch.object(self.llm, "close", lambda: None),
        ):
            yield


@contextlib.contextmanager
def importing_from(*folders: str) -> Iterator[None]:
    """For as long as this lasts; what was imported from there is forgotten."""
    before = set(sys.modules)
    with mock.patch("sys.path", [*folders, *sys.path]):
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if str(Path(getattr(sys.modules[name], "__file__", None) or "/").parent) in folders:
                    del sys.modules[name]


def shorter(words: list[str]) -> list[str]:
    """The same command with less to do; a million tokens are a few."""
    cut, before = [], ""
    for word in words:
        if before in LONGEST and word.isdecimal():
            cut.append(str(min(int(word), LONGEST[before])))
        else:
            cut += ["--tokens", "300"] if word == "--million" else [word]
        before = word
    return cut


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def packages() -> set[str]:
    """Every package that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {Requirement(line).name for some in lists for line in some} - {"outrider"}


def check_pip(words: list[str], _: str = "") -> int:
    """`pip install` of this folder with extras it has, or of packages that the project names."""
    assert words[0] == "install", words
    for word in words[1:]:
        if word in ("-e", "--quiet"):
            continue
        if word == "." or word.startswith(".["):
            asked = set(re.findall(r"[\w-]+", word[1:]))
            assert asked <= extras(), f"no extra {asked - extras()}"
        else:
            name = Requirement(word).name
            assert name in packages(), f"{word}: nothing of that name is published, or known here"
    return 0


def check_pytest(words: list[str]) -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    before = ""
    for word in words:
        if before == "-m":
            assert set(re.findall(r"\w+", word)) - {"not", "and", "or"} <= {
                m.partition(":")[0] for m in markers
            }
        elif before != "-k" and not word.startswith("-"):
            assert (ROOT / word.partition("::")[0]).exists(), word
        before = word


def curl(words: list[str], _: str) -> int:
    """The few flags of curl that documents use, its default content type included; an error status is a failure."""
    url, body, method, headers = "", None, None, {}
    rest = iter(words)
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(":")
            headers[name.strip()] = value.strip()
        elif word in ("-d", "--data"):
            body = next(rest).encode()
        elif word == "-X":
            method = next(rest)
        elif not word.startswith("-"):
            url = word
        else:
            assert re.fullmatch(r"-[sSN]+|--fail-with-body", word), f"curl {word}: add it to tests/shell.py"
    asked = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            sys.stdout.write(answer.read().decode())
    except urllib.error.HTTPError as refused:
        sys.stdout.write(refused.read().decode())
        return 22
    return 0
